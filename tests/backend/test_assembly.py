"""Prompts in pieces."""

from __future__ import annotations

import random

import pytest

from backend.assembly import Assembly
from backend.link import LinkError, MediaHead, Submit
from pipeline.values import MediaSupport


class Collected:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.num_bytes = 0
        self.media = bytearray()


def last(ids: bytes) -> Submit:
    return Submit(0, 1, ids, {})


def test_prompt_is_whole_for_random_cuts() -> None:
    rng = random.Random(1)
    prompt = rng.randbytes(4000)
    for _ in range(100):
        assembly, stream, start = Assembly(1 << 20), Collected(), 0
        while len(prompt) - start > 400:
            end = start + 4 * rng.randint(1, 100)
            assert assembly.refusal(stream, prompt[start:end], 1000) is None
            assembly.add(stream, prompt[start:end])
            start = end
        assert assembly.num_bytes == stream.num_bytes == start
        assert assembly.finish(stream, last(prompt[start:])).ids == prompt
        assert assembly.num_bytes == stream.num_bytes == 0


def test_refusals_say_what_was_read_and_what_is_allowed() -> None:
    assembly, stream, other = Assembly(100), Collected(), Collected()
    assert assembly.refusal(stream, b"123", 10) == (
        "rejected",
        "a part of the prompt has 3 bytes, not 4 per id",
    )
    assembly.add(stream, bytes(40))
    assert assembly.refusal(stream, bytes(4), 10) == (
        "rejected",
        "the prompt has 11 tokens or more; the limit is 10",
    )
    assert assembly.refusal(other, bytes(64), 100) == ("busy", "prompts on their way exceed 100 bytes")
    assembly.drop(stream)
    assert assembly.refusal(other, bytes(64), 100) is None


def test_pieces_before_an_empty_last_part_are_the_prompt_and_one_piece_is_not_copied() -> None:
    assembly, stream = Assembly(100), Collected()
    piece = bytes(range(40))
    assembly.add(stream, piece)
    assert assembly.finish(stream, last(b"")).ids is piece
    assembly.add(stream, piece)
    assembly.add(stream, piece[:8])
    assert assembly.finish(stream, last(b"")).ids == piece + piece[:8]
    assert assembly.finish(stream, last(piece)).ids is piece
    assert assembly.num_bytes == stream.num_bytes == 0


# -- media -------------------------------------------------------------------------------------------------

IMAGES = {"image": MediaSupport(7, 2)}


def naming(*sizes: int, kind: str = "image") -> Submit:
    return Submit(0, 1, bytes(4), {}, media=[MediaHead(kind, "png", str(size), size) for size in sizes])


def test_media_are_whole_for_random_cuts_and_not_copied() -> None:
    rng = random.Random(2)
    files = [rng.randbytes(900), b"", rng.randbytes(50)]
    for _ in range(100):
        assembly, stream, start, whole = Assembly(1000), Collected(), 0, b"".join(files)
        while start < len(whole):
            end = start + rng.randint(1, 300)
            assert assembly.media_refusal(stream, whole[start:end], IMAGES) is None
            assembly.add_media(stream, whole[start:end])
            start = end
        submit, arrived = naming(*map(len, files)), stream.media
        assert assembly.submit_refusal(stream, submit, 10, {"image": MediaSupport(7, 3)}) is None
        assert assembly.num_bytes == len(whole)
        media = assembly.finish(stream, submit).media
        assert [bytes(each.data) for each in media] == files
        assert [(each.kind, each.format, each.digest) for each in media] == [
            ("image", "png", str(len(file))) for file in files
        ]
        assert all(each.data.obj is arrived for each in media)  # type: ignore[attr-defined]
        assert assembly.num_bytes == len(stream.media) == 0


@pytest.mark.parametrize("submit", [naming(99), naming(101), naming(50, 51), last(bytes(4))])
def test_other_media_than_came_break_the_link(submit: Submit) -> None:
    assembly, stream = Assembly(1000), Collected()
    assembly.add_media(stream, bytes(100))
    with pytest.raises(LinkError, match="100 bytes of media came"):
        assembly.submit_refusal(stream, submit, 10, IMAGES)


def test_refused_media_are_told_why() -> None:
    assembly, stream, other = Assembly(100), Collected(), Collected()
    assert assembly.media_refusal(stream, b"p", {}) == ("rejected", "the model takes text only")
    assembly.add_media(stream, bytes(90))
    assert assembly.media_refusal(stream, bytes(11), IMAGES) == (
        "rejected",
        "the media have 101 bytes or more; the limit is 100",
    )
    assert assembly.media_refusal(other, bytes(11), IMAGES) == (
        "busy",
        "prompts on their way exceed 100 bytes",
    )
    assert assembly.submit_refusal(stream, naming(30, 30, 30), 10, IMAGES) == (
        "rejected",
        "3 media of kind 'image' in one prompt; the limit is 2",
    )
    assert assembly.submit_refusal(stream, naming(90, kind="audio"), 10, IMAGES) == (
        "rejected",
        "the model takes no media of kind 'audio'",
    )
    assembly.drop(stream)
    assert assembly.num_bytes == 0
