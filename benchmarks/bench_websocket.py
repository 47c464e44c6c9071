"""What a token costs over /v1/realtime, beside plain SSE with the same prompts.

The scripted worker makes 50 tokens a second for each of 100 and of 400 answers. In turn, in one run: plain
SSE, one request each; and as many conversations over WebSocket, one response each. CPU time is the
scheduler's, of the gateway's process alone. The filter is off: it costs the same in both.

Then conversations that wait: what one takes in memory when it has had a turn of 300 tokens, and when it has
only been opened. At last conversations of ten turns with 300 new tokens each: what the gateway and its
client's clock say of the time to the first token in the first turn and in the last one, and how many tokens
were new to the gateway. Beside it a chat request with the history of that last turn and another question.

Verdict: a token over WebSocket costs 1.2 of one over SSE. A conversation that waits takes 41 kB, 23 of them
for its connection. The tenth turn's first token comes as soon as the first one's: 380 of its 3,750 tokens are
new. The loser is the idea that a conversation saves time: a chat request with the same history is as quick,
since the gateway knows that by heart too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import uvloop

from benchmarks.bench_streams import ENDLESS, HOST
from benchmarks.load import StreamClient, chat_request, open_stream
from benchmarks.processes import Measured, embedded_model, gateway, scratch, worker
from benchmarks.report import Report, open_report, parser, percentile
from benchmarks.websocket_load import WebSocketClient, open_conversation
from benchmarks.websocket_turns import (
    AT_ONCE,
    NUM_TOKENS,
    QUICK_MODEL,
    SETTLE_S,
    ended,
    idle,
    one_stream,
    turns,
)

STEP_MS: Final = 20.0
MODEL: Final = "scripted"
WARM_UP_S: Final = 1.0
# What a response without text and calls has beside its deltas, in the order that clients need.
KINDS: Final = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
]


@dataclass(slots=True)
class Window:
    """What one window of one way has shown."""

    us: float  # CPU microseconds of the gateway per delta
    gaps_ms: Sequence[float]


@dataclass(slots=True)
class Windows:
    """All windows of one way."""

    found: list[Window] = field(default_factory=list)

    @property
    def us(self) -> list[float]:
        return [window.us for window in self.found]

    def gaps_ms(self, share: float) -> list[float]:
        return [percentile(window.gaps_ms, share) for window in self.found]


# -- CPU per token -------------------------------------------------------------------------------------------


class Sse:
    """Plain streams, counted."""

    name = "sse"

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: list[StreamClient] = []

    async def open(self, index: int) -> None:
        asking = chat_request(MODEL, f"stream {index}", ENDLESS)
        self._clients.append(await open_stream(HOST, self._port, asking, keep_gaps=True))

    def begin_window(self) -> None:
        for client in self._clients:
            client.result.gaps_s.clear()

    @property
    def num_begun(self) -> int:
        return sum(client.result.first_s is not None for client in self._clients)

    @property
    def num_deltas(self) -> int:
        return sum(client.result.num_content for client in self._clients)

    def gaps_ms(self) -> list[float]:
        return [1e3 * gap_s for client in self._clients for gap_s in client.result.gaps_s]

    def close(self) -> None:
        """Raises `RuntimeError` if one has ended before."""
        for client in self._clients:
            if client.done.done():
                raise RuntimeError(f"a stream ended: {client.result.status} {client.result.error}")
            client.close()


class WebSockets:
    """Conversations in their first response, counted."""

    name = "websocket"

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: list[WebSocketClient] = []

    async def open(self, index: int) -> None:
        client = await open_conversation(HOST, self._port, MODEL)
        client.turn(f"stream {index}", max_output_tokens=ENDLESS)
        self._clients.append(client)

    def begin_window(self) -> None:
        for client in self._clients:
            client.gaps_s.clear()

    @property
    def num_begun(self) -> int:
        return sum(client.result.first_s is not None for client in self._clients)

    @property
    def num_deltas(self) -> int:
        return sum(client.result.num_deltas for client in self._clients)

    def gaps_ms(self) -> list[float]:
        return [1e3 * gap_s for client in self._clients for gap_s in client.gaps_s]

    def close(self) -> None:
        """Raises `RuntimeError` if one has ended before."""
        for client in self._clients:
            if client.error or client.result.response:
                raise RuntimeError(f"a response ended: {client.error} {client.result.response}")
            client.close()


Way = Sse | WebSockets


async def window(way: Way, served: Measured, num_answers: int, window_s: float) -> Window:
    """Open answers, let them settle, count deltas and CPU time; then all leave."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def opened(index: int) -> None:
        async with at_once:
            await way.open(index)

    await asyncio.gather(*(opened(index) for index in range(num_answers)))
    await _wait(lambda: way.num_begun == num_answers)
    await asyncio.sleep(WARM_UP_S)
    way.begin_window()
    num_deltas, cpu_s = way.num_deltas, served.cpu_s()
    await asyncio.sleep(window_s)
    num_deltas, cpu_s = way.num_deltas - num_deltas, served.cpu_s() - cpu_s
    gaps_ms = way.gaps_ms()
    way.close()
    await asyncio.sleep(SETTLE_S)
    return Window(cpu_s / num_deltas * 1e6, gaps_ms)


