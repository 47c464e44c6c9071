import json
from random import Random
from typing import Any

import pytest

from gateway.bench.answer_frames import AnswerFrames, StreamFault, error_text
from gateway.bench.plausible import MAX_COUNT, MAX_TIMINGS
from gateway.bench.sample import Sample
from tests.gateway.bench.fake_server import DONE, delta, event, usage

STREAM = b"".join(
    (
        b": ping\n\n",
        delta(role="assistant", content=""),
        delta(content="Hi"),
        delta(reasoning="because\u2028of"),
        delta(reasoning_content="r"),
        b": ping\n\n",
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]),
        delta(tool_calls=[]),
        delta(content=None),
        delta(content=' \u4e16界 "data: {}"'),
        delta("stop"),
        event(
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 11,
                    "completion_tokens": 9,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
                "timings": {"ttft_ms": 1.5, "tpot_ms": None, "note": "x", "is_it": True, "cached": 3},
            }
        ),
        DONE,
    )
)


def read(*pieces: bytes, keeps_text: bool = True) -> tuple[Sample, str]:
    """What a whole stream in these reads gives; read number n comes at n seconds."""
    sample = Sample(number=0, due_s=0.0)
    frames = AnswerFrames(sample, keeps_text)
    for at, piece in enumerate(pieces):
        frames.feed(piece, float(at))
    frames.finish()
    return sample, frames.text


def facts(sample: Sample) -> tuple[Any, ...]:
    counts = (sample.prompt_tokens, sample.output_tokens, sample.cached_tokens)
    return len(sample.frames_s), sample.finish, counts, sample.timings


def fault_of(*payloads: bytes) -> tuple[str, str]:
    with pytest.raises(StreamFault) as caught:
        read(*payloads)
    return caught.value.kind, str(caught.value)


def test_frames_with_output_are_counted_and_the_rest_is_not() -> None:
    sample, text = read(STREAM)
    assert facts(sample) == (5, "stop", (11, 9, 4), {"ttft_ms": 1.5, "cached": 3.0})
    assert text == 'Hi \u4e16界 "data: {}"'


def test_frames_of_one_read_have_its_time_and_those_of_the_next_have_theirs() -> None:
    middle = STREAM.index(delta(reasoning_content="r"))
    sample, _ = read(STREAM[:middle], b"", STREAM[middle:])
    assert sample.frames_s == [0.0, 0.0, 2.0, 2.0, 2.0]


def test_every_split_of_a_stream_gives_the_same() -> None:
    expected = (facts(read(STREAM)[0]), read(STREAM)[1])
    for at in range(len(STREAM) + 1):
        sample, text = read(STREAM[:at], STREAM[at:])
        assert (facts(sample), text) == expected
    sample, text = read(*(STREAM[at : at + 1] for at in range(len(STREAM))))
    assert (facts(sample), text) == expected
    random = Random(5)
    for _ in range(50):
        cuts = sorted(random.choices(range(len(STREAM)), k=random.randint(1, 12)))
        sample, text = read(*(STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)))
        assert (facts(sample), text) == expected


def test_a_frame_is_counted_when_it_is_complete() -> None:
    sample = Sample(number=0, due_s=0.0)
    frames = AnswerFrames(sample)
    frame = delta(content="x")
    frames.feed(frame[:-1], 1.0)
    assert sample.frames_s == []
    frames.feed(frame[-1:], 2.0)
    assert sample.frames_s == [2.0]


def test_completions_have_their_output_in_text() -> None:
    frames = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("a", "", "b")]
    end = event({"choices": [{"index": 0, "text": "c", "finish_reason": "length"}]})
    sample, text = read(*map(event, frames), end, DONE)
    assert (sample.frames_s, sample.finish, text) == ([0.0, 2.0, 3.0], "length", "abc")


def test_several_choices_of_a_frame_are_one_frame() -> None:
    two = {"choices": [{"delta": {"content": "a"}}, {"delta": {"content": "b"}, "finish_reason": "stop"}]}
    assert len(read(event(two), DONE)[0].frames_s) == 1


def test_usage_in_every_frame_is_the_last_ones() -> None:
    def counted(tokens: int) -> bytes:
        return event({"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": tokens}})

    sample, _ = read(counted(1), counted(2), delta("stop"), DONE)
    assert (sample.output_tokens, sample.prompt_tokens, len(sample.frames_s)) == (2, None, 2)


def test_a_null_usage_and_a_null_error_are_none() -> None:
    frame = event({"choices": [{"delta": {"content": "x"}}], "usage": None, "error": None})
    sample, _ = read(frame, usage(1, 1), event({"choices": None, "usage": None}), delta("stop"), DONE)
    assert (sample.prompt_tokens, sample.output_tokens) == (1, 1)


@pytest.mark.parametrize(
    "frame",
    [
        event({"error": {"message": "the worker is\nlost", "code": 500}}),
        event({"error": "the worker is lost"}),
        event({"object": "error", "message": "the worker is lost", "code": 400}),
        b"event: error\n" + event({"error": {"message": "the worker is lost"}}),
    ],
)
def test_an_error_frame_fails_also_when_a_tidy_end_follows(frame: bytes) -> None:
    assert fault_of(delta(content="x"), frame, DONE) == ("error_frame", "the worker is lost")


