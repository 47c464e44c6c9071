"""Images and sounds from a gateway's call to a worker's engine, over the link."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend import link
from backend.framing import Framer
from backend.link import Abort, Closed, Error, Media, MediaHead, MediaInfo, Piece, Submit
from pipeline.errors import EngineRejected, WorkerLost
from pipeline.values import EngineCall, FirstToken, MediaSupport, Medium
from tests.backend.linked import RecordingSink, ids_of, linked, make_call, make_medium, scripted, until
from tests.backend.test_link_client import Worker, shaken
from tests.backend.test_link_server import Gateway, Rig, make_rig
from tests.backend.test_pool import all_ready, pooled

IMAGES = {"image": MediaSupport(7, 2)}
HEAD = MediaHead("image", "png", "d", 6)
TAKES_IMAGES = ("image=w400",)  # of the scripted worker


async def media_rig(path: Path, **limits: Any) -> Rig:
    rig = await make_rig(path, **limits)
    rig.engine.info = replace(rig.engine.info, media=IMAGES)
    return rig


def submit(slot: int, generation: int, *heads: MediaHead) -> Submit:
    return Submit(slot, generation, b"\1\0\0\0", {"max_tokens": 4}, media=list(heads) or None)


def media_call(*files: bytes, num_tokens: int = 3) -> EngineCall:
    prompt = [400] * len(files) + [1] * num_tokens
    return replace(make_call(prompt), media=tuple(make_medium(file) for file in files))


# -- a worker's end ----------------------------------------------------------------------------------------


async def test_media_reach_the_engine_one_byte_at_a_time(tmp_path: Path) -> None:
    rig = await media_rig(tmp_path)
    data = b"".join(
        bytes(link.encode(frame))
        for frame in (
            Media(0, 1, b"pngp"),
            Media(0, 1, b"ngj"),
            Piece(0, 1, b"\2\0\0\0"),
            Media(0, 1, b"peg"),
        )
    )
    data += link.encode(submit(0, 1, HEAD, MediaHead("image", "jpeg", "e", 4)))
    for byte in data:
        rig.gateway.connection.data_received(bytes([byte]))
    job = rig.engine.jobs[rig.engine.key(0)]
    assert [(each.kind, bytes(each.data), each.format, each.digest) for each in job.media] == [
        ("image", b"pngpng", "png", "d"),
        ("image", b"jpeg", "jpeg", "e"),
    ]
    assert job.ids == b"\2\0\0\0\1\0\0\0"
    assert rig.server.assembly.num_bytes == 0
    await rig.server.stop()


async def test_welcome_tells_what_the_model_takes(tmp_path: Path) -> None:
    rig = await media_rig(tmp_path)
    (welcome,) = Gateway(rig.server).shake()
    assert welcome.media == {"image": MediaInfo(7, 2)}
    await rig.server.stop()


async def test_abort_in_mid_media_frees_the_slot_and_its_bytes(tmp_path: Path) -> None:
    rig = await media_rig(tmp_path)
    rig.gateway.send(Media(0, 1, b"png"), Media(1, 2, b"png"), Abort([(0, 1)]))
    assert rig.gateway.frames() == [Closed([(0, 1)])]
    assert rig.server.assembly.num_bytes == 3
    rig.gateway.send(Media(0, 3, b"pngpng"), submit(0, 3, HEAD))
    assert bytes(rig.engine.jobs[rig.engine.key(0)].media[0].data) == b"pngpng"
    await rig.server.stop()


async def test_connection_lost_in_mid_media_leaves_nothing(tmp_path: Path) -> None:
    rig = await media_rig(tmp_path)
    rig.gateway.send(Media(0, 1, b"png"), Piece(1, 2, b"\1\0\0\0"), Media(1, 2, b"png"))
    assert rig.server.assembly.num_bytes == 10
    rig.gateway.connection.connection_lost(None)
    assert rig.server.assembly.num_bytes == 0
    assert rig.engine.jobs == {}
    await rig.server.stop()


@pytest.mark.parametrize("heads", [(), (MediaHead("image", "png", "d", 5),), (HEAD, HEAD)])
async def test_other_media_than_announced_end_the_connection(tmp_path: Path, heads: Any) -> None:
    rig = await media_rig(tmp_path)
    rig.gateway.send(Media(0, 1, b"pngpng"), submit(0, 1, *heads))
    assert rig.gateway.transport.is_ended
    assert rig.engine.jobs == {}
    assert rig.server.assembly.num_bytes == 0
    await rig.server.stop()


async def test_media_beyond_the_bound_are_refused_once_and_their_rest_is_passed_over(tmp_path: Path) -> None:
    rig = await media_rig(tmp_path, max_assembly_bytes=10)
    rig.gateway.send(*[Media(0, 1, b"pngpng")] * 4, submit(0, 1, MediaHead("image", "png", "d", 24)))
    rig.gateway.send(Media(1, 2, b"pngpng"), Media(2, 3, b"pngpng"), submit(2, 3, HEAD))
    assert rig.gateway.frames() == [
        Error(0, 1, "rejected", "the media have 12 bytes or more; the limit is 10"),
        Error(2, 3, "busy", "prompts on their way exceed 10 bytes"),
    ]
    rig.gateway.send(submit(1, 2, HEAD))
    assert [key.slot for key in rig.engine.jobs] == [1]
    await rig.server.stop()


async def test_worker_of_a_text_model_refuses_media_at_their_first_byte(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(Media(0, 1, b"png"), Media(0, 1, b"png"), submit(0, 1, HEAD), submit(1, 2))
    assert rig.gateway.frames() == [Error(0, 1, "rejected", "the model takes text only")]
    assert [key.slot for key in rig.engine.jobs] == [1]
    await rig.server.stop()


# -- a gateway's end ---------------------------------------------------------------------------------------


def worker_with_images() -> Worker:
    worker = shaken()
    worker.client.media = IMAGES
    return worker


async def test_call_leaves_as_its_media_its_prompt_and_a_submit_that_names_them() -> None:
    worker = worker_with_images()
    worker.client.submit(media_call(b"pngpng"), RecordingSink())
    media, sent = worker.frames()
    assert media == Media(0, 1, b"pngpng")
    assert [(each.kind, each.num_bytes) for each in sent.media] == [("image", 6)]
    worker.client.close()


@pytest.mark.parametrize(
    ("media", "problem"),
    [({}, "takes no media of kind 'image'"), ({"image": MediaSupport(7, 1)}, "the limit is 1")],
)
async def test_media_that_the_worker_does_not_take_are_never_sent(media: Any, problem: str) -> None:
    worker = shaken()
    worker.client.media = media
    with pytest.raises(EngineRejected, match=f"worker-1: .*{problem}"):
        worker.client.submit(media_call(b"png", b"gif"), RecordingSink())
    assert worker.frames() == []
    assert worker.client.slots.num_requests == 0
    worker.client.close()


async def test_abort_overtakes_media_that_wait() -> None:
    worker = worker_with_images()
    worker.client.pause_writing()
    handle = worker.client.submit(media_call(bytes(10 * link.PIECE_BYTES)), RecordingSink())
    unheard = worker.client.submit(media_call(b"png"), RecordingSink())
    assert worker.frames() == []
    worker.client._dispatch._is_paused = False
    worker.client._dispatch._write(worker.client._dispatch._uploads.take_piece() or ())
    worker.client.pause_writing()
    unheard.abort()
    handle.abort()
    first, abort = worker.frames()
    assert (type(first), abort) == (Media, Abort([(0, 1)]))
    worker.client.resume_writing()
    assert worker.frames() == []
    worker.client.close()


async def test_lost_connection_in_mid_media_fails_the_call_and_forgets_the_rest() -> None:
    worker = worker_with_images()
    sink, data = RecordingSink(), bytearray(3 * link.PIECE_BYTES)
    worker.client.pause_writing()
    call = replace(media_call(b"png"), media=(Medium("image", memoryview(data), "png", "d"),))  # type: ignore[arg-type]
    worker.client.submit(call, sink)
    del call
    worker.client.connection_lost(None)
    assert isinstance(sink.ended.result(), WorkerLost)
    data.append(0)  # nobody has a view of it any more


async def test_number_of_prompt_tokens_comes_with_the_first_token() -> None:
    worker = worker_with_images()
    sink = RecordingSink()
    worker.client.submit(media_call(b"png"), sink)
    extra = link.Extra(64, 1.5, 2.5, True, None, 81)
    worker.send(link.Step([link.Delta(0, 1, [5], extra=extra)]))
    assert sink.first == FirstToken(64, 1.5, 2.5, 81)
    worker.client.close()


# -- both ends ---------------------------------------------------------------------------------------------


async def ask(client: Any, call: EngineCall) -> RecordingSink:
    sink = RecordingSink()
    client.submit(call, sink)
    await asyncio.wait_for(sink.ended, 20)
    return sink


async def test_scripted_worker_has_the_bytes_that_were_sent(tmp_path: Path) -> None:
    rng = random.Random(4)
    large, other, small = rng.randbytes(5 * link.PIECE_BYTES + 77), rng.randbytes(90), rng.randbytes(90)
    async with scripted(tmp_path, media=TAKES_IMAGES) as server, linked(server) as client:
        assert client.media == {"image": MediaSupport(400, 16)}
        calls = [media_call(large, small), media_call(large, other), media_call(large, small)]
        sinks = await asyncio.gather(*(ask(client, call) for call in calls))
        assert sinks[0].ids == sinks[2].ids != sinks[1].ids
        assert [sink.first and sink.first.prompt_tokens for sink in sinks] == [3 + 2 * 7] * 3
        assert server.assembly.num_bytes == 0
        changed = bytearray(large)
        changed[-1] ^= 1
        assert (await ask(client, media_call(bytes(changed), small))).ids != sinks[0].ids
        assert (await ask(client, make_call([1, 2]))).first.prompt_tokens is None  # type: ignore[union-attr]


async def test_call_given_to_another_worker_keeps_its_media(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    call = media_call(b"png" * link.PIECE_BYTES)
    async with (
        scripted(tmp_path / "a", media=TAKES_IMAGES, step_ms=60_000.0) as stuck,
        scripted(tmp_path / "b", media=TAKES_IMAGES) as other,
        linked(stuck) as first,
        linked(other) as second,
    ):
        sink = RecordingSink()
        first.submit(call, sink)
        await until(lambda: stuck.num_waiting)
        await stuck.stop()
        assert isinstance(await sink.ended, WorkerLost)
        assert (await ask(second, call)).ids == (await ask(second, call)).ids != []


async def test_pool_sends_media_to_a_worker_that_takes_them(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    async with (
        scripted(tmp_path / "a") as text,
        scripted(tmp_path / "b", media=TAKES_IMAGES) as images,
        pooled(tmp_path, text.address, images.address) as pool,
    ):
        await all_ready(pool)
        assert pool.media("scripted") == {"image": MediaSupport(400, 16)}
        assert [info.media for info in pool.models()] == [{"image": MediaSupport(400, 16)}]
        sinks = [RecordingSink() for _ in range(6)]
        for sink in sinks:
            assert pool.submit(media_call(b"png"), sink).worker == images.name
        for sink in sinks:
            assert await asyncio.wait_for(sink.ended, 20) == "length"
        with pytest.raises(EngineRejected, match="No worker of 'scripted' takes this request's media: "):
            pool.submit(media_call(*[b"png"] * 17), RecordingSink())
        await images.stop()
        await until(lambda: pool.media("scripted") == {})
        with pytest.raises(EngineRejected, match="takes no media of kind 'image'"):
            pool.submit(media_call(b"png"), RecordingSink())


async def test_random_calls_and_aborts_leave_a_worker_whole(tmp_path: Path) -> None:
    rng = random.Random(5)
    async with scripted(tmp_path, media=TAKES_IMAGES) as server, linked(server) as client:
        handles, sinks = [], []
        for _ in range(60):
            files = [rng.randbytes(rng.choice((0, 1, 3000, 200_000))) for _ in range(rng.randint(0, 3))]
            sinks.append(RecordingSink())
            call = media_call(*files, num_tokens=rng.choice((1, 30_000 if rng.random() < 0.3 else 2)))
            handles.append(client.submit(call, sinks[-1]))
            if rng.random() < 0.5:
                aborted = rng.randrange(len(handles))
                handles[aborted].abort()
                sinks[aborted].ended.cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        ends = await asyncio.wait_for(
            asyncio.gather(*(each.ended for each in sinks), return_exceptions=True), 30
        )
        assert {str(end) for end in ends if not isinstance(end, asyncio.CancelledError)} == {"length"}
        await until(lambda: not server.num_running and not server.assembly.num_bytes)
        assert client.slots.num_requests == 0


# -- version 0.2 -------------------------------------------------------------------------------------------


async def test_worker_of_version_0_2_gets_text_and_no_media() -> None:
    worker = Worker()
    worker.challenge((0, 2))
    (hello,) = worker.frames()
    mac = link.proof(b"a shared secret", hello.nonce, b"worker")
    welcome = link.Welcome(mac, "worker-1", ["m"], 4096, 16, {}, "f", [], {})
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(welcome))
    payload = msgspec.msgpack.encode(whole[:-1])  # as 0.2 had it
    worker.client.data_received(link.HEADER.pack(len(payload), link.WELCOME) + payload)
    assert worker.client.is_open
    _, sent, _ = worker.submit()
    assert (sent.media, sent.ids) == (None, ids_of([1, 2, 3]))
    with pytest.raises(EngineRejected, match="takes no media"):
        worker.client.submit(media_call(b"png"), RecordingSink())
    worker.client.close()


async def test_gateway_of_version_0_2_is_served_by_a_worker_that_takes_media(tmp_path: Path) -> None:
    async with scripted(tmp_path, media=TAKES_IMAGES, secret=b"s") as server:
        reader, writer = await asyncio.open_unix_connection(server.address.path)
        framer, found = Framer(), list[Any]()

        async def until_frame(kind: type) -> Any:
            while not any(isinstance(frame, kind) for frame in found):
                found.extend(framer.feed(await asyncio.wait_for(reader.read(1 << 16), 20)))
            return next(frame for frame in found if isinstance(frame, kind))

        challenge = await until_frame(link.Challenge)
        mac = link.proof(b"s", challenge.nonce, b"gateway")
        writer.write(link.encode(link.Hello((0, 2), mac, b"n" * 32, "old")))
        await until_frame(link.Welcome)
        payload = msgspec.msgpack.encode([0, 1, ids_of([1, 2]), {"max_tokens": 1}])
        writer.write(link.HEADER.pack(len(payload), link.SUBMIT) + payload)
        (delta,) = (await until_frame(link.Step)).deltas
        assert delta.finish == "length"
        writer.close()
        await writer.wait_closed()
