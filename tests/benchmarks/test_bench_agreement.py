"""The comparison of three load tests: the same prompts for all, and goals that can be missed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.agreement_tools import FIGURES, Load, ToolFailed, _check, _choose
from benchmarks.bench_agreement import medians_of, print_table, report_goals, write_prompts
from benchmarks.report import Report
from gateway.bench.dataset import read_records

OURS = dict.fromkeys(FIGURES, 100.0)


def test_prompts_are_read_by_our_own_load_test(tmp_path: Path) -> None:
    seeds = itertools.count(1)
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    write_prompts(first, 3, 32, seeds)
    write_prompts(second, 3, 32, seeds)
    records = [*read_records(first, 1, True), *read_records(second, 1, True)]
    assert [each.output_tokens for each in records] == [32] * 6
    assert len({str(each.turns) for each in records}) == 6, "a prefix cache would know the second file"


def test_medians_are_of_the_rounds_and_lack_what_a_tool_lacks() -> None:
    rounds = [{"ttft_p50": each, "e2e_p50": 7.0} for each in (30.0, 10.0, 20.0)]
    assert medians_of({"guidellm": rounds}) == {"guidellm": {"ttft_p50": 20.0, "e2e_p50": 7.0}}


@pytest.mark.parametrize(
    ("theirs", "missed"),
    [
        (OURS, []),
        (OURS | {"e2e_p50": 94.0}, ["closed_e2e_p50_off_vllm"]),
        (OURS | {"requests_per_s": 107.0}, ["closed_requests_per_s_off_vllm"]),
        (OURS | {"ttft_p50": 121.0, "ttft_p99": 900.0}, ["closed_ttft_p50_off_vllm"]),
    ],
)
def test_goals_are_missed_by_what_is_too_far_off(theirs: Mapping[str, float], missed: list[str]) -> None:
    report = Report("bench_agreement")
    report_goals(report, "closed", {"headrace": OURS, "vllm": theirs})
    assert [goal.name for goal in report.goals if not goal.ok] == missed


def test_table_has_ratios_and_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = {name: value / 2 for name, value in OURS.items() if name != "tbt_p50"}
    print_table("closed loop", {"headrace": OURS, "guidellm": lacking})
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert lines["ttft_p50"] == ["100.00", "50.00", "2.000"]
    assert lines["tbt_p50"] == ["100.00", "–", "–"]


def test_loads_are_closed_or_open() -> None:
    closed = Load(1, Path("p"), 4, 8, concurrency=8)
    opened = Load(1, Path("p"), 4, 8, rate=2.5)
    assert [_choose(each, ["c={}"], ["r={}"]) for each in (closed, opened)] == [["c=8"], ["r=2.5"]]
    with pytest.raises(ToolFailed, match="3 of 4 requests succeeded"):
        _check(3, closed)
