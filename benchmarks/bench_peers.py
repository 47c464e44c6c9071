"""Headrace beside LiteLLM's proxy, vllm-router and vLLM's own API server, on one machine in one run.

First the gateways: LiteLLM and vllm-router in front of one scripted upstream that speaks vLLM's words,
Headrace with a scripted worker and everything on (token cache, 5,000 rules, detokenization, metrics,
heartbeats), Headrace in front of that upstream, and a bare uvicorn ASGI app that sends ready-made frames.
All say the same prose, a word a step. Steps of 50 ms, longer where a peer could not keep up. Then whole front
ends: vLLM's API server, and Headrace's worker with its gateway, each with the same tiny model on the real
engine, whose core does not count. CPU time is the scheduler's, of all processes of a peer; memory is what it
holds beyond the start. Where the peer was not the limit at saturation, its tokens per second and core have a
mark.

A full run takes about twenty minutes, `--quick` three to four; the first one fills the peers' environments.
`--only gateways` or `--only engine` runs one half; `--write` puts the tables into the README.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks import peers
from benchmarks.peer_load import (
    Plan,
    Saturation,
    Window,
    engine_step_ms,
    per_request_ms,
    saturate,
    stream_window,
)
from benchmarks.peer_table import Row, machine, replace_between_markers, table
from benchmarks.peers import Peer
from benchmarks.processes import Measured, scratch
from benchmarks.report import Report, environment, open_report, parser, percentile
from benchmarks.texts import write_rules
from benchmarks.tiny_model import tiny_model

NUM_RULES: Final = 5000
SATURATION_STEP_MS: Final = 20.0
UPSTREAM_KINDS: Final = ("vllm", "openai")
README: Final = peers.ROOT / "README.md"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    counts: Sequence[int]  # of streams
    engine_counts: Sequence[int]
    num_runs: int
    plan: Plan
    num_requests: int
    saturation_s: float


QUICK: Final = Size((100,), (64,), 1, Plan(1.0, 2.5, 10), 60, 12.0)
FULL: Final = Size((100, 400, 1000), (64, 400, 1000), 3, Plan(1.5, 4.0, 20), 300, 30.0)


@dataclass(slots=True)
class Measuring:
    """The peers of one table, asked in turn so that the machine's moods meet all of them."""

    report: Report
    size: Size
    rows: dict[str, Row]

    def add(self, peer: Peer) -> None:
        row = self.rows.setdefault(peer.key, Row(peer.label))
        row.idle_mib = self.report.add(f"{_name(peer)}_idle_mib", peer.memory_bytes() / 2**20, "MiB")

    def windows(self, peer: Peer, num_streams: int, windows: Sequence[Window]) -> list[float]:
        """Keep them; CPU per token of each."""
        name, row = _name(peer), self.rows[peer.key]

        def put(figure: str, values: Sequence[float], unit: str) -> float:
            return self.report.add(f"{name}_{figure}_{num_streams}", values, unit)

        costs = [window.us_per_token for window in windows]
        row.us_per_token[num_streams] = put("us_per_token", costs, "us")
        row.gap_ms[num_streams] = put("gap_p99_ms", [percentile(w.gaps_over_ms, 0.99) for w in windows], "ms")
        held = max(window.memory_bytes for window in windows) / 1024 - (row.idle_mib or 0.0) * 1024
        row.stream_kib[num_streams] = put("kib_per_stream", [held / num_streams], "KiB")
        ttfts = [ttft for window in windows for ttft in window.ttfts_ms]
        if ttfts:
            times = [put(f"ttft_p{share}_ms", [percentile(ttfts, share / 100)], "ms") for share in (50, 99)]
            row.ttft_ms = row.ttft_ms or (times[0], times[1])
        if peer.key != "bare-asgi":
            share = put("frames_per_token", [window.frames_per_token for window in windows], "")
            row.frames_per_token = min(share, row.frames_per_token or share)
        if peer.others:
            put("feeder_us_per_token", [window.others_us_per_token for window in windows], "us")
        return costs

    def requests(self, peer: Peer, cost_ms: float) -> float:
        self.rows[peer.key].request_ms = cost_ms
        return self.report.add(f"{_name(peer)}_request_ms", cost_ms, "ms")

    def saturation(self, peer: Peer, found: Saturation) -> None:
        name = _name(peer)
        self.report.add(f"{name}_tokens_per_s_and_core", found.tokens_per_s_and_core)
        self.report.add(f"{name}_saturation_cores", found.num_cores)
        self.report.add(f"{name}_saturation_streams", found.num_streams)
        mark = "" if found.is_full else " *"
        self.rows[peer.key].per_core = f"{found.tokens_per_s_and_core:,.0f}{mark}"


