"""TTFT and throughput of the real engine: through Headrace, and straight to vLLM's own API server.

Embedded model on the CPU, chats of the same lengths, four at a time. Three ways, one engine at a time since
two would share the cores: vLLM's server as its users start it (`direct`); the gateway in front of that very
server (`upstream`), in turn with `direct`; and the gateway with a worker of its own (`headrace`). Two kinds
of chats: `new` ones share nothing; `shared` ones have a system prompt of some 600 tokens in common and go on
for four turns. Servers start anew for each run, in the order A B B A, so that a machine that slows down is
not held against one of them. Two engines have to start: `--quick` takes more than a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import uvloop

from benchmarks.load import StreamResult, open_stream, request
from benchmarks.processes import embedded_model, free_port, gateway, running, scratch, worker
from benchmarks.report import Report, open_report, parser, percentile
from benchmarks.texts import prompt, write_rules

MODEL: Final = "embedded"
NUM_IN_FLIGHT: Final = 4
OUTPUT_TOKENS: Final = 32
NEW_WORDS, SYSTEM_WORDS, TURN_WORDS = 150, 560, 40
NUM_TURNS: Final = 4
NUM_RULES: Final = 5000


@dataclass(frozen=True, slots=True)
class Way:
    """A port that answers, and what it is called."""

    name: str
    port: int


class Figures:
    """By way and kind of chat: every TTFT, and tokens a second of each run."""

    def __init__(self) -> None:
        self.ttft_ms: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.tokens_per_s: dict[tuple[str, str], list[float]] = defaultdict(list)


def new_chats(num: int, seed: int) -> list[list[list[dict[str, Any]]]]:
    """Conversations of one turn that have nothing in common but the template."""
    return [[[_user(prompt(NEW_WORDS, 1000 * seed + number))]] for number in range(num)]


def shared_chats(num: int, seed: int) -> list[list[list[dict[str, Any]]]]:
    """Conversations with one system prompt, each a list of turns; the answers in between are given."""
    system = {"role": "system", "content": prompt(SYSTEM_WORDS, 77_000 + seed)}
    conversations = []
    for number in range(num):
        messages, turns = [system], []
        for turn in range(NUM_TURNS):
            messages = [*messages, _user(prompt(TURN_WORDS, 50_000 + 1000 * seed + 10 * number + turn))]
            turns.append(messages)
            messages = [*messages, {"role": "assistant", "content": prompt(20, number * 10 + turn)}]
        conversations.append(turns)
    return conversations


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def run(way: Way, conversations: Sequence[list[list[dict[str, Any]]]]) -> list[StreamResult]:
    """All turns, so many conversations at a time, the turns of each one after another."""
    waiting = iter(conversations)

    async def one_after_another() -> list[StreamResult]:
        return [await _ask(way, turn) for conversation in waiting for turn in conversation]

    done = await asyncio.gather(*(one_after_another() for _ in range(NUM_IN_FLIGHT)))
    return [result for results in done for result in results]


async def _ask(way: Way, messages: list[dict[str, Any]]) -> StreamResult:
    fields = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    client = await open_stream("127.0.0.1", way.port, request({**fields, "ignore_eos": True}))
    result = await client.done
    if not result.is_done or result.first_s is None or result.num_tokens != OUTPUT_TOKENS:
        raise RuntimeError(f"{way.name}: an answer failed: {result.status} {result.error}")
    return result


async def measure(ways: Sequence[Way], figures: Figures, num_chats: int, seed: int) -> None:
    """Each way once, each with texts of its own: one engine behind two ways would have the others' cached."""
    for number, way in enumerate(ways):
        await run(way, new_chats(2, 900 + 10 * seed + number))  # warm-up
        for kind, chats in (
            ("new", new_chats(num_chats, 100 * seed + number)),
            ("shared", shared_chats(num_chats // NUM_TURNS, 100 * seed + number)),
        ):
            started_s = monotonic()
            results = await run(way, chats)
            took_s = monotonic() - started_s
            figures.ttft_ms[way.name, kind] += [
                (result.first_s - result.started_s) * 1e3 for result in results if result.first_s is not None
            ]
            figures.tokens_per_s[way.name, kind].append(len(results) * OUTPUT_TOKENS / took_s)


@contextmanager
def stock_server(folder: Path, model: Path, rules: Path) -> Iterator[list[Way]]:
    """vLLM's API server, and a gateway in front of it."""
    port = free_port()
    command = ["env", "HF_HUB_OFFLINE=1", "VLLM_CPU_KVCACHE_SPACE=1"]
    command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
    upstream = ("--upstream", f"vllm+http://127.0.0.1:{port}", "--tokenizer", str(model))
    with (
        running(command, folder / "vllm.log", port),
        gateway(folder, [], *upstream, "--rules", str(rules), name="upstream") as ours,
    ):
        yield [Way("direct", port), Way("upstream", ours.port)]


@contextmanager
def own_worker(folder: Path, model: Path, rules: Path) -> Iterator[list[Way]]:
    with (
        worker(folder, "--model", str(model), "--served-model-name", MODEL) as (_, address),
        gateway(folder, [address], "--rules", str(rules)) as ours,
    ):
        yield [Way("headrace", ours.port)]


def report_of(figures: Figures, report: Report) -> None:
    for way in ("direct", "upstream", "headrace"):
        for kind in ("new", "shared"):
            report.add(f"{way}_{kind}_ttft_ms", figures.ttft_ms[way, kind], "ms")
            report.add(f"{way}_{kind}_ttft_p99_ms", percentile(figures.ttft_ms[way, kind], 0.99), "ms")
            report.add(f"{way}_{kind}_tokens_per_s", figures.tokens_per_s[way, kind], "1/s")
    # "No worse" has 5 % for the noise of a shared machine. With shared prefixes it is to be better.
    for way in ("upstream", "headrace"):
        for kind in ("new", "shared"):
            limit = 1.0 if (way, kind) == ("headrace", "shared") else 1.05
            ttft, rate = (f"{way}_{kind}_{name}" for name in ("ttft_ms", "tokens_per_s"))
            base_ttft, base_rate = (f"direct_{kind}_{name}" for name in ("ttft_ms", "tokens_per_s"))
            metrics = report.metrics
            report.goal(f"{way}_{kind}_ttft_vs_direct", metrics[ttft] / metrics[base_ttft], limit, "x")
            share = metrics[rate] / metrics[base_rate]
            report.goal(f"{way}_{kind}_tokens_per_s_vs_direct", share, 1 / limit, "x", at_most=False)


def main(arguments: argparse.Namespace) -> int:
    report, figures, model = open_report("bench_real_engine", arguments), Figures(), embedded_model()
    servers = (
        [stock_server, own_worker]
        if arguments.quick
        else [
            *(stock_server, own_worker),
            *(own_worker, stock_server),
        ]
    )
    with scratch() as folder:
        rules = write_rules(folder / "rules.txt", NUM_RULES)
        for number, server in enumerate(servers):
            inner = folder / str(number)
            inner.mkdir()
            with server(inner, model, rules) as ways:
                # In turn, and the other way round the next time.
                order = ways if number < 2 else ways[::-1]
                uvloop.run(measure(order, figures, 16 if arguments.quick else 32, number))
    report_of(figures, report)
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
