"""Do `headrace bench`, `vllm bench serve` and guidellm tell the same of the same server?

The three send the same load to one gateway with a scripted worker (20 ms a step), one after the other,
several times in turn, each time with prompts of the same length that no prefix cache has seen: closed loop
and open loop, even arrivals. Compared are the medians over the turns.

Verdict (two cores that others used too): they agree. TPOT and E2E within 0.4 %, rates within 2 %, in an open
loop TTFT p50 within 1 ms. In a closed loop TTFT p50 was 3 ms off in a quiet run, and up to 17 ms between two
tools in noisy ones, in which E2E moved by as much: the server was in another phase, and no tool was wrong.
The p99s of a hundred requests are one request's, and not held to anything.

Where they differ by nature, and do not agree by chance:

* guidellm takes the value at a rank for a percentile, where numpy, vLLM and Headrace interpolate.
* guidellm's inter-token latency is a mean of each request, weighted by its tokens: it is compared with TPOT.
  Its own "TPOT" has the first token in it, and is not compared. It does not keep single gaps.
* vLLM takes each chunk with `choices` for a token: the first one, which has the role and no text, and the
  last one with the finish reason. With a server that sends the role before there is a token, its TTFT is too
  short; with this one, both come with a token, and its gaps have two more of almost 0 ms for each request.
* vLLM ends a request (E2E) with the last such chunk, Headrace and guidellm with the end of the response.
* To vLLM and guidellm an answer with some text is a success, even if an error frame follows or the body ends
  without `[DONE]` (read in their source, not run here); to Headrace both are failures.
* guidellm starts the clock when the request's head is written, vLLM before it takes a connection: with new
  connections vLLM's TTFT has the handshake in it.
* guidellm's open loop sends one request less than asked for, at times.
* Headrace's rates are of the steady window, which ends when the last request is sent; the other two divide by
  the whole run. Compared are those of the whole run.
* vLLM's "peak concurrent requests" counts all that were under way at some time in the same second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.agreement_tools import FIGURES, TOOLS, Found, Load, install_guidellm, versions
from benchmarks.processes import embedded_model, gateway, scratch, worker
from benchmarks.report import Report, open_report, parser
from benchmarks.texts import prompt

STEP_MS: Final = "20"
# Eight prompts fit into a step. Longer ones would form queues in a closed loop, whose requests come together
# in groups: which groups is chance, differs from run to run with any tool, and moves TTFT by 10 ms.
PREFILL_MS_PER_1K: Final = "5"
PROMPT_WORDS: Final = 200
_ANSWER_WORDS: Final = 2000
MAX_OFF: Final = 0.05  # of TPOT, E2E and the rates
# In a closed loop a request is sent as a token of another comes, and its first token comes with the next step
# or the one after: which of the two most are in may change between runs, and is no matter of measurement.
MAX_TTFT_OFF_MS: Final = {"closed": 20.0, "open": 5.0}
OURS: Final = "headrace"
Runs = Mapping[str, Sequence[Found]]  # by tool


def write_prompts(path: Path, num: int, output_tokens: int, seeds: Iterator[int]) -> None:
    """JSON lines in the form that all three read; guidellm has a name of its own for the answer's length."""
    lengths = {"output_tokens": output_tokens, "output_tokens_count": output_tokens}
    lines = [json.dumps({"prompt": prompt(PROMPT_WORDS, next(seeds)), **lengths}) for _ in range(num)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def runs_of(load: Load, folder: Path, num_rounds: int, seeds: Iterator[int]) -> Runs:
    """Each tool in turn, so that what else the machine does meets all of them."""
    found: dict[str, list[Found]] = {name: [] for name in TOOLS}
    for _ in range(num_rounds):
        for name, tool in TOOLS.items():
            write_prompts(load.prompts, load.num_requests, load.output_tokens, seeds)
            found[name].append(tool(load, folder, embedded_model()))
    return found


def medians_of(runs: Runs) -> dict[str, dict[str, float]]:
    """By tool and figure."""
    return {
        tool: {name: median(each[name] for each in found) for name in FIGURES if name in found[0]}
        for tool, found in runs.items()
    }


def print_table(loop: str, medians: Mapping[str, Mapping[str, float]]) -> None:
    others = [name for name in medians if name != OURS]
    heads = [OURS, *others, *(f"/ {name}" for name in others)]
    print(f"\n{loop:<20}" + "".join(f"{head:>12}" for head in heads))
    for name in FIGURES:
        ours = medians[OURS][name]
        theirs = [medians[other].get(name) for other in others]
        cells = [_cell(value) for value in (ours, *theirs)]
        cells += ["–" if value is None else f"{ours / value:.3f}" for value in theirs]
        print(f"{name:<20}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def report_goals(report: Report, loop: str, medians: Mapping[str, Mapping[str, float]]) -> None:
    ours = medians[OURS]
    for other, theirs in medians.items():
        for name, value in theirs.items():
            report.metrics[f"{loop}_{other}_{name}"] = round(value, 4)
        if other == OURS:
            continue
        ttft_off_ms = abs(ours["ttft_p50"] - theirs["ttft_p50"])
        report.goal(f"{loop}_ttft_p50_off_{other}", ttft_off_ms, MAX_TTFT_OFF_MS[loop], "ms")
        for name in ("tpot_p50", "e2e_p50", "requests_per_s", "output_tokens_per_s"):
            report.goal(f"{loop}_{name}_off_{other}", abs(ours[name] / theirs[name] - 1), MAX_OFF, "of it")


def measure(report: Report, port: int, folder: Path, arguments: argparse.Namespace) -> None:
    num_rounds, num_requests, output_tokens = (1, 48, 32) if arguments.quick else (3, 96, 64)
    seeds = itertools.count(1)
    common = (port, folder / "prompts.jsonl", num_requests, output_tokens)
    loads = {"closed": Load(*common, concurrency=8)}
    if not arguments.quick:
        loads["open"] = Load(*common, rate=9.7)  # a period that is no multiple of a step: all phases are met
    for loop, load in loads.items():
        medians = medians_of(runs_of(load, folder, num_rounds, seeds))
        if not arguments.json:
            print_table(f"{loop} loop", medians)
        report_goals(report, loop, medians)


def main(arguments: argparse.Namespace) -> int:
    install_guidellm()
    report = open_report("bench_agreement", arguments)
    if not arguments.json:
        print(", ".join(f"{name} {version}" for name, version in versions().items()), flush=True)
    with scratch() as folder:
        script = folder / "answers.json"
        script.write_text(json.dumps([prompt(_ANSWER_WORDS, seed) for seed in range(8)]))
        flags = ["--tokenizer", str(embedded_model()), "--script", str(script), "--step-ms", STEP_MS]
        flags += ["--prefill-ms-per-1k", PREFILL_MS_PER_1K]
        with worker(folder, "--scripted", *flags) as (_, address), gateway(folder, [address]) as front:
            measure(report, front.port, folder, arguments)
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
