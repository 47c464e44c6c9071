"""The audit: one line and one count per hit, at once, and never the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from filters.hit import Hit
from filters.rules import Rule
from gateway.audit import Audit, audit_log
from gateway.metrics import Metrics
from gateway.record import RequestRecord
from gateway.request_log import RequestLog
from tests.gateway.answering import Case

RECORD = RequestRecord("r1", "/v1/chat/completions", 0.0, key_id="k1", model="m")


async def test_every_hit_of_an_answer_is_told_when_it_is_certain() -> None:
    rules = [Rule("m", ("敏感",), "mask", replacement="*"), Rule("f", ("感觉",), "flag", shadow=True)]
    case = Case(num_choices=2, rules=rules).start()
    case.streams[1].say("a敏")
    assert case.audit_lines == []
    case.streams[1].say("感")
    (line,) = case.audit_lines
    assert line.pop("time") > 0
    assert line == {
        "event": "rule_hit",
        "id": "r1",
        "key": None,
        "model": "m",
        "rule": "m",
        "action": "mask",
        "shadow": False,
        "direction": "output",
        "channel": "content",
        "choice": 1,
        "start": 1,
        "end": 3,
    }
    case.streams[0].say("感觉", "stop")
    case.streams[1].say("!", "stop")
    assert [(line["rule"], line["shadow"], line["choice"]) for line in case.audit_lines[1:]] == [
        ("f", True, 0)
    ]
    labels = {"direction": "output", "channel": "content"}
    assert case.sample("headrace_rule_hits_total", rule="m", action="mask", **labels) == 1
    assert case.sample("headrace_rule_hits_total", rule="f", action="shadow", **labels) == 1
    assert case.record.rule_hits == 2
    assert "敏" not in json.dumps(case.audit_lines, ensure_ascii=False)


async def test_hit_that_only_the_end_makes_certain_is_told_too() -> None:
    case = Case(rules=[Rule("w", ("ass",), "block", whole_word=True)]).start()
    case.streams[0].say("a ass", "length")
    assert [(line["rule"], line["start"], line["end"]) for line in case.audit_lines] == [("w", 2, 5)]


def test_audit_that_is_off_only_counts() -> None:
    metrics = Metrics()
    Audit(metrics, None).hit(RECORD, "input", "content", Hit("a", "flag", 0, 2))
    labels = {"rule": "a", "direction": "input", "channel": "content", "action": "flag"}
    assert metrics.registry.get_sample_value("headrace_rule_hits_total", labels) == 1


def test_lines_go_where_the_setting_says(tmp_path: Path) -> None:
    request_log = RequestLog((tmp_path / "requests").open("w"))
    assert audit_log("log", request_log) is request_log
    assert audit_log("off", request_log) is None
    path = tmp_path / "audit"
    path.write_text("before\n")
    log = audit_log(str(path), request_log)
    assert log is not None
    Audit(Metrics(), log).hit(RECORD, "output", "reasoning", Hit("a", "flag", 0, 2), 0)
    log.flush()
    before, line = path.read_text().splitlines()
    assert before == "before"
    assert json.loads(line)["channel"] == "reasoning"


def test_audit_file_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="audit"):
        audit_log(str(tmp_path / "missing" / "audit"), RequestLog((tmp_path / "requests").open("w")))
