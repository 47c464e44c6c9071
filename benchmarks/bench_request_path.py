"""The time that we add to an engine's first token, what a request costs, and where its microseconds go.

One gateway process, a scripted worker, and an open-loop client, each in a process of its own; 100 new
requests a second at the times of a Poisson process, on kept connections, with prompts of 2,000 tokens:

* `chat`: another turn of one of 50 chats of 8 turns; the new message has 40 words.
* `shared`: one system prompt for all, and a message of 40 words.
* `new`: like `chat`, each request on a new connection.

The token cache and the worker's prefix cache know all but the new message. Rules (5,000), metrics, the
request log and the memory of answers are on. An answer has 30 tokens, one every 20 ms, so about 60 run at a
time.

Added TTFT is the client's time from writing the request to the arrival of the response's first byte, which
leaves with the first token, less the engine's own time from the submission to that token. The worker stamps
those two; the client's kernel stamps the arrival, so that a client which gets the CPU late counts for
nothing. `in` is the part before the engine, `out` the part after it. A bare uvicorn app that sends its head
at once is asked by the same client at the same rate: the floor of machine and method.

CPU time is the scheduler's, of the one process. `hot` is what the gateway's own code takes with warm caches
(`request_hot.py`), `stage` the parts of a request with one token at 100 a second (`request_stages.py`).

Verdict: see `REQUEST_PROFILE.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.load import request
from benchmarks.processes import Measured, embedded_model, free_port, gateway, running, scratch
from benchmarks.report import Report, open_report, parser, percentile
from benchmarks.request_hot import MODEL, hot_us
from benchmarks.request_load import Client, Timed
from benchmarks.request_stages import Counted
from benchmarks.stamped_worker import StampedWorker, stamped_worker
from benchmarks.texts import prompt, write_rules

RATE: Final = 100.0  # new requests a second
STEP_MS: Final = 20.0
NUM_TOKENS: Final = 30
NUM_RULES: Final = 5000
NUM_CHATS: Final = 50
NUM_TURNS: Final = 8
SHAPES: Final = ("chat", "shared", "new")
P50_GOAL_MS: Final = 1.0
P99_GOAL_MS: Final = 5.0

Message = dict[str, str]


class Prompts:
    """Prompts of both shapes. No two requests have the same last message, or the same seed."""

    def __init__(self) -> None:
        self._num_made = 0
        self._chats = [_chat(number) for number in range(NUM_CHATS)]
        self._shared = [{"role": "system", "content": prompt(1680, 7)}]

    def body(self, shape: str, model: str, num_tokens: int) -> dict[str, Any]:
        """The next request's fields."""
        self._num_made += 1
        before = self._shared if shape == "shared" else self._chats[self._num_made % NUM_CHATS]
        new = {"role": "user", "content": prompt(40, 1_000_000 + self._num_made)}
        return {
            "model": model,
            "messages": [*before, new],
            "max_tokens": num_tokens,
            "seed": self._num_made,
        }


def _chat(number: int) -> list[Message]:
    messages = [{"role": "system", "content": prompt(400, 7)}]
    for turn in range(NUM_TURNS):
        seed = 1000 * (number + 1) + 2 * turn
        messages.append({"role": "user", "content": prompt(40, seed)})
        messages.append({"role": "assistant", "content": prompt(120, seed + 1)})
    return messages


@dataclass(frozen=True, slots=True)
class Bench:
    """The processes, and how much is asked of them."""

    client: Client
    worker: StampedWorker
    gateway: Measured
    counting: Measured  # a gateway that counts its stages
    counted: Path
    bare: Measured
    prompts: Prompts
    num_requests: int
    num_runs: int


@dataclass(slots=True)
class Ttft:
    """Seconds of all requests of one shape."""

    added: list[float] = field(default_factory=list)
    added_text: list[float] = field(default_factory=list)  # until the first text, which a rule may hold back
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


def send(
    bench: Bench, target: Measured, shape: str, num_tokens: int, count: int
) -> tuple[list[int], list[Timed], float]:
    """Seeds and answers of so many requests, and the target's CPU microseconds per request."""
    bodies = [bench.prompts.body(shape, "scripted", num_tokens) for _ in range(count)]
    cpu_s = target.cpu_s()
    requests, seed = [request(body) for body in bodies], bodies[0]["seed"]
    timed = bench.client.send(target.port, requests, RATE, seed, keeps=shape != "new")
    cpu_s = target.cpu_s() - cpu_s
    if not all(each.is_done for each in timed):
        raise RuntimeError(
            f"an answer did not end well: {[each.status for each in timed if not each.is_done]}"
        )
    return [body["seed"] for body in bodies], timed, cpu_s / count * 1e6


def warm_up(bench: Bench) -> None:
    """Every prompt's beginning becomes known to the caches."""
    for target in (bench.gateway, bench.counting):
        for shape in SHAPES:
            send(bench, target, shape, 1, 2 * NUM_CHATS)


