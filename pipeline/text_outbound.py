"""The last two hops for one choice of a server that gives text: fragments -> text that may leave, as events.

The same surface as `outbound.py`, so that a choice can be driven alike. The server has made the text of the
tokens, found the stop strings and split the channels. What is left are each channel's own stages
(`channel_text.py`): rules, the check of a JSON answer, escaping.

Not here: what servers send (`backend/upstream_openai.py`), which stages a request has (`outbound_plan.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from filters.hit import Hit
from pipeline.channels import Channels
from pipeline.errors import HeadraceError
from pipeline.events import CONTENT, REASONING, Event, Fragment, TextDelta
from pipeline.values import FinishReason

FINISH: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}
NOTHING: Final[tuple[Event, ...]] = ()


class TextOutbound:
    """Safe events of one choice, in order. `finish` is set when the choice has ended; then it refuses more.

    `ended_here` says that the end was decided here (a block): the server must be told to stop.
    `num_reasoning_tokens`: None as long as the server has given no reasoning; a guess where it counts none.
    """

    __slots__ = ("_channels", "_content", "ended_here", "finish", "num_reasoning_tokens")

    # The server's parser is not seen from here: nothing says that it keeps text back.
    waits_for_parser: Final = False

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._content = channels.content
        self.finish: FinishReason | None = None
        self.ended_here = False
        self.num_reasoning_tokens: int | None = None

    def feed(self, fragments: Sequence[Fragment], num_tokens: int) -> Sequence[Event]:
        """What may leave now. `fragments` and `num_tokens` as in `pipeline.ports.TextSink.text`."""
        assert self.finish is None, "fed after its end"
        channels, content = self._channels, self._content
        if len(fragments) == 1 and fragments[0].channel is CONTENT and channels.active is content:
            text = content.feed(fragments[0].text)  # the token path
            if not content.needs_look:
                return (TextDelta(CONTENT, text),) if text else NOTHING
            channels.add_content(text)
        else:
            channels.add_fragments(fragments)
            if fragments and fragments[-1].channel == REASONING:
                self.num_reasoning_tokens = (self.num_reasoning_tokens or 0) + num_tokens
        if channels.is_over:
            self._close("stop", None)
        return channels.take_events()

    def end(self, finish: str, stop: int | str | None = None) -> Sequence[Event]:
        """The server has ended the text: what was held, and the last event.

        `finish` in OpenAI's words; one that is not known is "stop": the text is whole as far as anyone says.
        """
        assert self.finish is None, "ended after its end"
        reason = FINISH.get(finish, "stop")
        if reason == "tool_calls" and not self._channels.num_calls:
            reason = "stop"  # a client would look for calls, and there are none
        self._close(reason, stop)
        self.ended_here = False
        return self._channels.take_events()

    def expire(self) -> Sequence[Event]:
        """Text was held for longer than its limit: what the filter's policy lets go now."""
        self._channels.expire()
        if self._channels.is_over:
            self._close("stop", None)
        return self._channels.take_events()

    def abandon(self) -> Sequence[Event]:
        """The server is lost: what only rules that fail open still held. Nothing more may come."""
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
    def num_held(self) -> int:
        """Raw characters that wait for the verdict of a filter now."""
        return self._channels.active.held

    @property
    def is_new_hold(self) -> bool:
        """The last feed began to hold, or what was held before it has all left."""
        return self._channels.active.is_new_hold

    @property
    def peak_held(self) -> int:
        """The most raw characters that a filter ever held."""
        return self._channels.peak_held

    @property
    def num_leaked(self) -> int:
        """Raw characters that filters let go undecided at one of their bounds."""
        return self._channels.num_leaked

    def _close(self, finish: FinishReason, stop: int | str | None) -> None:
        """The choice is over; nothing if it was before."""
        if self.finish is not None:
            return
        self.ended_here = True
        last = self._channels.end(finish, stop)
        self.finish = finish if last is None else last.reason
