"""What every peer is asked: many streams at once, requests one after another, and all that it can take.

A window opens a number of streams, lets them settle, and compares the peer's CPU time with the frames that
came meanwhile; then a few short requests ask for the time to the first token beside these streams. Not here:
which peers there are (`peers.py`), and what is made of the figures (`peer_table.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final

from benchmarks.load import StreamClient, StreamResult, open_stream
from benchmarks.peer_processes import ProcessTree, pin
from benchmarks.peers import Peer
from benchmarks.report import percentile
from benchmarks.texts import prompt

START_LIMIT_S: Final = 120.0
PROBE_EVERY_S: Final = 0.1
SATURATED: Final = 0.93  # of a core
_PROMPT_WORDS: Final = 40
_SHORT_TOKENS: Final = 30


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to look."""

    warm_up_s: float
    window_s: float
    num_probes: int


@dataclass(frozen=True, slots=True)
class Window:
    """What a number of streams cost. Times to the first token are what the peer adds, where that is known."""

    us_per_token: float
    tokens_per_s: float
    num_cores: float  # that it used
    frames_per_token: float  # 0 if unknown
    gaps_over_ms: Sequence[float]  # between two frames of a stream, less the step
    memory_bytes: int
    ttfts_ms: Sequence[float]
    others_us_per_token: float  # CPU of what feeds it


@dataclass(frozen=True, slots=True)
class Saturation:
    """The highest load that was reached."""

    num_streams: int
    tokens_per_s: float
    num_cores: float
    is_full: bool  # the peer was the bottleneck, and not what feeds it or reads from it

    @property
    def tokens_per_s_and_core(self) -> float:
        return self.tokens_per_s / self.num_cores


