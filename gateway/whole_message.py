"""All that one choice says, collected from its events, for answers that are not streamed.

How it is written is in `gateway/frames.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

from pipeline.events import CONTENT, PositionLogprobs, TextDelta, ToolCallDelta


@dataclass(slots=True)
class WholeCall:
    """A tool call, its arguments in pieces."""

    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class WholeMessage:
    """Texts in pieces. `logprobs`: None if no token had any."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[WholeCall] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None

    def add(self, event: TextDelta | ToolCallDelta) -> None:
        if isinstance(event, ToolCallDelta):
            if event.name is not None:
                self.calls.append(WholeCall(event.call_id or new_call_id(), event.name))
            assert event.call == len(self.calls) - 1, "a piece of a tool call out of order"
            self.calls[-1].arguments.append(event.arguments)
            return
        (self.content if event.channel == CONTENT else self.reasoning).append(event.text)
        if event.logprobs:
            self.logprobs = self.logprobs or []
            self.logprobs += event.logprobs

    @property
    def text(self) -> str:
        """The content, if it is all that the next turn will have of this message; else empty."""
        return "" if self.calls else "".join(self.content)


def new_call_id() -> str:
    """For a tool call whose format has no ids: OpenAI's are of this kind."""
    return f"call_{uuid4().hex[:24]}"
