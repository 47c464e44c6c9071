"""What a streaming filter holds and lets go, whatever finds the matches: the raw text from what was released
on, the verdicts, the bounds, the ends.

The held part begins where the earliest match begins that may still come or is not certain yet. A block ends
the text at the start of its match: what stands before leaves as it would at the end of the text.

Not here: reading text (`stream_filter.py` for keywords under the default folding, `combined.py` for all
rules).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from filters.hit import Hit
from filters.rules import MAX_HOLD_ID
from filters.settling import Found, Settling, StreamTrack
from filters.spans import Emitter

MAX_HOLD_CHARS: Final = 256

OnMaxHold = Literal["block", "release"]


@dataclass(frozen=True, slots=True)
class HoldPolicy:
    """`max_hold_chars`: raw characters that a stream may hold; `on_max_hold`: what happens to them past that.

    Raises `ValueError`.
    """

    max_hold_chars: int = MAX_HOLD_CHARS
    on_max_hold: OnMaxHold = "block"

    def __post_init__(self) -> None:
        if self.max_hold_chars < 1:
            raise ValueError(f"max_hold_chars is {self.max_hold_chars}; it must be at least 1")
        if self.on_max_hold not in ("block", "release"):
            raise ValueError(f"on_max_hold is {self.on_max_hold!r}; it must be 'block' or 'release'")


class HeldText:
    """One text, fed in pieces. With `feed`, which subclasses add, a `filters.text_filter.TextFilter`.

    After `flush` or `abandon`, `feed` raises `RuntimeError`; after a block it returns nothing. Offsets are
    raw characters from the start of the text.
    """

    __slots__ = (
        "_emitter",
        "_floor",
        "_is_closed",
        "_policy",
        "_settling",
        "_text",
        "_tracks",
        "blocked",
        "blocked_by",
        "held",
        "hits",
        "is_active",
        "num_leaked",
        "peak_held",
        "released",
    )

    def __init__(
        self, policy: HoldPolicy, is_active: bool, tracks: Sequence[StreamTrack], settling: Settling
    ) -> None:
        self._policy = policy
        self._tracks = tracks
        self._settling = settling
        self._text = ""  # what is held, raw
        self._emitter: Emitter | None = None  # while something is to be rewritten
        self._floor = 0  # what was released or cut by force up to here
        self._is_closed = False
        self.held = 0
        self.peak_held = 0
        self.released = 0
        self.hits: list[Hit] = []
        self.blocked = False
        self.blocked_by: str | None = None
        self.is_active = is_active  # some rule changes what leaves
        self.num_leaked = 0  # characters that left undecided: at a bound, or because rules fail open

    def flush(self) -> str:
        """The text has ended: nothing is under way any more."""
        if self._is_closed:
            return self._refuse()
        self._catch_up()
        self._is_closed = True
        self._finish()
        return self._release(self._floor if self.blocked else self.released + self.held)

    def expire(self) -> str:
        """Text has been held for too long: it is blocked or leaves, as the rules say."""
        if self._is_closed or not self.held:
            return ""
        self._catch_up()
        self._force()
        return self._release(self._floor)

    def pause(self) -> str:
        """What is held leaves as if the text ended here, but it may go on: not a leak.

        A match that began before and is complete later is still found, and rewritten from here on.
        """
        if self._is_closed or not self.held:
            return ""
        self._catch_up()
        self._finish()
        if not self.blocked:
            self._floor = self._num_read
        return self._release(self._floor)

    def abandon(self) -> str:
        """The text breaks off: what waits only for rules that fail open leaves, the rest stays undecided."""
        if self._is_closed:
            return ""
        self._catch_up()
        self._is_closed = True
        undecided, border = self._border(), self._border(closed_only=True)
        self._take(self._settling.break_off())
        if self.blocked:
            border = self._floor
        self.num_leaked += max(0, border - max(undecided, self.released))
        return self._release(border)

    @property
    def reported(self) -> int:
        """Raw characters before which every match that rewrites is among the `hits`: what derives from them
        may leave. A rewritten text may leave before its hit is told, which waits for its turn.
        """
        waiting = () if self.blocked else self._settling.verdicts.waiting
        return min([self.released, *(found.raw_start for found in waiting if found.rule.rewrites)])

    def _catch_up(self) -> None:
        """Before anything but `feed`: tracks that lag behind are told where the text is."""

    def _refuse(self) -> str:
        if not self.blocked:
            raise RuntimeError("the text has been flushed; a new text needs a new filter")
        return ""

    def _settle(self) -> None:
        """Acts on what has become certain."""
        if not self._settling.is_empty:
            self._take(self._settling.settle(self._tracks))

    def _take(self, taken: Sequence[Found]) -> None:
        settling = self._settling
        for found in taken:
            rule = found.rule
            self.hits.append(Hit(rule.id, rule.action, found.raw_start, found.raw_end, rule.shadow))
        for found in settling.written:
            start = max(found.raw_start, self._floor)
            if start < found.raw_end:
                if self._emitter is None:
                    self._emitter = Emitter(self.released)
                self._emitter.add(start, found.raw_end, found.rule, (found.track, found.number))
        settling.written.clear()
        if settling.verdicts.block is not None:
            self._block(settling.verdicts.block.rule.id, settling.verdicts.cut)

    def _block(self, rule_id: str, start: int) -> None:
        self.blocked = self._is_closed = True
        self.blocked_by = rule_id
        self._floor = max(self._floor, self.released, start)

    def _finish(self) -> None:
        """Decides everything as if the text ended here."""
        for track in self._tracks:
            track.finish()
        self._settle()

    def _force(self) -> None:
        """A bound is reached."""
        border, end = self._border(), self._num_read
        if self._policy.on_max_hold == "block":
            self.hits.append(Hit(MAX_HOLD_ID, "block", border, end))
            self._block(MAX_HOLD_ID, border)
            return
        self._finish()
        if not self.blocked:
            self.num_leaked += end - border
            self._floor = end

    @property
    def _num_read(self) -> int:
        """The length of the text so far."""
        return self.released + len(self._text)

    def _border(self, closed_only: bool = False) -> int:
        """Where the held part begins."""
        if closed_only:
            border = min([track.live_from_closed for track in self._tracks])
        else:
            border = min([track.live_from for track in self._tracks])
        if not self._settling.is_idle:
            border = self._settling.border(border, closed_only)
        return max(border, self._floor)

    def _release(self, border: int) -> str:
        """Lets the held text go up to `border`; after a block the rest is dropped."""
        cut = border - self.released
        if self._emitter is not None:
            out = self._emitter.release(self._text, border)
            if self._emitter.is_idle:
                self._emitter = None
        else:
            out = self._text[:cut]
        self._text = "" if self.blocked else self._text[cut:]
        self.released = border
        self.held = len(self._text)
        self.peak_held = max(self.peak_held, self.held)
        return out
