"""Hop 3, second half: the rules on what a client sends.

The parts of one message are scanned as the template joins them, and joined without anything between them, so
that a word cut into two parts is found whatever the template puts between parts, or an image. Every other
string that can reach the prompt is scanned by itself. Mask and redact rules change the text that the model
sees, not names that other fields refer to.

Texts that were scanned before are not scanned again (`seen_texts.py`): an old chat costs its new text, and is
rewritten the same every turn. A scan pauses between slices, for the caller to let others run.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping
from itertools import accumulate, groupby
from typing import Final

from filters.hit import Hit
from filters.patterns import Patterns
from filters.rules import REWRITES
from filters.scan import PIECE_CHARS, ScanResult, scan, scan_in_slices
from pipeline.conversation import PART_SEPARATOR, decoded_arguments
from pipeline.errors import ContentBlocked
from pipeline.leaves import Request, replaced, untrusted
from pipeline.seen_texts import SeenTexts
from pipeline.values import ChatRequest, CompletionRequest, Json

_KNOWN_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
# Other fields refer to these, and templates compare them: scanned, never rewritten.
_NAMES: Final = frozenset({"role", "type", "id", "tool_call_id", "name"})
# Scanning so much at once takes less than 2 ms, whatever the text, under rules of every kind. Under keywords
# alone `PIECE_CHARS` do.
_MAX_QUICK_CHARS: Final = 256
_SHORT_SCAN_CHARS: Final = 64  # a scan of nothing takes as long as one of so many characters


def scan_request(
    request: Request, rules: Patterns, separator: str = "", seen: SeenTexts | None = None
) -> Generator[None, None, tuple[Request, tuple[Hit, ...]]]:
    """A generator that pauses, and returns the request as the model may see it and what was found.

    `separator` is what the template puts between content parts; `seen`, if given, is the memory of these
    very rules. Offsets count within each text. Raises `ContentBlocked` with the rule's id at the first block.
    """
    texts = _texts_of(request, separator)
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    found = yield from _scan_all(texts, rules, param, seen)
    if not found:
        return request, ()
    rewriter = _Rewriter(found, separator)
    fields = {
        name: rewriter.messages(value) if name == "messages" else rewriter.value(value)
        for name, value in untrusted(request).items()
    }
    if not rewriter.has_rewritten:
        return request, tuple(rewriter.hits)
    return replaced(request, fields), tuple(rewriter.hits)


def scan_ids(
    text: str, rules: Patterns, param: str, seen: SeenTexts | None = None
) -> Generator[None, None, tuple[Hit, ...]]:
    """A generator that pauses, and returns what is found in the text of a prompt that came as token ids.

    Ids cannot be rewritten, so a mask or redact rule blocks here too. Raises `ContentBlocked`.
    """
    result = (yield from _scan_all([text], rules, param, seen)).get(text)
    if result is None:
        return ()
    if result.text != text:
        raise ContentBlocked(next(hit.rule_id for hit in result.hits if hit.action in REWRITES), param)
    return result.hits


def _scan_all(
    texts: Iterable[str], rules: Patterns, param: str, seen: SeenTexts | None
) -> Generator[None, None, dict[str, ScanResult]]:
    """The results of all texts in which something is found. Raises `ContentBlocked`."""
    found: dict[str, ScanResult] = {}
    if seen is not None and seen.rules is not rules:
        raise ValueError("these texts were scanned under other rules")
    max_chars = _MAX_QUICK_CHARS if rules.others or rules.pii else PIECE_CHARS
    num_chars = 0
    for text in texts if seen is None else seen.look_up(texts, found):
        if len(text) > max_chars:
            result = yield from scan_in_slices(text, rules)
        else:
            result = scan(text, rules)
            num_chars += len(text) + _SHORT_SCAN_CHARS
            if num_chars > 2 * max_chars:
                num_chars = 0
                yield
        if result.blocked_by is not None:
            raise ContentBlocked(result.blocked_by, param)
        if seen is not None:
            seen.add(text, result)
        if result.num_hits:
            found[text] = result
    return found


def _texts_of(request: ChatRequest | CompletionRequest, separator: str) -> dict[str, None]:
    """All texts that are scanned, each once."""
    texts: dict[str, None] = {}
    keys: set[str] = set()
    for name, value in untrusted(request).items():
        if name != "messages":
            _collect([value], texts, keys)
            continue
        stack = []
        for message in value:
            content = message.get("content")
            if isinstance(content, list):
                texts |= dict.fromkeys(_joined(content, _separator_of(message, separator)))
                message = {**message, "content": None}
            elif len(message) == 2 and isinstance(content, str) and message.get("role") in _KNOWN_ROLES:
                texts[content] = None  # as `_collect` would: most messages are like this
                keys.add("content")
                continue
            stack.append(message)
        _collect(stack, texts, keys)
    return texts | dict.fromkeys(sorted(keys - _NAMES))


def _collect(stack: list[Json], texts: dict[str, None], keys: set[str]) -> None:
    """Adds the strings within the values of `stack`, which is used up."""
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            keys.update(node)
            for key, child in node.items():
                if not isinstance(child, str):
                    stack.append(child)
                elif key in _NAMES:
                    if child not in _KNOWN_ROLES:
                        texts[child] = None
                elif key == "arguments" and (decoded := _decoded(child)) is not None:
                    stack.append(decoded)
                else:
                    texts[child] = None
        elif isinstance(node, str):
            texts[node] = None
        elif isinstance(node, list | tuple):
            stack += node


def _separator_of(message: Mapping[str, Json], separator: str) -> str:
    """Every template takes a tool's result as one string."""
    return PART_SEPARATOR if message.get("role") == "tool" else separator


