"""The README's table of peers, between its markers.

Not here: where the figures come from (`peer_load.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

OPENING: Final = "<!-- peers -->"
CLOSING: Final = "<!-- /peers -->"


@dataclass(slots=True)
class Row:
    """One peer's figures; by number of streams where they depend on it. What was not measured is missing."""

    label: str
    us_per_token: dict[int, float] = field(default_factory=dict)
    request_ms: float | None = None
    frames_per_token: float | None = None
    per_core: str | None = None  # tokens a second and core, with a mark where the peer was not the limit
    ttft_ms: tuple[float, float] | None = None  # p50 and p99
    gap_ms: dict[int, float] = field(default_factory=dict)  # p99
    idle_mib: float | None = None
    stream_kib: dict[int, float] = field(default_factory=dict)

    def cells(self, counts: Sequence[int]) -> list[str]:
        return [
            self.label,
            _by_count(self.us_per_token, counts, 1),
            _number(self.request_ms, 1),
            _number(self.frames_per_token, 3),
            self.per_core or "–",
            " / ".join(_number(value, 1) for value in self.ttft_ms) if self.ttft_ms else "–",
            _by_count(self.gap_ms, counts, 0),
            _number(self.idle_mib, 0),
            _by_count(self.stream_kib, counts, 0),
        ]


def table(rows: Sequence[Row], counts: Sequence[int], ttft: str, gap: str) -> str:
    """Markdown. `ttft` and `gap` head the columns of times, whose meaning differs between tables."""
    streams = " / ".join(f"{count:,}" for count in counts)
    head = [
        f"{streams} streams",
        "CPU per token (µs)",
        "CPU per request of 30 tokens (ms)",
        "frames per token",
        "tokens/s per core, saturated",
        ttft,
        gap,
        "memory idle (MiB)",
        "memory per stream (KiB)",
    ]
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *(row.cells(counts) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine(environment: Mapping[str, Any]) -> str:
    """The line under the tables: what they were measured on and with."""
    names = {key: value for key, value in environment.items() if key not in ("cpu", "cores")}
    versions = ", ".join(f"{name} {value}" for name, value in names.items())
    return (
        f"Measured by `make bench-peers` on {environment['cores']} cores of {environment['cpu']}; {versions}."
    )


def replace_between_markers(readme: Path, text: str) -> bool:
    """Put the text between the README's markers. False, and nothing written, where it has none."""
    old = readme.read_text(encoding="utf-8")
    before, opening, rest = old.partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not opening or not closing:
        return False
    readme.write_text(f"{before}{opening}\n{text}\n{closing}{after}", encoding="utf-8")
    return True


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _by_count(values: Mapping[int, float], counts: Sequence[int], digits: int) -> str:
    """The values in the order of the counts; `–` where nothing was measured."""
    if not values:
        return "–"
    return " / ".join(_number(values.get(count), digits) for count in counts)
