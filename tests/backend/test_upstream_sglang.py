"""SGLang's `/generate`: what it is asked, and its events read into ids, ends and logprobs."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from backend.http_client import HttpResponse
from backend.sglang_request import PriorityRule, generate_body, sampling_params
from backend.sse_reader import SseReader
from backend.upstream_ports import MAX_ANSWER_BYTES, EngineStats, ServedModel
from backend.upstream_sglang import SglangKind, SglangWire
from pipeline.errors import EngineFailed, EngineRejected, HeadraceError, InvalidRequest, QueueFull
from pipeline.values import EngineCall, FirstToken, Prompt, TokenLogprobs
from tests.fake_sglang_server import KNOWN, MODEL, Play, events, reply
from tests.fake_upstream import Asked


def call(
    sampling: dict[str, Any] | None = None, prompt: Sequence[int] = (5, 6, 7), **fields: Any
) -> EngineCall:
    ids = memoryview(array("i", prompt)).cast("B")
    return EngineCall("m", Prompt(ids, len(prompt), 0), sampling or {}, 16, **fields)


class Sink:
    """What a choice was told."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.first: FirstToken | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.last: tuple[str, int | str | None] | None = None
        self.error: HeadraceError | None = None

    def tokens(
        self,
        ids: list[int],
        finish: str | None,
        stop: int | str | None,
        first: FirstToken | None,
        logprobs: Sequence[TokenLogprobs] | None,
        now_s: float,
    ) -> None:
        assert self.last is None
        assert self.error is None
        assert (first is not None) == (not self.chunks), "`first` comes with the first ids, once"
        self.chunks.append(ids)
        self.first = self.first or first
        if logprobs is not None:
            assert len(logprobs) == len(ids)
            self.logprobs += logprobs
        if finish is not None:
            self.last = finish, stop

    def failed(self, error: HeadraceError) -> None:
        assert self.last is None
        assert self.error is None
        self.error = error

    @property
    def ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk]


def played(play: Play, engine_call: EngineCall | None = None) -> tuple[Sink, bool | None]:
    """A whole stream of the fake server. What `closed` said, None where the reader was done before."""
    engine_call = engine_call or call()
    wire, sink = SglangWire(), Sink()
    body = json.loads(wire.request(engine_call, "r").body)
    reader = wire.reader(engine_call, sink)
    for payload in SseReader(1 << 20).feed(b"".join(events(play, body))):
        if reader.event(payload, 1.0):
            return sink, None
    return sink, reader.closed(1.0)


# -- requests ------------------------------------------------------------------------------------------------


def test_request_has_ids_and_sglangs_names() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.1,
        "min_tokens": 2,
        "seed": 7,
        "stop_token_ids": [9],
        "logit_bias": {3: 1.5},
        "ignore_eos": True,
        "watermarking": False,
        "presence_penalty": None,
    }
    request = SglangWire().request(call(sampling, cache_salt="s"), "id-1")
    assert (request.method, request.target) == ("POST", "/generate")
    body = json.loads(request.body)
    assert body == {
        "rid": "id-1",
        "input_ids": [5, 6, 7],
        "stream": True,
        "extra_key": "s",
        "cache_salt": "s",
        "sampling_params": {
            "max_new_tokens": 16,
            "skip_special_tokens": False,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "min_new_tokens": 2,
            "sampling_seed": 7,
            "stop_token_ids": [9],
            "logit_bias": {"3": 1.5},
            "ignore_eos": True,
        },
    }
    assert set(body["sampling_params"]) <= KNOWN


