"""What is remembered of a request: stages, times, and what the log and the client are told of them."""

from __future__ import annotations

import msgspec
import pytest

from gateway.metrics import MODEL_LABEL, Metrics
from gateway.record import RequestRecord
from pipeline.values import Dropped, FirstToken, Usage


def record(**fields: object) -> RequestRecord:
    return RequestRecord("r1", "/v1/completions", 100.0, **fields)  # type: ignore[arg-type]


def test_stages_follow_each_other_without_gaps() -> None:
    one = record()
    one.begin()
    for stage in ("parse", "scan", "tokenize"):
        one.done(stage)
    assert list(one.stages_s) == ["parse", "scan", "tokenize"]
    assert all(seconds >= 0 for seconds in one.stages_s.values())


@pytest.mark.parametrize(
    ("num_choices", "output_tokens", "tpot_s"),
    [(1, 11, 0.2), (1, 2, 2.0), (1, 1, None), (1, 0, None), (2, 12, 0.4), (2, 2, None)],
)
def test_time_per_output_token_is_per_choice_and_after_the_first(
    num_choices: int, output_tokens: int, tpot_s: float | None
) -> None:
    one = record(
        num_choices=num_choices, output_tokens=output_tokens, first_token_s=101.0, last_token_s=103.0
    )
    assert one.tpot_s == (None if tpot_s is None else pytest.approx(tpot_s))
    assert one.ttft_s == pytest.approx(1.0)


def test_without_a_token_there_are_no_token_times() -> None:
    one = record()
    assert (one.ttft_s, one.tpot_s) == (None, None)
    assert one.timings(100.5) == {"ttft_ms": None, "tpot_ms": None, "total_ms": 500.0, "cached_tokens": None}
    assert one.server_timing() == b""


def test_server_timing_has_the_stages_and_the_queue() -> None:
    one = record(stages_s={"parse": 0.0005, "tokenize": 0.0125}, first=FirstToken(queue_ms=2.25))
    assert one.server_timing() == b"parse;dur=0.500, tokenize;dur=12.500, queue;dur=2.250"


def test_usage_is_what_the_engine_counted() -> None:
    assert record(prompt_tokens=5, output_tokens=3, cached_tokens=4).usage == Usage(5, 3, 4)
    reasoned = record(prompt_tokens=5, output_tokens=3, reasoning_tokens=0)
    assert reasoned.usage == Usage(5, 3, None, reasoning_tokens=0)


def test_what_the_engine_does_not_tell_is_not_told_as_zero() -> None:
    one = record(
        model="m", stages_s={"parse": 0.0005}, first=FirstToken(prompt_tokens=5), first_token_s=101.0
    )
    one.add_cached(None)
    assert set(one.timings(102.0)) == {"parse_ms", "ttft_ms", "tpot_ms", "total_ms", "cached_tokens"}
    assert one.server_timing() == b"parse;dur=0.500"
    fields = one.log_fields(102.0, 0.0)
    assert not {"queue_ms", "prefill_ms"} & set(fields)
    assert fields["cached_tokens"] is one.usage.cached_tokens is None
    metrics = Metrics()
    one.count(metrics, 102.0)
    metrics.flush()
    value, labels = metrics.registry.get_sample_value, {MODEL_LABEL: "m"}
    assert value("headrace_queue_seconds_count", labels) in (None, 0)
    assert value("headrace_cached_prompt_tokens_total", labels) is None
    assert value("gen_ai_server_time_to_first_token_seconds_count", labels) == 1


def test_zero_that_the_engine_tells_is_told() -> None:
    one = record(first=FirstToken(0, 0.0, 0.0))
    one.add_cached(0)
    timings = one.timings(100.5)
    assert (timings["queue_ms"], timings["prefill_ms"], timings["cached_tokens"]) == (0.0, 0.0, 0)
    one.add_cached(None)  # a second prompt's
    one.add_cached(3)
    assert one.timings(100.5)["cached_tokens"] == one.usage.cached_tokens == 3


@pytest.mark.parametrize("reasoning_tokens", [None, 0, 2])
def test_log_fields_have_the_reasoning_tokens(reasoning_tokens: int | None) -> None:
    fields = record(output_tokens=3, reasoning_tokens=reasoning_tokens).log_fields(101.0, 0.0)
    assert (fields["output_tokens"], fields["reasoning_tokens"]) == (3, reasoning_tokens)