def _name(peer: Peer) -> str:
    return peer.key.replace("-", "_")


# -- gateways ------------------------------------------------------------------------------------------------


def gateways(folder: Path, rules: Path, report: Report, size: Size) -> dict[str, Row]:
    """Every peer that can stand in front of the scripted upstream, Headrace, and the bare app."""
    for name in peers.PINS:
        peers.install(name)
    measuring = Measuring(report, size, {})
    with ExitStack() as stack:
        behind = stack.enter_context(peers.upstream(folder))
        running = _start(stack, folder, rules, behind)
        costs = uvloop.run(_gateways(measuring, running))
        for peer in running[1:]:
            if peer.key != "bare-asgi":
                measuring.saturation(peer, _saturated(peer, costs[peer.key][-1], size))
    with peers.headrace_scripted(
        folder, rules, SATURATION_STEP_MS
    ) as peer:  # its steps are fixed at the start
        measuring.saturation(peer, _saturated(peer, costs[peer.key][-1], size))
    _gateway_goals(report, measuring.rows, costs)
    return measuring.rows


def _start(stack: ExitStack, folder: Path, rules: Path, behind: Measured) -> list[Peer]:
    """Headrace first; in front of upstreams, too, unless it does not start there."""
    running = [
        stack.enter_context(peers.headrace_scripted(folder, rules)),
        stack.enter_context(peers.bare_asgi(folder)),
        stack.enter_context(peers.vllm_router(folder, behind)),
        stack.enter_context(peers.litellm(folder, behind)),
    ]
    for kind in UPSTREAM_KINDS:
        try:
            running.append(stack.enter_context(peers.headrace_upstream(folder, behind, kind, rules)))
        except RuntimeError as error:
            print(f"left out: {error}", file=sys.stderr)
    return running


def _saturated(peer: Peer, us_per_token: float, size: Size) -> Saturation:
    """Begin near three quarters of a core, by what a token cost with the most streams."""
    first = int(0.75e6 / us_per_token * SATURATION_STEP_MS / 1e3)
    return uvloop.run(saturate(peer, first, SATURATION_STEP_MS, size.saturation_s))


async def _gateways(measuring: Measuring, running: Sequence[Peer]) -> dict[str, list[float]]:
    """CPU per token of each peer, in all runs."""
    costs: dict[str, list[float]] = {peer.key: [] for peer in running}
    size = measuring.size
    for peer in running:
        measuring.add(peer)
    for num_streams in size.counts:
        windows: dict[str, list[Window]] = {peer.key: [] for peer in running}
        for run in range(size.num_runs):
            for peer in running:
                if run and peer.key == "litellm" and num_streams > 100:
                    continue  # opening a thousand streams takes it most of a minute
                if window := await _window(peer, num_streams, size.plan):
                    windows[peer.key].append(window)
        for peer in running:
            if windows[peer.key]:
                costs[peer.key] += measuring.windows(peer, num_streams, windows[peer.key])
    for peer in running:
        if peer.key != "bare-asgi":
            num_requests = min(size.num_requests, int(peer.requests_per_s * 8))
            cost_ms, _ = await per_request_ms(peer, num_requests)
            measuring.requests(peer, cost_ms)
    return costs


async def _window(peer: Peer, num_streams: int, plan: Plan) -> Window | None:
    """None for a peer of others that does not bring so many streams to their first token."""
    if peer.key == "bare-asgi":  # it sends as many frames as ever
        plan = Plan(plan.warm_up_s, plan.window_s, 0)
    try:
        return await stream_window(peer, num_streams, plan)
    except (RuntimeError, TimeoutError) as error:
        if peer.key.startswith("headrace"):
            raise
        print(f"left out: {error}", file=sys.stderr)
        return None


def _gateway_goals(report: Report, rows: dict[str, Row], costs: dict[str, list[float]]) -> None:
    def ratio(key: str, other: str) -> float:
        """In the same run, where both were in all; else of the medians by number of streams."""
        if len(costs[key]) == len(costs[other]):
            pairs = zip(costs[key], costs[other], strict=True)
            return statistics.median(one / another for one, another in pairs)
        ours, theirs = rows[key].us_per_token, rows[other].us_per_token
        return statistics.median(ours[count] / theirs[count] for count in ours if count in theirs)

    report.goal("gateway_vs_vllm_router", ratio("headrace", "vllm-router"), 1.0, "x")
    # The goal is of Headrace with its own worker; before a stock server it parses what the others parse.
    if "headrace-vllm" in rows:
        report.add("upstream_gateway_vs_vllm_router", ratio("headrace-vllm", "vllm-router"), "x")
    report.goal("gateway_vs_bare_asgi", ratio("headrace", "bare-asgi"), 1.4, "x")
    report.goal("litellm_vs_gateway", ratio("litellm", "headrace"), 30.0, "x", at_most=False)
    _frames_goal(report, rows, "gateways")


