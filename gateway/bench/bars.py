"""Bars of percentiles, as elements that flow with the page: names of any length, numbers beside them.

Not here: charts with axes (`gateway/bench/charts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.bench.charts import text
from gateway.bench.percentiles import Spread
from gateway.bench.rows import shown


def bars(name: str, spreads: Mapping[str, Spread], low: str, high: str) -> str:
    """A bar for each: one percentile solid, a higher one pale behind it. `low`, `high`: p50, p99."""
    most = max(spread[high] for spread in spreads.values())
    rows = "".join(
        part for each, spread in spreads.items() for part in _bar(each, spread[low], spread[high], most)
    )
    told = "; ".join(
        f"{each}: {shown(spread[low])}, {shown(spread[high])}" for each, spread in spreads.items()
    )
    label = text(f"{name}, {low} and {high} in ms. {told}")
    return f'<div class="bars" role="img" aria-label="{label}">{rows}</div>'


def _bar(name: str, low: float, high: float, most: float) -> Iterator[str]:
    yield f"<span>{text(name)}</span>"
    solid, pale = (f"{_percent(value, most):.2f}%" for value in (low, high))
    yield f'<span class="track"><i style="width:{pale}"></i><b style="width:{solid}"></b></span>'
    yield f"<span>{shown(low)} / {shown(high)}</span>"


def _percent(value: float, most: float) -> float:
    """Of the longest bar. What is below 0, as a difference of two clocks may be, has none."""
    return max(0.0, value / most * 100) if most > 0 else 0.0
