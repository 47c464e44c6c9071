"""One job of the scripted engine: what it will say, and what ends it. No timers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from backend.link import Extra
from backend.ports import Job, Key, Output
from backend.scripted_tokens import TokenTape

DEFAULT_MAX_TOKENS: Final = 16  # vLLM's own
_END: Final = -1  # where an answer ends and the tokenizer has no end-of-sequence token


class ScriptedStream:
    """A job on its way through the engine, waiting, prefilling or running.

    `prompt` is the job's with its media expanded. `answer` is what a script wants said, None for the seeded
    walk. `make` gives the next id of a stream that `is_plain`: past its first token, and nothing but its
    length can end it.
    """

    __slots__ = (
        "_eos_ids",
        "_filler",
        "_min_tokens",
        "_num_logprobs",
        "_stops",
        "_vocabulary_size",
        "_wants_plain",
        "arrived_s",
        "cached_tokens",
        "is_admitted",
        "is_ended",
        "is_plain",
        "job",
        "key",
        "left",
        "make",
        "num_made",
        "num_prompt",
        "prefill_ends_s",
        "prefill_s",
        "prompt",
        "started_s",
    )

    def __init__(
        self,
        key: Key,
        job: Job,
        prompt: bytes,
        tape: TokenTape,
        answer: Sequence[int] | None,
        eos_ids: frozenset[int],
        max_model_len: int,
        vocabulary_size: int,
    ) -> None:
        sampling = job.sampling
        self.key = key
        self.job = job
        self.prompt = prompt
        self.num_prompt = len(prompt) // 4
        self.left = min(
            int(sampling.get("max_tokens") or DEFAULT_MAX_TOKENS), max_model_len - self.num_prompt
        )
        self.num_made = 0
        self.cached_tokens = 0
        self.arrived_s = self.started_s = self.prefill_s = self.prefill_ends_s = 0.0
        self.is_admitted = self.is_ended = self.is_plain = False
        self._eos_ids = eos_ids
        self._vocabulary_size = vocabulary_size
        self._min_tokens = int(sampling.get("min_tokens") or 0)
        logprobs = sampling.get("logprobs")
        self._num_logprobs: int | None = None if logprobs is None else int(logprobs)
        ends: frozenset[int] = frozenset() if sampling.get("ignore_eos") else eos_ids | {_END}
        self._stops = ends.union(sampling.get("stop_token_ids") or ())
        self._filler = tape.walk(prompt, sampling.get("seed"))
        source: Iterator[int] = self._filler
        if answer is not None:
            source = itertools.chain(answer, (next(iter(eos_ids), _END),), self._filler)
        self.make = source.__next__
        self._wants_plain = answer is None and logprobs is None and self._stops.isdisjoint(tape.ids)

    def speak(self, now_s: float) -> Output:
        """The next token with all that can belong to it: stops, the first token's facts, logprobs."""
        token, finish, stop = self._next()
        ids = [] if token == _END else [token]
        self.num_made += len(ids)
        self.left -= len(ids)
        if finish is None and self.left <= 0:
            finish = "length"
        extra: Extra | None = None
        if not self.is_plain and self.num_made <= 1:
            extra = self._first(now_s)
            self.is_plain = self._wants_plain
        if self._num_logprobs is not None:
            extra = extra or Extra()
            extra.logprobs = [self._logprobs(made, self._num_logprobs) for made in ids]
        return Output(self.key, ids, finish, stop, extra)

    def _next(self) -> tuple[int, str | None, int | None]:
        token = self.make()
        if token not in self._stops:
            return (next(self._filler) if token == _END else token), None, None
        if self.num_made >= self._min_tokens:
            return token, "stop", None if token in self._eos_ids or token == _END else token
        # An engine masks what would end it too early: it says something else.
        return next(other for other in self._filler if other not in self._stops), None, None

    def _first(self, now_s: float) -> Extra:
        return Extra(
            cached_tokens=self.cached_tokens,
            queue_ms=(self.started_s - self.arrived_s) * 1e3,
            prefill_ms=(now_s - self.started_s) * 1e3,
            is_first=True,
            prompt_tokens=self.num_prompt if self.job.media else None,
        )

    def _logprobs(self, token: int, count: int) -> tuple[list[int], list[float], int]:
        """In vLLM's shape: the sampled token, then the `count` best ones, which begin with it."""
        ids = [token, *((token + rank) % self._vocabulary_size for rank in range(count))]
        return ids, [-0.125, *(-0.125 - rank for rank in range(count))], 1
