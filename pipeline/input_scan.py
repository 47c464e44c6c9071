"""Hop 3, second half: the rules on what a client sends.

The parts of one message are scanned as they are, and joined without anything between them, so that a word
cut into two parts is found whatever the template puts between parts. Every other string that can reach the
prompt is scanned by itself. Mask and redact rules change the text that the model sees, not names that other
fields refer to.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Final

from filters.hit import Hit
from filters.patterns import Patterns
from filters.rules import REWRITES
from filters.scan import scan
from pipeline.errors import ContentBlocked
from pipeline.leaves import Request, replaced, untrusted
from pipeline.values import ChatRequest, Json

_KNOWN_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
# Other fields refer to these, and templates compare them: scanned, never rewritten.
_NAMES: Final = frozenset({"role", "type", "id", "tool_call_id", "name"})


def scan_request(request: Request, rules: Patterns, separator: str = "") -> tuple[Request, tuple[Hit, ...]]:
    """The request as the model may see it, and what was found, offsets counted within each text.

    `separator` is what the template puts between content parts. Raises `ContentBlocked` with the rule's id
    at the first block.
    """
    if not len(rules):
        return request, ()
    scanner = _RequestScanner(rules, separator, "messages" if isinstance(request, ChatRequest) else "prompt")
    fields = {name: scanner.value(value) for name, value in untrusted(request).items()}
    if not scanner.has_rewritten:
        return request, tuple(scanner.hits)
    return replaced(request, fields), tuple(scanner.hits)


def scan_ids(text: str, rules: Patterns, param: str) -> tuple[Hit, ...]:
    """What is found in the text of a prompt that came as token ids.

    Ids cannot be rewritten, so a mask or redact rule blocks here too. Raises `ContentBlocked`.
    """
    result = scan(text, rules)
    if result.blocked_by is not None:
        raise ContentBlocked(result.blocked_by, param)
    if result.text != text:
        raise ContentBlocked(next(hit.rule_id for hit in result.hits if hit.action in REWRITES), param)
    return result.hits


class _RequestScanner:
    """One request's scan."""

    def __init__(self, rules: Patterns, separator: str, param: str) -> None:
        self._rules = rules
        self._separator = separator
        self._param = param
        self.hits: list[Hit] = []
        self.has_rewritten = False

    def value(self, value: Json) -> Json:
        """A value, rewritten where the rules say so."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {key: self._field(key, child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(child) for child in value]
        return value

    def _field(self, key: str, value: Json) -> Json:
        if key == "content" and isinstance(value, list):
            return self._parts(value)
        if key not in _NAMES:
            self._found(key)
            return self.value(value)
        if isinstance(value, str) and value not in _KNOWN_ROLES:
            self._found(value)
        return value

    def _parts(self, parts: list[Json]) -> list[Json]:
        """Content parts, scanned as one text. If a rule rewrites it, the first text part has all of it."""
        texts = list(map(_text_of, parts))
        text = self._text(self._separator.join(texts))
        if self._separator and len(texts) > 1:
            text = self._across(texts) or text
        if text == self._separator.join(texts):
            return parts
        others = [part for part in parts if not _text_of(part)]
        return [{"type": "text", "text": text}, *others]

    def _across(self, texts: list[str]) -> str | None:
        """Texts scanned with nothing between: the rewritten text if a hit crosses a border, else None."""
        num_hits, joined = len(self.hits), "".join(texts)
        rewritten = self._text(joined)
        borders = list(accumulate(map(len, texts)))[:-1]
        crossing = [hit for hit in self.hits[num_hits:] if any(hit.start < at < hit.end for at in borders)]
        self.hits[num_hits:] = crossing  # the others are known already
        return rewritten if crossing and rewritten != joined else None

    def _text(self, text: str) -> str:
        rewritten = self._found(text)
        if rewritten != text:
            self.has_rewritten = True
        return rewritten

    def _found(self, text: str) -> str:
        """Scan a text and note its hits; returns the text as the rules leave it."""
        result = scan(text, self._rules)
        self.hits += result.hits
        if result.text is None:
            assert result.blocked_by is not None, "only a block leaves no text"
            raise ContentBlocked(result.blocked_by, self._param)
        return result.text


def _text_of(part: Json) -> str:
    """A content part's text, whichever key holds it; nothing for an image."""
    if isinstance(part, str):
        return part
    texts = (part.get(key) for key in ("text", "refusal", "thinking")) if isinstance(part, Mapping) else ()
    return next((text for text in texts if isinstance(text, str)), "")
