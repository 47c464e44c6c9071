"""What an answer says, channel by channel, and whether a stream's frames come in the order that clients need.

A `Listener` takes the frames of one stream as they come and raises `AssertionError` at the first that is out
of place. What the frames must say is the tests' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.wire import Frame


@dataclass(slots=True)
class Call:
    """A tool call as far as it has come."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """One choice as far as it has come.

    `channels`: which came one after the other, of a stream. `end`: the object that ended it.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @property
    def finish(self) -> str | None:
        return None if self.end is None else self.end["finish_reason"]

    @property
    def texts(self) -> tuple[Any, ...]:
        """All but the ids of its calls, which are new for each answer."""
        assert self.end is not None
        calls = [(call.name, call.arguments) for call in self.calls]
        ending = {name: value for name, value in self.end.items() if name not in ("delta", "message")}
        return self.content, self.reasoning, calls, self.logprobs, ending | {"logprobs": None}


class Listener:
    """Of one stream: for each choice a role, deltas and a finish; then usage; then [DONE]. Nothing after it.

    Or an error frame at any place, and nothing after that.
    """

    def __init__(self, num_choices: int = 1) -> None:
        self.choices = [Said() for _ in range(num_choices)]
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.num_frames = 0
        self._num_opened = 0
        self._head: tuple[Any, ...] | None = None

    @property
    def said(self) -> Said:
        """Of a stream of one choice."""
        (said,) = self.choices
        return said

    def take(self, frame: Frame) -> None:
        """The next frame."""
        assert not self.is_done, f"something follows [DONE]: {frame.raw!r}"
        assert self.error is None, f"something follows an error: {frame.raw!r}"
        if frame.is_comment:
            return
        self.num_frames += 1
        if frame.is_done:
            assert all(said.finish for said in self.choices), "[DONE] before a choice has ended"
            self.is_done = True
            return
        data = frame.data
        if "error" in data:
            self.error = data["error"]
            return
        head = tuple(data[name] for name in ("id", "object", "created", "model"))
        assert head == (self._head or head), "another head in mid-stream"
        self._head = head
        assert self.usage is None, "something follows the usage"
        if data["choices"]:
            (choice,) = data["choices"]
            self._choice(choice)
        else:
            assert all(said.finish for said in self.choices), "usage before a choice has ended"
            self.usage = data["usage"]

    def take_all(self, frames: Iterable[Frame]) -> Listener:
        """Every frame of a stream; returns itself."""
        for frame in frames:
            self.take(frame)
        return self

    def _choice(self, choice: dict[str, Any]) -> None:
        said, delta = self.choices[choice["index"]], dict(choice["delta"])
        assert said.finish is None, "a delta after the finish"
        if "role" in delta:
            assert choice["index"] == self._num_opened, "a role out of order, or twice"
            assert delta == {"role": "assistant", "content": ""}
            self._num_opened += 1
            return
        assert self._num_opened == len(self.choices), "a delta before all roles"
        if choice["finish_reason"] is not None:
            assert delta == {}, "text in the frame of the finish"
            said.end = choice
            return
        assert delta, "a frame that says nothing"
        channel = next(iter(delta))
        if said.channels[-1:] != [channel]:
            said.channels.append(channel)
        said.content += delta.pop("content", "")
        reasoning = delta.pop("reasoning", "")
        assert delta.pop("reasoning_content", reasoning) == reasoning
        said.reasoning += reasoning
        for piece in delta.pop("tool_calls", ()):
            _add_piece(said.calls, piece)
        assert not delta, f"unknown fields in a delta: {delta}"
        if choice["logprobs"] is not None:
            said.logprobs += choice["logprobs"]["content"]


def _add_piece(calls: list[Call], piece: dict[str, Any]) -> None:
    """A fragment: the first of a call has id, type and name, and only the last call gets more."""
    function = piece["function"]
    if "id" not in piece:
        assert piece.keys() == {"index", "function"}, piece
        assert piece["index"] == len(calls) - 1, "a fragment of a call that is over, or has not begun"
        assert function.keys() == {"arguments"}, piece
    else:
        assert piece["index"] == len(calls), "a call out of order"
        assert piece["type"] == "function"
        assert piece["id"] not in [call.id for call in calls]
        calls.append(Call(piece["id"], function["name"]))
    calls[-1].arguments += function["arguments"]


def said_in(document: dict[str, Any]) -> list[Said]:
    """The choices of an answer that was not streamed."""
    return [_said(choice) for choice in document["choices"]]


def _said(choice: dict[str, Any]) -> Said:
    message = choice["message"]
    assert message["role"] == "assistant"
    calls = [
        Call(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
    content, reasoning = message["content"] or "", message.get("reasoning", "")
    return Said(content, reasoning, calls, logprobs, end=choice)


def strings_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value: strings, names, and the text of lists of bytes."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from strings_in(each)
    elif isinstance(value, list):
        if value and all(type(each) is int for each in value):
            yield bytes(value).decode(errors="replace")
        for each in value:
            yield from strings_in(each)


def assert_without(words: Sequence[str], raw: bytes, value: Any) -> None:
    """None of these words, in lower case, stands in the bytes of an answer or in any field of it."""
    for text in (raw.decode(errors="replace"), *strings_in(value)):
        lowered = text.lower()
        assert not any(word in lowered for word in words), raw
