"""Submits on their way out."""

from __future__ import annotations

import pytest

from backend import link
from backend.link import Framer, Piece, Submit
from backend.uploads import Uploads
from pipeline.errors import InvalidRequest
from tests.backend.linked import ids_of, make_call

PIECE_TOKENS = link.PIECE_BYTES // 4


def frames_of(uploads: Uploads) -> list[object]:
    data = b""
    while (part := uploads.take_piece()) is not None:
        data += part
    return list(Framer().feed(data))


def test_prompt_up_to_one_piece_travels_in_its_submit() -> None:
    uploads = Uploads()
    prompt = list(range(PIECE_TOKENS))
    frame = uploads.start(3, 9, make_call(prompt, max_tokens=5, temperature=0.5))
    assert frame is not None
    assert list(Framer().feed(bytes(frame))) == [
        Submit(3, 9, ids_of(prompt), {"temperature": 0.5, "max_tokens": 5})
    ]
    assert uploads.take_piece() is None


@pytest.mark.parametrize("num_tokens", [PIECE_TOKENS + 1, 2 * PIECE_TOKENS, 3 * PIECE_TOKENS + 7])
def test_longer_prompt_is_whole_after_its_pieces(num_tokens: int) -> None:
    uploads = Uploads()
    prompt = list(range(num_tokens))
    assert uploads.start(3, 9, make_call(prompt)) is None
    *pieces, submit = frames_of(uploads)
    assert isinstance(submit, Submit)
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert b"".join(frame.ids for frame in [*pieces, submit]) == ids_of(prompt)
    assert all(len(frame.ids) <= link.PIECE_BYTES for frame in [*pieces, submit])


def test_long_prompts_go_one_after_the_other() -> None:
    uploads = Uploads()
    for slot in (1, 2):
        uploads.start(slot, slot + 10, make_call(list(range(2 * PIECE_TOKENS))))
    assert [(type(frame), frame.slot) for frame in frames_of(uploads)] == [
        (Piece, 1),
        (Submit, 1),
        (Piece, 2),
        (Submit, 2),
    ]


def test_dropped_upload_sends_nothing_more_and_tells_whether_it_had_begun() -> None:
    uploads = Uploads()
    for slot in (1, 2):
        uploads.start(slot, slot + 10, make_call(list(range(3 * PIECE_TOKENS))))
    assert uploads.take_piece() is not None
    assert uploads.drop(1) is False
    assert uploads.drop(2) is True
    assert uploads.drop(3) is False
    assert uploads.take_piece() is None


def test_change_of_the_callers_buffer_does_not_change_a_queued_prompt() -> None:
    uploads = Uploads()
    buffer = bytearray(ids_of(range(2 * PIECE_TOKENS)))
    call = make_call([])
    call = type(call)(call.model, type(call.prompt)(memoryview(buffer), 2 * PIECE_TOKENS, 0), {}, 5)
    uploads.start(1, 11, call)
    buffer[:] = bytes(len(buffer))
    assert b"".join(frame.ids for frame in frames_of(uploads)) == ids_of(range(2 * PIECE_TOKENS))


@pytest.mark.parametrize("value", [object(), 1 << 70, "\ud800"])
def test_sampling_value_that_cannot_travel_is_the_requests_fault(value: object) -> None:
    with pytest.raises(InvalidRequest, match="sampling parameter"):
        Uploads().start(1, 11, make_call([1], seed=value))


def test_sampling_values_longer_than_a_frame_are_the_requests_fault() -> None:
    with pytest.raises(InvalidRequest, match=f"the limit is {link.MAX_FRAME_BYTES}"):
        Uploads().start(1, 11, make_call([1], structured_outputs="x" * link.MAX_FRAME_BYTES))