@pytest.mark.parametrize("name", ["allowed_token_ids", "bad_words", "thinking_token_budget", "extra_args"])
def test_parameter_that_sglang_does_not_have_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SglangWire().request(call({name: [1]}), "r")
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("constraint", "name", "value"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type":"object"}'),
        ({"json": '{"type": "array"}'}, "json_schema", '{"type": "array"}'),
        ({"json_object": True}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+", "disable_any_whitespace": True}, "regex", "a+"),
        ({"choice": ["a.b", "c|d", "é"]}, "regex", r"(a\.b|c\|d|é)"),
        ({"grammar": "root ::= x"}, "ebnf", "root ::= x"),
        ({"structural_tag": '{"x": 1}'}, "structural_tag", '{"x": 1}'),
    ],
    ids=str,
)
def test_constraints_are_told_in_sglangs_words(constraint: Any, name: str, value: str) -> None:
    params = sampling_params({"structured_outputs": constraint}, 4)
    assert params == {"max_new_tokens": 4, "skip_special_tokens": False, name: value}


def test_unknown_constraint_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.lark"):
        sampling_params({"structured_outputs": {"lark": "x"}}, 4)


def test_grammar_waits_for_the_end_of_the_reasoning() -> None:
    sampling = {"structured_outputs": {"regex": "a"}}
    assert generate_body(call(sampling, reasoning_ended=False), "r", PriorityRule())["require_reasoning"]
    for ended in (True, None):
        assert "require_reasoning" not in generate_body(
            call(sampling, reasoning_ended=ended), "r", PriorityRule()
        )
    assert "require_reasoning" not in generate_body(call(reasoning_ended=False), "r", PriorityRule())


def test_priority_is_sent_where_the_server_schedules_by_it() -> None:
    assert [PriorityRule().of(3), PriorityRule(True).of(3), PriorityRule(True, True).of(3)] == [None, -3, 3]
    assert "priority" not in generate_body(call(priority=3), "r", PriorityRule())
    assert generate_body(call(priority=3), "r", PriorityRule(True))["priority"] == -3


def test_abort_names_the_request() -> None:
    request = SglangWire().abort("id-1")
    assert (request.target, json.loads(request.body)) == ("/abort_request", {"rid": "id-1"})


# -- ids -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_incremental", [False, True], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_ids_come_once_and_in_order(is_incremental: bool, num_ahead: int) -> None:
    rng = random.Random(num_ahead)
    for _ in range(30):
        ids = [rng.randrange(100) for _ in range(rng.randint(1, 12))]
        steps = [rng.randint(1, 4) for _ in range(12)]
        finish = rng.choice(["stop", "length"])
        sink, closed = played(Play(ids, finish, steps, is_incremental, num_ahead))
        assert (sink.ids, sink.last, closed) == (ids, (finish, None), None)


def test_first_ids_come_with_what_the_engine_tells() -> None:
    sink, _ = played(Play())
    assert sink.first == FirstToken(cached_tokens=3, queue_ms=250.0, prefill_ms=125.0, prompt_tokens=3)
    assert [len(chunk) for chunk in sink.chunks] == [1, 1, 1, 1]


def test_times_that_the_engine_does_not_measure_are_not_told_as_zero() -> None:
    """It does so only with --enable-metrics."""
    sink = Sink()
    meta = {"completion_tokens": 1, "prompt_tokens": 3}
    SglangWire().reader(call(), sink).event(json.dumps({"output_ids": [7], "meta_info": meta}).encode(), 1.0)
    assert sink.first == FirstToken(None, None, None, prompt_tokens=3)


def test_stop_token_of_the_request_is_told_and_the_models_own_is_not() -> None:
    assert played(Play(ids=(1, 9)), call({"stop_token_ids": [9]}))[0].last == ("stop", 9)
    assert played(Play(ids=(1, 2)), call({"stop_token_ids": [9]}))[0].last == ("stop", None)


def test_ids_that_were_left_out_are_noticed() -> None:
    with pytest.raises(ValueError, match="some are lost"):
        played(Play(is_incremental=True, fault="lost"))
    sink, _ = played(Play(fault="lost"))
    assert sink.ids == [11, 12, 13, 2], "a list of all has them"


