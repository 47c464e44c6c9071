"""What the token cache does for many users: a shared system prompt, more than it holds, memory, second level.

Token hit rates: tokens that were not encoded, of all tokens of the prompts. Not here: the next turn of one
chat (`inbound_turns.py`).
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Final, TypeVar

from benchmarks.inbound_chats import (
    NOW_S,
    QUESTION_TOKENS,
    KernelLink,
    Message,
    Shape,
    WayIn,
    Words,
    body_of,
    history,
    next_turn,
    user,
)
from benchmarks.report import Report
from filters.patterns import Patterns
from gateway.openai_schema import parse_chat
from gateway.shared_tokens import SharedTokens, create
from pipeline.model_text import ModelText
from pipeline.token_cache import TokenCache

SYSTEM_TOKENS: Final = 4000
NUM_IN_FLIGHT: Final = 100
ONE_OFF: Final = Shape("one_off", num_messages=6, message_tokens=500)
NO_BOUND: Final = 1 << 40
SHARED_BYTES: Final = 64 << 20
SEGMENT_TOKENS: Final = (50, 300, 4000)

Value = TypeVar("Value")


# -- a shared system prompt ----------------------------------------------------------------------------------


def report_shared_prompt(
    report: Report, text: ModelText, patterns: Patterns, words: Words, link: KernelLink, num_users: int
) -> None:
    """First turns of users who share a system prompt of 4k tokens; 100 prompts are always in flight."""
    rng = random.Random(5)
    way, encoding = WayIn(text, patterns, link), WayIn(text, patterns, link, 0)
    system = _system(words, SYSTEM_TOKENS, rng)
    bodies = [body_of([system, user(words.text(QUESTION_TOKENS, rng))]) for _ in range(num_users)]
    in_flight: deque[object] = deque(maxlen=NUM_IN_FLIGHT)
    first, others, slow, num_tokens = way.send(bodies[0]), [], [], 0
    saved = way.known.tokens_saved
    for index, body in enumerate(bodies[1:]):
        others.append(way.send(body))
        num_tokens += others[-1].num_tokens
        if index % 20 == 0:
            slow.append(encoding.send(body).wall_ns / 1e6)
    saved = way.known.tokens_saved - saved
    for body in bodies:
        in_flight.append(way.calls(body))
    report.add("shared_4k_first_user_ms", first.wall_ns / 1e6, "ms")
    report.add("shared_4k_next_user_ms", [cost.wall_ns / 1e6 for cost in others], "ms")
    report.add("shared_4k_encode_all_ms", slow, "ms")
    report.add("shared_4k_speedup", median(slow) / (median([cost.wall_ns for cost in others]) / 1e6), "x")
    report.add("shared_4k_token_hit_rate", saved / num_tokens)
    report.add("shared_4k_cache_mib", way.cache.num_bytes / (1 << 20), "MiB")
    report.add("shared_4k_buffers_mib", way.pool.peak_bytes / (1 << 20), f"MiB, {NUM_IN_FLIGHT} in flight")
    report.add("shared_4k_forks_per_user", way.pool.forks / num_users)
    report.add("shared_4k_copied_bytes_per_user", way.pool.copied_bytes / num_users, "bytes")


def _system(words: Words, num_tokens: int, rng: random.Random) -> Message:
    return {"role": "system", "content": words.text(num_tokens, rng)}


# -- more than the cache holds -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests in this order: (kind, body)."""

    requests: Sequence[tuple[str, bytes]]

    @classmethod
    def seeded(cls, words: Words, num_requests: int, seed: int = 6) -> Mix:
        """A fifth long prompts that never come again, half hot system prompts, the rest growing chats.

        What does come again is about twice as much as a quarter of everything.
        """
        rng = random.Random(seed)
        num_each = max(4, num_requests // 10)
        systems = [_system(words, 1500, rng) for _ in range(num_each)]
        chats = [[_system(words, 200, rng), user(words.text(400, rng))] for _ in range(num_each)]
        requests = []
        for _ in range(num_requests):
            draw = rng.random()
            if draw < 0.2:
                requests.append(("one_off", body_of(history(words, ONE_OFF, rng))))
            elif draw < 0.7:
                hot = systems[int(rng.expovariate(4 / num_each)) % num_each]
                question = user(words.text(QUESTION_TOKENS, rng))
                requests.append(("hot_system", body_of([hot, question])))
            else:
                index = rng.randrange(num_each)
                requests.append(("chat", body_of(chats[index])))
                chats[index] = next_turn(words, chats[index], ONE_OFF, rng)
        return cls(requests)


@dataclass(slots=True)
class MixResult:
    """Token hit rate per kind of request, and what all of them cost."""

    hit_rates: dict[str, float]
    wall_ms: float
    cpu_ms: float
    used_bytes: int
    evictions: int
    by_kind_ms: dict[str, float] = field(default_factory=dict)


def run_mix(way: WayIn, mix: Mix) -> MixResult:
    """All requests of a mix, one after the other."""
    saved: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    costs: dict[str, list[float]] = defaultdict(list)
    cpu_ms = 0.0
    for kind, body in mix.requests:
        before = way.known.tokens_saved
        cost = way.send(body)
        saved[kind] += way.known.tokens_saved - before
        tokens[kind] += cost.num_tokens
        costs[kind].append(cost.wall_ns / 1e6)
        cpu_ms += cost.process_ns / 1e6
    return MixResult(
        hit_rates={kind: saved[kind] / tokens[kind] for kind in tokens},
        wall_ms=sum(map(sum, costs.values())),
        cpu_ms=cpu_ms,
        used_bytes=way.cache.num_bytes,
        evictions=way.cache.evictions,
        by_kind_ms={kind: median(some) for kind, some in costs.items()},
    )


def report_eviction(
    report: Report, text: ModelText, patterns: Patterns, words: Words, link: KernelLink, num_requests: int
) -> None:
    """A cache of a quarter of what the requests hold, beside one that holds all, and none."""
    mix = Mix.seeded(words, num_requests)
    unbounded = run_mix(WayIn(text, patterns, link, NO_BOUND), mix)
    quarter = run_mix(WayIn(text, patterns, link, unbounded.used_bytes // 4), mix)
    none = run_mix(WayIn(text, patterns, link, 0), mix)
    report.add("eviction_working_set_mib", unbounded.used_bytes / (1 << 20), "MiB")
    report.add("eviction_quarter_evictions", quarter.evictions)
    for name, result in (("all", unbounded), ("quarter", quarter), ("none", none)):
        report.add(f"eviction_{name}_request_ms", result.wall_ms / num_requests, "ms")
        report.add(f"eviction_{name}_request_cpu_ms", result.cpu_ms / num_requests, "ms")
    for kind in sorted(quarter.hit_rates):
        report.add(f"eviction_all_{kind}_token_hit_rate", unbounded.hit_rates[kind])
        report.add(f"eviction_quarter_{kind}_token_hit_rate", quarter.hit_rates[kind])
        report.add(f"eviction_quarter_{kind}_ms", quarter.by_kind_ms[kind], "ms")
        report.add(f"eviction_none_{kind}_ms", none.by_kind_ms[kind], "ms")
    report.add("eviction_none_vs_quarter_cpu", none.cpu_ms / quarter.cpu_ms, "x")


# -- memory --------------------------------------------------------------------------------------------------


def report_memory(report: Report, text: ModelText, words: Mapping[str, Words], num_segments: int) -> None:
    """Bytes per cached token with segments of 300 tokens: as the cache counts them, and as Python does."""
    for language, some in words.items():
        rng = random.Random(8)
        bodies = [body_of([user(some.text(300, rng))]) for _ in range(num_segments)]
        counted, measured = _cache_bytes(text, bodies)
        report.add(f"cache_bytes_per_token_{language}", counted, "bytes")
        report.add(f"cache_measured_bytes_per_token_{language}", measured, "bytes")


def _cache_bytes(text: ModelText, bodies: Sequence[bytes]) -> tuple[float, float]:
    template = text.chat_template
    assert template is not None
    cache = TokenCache(NO_BOUND)
    known = cache.of(text.fingerprint)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for body in bodies:
        segments = template.render(parse_chat(body), NOW_S).segments
        for segment, ids in zip(segments, text.encoder.encode_segments(segments), strict=True):
            known.put(segment, ids)
    del segments, segment, ids
    measured = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    num_tokens = sum(entry.num_tokens for entry in known.entries.values())
    return cache.num_bytes / num_tokens, measured / num_tokens


# -- the second level ----------------------------------------------------------------------------------------


def report_second_level(report: Report, text: ModelText, words: Words, num_runs: int) -> None:
    """A segment from the memory that the processes of a machine share, beside encoding it."""
    rng = random.Random(9)
    fd = create(SHARED_BYTES)
    shared = SharedTokens(fd)
    encode, fingerprint = text.encoder.encode_segments, text.fingerprint
    for num_tokens in SEGMENT_TOKENS:
        segments = [_segment(text, words.text(num_tokens, rng)) for _ in range(num_runs)]
        missing = _each_us(segments, lambda segment: shared.get(fingerprint, segment))
        encoding = _each_us(segments, lambda segment: encode([segment]))
        pairs = [[pair] for pair in zip(segments, encode(segments), strict=True)]
        keeping = _each_us(pairs, lambda pair: shared.offer(fingerprint, pair))
        finding = _each_us(segments, lambda segment: shared.get(fingerprint, segment))
        name = f"second_level_{num_tokens}_tokens"
        report.add(f"{name}_get_us", finding, "us")
        report.add(f"{name}_miss_us", missing, "us")
        report.add(f"{name}_keep_us", keeping, "us")
        report.add(f"{name}_encode_us", encoding, "us")
        report.add(f"{name}_speedup", median(encoding) / median(finding), "x")
    if shared.misses != len(SEGMENT_TOKENS) * num_runs:
        raise RuntimeError("the second level has lost what it was given")
    shared.close()
    os.close(fd)


def _segment(text: ModelText, content: str) -> str:
    """A user's message as the template writes it, with the control string that it begins with."""
    assert text.chat_template is not None
    segments = text.chat_template.render(parse_chat(body_of([user(content)])), NOW_S).segments
    return max(segments, key=len)


def _each_us(values: Sequence[Value], work: Callable[[Value], object]) -> list[float]:
    """What each call takes."""
    times = []
    for value in values:
        start_ns = perf_counter_ns()
        work(value)
        times.append((perf_counter_ns() - start_ns) / 1e3)
    return times
