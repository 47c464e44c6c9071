"""How the end-to-end tests ask, and how they name the end of an answer: by what a client can see of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.wire import Frame, Head, Wire, connect

CHAT: Final = "/v1/chat/completions"
MODEL: Final = "scripted"

COMPLETE: Final = "complete"  # all of it, and it says so: [DONE] after a finish_reason
FAILED: Final = "failed"  # an error frame ended the stream, without [DONE] and without a finish_reason
REFUSED: Final = "refused"  # an HTTP error
CUT: Final = "cut"  # the connection broke, or the body ended in the middle of its coding


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended. Any end that a client could take for another one is an `AssertionError`."""

    kind: str
    status: int = 0
    text: str = ""
    num_deltas: int = 0  # frames with text
    error: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None

    @property
    def code(self) -> str | None:
        """The error's code."""
        return self.error["code"] if self.error is not None else None


def chat(content: str = "Tell me a story.", max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    """A chat of one message whose answer has exactly `max_tokens` tokens."""
    return {
        "model": MODEL,
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": content}],
        **fields,
    }


async def ask(
    port: int,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    on_frame: Callable[[Frame], None] = lambda frame: None,
) -> Outcome:
    """One chat request on a connection of its own, to whatever end."""
    frames: list[Frame] = []

    def take(frame: Frame) -> None:
        frames.append(frame)
        on_frame(frame)

    try:
        async with connect(port) as wire:
            return await converse(wire, body, headers, take)
    except (ConnectionError, asyncio.IncompleteReadError):
        return Outcome(CUT, text=text_of(frames), num_deltas=len(deltas_of(frames)))


async def converse(
    wire: Wire,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    on_frame: Callable[[Frame], None] = lambda frame: None,
) -> Outcome:
    """One chat request on this connection. Raises what the connection raises."""
    head = await wire.post(CHAT, body, headers)
    if head.status != 200 or not body.get("stream"):
        return whole(head, await wire.body())
    frames = []
    while frame := await wire.frame():
        frames.append(frame)
        on_frame(frame)
    return streamed(frames)


def whole(head: Head, body: bytes) -> Outcome:
    """The outcome of a response that is one JSON document."""
    document = json.loads(body)
    if head.status != 200:
        assert set(document) == {"error"}, document
        return Outcome(REFUSED, head.status, error=document["error"])
    choice = document["choices"][0]
    assert choice["finish_reason"]
    return Outcome(COMPLETE, 200, choice["message"]["content"], usage=document["usage"])


def streamed(frames: Sequence[Frame]) -> Outcome:
    """The outcome of a stream of one choice whose body has ended properly."""
    data = [frame.data for frame in frames if not frame.is_comment and not frame.is_done]
    text, num_deltas = text_of(frames), len(deltas_of(frames))
    finishes = [choice["finish_reason"] for each in data for choice in each.get("choices", ())]
    errors = [each for each in data if "error" in each]
    assert frames, "an empty body: most clients take it for an empty answer"
    if errors:
        assert frames[-1].data is not None
        assert "error" in frames[-1].data, "something follows the error frame"
        assert not any(finishes), "a finish_reason and an error"
        assert not any(frame.is_done for frame in frames), "[DONE] and an error"
        return Outcome(FAILED, 200, text, num_deltas, errors[0]["error"])
    assert frames[-1].is_done, f"a tidy end that says nothing: {frames[-1].raw!r}"
    assert [finish for finish in finishes if finish] == finishes[-1:], finishes
    usage = next((each["usage"] for each in data if each.get("usage")), None)
    return Outcome(COMPLETE, 200, text, num_deltas, usage=usage)


def deltas_of(frames: Sequence[Frame]) -> list[str]:
    """The texts of a stream's frames, in order; frames without text are left out."""
    data = [frame.data for frame in frames if not frame.is_comment and not frame.is_done]
    choices = [choice for each in data for choice in each.get("choices", ())]
    texts = [choice["delta"].get("content") for choice in choices]
    return [text for text in texts if text]


def text_of(frames: Sequence[Frame]) -> str:
    return "".join(deltas_of(frames))
