"""What the engine's prefix cache saves through the gateway: TTFT with a system prompt that it has seen.

Real engine, embedded model. Every pair has a system prompt of its own of about 1,500 tokens: the first
request computes it, the second finds it in the cache, with another question. The figure is the ratio of the
two.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import uvloop

from benchmarks.load import StreamResult, chat_request, open_stream
from benchmarks.processes import embedded_model, gateway, scratch, worker
from benchmarks.report import Report, open_report, parser
from benchmarks.texts import prompt

NUM_WORDS = 1_450  # about 1,500 tokens


async def ask(port: int, model: str, system: str, question: str) -> StreamResult:
    client = await open_stream("127.0.0.1", port, chat_request(model, question, 8, system))
    result = await client.done
    if not result.is_done or result.first_s is None:
        raise RuntimeError(f"the answer failed: {result.status} {result.error}")
    return result


def ttft_ms(result: StreamResult) -> float:
    assert result.first_s is not None
    return (result.first_s - result.started_s) * 1e3


async def measure(port: int, model: str, report: Report, num_pairs: int) -> None:
    await ask(port, model, "You are brief.", "What is a headrace?")  # warm-up
    cold, warm, shares, ratios = [], [], [], []
    for seed in range(num_pairs):
        system = prompt(NUM_WORDS, seed)
        first = await ask(port, model, system, "What does the river carry?")
        second = await ask(port, model, system, "And what does every stone know?")
        cold.append(ttft_ms(first))
        warm.append(ttft_ms(second))
        shares.append(second.timings["cached_tokens"])
        ratios.append(warm[-1] / cold[-1])
        await asyncio.sleep(0)
    report.add("ttft_cold_ms", cold, "ms")
    report.add("ttft_warm_ms", warm, "ms")
    report.add("cached_tokens", shares, "tokens")
    report.goal("ttft_warm_vs_cold", report.add("ttft_warm_vs_cold", ratios), 0.25, "x")


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_prefix_cache", arguments)
    model = embedded_model()
    args = ("--model", str(model), "--served-model-name", "embedded")
    with scratch() as folder, worker(folder, *args) as (_, address), gateway(folder, [address]) as ours:
        uvloop.run(measure(ours.port, "embedded", report, 3 if arguments.quick else 8))
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