def test_answer_without_ids_says_what_to_do() -> None:
    sink, _ = played(Play(has_ids=False))
    assert isinstance(sink.error, EngineFailed)
    assert "--skip-tokenizer-init" in sink.error.message


def test_ids_without_text_are_read() -> None:
    assert played(Play(has_text=False))[0].ids == [11, 12, 13, 2]


@pytest.mark.parametrize("is_incremental", [False, True], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_logprobs_come_with_their_ids(is_incremental: bool, num_top: int) -> None:
    play = Play((10, 20, 30), steps=(2,), is_incremental=is_incremental)
    sink, _ = played(play, call({"logprobs": num_top}))
    assert [entry.token_ids[0] for entry in sink.logprobs] == [10, 20, 30]
    assert [entry.logprobs[0] for entry in sink.logprobs] == [-0.5, -1.5, -2.5]
    assert [len(entry.token_ids) for entry in sink.logprobs] == [1 + num_top] * 3
    if num_top:
        for entry, token_id in zip(sink.logprobs, (10, 20, 30), strict=True):
            tops = [(token_id + 1 - place, -0.25 - place) for place in range(num_top)]
            assert [*zip(entry.token_ids, entry.logprobs, strict=True)][1:] == tops
        assert sink.logprobs[2].rank == (2 if num_top > 1 else 0), "the second best is the sampled one"


def test_logprob_that_json_has_no_number_for_is_the_least() -> None:
    reader = SglangWire().reader(call({"logprobs": 1}), sink := Sink())
    meta = {
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 4, None]],
        "output_top_logprobs": [[[None, 5, None]]],
    }
    reader.event(json.dumps({"output_ids": [4], "meta_info": meta}).encode(), 1.0)
    assert sink.logprobs == [TokenLogprobs([4, 5], [-0.5, -9999.0], 0)]


def test_missing_logprobs_are_no_answer() -> None:
    reader = SglangWire().reader(call({"logprobs": 0}), Sink())
    with pytest.raises(ValueError, match="0 logprobs"):
        reader.event(b'{"output_ids": [4], "meta_info": {"completion_tokens": 1}}', 1.0)


# -- faults --------------------------------------------------------------------------------------------------


def test_error_event_ends_the_choice() -> None:
    sink, _ = played(Play(fault="error"))
    assert isinstance(sink.error, EngineFailed)
    assert "something broke" in sink.error.message
    assert sink.error.log_detail == ""
    sink, _ = played(Play(max_model_len=3))
    assert isinstance(sink.error, EngineRejected), "nothing has come, and it is the request that is wrong"


@pytest.mark.parametrize(
    ("num_before", "status", "kind"),
    [(0, 503, QueueFull), (0, 400, EngineRejected), (0, None, EngineFailed), (2, 503, EngineFailed)],
)
def test_abort_by_the_server_is_a_failure(num_before: int, status: int | None, kind: type[Any]) -> None:
    sink, _ = played(Play(fault="abort", num_before=num_before, abort_status=status))
    assert isinstance(sink.error, kind)
    assert len(sink.ids) == num_before


def test_broken_numbers_in_the_engine_are_no_stop() -> None:
    sink, _ = played(Play(fault="nan"))
    assert isinstance(sink.error, EngineFailed)
    assert "NaN happened" in sink.error.message


def test_body_that_ends_before_the_finish_is_not_complete() -> None:
    sink, closed = played(Play(fault="cut"))
    assert (closed, sink.last, sink.error) == (False, None, None)


def test_done_without_a_finish_is_a_failure() -> None:
    reader = SglangWire().reader(call(), sink := Sink())
    assert reader.event(b"[DONE]", 1.0)
    assert isinstance(sink.error, EngineFailed)


# -- what is no answer, and what is one all the same ---------------------------------------------------------