def _joined(parts: list[Json], separator: str) -> list[str]:
    """The texts of content parts as one: as the template joins them, and with nothing in between.

    Images cut the parts into runs: each run is such a text, and all of them together.
    """
    runs = [list(map(_text_of, run)) for run in _runs(parts)]
    texts = [separator.join(run) for run in runs]
    if separator:
        texts += ["".join(run) for run in runs if len(run) > 1]
    if len(runs) > 1:
        texts.append("".join(map("".join, runs)))
    return texts


def _runs(parts: Iterable[Json]) -> list[list[Json]]:
    """The text parts that stand together, none of them empty but the only one."""
    runs = [list(run) for is_text, run in groupby(parts, _is_text) if is_text]
    return runs or [[]]


def _is_text(part: Mapping[str, Json]) -> bool:
    return "text" in part


def _text_of(part: Mapping[str, Json]) -> str:
    text: str = part["text"]
    return text


def _decoded(arguments: str) -> Json:
    """A tool call's arguments, if escapes may hide something in them: templates print what they stand for."""
    if "\\" not in arguments:
        return None
    decoded = decoded_arguments(arguments)
    return decoded if isinstance(decoded, dict | list) else None


def _is_between(borders: list[int], start: int, end: int) -> bool:
    """Whether one of the borders, which are in order, is behind `start` and before `end`."""
    index = bisect_right(borders, start)
    return index < len(borders) and borders[index] < end


class _Rewriter:
    """Walks over one request as `_texts_of` does, with what was found in its texts."""

    def __init__(self, found: Mapping[str, ScanResult], separator: str) -> None:
        self._found = found
        self._separator = separator
        self.hits: list[Hit] = []
        self.has_rewritten = False

    def messages(self, messages: Iterable[Mapping[str, Json]]) -> list[Json]:
        """A chat's messages."""
        return [
            {
                key: self._parts(child, _separator_of(message, self._separator))
                if key == "content" and isinstance(child, list)
                else self._field(key, child)
                for key, child in message.items()
            }
            for message in messages
        ]

    def value(self, value: Json) -> Json:
        """A value, rewritten where the rules say so."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {key: self._field(key, child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(child) for child in value]
        return value

    def _field(self, key: str, value: Json) -> Json:
        if key not in _NAMES:
            self._note(key)
        if not isinstance(value, str):
            return self.value(value)
        if key in _NAMES:
            if value not in _KNOWN_ROLES:
                self._note(value)
            return value
        if key == "arguments" and (decoded := _decoded(value)) is not None:
            rewritten = self.value(decoded)
            return value if rewritten == decoded else json.dumps(rewritten, ensure_ascii=False)
        return self._text(value)

    def _parts(self, parts: list[Json], separator: str) -> list[Json]:
        """Content parts, run by run. If something is found across images, the first text has all of it."""
        self._note("content")
        runs = _runs(parts)
        rewritten = [self._run(run, separator) for run in runs]
        across = None
        if len(runs) > 1:
            across = self._across(["".join(map(_text_of, run)) for run in runs])
        if across is not None:
            rewritten = [[{"type": "text", "text": across}], *([] for _ in runs[1:])]
        in_order = iter(rewritten)
        new: list[Json] = []
        for is_text, run in groupby(parts, _is_text):
            new += next(in_order) if is_text else run
        return new

    def _run(self, parts: list[Json], separator: str) -> list[Json]:
        """Text parts, scanned as one text. If a rule rewrites it, the first part has all of it."""
        texts = list(map(_text_of, parts))
        joined = separator.join(texts)
        text = self._text(joined)
        if separator and len(texts) > 1:
            text = self._across(texts) or text
        if text == joined:
            return parts
        return [{"type": "text", "text": text}, *(part for part in parts if not _text_of(part))]

    def _across(self, texts: list[str]) -> str | None:
        """Texts scanned with nothing between: the rewritten text if a hit crosses a border, else None."""
        num_hits, joined = len(self.hits), "".join(texts)
        rewritten = self._note(joined)
        borders = list(accumulate(map(len, texts)))[:-1]
        crossing = [hit for hit in self.hits[num_hits:] if _is_between(borders, hit.start, hit.end)]
        self.hits[num_hits:] = crossing  # the others are known already
        if not crossing or rewritten == joined:
            return None
        self.has_rewritten = True
        return rewritten

    def _text(self, text: str) -> str:
        rewritten = self._note(text)
        if rewritten != text:
            self.has_rewritten = True
        return rewritten

    def _note(self, text: str) -> str:
        """Note what was found in a text; returns the text as the rules leave it."""
        result = self._found.get(text)
        if result is None:
            return text
        self.hits += result.hits
        assert result.text is not None, "a blocked text ends the scan"
        return result.text
