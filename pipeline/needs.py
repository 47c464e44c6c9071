"""What a request on its way in needs from others: the values that `Inbound.prepare` yields.

The caller (`gateway/needs.py`) serves a need in its own way and sends the answer back in. Not here: the steps
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pipeline.values import MediaRef


class TextEncoder(Protocol):
    """What encodes texts, in any thread. `pipeline.encoding.Encoder` is one."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]: ...

    def encode_segments(self, segments: Sequence[str]) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class Pause:
    """Let others run, then go on. The answer is ignored."""


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode texts that are too long for the event loop. The answer: the packed ids of each.

    `add_special_tokens` None: the texts are segments of a rendered chat, for `encode_segments`.
    `fingerprint`: equal texts under an equal one have equal ids, now and in other processes; empty if that is
    not known.
    """

    encoder: TextEncoder
    texts: tuple[str, ...]
    add_special_tokens: bool | None
    fingerprint: str = ""

    def run(self) -> list[bytes]:
        """Serve it at once, in the calling thread."""
        if self.add_special_tokens is None:
            return self.encoder.encode_segments(self.texts)
        return self.encoder.encode_batch(self.texts, self.add_special_tokens)


@dataclass(frozen=True, slots=True)
class Compute:
    """Call a function that takes long, in another thread. The answer: what it returns. It may raise."""

    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """Every token buffer is in use: go on when one for so many tokens may be free. The answer is ignored."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class LoadMedia:
    """Load images and sounds, and hold them against the limits. The answer: a `Medium` for each, in order."""

    refs: tuple[MediaRef, ...]


Need = Pause | Encode | Compute | Wait | LoadMedia
Result = TypeVar("Result")
Steps = Generator[Need, Any, Result]


def pausing(work: Generator[None, None, Result]) -> Steps[Result]:
    """Work in slices whose pauses are needs."""
    while True:
        try:
            next(work)
        except StopIteration as finished:
            result: Result = finished.value
            return result
        yield Pause()


def served(steps: Steps[Result]) -> Result:
    """Run to the end with every need served at once, for start-up and tests.

    A `Wait` or a `LoadMedia` is a `RuntimeError`.
    """
    answer: Any = None
    while True:
        try:
            need = steps.send(answer)
        except StopIteration as done:
            result: Result = done.value
            return result
        if isinstance(need, Wait):
            raise RuntimeError(f"no token buffer is free for {need.num_tokens} tokens")
        if isinstance(need, LoadMedia):
            raise RuntimeError(f"nobody loads {len(need.refs)} media here")
        answer = need.run() if isinstance(need, Encode | Compute) else None
