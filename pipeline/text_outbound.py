"""The last two hops for one choice of a server that gives text: fragments -> text that may leave, as events.

Both ways out share a surface (`any_outbound.py`), so that a choice is driven alike. The server has made the
text of the tokens, found the stop strings and split the channels. What is left are each channel's own stages
(`channel_text.py`): rules, the check of a JSON answer, escaping.

Not here: what servers send (`backend/upstream_openai.py`), which stages a request has (`outbound_plan.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.any_outbound import NOTHING, AnyOutbound
from pipeline.channels import Channels
from pipeline.events import CONTENT, REASONING, Event, Fragment, TextDelta
from pipeline.values import FinishReason

FINISH: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}


class TextOutbound(AnyOutbound):
    """The way out of text.

    `num_reasoning_tokens`: None as long as the server has given no reasoning; a guess where it counts none.
    """

    __slots__ = ("num_reasoning_tokens",)

    # The server's parser is not seen from here: nothing says that it keeps text back.
    waits_for_parser: Final = False
    num_reasoning_tokens: int | None

    def __init__(self, channels: Channels) -> None:
        super().__init__(channels)
        self.num_reasoning_tokens = None

    @property
    def is_new_hold(self) -> bool:
        return self._channels.active.is_new_hold

    def feed(self, fragments: Sequence[Fragment], num_tokens: int) -> Sequence[Event]:
        """What may leave now. `fragments` and `num_tokens` as in `pipeline.ports.TextSink.text`."""
        text = self.feed_text(fragments)
        if text is None:
            self._channels.add_fragments(fragments)
            if fragments and fragments[-1].channel == REASONING:
                self.num_reasoning_tokens = (self.num_reasoning_tokens or 0) + num_tokens
            self._end_if_over()
            return self._channels.take_events()
        if self.needs_look:
            return self.look(text)
        return (TextDelta(CONTENT, text),) if text else NOTHING

    def feed_text(self, fragments: Sequence[Fragment]) -> str | None:
        """The token path: the content that may leave now. What else follows is in `look`.

        None: nothing was fed, for these are not just more of the content. `feed` takes them.
        """
        assert self.finish is None, "fed after its end"
        content = self._content
        if len(fragments) != 1 or fragments[0].channel is not CONTENT or self._channels.active is not content:
            return None
        text = content.feed(fragments[0].text)
        self.needs_look = content.needs_look
        return text

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
