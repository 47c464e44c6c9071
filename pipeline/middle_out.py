"""Cutting the middle out of one long text: which text, how much of it, and between which characters.

Not here: when that is done (`pipeline/context_policy.py`), and counting tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.values import Json

MARKER: Final = "\n[…]\n"  # where the cut is
# Each try encodes anew what is kept of the text. 2 to 4 do for prose and code.
MAX_TRIES: Final = 12
_MAX_INTERPOLATED: Final = 7  # then halving, which no text can mislead
_UNUSED_SHARE: Final = 256  # one part in so many of the room may stay unused: close enough to stop
# The longest run of marks that is kept whole. UAX 15's stream-safe format has at most 30; without a bound a
# text of a million marks would cost a million steps a try.
_MAX_MARKS: Final = 32
_ZWJ: Final = "\u200d"

Messages = Sequence[Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Text:
    """One text among the contents of messages. `part` None: it is the whole content."""

    message: int
    part: int | None
    text: str

    def replaced(self, messages: Messages, text: str) -> tuple[Mapping[str, Json], ...]:
        """The messages with another text in its place."""
        content: Json = text
        if self.part is not None:
            content = list(messages[self.message]["content"])
            content[self.part] = {**content[self.part], "text": text}
        changed = {**messages[self.message], "content": content}
        return (*messages[: self.message], changed, *messages[self.message + 1 :])


def longest_text(messages: Messages, spared_roles: Collection[str]) -> Text | None:
    """The longest text; one of the spared roles only if no other has any. None: there is no text at all."""
    spared: list[Text] = []
    others: list[Text] = []
    for text in _texts(messages):
        (spared if messages[text.message].get("role") in spared_roles else others).append(text)
    return max(others or spared, key=lambda text: len(text.text), default=None)


def _texts(messages: Messages) -> Iterator[Text]:
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and content:
            yield Text(index, None, content)
        elif isinstance(content, list | tuple):
            parts = ((number, part.get("text")) for number, part in enumerate(content))
            yield from (Text(index, number, text) for number, text in parts if isinstance(text, str) and text)


class Search:
    """For the most characters that fit, where only counting tells. Mutable; for one text.

    Goes by the tokens per character between the last two tries, within what is known to fit and not to fit;
    ends when almost all of the room is used.
    """

    __slots__ = ("_fits", "_last", "_num_tries", "_per_character", "_room", "_slack", "_too_long", "least")

    def __init__(self, length: int, num_tokens: int, room: int) -> None:
        self._room = room
        self._slack = room // _UNUSED_SHARE
        # Characters kept, tokens of the prompt:
        self._last = (length, num_tokens)
        self._fits: tuple[int, int] | None = None
        self._too_long = length
        self._per_character = num_tokens / length
        self._num_tries = 0
        self.least = num_tokens  # that was counted

    def guess(self) -> int | None:
        """How many characters to keep next; None: it can't get better, or not by much."""
        if self._num_tries == MAX_TRIES:
            return None
        kept, num_tokens = self._last
        excess = num_tokens - self._room + self._slack // 2
        guess = kept - round(excess / self._per_character)
        if self._fits is None:
            if self._too_long == 0:
                return None
            guess = max(0, min(guess, self._too_long - 1)) if self._num_tries < MAX_TRIES - 1 else 0
        else:
            shortest, num_fitting = self._fits
            if self._too_long - shortest <= 1 or self._room - num_fitting <= self._slack:
                return None
            if self._num_tries >= _MAX_INTERPOLATED or not shortest < guess < self._too_long:
                guess = (shortest + self._too_long) // 2
        self._num_tries += 1
        return guess

    def learn(self, num_kept: int, num_tokens: int) -> bool:
        """What a guess came to, in tokens of the prompt. Whether it fits."""
        (last_kept, last_tokens), self._last = self._last, (num_kept, num_tokens)
        slope = (num_tokens - last_tokens) / (num_kept - last_kept)
        if slope > 0:
            self._per_character = slope
        self.least = min(self.least, num_tokens)
        if num_tokens <= self._room:
            self._fits = (num_kept, num_tokens)
            return True
        self._too_long = num_kept
        return False


def cut_middle(text: str, num_kept: int) -> str:
    """At most so many characters of the text, equal shares of its head and its tail, and the marker between.

    No character is parted from its combining marks, nor what ZWJ joins, nor `\\r\\n`, nor a flag.
    """
    head, tail = (num_kept + 1) // 2, len(text) - num_kept // 2
    steps = range(_MAX_MARKS)
    end = next((head - step for step in steps if is_boundary(text, head - step)), head)
    start = next((tail + step for step in steps if is_boundary(text, tail + step)), tail)
    return text[:end] + MARKER + text[start:]


def is_boundary(text: str, index: int) -> bool:
    """Whether the text may be cut before the character at `index`."""
    if not 0 < index < len(text):
        return True
    before, after = text[index - 1], text[index]
    if before == _ZWJ or after == _ZWJ or (before == "\r" and after == "\n"):
        return False
    if after.isascii():
        return True
    if _is_flag_half(before) and _is_flag_half(after):
        return _num_flag_halves(text, index) % 2 == 0
    return not _extends(after)


def _extends(character: str) -> bool:
    """Marks, skin tones, tag characters, and the later letters of a Hangul syllable in parts."""
    return (
        unicodedata.category(character).startswith("M")
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or "\U000e0020" <= character <= "\U000e007f"
        or "\u1160" <= character <= "\u11ff"
    )


def _is_flag_half(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _num_flag_halves(text: str, end: int) -> int:
    """How many of them stand right before `end`, as far as one looks."""
    run = text[max(0, end - _MAX_MARKS) : end]
    return next((number for number, each in enumerate(reversed(run)) if not _is_flag_half(each)), len(run))