async def _wait(is_true: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = monotonic() + limit_s
    while not is_true():
        if monotonic() > deadline_s:
            raise TimeoutError("the answers did not start")
        await asyncio.sleep(0.02)


async def per_token(
    report: Report, served: Measured, num_answers: int, window_s: float, num_runs: int
) -> float:
    """CPU per token of both ways; the median of the ratios of each run."""
    found = {"sse": Windows(), "websocket": Windows()}
    for run in range(num_runs):
        ways: list[Way] = [Sse(served.port), WebSockets(served.port)]
        for way in ways if run % 2 == 0 else reversed(ways):  # whoever comes second has it warmer
            found[way.name].found.append(await window(way, served, num_answers, window_s))
    for name, windows in found.items():
        report.add(f"{name}_us_per_token_{num_answers}", windows.us, "us")
        report.add(f"{name}_gap_p50_ms_{num_answers}", windows.gaps_ms(0.5), "ms")
        report.add(f"{name}_gap_p99_ms_{num_answers}", windows.gaps_ms(0.99), "ms")
    pairs = zip(found["websocket"].us, found["sse"].us, strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    return report.add(f"websocket_vs_sse_{num_answers}", ratios, "x")


async def check(report: Report, port: int) -> None:
    """That nothing is missed: a delta and a frame for each token, and every other event in its place."""
    asked = {"model": QUICK_MODEL, "max_tokens": NUM_TOKENS}
    streamed = await one_stream(port, {**asked, "messages": [{"role": "user", "content": "check"}]})
    client = await open_conversation(HOST, port, QUICK_MODEL)
    turn = await ended(client, "check", max_output_tokens=NUM_TOKENS)
    client.close()
    num_tokens = turn.response["usage"]["output_tokens"]
    if not streamed.num_tokens == num_tokens == NUM_TOKENS:
        raise RuntimeError(f"{streamed.num_tokens} and {num_tokens} tokens of {NUM_TOKENS}")
    kinds = [kind for kind in turn.kinds if kind in KINDS][-len(KINDS) :]
    if kinds != KINDS:
        raise RuntimeError(f"these events came: {turn.kinds}")
    report.add("websocket_deltas_per_token", turn.num_deltas / NUM_TOKENS)
    report.add("sse_deltas_per_token", streamed.num_content / NUM_TOKENS)
    report.add("websocket_bytes_per_delta", turn.num_delta_bytes / turn.num_deltas, "bytes")


# -- all -----------------------------------------------------------------------------------------------------


async def measure(report: Report, served: Measured, arguments: argparse.Namespace) -> None:
    window_s, num_runs = (1.5, 2) if arguments.quick else (3.0, 7)
    num_idle, num_talks = (200, 5) if arguments.quick else (1000, 30)
    await check(report, served.port)
    # First: where many have been, memory comes from what they left.
    await idle(report, served, num_idle)
    ratio = await per_token(report, served, 100, window_s, num_runs)
    await per_token(report, served, 400, window_s, (num_runs + 1) // 2)
    await turns(report, served.port, num_talks)
    report.goal("websocket_vs_sse", ratio, 1.3, "x")


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_websocket", arguments)
    scripted = ("--scripted", "--tokenizer", str(embedded_model()), "--prefill-ms-per-1k", "0")
    steps = {MODEL: STEP_MS, QUICK_MODEL: 1.0}
    with scratch() as folder, ExitStack() as running:
        addresses = [
            running.enter_context(
                worker(folder, *scripted, "--step-ms", str(step_ms), "--served-model-name", name, name=name)
            )[1]
            for name, step_ms in steps.items()
        ]
        served = running.enter_context(gateway(folder, addresses, "--max-conversations", "2000"))
        uvloop.run(measure(report, served, arguments))
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
