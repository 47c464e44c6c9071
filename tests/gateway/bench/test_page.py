"""The HTML page: whole, harmless, complete, and quiet in a real browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest

from gateway.bench.document import Document, document_of
from gateway.bench.page import MAX_RUNS, page
from gateway.bench.rows import facts_of, grids_of, settings_of
from gateway.bench.table import table
from tests.gateway.bench.runs import document, run, sample
from tests.gateway.browser import open_tab, running_browser

HOSTILE: Final = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x00\u202e"
VOID: Final = {"meta", "link", "br"}


class Checked(HTMLParser):
    """Fails on a tag that is not closed in order; keeps tags, attributes, and texts but the style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), "an attribute twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.]*\d|\d", text))


def test_page_is_whole_and_needs_nothing_from_elsewhere() -> None:
    html = page([("this run", document()), ("before", document(1))])
    checked = Checked(html)
    assert not {tag for tag, _ in checked.tags} & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "image",
        "use",
    }
    for tag, attributes in checked.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert {attributes[name] for name in ("src", "href") if name in attributes} <= {"data:,"}, tag
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_page_has_every_number_of_the_table() -> None:
    shown = document(mode="open", rate=3.0, arrivals="poisson")
    text = " ".join(Checked(page([("this run", shown)])).texts)
    missing = numbers(table(shown)) - numbers(text)
    assert not missing
    for name, value in (*facts_of(shown).rows, *settings_of(shown.run).rows):
        assert name.strip() in text
        assert value in text
    for grid in grids_of(shown):
        assert all(cell in text for row in grid.rows for cell in row)


def test_images_say_in_words_what_they_show() -> None:
    images = [
        attributes for tag, attributes in Checked(page([("this run", document())])).tags if tag == "svg"
    ]
    assert len(images) >= 8
    for attributes in images:
        assert attributes["role"] == "img"
        assert len(numbers(attributes["aria-label"] or "")) >= 2


def hostile() -> Document:
    failed = sample(1, error=HOSTILE, detail=HOSTILE)
    told = run(model=HOSTILE, url=HOSTILE, options={HOSTILE: HOSTILE}, versions={"server": HOSTILE})
    return document_of([sample(timings={HOSTILE + "_ms": 1.0, "ttft_ms": 2.0}), failed], told)


def test_hostile_words_stay_words() -> None:
    html = page([(HOSTILE, hostile()), (HOSTILE, hostile())])
    checked = Checked(html)
    assert not [tag for tag, _ in checked.tags if tag in ("script", "img")]
    assert not [name for _, attributes in checked.tags for name in attributes if name.startswith("on")]
    assert "\x00" not in html
    assert "<script>alert(1)</script>" in " ".join(checked.texts)
    assert "\x00" not in table(hostile())


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [sample(error="connect", frames_s=[], ended_s=None)],
        [sample(frames_s=[0.0, 0.0], ended_s=0.0)],
        [sample(frames_s=[1.0])],
        [sample(0, frames_s=[0.001, 0.002], ended_s=0.003), sample(1, frames_s=[90.0, 170.0], ended_s=200.0)],
    ],
)
def test_any_run_makes_a_page(samples: list[object]) -> None:
    shown = document_of(samples, run())  # type: ignore[arg-type]
    Checked(page([("this run", shown), ("before", document())]))
    Checked(page([("this run", document()), ("before", shown)]))


def test_runs_are_compared_with_the_first() -> None:
    twice = document_of([sample(frames_s=[2.0, 2.1, 2.3], ended_s=2.5)], run())
    text = " ".join(Checked(page([("a", document_of([sample()], run())), ("b", twice)])).texts)
    assert "2,000 (×2.00)" in text


def test_unlike_loads_are_not_compared_without_a_word() -> None:
    text = " ".join(Checked(page([("a", document()), ("b", document(concurrency=9))])).texts)
    assert "Unlike loads: “b” differs from “a” in load." in text
    assert "closed loop, 9 at once" in text


@pytest.mark.parametrize("num", [0, MAX_RUNS + 1])
def test_more_runs_than_colours_are_refused(num: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_RUNS} runs, not {num}"):
        page([("run", document())] * num)


def test_a_run_keeps_its_colour_where_another_has_no_curve() -> None:
    none = document_of([sample(frames_s=[1.0])], run())  # neither TPOT nor gaps
    html = page([("a", document()), ("b", none), ("c", document(2))])
    tpot = html[html.index("TPOT, ms") : html.index("TBT, ms")]
    assert re.findall(r'points="[^"]*" class="line (s\d)"', tpot) == ["s2", "s0"]
    assert "c: p50" in tpot


def test_long_names_are_cut_where_they_would_fill_the_page() -> None:
    html = page([("n" * 300, document(model="m" * 150)), ("b", document())])
    texts = Checked(html).texts
    assert "Load test of " + "m" * 80 + "…" in texts
    assert "m" * 150 in texts  # among the settings
    assert "n" * 39 + "…" in texts


# Charts and bars lie in their cards, and letters are high enough to be read.
_IS_LEGIBLE: Final = """
[...document.querySelectorAll('.card svg.chart, .card .bars, .card svg.chart text')].every(each => {
  const inner = each.getBoundingClientRect(), card = each.closest('.card').getBoundingClientRect()
  const isInside = inner.left >= card.left && inner.right <= card.right && inner.bottom <= card.bottom
  return isInside && inner.height >= 9
})
"""
# What is wider than its place says so with a shadow, and can be moved.
_IS_NEVER_CUT: Final = """
[...document.querySelectorAll('main *')].every(each =>
  each.scrollWidth <= each.clientWidth + 1 || each.closest('.scroll, svg') || each.clientWidth === 0)
"""


@pytest.mark.browser
async def test_browser_shows_the_page_without_complaint(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    long = document(model="m" * 300, url="http://" + "u" * 300)
    shown = [("this run", long), (HOSTILE, hostile()), ("long" * 60, document()), ("d", document(4))]
    path.write_text(page(shown), encoding="utf-8")
    with running_browser(tmp_path) as port:
        async with open_tab(port) as tab:
            await tab.open(path.as_uri())
            assert tab.complaints() == []
            assert [each for each in tab.requested_urls() if not each.startswith(("file:", "data:"))] == []
            assert await tab.run("document.title") == f"Load test of {'m' * 80}…"
            is_drawn = "[...document.querySelectorAll('svg.chart')].every(each => each.getBBox().width > 100)"
            assert await tab.run(is_drawn)
            for width in (1400, 768, 500, 360):
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                await tab.command("Emulation.setDeviceMetricsOverride", **size)
                assert await tab.run("document.documentElement.scrollWidth <= innerWidth"), width
                assert await tab.run(_IS_LEGIBLE), width
                assert await tab.run(_IS_NEVER_CUT), width
