"""Hop 5: a rendered chat -> its segments' token ids, from the cache or newly encoded, and into a buffer.

Only what the cache does not hold is encoded: short texts at once, long ones as a need. Every new segment is
remembered, so the next turn of a chat costs its new text only. Where a tokenizer is not exact in segments,
the whole text is encoded, and nothing is remembered. Not here: rendering, and eviction (`token_cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from pipeline.encoding import BYTES_PER_ID, MAX_INLINE_CHARACTERS, OPENING
from pipeline.model_text import ModelText
from pipeline.needs import Encode, Steps, Wait
from pipeline.prefixes import Prefixes
from pipeline.rendering import Rendered
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import Entry, TokenCache


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of one prompt, still in the pieces in which they are remembered; `whole` if they are not."""

    entries: Sequence[Entry]
    whole: bytes = b""

    @property
    def num_tokens(self) -> int:
        return sum([entry.num_tokens for entry in self.entries]) + len(self.whole) // BYTES_PER_ID

    @property
    def ids(self) -> bytes:
        """A copy of all of them."""
        return b"".join(entry.ids for entry in self.entries) + self.whole


class TokenStore:
    """What all models of a process share: remembered segments, and buffers.

    `offer(fingerprint, [(segment, ids), …])` is told of segments that were encoded at once, for others.
    """

    def __init__(
        self,
        cache: TokenCache,
        pool: BufferPool,
        offer: Callable[[str, Sequence[tuple[str, bytes]]], None] = lambda fingerprint, pairs: None,
    ) -> None:
        self.offer = offer
        self.cache = cache
        self.pool = pool
        self.prefixes = Prefixes(pool)


class Tokenizing:
    """The tokenizing of one model's prompts. Lives on one thread, like the store."""

    def __init__(self, text: ModelText, store: TokenStore) -> None:
        self._text = text
        self._encoder = text.encoder
        self._store = store
        self._known = store.cache.of(text.fingerprint)

    def tokens(self, rendered: Rendered, *, pin: bool = False) -> Steps[Tokens]:
        """The ids of a rendered chat. Needs `Encode`.

        A control string that a segment's text spells is ordinary text. `pin`: the segments stay in the cache
        for good, as far as its share for those goes.
        """
        pieces = _pieces(rendered)
        if not self._text.is_segmentable:
            whole = _Whole(self._text, rendered)
            return Tokens((), (yield Encode(whole, (rendered.text,), None))[0])
        entries = self._known.get_all(pieces)
        new = dict.fromkeys([piece for piece, entry in zip(pieces, entries, strict=True) if entry is None])
        if new:
            added = yield from self._added(list(new))
            entries = [entry or added[piece] for piece, entry in zip(pieces, entries, strict=True)]
        found = cast(list[Entry], entries)
        for entry in found if pin else ():
            self._known.put(entry.segment, entry.ids, pinned=True)
        return Tokens(found)

    def learn(self, rendered: Rendered) -> Steps[None]:
        """Remember the segments. Needs `Encode`, for short texts too: nobody waits for them.

        No hit or miss is counted, for no prompt asks.
        """
        new = [piece for piece in dict.fromkeys(_pieces(rendered)) if piece not in self._known.entries]
        if new:
            found = yield Encode(self._encoder, tuple(new), None, self._text.fingerprint)
            for piece, ids in zip(new, found, strict=True):
                self._known.put(piece, ids)

    def _added(self, new: list[str]) -> Steps[dict[str, Entry]]:
        found = yield from self._encoded(new)
        return {piece: self._known.put(piece, ids) for piece, ids in zip(new, found, strict=True)}

    def _encoded(self, pieces: list[str]) -> Steps[list[bytes]]:
        if self._is_quick(pieces):
            found = [self._encoder.encode_segment(piece) for piece in pieces]
            self._store.offer(self._text.fingerprint, list(zip(pieces, found, strict=True)))
            return found
        ids: list[bytes] = yield Encode(self._encoder, tuple(pieces), None, self._text.fingerprint)
        return ids

    def _is_quick(self, pieces: list[str]) -> bool:
        if sum(map(len, pieces)) > MAX_INLINE_CHARACTERS:
            return False
        return self._encoder.is_ready_for_spelled or not any(map(self._encoder.spells_control, pieces))

    def raw(
        self, texts: Sequence[str], add_special_tokens: bool, means_controls: bool = True
    ) -> Steps[list[bytes]]:
        """The ids of prompts that no template has made.

        `means_controls`: control strings in them are control tokens; else they are ordinary text.
        """
        if not means_controls:
            before, after = self._encoder.surroundings if add_special_tokens else (b"", b"")
            inner = yield from self._encoded([OPENING + text for text in texts])
            return [before + ids + after for ids in inner]
        if sum(map(len, texts)) <= MAX_INLINE_CHARACTERS:
            return [self._encoder.encode(text, add_special_tokens) for text in texts]
        ids: list[bytes] = yield Encode(self._encoder, tuple(texts), add_special_tokens)
        return ids

    def in_buffer(self, tokens: Tokens) -> Steps[memoryview]:
        """The ids in a buffer that conversations share as far as they are the same. Needs `Wait`."""
        if not tokens.entries:
            return (yield from self.whole_in_buffers([tokens.whole]))[0]
        while True:
            view = self._store.prefixes.assemble(self._text.fingerprint, tokens.entries)
            if view is not None:
                return view
            yield Wait(tokens.num_tokens)

    def whole_in_buffers(self, prompts: Sequence[bytes]) -> Steps[list[memoryview]]:
        """Ids that nothing else shares, each prompt's in a buffer. Needs `Wait`.

        All or none: two requests that each kept a part of what both need would wait for each other. Raises
        `InvalidRequest` for more than all buffers can hold.
        """
        self._store.pool.check_fit_together(prompts)
        while True:
            views: list[memoryview] = []
            for ids in prompts:
                view = self._store.pool.whole(ids)
                if view is None:
                    break
                views.append(view)
            else:
                return views
            view = None
            views.clear()
            yield Wait(max(map(len, prompts)) // BYTES_PER_ID)


class _Whole:
    """Encodes one rendered chat in one piece."""

    def __init__(self, text: ModelText, rendered: Rendered) -> None:
        self._encoder = text.encoder
        self._rendered = rendered

    def encode_segments(self, segments: Sequence[str]) -> list[bytes]:
        return [self._encoder.encode_whole(self._rendered.opening, self._rendered.segments)]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        raise AssertionError("a rendered chat has its special tokens")


def _pieces(rendered: Rendered) -> list[str]:
    return [OPENING + rendered.opening, *rendered.segments] if rendered.opening else rendered.segments
