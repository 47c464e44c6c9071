"""One choice's text, split into channels, and what leaves of them as events.

A parser, where there is one, says what is content, reasoning and tool calls. Each channel and each call has a
text of its own (`channel_text.py`). While one goes on the others pause: what they hold leaves, so that
nothing arrives long after its place.

Not here: ids, and stop strings (`outbound.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from filters.hit import Hit
from pipeline.answer_check import AnswerCheck
from pipeline.channel_text import ChannelText
from pipeline.errors import HeadraceError, InvalidAnswer
from pipeline.events import (
    CONTENT,
    REASONING,
    TOOL_ARGUMENTS,
    TOOL_NAME,
    Event,
    Finish,
    Fragment,
    TextDelta,
    ToolCallDelta,
)
from pipeline.logprob_queue import LogprobQueue
from pipeline.ports import OutputParser
from pipeline.values import FinishReason


class Channels:
    """Text in, events out. After a block or a failure, or the end, it takes no more.

    `active`: the channel that was fed last; only it holds text back. `failure`: the choice ends with this
    error, after the last events, and without a `Finish`.
    """

    __slots__ = (
        "_call",
        "_check",
        "_events",
        "_fails_on_problem",
        "_hides_reasoning",
        "_num_leaked",
        "_open_channel",
        "_parser",
        "_peak_held",
        "_queue",
        "_reasoning",
        "active",
        "blocked",
        "content",
        "failure",
        "hits",
        "num_calls",
        "num_kept",
        "num_reasoning_tokens",
    )

    def __init__(
        self,
        content: ChannelText,
        *,
        open_channel: Callable[[str], ChannelText] = ChannelText,
        parser: OutputParser | None = None,
        reads_reasoning: bool = False,
        include_reasoning: bool = True,
        queue: LogprobQueue | None = None,
        check: AnswerCheck | None = None,
        fails_on_problem: bool = True,
    ) -> None:
        self.content = self.active = content
        self._open_channel = open_channel
        self._parser = parser
        self._hides_reasoning = not include_reasoning
        self._queue = queue
        self._check = check
        self._fails_on_problem = fails_on_problem
        self._peak_held = self._num_leaked = 0  # of texts that are over
        self._reasoning: ChannelText | None = None
        self._call: ChannelText | None = None  # the arguments of the tool call that is under way
        self._events: list[Event] = []
        self.blocked = False
        self.failure: HeadraceError | None = None
        self.hits: list[tuple[str, Hit]] = []  # with their channel, in order; for the owner to take
        self.num_calls = 0  # tool calls that have begun
        self.num_reasoning_tokens = 0 if reads_reasoning else None
        self.num_kept = 0  # tokens that the parser has, and nothing of their text yet

    @property
    def has_parser(self) -> bool:
        """Whether it needs to know which ids made which text."""
        return self._parser is not None

    @property
    def is_over(self) -> bool:
        """Whether something in the text has ended it."""
        return self.blocked or self.failure is not None

    @property
    def peak_held(self) -> int:
        """The most raw characters that a filter ever held."""
        return max(self._peak_held, *(channel.peak_held for channel in self._all()))

    @property
    def num_leaked(self) -> int:
        """Raw characters that filters let go undecided at one of their bounds."""
        return self._num_leaked + sum(channel.num_leaked for channel in self._all())

    def feed(self, text: str, ids: Sequence[int]) -> None:
        """Whole characters and the ids that made them."""
        if self._parser is None:
            self._into(self.content, text)
            return
        before = self.active
        fragments = self._parser.feed(text, ids)
        for fragment in fragments:
            self._take(fragment)
            if self.is_over:
                return
        self._count(len(ids), before, has_text=bool(fragments))

    def end(self, finish: FinishReason, stop_reason: int | str | None) -> Finish | None:
        """The text has ended: what the channels still hold, and the last event; None for a failure."""
        if self._parser is not None and not self.is_over:
            for fragment in self._parser.finish():
                self._take(fragment)
                if self.is_over:
                    break
        for channel in self._all():
            # After a block: what it had let go before, and nothing that still waits elsewhere.
            self._add_text(channel, "" if self.blocked else channel.flush())
            self.look(channel)
        if self.blocked:
            finish, stop_reason, self.failure = "content_filter", None, None  # it began before what is wrong
        elif finish == "stop" and self.num_calls and not isinstance(stop_reason, str):
            finish = "tool_calls"  # a call that the client's own stop string cut is none to be made
        problem = None if self.blocked else self._problem(finish, stop_reason)
        if problem is not None:
            problem = self._through_rules(problem)
            if self._fails_on_problem:
                self.failure = InvalidAnswer(problem)
        if self.failure is not None:
            return None
        last = Finish(finish, stop_reason, problem)
        self._add(last)
        return last

    def expire(self) -> None:
        """Text was held for longer than its limit: what the filter's policy lets go now."""
        self._add_text(self.active, self.active.expire())
        self.look(self.active)

    def abandon(self) -> None:
        """The engine is lost: what only rules that fail open still held."""
        self._add_text(self.active, self.active.abandon())
        self.look(self.active)

    def add_fragments(self, fragments: Iterable[Fragment]) -> None:
        """Fragments that were made elsewhere, as far as nothing in them ends the text."""
        for fragment in fragments:
            self._take(fragment)
            if self.is_over:
                return

    def add_content(self, text: str) -> None:
        """Content that has been through its channel already."""
        self._add_text(self.content, text)
        self.look(self.content)

    def take_events(self) -> Sequence[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def look(self, channel: ChannelText) -> None:
        """Take over what a channel's stages have found."""
        if not channel.needs_look:
            return
        channel.needs_look = False
        self.hits += [(channel.channel, hit) for hit in channel.hits]
        channel.hits.clear()
        self.blocked = self.blocked or channel.blocked
        if channel.problem is not None and self._fails_on_problem and not self.blocked:
            self.failure = InvalidAnswer(self._through_rules(channel.problem))

    def _count(self, num_ids: int, before: ChannelText, has_text: bool) -> None:
        """Tokens that the parser keeps to itself are markup, unless the same reasoning goes on after them."""
        if not has_text:
            self.num_kept += num_ids
            return
        if self.active is self._reasoning and self.num_reasoning_tokens is not None:
            self.num_reasoning_tokens += num_ids + (self.num_kept if before is self._reasoning else 0)
        self.num_kept = 0

    def _take(self, fragment: Fragment) -> None:
        if fragment.channel == CONTENT:
            self._into(self.content, fragment.text)
            return
        if self._queue is not None:
            self._queue.skip()
        if fragment.channel == REASONING:
            if self._reasoning is None:
                self._reasoning = self._open_channel(REASONING)
            self._into(self._reasoning, fragment.text)
        elif fragment.channel == TOOL_NAME:
            self._begin_call(fragment)
        elif self._call is not None:
            self._into(self._call, fragment.text)

    def _begin_call(self, fragment: Fragment) -> None:
        """A name is a whole text. It leaves when the arguments of the call before have left."""
        name = self._open_channel(TOOL_NAME)
        self._switch(name)
        if self.is_over:
            return
        shown = name.feed(fragment.text) + name.flush()
        self.look(name)
        self._let_go(name)
        if not self.blocked:
            self._call = self.active = self._open_channel(TOOL_ARGUMENTS)
            call_id = fragment.call_id
            if call_id is not None and self._through_rules(call_id, TOOL_NAME) != call_id:
                call_id = None  # some models make it of the name; then it gets one of ours
            self._add(ToolCallDelta(self.num_calls, shown, "", call_id))
            self.num_calls += 1

    def _all(self) -> Iterator[ChannelText]:
        """The channels that may hold something, the one that began first first."""
        if self._reasoning is not None:
            yield self._reasoning
        yield self.content
        if self._call is not None:
            yield self._call

    def _let_go(self, channel: ChannelText) -> None:
        """An answer may have thousands of calls: of those that are over only these figures are kept."""
        self._peak_held = max(self._peak_held, channel.peak_held)
        self._num_leaked += channel.num_leaked

    def _into(self, channel: ChannelText, text: str) -> None:
        if channel is not self.active:
            self._switch(channel)
        self._add_text(channel, channel.feed(text))
        self.look(channel)

    def _switch(self, channel: ChannelText) -> None:
        """From now on `channel` is fed. The arguments of a call never go on; other channels may."""
        before, self.active = self.active, channel
        self._add_text(before, before.flush() if before is self._call else before.pause())
        self.look(before)
        if before is self._call:
            self._call = None
            self._let_go(before)

    def _add_text(self, channel: ChannelText, text: str) -> None:
        if channel is self.content:
            logprobs = () if self._queue is None else channel.logprobs()
            if text or logprobs:
                self._add(TextDelta(CONTENT, text, logprobs))
        elif not text:
            return
        elif channel is not self._reasoning:
            self._add(ToolCallDelta(self.num_calls - 1, None, text))
        elif not self._hides_reasoning:
            self._add(TextDelta(REASONING, text))

    def _add(self, event: Event) -> None:
        """As a part of the last event where that is of the same text, so that a step makes few."""
        last = self._events[-1] if self._events else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and last.channel == event.channel:
            logprobs = (*last.logprobs, *event.logprobs)
            self._events[-1] = TextDelta(event.channel, last.text + event.text, logprobs)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and event.name is None:
            self._events[-1] = last._replace(arguments=last.arguments + event.arguments)
        else:
            self._events.append(event)

    def _through_rules(self, text: str, name: str = CONTENT) -> str:
        """What may leave of a text that is about the answer, and may quote it."""
        channel = self._open_channel(name)
        return channel.feed(text) + channel.flush()

    def _problem(self, finish: FinishReason, stop_reason: int | str | None) -> str | None:
        """What is wrong with an answer that is whole: one that was cut short, or calls tools, need not be."""
        if self._check is None:
            return None
        if finish == "stop" and not isinstance(stop_reason, str):
            return self._check.finish()
        return self.content.problem
