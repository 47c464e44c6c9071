"""Prompts in pieces."""

from __future__ import annotations

import random

from backend.assembly import Assembly
from backend.link import Submit


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
