import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.bench import delivery
from gateway.bench.delivery import deliver
from gateway.bench.options import ReportOptions
from gateway.bench.session import Outcome
from tests.gateway.bench.runs import run, sample

OUTCOME = Outcome([sample(0), sample(1, error="lost", detail="gone")], run(duration_s=3.0))


def broken(*_: object, **__: object) -> Any:
    raise KeyError("x")


def test_a_report_is_delivered_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ReportOptions(json=str(tmp_path / "a.json"), html=str(tmp_path / "a.html"), has_samples=True)
    assert deliver(OUTCOME, report) == []
    document = json.loads((tmp_path / "a.json").read_bytes())
    assert (document["figures"]["num_ok"], len(document["samples"])) == (1, 2)
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert "1 ok, 1 failed" in capsys.readouterr().out


def test_json_on_standard_output_moves_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert deliver(OUTCOME, ReportOptions(json="-")) == []
    out, err = capsys.readouterr()
    assert json.loads(out)["figures"]["num_ok"] == 1
    assert "1 ok, 1 failed" in err


@pytest.mark.parametrize(
    ("name", "fault", "has_figures", "has_page"),
    [
        ("document_of", "the report could not be made: KeyError: 'x'", False, False),
        ("to_json", "the JSON could not be made: KeyError: 'x'", False, True),
        ("table", "the table could not be made: KeyError: 'x'", True, True),
        ("page", "the page could not be made: KeyError: 'x'", True, False),
    ],
)
def test_what_breaks_in_a_report_leaves_the_rest_and_the_requests(
    name: str,
    fault: str,
    has_figures: bool,
    has_page: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(delivery, name, broken)
    file, html = tmp_path / "a.json", tmp_path / "a.html"
    assert deliver(OUTCOME, ReportOptions(json=str(file), html=str(html))) == [fault]
    document = json.loads(file.read_bytes())
    assert ("figures" in document) == has_figures
    assert has_figures or [each["error"] for each in document["samples"]] == [None, "lost"]
    assert html.exists() == has_page
    out = capsys.readouterr().out
    assert (
        ("1 ok, 1 failed" in out) if name not in ("document_of", "table") else ("ok               1" in out)
    )


def test_a_place_that_takes_nothing_is_told_with_its_flag_and_spares_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ReportOptions(json=str(tmp_path), html=str(tmp_path / "no" / "a.html"))
    assert deliver(OUTCOME, report) == [
        f"--json {tmp_path} could not be made: Is a directory",
        f"--html {tmp_path}/no/a.html could not be made: No such file or directory",
    ]
    assert "1 ok, 1 failed" in capsys.readouterr().out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux alone has it")
def test_a_full_disk_is_told() -> None:
    faults = deliver(OUTCOME, ReportOptions(json="/dev/full"))
    assert faults == ["--json /dev/full could not be made: No space left on device"]
