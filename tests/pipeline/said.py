"""One choice's way out as tests look at it: what it has said so far, by channel."""

from __future__ import annotations

from collections.abc import Sequence

from filters.hit import Hit
from pipeline.errors import HeadraceError
from pipeline.events import CONTENT, REASONING, Event, Finish, PositionLogprobs, TextDelta, ToolCallDelta
from pipeline.outbound import Outbound
from pipeline.values import TokenLogprobs


class Said:
    """Feeds an `Outbound`, returns the content that leaves, and keeps the rest."""

    def __init__(self, outbound: Outbound) -> None:
        self.outbound = outbound
        self.events: list[Event] = []
        self.logprobs: list[PositionLogprobs] = []
        self.hits: list[Hit] = []
        self.last: Finish | None = None

    def feed(
        self,
        ids: list[int],
        finish: str | None = None,
        stop: int | str | None = None,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> str:
        return self._take(self.outbound.feed(ids, finish, stop, logprobs))

    def expire(self) -> str:
        return self._take(self.outbound.expire())

    def abandon(self) -> str:
        return self._take(self.outbound.abandon())

    def _take(self, events: Sequence[Event]) -> str:
        assert self.last is None or not events, "an event after the last"
        self.events += events
        self.hits += [hit for _, hit in self.outbound.take_hits()]
        content = ""
        for event in events:
            if isinstance(event, Finish):
                self.last = event
            elif isinstance(event, TextDelta) and event.channel == CONTENT:
                content += event.text
                self.logprobs += event.logprobs
        return content

    @property
    def finish(self) -> str | None:
        assert (self.last is not None) == (self.outbound.finish is not None and self.failure is None)
        assert self.last is None or self.last.reason == self.outbound.finish
        return self.outbound.finish

    @property
    def failure(self) -> HeadraceError | None:
        return self.outbound.failure

    @property
    def stop_reason(self) -> int | str | None:
        return None if self.last is None else self.last.stop_reason

    @property
    def ended_here(self) -> bool:
        return self.outbound.ended_here

    @property
    def num_held(self) -> int:
        return self.outbound.num_held

    @property
    def peak_held(self) -> int:
        return self.outbound.peak_held

    @property
    def num_leaked(self) -> int:
        return self.outbound.num_leaked

    @property
    def is_new_hold(self) -> bool:
        return self.outbound.is_new_hold

    @property
    def content(self) -> str:
        return self._text(CONTENT)

    @property
    def reasoning(self) -> str:
        return self._text(REASONING)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each tool call."""
        calls: list[tuple[str, str]] = []
        for event in self.events:
            if not isinstance(event, ToolCallDelta):
                continue
            if event.name is not None:
                assert event.call == len(calls), "calls are numbered in order"
                calls.append((event.name, ""))
            assert event.call == len(calls) - 1, "a piece of an earlier call"
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + event.arguments)
        return calls

    def _text(self, channel: str) -> str:
        events = [event for event in self.events if isinstance(event, TextDelta)]
        return "".join(event.text for event in events if event.channel == channel)
