"""What the ways out of a choice have in common, whether they are fed with ids or with text.

Behind the channels all is alike: events are taken, what rules have found is told, and the end comes once.

Not here: how text gets into the channels (`outbound.py`, `text_outbound.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from filters.hit import Hit
from pipeline.channels import Channels
from pipeline.errors import HeadraceError
from pipeline.events import Event
from pipeline.values import FinishReason

NOTHING: Final[tuple[Event, ...]] = ()


class AnyOutbound(ABC):
    """Safe events of one choice, in order. `finish` is set when the choice has ended; then it refuses more.

    `ended_here` says that the end was decided here, as by a block: the engine must be told to stop.
    """

    __slots__ = ("_channels", "_content", "ended_here", "finish", "needs_look")

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._content = channels.content
        self.needs_look = False  # after `feed_text`: `look`
        self.finish: FinishReason | None = None
        self.ended_here = False

    def look(self, text: str = "") -> Sequence[Event]:
        """What follows from what the stages have found. `text`: content that came with it, and first."""
        self.needs_look = False
        self._channels.add_content(text)
        self._end_if_found()
        return self._channels.take_events()

    def _end_if_found(self) -> None:
        """What `look` ends the text for."""
        self._end_if_over()

    def expire(self) -> Sequence[Event]:
        """Text was held for longer than its limit: what the filter's policy lets go now."""
        self._channels.expire()
        self._end_if_over()
        return self._channels.take_events()

    def abandon(self) -> Sequence[Event]:
        """The engine is lost: what only rules that fail open still held. Nothing more may come."""
        self._channels.abandon()
        return self._channels.take_events()

    def take_hits(self) -> Sequence[tuple[str, Hit]]:
        """What rules have found since the last call, with the channel."""
        hits, self._channels.hits = self._channels.hits, []
        return hits

    @property
    def has_hits(self) -> bool:
        return bool(self._channels.hits)

    @property
    def failure(self) -> HeadraceError | None:
        """The choice ends with this error, and not with a `Finish`."""
        return self._channels.failure

    @property
    @abstractmethod
    def is_new_hold(self) -> bool:
        """The last feed began to hold, or what was held before it has all left."""

    @property
    def num_held(self) -> int:
        """Raw characters that wait for the verdict of a filter now."""
        return self._channels.active.held

    @property
    @abstractmethod
    def waits_for_parser(self) -> bool:
        """The parser keeps the last tokens: nothing of them has reached a filter that could decide by it."""

    @property
    def peak_held(self) -> int:
        """The most raw characters that a filter ever held."""
        return self._channels.peak_held

    @property
    def num_leaked(self) -> int:
        """Raw characters that filters let go undecided at one of their bounds."""
        return self._channels.num_leaked

    @property
    @abstractmethod
    def num_reasoning_tokens(self) -> int | None:
        """None where nothing tells reasoning from content."""

    def _end_if_over(self) -> None:
        """A block or a failure has ended the text."""
        if self._channels.is_over:
            self._close("stop", None)

    def _close(self, finish: FinishReason, stop_reason: int | str | None) -> None:
        """The choice is over; nothing if it was before."""
        if self.finish is not None:
            return
        self.ended_here = True
        last = self._channels.end(finish, stop_reason)
        self.finish = finish if last is None else last.reason