@pytest.mark.parametrize(
    ("frames", "kind", "detail"),
    [
        ((delta(content="x"),), "truncated", "the stream ended without a finish_reason"),
        ((delta(content="x"), DONE), "truncated", "the stream ended without a finish_reason"),
        ((delta(content="x"), delta("stop")), "truncated", "the stream ended without [DONE]"),
        ((delta(content="x"), delta("stop"), DONE[:-1]), "truncated", "the stream ended without [DONE]"),
        ((), "truncated", "the stream ended without a finish_reason"),
        ((delta("stop"), DONE), "empty", "no output; finish_reason 'stop'"),
        (
            (delta(content="x"), delta("abort"), DONE),
            "aborted",
            "the server ended the answer with finish_reason 'abort'",
        ),
    ],
)
def test_an_answer_that_is_not_whole_fails(frames: tuple[bytes, ...], kind: str, detail: str) -> None:
    assert fault_of(*frames) == (kind, detail)


@pytest.mark.parametrize(
    "payload",
    [
        *(b"{", b"[1]", b'{"choices": 5}', b"\xff"),
        b'{"choices": [{"delta": {"content": "\xff"}}]}',
        b'{"object": %b}' % (b"[" * 20_000 + b"]" * 20_000),
        b'{"usage": %b}' % (b"[" * 20_000 + b"]" * 20_000),
    ],
)
def test_a_frame_that_is_no_chunk_fails(payload: bytes) -> None:
    kind, detail = fault_of(b"data: " + payload + b"\n\n")
    assert kind == "bad_frame"
    assert detail.startswith("a frame is no chunk of an answer: ")


@pytest.mark.parametrize("usage", [b'{"prompt_tokens": 1e999}', b'{"x": 1e400}'])
def test_counts_that_cannot_be_read_fail(usage: bytes) -> None:
    told = b'data: {"choices": [], "usage": %b}\n\n' % usage
    assert fault_of(delta("stop", content="x"), told, DONE)[0] == "bad_frame"


def test_counts_that_are_none_are_not_taken() -> None:
    for count in (0, -1, 1.5, True, None, "7", MAX_COUNT + 1, 10**30):
        sample, _ = read(delta("stop", content="x"), usage(count, count), DONE)  # type: ignore[arg-type]
        assert (sample.prompt_tokens, sample.output_tokens) == (None, None)
    assert read(delta("stop", content="x"), usage(MAX_COUNT, 0), DONE)[0].prompt_tokens == MAX_COUNT


def test_timings_that_are_none_are_not_taken() -> None:
    told = {"a": 1e9, "b": -5, "c": 2e9, "d": 1e308, "e": 10**400, "n" * 99: 1}
    sample, _ = read(delta("stop", content="x"), event({"choices": [], "timings": told}), DONE)
    assert sample.timings == {"a": 1e9, "n" * 64: 1.0}
    many = {f"n{number}": 1 for number in range(999)}
    sample, _ = read(delta("stop", content="x"), event({"choices": [], "timings": many}), DONE)
    assert sample.timings is not None
    assert list(sample.timings) == list(many)[:MAX_TIMINGS]


@pytest.mark.parametrize("finish", ["error", "cancelled", "timeout"])
def test_an_answer_that_the_server_gave_up_fails(finish: str) -> None:
    assert fault_of(delta(content="x"), delta(finish), DONE)[0] == "aborted"


def test_a_long_finish_reason_is_cut() -> None:
    assert read(delta("s" * 1000, content="x"), DONE)[0].finish == "s" * 64


def test_what_comes_after_done_is_not_read() -> None:
    sample, _ = read(delta(content="x"), delta("stop"), DONE + delta(content="y"), b"data: {\n\n")
    assert len(sample.frames_s) == 1


def test_what_a_truncated_answer_used_is_kept() -> None:
    sample = Sample(number=0, due_s=0.0)
    frames = AnswerFrames(sample)
    frames.feed(delta(content="x") + usage(3, 1), 0.0)
    with pytest.raises(StreamFault):
        frames.finish()
    assert sample.prompt_tokens == 3


def test_the_text_is_kept_only_where_it_is_wanted() -> None:
    assert read(STREAM, keeps_text=False)[1] == ""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"error": {"message": "no such model"}}, "no such model"),
        ({"error": "plain"}, "plain"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"message": "m"}, "m"),
        ({"detail": [{"loc": ["body", "n"], "msg": "too large"}]}, "too large"),
        ({"code": 5}, '{"code": 5}'),
        ([], "[]"),
    ],
)
def test_the_text_of_an_error_is_found_in_its_usual_places(body: Any, told: str) -> None:
    assert error_text(json.dumps(body).encode()) == told


def test_the_text_of_an_error_is_one_short_line() -> None:
    assert error_text(b"<html>\n bad  gateway") == "<html> bad gateway"
    assert len(error_text(b"x" * 5000)) == 300


def test_the_text_of_an_error_has_nothing_that_a_terminal_obeys() -> None:
    body = json.dumps({"error": {"message": "x\x1b[31mred\x1b]0;t\x07\u202e\x9b"}}).encode()
    assert error_text(body) == "x [31mred ]0;t"


@pytest.mark.parametrize("body", [b"[" * 5000, b'{"error": %b}' % (b"[" * 900 + b"]" * 900), b'"\xff"'])
def test_an_error_that_cannot_be_read_is_told_as_it_is(body: bytes) -> None:
    assert 0 < len(error_text(body)) <= 300