def _frames_goal(report: Report, rows: dict[str, Row], which: str) -> None:
    shares = [row.frames_per_token for row in rows.values() if row.frames_per_token is not None]
    report.goal(f"frames_per_token_{which}", min(shares), 0.98, "", at_most=False)


# -- whole front ends ----------------------------------------------------------------------------------------


def engine(folder: Path, rules: Path, report: Report, size: Size) -> dict[str, Row]:
    """vLLM's API server and Headrace, each with its own engine core of the same model."""
    measuring, model = Measuring(report, size, {}), tiny_model()
    with (
        peers.headrace_engine(folder, model, rules) as ours,
        peers.vllm_server(folder, model) as server,
    ):
        uvloop.run(_engine(measuring, ours, server))
    _frames_goal(report, measuring.rows, "engine")
    return measuring.rows


async def _engine(measuring: Measuring, ours: Peer, server: Peer) -> None:
    size, both, ratios = measuring.size, (ours, server), []
    for peer in both:
        measuring.add(peer)
    for num_streams in size.engine_counts:
        windows: dict[str, list[Window]] = {peer.key: [] for peer in both}
        steps = {peer.key: await engine_step_ms(peer, num_streams) for peer in both}
        for _ in range(size.num_runs if num_streams <= 100 else 1):  # a thousand prefills take their time
            for peer in both:
                window = await stream_window(peer, num_streams, size.plan, steps[peer.key])
                windows[peer.key].append(window)
        mine, theirs = (measuring.windows(peer, num_streams, windows[peer.key]) for peer in both)
        ratios += [one / another for one, another in zip(mine, theirs, strict=True)]
    request_ratios = []
    for _ in range(size.num_runs):
        costs = [(await per_request_ms(peer, size.num_requests))[0] for peer in both]
        request_ratios.append(costs[0] / costs[1])
        for peer, cost_ms in zip(both, costs, strict=True):
            measuring.requests(peer, cost_ms)
    measuring.report.goal("front_end_vs_vllm_per_token", statistics.median(ratios), 0.35, "x")
    measuring.report.goal("front_end_vs_vllm_per_request", statistics.median(request_ratios), 0.5, "x")


# -- the run -------------------------------------------------------------------------------------------------


def tables(size: Size, found: dict[str, dict[str, Row]], settings: dict[str, Any]) -> str:
    """What the README shows."""
    parts = []
    if rows := found.get("gateways"):
        ttft, gap = f"TTFT added at {size.counts[0]} streams, p50 / p99 (ms)", "gap p99 beyond the step (ms)"
        parts.append(table(list(rows.values()), size.counts, ttft, gap))
    if rows := found.get("engine"):
        ttft, gap = (
            f"TTFT at {size.engine_counts[0]} streams, p50 / p99 (ms)",
            "gap p99 beyond a usual step (ms)",
        )
        parts.append(table(list(rows.values()), size.engine_counts, ttft, gap))
    return "\n\n".join([*parts, machine(settings)])


def main(arguments: argparse.Namespace) -> int:
    size = QUICK if arguments.quick else FULL
    report = open_report("bench_peers", arguments)
    halves: dict[str, Callable[[Path, Path, Report, Size], dict[str, Row]]] = {
        "gateways": gateways,
        "engine": engine,
    }
    chosen = [arguments.only] if arguments.only else list(halves)
    with scratch() as folder:
        rules = write_rules(folder / "rules.txt", NUM_RULES)
        found = {name: halves[name](folder, rules, report, size) for name in chosen}
    text = tables(size, found, environment() | peers.versions())
    if arguments.write and not replace_between_markers(README, text):
        print(f"{README.name} has no markers for the table", file=sys.stderr)
    if not arguments.json:
        print(f"\n{text}\n")
    return report.close()


def arguments_parser() -> argparse.ArgumentParser:
    result = parser(__doc__)
    result.add_argument("--only", choices=("gateways", "engine"), help="one half of it")
    result.add_argument("--write", action="store_true", help="put the tables into the README")
    return result


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no peer outlives it
    sys.exit(main(arguments_parser().parse_args()))
