"""Where each microsecond of a streamed token goes in the gateway, and what more streams do to it.

The gateway's own objects, in this process: a STEP frame with one token for each stream goes in where the link
reads it, and the path is cut off after one stage after the other (`token_streams.py`); a stage's own cost is
the difference to the cut before. Prose, 5,000 rules, SSE; CPU time of the thread, which a busy machine
changes less than wall time, but caches are shared: compare what one run prints.

Verdict: a third is ours, the rest is the write to the socket, the floor that a bare send has as well. What
grows with the number of streams is not work: a stream's objects are cold when its token comes, so a token
costs what it touches. The losers were uvicorn's `send` for each chunk, all stages of the way out for each
token, and ten looks a second at every stream; figures are in `benchmarks/PROFILE.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import uvloop

from benchmarks.inbound_chats import load_model
from benchmarks.outbound_rules import Denied, RulesFor
from benchmarks.outbound_stages import stream
from benchmarks.outbound_texts import model_detokenizer, say
from benchmarks.outbound_timing import Pass, Way, feeding, in_turn
from benchmarks.report import Report, open_report, parser
from benchmarks.token_streams import Cut, Streams, open_streams
from gateway.event_loop import settle_memory
from gateway.metrics import Metrics
from pipeline.outbound import Outbound
from pipeline.values import EngineCall

NUM_RULES: Final = 5000
NUM_TOKENS: Final = 4000
NUM_STEPS: Final = 20  # of a pass
COUNTS: Final = (20, 100, 400, 1000, 2000)
QUICK_COUNTS: Final = (20, 400)
# The stage that each cut has more than the one before.
STAGES: Final = {
    Cut.DISPATCH: "dispatch",
    Cut.CHOICE: "choice_and_text",
    Cut.WRITER: "writer",
    Cut.HTTP: "outlet_and_http",
    Cut.SOCKET: "transport_and_send",
}


def report_cuts(report: Report, opened: Mapping[Cut, Streams], num_streams: int, num_runs: int) -> float:
    """Each stage's own cost, the whole, and a tick of the clock; the whole is returned."""
    passes: dict[str, Pass] = {"frames": partial(opened[Cut.DISPATCH].cut_frames, NUM_STEPS)}
    passes |= {stage: partial(opened[cut].feed, NUM_STEPS) for cut, stage in STAGES.items()}
    passes["tick"] = partial(opened[Cut.HTTP].look, 10)
    results = in_turn(passes, num_runs)
    before = [0.0] * num_runs
    for stage in ("frames", *STAGES.values()):
        own = [runs - earlier for runs, earlier in zip(results[stage], before, strict=True)]
        before = results[stage]
        report.add(f"{stage}_{num_streams}_us", own, "us")
    report.add(f"tick_per_stream_{num_streams}_us", results["tick"], "us")
    report.add(f"without_send_{num_streams}_us", results[STAGES[Cut.HTTP]], "us")
    return report.add(f"whole_{num_streams}_us", before, "us")


def report_inside(report: Report, num_runs: int, passes: Mapping[str, Pass]) -> None:
    """What is in `choice_and_text`, by itself and warm."""
    for name, runs in in_turn(passes, num_runs).items():
        report.add(f"{name}_warm_us", runs, "us")


def gaps() -> Callable[[str], object]:
    """Counting a gap, in the shape of a stage."""
    observe = Metrics().gaps.observe
    return lambda text: observe(0.02)


async def measure(report: Report, counts: Sequence[int], num_runs: int) -> None:
    model = load_model()
    rules = RulesFor(Denied.of(model, NUM_RULES))(NUM_RULES)
    spoken = say(model, "en", NUM_TOKENS)
    make: Callable[[EngineCall], Outbound] = Way(model).plan(rules).open
    inside = {
        "detokenizer": feeding(lambda: model_detokenizer(model).feed, spoken.chunks),
        "filter": feeding(lambda: stream(rules).feed, spoken.pieces),
        "gap_metric": feeding(gaps, spoken.pieces),
    }
    report_inside(report, num_runs, inside)
    wholes = []
    for num_streams in counts:
        opened = {cut: await open_streams(cut, num_streams, spoken, make) for cut in STAGES}
        settle_memory()
        wholes.append(report_cuts(report, opened, num_streams, num_runs))
        for streams in opened.values():
            streams.close()
        await asyncio.sleep(0.1)  # the server sees that its clients are gone
        gc.unfreeze()
    report.add(f"whole_{counts[-1]}_vs_{counts[0]}", wholes[-1] / wholes[0], "x")


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_token_path", arguments)
    counts, num_runs = (QUICK_COUNTS, 7) if arguments.quick else (COUNTS, 15)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(report, counts, num_runs))
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
