"""The streams of vLLM's two APIs of token ids, as it has written them, read however they arrive."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from backend.http_ports import HttpCall
from backend.upstream_answer import UpstreamAnswer
from backend.upstream_completions import CompletionsWire
from backend.upstream_generate import GenerateWire
from backend.upstream_load import UpstreamLoad
from backend.upstream_ports import AnswerReader, TokenWire
from pipeline.errors import EngineFailed, EngineRejected, HeadraceError, WorkerLost
from pipeline.values import FirstToken, TokenLogprobs
from tests.backend.linked import RecordingSink, make_call
from tests.backend.vllm_streams import (
    BAD_ID,
    COMPLETION,
    COMPLETION_LOGPROBS,
    ENGINE_ERROR,
    GENERATED,
    GENERATED_LOGPROBS,
    completion_event,
    generate_event,
    usage_event,
)

WIRES: list[TokenWire] = [CompletionsWire(), GenerateWire()]
STREAMS = [(CompletionsWire(), COMPLETION), (GenerateWire(), GENERATED)]
LOGPROB_STREAMS = [(CompletionsWire(), COMPLETION_LOGPROBS), (GenerateWire(), GENERATED_LOGPROBS)]
NAMES = ["completions", "generate"]


class NoCall:
    """Stands for the exchange that a test plays by hand."""

    def __init__(self) -> None:
        self.is_aborted = self.is_paused = False

    def abort(self) -> None:
        self.is_aborted = True

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class NoHost:
    key = "vllm+http://gpu1:8000"

    def __init__(self) -> None:
        self.noted_errors: list[tuple[str, HeadraceError, bool]] = []
        self.learns = False  # as its readers'

    def noted(self, model: str, error: HeadraceError, has_begun: bool) -> None:
        self.noted_errors.append((model, error, has_begun))

    def told(self) -> None: ...


class Reader:
    """A wire's own, but whether it sends a refused call again is the test's to say."""

    def __init__(self, reader: AnswerReader, host: NoHost) -> None:
        self._host = host
        self._reader = reader
        self.event, self.closed, self.max_bytes = reader.event, reader.closed, reader.max_bytes

    @property
    def has_finish(self) -> bool:
        return self._reader.has_finish

    def refused(self, status: int, body: bytes) -> bool:
        return self._host.learns


class Played:
    """An answer whose response the test writes itself."""

    def __init__(self, wire: TokenWire, **options: object) -> None:
        call = make_call([1, 2, 3], model="m", **options)  # type: ignore[arg-type]
        self.sink = RecordingSink()
        self.host = NoHost()
        self.load = UpstreamLoad()
        self.sent: list[NoCall] = []
        share = self.load.add(call.num_prompt_tokens, call.max_tokens)
        reader = Reader(wire.reader(call, self.sink), self.host)
        self.answer = UpstreamAnswer(self.host, "m", reader, self.sink.failed, share, self._send)

    def _send(self, answer: UpstreamAnswer) -> HttpCall:
        self.sent.append(NoCall())
        return self.sent[-1]

    @property
    def is_aborted(self) -> bool:
        return self.sent[-1].is_aborted

    def play(self, pieces: Sequence[bytes]) -> Played:
        self.answer.begun(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
        for piece in pieces:
            self.answer.data(piece)
        self.answer.ended()
        return self

    @property
    def is_over(self) -> bool:
        return self.sink.ended.done()

    @property
    def end(self) -> str | HeadraceError:
        return self.sink.ended.result()


def splits(stream: bytes) -> Iterator[list[bytes]]:
    """Every cut in two, one byte at a time, and some at random."""
    yield [stream]
    yield [stream[index : index + 1] for index in range(len(stream))]
    yield from ([stream[:cut], stream[cut:]] for cut in range(1, len(stream)))
    rng = random.Random(7)
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, len(stream)), 9))
        yield [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@pytest.mark.parametrize(("wire", "stream"), STREAMS, ids=NAMES)
async def test_stream_is_read_the_same_however_it_is_cut(wire: TokenWire, stream: bytes) -> None:
    for pieces in splits(stream):
        played = Played(wire).play(pieces)
        sink = played.sink
        assert (sink.ids, played.end, sink.stop) == ([359, 354, 7, 5646], "stop", 5646)
        assert (sink.first, sink.num_calls, sink.logprobs) == (FirstToken(cached_tokens=2), 3, [])
        assert (played.load.num_requests, played.load.outstanding_tokens) == (0, 0)
        assert not played.is_aborted
        assert not played.host.noted_errors


@pytest.mark.parametrize(("wire", "stream"), LOGPROB_STREAMS, ids=NAMES)
async def test_logprobs_are_the_sampled_token_then_the_most_likely(wire: TokenWire, stream: bytes) -> None:
    played = Played(wire, logprobs=2).play([stream])
    rare, second = played.sink.logprobs
    is_told = isinstance(wire, GenerateWire)  # the rank of a token that is none of the most likely
    assert rare == TokenLogprobs([28, 359, 2316], [-9.0, -0.5, -0.75], 85 if is_told else 0)
    assert second == TokenLogprobs([96, 260, 96], [-1.5, -1.0, -1.5], 2)
    assert played.sink.first is None


@pytest.mark.parametrize(("wire", "stream"), LOGPROB_STREAMS, ids=NAMES)
async def test_logprob_of_the_sampled_token_alone(wire: TokenWire, stream: bytes) -> None:
    played = Played(wire, logprobs=0).play([stream])
    assert [entry.token_ids for entry in played.sink.logprobs] == [[28], [96]]
    assert Played(wire).play([stream]).sink.logprobs == []


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
async def test_tokens_leave_at_once_and_only_the_last_waits_for_the_count(wire: TokenWire) -> None:
    event = completion_event if isinstance(wire, CompletionsWire) else generate_event
    played = Played(wire)
    assert played.load.num_waiting == 1
    played.answer.begun(200, ())
    assert played.load.num_waiting == 1
    played.answer.data(event([5]))
    assert (played.sink.ids, played.load.num_waiting) == ([5], 0)
    played.answer.data(event([6], "length"))
    assert played.sink.ids == [5]
    played.answer.data(usage_event(None))
    assert (played.sink.ids, played.end, played.sink.first) == ([5, 6], "length", None)


@pytest.mark.parametrize("tail", [b"data: [DONE]\n\n", b""], ids=["done", "end of the body"])
@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
async def test_finish_without_a_count_is_a_finish(wire: TokenWire, tail: bytes) -> None:
    event = completion_event if isinstance(wire, CompletionsWire) else generate_event
    played = Played(wire).play([event([5]), event([], "abort"), tail])
    assert (played.sink.ids, played.end) == ([5], "abort")


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
async def test_stream_that_ends_without_a_finish_has_lost_its_worker(wire: TokenWire) -> None:
    event = completion_event if isinstance(wire, CompletionsWire) else generate_event
    for tail in (b"", b"data: [DONE]\n\n"):
        played = Played(wire).play([event([5]), tail])
        assert isinstance(played.end, WorkerLost)
        assert played.load.num_requests == 0


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
async def test_error_in_the_stream_is_the_clients_only_before_the_first_token(wire: TokenWire) -> None:
    event = completion_event if isinstance(wire, CompletionsWire) else generate_event
    refused = Played(wire).play([BAD_ID]).end
    assert isinstance(refused, EngineRejected)
    assert "999999" in refused.message
    failed = Played(wire).play([event([5]), ENGINE_ERROR]).end
    assert isinstance(failed, EngineFailed)
    assert "Internal server error" in failed.message
    assert "Internal" not in failed.log_detail


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
@pytest.mark.parametrize(
    "payload", [b"data: {\n\n", b'data: {"choices": 3}\n\n', b'data: {"choices":[{"token_ids":["x"]}]}\n\n']
)
async def test_what_is_no_answer_ends_with_an_error_and_without_its_words(
    wire: TokenWire, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played(wire)
    played.answer.begun(200, ())
    played.answer.data(payload)
    assert played.is_aborted
    assert isinstance(played.end, EngineFailed)
    assert "no answer of its API" in str(played.end)
    assert "token_ids" not in caplog.text


async def test_server_that_gives_no_ids_back_is_told_apart() -> None:
    event = b'data: {"choices":[{"index":0,"text":"hello","finish_reason":null}]}\n\n'
    played = Played(CompletionsWire()).play([event])
    assert "gives no token ids back" in str(played.end)


async def test_logprobs_that_do_not_belong_to_the_ids_are_no_answer() -> None:
    stream = COMPLETION_LOGPROBS.replace(b'"token_ids":[28]', b'"token_ids":[28,29]')
    assert "no answer of its API" in str(Played(CompletionsWire(), logprobs=2).play([stream]).end)
    named = COMPLETION_LOGPROBS.replace(b'"tokens":["token_id:28"]', b'"tokens":[","]')
    assert "no answer of its API" in str(Played(CompletionsWire(), logprobs=2).play([named]).end)


# -- what is no answer, and what is one all the same ---------------------------------------------------------


def told(wire: TokenWire, *events: bytes, **options: object) -> Played:
    played = Played(wire, **options)
    played.answer.begun(200, ())
    played.answer.data(b"".join(events))
    return played


def event_of(wire: TokenWire) -> Callable[..., bytes]:
    return completion_event if isinstance(wire, CompletionsWire) else generate_event


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


def choice(**fields: object) -> bytes:
    return b"data: " + dumped({"choices": [{"index": 0, **fields}]}) + b"\n\n"


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
@pytest.mark.parametrize("bad", [-1, 1 << 31, 1 << 32, 1 << 63, 1 << 70, 1.0, "2", None, True], ids=str)
async def test_id_that_no_vocabulary_has_is_no_answer(wire: TokenWire, bad: object) -> None:
    for finish in (None, "stop"):
        bad_choice = {"index": 0, "token_ids": [6, bad], "finish_reason": finish}
        event = b"data: " + dumped({"choices": [bad_choice]}) + b"\n\n"
        played = told(wire, event_of(wire)([5]), event)
        assert "no answer of its API" in str(played.end)
        assert played.sink.ids == [5]


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
async def test_nothing_of_a_choice_comes_after_its_finish(wire: TokenWire) -> None:
    event = event_of(wire)
    late = (event([7]), event([8], "stop"), b"data: {\n\n", BAD_ID, b"data: [DONE]\n\n")
    for number in range(len(late)):
        played = told(wire, event([5]), event([6], "length"), *late[number:])
        assert (played.sink.ids, played.end) == ([5, 6], "length")
        assert not played.host.noted_errors


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
async def test_other_choices_are_not_looked_at(wire: TokenWire) -> None:
    others = [
        b"data: " + dumped({"choices": [{"index": index, "token_ids": [4], "finish_reason": f}]}) + b"\n\n"
        for index in (1, -1, "1")
        for f in (None, "stop")
    ]
    both = [{"index": 1, "token_ids": [4]}, {"index": "0", "token_ids": [6], "finish_reason": "stop"}]
    last = b"data: " + dumped({"choices": both}) + b"\n\ndata: [DONE]\n\n"
    played = told(wire, *others, event_of(wire)([5]), *others, last)
    assert (played.sink.ids, played.end) == ([5, 6], "stop")


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
async def test_error_beside_ids_is_an_error(wire: TokenWire) -> None:
    both = {"choices": [{"index": 0, "token_ids": [6]}], "error": {"message": "boom", "code": 500}}
    played = told(wire, event_of(wire)([5]), b"data: " + dumped(both) + b"\n\n")
    assert played.sink.ids == [5]
    assert "boom" in str(played.end)


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
@pytest.mark.parametrize("num_each", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("finish", [None, "stop"])
async def test_ids_that_were_not_asked_for_are_cut_off(
    wire: TokenWire, num_each: int, finish: str | None
) -> None:
    events = [event_of(wire)([*range(start, start + num_each)]) for start in range(0, 2 * num_each, num_each)]
    last = event_of(wire)([*range(2 * num_each, 3 * num_each)], finish)
    played = told(wire, *events, last, *[event_of(wire)([9])] * 4, max_tokens=4)
    if finish is not None and num_each == 1:
        played.answer.data(b"data: [DONE]\n\n")
        assert (played.sink.ids, played.end) == ([0, 1, 2], "stop")
    else:
        assert played.sink.ids == ([0, 1, 2, 9] if num_each == 1 else [0, 1, 2, 3])
        assert (played.end, played.sink.stop) == ("length", None)
    assert not played.host.noted_errors


async def test_logprobs_are_cut_off_with_their_ids() -> None:
    for wire, stream in LOGPROB_STREAMS:
        played = Played(wire, logprobs=1, max_tokens=1).play([stream])
        assert (played.sink.ids, played.end, len(played.sink.logprobs)) == ([28], "length", 1)


@pytest.mark.parametrize(
    "named", [b"token_id:29", b"token_id:-5", b"token_id:2147483648", b"token_id:" + b"9" * 5000]
)
async def test_logprobs_of_another_id_are_no_answer(named: bytes) -> None:
    stream = COMPLETION_LOGPROBS.replace(b'"tokens":["token_id:28"]', b'"tokens":["' + named + b'"]')
    assert "no answer of its API" in str(Played(CompletionsWire(), logprobs=2).play([stream]).end)
    other = GENERATED_LOGPROBS.replace(b'"content":[{"token_id":28', b'"content":[{"token_id":' + named[9:])
    assert "no answer of its API" in str(Played(GenerateWire(), logprobs=2).play([other]).end)
    if named != b"token_id:29":  # nor are these among the most likely
        stream = COMPLETION_LOGPROBS.replace(b'"token_id:359"', b'"' + named + b'"')
        assert "no answer of its API" in str(Played(CompletionsWire(), logprobs=2).play([stream]).end)


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
@pytest.mark.parametrize(
    ("usage", "first"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 3.0}}, FirstToken(3)),
        *(
            ({"prompt_tokens_details": {"cached_tokens": value}}, None)
            for value in (-5, 1 << 62, 1 << 70, 3.5, "3", None, [3])
        ),
        *(({"prompt_tokens_details": value}, None) for value in ("x", [1], None, 5)),
        *((value, None) for value in ([1], "x", 5, {})),
    ],
    ids=str,
)
async def test_counts_that_can_be_none_are_passed_over(
    wire: TokenWire, usage: object, first: FirstToken | None
) -> None:
    counted = b"data: " + dumped({"choices": [], "usage": usage}) + b"\n\n"
    played = told(wire, event_of(wire)([5], "stop"), counted)
    assert (played.end, played.sink.first) == ("stop", first)


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
@pytest.mark.parametrize("stop", [[1], 1 << 80, -1, "END", 1.5, True], ids=str)
async def test_stop_reason_that_is_no_id_is_passed_over(wire: TokenWire, stop: object) -> None:
    played = told(wire, choice(token_ids=[5], finish_reason="stop", stop_reason=stop), b"data: [DONE] \n\n")
    assert (played.sink.ids, played.end, played.sink.stop) == ([5], "stop", None)


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
async def test_event_that_says_nothing_is_none(wire: TokenWire) -> None:
    silent = [b"data:\n\n", b"data: ping\n\n", b'data: {"choices":null}\n\n', b"data: null\n\n"]
    played = told(
        wire, *silent, event_of(wire)([5]), *silent, event_of(wire)([6], "stop"), b"data: [DONE]\n\n"
    )
    assert (played.sink.ids, played.end) == ([5, 6], "stop")


@pytest.mark.parametrize("wire", WIRES, ids=NAMES)
async def test_event_that_is_nested_too_deeply_is_no_answer(wire: TokenWire) -> None:
    deep = b'data: {"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}\n\n"
    assert "no answer of its API" in str(told(wire, event_of(wire)([5]), deep).end)
