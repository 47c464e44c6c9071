"""The worker's end: handshake, slots, bounds, slow readers, every way to end. A hand-fed protocol."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backend import link
from backend.address import Address, AddressError, parse_address
from backend.framing import Framer
from backend.link import (
    Abort,
    Closed,
    Delta,
    Error,
    Extra,
    Fetch,
    FileInfo,
    Hello,
    Piece,
    Step,
    Submit,
)
from backend.link_server import LinkServer, ServerLimits
from backend.ports import EngineEvents, EngineInfo, Job, Key, Output
from backend.server_connection import GatewayConnection
from tests.backend.linked import HandTransport, until

SECRET = b"a shared secret"


class HandEngine:
    """An engine that does only what its test tells it to."""

    def __init__(self, path: Path | None = None) -> None:
        files = [FileInfo("tokenizer.json", "a" * 64, 3)]
        self.info = EngineInfo(
            model_names=["m"],
            max_model_len=100_000,
            block_size=16,
            default_sampling={"top_p": 0.9},
            fingerprint="f",
            files=files,
            paths={"a" * 64: str(path)},
            versions={},
            engine_path="hand",
        )
        self.jobs: dict[Key, Job] = {}
        self.aborted: list[Key] = []
        self.error: Exception | None = None
        self.is_stopped = False
        self.num_asked = 0  # for its figures

    async def start(self, events: EngineEvents) -> None:
        self.events = events

    def submit(self, key: Key, job: Job) -> None:
        if self.error is not None:
            raise self.error
        self.jobs[key] = job

    def abort(self, keys: Sequence[Key]) -> None:
        self.aborted += keys

    def stats(self) -> link.Stats:
        self.num_asked += 1
        return link.Stats(running=len(self.jobs))

    async def stop(self) -> None:
        self.is_stopped = True

    def key(self, slot: int) -> Key:
        return next(key for key in reversed(self.jobs) if key.slot == slot)

    def say(self, slot: int, *ids: int, finish: str | None = None) -> None:
        self.events.step([Output(self.key(slot), list(ids), finish)])


class Gateway:
    """A hand-made gateway on a hand-fed connection."""

    def __init__(self, server: LinkServer) -> None:
        self.transport = HandTransport()
        self.connection = GatewayConnection(server)
        self.connection.connection_made(self.transport)

    def send(self, *frames: link.Frame) -> None:
        self.connection.data_received(b"".join(link.encode(frame) for frame in frames))

    def frames(self) -> list[Any]:
        return self.transport.frames()

    def shake(self, secret: bytes = SECRET, version: tuple[int, int] = link.VERSION) -> list[Any]:
        (challenge,) = self.frames()
        self.send(Hello(version, link.proof(secret, challenge.nonce, b"gateway"), b"n" * 32, "g"))
        return self.frames()


class Rig:
    """A server with a hand-driven engine, and one gateway that is in."""

    def __init__(self, engine: HandEngine, server: LinkServer) -> None:
        self.engine = engine
        self.server = server
        self.gateway = Gateway(server)
        self.gateway.shake()


async def make_server(path: Path, engine: HandEngine | None = None, **limits: Any) -> LinkServer:
    address = Address(path=str(path / "s"))
    engine = engine or HandEngine()
    return LinkServer(engine, address, SECRET, limits=ServerLimits(stats_s=60, stop_s=0.01, **limits))


async def make_rig(path: Path, **limits: Any) -> Rig:
    engine = HandEngine()
    server = await make_server(path, engine, **limits)
    await server.start()
    return Rig(engine, server)


def submit(slot: int, generation: int, ids: bytes = b"\1\0\0\0") -> Submit:
    return Submit(slot, generation, ids, {"max_tokens": 4})


# -- handshake ---------------------------------------------------------------------------------------------


async def test_gateway_with_the_secret_is_let_in_and_gets_its_proof(tmp_path: Path) -> None:
    server = await make_server(tmp_path)
    await server.start()
    (welcome,) = Gateway(server).shake()
    assert isinstance(welcome, link.Welcome)
    link.check_proof(SECRET, b"n" * 32, b"worker", welcome.mac)
    assert (welcome.model_names, welcome.default_sampling) == (["m"], {"top_p": 0.9})
    await server.stop()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"secret": b"other"}, "secrets"),
        ({"secret": b""}, "secrets"),
        ({"version": (9, 9)}, "link version 9.9"),
    ],
)
async def test_stranger_is_turned_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], reason: str
) -> None:
    server = await make_server(tmp_path)
    await server.start()
    gateway = Gateway(server)
    assert gateway.shake(**arguments) == []
    assert gateway.transport.is_ended
    assert reason in caplog.text
    assert server.num_connections == 0
    await server.stop()


@pytest.mark.parametrize("newer", [-1, 1])
async def test_gateway_one_minor_version_away_is_let_in(tmp_path: Path, newer: int) -> None:
    server = await make_server(tmp_path)
    await server.start()
    major, minor = link.VERSION
    (welcome,) = Gateway(server).shake(version=(major, minor + newer))
    assert isinstance(welcome, link.Welcome)
    await server.stop()


async def test_what_a_submit_says_of_its_reasoning_reaches_the_engine(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    arguments = {"chat_template_kwargs": {"thinking": True}}
    rig.gateway.send(Submit(3, 1, b"\1\0\0\0", {"seed": 1}, 0, None, False, arguments), submit(4, 1))
    found = [rig.engine.jobs[rig.engine.key(slot)] for slot in (3, 4)]
    assert [(job.reasoning_ended, job.reasoning_parser_kwargs) for job in found] == [
        (False, arguments),
        (None, None),
    ]
    await rig.server.stop()


async def test_silent_peer_is_turned_away_after_the_handshake_limit(tmp_path: Path) -> None:
    server = await make_server(tmp_path, handshake_s=0.02)
    await server.start()
    gateway = Gateway(server)
    await until(lambda: gateway.transport.is_ended)
    await server.stop()


async def test_frames_before_the_hello_and_large_ones_are_refused(tmp_path: Path) -> None:
    server = await make_server(tmp_path)
    await server.start()
    early, large = Gateway(server), Gateway(server)
    early.send(submit(0, 1))
    large.connection.data_received(link.HEADER.pack(5000, link.HELLO))
    assert early.transport.is_ended
    assert large.transport.is_ended
    await server.stop()


async def test_engine_is_asked_for_its_figures_once_it_has_some(tmp_path: Path) -> None:
    engine = HandEngine()
    server = await make_server(tmp_path, engine)
    server.refresh()
    assert engine.num_asked == 0
    await server.start()
    server.refresh()
    assert engine.num_asked == 1
    await server.stop()


async def test_gateway_that_comes_before_the_engine_waits_for_it(tmp_path: Path) -> None:
    server = await make_server(tmp_path)
    gateway = Gateway(server)
    assert gateway.shake() == []
    server._broadcast_stats()
    (stats,) = Framer().feed(bytes(gateway.transport.data))
    assert stats.accepting is False
    gateway.frames()
    await server.start()
    (welcome,) = gateway.frames()
    assert isinstance(welcome, link.Welcome)
    await server.stop()


async def test_more_connections_than_allowed_are_refused(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path, max_connections=1)
    assert Gateway(rig.server).transport.is_ended
    assert rig.server.num_connections == 1
    await rig.server.stop()


async def test_gateway_gets_the_place_of_the_oldest_silent_stranger(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path, max_connections=3)
    oldest, newer = Gateway(rig.server), Gateway(rig.server)
    gateway = Gateway(rig.server)
    assert (oldest.transport.is_ended, newer.transport.is_ended) == (True, False)
    assert isinstance(gateway.shake()[0], link.Welcome)
    assert not rig.gateway.transport.is_ended
    await rig.server.stop()


async def test_listening_beyond_loopback_without_trust_is_refused() -> None:
    with pytest.raises(AddressError, match="refusing to listen"):
        LinkServer(HandEngine(), parse_address("tcp://0.0.0.0:0"))


async def test_engine_that_fails_to_start_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken(HandEngine):
        async def start(self, events: EngineEvents) -> None:
            raise RuntimeError("no such model")

    engine = Broken()
    server = await make_server(tmp_path, engine)
    with pytest.raises(RuntimeError, match="no such model"):
        await server.start()
    assert engine.is_stopped
    assert not (tmp_path / "s").exists()


# -- slots -------------------------------------------------------------------------------------------------


async def test_one_frame_per_step_and_connection(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    other = Gateway(rig.server)
    other.shake()
    rig.gateway.send(submit(0, 1), submit(1, 2))
    other.send(submit(0, 1))
    rig.engine.events.step([Output(key, [10 + index]) for index, key in enumerate(rig.engine.jobs)])
    assert rig.gateway.frames() == [Step([Delta(0, 1, [10]), Delta(1, 2, [11])])]
    assert other.frames() == [Step([Delta(0, 1, [12])])]
    await rig.server.stop()


async def test_first_tokens_stand_first_in_a_steps_frame(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1), submit(1, 1))
    old = [rig.engine.key(0), rig.engine.key(1)]
    rig.engine.events.step([Output(key, [1], extra=Extra(is_first=True)) for key in old])
    rig.gateway.frames()
    rig.gateway.send(submit(2, 1), submit(3, 1))
    new = [rig.engine.key(2), rig.engine.key(3)]
    first, logprobs = Extra(is_first=True), Extra(logprobs=[])
    outputs = [Output(old[0], [2]), Output(new[0], [3], extra=first)]
    outputs += [Output(old[1], [4], extra=logprobs), Output(new[1], [5], extra=first)]
    rig.engine.events.step(outputs)
    (step,) = rig.gateway.frames()
    assert [delta.ids for delta in step.deltas] == [[3], [5], [2], [4]]
    await rig.server.stop()


async def test_slot_can_be_used_again_after_its_finish(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1))
    rig.engine.say(0, 5, finish="stop")
    rig.gateway.send(submit(0, 2))
    rig.engine.say(0, 6)
    assert rig.gateway.frames() == [Step([Delta(0, 1, [5], "stop")]), Step([Delta(0, 2, [6])])]
    assert (rig.server.num_running, rig.server.num_waiting) == (1, 0)
    await rig.server.stop()


@pytest.mark.parametrize("generation", [1, 2])
async def test_submit_to_a_slot_in_use_ends_the_connection(tmp_path: Path, generation: int) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1), submit(0, generation))
    assert rig.gateway.transport.is_ended
    assert len(rig.engine.aborted) == 1
    await rig.server.stop()


async def test_pieces_become_one_prompt(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(Piece(0, 1, b"\1\0\0\0" * 3), Piece(1, 2, b"\7\0\0\0"), Piece(0, 1, b"\2\0\0\0"))
    rig.gateway.send(submit(0, 1, b"\3\0\0\0"))
    assert rig.engine.jobs[rig.engine.key(0)].ids == b"\1\0\0\0" * 3 + b"\2\0\0\0\3\0\0\0"
    assert rig.server.assembly.num_bytes == 4
    rig.gateway.send(Abort([(1, 2)]))
    assert rig.server.assembly.num_bytes == 0
    assert rig.gateway.frames() == [Closed([(1, 2)])]
    await rig.server.stop()


async def test_prompt_may_be_all_in_its_pieces(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(Piece(0, 1, b"\1\0\0\0" * 3), submit(0, 1, b""))
    rig.gateway.send(Piece(1, 2, b"\2\0\0\0"), Piece(1, 2, b"\3\0\0\0"), submit(1, 2, b""))
    assert rig.engine.jobs[rig.engine.key(0)].ids == b"\1\0\0\0" * 3
    assert rig.engine.jobs[rig.engine.key(1)].ids == b"\2\0\0\0\3\0\0\0"
    assert rig.server.assembly.num_bytes == 0
    await rig.server.stop()


async def test_abort_is_answered_when_the_engine_has_let_go(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1))
    key = rig.engine.key(0)
    rig.gateway.send(Abort([(0, 1)]), Abort([(0, 1)]))
    assert rig.engine.aborted == [key]
    rig.engine.say(0, 5)
    assert rig.gateway.frames() == []
    rig.engine.events.closed([key])
    assert rig.gateway.frames() == [Closed([(0, 1)])]
    assert rig.server.num_running == rig.server.num_waiting == 0
    await rig.server.stop()


async def test_finish_and_failure_that_cross_an_abort_answer_it(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1), submit(1, 2), Abort([(0, 1), (1, 2)]))
    rig.engine.say(0, 5, finish="length")
    rig.engine.events.failed(rig.engine.key(1), "rejected", "no")
    assert rig.gateway.frames() == [Closed([(0, 1)]), Closed([(1, 2)])]
    await rig.server.stop()


async def test_abort_of_what_is_over_or_unknown_is_not_answered(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1))
    rig.engine.say(0, 5, finish="stop")
    rig.gateway.frames()
    rig.gateway.send(Abort([(0, 1), (0, 7), (9, 9)]))
    assert rig.gateway.frames() == []
    assert rig.engine.aborted == []
    await rig.server.stop()


async def test_output_after_the_end_is_dropped_and_counted(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1))
    rig.engine.say(0, 5, finish="stop")
    rig.gateway.frames()
    rig.engine.say(0, 6)
    rig.engine.events.closed([rig.engine.key(0)])
    rig.engine.events.failed(rig.engine.key(0), "engine", "no")
    assert rig.gateway.frames() == []
    assert rig.server.num_late == 1
    await rig.server.stop()


async def test_output_that_cannot_be_encoded_ends_its_connection_only(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    other = Gateway(rig.server)
    other.shake()
    rig.gateway.send(submit(0, 1))
    other.send(submit(0, 1))
    bad, good = rig.engine.jobs
    rig.engine.events.step([Output(bad, [object()]), Output(good, [5])])  # type: ignore[list-item]
    assert rig.gateway.transport.is_ended
    assert other.frames() == [Step([Delta(0, 1, [5])])]
    assert rig.engine.aborted == [bad]
    await rig.server.stop()


# -- refusals ----------------------------------------------------------------------------------------------


async def test_engine_that_raises_fails_its_slot_and_not_the_connection(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.engine.error = ValueError("temperature must be 0 or more")
    rig.gateway.send(submit(0, 1))
    rig.engine.error = None
    rig.gateway.send(submit(0, 2))
    rig.engine.say(0, 5)
    (error, step) = rig.gateway.frames()
    assert error == Error(0, 1, "rejected", "ValueError: temperature must be 0 or more")
    assert step == Step([Delta(0, 2, [5])])
    assert rig.server.num_running == 1
    await rig.server.stop()


async def test_waiting_jobs_are_bounded_over_all_connections(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path, max_waiting=2)
    other = Gateway(rig.server)
    other.shake()
    rig.gateway.send(submit(0, 1), submit(1, 2))
    other.send(submit(0, 1))
    (error,) = other.frames()
    assert (error.kind, error.slot, error.generation) == ("busy", 0, 1)
    assert "the limit is 2" in error.message
    rig.engine.say(0, 5)
    other.send(submit(0, 2))
    assert other.frames() == []
    assert len(rig.engine.jobs) == 3
    await rig.server.stop()


async def test_prompt_longer_than_the_model_takes_is_rejected_in_its_pieces(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    piece = b"\1\0\0\0" * 60_000
    rig.gateway.send(Piece(0, 1, piece), Piece(0, 1, piece), Piece(0, 1, piece), submit(0, 1))
    (error,) = rig.gateway.frames()
    assert (error.kind, error.message) == (
        "rejected",
        "the prompt has 120000 tokens or more; the limit is 100000",
    )
    assert rig.server.assembly.num_bytes == 0
    rig.gateway.send(submit(0, 2))
    assert len(rig.engine.jobs) == 1
    await rig.server.stop()


async def test_slot_of_a_refused_upload_can_be_used_before_its_rest_was_dropped(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(Piece(0, 1, b"odd"), Piece(0, 1, b"\1\0\0\0"), Piece(0, 2, b"\2\0\0\0"), submit(0, 2))
    (error,) = rig.gateway.frames()
    assert (error.generation, error.kind) == (1, "rejected")
    assert rig.engine.jobs[rig.engine.key(0)].ids == b"\2\0\0\0\1\0\0\0"
    await rig.server.stop()


async def test_prompts_in_pieces_are_bounded_in_bytes(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path, max_assembly_bytes=100)
    rig.gateway.send(Piece(0, 1, b"\1\0\0\0" * 20), Piece(1, 2, b"\1\0\0\0" * 20))
    (error,) = rig.gateway.frames()
    assert (error.slot, error.kind) == (1, "busy")
    rig.gateway.send(submit(0, 1))
    assert rig.server.assembly.num_bytes == 0
    assert len(rig.engine.jobs) == 1
    await rig.server.stop()


# -- slow readers ------------------------------------------------------------------------------------------


async def test_slow_reader_costs_one_entry_per_slot_and_loses_nothing(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(*(submit(slot, slot + 1) for slot in range(4)))
    expected: dict[int, list[int]] = {slot: [] for slot in range(4)}
    rig.gateway.connection.pause_writing()
    for token in range(1000):
        outputs = [Output(rig.engine.key(slot), [4 * token + slot]) for slot in range(4)]
        outputs[0].extra = Extra(logprobs=[([4 * token], [-1.0], 1)])
        rig.engine.events.step(outputs)
        for slot in range(4):
            expected[slot].append(4 * token + slot)
    assert rig.gateway.frames() == []
    assert len(rig.gateway.connection.outbox) == 4
    rig.engine.say(3, 9, finish="stop")
    expected[3].append(9)
    rig.gateway.connection.resume_writing()
    rig.engine.say(0, 7)
    expected[0].append(7)
    received: dict[int, list[int]] = {slot: [] for slot in range(4)}
    num_logprobs = 0
    for step in rig.gateway.frames():
        for delta in step.deltas:
            received[delta.slot] += delta.ids
            num_logprobs += len(delta.extra.logprobs) if delta.extra else 0
    assert received == expected
    assert num_logprobs == 1000
    assert set(rig.gateway.connection.streams) == {0, 1, 2}
    await rig.server.stop()


async def test_abort_while_the_reader_is_slow_drops_what_waits(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1), submit(1, 2))
    rig.gateway.connection.pause_writing()
    rig.engine.say(0, 5)
    rig.engine.say(1, 6, finish="stop")
    rig.gateway.send(Abort([(0, 1), (1, 2)]))
    assert rig.gateway.frames() == [Closed([(1, 2)])]
    rig.engine.events.closed([rig.engine.key(0)])
    rig.gateway.connection.resume_writing()
    assert rig.gateway.frames() == [Closed([(0, 1)])]
    await rig.server.stop()


async def test_failure_comes_after_the_tokens_that_waited(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1))
    rig.gateway.connection.pause_writing()
    rig.engine.say(0, 5)
    rig.engine.events.failed(rig.engine.key(0), "engine", "out of memory")
    assert rig.gateway.frames() == [Step([Delta(0, 1, [5])]), Error(0, 1, "engine", "out of memory")]
    await rig.server.stop()


async def test_reader_that_stays_slow_is_cut(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path, slow_reader_s=0.02)
    rig.gateway.send(submit(0, 1))
    rig.gateway.connection.pause_writing()
    await until(lambda: rig.gateway.transport.is_ended)
    assert rig.engine.aborted == [rig.engine.key(0)]
    await rig.server.stop()


async def test_step_larger_than_a_frame_is_sent_in_several(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1), submit(1, 2))
    ids = [1_000_000_000] * 1_800_000
    rig.engine.events.step([Output(rig.engine.key(0), ids, "stop"), Output(rig.engine.key(1), [5])])
    frames = rig.gateway.frames()
    assert len(frames) > 10
    assert sum(len(delta.ids) for step in frames for delta in step.deltas) == len(ids) + 1
    assert set(rig.gateway.connection.streams) == {1}
    await rig.server.stop()


# -- endings -----------------------------------------------------------------------------------------------


async def test_lost_connection_aborts_its_slots_and_no_others(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    other = Gateway(rig.server)
    other.shake()
    rig.gateway.send(submit(0, 1), submit(1, 2), Piece(2, 3, b"\1\0\0\0"))
    other.send(submit(0, 1))
    lost = list(rig.engine.jobs)[:2]
    rig.gateway.connection.connection_lost(None)
    assert rig.engine.aborted == lost
    assert rig.server.assembly.num_bytes == 0
    rig.engine.events.step([Output(key, [5]) for key in rig.engine.jobs])
    rig.engine.events.closed(lost)
    assert other.frames() == [Step([Delta(0, 1, [5])])]
    assert (rig.server.num_running, rig.server.num_connections) == (1, 1)
    await rig.server.stop()


async def test_garbage_ends_the_connection_and_aborts_its_slots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(3)
    rig = await make_rig(tmp_path)
    for _ in range(200):
        gateway = Gateway(rig.server)
        gateway.shake()
        gateway.send(submit(0, 1))
        key = rig.engine.key(0)
        for _ in range(50):
            gateway.connection.data_received(rng.randbytes(rng.randint(1, 200)))
        gateway.connection.data_received(b"\xff" * 5)
        assert gateway.transport.is_ended
        assert key in rig.engine.aborted
        gateway.connection.connection_lost(None)
    assert rig.server.num_connections == 1
    assert "closing the link to gateway g: " in caplog.text
    await rig.server.stop()


async def test_dead_engine_fails_every_slot_and_takes_no_more(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1), submit(1, 2), Abort([(1, 2)]))
    rig.engine.events.died("CUDA error")
    assert rig.server.died.result() == "CUDA error"
    assert rig.gateway.frames() == [Error(0, 1, "engine", "the engine died: CUDA error"), Closed([(1, 2)])]
    assert rig.gateway.transport.is_ended
    assert Gateway(rig.server).transport.is_ended
    await rig.server.stop()


async def test_drain_lets_running_jobs_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1))
    assert rig.server.is_accepting
    draining = asyncio.create_task(rig.server.drain(10))
    await asyncio.sleep(0)
    assert not rig.server.is_accepting
    rig.gateway.send(submit(1, 2))
    rig.engine.say(0, 5, finish="stop")
    assert await draining == 0
    (error, step) = rig.gateway.frames()
    assert (error.kind, error.slot) == ("busy", 1)
    assert step == Step([Delta(0, 1, [5], "stop")])
    await rig.server.stop()


async def test_drain_gives_up_at_its_limit_and_stop_names_the_reason(tmp_path: Path) -> None:
    rig = await make_rig(tmp_path)
    rig.gateway.send(submit(0, 1))
    assert await rig.server.drain(0.01) == 1
    await rig.server.stop()
    assert rig.gateway.frames() == [Error(0, 1, "engine", "the worker was stopped")]
    assert rig.engine.is_stopped


# -- files -------------------------------------------------------------------------------------------------


async def test_announced_file_comes_in_pieces_that_wait_for_the_reader(tmp_path: Path) -> None:
    content = random.Random(4).randbytes(700_000)
    (tmp_path / "tokenizer.json").write_bytes(content)
    server = await make_server(tmp_path, HandEngine(tmp_path / "tokenizer.json"))
    await server.start()
    gateway = Gateway(server)
    gateway.shake()
    gateway.send(Fetch("a" * 64))
    gateway.connection.pause_writing()
    await asyncio.sleep(0.02)
    assert gateway.frames() == []
    gateway.connection.resume_writing()
    pieces: list[Any] = []
    async with asyncio.timeout(5):
        while not (pieces and pieces[-1].last):
            await asyncio.sleep(0.001)
            pieces += gateway.frames()
    assert len(pieces) > 2
    assert b"".join(piece.data for piece in pieces) == content
    await server.stop()


async def test_fetch_of_anything_else_ends_the_connection(tmp_path: Path) -> None:
    for sha256 in ("b" * 64, "../../etc/passwd"):
        rig = await make_rig(tmp_path)
        rig.gateway.send(Fetch(sha256))
        assert rig.gateway.transport.is_ended
        await rig.server.stop()


async def test_file_that_has_vanished_ends_the_connection(tmp_path: Path) -> None:
    server = await make_server(tmp_path, HandEngine(tmp_path / "nothing"))
    await server.start()
    gateway = Gateway(server)
    gateway.shake()
    gateway.send(Fetch("a" * 64))
    await asyncio.sleep(0.01)
    assert gateway.transport.is_ended
    await server.stop()
