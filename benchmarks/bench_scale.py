"""How the gateway holds thousands of streams: what a token costs at 100 and at 2,000, and how late it comes.

One gateway process, pinned to one core, with rules, detokenizer, metrics and heartbeats on; the scripted
worker (a step of 50 ms, so 20 tokens a second and stream) and the client share the others. Then two gateway
processes that share the port, with 1,000 streams each, beside one with 1,000. CPU time is the scheduler's.
A gap is the time between two frames of a stream as its client reads them; on a busy machine that is a
client's wait for its core, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.processes import Measured, embedded_model, gateway, scratch, worker
from benchmarks.report import Report, open_report, parser
from benchmarks.stream_counter import Counted, streams
from benchmarks.texts import write_rules

STEP_MS: Final = 50.0
NUM_RULES: Final = 5000
COUNTS: Final = (100, 400, 1000, 2000)
QUICK_COUNTS: Final = (100, 2000)
WARM_UP_S: Final = 1.0
_OPENING_S: Final = 90.0  # at most: the streams must outlast it


@dataclass(frozen=True, slots=True)
class Run:
    """Where to look, how long, how often."""

    folder: Path
    address: str
    rules: Path
    window_s: float
    num_runs: int


@dataclass(frozen=True, slots=True)
class Window:
    """What a number of streams cost."""

    us_per_token: float
    memory_kib: float  # per stream
    counted: Counted


def cores() -> tuple[set[int], set[int]]:
    """For the gateway, and for all others; the same if there is only one."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def pin(process: Measured, where: set[int]) -> None:
    """All threads that it has."""
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), where)


def children(process: Measured) -> list[Measured]:
    """The processes that it has started, or itself if there are none."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [Measured(int(pid), process.port, process.log) for pid in found] or [process]


@contextmanager
def serving(run: Run, num_processes: int) -> Iterator[Measured]:
    name = f"gateway-{num_processes}"
    limits = ("--queue-max-tokens", "100000000", "--queue-max-requests", "10000", "--request-limit-s", "3600")
    given = ("--rules", str(run.rules), "--processes", str(num_processes), *limits)
    with gateway(run.folder, [run.address], *given, name=name) as measured:
        yield measured


def windows(run: Run, served: Measured, num_streams: int) -> list[Window]:
    """Open the streams, let them settle, look at them some times."""
    watched = children(served)
    memory = sum(each.memory_bytes() for each in watched)
    num_tokens = int((_OPENING_S + run.num_runs * run.window_s) * 1000 / STEP_MS)
    found = []
    with streams(served.port, num_streams, num_tokens, cores()[1]) as opened:
        opened.count(WARM_UP_S)
        memory = sum(each.memory_bytes() for each in watched) - memory
        for _ in range(run.num_runs):
            cpu_s = sum(each.cpu_s() for each in watched)
            counted = opened.count(run.window_s)
            cpu_s = sum(each.cpu_s() for each in watched) - cpu_s
            if counted.num_streams != num_streams:
                raise RuntimeError(f"only {counted.num_streams} of {num_streams} streams went on")
            found.append(Window(cpu_s / counted.num_frames * 1e6, memory / num_streams / 1024, counted))
    time.sleep(0.5)  # the gateway sees that they are gone
    return found


def add(report: Report, name: str, found: Sequence[Window], num_streams: int, window_s: float) -> None:
    due = num_streams * window_s * 1000 / STEP_MS
    report.add(f"us_per_token_{name}", [each.us_per_token for each in found], "us")
    report.add(f"gap_p50_{name}_ms", [each.counted.gap_p50_ms for each in found], "ms")
    report.add(f"gap_p99_{name}_ms", [each.counted.gap_p99_ms for each in found], "ms")
    report.add(f"gap_max_{name}_ms", [each.counted.gap_max_ms for each in found], "ms")
    report.add(f"frames_per_token_{name}", [each.counted.num_frames / due for each in found])
    client_us = [each.counted.client_cpu_s / each.counted.num_frames * 1e6 for each in found]
    report.add(f"client_us_per_frame_{name}", client_us, "us")


def measure(run: Run, report: Report, counts: Sequence[int]) -> None:
    costs: dict[int, float] = {}
    with serving(run, 1) as served:
        pin(served, cores()[0])
        for num_streams in counts:
            found = windows(run, served, num_streams)
            add(report, f"{num_streams}", found, num_streams, run.window_s)
            costs[num_streams] = statistics.median(each.us_per_token for each in found)
            last = found
    memory_kib = report.add(f"memory_kib_per_stream_{counts[-1]}", last[0].memory_kib, "KiB")
    gap_ms = statistics.median(each.counted.gap_p99_ms for each in last)
    report.goal(f"gap_p99_in_steps_{counts[-1]}", gap_ms / STEP_MS, 1.5, "x")
    report.goal(f"cost_{counts[-1]}_vs_{counts[0]}", costs[counts[-1]] / costs[counts[0]], 1.2, "x")
    report.goal("memory_kib_per_stream", memory_kib, 40, "KiB")


def compare_processes(run: Run, report: Report, num_streams: int) -> None:
    """Two processes with so many streams each, beside one with as many."""
    medians = []
    for num_processes in (1, 2):
        with serving(run, num_processes) as served:
            total = num_processes * num_streams
            found = windows(run, served, total)
            add(report, f"{num_processes}_processes", found, total, run.window_s)
            medians.append(statistics.median(each.us_per_token for each in found))
    report.goal("two_processes_vs_one", medians[1] / medians[0], 1.1, "x")


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_scale", arguments)
    window_s, num_runs = (2.0, 1) if arguments.quick else (4.0, 5)
    scripted = ("--scripted", "--tokenizer", str(embedded_model()), "--step-ms", str(STEP_MS))
    with scratch() as folder:
        rules = write_rules(folder / "rules.txt", NUM_RULES)
        with worker(folder, *scripted) as (linked, address):
            pin(linked, cores()[1])
            run = Run(folder, address, rules, window_s, num_runs)
            measure(run, report, QUICK_COUNTS if arguments.quick else COUNTS)
            compare_processes(run, report, 300 if arguments.quick else 1000)
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
