"""Frames, framing and the handshake's arithmetic."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from backend import link
from backend.framing import Framer
from backend.link import (
    Abort,
    Closed,
    Delta,
    Error,
    Extra,
    FileInfo,
    Frame,
    LinkError,
    Stats,
    Step,
    Submit,
    Welcome,
)

FRAMES: list[Frame] = [
    link.Challenge(b"n" * 32, link.VERSION),
    link.Hello(link.VERSION, b"m", b"n", "gateway-1"),
    Welcome(
        b"m",
        "w",
        ["a", "b"],
        4096,
        16,
        {"top_p": 0.9},
        "f",
        [FileInfo("t", "0" * 64, 3)],
        {"vllm": "1"},
        media={"image": link.MediaInfo(7, 16)},
    ),
    Submit(
        3,
        9,
        b"\0\0\0\0",
        {"temperature": 0.5, "stop_token_ids": [1]},
        -2,
        "salt",
        False,
        {"chat_template_kwargs": {"thinking": True}},
        [link.MediaHead("image", "png", "0" * 64, 300)],
    ),
    link.Piece(3, 9, b"\1\0\0\0" * 100),
    link.Media(3, 9, b"png" * 100),
    Abort([(3, 9), (4, 10)]),
    link.Fetch("0" * 64),
    Step(
        [
            Delta(0, 1, [5]),
            Delta(1, 2, [6, 7], "stop", 7, Extra(1, 2.0, 3.0, True, [([1, 2], [-0.1, -2.0], 1)] * 2, 9)),
        ]
    ),
    Closed([(3, 9)]),
    Error(3, 9, "busy", "later"),
    Stats(1, 2, 0.5),
    link.FilePiece("0" * 64, 0, b"abc", True),
]
STREAM = b"".join(bytes(link.encode(frame)) for frame in FRAMES)


def test_every_kind_of_frame_survives_the_wire() -> None:
    assert {type(frame) for frame in FRAMES} == set(link.KINDS)
    assert list(Framer().feed(STREAM)) == FRAMES


@pytest.mark.parametrize("num_bytes", [0, 4, 252, 256, 65_532, link.PIECE_BYTES, 1 << 20])
@pytest.mark.parametrize(("slot", "generation"), [(0, 0), (127, 128), (link.MAX_SLOTS - 1, 2**63 - 1)])
def test_head_and_its_bytes_are_a_frame(slot: int, generation: int, num_bytes: int) -> None:
    ids = random.Random(num_bytes).randbytes(num_bytes)
    for head, frame in ((link.piece_head, link.Piece), (link.media_head, link.Media)):
        data = head(slot, generation, num_bytes) + ids
        assert list(Framer().feed(data + link.encode(link.Fetch("next")))) == [
            frame(slot, generation, ids),
            link.Fetch("next"),
        ]


def test_frames_are_the_same_for_every_split_in_two() -> None:
    for cut in range(len(STREAM) + 1):
        framer = Framer()
        assert [*framer.feed(STREAM[:cut]), *framer.feed(STREAM[cut:])] == FRAMES
        assert framer.num_buffered_bytes == 0


def test_frames_are_the_same_one_byte_at_a_time() -> None:
    framer = Framer()
    assert [frame for byte in STREAM for frame in framer.feed(bytes([byte]))] == FRAMES


def test_frames_are_the_same_for_random_splits() -> None:
    rng = random.Random(1)
    for _ in range(200):
        framer, frames, start = Framer(), [], 0
        while start < len(STREAM):
            end = start + rng.randint(1, 120)
            frames += framer.feed(STREAM[start:end])
            start = end
        assert frames == FRAMES


def test_frames_that_are_not_taken_stay_for_the_next_feed() -> None:
    framer = Framer()
    for frame in framer.feed(STREAM):
        assert frame == FRAMES[0]
        break
    assert list(framer.feed(b"")) == FRAMES[1:]


def test_oversized_frame_is_refused_from_its_header_alone() -> None:
    framer = Framer(max_frame_bytes=100)
    with pytest.raises(LinkError, match=r"101 bytes; the limit is 100"):
        list(framer.feed(link.HEADER.pack(101, link.STEP)))
    with pytest.raises(LinkError, match="already failed"):
        list(framer.feed(STREAM))


@pytest.mark.parametrize("kind", [0, 14, 255])
def test_unknown_kind_is_a_link_error(kind: int) -> None:
    with pytest.raises(LinkError, match=f"unknown frame kind {kind}"):
        list(Framer().feed(link.HEADER.pack(0, kind)))


def test_slot_out_of_range_is_a_link_error() -> None:
    for slot in (-1, link.MAX_SLOTS):
        with pytest.raises(LinkError):
            link.decode(link.STEP, msgspec.msgpack.encode([[[slot, 1, [5]]]]))


@pytest.mark.parametrize(
    "frame",
    [Step([Delta(0, -1, [1], "stop")]), Closed([(0, -1)]), Error(0, -1, "busy", ""), Abort([(0, -1)])],
)
def test_negative_generation_is_a_link_error(frame: Frame) -> None:
    with pytest.raises(LinkError, match="bad payload"):
        list(Framer().feed(bytes(link.encode(frame))))


def test_array_that_claims_four_billion_entries_is_a_link_error() -> None:
    with pytest.raises(LinkError):
        link.decode(link.STEP, b"\x91\xdd\xff\xff\xff\xff")


def test_payload_nested_too_deeply_is_a_link_error() -> None:
    with pytest.raises(LinkError):
        link.decode(link.SUBMIT, b"\x94\x00\x01\xc4\x00\x81\xa1a" + b"\x91" * 100_000)


def test_damaged_streams_give_frames_or_a_link_error() -> None:
    rng = random.Random(2)
    num_errors = 0
    for _ in range(3000):
        data = bytearray(STREAM)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            if rng.random() < 0.3:
                del data[at : at + rng.randint(1, 20)]
            else:
                data[at] = rng.randrange(256)
        try:
            for frame in Framer().feed(bytes(data)):
                assert isinstance(frame, Frame)
        except LinkError:
            num_errors += 1
    assert num_errors > 500


def test_later_fields_of_a_newer_peer_are_passed_over() -> None:
    payload = msgspec.msgpack.encode([1, 2, 0.5, 0, 0, 0, True, True, "new", [1]])
    assert link.decode(link.STATS, payload) == Stats(1, 2, 0.5)


def test_fields_that_an_older_peer_lacks_take_their_defaults() -> None:
    assert link.decode(link.STATS, msgspec.msgpack.encode([1, 2])) == Stats(1, 2)


class SubmitOf01(Frame):
    """What a peer of version 0.1 reads and writes."""

    slot: int
    generation: int
    ids: bytes
    sampling: dict[str, Any]
    priority: int = 0
    cache_salt: str | None = None


def test_submit_of_a_newer_gateway_is_whole_to_an_older_worker() -> None:
    (payload,) = [bytes(link.encode(frame))[link.HEADER_BYTES :] for frame in FRAMES if type(frame) is Submit]
    old = msgspec.msgpack.decode(payload, type=SubmitOf01)
    sampling = {"temperature": 0.5, "stop_token_ids": [1]}
    assert old == SubmitOf01(3, 9, b"\0\0\0\0", sampling, -2, "salt")


def test_submit_of_an_older_gateway_leaves_the_reasoning_to_the_engine() -> None:
    payload = msgspec.msgpack.encode(SubmitOf01(3, 9, b"\0\0\0\0", {"seed": 1}, -2, "salt"))
    frame = link.decode(link.SUBMIT, payload)
    assert frame == Submit(3, 9, b"\0\0\0\0", {"seed": 1}, -2, "salt")
    assert (frame.reasoning_ended, frame.reasoning_parser_kwargs) == (None, None)


def test_proof_of_one_side_is_no_proof_of_the_other() -> None:
    mac = link.proof(b"secret", b"nonce", b"gateway")
    link.check_proof(b"secret", b"nonce", b"gateway", mac)
    for secret, nonce, role in (
        (b"other", b"nonce", b"gateway"),
        (b"secret", b"other", b"gateway"),
        (b"secret", b"nonce", b"worker"),
    ):
        with pytest.raises(LinkError, match="secrets"):
            link.check_proof(secret, nonce, role, mac)


def test_version_window_is_one_minor_version() -> None:
    major, minor = link.VERSION
    for peer in ((major, minor), (major, minor + 1), (major, minor - 1)):
        link.check_version(peer)
    for peer in ((major, minor + 2), (major + 1, minor), (major - 1, minor)):
        with pytest.raises(LinkError, match="link version"):
            link.check_version(peer)


# -- version 0.2, which has no media -----------------------------------------------------------------------


class OldSubmit(msgspec.Struct, array_like=True):
    slot: int
    generation: int
    ids: bytes
    sampling: dict[str, Any]
    priority: int = 0
    cache_salt: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


class OldExtra(msgspec.Struct, array_like=True):
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    is_first: bool = False
    logprobs: list[tuple[list[int], list[float], int]] | None = None


def test_old_peer_reads_what_it_knows_of_a_new_one() -> None:
    submit = Submit(
        3, 9, b"abcd", {"n": 1}, 2, "salt", True, {"a": 1}, [link.MediaHead("image", "png", "d", 5)]
    )
    old = OldSubmit(3, 9, b"abcd", {"n": 1}, 2, "salt", True, {"a": 1})
    assert msgspec.msgpack.decode(link.encode(submit)[link.HEADER_BYTES :], type=OldSubmit) == old
    extra = msgspec.msgpack.encode(Extra(5, 1.0, 2.0, True, None, 99))
    assert msgspec.msgpack.decode(extra, type=OldExtra) == OldExtra(5, 1.0, 2.0, True)


def test_new_peer_reads_an_old_one() -> None:
    old = msgspec.msgpack.encode(OldSubmit(3, 9, b"abcd", {"n": 1}, 2, "salt", True, {"a": 1}))
    assert link.decode(link.SUBMIT, old) == Submit(3, 9, b"abcd", {"n": 1}, 2, "salt", True, {"a": 1})
    extra = msgspec.msgpack.encode(OldExtra(5, 1.0, 2.0, True))
    assert msgspec.msgpack.decode(extra, type=Extra) == Extra(5, 1.0, 2.0, True)
    welcome = msgspec.msgpack.encode(Welcome(b"", "w", ["m"], 4096, 16, {}, "f", [], {}))
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(welcome)[:-1])
    assert link.decode(link.WELCOME, old).media == {}


def test_size_below_zero_is_a_link_error() -> None:
    submit = Submit(3, 9, b"", {}, media=[link.MediaHead("image", "png", "", -1)])
    with pytest.raises(LinkError):
        list(Framer().feed(bytes(link.encode(submit))))