def told(*told_events: Any, **fields: Any) -> tuple[Sink, bool]:
    """Events as they are given. Whether the reader was done."""
    reader = SglangWire().reader(call(**fields), sink := Sink())
    done = False
    for each in told_events:
        assert not done
        done = reader.event(each if isinstance(each, bytes) else json.dumps(each).encode(), 1.0)
    return sink, done


def so_far(ids: list[Any], reason: Any = None, **meta: Any) -> dict[str, Any]:
    meta = {"completion_tokens": len(ids), "finish_reason": reason, **meta}
    return {"output_ids": ids, "meta_info": meta}


LENGTH = {"type": "length", "length": 2}


@pytest.mark.parametrize("bad", [-1, 1 << 31, 1 << 63, 1 << 70, 1.0, "2", None, True], ids=str)
def test_id_that_no_vocabulary_has_is_no_answer(bad: Any) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        told(so_far([1]), so_far([1, bad], LENGTH))
    with pytest.raises(ValueError, match="cannot be read"):
        told(so_far([1], completion_tokens=-5))


@pytest.mark.parametrize("is_incremental", [False, True], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("reason", [None, {"type": "stop", "matched": 5}], ids=["no finish", "finish"])
def test_ids_that_were_not_asked_for_are_cut_off(is_incremental: bool, reason: Any) -> None:
    all_ids = [*range(20)]
    for cut in (0, 1, 15, 16, 17, 19):
        last = all_ids[cut:] if is_incremental else all_ids
        sink, done = (
            told(so_far(all_ids[:cut]))
            if cut > 16
            else told(
                so_far(all_ids[:cut]),
                {**so_far(last, reason), "meta_info": {"completion_tokens": 20, "finish_reason": reason}},
            )
        )
        assert (sink.ids, sink.last, done) == (all_ids[:16], ("length", None), True)


def test_as_many_ids_as_were_asked_for_end_as_the_server_says() -> None:
    sink, _ = told(so_far([*range(15)]), so_far([*range(16)], {"type": "stop", "matched": 15}))
    assert (sink.ids, sink.last) == ([*range(16)], ("stop", None))


def test_logprobs_of_another_id_are_no_answer() -> None:
    for sampled, tops in (
        ([-0.5, 7, None], []),
        ([-0.5, -4, None], []),
        ([-0.5, 4, None], [[[-1.0, -5, None]]]),
    ):
        meta = {"output_token_logprobs": [sampled], "output_top_logprobs": tops}
        with pytest.raises(ValueError, match=r"."):
            told(so_far([4], **meta), sampling={"logprobs": len(tops)})


@pytest.mark.parametrize("value", [-5, 1 << 62, 1 << 70, 3.5, "3", [3], {}, True], ids=str)
def test_counts_that_can_be_none_are_passed_over(value: Any) -> None:
    sink, _ = told(so_far([1], prompt_tokens=value, cached_tokens=value), so_far([1, 2], LENGTH))
    assert (sink.ids, sink.first) == ([1, 2], FirstToken())


@pytest.mark.parametrize("value", ["1", [1], {}, True, 1 << 70], ids=str)
def test_times_that_can_be_none_are_passed_over(value: Any) -> None:
    times = {"queue_time": value, "forward_entry_time": value, "prefill_finished_time": 5.0}
    sink, _ = told(so_far([1], **times), so_far([1, 2], LENGTH))
    assert sink.first == FirstToken()


@pytest.mark.parametrize("matched", [[], {}, 1.5, [1.5], [None], -1, 1 << 70], ids=str)
def test_match_that_is_no_id_is_passed_over(matched: Any) -> None:
    sink, _ = told(so_far([1], {"type": "stop", "matched": matched}), sampling={"stop_token_ids": [9]})
    assert sink.last == ("stop", None)


def test_finish_that_is_a_word_is_one() -> None:
    assert told(so_far([1], "stop"))[0].last == ("stop", None)
    sink, _ = told(so_far([1], {"type": "abort", "message": {"a": ["gone"]}, "status_code": "x"}))
    assert isinstance(sink.error, EngineFailed)


def test_event_that_says_nothing_is_none() -> None:
    sink, done = told(b"", b"ping", so_far([1]), b"null", so_far([1, 2], LENGTH))
    assert (sink.ids, done) == ([1, 2], True)
    for broken in (b"{", b'{"x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"):
        with pytest.raises(ValueError, match="cannot be read"):
            told(so_far([1]), broken)


# -- what it tells of itself ---------------------------------------------------------------------------------


class Questions:
    """`upstream_ports.Ask` of the fake server."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.asked: list[str] = []

    async def __call__(
        self, method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()
    ) -> HttpResponse:
        self.asked.append(target)
        answer = reply(self._play, Asked(method, target, {}, None))
        assert answer.status == 200 or answer.status in allowed
        return HttpResponse(answer.status, (), answer.body)


async def test_kind_reads_models_and_settings() -> None:
    ask = Questions(Play(priority=(True, False)))
    assert await SglangKind().models(ask) == [ServedModel(MODEL, 4096)]
    traits = await SglangKind().traits(ask, sends_defaults=True)
    assert (traits.api, traits.block_size, traits.versions) == ("generate", 64, {"sglang": "0.5.23"})
    assert isinstance(traits.wire, SglangWire)
    assert json.loads(traits.wire.request(call(priority=1), "r").body)["priority"] == -1


async def test_kind_asks_older_servers_by_their_names() -> None:
    ask = Questions(Play(is_old=True, version="0.4.6"))
    assert (await SglangKind().traits(ask, sends_defaults=True)).versions == {"sglang": "0.4.6"}
    assert ask.asked == ["/server_info", "/get_server_info"]


async def test_load_is_read_from_what_the_server_has() -> None:
    metrics = await SglangKind().stats(Questions(Play()))
    assert metrics == EngineStats(3, 2, 0.75, 120, 60, 1)
    assert await SglangKind().stats(Questions(Play(has_metrics=False))) == EngineStats(8, 2, 0.5)
    ask = Questions(Play(has_metrics=False, has_loads=False))
    assert await SglangKind().stats(ask) == EngineStats()
    assert ask.asked[-1] == "/get_model_info", "else a server that is gone would seem to live"


async def test_pages_that_only_operators_may_see_are_no_fault() -> None:
    async def ask(method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()) -> HttpResponse:
        status = 200 if target == "/get_model_info" else 403
        assert status in (200, *allowed)
        return HttpResponse(status, (), b"<html>")

    assert await SglangKind().stats(ask) == EngineStats()


@pytest.mark.parametrize("num_top", [None, 0, 20])
def test_answer_of_ids_again_and_again_stays_under_its_bound(num_top: int | None) -> None:
    """Longest ids and logprobs: what a choice of 100000 tokens comes to, from events of 1 and of 1000."""
    engine_call = replace(call({} if num_top is None else {"logprobs": num_top}), max_tokens=100_000)

    def num_event_bytes(num_ids: int) -> int:
        entry = [-12.3456789012345678, 151_935, None]
        meta: dict[str, Any] = {"id": "0" * 40, "completion_tokens": num_ids, "cached_tokens": 1 << 20}
        if num_top is not None:
            meta["output_token_logprobs"] = [entry] * num_ids
            meta["output_top_logprobs"] = [[entry] * num_top] * num_ids
        event = {"text": "", "output_ids": [151_935] * num_ids, "meta_info": meta}
        return len(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")

    first, thousandth = num_event_bytes(1), num_event_bytes(1000)
    slope = (thousandth - first) / 999
    total = sum(first + slope * num_ids for num_ids in range(engine_call.max_tokens))
    assert total < SglangWire().reader(engine_call, Sink()).max_bytes < 2 * total + MAX_ANSWER_BYTES
