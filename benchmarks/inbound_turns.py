"""The next turn of a chat, from the parsed body to the bytes on the link, and the same with no token cache.

Every run has a chat of its own. The turn before it is sent first, by both ways in, and its answer is learned,
as the gateway does when it ends (`_not_learned`: without that). Then come the next turns of all chats, one
after the other, by the way with the cache, then by the other: a turn finds the tokens of its history in the
token cache, and its texts not in the CPU's.

Wall times of the calling thread, which with the cache does all itself. Without, the text is encoded by the
threads of `tokenizers` on all cores, which favours that side; `_cpu_` is CPU time of the whole process, where
it does not. `whole_text` is what Hugging Face's `apply_chat_template` does: render, and encode in one call on
one thread, with no scan, no checks and no link.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter_ns
from typing import Final

import uvloop

from benchmarks.inbound_chats import (
    NOW_S,
    SHAPES,
    Cost,
    KernelLink,
    Message,
    Shape,
    WayIn,
    Words,
    body_of,
    history,
    next_turn,
)
from benchmarks.report import Report
from filters.patterns import Patterns
from gateway.encoders import Encoders
from gateway.needs import NeedServer
from gateway.openai_schema import parse_chat
from pipeline.model_text import ModelText
from pipeline.needs import served

REASONING_TOKENS: Final = 200
STAGES: Final = ("validate", "scan", "render", "tokenize", "assemble", "link")


@dataclass(frozen=True, slots=True)
class Turns:
    """What next turns of chats of one shape cost, pair by pair; tokens encoded and bytes copied for each."""

    cached: Sequence[Cost]
    encoded: Sequence[Cost]
    new_tokens: float
    copied_bytes: float  # into buffers or from one to another, and into frames

    @property
    def num_tokens(self) -> float:
        return median(cost.num_tokens for cost in self.cached)


class Pair:
    """Two ways in for the same model and rules, that differ in the token cache only."""

    def __init__(self, text: ModelText, patterns: Patterns, link: KernelLink) -> None:
        self.text = text
        self.cached = WayIn(text, patterns, link)
        self.encoding = WayIn(text, patterns, link, max_cache_bytes=0)
        self.link = link
        self.learning_ms: list[float] = []  # of each answer, its request parsed anew

    def turns(self, words: Words, shape: Shape, num_runs: int, seed: int = 0, learns: bool = True) -> Turns:
        """The next turn of `num_runs` chats, each by both ways.

        `learns`: with the cache, the answer before was tokenized when it ended, as the gateway does.
        """
        bodies = self._begun(words, shape, num_runs, seed, learns)
        known, pool, uploads = self.cached.known, self.cached.pool, self.link.uploads
        gc.collect()
        num_saved = known.tokens_saved
        num_copied = pool.appended_bytes + pool.copied_bytes + uploads.copied_bytes
        cached = [self.cached.send(body) for body in bodies]
        num_copied = pool.appended_bytes + pool.copied_bytes + uploads.copied_bytes - num_copied
        new_tokens = sum(cost.num_tokens for cost in cached) - (known.tokens_saved - num_saved)
        encoded = [self.encoding.send(body) for body in bodies]
        return Turns(cached, encoded, new_tokens / num_runs, num_copied / num_runs)

    def _begun(
        self, words: Words, shape: Shape, num_runs: int, seed: int, learns: bool = True
    ) -> list[bytes]:
        """Chats up to the turn before; the bodies of the next."""
        rng = random.Random(seed)
        bodies = []
        for _ in range(num_runs):
            messages = history(words, shape, rng)
            for way in (self.cached, self.encoding):
                way.send(body_of(messages))
            after = next_turn(words, messages, shape, rng)
            if learns:
                self._learn(messages, after)
            bodies.append(body_of(after))
        return bodies

    def _learn(self, messages: Sequence[Message], after: Sequence[Message]) -> None:
        start_ns = perf_counter_ns()
        answer = after[len(messages)]["content"]
        request, way = parse_chat(body_of(messages)), self.cached
        served(way.inbound.learn(request, answer, NOW_S, way.rules))
        self.learning_ms.append((perf_counter_ns() - start_ns) / 1e6)

    def whole_text_ms(self, words: Words, shape: Shape, num_runs: int, seed: int) -> list[float]:
        """Render a next turn and encode it in one call."""
        template, tokenizer = self.text.chat_template, self.text.tokenizer
        assert template is not None
        times_ms = []
        for body in self._begun(words, shape, num_runs, seed):
            request = parse_chat(body)
            start_ns = perf_counter_ns()
            _ = tokenizer.encode(template.plain(request, NOW_S), add_special_tokens=False).ids
            times_ms.append((perf_counter_ns() - start_ns) / 1e6)
        return times_ms

    def served_turns_ms(self, words: Words, shape: Shape, num_runs: int, seed: int) -> list[float]:
        """The next turn as the gateway serves it: on its event loop, what is not short in other threads."""
        return uvloop.run(self._served_turns_ms(self._begun(words, shape, num_runs, seed)))

    async def _served_turns_ms(self, bodies: Sequence[bytes]) -> list[float]:
        encoders = Encoders()
        needs = NeedServer(encoders, self.cached.pool, wait_limit_s=1.0)
        times_ms = []
        for body in bodies:
            request = parse_chat(body)
            self.link.read()
            await asyncio.sleep(0)
            start_ns = perf_counter_ns()
            ready = await needs.serve(self.cached.inbound.prepare(request, NOW_S, self.cached.rules))
            for call in ready.calls:
                self.link.send(call)
            times_ms.append((perf_counter_ns() - start_ns) / 1e6)
            del ready, call
        encoders.close()
        return times_ms


def report_next_turns(
    report: Report,
    pair: Pair,
    words: Words,
    num_runs: int,
    shapes: Sequence[Shape] = SHAPES,
) -> None:
    """Chats of 1k, 12k and 100k tokens, without and with reasoning, and the goals."""
    pair.turns(words, shapes[0], 8, seed=1)  # warm-up
    for shape in shapes:
        runs = num_runs if shape.num_messages < 100 else max(3, num_runs // 4)
        _report_turns(report, shape.name, pair.turns(words, shape, runs))
        reasoning = replace(shape, reasoning_tokens=REASONING_TOKENS)
        _report_turns(report, f"{shape.name}_reasoning", pair.turns(words, reasoning, runs, seed=2))
    typical = next(shape for shape in shapes if shape.name == "12k")
    _report_turns(report, "12k_not_learned", pair.turns(words, typical, num_runs, seed=5, learns=False))
    report.add("learn_answer_ms", pair.learning_ms, "ms")
    on_loop = pair.served_turns_ms(words, typical, num_runs, seed=3)
    report.add("next_turn_12k_on_loop_ms", on_loop, "ms")
    whole = pair.whole_text_ms(words, typical, max(3, num_runs // 2), seed=4)
    report.add("whole_text_12k_ms", whole, "ms")
    report.add("whole_text_vs_next_turn_12k", median(whole) / report.metrics["next_turn_12k_ms"], "x")
    # Of CPU time: the side without a cache spreads its work over cores that a busy gateway has not got.
    report.goal("next_turn_12k_speedup", report.metrics["next_turn_12k_cpu_speedup"], 15, "x", at_most=False)
    report.goal("next_turn_12k_ms", report.metrics["next_turn_12k_ms"], 0.8, "ms")


def _report_turns(report: Report, name: str, turns: Turns) -> None:
    pairs = list(zip(turns.cached, turns.encoded, strict=True))
    report.add(f"prompt_{name}_tokens", turns.num_tokens, "tokens")
    for kind, costs in (("next_turn", turns.cached), ("encode_all", turns.encoded)):
        report.add(f"{kind}_{name}_ms", [cost.wall_ns / 1e6 for cost in costs], "ms")
        report.add(f"{kind}_{name}_cpu_ms", [cost.process_ns / 1e6 for cost in costs], "ms")
        report.add(f"{kind}_{name}_ns_per_token", [cost.wall_ns / cost.num_tokens for cost in costs], "ns")
    report.add(f"next_turn_{name}_wall_speedup", [slow.wall_ns / fast.wall_ns for fast, slow in pairs], "x")
    cpu = [slow.process_ns / fast.process_ns for fast, slow in pairs]
    report.add(f"next_turn_{name}_cpu_speedup", cpu, "x")
    report.add(f"next_turn_{name}_new_tokens", turns.new_tokens, "tokens")
    report.add(f"next_turn_{name}_copied_bytes_per_new_token", turns.copied_bytes / turns.new_tokens, "bytes")
    if name.startswith("12k"):
        stages = [dict(cost.stages_us()) for cost in turns.cached]
        for stage in STAGES:
            report.add(f"next_turn_{name}_{stage}_us", [each[stage] for each in stages], "us")
