"""One request from its submission to its only end: choices, lost workers, limits, clients that go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from filters.rules import Rule
from gateway.answer import AnswerLimits
from pipeline.errors import (
    EngineFailed,
    EngineRejected,
    HeadraceError,
    InvalidRequest,
    NoWorker,
    QueueFull,
    WorkerLost,
    WorkerStalled,
)
from pipeline.events import CONTENT, Fragment
from pipeline.values import FirstToken, Medium, Prompt
from tests.backend.linked import is_lent
from tests.gateway.answering import Case, call, ids_of, turns

MASK = Rule("m", ("敏感词",), "mask", replacement="*")
BLOCK = Rule("b", ("敏感词",), "block")


# -- choices -------------------------------------------------------------------------------------------------


async def test_a_stream_is_head_role_text_finish_and_done() -> None:
    case = Case().start()
    assert case.client.messages == []
    case.streams[0].say("Hello")
    assert case.client.status == 200
    case.streams[0].say(" world", "stop")
    roles = [chunk["choices"][0]["delta"] for chunk in case.client.chunks]
    assert roles == [{"role": "assistant", "content": ""}, {"content": "Hello"}, {"content": " world"}, {}]
    assert case.client.finishes() == [(0, "stop")]
    assert case.client.is_done
    assert case.answer.is_ended
    assert (case.record.ended, case.record.finish, case.record.worker) == ("complete", ["stop"], "w0")


async def test_every_choice_gets_its_role_once_and_in_order() -> None:
    case = Case(num_choices=3).start()
    case.streams[2].say("c")
    case.streams[0].say("a")
    case.streams[2].say("C", "length")
    case.streams[1].say("b", "stop")
    assert not case.answer.is_ended
    case.streams[0].say("A", "stop")
    openings = [
        choice["index"]
        for chunk in case.client.chunks
        for choice in chunk["choices"]
        if "role" in choice["delta"]
    ]
    assert openings == [0, 1, 2]
    assert [case.client.text(index) for index in range(3)] == ["aA", "b", "cC"]
    assert case.client.finishes() == [(2, "length"), (1, "stop"), (0, "stop")]
    assert case.client.is_done
    assert case.record.finish == ["length", "stop", "stop"]


async def test_each_token_is_a_frame_of_its_own() -> None:
    case = Case().start()
    for number in range(20):
        case.streams[0].say(f"{number} ")
    assert len(case.client.chunks) == 21  # with the role
    assert len(case.client.bodies) == 21


async def test_merged_tokens_are_one_frame_and_all_counted() -> None:
    case = Case(include_usage=True).start()
    case.streams[0].say("one two three")
    case.streams[0].say("four", "stop")
    num_tokens = len(ids_of("one two three")) + len(ids_of("four")) + 1
    assert case.client.chunks[-1]["usage"]["completion_tokens"] == case.record.output_tokens == num_tokens


async def test_gaps_between_tokens_are_observed_per_choice() -> None:
    case = Case(num_choices=2).start()
    case.streams[0].say("a")
    case.later(0.5)
    case.streams[1].say("b")
    case.later(0.25)
    case.streams[0].say("a")
    case.later(0.125)
    case.streams[1].say("b")
    case.metrics.flush()
    name = "headrace_time_between_tokens_seconds"
    assert case.sample(f"{name}_count") == 2
    assert case.sample(f"{name}_sum") == pytest.approx(0.75 + 0.375)


async def test_what_a_server_tells_with_the_last_token_counts_and_so_does_its_gap() -> None:
    seen: list[float] = []
    case = Case(stream=False).start()
    case.answer._observe_prompt = lambda *args: seen.append(args[-1])
    first_s = case.engine.now_s
    case.streams[0].sink.tokens(ids_of("a"), None, None, None, None, first_s)
    assert case.record.cached_tokens is None
    case.later(0.5)
    case.streams[0].say("b", "stop", first=FirstToken(cached_tokens=2))  # as a stock vLLM server
    assert case.record.cached_tokens == 2
    assert case.client.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    case.metrics.flush()
    assert case.sample("headrace_time_between_tokens_seconds_count") == 1
    # The engine looked the prompt up before its first token, whenever it tells.
    assert seen == [first_s]


async def test_stop_string_ends_a_choice_and_its_engine() -> None:
    case = Case(stops=["STOP"]).start()
    case.streams[0].say("a ST")
    case.streams[0].say("OP tail")
    assert case.streams[0].num_aborts == 1
    assert case.client.text() == "a "
    assert case.client.chunks[-1]["choices"][0]["stop_reason"] == "STOP"
    assert case.client.is_done


async def test_block_ends_with_an_empty_delta_and_its_result() -> None:
    case = Case(rules=[BLOCK], include_usage=True).start()
    case.streams[0].say("abc敏")
    case.streams[0].say("感词def")
    assert case.streams[0].is_aborted
    texts, ending, usage = case.client.chunks[1:-2], case.client.chunks[-2], case.client.chunks[-1]
    assert [each["choices"][0]["finish_reason"] for each in texts] == [None]
    assert case.client.text() == "abc"
    assert ending["choices"][0]["delta"] == {}
    assert ending["choices"][0]["finish_reason"] == "content_filter"
    assert ending["choices"][0]["content_filter_results"] == {"blocked": True}
    assert usage["choices"] == []
    assert case.client.is_done
    assert case.record.rule_hits == 1
    assert (
        case.sample(
            "headrace_rule_hits_total", rule="b", direction="output", channel="content", action="block"
        )
        == 1
    )


async def test_block_before_a_stop_in_one_step_ends_the_engine() -> None:
    case = Case(rules=[BLOCK], stops=["STOP"]).start()
    case.streams[0].say("a敏感词STOP")
    assert case.streams[0].is_aborted
    assert case.client.finishes() == [(0, "content_filter")]


async def test_engines_repetition_is_a_stop() -> None:
    case = Case().start()
    case.streams[0].say("aaa", "repetition")
    assert case.client.finishes() == [(0, "stop")]


async def test_filters_peaks_are_recorded() -> None:
    case = Case(rules=[MASK]).start()
    case.streams[0].say("a敏感")
    case.streams[0].say("觉", "stop")
    assert case.record.held_peak == 2
    assert case.client.text() == "a敏感觉"
    assert case.record.undecided == 0


async def test_logprobs_travel_with_their_text_and_none_are_lost() -> None:
    case = Case(rules=[MASK]).start()
    ids = ids_of("敏感觉!")
    for token_id in ids:
        case.streams[0].say([token_id], logprobs=True)
    case.streams[0].say([0], "length", logprobs=True)  # <|endoftext|>: a token without text
    entries = [
        entry
        for chunk in case.client.chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == "敏感觉!"
    assert len(entries) == len(ids) + 1
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)  # none completes the word


# -- submission ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [QueueFull("full"), InvalidRequest("seed")], ids=lambda e: type(e).__name__)
async def test_a_refused_choice_leaves_nothing_running(error: HeadraceError) -> None:
    case = Case(num_choices=3)
    case.engine.refuse = [None, None, error]
    with pytest.raises(type(error)):
        case.start()
    assert [stream.num_aborts for stream in case.streams] == [1, 1]
    assert case.answer.is_ended
    assert case.client.messages == []


async def test_lost_worker_before_any_text_costs_nothing() -> None:
    case = Case(include_usage=True).start()
    case.streams[0].say([0], first=FirstToken(cached_tokens=9))  # no text yet: <|endoftext|>
    case.streams[0].fail(WorkerLost("gone"))
    assert not case.answer.is_ended
    case.streams[1].say("Hello world", "stop")
    assert case.client.text() == "Hello world"
    assert case.client.is_done
    assert len([chunk for chunk in case.client.chunks if chunk["choices"]]) == 3  # one role only
    assert case.record.resubmitted == 1
    assert case.record.worker == "w1"
    assert case.record.output_tokens == len(ids_of("Hello world")) + 1
    assert case.sample("headrace_resubmitted_total") == 1


async def test_text_held_by_a_lost_worker_is_forgotten() -> None:
    case = Case(rules=[MASK], limits=AnswerLimits(hold_s=2)).start()
    case.streams[0].say("敏")
    case.later(1)
    case.streams[0].fail(WorkerLost("gone"))
    case.later(0.5)
    case.streams[1].say("敏")
    case.later(1.5)  # the time that the first one held text is none of the second's
    assert not case.answer.is_ended
    case.streams[1].say("感词", "stop")
    assert case.client.text() == "***"


async def test_a_second_loss_ends_the_answer() -> None:
    case = Case(num_choices=2).start()
    case.streams[0].fail(WorkerLost("gone"))
    case.streams[2].fail(WorkerLost("gone again"))
    assert case.answer.is_ended
    assert case.streams[1].is_aborted
    assert case.client.status == 502
    assert case.client.json["error"]["code"] == "worker_lost"
    assert case.record.resubmitted == 1


async def test_each_choice_may_be_resubmitted() -> None:
    case = Case(num_choices=2).start()
    case.streams[0].fail(WorkerLost("gone"))
    case.streams[1].fail(WorkerLost("gone"))
    case.streams[2].say("a", "stop")
    case.streams[3].say("b", "stop")
    assert [case.client.text(0), case.client.text(1)] == ["a", "b"]
    assert case.record.resubmitted == 2


async def test_no_resubmission_after_text() -> None:
    case = Case().start()
    case.streams[0].say("Hello")
    case.streams[0].fail(WorkerLost("gone"))
    assert len(case.streams) == 1
    assert case.answer.is_ended
    assert case.client.chunks[-1]["error"]["code"] == "worker_lost"
    assert case.client.is_ended
    assert not case.client.is_done
    assert case.client.finishes() == []


async def test_an_answer_that_is_not_streamed_is_resubmitted_after_text_too() -> None:
    """None of it has left."""
    case = Case(stream=False, num_choices=2).start()
    case.streams[0].say("old", logprobs=True)
    case.streams[1].say("done", "stop")
    case.streams[0].fail(WorkerLost("gone"))
    case.streams[2].say("new", "stop", logprobs=True)
    choices = case.client.json["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["new", "done"]
    assert len(choices[0]["logprobs"]["content"]) == len(ids_of("new"))
    tokens = len(ids_of("new")) + 1 + len(ids_of("done")) + 1
    assert case.client.json["usage"]["completion_tokens"] == tokens


# -- how long a prompt's buffer stays lent -------------------------------------------------------------------


class Lent:
    """A case whose prompt lies in a pooled buffer. The engine has let go of each call that it took."""

    def __init__(self, **options: Any) -> None:
        self.buffer = bytearray(b"\1\0\0\0" * 5)
        self.case = Case(**options)
        self.case.start(Prompt(memoryview(self.buffer).toreadonly(), 5, 0))
        self.forget()

    def forget(self) -> None:
        for stream in self.case.streams:
            stream.call = call()

    @property
    def is_lent(self) -> bool:
        return is_lent(self.buffer)


async def test_buffer_is_lent_until_the_first_text_of_every_choice() -> None:
    lent = Lent(num_choices=2)
    lent.case.streams[0].say("a")
    lent.case.streams[1].say([0])  # no text yet: a lost worker would cost nothing
    assert lent.is_lent
    lent.case.streams[1].say("b")
    assert not lent.is_lent


async def test_buffer_is_lent_while_a_filter_holds_all_text() -> None:
    lent = Lent(rules=[MASK])
    lent.case.streams[0].say("敏感")
    assert lent.is_lent
    lent.case.streams[0].say("觉")
    assert not lent.is_lent


async def test_buffer_is_lent_to_the_end_of_an_answer_that_is_not_streamed() -> None:
    lent = Lent(stream=False)
    lent.case.streams[0].say("a")
    assert lent.is_lent
    lent.case.streams[0].say("b", "stop")
    assert not lent.is_lent


async def test_buffer_is_free_once_a_call_was_submitted_for_the_second_time() -> None:
    lent = Lent()
    lent.case.streams[0].fail(WorkerLost("gone"))
    assert lent.is_lent  # by the second engine
    lent.forget()
    assert not lent.is_lent
    lent.case.streams[1].say("Hello", "stop")
    assert lent.case.client.text() == "Hello"


@pytest.mark.parametrize("end", ["fail", "gone", "timeout"])
async def test_buffer_is_free_when_the_answer_ends_before_any_text(end: str) -> None:
    lent = Lent()
    if end == "fail":
        lent.case.answer.fail(EngineFailed("broken"))
    elif end == "gone":
        lent.case.answer.client_gone("closed")
    else:
        lent.case.later(0.0)
        lent.case.later(1000.0)
    assert lent.case.answer.is_ended
    assert not lent.is_lent


@pytest.mark.parametrize("error", [NoWorker("none left"), QueueFull("full"), WorkerLost("closing")], ids=str)
async def test_no_other_worker_is_a_lost_worker(error: HeadraceError) -> None:
    case = Case().start()
    case.engine.refuse = [error]
    case.streams[0].fail(WorkerLost("gone"))
    assert case.client.status == 502
    assert case.client.json["error"]["code"] == "worker_lost"
    assert case.record.ended == "worker_lost"
    assert case.record.resubmitted == 0


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineRejected("bad grammar"), 400),
        (EngineFailed("no"), 502),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failure_before_the_head_is_an_http_error(
    error: HeadraceError, status: int, stream: bool
) -> None:
    case = Case(stream=stream, num_choices=2).start()
    case.streams[1].fail(error)
    assert case.client.status == status
    assert case.client.json == {"error": dict(case.client.json["error"], code=error.code)}
    assert case.client.is_ended
    assert case.streams[0].num_aborts == 1
    assert case.record.status == status
    assert case.record.ended == error.code


async def test_a_failure_after_the_head_is_an_error_frame_and_nothing_else() -> None:
    case = Case(num_choices=2, include_usage=True).start()
    case.streams[0].say("Hello")
    case.streams[1].fail(EngineFailed("no"))
    assert case.client.frames[-1].startswith(b'data: {"error":{')
    assert case.client.is_ended
    assert b"[DONE]" not in case.client.body
    assert b"usage" not in case.client.body
    assert case.client.finishes() == []
    assert case.streams[0].is_aborted
    assert case.record.status == 200
    case.answer.fail(EngineFailed("again"))
    assert case.client.body.count(b"error") == 1 + case.client.body.count(b"engine_error")


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_engines_fault_is_never_a_finish(reason: str) -> None:
    case = Case().start()
    case.streams[0].say("Hello")
    case.streams[0].say("", reason)
    assert case.client.chunks[-1]["error"]["code"] == "engine_failed"
    assert case.client.finishes() == []


async def test_errors_in_a_log_hold_no_text_of_the_request() -> None:
    case = Case().start()
    case.streams[0].fail(EngineRejected("the grammar 'MARKER' does not compile"))
    assert "MARKER" in case.client.json["error"]["message"]
    assert "MARKER" not in repr(case.record.log_fields(101.0, 0.0))


# -- limits --------------------------------------------------------------------------------------------------


async def test_no_first_token_within_the_queue_limit() -> None:
    case = Case(limits=AnswerLimits(queue_s=60, heartbeat_s=1000), num_choices=2).start()
    case.later(0.1)
    case.streams[0].say([0])
    case.later(29)
    case.streams[0].say([0])
    case.later(29)
    case.streams[0].say([0])
    assert not case.answer.is_ended
    case.later(2.5)
    assert case.client.chunks[-1]["error"]["code"] == "queue_timeout"
    assert [stream.num_aborts for stream in case.streams] == [1, 1]


async def test_queue_limit_is_a_504_before_the_head() -> None:
    case = Case(limits=AnswerLimits(queue_s=60, heartbeat_s=1000)).start()
    case.later(0.1)
    case.later(60.1)
    assert case.client.status == 504
    assert "60 s" in case.client.json["error"]["message"]


async def test_no_token_within_the_stall_limit_names_the_worker() -> None:
    case = Case(limits=AnswerLimits(stall_s=30)).start()
    case.streams[0].say("a")
    case.later(29)
    case.streams[0].say("a")
    case.later(29)
    assert not case.answer.is_ended
    case.later(2)
    error = case.client.chunks[-1]["error"]
    assert error["code"] == "worker_stalled"
    assert "'w0'" in error["message"]
    assert case.streams[0].is_aborted


async def test_a_choice_that_is_done_cannot_stall() -> None:
    case = Case(num_choices=2, limits=AnswerLimits(stall_s=30)).start()
    case.streams[0].say("a", "stop")
    for _ in range(4):
        case.streams[1].say("b")
        case.later(20)
    assert not case.answer.is_ended


async def test_the_whole_request_has_a_deadline() -> None:
    case = Case(limits=AnswerLimits(request_s=600)).start()
    while case.engine.now_s < 695:
        case.streams[0].say("a")
        case.later(9)
    case.later(10)
    assert case.client.chunks[-1]["error"]["code"] == "deadline_exceeded"
    assert case.streams[0].is_aborted


async def test_text_held_for_too_long_is_blocked() -> None:
    case = Case(rules=[MASK], limits=AnswerLimits(hold_s=2)).start()
    case.streams[0].say("ab敏")
    case.later(1.9)
    case.streams[0].say("\u200b")
    case.later(0.2)
    assert not case.answer.is_ended
    case.streams[0].say("\u200b")
    case.later(0.1)
    assert case.client.text() == "ab"
    assert case.client.finishes() == [(0, "content_filter")]
    assert case.streams[0].is_aborted
    assert case.sample("headrace_released_at_bound_characters_total") == 0


class _Keeps:
    """A parser that keeps whatever begins at a bracket, for longer than this test."""

    def __init__(self) -> None:
        self._keeps = False

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        self._keeps = self._keeps or "[" in text
        return () if self._keeps else (Fragment(CONTENT, text),)

    def finish(self) -> Sequence[Fragment]:
        return ()


async def test_text_is_held_as_long_as_a_parser_keeps_what_comes_after_it() -> None:
    case = Case(rules=[MASK], limits=AnswerLimits(hold_s=2), parser=_Keeps).start()
    case.streams[0].say("ab敏")
    case.streams[0].say("\u200b")
    for _ in range(3):
        case.later(1.5)
        case.streams[0].say("[")
    case.later(0.1)
    assert not case.answer.is_ended
    case.streams[0].say("", "stop")
    assert case.client.text() == "ab敏\u200b"


async def test_text_held_for_too_long_is_released_and_counted_where_the_settings_say_so() -> None:
    case = Case(rules=[MASK], hold_policy="release", limits=AnswerLimits(hold_s=2)).start()
    case.streams[0].say("ab敏")
    case.later(2.1)
    case.streams[0].say("感")
    case.later(0.1)
    assert case.client.text() == "ab敏感"
    case.streams[0].say("觉", "stop")
    assert case.client.is_done
    assert case.sample("headrace_released_at_bound_characters_total") == 2


async def test_text_is_held_as_long_as_the_engine_pauses() -> None:
    """Nothing could decide it meanwhile, and to block an answer because its engine is busy would be wrong."""
    case = Case(rules=[MASK], limits=AnswerLimits(hold_s=2)).start()
    case.streams[0].say("ab敏")
    case.later(20)
    assert not case.answer.is_ended
    case.streams[0].say("觉", "stop")
    assert case.client.text() == "ab敏觉"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(QueueFull("full"), 503, "queue_full"), (WorkerStalled("silent"), 504, "worker_stalled")],
)
async def test_choice_that_its_worker_does_not_serve_goes_elsewhere_once(
    error: HeadraceError, status: int, code: str
) -> None:
    case = Case(stream=False).start()
    case.streams[0].fail(error)
    assert len(case.streams) == 2
    assert case.client.messages == []
    case.streams[1].fail(error)
    assert len(case.streams) == 2
    assert (case.client.status, case.client.json["error"]["code"]) == (status, code)


async def test_choice_that_nobody_else_takes_fails_with_what_happened_first() -> None:
    case = Case().start()
    case.engine.refuse = [NoWorker("none is ready")]
    case.streams[0].fail(WorkerStalled("worker w0 has sent nothing"))
    assert case.client.json["error"]["code"] == "worker_stalled"
    assert "w0" in case.client.json["error"]["message"]


async def test_queue_limit_counts_anew_for_another_worker() -> None:
    case = Case(stream=False, limits=AnswerLimits(queue_s=60, stall_s=100)).start()
    case.later(0.1)
    case.streams[0].say("a")
    case.later(65)
    case.streams[0].fail(WorkerLost("gone"))
    case.later(0.1)
    assert not case.answer.is_ended
    case.later(60.1)
    assert case.client.json["error"]["code"] == "queue_timeout"


async def test_hold_of_text_that_moves_on_starts_anew() -> None:
    case = Case(rules=[MASK], limits=AnswerLimits(hold_s=2)).start()
    for _ in range(5):
        case.streams[0].say("x敏")
        case.later(1.5)
    assert not case.answer.is_ended


async def test_heartbeats_come_before_the_first_token_and_in_silence_only() -> None:
    case = Case(limits=AnswerLimits(heartbeat_s=5)).start()
    for _ in range(110):
        case.later(0.1)
    assert case.client.status == 200
    assert case.client.frames == [b": ping"] * 2
    for _ in range(200):
        case.streams[0].say("a")
        case.later(0.1)
    assert case.client.body.count(b": ping") == 2
    for _ in range(60):
        case.later(0.1)
    assert case.client.frames[-1] == b": ping"
    assert case.client.body.count(b": ping") == 3


async def test_an_error_after_a_heartbeat_is_an_error_frame() -> None:
    case = Case(limits=AnswerLimits(heartbeat_s=5)).start()
    case.later(5.1)
    case.streams[0].fail(EngineFailed("no"))
    assert case.client.status == 200
    assert case.client.chunks == [{"error": dict(case.client.chunks[0]["error"], code="engine_failed")}]
    assert not case.client.is_done


async def test_an_answer_that_is_not_streamed_has_no_heartbeat() -> None:
    case = Case(stream=False, limits=AnswerLimits(heartbeat_s=5)).start()
    case.later(50)
    assert case.client.messages == []


async def test_a_client_that_does_not_read_is_told_after_its_time() -> None:
    case = Case(limits=AnswerLimits(slow_reader_s=30)).start()
    case.streams[0].say("a")
    assert case.answer.check_reader(case.engine.now_s) is None
    case.client.stops_reading()
    case.streams[0].say("b")
    since_s = case.outlet.blocked_since_s
    assert since_s is not None
    assert case.answer.check_reader(since_s + 29.9) is None
    reason = case.answer.check_reader(since_s + 30)
    assert reason is not None
    assert "30 s" in reason
    case.outlet.drop()


# -- clients that go -----------------------------------------------------------------------------------------


async def test_a_gone_client_stops_the_engine_and_nothing_more_is_written() -> None:
    case = Case(num_choices=2, rules=[MASK]).start()
    case.streams[0].say("a敏")
    case.answer.client_gone("closed the connection")
    assert [stream.num_aborts for stream in case.streams] == [1, 1]
    assert case.client.text() == "a"
    assert not case.client.is_ended
    assert (case.record.ended, case.record.status) == ("client_closed", 200)
    assert case.record.detail == "closed the connection"
    fields = case.record.log_fields(101.0, 0.0)
    assert fields["undecided_characters"] == 1
    case.answer.client_gone("again")
    case.answer.fail(EngineFailed("no"))
    assert case.record.detail == "closed the connection"
    assert [stream.num_aborts for stream in case.streams] == [1, 1]


async def test_held_text_of_a_failed_answer_is_neither_flushed_nor_decided() -> None:
    case = Case(rules=[MASK]).start()
    case.streams[0].say("a敏")
    case.streams[0].fail(EngineFailed("no"))
    assert case.client.text() == "a"
    assert case.record.undecided == 1


async def test_a_client_that_goes_in_the_queue_is_a_499() -> None:
    case = Case().start()
    case.answer.client_gone("closed the connection")
    assert case.record.status == 499
    assert case.streams[0].is_aborted


async def test_a_client_past_its_bound_stops_the_engine() -> None:
    case = Case(max_buffered_bytes=1000).start()
    case.streams[0].say("a")
    case.client.stops_reading()
    while not case.streams[0].is_aborted:
        case.streams[0].say("x")
    assert len(case.gone) == 1
    assert case.record.ended == "client_closed"
    assert "the limit is 1000" in case.record.detail
    await turns()


async def test_a_client_lost_by_the_finish_is_not_a_complete_answer() -> None:
    case = Case().start()
    case.streams[0].say("a")
    case.client.error = ConnectionResetError()
    case.streams[0].say("b", "stop")
    assert case.record.ended == "client_closed"
    assert len(case.gone) == 1


async def test_a_client_that_misses_the_last_bytes_is_not_a_complete_answer() -> None:
    case = Case(stream=False, max_buffered_bytes=100).start()
    case.client.stops_reading()
    case.streams[0].say("a" * 200, "stop")
    assert case.record.ended == "client_closed"
    assert "wait" in case.record.detail
    assert (case.record.status, case.record.finish) == (200, ["stop"])
    await turns()


async def test_cached_tokens_count_once_per_prompt() -> None:
    """Two prompts with two choices each: the second choice of a prompt finds what the first one computed."""
    case = Case(stream=False, num_choices=4)
    first, second = call(), call()
    case.answer.start([first, first, second, second], case._make)
    for stream, cached in zip(case.streams, (3, 5, 2, 5), strict=True):
        stream.say("a", "stop", first=FirstToken(cached_tokens=cached))
    assert case.client.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


async def test_a_prompt_counts_as_the_engine_counts_it_once() -> None:
    """Images are many tokens each, which only the engine knows. Two prompts, of two choices and of one."""
    case = Case(stream=False, num_choices=3)
    first, second = call(prompt=Prompt(memoryview(b"\1\0\0\0" * 9), 9, 0)), call()
    case.record.prompt_tokens = first.prompt.num_tokens + second.prompt.num_tokens
    case.answer.start([first, first, second], case._make)
    for stream, prompt_tokens in zip(case.streams, (12, 12, None), strict=True):
        stream.say("a", "stop", first=FirstToken(prompt_tokens=prompt_tokens))
    assert case.client.json["usage"]["prompt_tokens"] == 12 + second.prompt.num_tokens


@pytest.mark.parametrize(
    ("kinds", "counted"),
    [(["image", "image"], {"image": 14}), (["audio"], {"audio": 13}), (["image", "audio"], {}), ([], {})],
)
async def test_tokens_of_media_are_told_apart_where_there_is_one_kind(
    kinds: list[Any], counted: dict[str, int]
) -> None:
    """Twelve more tokens than placeholders; the two kinds of one prompt are not told apart."""
    case = Case(stream=False)
    media = tuple(Medium(kind, b"", "png", "") for kind in kinds)
    case.answer.start([replace(call(), media=media)], case._make)
    num_tokens = call().prompt.num_tokens
    case.streams[0].say("a", "stop", first=FirstToken(prompt_tokens=num_tokens + 12))
    assert case.record.media_tokens == counted


async def test_a_prompt_that_is_submitted_again_counts_once() -> None:
    case = Case(stream=False).start()
    case.streams[0].say([0], first=FirstToken(prompt_tokens=12))
    case.streams[0].fail(WorkerLost("gone"))
    case.streams[1].say("a", "stop", first=FirstToken(prompt_tokens=12))
    assert case.client.json["usage"]["prompt_tokens"] == 12
