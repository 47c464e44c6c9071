"""What the engine's prefix cache saves through the gateway: TTFT of prompts it has seen, beside new ones.

Real engine, embedded model, prompts of about 1,500 tokens, each kind in turn:

* a system prompt of its own per pair: the first request computes it, the second finds it in the cache;
* turn 10 of a chat, whose nine turns before have been answered, beside a chat of the same length that nobody
  has seen;
* a prompt template with a document that was warmed at start, asked for the first time, beside the same
  template with a document that was not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.load import StreamResult, chat_request, open_stream, request
from benchmarks.processes import embedded_model, gateway, scratch, worker
from benchmarks.report import Report, open_report, parser
from benchmarks.texts import prompt

MODEL: Final = "embedded"
NUM_WORDS: Final = 1_450  # about 1,500 tokens
NUM_TURNS: Final = 10
WORDS_PER_TURN: Final = 140  # of the user; answers are 8 tokens
TEMPLATE: Final = "document"


async def ask(port: int, fields: bytes) -> StreamResult:
    client = await open_stream("127.0.0.1", port, fields)
    result = await client.done
    if not result.is_done or result.first_s is None:
        raise RuntimeError(f"the answer failed: {result.status} {result.error}")
    return result


def ttft_ms(result: StreamResult) -> float:
    assert result.first_s is not None
    return (result.first_s - result.started_s) * 1e3


def chat(num_turns: int, seed: int) -> dict[str, Any]:
    """A chat up to the user's turn of this number."""
    messages = []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": prompt(WORDS_PER_TURN, 1000 * seed + turn)})
        messages.append({"role": "assistant", "content": prompt(8, 1000 * seed + 500 + turn)})
    return {"model": MODEL, "max_tokens": 8, "messages": messages[:-1]}


def document(seed: int) -> str:
    return prompt(NUM_WORDS, 900_000 + seed)


def about(seed: int, question: str) -> dict[str, Any]:
    """The template with a document."""
    use = {"name": TEMPLATE, "variables": {"document": document(seed), "question": question}}
    return {"model": MODEL, "max_tokens": 8, "template": use}


def configuration(num_documents: int) -> dict[str, Any]:
    """The template, and the documents that are warm before the gateway is ready."""
    content = "{document}\n\nQuestion: {question}"
    uses = [{"name": TEMPLATE, "variables": {"document": document(seed)}} for seed in range(num_documents)]
    return {
        "templates": [{"name": TEMPLATE, "messages": [{"role": "user", "content": content}]}],
        "warm": [{"template": use} for use in uses],
        "warm_before_ready": True,
    }


class Figures:
    """TTFT of one kind of prompt, new and seen."""

    def __init__(self) -> None:
        self.cold: list[float] = []
        self.warm: list[float] = []
        self.cached: list[float] = []

    async def pair(self, port: int, new: bytes, seen: bytes) -> None:
        self.cold.append(ttft_ms(await ask(port, new)))
        result = await ask(port, seen)
        self.warm.append(ttft_ms(result))
        self.cached.append(result.timings["cached_tokens"])

    def report(self, report: Report, name: str) -> float:
        report.add(f"ttft_{name}_cold_ms", self.cold, "ms")
        report.add(f"ttft_{name}_ms", self.warm, "ms")
        report.add(f"{name}_cached_tokens", self.cached, "tokens")
        ratios = [warm / cold for warm, cold in zip(self.warm, self.cold, strict=True)]
        return report.add(f"ttft_{name}_vs_cold", ratios, "x")


async def measure(port: int, report: Report, num_pairs: int) -> None:
    await ask(port, chat_request(MODEL, "What is a headrace?", 8, "You are brief."))  # warm-up
    system, turn, templated = Figures(), Figures(), Figures()
    for seed in range(num_pairs):
        text = prompt(NUM_WORDS, seed)
        await system.pair(
            port,
            chat_request(MODEL, "What does the river carry?", 8, text),
            chat_request(MODEL, "And what does every stone know?", 8, text),
        )
        for number in range(1, NUM_TURNS):
            await ask(port, request(chat(number, seed)))
        stranger = chat(NUM_TURNS, 50_000 + seed)
        await turn.pair(port, request(stranger), request(chat(NUM_TURNS, seed)))
        await templated.pair(port, request(about(10_000 + seed, "What?")), request(about(seed, "Why?")))
    report.goal("ttft_warm_vs_cold", system.report(report, "warm"), 0.25, "x")
    report.goal("ttft_turn_10_vs_cold", turn.report(report, "turn_10"), 0.4, "x")
    report.goal("ttft_templated_vs_cold", templated.report(report, "templated"), 0.25, "x")


def written(folder: Path, settings: Mapping[str, Any]) -> Path:
    """A configuration file: YAML reads JSON."""
    path = folder / "headrace.yaml"
    path.write_text(json.dumps(settings))
    return path


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_prefix_cache", arguments)
    num_pairs = 1 if arguments.quick else 6
    model = ("--model", str(embedded_model()), "--served-model-name", MODEL)
    with scratch() as folder, worker(folder, *model) as (_, address):
        config = written(folder, configuration(num_pairs))
        with gateway(folder, [address], "--config", str(config)) as ours:
            uvloop.run(measure(ours.port, report, num_pairs))
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