def chat(peer: Peer, text: str, num_tokens: int) -> bytes:
    """A streaming chat of fixed length as bytes on the wire."""
    options = {"include_usage": True, **({"include_timings": True} if peer.has_timings else {})}
    fields = {
        "model": peer.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "stream": True,
        "stream_options": options,
        **peer.fields,
    }
    body = json.dumps(fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def stream_window(peer: Peer, num_streams: int, plan: Plan, step_ms: float | None = None) -> Window:
    """`step_ms`: of an engine whose steps take what they take."""
    step_s = (step_ms or peer.step_ms(num_streams)) / 1e3
    if peer.upstream_port:
        await call(peer.upstream_port, f"/pace?step_ms={step_s * 1e3}", b"")
    open_s = num_streams * peer.open_s + plan.warm_up_s + plan.window_s + plan.num_probes * PROBE_EVERY_S
    if peer.upstream_port:
        open_s = 2 * START_LIMIT_S  # the upstream is told when to end
    clients = await open_streams(peer, num_streams, int(open_s / step_s) + 5)
    await asyncio.sleep(max(plan.warm_up_s, step_s))
    memory = peer.memory_bytes()
    start_s, cpu, others = monotonic(), peer.cpu_s(), _cpu_s(peer.others)
    frames, seen = _frames(clients), [len(client.result.gaps_s) for client in clients]
    await _wait(lambda: any(client.done.done() for client in clients), plan.window_s)
    cpu, others, frames = peer.cpu_s() - cpu, _cpu_s(peer.others) - others, _frames(clients) - frames
    window_s = monotonic() - start_s
    gaps = [gap for client, at in zip(clients, seen, strict=True) for gap in client.result.gaps_s[at:]]
    ttfts = await probe(peer, plan.num_probes)
    if peer.upstream_port:
        await call(peer.upstream_port, "/end", b"")
    return Window(
        us_per_token=cpu / max(frames, 1) * 1e6,
        tokens_per_s=frames / window_s,
        num_cores=cpu / window_s,
        frames_per_token=await _finish(peer, clients),
        gaps_over_ms=[(gap - step_s) * 1e3 for gap in gaps] or [0.0],
        memory_bytes=memory,
        ttfts_ms=ttfts,
        others_us_per_token=others / max(frames, 1) * 1e6,
    )


async def open_streams(peer: Peer, num_streams: int, num_tokens: int, first: int = 0) -> list[StreamClient]:
    """These streams, all of which have sent text."""
    clients = []
    for index in range(first, first + num_streams):
        request = chat(peer, prompt(_PROMPT_WORDS, index), num_tokens)
        clients.append(await open_stream("127.0.0.1", peer.port, request, keep_gaps=True))
    if not await _wait(
        lambda: all(c.result.first_s is not None or c.done.done() for c in clients), START_LIMIT_S
    ):
        num_silent = sum(client.result.first_s is None for client in clients)
        for client in clients:
            client.close()
        raise TimeoutError(
            f"{peer.label}: {num_silent} of {num_streams} streams did not start within {START_LIMIT_S:g} s"
        )
    for client in clients:
        if client.result.first_s is None:
            raise RuntimeError(f"{peer.label}: a stream failed: {client.result.status} {client.result.error}")
    return clients


async def probe(peer: Peer, num_probes: int) -> list[float]:
    """Short requests one after another; milliseconds to the first token of each."""
    results: list[StreamResult] = []
    for index in range(num_probes):
        start_s = monotonic()
        request = chat(peer, f"probe-{index} {prompt(_PROMPT_WORDS, 10_000 + index)}", 2)
        client = await open_stream("127.0.0.1", peer.port, request)
        results.append(await client.done)
        await asyncio.sleep(max(0.0, start_s + PROBE_EVERY_S - monotonic()))
    if not peer.upstream_port:
        return [added_ms(result) for result in results]
    times = json.loads(await call(peer.upstream_port, "/times"))
    pairs = [times[f"probe-{index}"] for index in range(num_probes) if f"probe-{index}" in times]
    if len(pairs) < num_probes:
        return []  # the prompt does not reach the upstream as text
    return [
        added_ms(result) - (sent_s - arrived_s) * 1e3
        for result, (arrived_s, sent_s) in zip(results, pairs, strict=True)
    ]


def added_ms(result: StreamResult) -> float:
    """The time to the first token, less what the engine says that it needed."""
    if result.first_s is None:
        raise RuntimeError(f"a request failed: {result.status} {result.error}")
    engine_ms = result.timings.get("queue_ms", 0.0) + result.timings.get("prefill_ms", 0.0)
    return (result.first_s - result.started_s) * 1e3 - engine_ms


async def per_request_ms(peer: Peer, num_requests: int) -> tuple[float, float]:
    """CPU milliseconds of a request with 30 tokens, and frames per token."""
    if peer.upstream_port:
        await call(peer.upstream_port, f"/pace?step_ms={peer.step_ms(1)}", b"")
    cpu, start_s = peer.cpu_s(), monotonic()
    clients: list[StreamClient] = []
    for index in range(num_requests):
        await asyncio.sleep(max(0.0, start_s + index / peer.requests_per_s - monotonic()))
        request = chat(peer, prompt(_PROMPT_WORDS, 20_000 + index), _SHORT_TOKENS)
        clients.append(await open_stream("127.0.0.1", peer.port, request))
    share = await _finish(peer, clients)
    return (peer.cpu_s() - cpu) / num_requests * 1e3, share


async def engine_step_ms(peer: Peer, num_streams: int, num_tokens: int = 24) -> float:
    """What a step of an engine takes with so many streams."""
    clients = await open_streams(peer, num_streams, num_tokens)
    await _finish(peer, clients)
    spans = [(c.result.ended_s or 0.0) - (c.result.first_s or 0.0) for c in clients]
    return percentile(spans, 0.5) / (num_tokens - 1) * 1e3


async def saturate(peer: Peer, first: int, step_ms: float, limit_s: float) -> Saturation:
    """Add streams until no more tokens come. Where there are two cores, the peer has one for itself."""
    if peer.upstream_port:
        await call(peer.upstream_port, f"/pace?step_ms={step_ms}", b"")
    clients: list[StreamClient] = []
    num_tokens, deadline_s, best = int((limit_s + 30) * 1e3 / step_ms), monotonic() + limit_s, None
    num_idle = 0  # times in a row that more streams brought no more tokens
    with _one_core_for(peer):
        while monotonic() < deadline_s and num_idle < 2:
            num_more = max(len(clients) // 4 if clients else first, 1)
            clients += await open_streams(peer, num_more, num_tokens, len(clients))
            await asyncio.sleep(0.5)
            now = await _load(peer, clients)
            is_more = best is None or now.tokens_per_s > best.tokens_per_s * 1.02
            num_idle = 0 if is_more else num_idle + 1
            best = now if is_more else best
    for client in clients:
        client.close()
    await asyncio.sleep(1.0)
    assert best is not None
    return best


async def _load(peer: Peer, clients: Sequence[StreamClient], span_s: float = 1.5) -> Saturation:
    """What these streams come to."""
    start_s, cpu, frames = monotonic(), peer.cpu_s(), _frames(clients)
    await asyncio.sleep(span_s)
    span_s = monotonic() - start_s
    num_cores = (peer.cpu_s() - cpu) / span_s
    return Saturation(len(clients), (_frames(clients) - frames) / span_s, num_cores, num_cores >= SATURATED)


@contextmanager
def _one_core_for(peer: Peer) -> Iterator[None]:
    """The peer on one core; its feeder and this process on the others."""
    cores = sorted(os.sched_getaffinity(0))
    own = ProcessTree(os.getpid())
    if len(cores) < 2:
        yield
        return
    for tree in (own, *peer.others):  # the peer is one of our children: it comes last
        pin(tree, set(cores[1:]))
    for tree in peer.trees:
        pin(tree, {cores[0]})
    try:
        yield
    finally:
        for tree in (own, *peer.others, *peer.trees):
            pin(tree, set(cores))


async def call(port: int, target: str, body: bytes | None = None) -> bytes:
    """A short request to the scripted upstream; a POST where there is a body."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{target}", data=body)

    def answer() -> bytes:
        with urllib.request.urlopen(request, timeout=20) as response:
            data: bytes = response.read()
            return data

    return await asyncio.to_thread(answer)


async def _finish(peer: Peer, clients: Sequence[StreamClient]) -> float:
    """Wait until all have ended well; frames per token."""
    results = await asyncio.gather(*(client.done for client in clients))
    for result in results:
        if not result.is_done or result.num_tokens is None:
            raise RuntimeError(f"{peer.label}: a stream did not end well: {result.status} {result.error}")
    return sum(result.num_content for result in results) / sum(result.num_tokens or 0 for result in results)


def _frames(clients: Sequence[StreamClient]) -> int:
    return sum(client.result.num_content for client in clients)


def _cpu_s(trees: Sequence[ProcessTree]) -> float:
    return sum(tree.cpu_s() for tree in trees)


async def _wait(is_true: Callable[[], bool], limit_s: float) -> bool:
    """Whether it became true within the limit."""
    deadline_s = monotonic() + limit_s
    while not is_true():
        if monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.02)
    return True
