"""Logprobs that wait for their text: an entry leaves when every character of its token has left unchanged.

A token's text comes out of the stages after it piece by piece, perhaps without some of it (markup that a
parser took, a control string). Its characters are followed by comparing: an entry is placed where exactly its
text went into the channel, and one of whose text a part is missing is dropped. So nothing here can tell a
character that the channel does not have.

Not here: deciding what leaves (`channel_text.py` asks its filter).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from pipeline.events import PositionLogprobs
from pipeline.values import TokenLogprobs

BROKEN: Final = "\ufffd"  # stands for a part of a character

TokenText = Callable[[int], str]
Completes = Callable[[str, str], bool]  # context, text: whether the text completes something denied


class LogprobQueue:
    """The entries of one choice's content. Offsets are raw characters of that channel.

    `completes`: withholds the alternatives that would complete a denied word; None where nothing is denied.
    `look_back`: characters before the held ones that a match may depend on. `num_held`: those that are held,
    for the owner to keep.
    """

    __slots__ = (
        "_completes",
        "_end",
        "_look_back",
        "_passed",
        "_placed",
        "_rewritten",
        "_tail",
        "_token_text",
        "_waiting",
        "num_held",
    )

    def __init__(self, token_text: TokenText, completes: Completes | None = None, look_back: int = 1) -> None:
        self._look_back = look_back
        self.num_held = 0
        self._token_text = token_text
        self._completes = completes
        self._waiting: deque[tuple[Sequence[int], str, Sequence[TokenLogprobs]]] = deque()
        self._placed: deque[PositionLogprobs] = deque()
        self._passed = ""  # went into the channel, and belongs to no placed token
        self._end = 0  # characters of the channel before `_passed`
        self._tail = ""  # the last of them
        self._rewritten: list[tuple[int, int]] = []

    def add(self, ids: Sequence[int], text: str, entries: Sequence[TokenLogprobs]) -> None:
        """Tokens that make this text together: mostly one, several for a character in pieces."""
        if self._completes is not None:
            is_whole = len(ids) == 1
            entries = [self._without_denied(entry, is_whole) for entry in entries]
        self._waiting.append((ids, text, entries))

    def skip(self) -> None:
        """The text of the last tokens went elsewhere."""
        self._waiting.clear()

    def passed(self, text: str) -> None:
        """This text has gone into the channel, right behind what went before."""
        self._passed += text
        self._place()

    def rewritten(self, start: int, end: int) -> None:
        """These characters do not leave as they are."""
        if self._waiting or self._placed or self._passed:
            self._rewritten.append((start, end))

    def released(self, num_characters: int | None) -> list[PositionLogprobs]:
        """The entries of tokens whose characters are all among the first `num_characters` of the channel.

        None: of all that has passed.
        """
        self._place()
        limit = self._end if num_characters is None else num_characters
        placed, free = self._placed, []
        while placed and placed[0].end <= limit:
            entry = placed.popleft()
            if not any(start < entry.end and entry.start < end for start, end in self._rewritten):
                free.append(entry)
        if not placed and not self._waiting:
            self._rewritten = [(start, end) for start, end in self._rewritten if end > limit]
        return free

    def _place(self) -> None:
        while self._waiting:
            ids, text, entries = self._waiting[0]
            if self._passed.startswith(text):
                self._waiting.popleft()
                start, end = self._end, self._end + len(text)
                self._placed += [
                    PositionLogprobs(token_id, start, end, entry)
                    for token_id, entry in zip(ids, entries, strict=True)
                ]
                self._advance(len(text))
            elif text.startswith(self._passed):
                return  # more of it may come
            else:
                self._waiting.popleft()  # a part of its text is missing
                self._advance(_num_common(text, self._passed))
        self._advance(len(self._passed))

    def _advance(self, num_characters: int) -> None:
        if self._completes is not None:
            self._tail = (self._tail + self._passed[:num_characters])[-self.num_held - self._look_back :]
        self._passed = self._passed[num_characters:]
        self._end += num_characters

    def _without_denied(self, entry: TokenLogprobs, is_whole: bool) -> TokenLogprobs:
        """Without the alternatives that, in the place of this token, would complete a denied word.

        What a part of a character would complete cannot be told: none is let through, and none in the place
        of a token that is such a part.
        """
        ids = entry.token_ids
        if len(ids) == 1 or self._completes is None:
            return entry
        context = self._tail + self._passed + "".join(text for _, text, _ in self._waiting)
        kept = [
            place
            for place, token_id in enumerate(ids)
            if token_id == ids[0] or (is_whole and self._is_harmless(context, token_id))
        ]
        if len(kept) == len(ids):
            return entry
        return TokenLogprobs([ids[i] for i in kept], [entry.logprobs[i] for i in kept], entry.rank)

    def _is_harmless(self, context: str, token_id: int) -> bool:
        text = self._token_text(token_id)
        assert self._completes is not None
        return BROKEN not in text and not self._completes(context, text)


def _num_common(first: str, second: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