def measure_ttft(bench: Bench, report: Report) -> None:
    """Added TTFT and CPU per request of 30 tokens, beside the bare app, run by run."""
    ttfts = {shape: Ttft() for shape in SHAPES}
    cpu_us: dict[str, list[float]] = {shape: [] for shape in (*SHAPES, "bare")}
    floor_s: list[float] = []
    for _ in range(bench.num_runs):
        for shape in SHAPES:
            seeds, timed, each_us = send(bench, bench.gateway, shape, NUM_TOKENS, bench.num_requests)
            cpu_us[shape].append(each_us)
            _take(ttfts[shape], bench.worker, seeds, timed)
        _, timed, each_us = send(bench, bench.bare, "chat", NUM_TOKENS, bench.num_requests)
        cpu_us["bare"].append(each_us)
        floor_s += [each.first_byte_s - each.started_s for each in timed]
    for name, values_us in cpu_us.items():
        report.add(f"request_30_tokens_{name}_us", values_us, "us")
    _add_ms(report, "bare_first_byte", floor_s)
    for shape, ttft in ttfts.items():
        _add_ms(report, f"added_ttft_{shape}", ttft.added)
        _add_ms(report, f"added_ttft_text_{shape}", ttft.added_text)
        report.add(f"in_{shape}_p50_ms", 1e3 * statistics.median(ttft.before), "ms")
        report.add(f"out_{shape}_p50_ms", 1e3 * statistics.median(ttft.after), "ms")
    for shape in SHAPES:
        for label, limit_ms in (("p50", P50_GOAL_MS), ("p99", P99_GOAL_MS)):
            name = f"added_ttft_{shape}_{label}_ms"
            report.goal(name, report.metrics[name], limit_ms, "ms")


def _take(ttft: Ttft, worker: StampedWorker, seeds: Sequence[int], timed: Sequence[Timed]) -> None:
    for seed, answer in zip(seeds, timed, strict=True):
        job = worker.job(seed)
        assert job is not None, "the worker has seen every request"
        engine_s = job.steps_s[0] - job.submitted_s
        ttft.added.append(answer.first_byte_s - answer.started_s - engine_s)
        ttft.added_text.append(answer.first_text_s - answer.started_s - engine_s)
        ttft.before.append(job.submitted_s - answer.started_s)
        ttft.after.append(answer.first_byte_s - job.steps_s[0])


def _add_ms(report: Report, name: str, values_s: Sequence[float]) -> None:
    for share, label in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
        report.add(f"{name}_{label}_ms", 1e3 * percentile(values_s, share), "ms")


def measure_stages(bench: Bench, report: Report) -> None:
    """Where the CPU time of a request with one token goes, in the gateway that counts."""
    count = bench.num_requests
    os.kill(bench.counting.pid, signal.SIGUSR1)
    send(bench, bench.counting, "chat", 1, count)
    os.kill(bench.counting.pid, signal.SIGUSR2)
    while not bench.counted.exists():
        time.sleep(0.05)
    counted = Counted(**json.loads(bench.counted.read_text()))
    for stage, stage_ns in counted.stages_ns.items():
        report.add(f"stage_{stage.replace(' ', '_')}_us", stage_ns / count / 1e3, "us")
    in_stages_ns = sum(counted.stages_ns.values())
    report.add("stage_loop_and_sockets_us", (counted.loop_thread_ns - in_stages_ns) / count / 1e3, "us")
    other_ns = counted.user_ns + counted.system_ns - counted.loop_thread_ns
    report.add("stage_other_threads_us", other_ns / count / 1e3, "us")
    report.add("stage_all_us", (counted.user_ns + counted.system_ns) / count / 1e3, "us")
    report.add("of_them_system_us", counted.system_ns / count / 1e3, "us")
    report.add("of_them_garbage_collector_us", counted.gc_ns / count / 1e3, "us")


def measure_hot(prompts: Prompts, rules: Path, report: Report, num_requests: int) -> None:
    """The gateway's own code with warm caches. The quickest tenth: others disturb the rest."""
    options = {"stream": True, "stream_options": {"include_usage": True, "include_timings": True}}
    for num_tokens in (1, NUM_TOKENS):
        bodies = [
            json.dumps(prompts.body("chat", MODEL, num_tokens) | options).encode()
            for _ in range(num_requests)
        ]
        times_us = hot_us(embedded_model(), rules, bodies, prompt(200, 3), num_tokens, 10)
        report.add(f"hot_{num_tokens}_tokens_us", percentile(times_us, 0.1), "us")


def measure(bench: Bench, report: Report) -> None:
    warm_up(bench)
    measure_ttft(bench, report)
    one = [send(bench, bench.gateway, "chat", 1, bench.num_requests)[2] for _ in range(bench.num_runs)]
    report.add("request_1_token_chat_us", one, "us")
    measure_stages(bench, report)


def main(arguments: argparse.Namespace) -> int:
    num_requests, num_runs, num_hot = (200, 1, 400) if arguments.quick else (500, 5, 1600)
    report = open_report("bench_request_path", arguments)
    with scratch() as folder:
        rules = write_rules(folder / "rules.txt", NUM_RULES)
        measure_hot(Prompts(), rules, report, num_hot)
        counted, ports = folder / "counted.json", (free_port(), free_port())
        bare = ["benchmarks.bare_asgi", str(ports[0]), str(NUM_TOKENS), str(STEP_MS)]
        counting = ["benchmarks.request_stages", str(counted), "gateway", "--port", str(ports[1])]
        with stamped_worker(folder, embedded_model(), STEP_MS, 5.0) as worker:
            flags = ["--worker", worker.address, "--rules", str(rules)]
            with (
                gateway(folder, [worker.address], "--rules", str(rules)) as ours,
                running([sys.executable, "-m", *bare], folder / "bare.log", ports[0]) as app,
                running(
                    [sys.executable, "-m", *counting, *flags], folder / "counting.log", ports[1], "/ready"
                ) as stages,
            ):
                client = Client()
                parts = (client, worker, ours, stages, counted, app, Prompts())
                measure(Bench(*parts, num_requests, num_runs), report)
                client.close()
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
