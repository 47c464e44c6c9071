"""Submits on their way out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from backend import link
from backend.framing import Framer
from backend.link import Media, MediaHead, Piece, Submit
from backend.uploads import MAX_COPIED_BYTES, Parts, Uploads
from pipeline.errors import InvalidRequest
from pipeline.values import EngineCall, Prompt
from tests.backend.linked import ids_of, is_lent, make_call, make_medium

PIECE_TOKENS = link.PIECE_BYTES // 4
COPIED_TOKENS = MAX_COPIED_BYTES // 4


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """A view that only the cycle collector would find is held too long."""
    gc.disable()
    yield
    gc.enable()


def frames(*sent: Parts) -> list[object]:
    return list(Framer().feed(b"".join(part for parts in sent for part in parts)))


def frames_of(uploads: Uploads) -> list[object]:
    sent = []
    while (parts := uploads.take_piece()) is not None:
        sent.append(parts)
    return frames(*sent)


def pooled_call(buffer: bytearray, **sampling: object) -> EngineCall:
    return EngineCall("m", Prompt(memoryview(buffer).toreadonly(), len(buffer) // 4, 0), sampling, 5)


@pytest.mark.parametrize("num_tokens", [1, COPIED_TOKENS])
def test_short_prompt_is_copied_once_into_its_submit(num_tokens: int) -> None:
    uploads = Uploads()
    prompt = list(range(num_tokens))
    parts = uploads.start(3, 9, make_call(prompt, max_tokens=5, temperature=0.5))
    assert parts is not None
    assert len(parts) == 1
    assert frames(parts) == [Submit(3, 9, ids_of(prompt), {"temperature": 0.5, "max_tokens": 5})]
    assert uploads.take_piece() is None
    assert uploads.copied_bytes == 4 * num_tokens


@pytest.mark.parametrize("num_tokens", [1, PIECE_TOKENS, PIECE_TOKENS + 1])
def test_what_a_call_says_of_its_reasoning_travels(num_tokens: int) -> None:
    uploads = Uploads()
    arguments = {"chat_template_kwargs": {"thinking": True}}
    call = replace(make_call([1] * num_tokens), reasoning_ended=False, reasoning_parser_kwargs=arguments)
    sent = uploads.start(3, 9, call)
    submit = (frames(sent) if sent is not None else frames_of(uploads))[-1]
    assert isinstance(submit, Submit)
    assert (submit.reasoning_ended, submit.reasoning_parser_kwargs) == (False, arguments)


@pytest.mark.parametrize("num_tokens", [COPIED_TOKENS + 1, PIECE_TOKENS])
def test_prompt_up_to_one_piece_leaves_at_once_and_uncopied(num_tokens: int) -> None:
    uploads = Uploads()
    prompt = list(range(num_tokens))
    call = make_call(prompt, max_tokens=5)
    parts = uploads.start(3, 9, call)
    assert parts is not None
    assert frames(parts) == [Piece(3, 9, ids_of(prompt)), Submit(3, 9, b"", {"max_tokens": 5})]
    assert [part.obj for part in parts if isinstance(part, memoryview)] == [call.prompt.ids.obj]
    assert uploads.take_piece() is None
    assert uploads.copied_bytes == 0


@pytest.mark.parametrize("num_tokens", [PIECE_TOKENS + 1, 2 * PIECE_TOKENS, 3 * PIECE_TOKENS + 7])
def test_longer_prompt_is_whole_after_its_pieces(num_tokens: int) -> None:
    uploads = Uploads()
    prompt = list(range(num_tokens))
    assert uploads.start(3, 9, make_call(prompt)) is None
    *pieces, submit = frames_of(uploads)
    assert isinstance(submit, Submit)
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert b"".join(frame.ids for frame in [*pieces, submit]) == ids_of(prompt)
    assert all(0 < len(frame.ids) <= link.PIECE_BYTES for frame in pieces)
    assert uploads.copied_bytes == 0


def test_only_the_prompts_tokens_of_a_longer_buffer_are_sent() -> None:
    buffer = memoryview(bytearray(ids_of(range(3 * PIECE_TOKENS))))
    for num_tokens in (5, COPIED_TOKENS + 1, PIECE_TOKENS + 1):
        uploads = Uploads()
        parts = uploads.start(1, 2, EngineCall("m", Prompt(buffer, num_tokens, 0), {}, 5))
        sent = frames(parts) if parts is not None else frames_of(uploads)
        assert b"".join(frame.ids for frame in sent) == ids_of(range(num_tokens))


def test_long_prompts_go_one_after_the_other() -> None:
    uploads = Uploads()
    for slot in (1, 2):
        uploads.start(slot, slot + 10, make_call(list(range(2 * PIECE_TOKENS))))
    assert [(type(frame), frame.slot) for frame in frames_of(uploads)] == [
        (Piece, 1),
        (Piece, 1),
        (Submit, 1),
        (Piece, 2),
        (Piece, 2),
        (Submit, 2),
    ]


def test_choices_of_one_prompt_share_its_buffer() -> None:
    uploads = Uploads()
    call = make_call(list(range(PIECE_TOKENS + 1)))
    for slot in range(3):
        uploads.start(slot, 7, call)
    sent = []
    while (parts := uploads.take_piece()) is not None:
        sent += [part for part in parts if isinstance(part, memoryview)]
    assert len(sent) == 6
    assert {id(part.obj) for part in sent} == {id(call.prompt.ids.obj)}


def test_dropped_upload_sends_nothing_more_and_tells_whether_it_had_begun() -> None:
    uploads = Uploads()
    for slot in (1, 2):
        uploads.start(slot, slot + 10, make_call(list(range(3 * PIECE_TOKENS))))
    assert uploads.take_piece() is not None
    assert uploads.drop(1) is False
    assert uploads.drop(2) is True
    assert uploads.drop(3) is False
    assert uploads.take_piece() is None


# -- media -------------------------------------------------------------------------------------------------

FILES = [b"p" * (link.PIECE_BYTES + 9), b"", b"w" * 3, b"q" * link.PIECE_BYTES]


def media_call(num_tokens: int) -> EngineCall:
    return replace(make_call(list(range(num_tokens))), media=tuple(make_medium(file) for file in FILES))


@pytest.mark.parametrize("num_tokens", [1, COPIED_TOKENS, COPIED_TOKENS + 1, PIECE_TOKENS + 1])
def test_media_go_before_the_prompt_and_the_submit_names_them(num_tokens: int) -> None:
    uploads = Uploads()
    assert uploads.start(3, 9, media_call(num_tokens)) is None
    *parts, submit = frames_of(uploads)
    kinds = [type(part) for part in parts]
    assert kinds == sorted(kinds, key=[Media, Piece].index)
    assert all((part.slot, part.generation) == (3, 9) for part in parts)
    data = [part.data for part in parts if isinstance(part, Media)]
    assert b"".join(data) == b"".join(FILES)
    assert max(map(len, data)) == link.PIECE_BYTES
    ids = b"".join(part.ids for part in [*parts, submit] if not isinstance(part, Media))
    assert ids == ids_of(range(num_tokens))
    media = media_call(1).media
    assert isinstance(submit, Submit)
    assert submit.media == [MediaHead("image", "png", each.digest, len(each.data)) for each in media]
    assert uploads.take_piece() is None


def test_media_are_not_copied() -> None:
    uploads, call = Uploads(), media_call(1)
    uploads.start(3, 9, call)
    sent = []
    while (parts := uploads.take_piece()) is not None:
        sent += [part.obj for part in parts if isinstance(part, memoryview)]
    assert [id(each) for each in sent] == [id(call.media[index].data) for index in (0, 0, 2, 3)]


def test_empty_media_are_only_named() -> None:
    uploads = Uploads()
    uploads.start(3, 9, replace(make_call([1]), media=(make_medium(b""),)))
    (submit,) = frames_of(uploads)
    assert isinstance(submit, Submit)
    assert submit.media is not None
    assert [head.num_bytes for head in submit.media] == [0]


@pytest.mark.parametrize("num_sent", [0, 1, 2, 3])
def test_dropped_media_send_nothing_more(num_sent: int) -> None:
    uploads = Uploads()
    uploads.start(1, 11, media_call(PIECE_TOKENS + 1))
    uploads.start(2, 12, make_call(list(range(PIECE_TOKENS + 1))))
    for _ in range(num_sent):
        uploads.take_piece()
    assert uploads.drop(1) is (num_sent == 0)
    assert {frame.slot for frame in frames_of(uploads)} == {2}


# -- how long the pooled buffer stays lent -----------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, COPIED_TOKENS])
def test_buffer_of_a_short_prompt_is_free_once_its_frame_is_made(num_tokens: int) -> None:
    buffer = bytearray(4 * num_tokens)
    assert Uploads().start(1, 11, pooled_call(buffer)) is not None
    assert not is_lent(buffer)


@pytest.mark.parametrize("num_pieces", [1, 2, 3])
def test_buffer_is_free_when_the_last_part_is_gone(num_pieces: int) -> None:
    uploads, buffer = Uploads(), bytearray(num_pieces * link.PIECE_BYTES)
    parts = uploads.start(1, 11, pooled_call(buffer))
    for _ in range(num_pieces if parts is None else 0):
        assert is_lent(buffer)
        parts = uploads.take_piece()
    assert is_lent(buffer)  # by the last piece, which the transport has now
    del parts
    assert not is_lent(buffer)


@pytest.mark.parametrize("num_sent", [0, 1, 2])
@pytest.mark.parametrize("end", ["drop", "clear"])
def test_buffer_is_free_when_its_upload_ends_after_any_piece(num_sent: int, end: str) -> None:
    uploads, buffer = Uploads(), bytearray(3 * link.PIECE_BYTES)
    uploads.start(1, 11, pooled_call(buffer))
    for _ in range(num_sent):
        uploads.take_piece()
    assert is_lent(buffer)
    if end == "drop":
        uploads.drop(1)
    else:
        uploads.clear()
    assert not is_lent(buffer)
    assert uploads.take_piece() is None


@pytest.mark.parametrize("num_tokens", [1, COPIED_TOKENS + 1, PIECE_TOKENS + 1])
def test_buffer_is_free_after_a_request_that_cannot_be_encoded(num_tokens: int) -> None:
    buffer = bytearray(4 * num_tokens)
    with pytest.raises(InvalidRequest):
        Uploads().start(1, 11, pooled_call(buffer, seed=object()))
    assert not is_lent(buffer)


# -- what cannot travel ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [object(), 1 << 70, "\ud800"])
def test_sampling_value_that_cannot_travel_is_the_requests_fault(value: object) -> None:
    with pytest.raises(InvalidRequest, match="sampling parameter"):
        Uploads().start(1, 11, make_call([1], seed=value))


def test_sampling_values_longer_than_a_frame_are_the_requests_fault() -> None:
    with pytest.raises(InvalidRequest, match=f"the limit is {link.MAX_FRAME_BYTES}"):
        Uploads().start(1, 11, make_call([1], structured_outputs="x" * link.MAX_FRAME_BYTES))