def test_log_fields_are_json_with_the_times() -> None:
    one = record(model="m", stages_s={"parse": 0.0005}, first=FirstToken(7, 1.0, 2.0), cached_tokens=7)
    fields = msgspec.json.decode(msgspec.json.encode(one.log_fields(101.0, 1_700_000_000.12345)))
    assert fields["time"] == 1_700_000_000.123
    assert (fields["parse_ms"], fields["queue_ms"], fields["prefill_ms"], fields["total_ms"]) == (
        0.5,
        1.0,
        2.0,
        1000.0,
    )
    assert (fields["id"], fields["model"], fields["cached_tokens"]) == ("r1", "m", 7)


def test_what_a_context_policy_dropped_is_told_everywhere() -> None:
    dropped = Dropped("drop_oldest", 4, 1234)
    one = record(model="m", dropped=dropped)
    assert one.usage.dropped == dropped
    assert one.context() == b"drop_oldest; messages=4; tokens=1234"
    fields = one.log_fields(101.0, 0.0)
    assert (fields["dropped_messages"], fields["dropped_tokens"]) == (4, 1234)
    metrics = Metrics()
    one.count(metrics, 101.0)
    metrics.flush()
    value = metrics.registry.get_sample_value
    assert value("headrace_context_dropped_messages_total", {MODEL_LABEL: "m"}) == 4
    assert value("headrace_context_dropped_tokens_total", {MODEL_LABEL: "m"}) == 1234


def test_a_cut_in_a_text_is_told_in_characters() -> None:
    one = record(model="m", dropped=Dropped("middle_out", 0, 1234, 5000))
    assert one.context() == b"middle_out; characters=5000; tokens=1234"


def test_where_nothing_was_dropped_nothing_is_told() -> None:
    one = record(model="m")
    assert one.context() is None
    fields = one.log_fields(101.0, 0.0)
    assert (fields["dropped_messages"], fields["dropped_tokens"]) == (0, 0)
    metrics = Metrics()
    one.count(metrics, 101.0)
    metrics.flush()
    labels = {MODEL_LABEL: "m"}
    assert metrics.registry.get_sample_value("headrace_context_dropped_tokens_total", labels) is None


def test_a_refused_request_counts_without_a_model() -> None:
    """A model's name that a client made up must not become a label."""
    metrics = Metrics()
    record(status=404, ended="model_not_found", stages_s={"parse": 0.001}).count(metrics, 101.0)
    metrics.flush()
    value = metrics.registry.get_sample_value
    labels = {"route": "/v1/completions", "status": "404", "ended": "model_not_found"}
    assert value("headrace_requests_total", labels) == 1
    assert value("headrace_stage_seconds_count", {"stage": "parse"}) == 1
    assert value("gen_ai_client_token_usage_count", {MODEL_LABEL: "x", "gen_ai_token_type": "input"}) is None


def test_an_answered_request_counts_everything() -> None:
    metrics = Metrics()
    one = record(model="m", status=200, ended="complete", prompt_tokens=9, output_tokens=5, cached_tokens=4)
    one.first, one.first_token_s, one.last_token_s = FirstToken(queue_ms=500), 101.0, 103.0
    one.held_peak = 6
    one.count(metrics, 104.0)
    metrics.flush()
    value = metrics.registry.get_sample_value
    for kind, num in (("input", 9), ("output", 5)):
        assert value("gen_ai_client_token_usage_sum", {MODEL_LABEL: "m", "gen_ai_token_type": kind}) == num
    assert value("headrace_cached_prompt_tokens_total", {MODEL_LABEL: "m"}) == 4
    for name, seconds in (
        ("gen_ai_server_request_duration_seconds", 4.0),
        ("gen_ai_server_time_to_first_token_seconds", 1.0),
        ("gen_ai_server_time_per_output_token_seconds", 0.5),
        ("headrace_queue_seconds", 0.5),
    ):
        assert value(f"{name}_sum", {MODEL_LABEL: "m"}) == pytest.approx(seconds), name
    assert value("headrace_held_peak_characters") == 6
