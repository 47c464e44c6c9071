"""What every streaming filter promises, whatever it looks for. No behaviour here."""

from __future__ import annotations

from typing import Protocol

from filters.hit import Hit


class TextFilter(Protocol):
    """A streaming content filter: one state per choice and channel. `filters.stream.StreamFilter` is one."""

    held: int  # raw characters that wait for their fate now
    peak_held: int
    num_leaked: int  # raw characters that left undecided at a bound
    released: int  # raw characters of the input whose fate is settled
    hits: list[Hit]  # in order, shadow ones too; the owner may clear it
    is_active: bool  # some rule changes what leaves, rather than only reporting it
    blocked: bool  # a block rule matched: nothing more leaves
    blocked_by: str | None  # that rule's id

    @property
    def reported(self) -> int:
        """Raw characters before which every match that changes what leaves was among `hits`.

        At most `released`: what derives from those characters may leave.
        """

    def feed(self, text: str) -> str: ...

    def flush(self) -> str:
        """The text has ended: what can no longer be part of a match leaves."""

    def expire(self) -> str:
        """Text was held for too long: the policy blocks, or lets it go."""

    def pause(self) -> str:
        """What is held leaves as if the text ended here, but it may go on. Not counted as a leak.

        A match that began before and is completed later is still found, and rewritten from here on.
        """

    def abandon(self) -> str:
        """The text breaks off (the engine is lost): what only rules that fail open still hold leaves.

        Ends the text. `held` stays what no verdict was found for.
        """
