"""The gateway's end: dispatch, aborts, hostile workers, silence. No sockets: a hand-fed protocol."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from typing import Any

import pytest
import uvloop

from backend import link
from backend.address import Address
from backend.framing import Framer
from backend.link import (
    Abort,
    Closed,
    Delta,
    Error,
    Extra,
    FilePiece,
    Piece,
    Stats,
    Step,
    Submit,
    Welcome,
)
from backend.link_client import ClientLimits, LinkClient
from backend.slots import FREE
from pipeline.errors import (
    EngineRejected,
    HeadraceError,
    InvalidRequest,
    QueueFull,
    WorkerLost,
    WorkerStalled,
)
from pipeline.values import EngineCall, FirstToken, Prompt, TokenLogprobs
from tests.backend.linked import HandTransport, RecordingSink, ids_of, is_lent, make_call, until

SECRET = b"a shared secret"


class Worker:
    """A hand-made worker at the other end of a hand-fed client."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self.stats: list[Stats] = []
        self.now_s = 0.0
        address = Address(path="/nowhere")
        self.client = LinkClient(address, SECRET, "g", limits, self.stats.append, clock=lambda: self.now_s)
        self.transport = HandTransport()
        self.client.connection_made(self.transport)

    def send(self, *frames: link.Frame) -> None:
        self.client.data_received(b"".join(link.encode(frame) for frame in frames))

    def frames(self) -> list[Any]:
        return self.transport.frames()

    def challenge(self, version: tuple[int, int] = link.VERSION) -> None:
        self.send(link.Challenge(b"w" * 32, version))

    def shake(self, secret: bytes = SECRET) -> None:
        self.challenge()
        (hello,) = self.frames()
        link.check_proof(SECRET, b"w" * 32, b"gateway", hello.mac)
        mac = link.proof(secret, hello.nonce, b"worker")
        self.send(Welcome(mac, "worker-1", ["m"], 4096, 16, {}, "f", [], {}))

    def submit(self, sink: RecordingSink | None = None, **sampling: Any) -> tuple[RecordingSink, Submit, Any]:
        sink = sink or RecordingSink()
        handle = self.client.submit(make_call([1, 2, 3], **sampling), sink)
        (frame,) = self.frames()
        return sink, frame, handle


def shaken(limits: ClientLimits | None = None) -> Worker:
    worker = Worker(limits)
    worker.shake()
    return worker


# -- handshake ---------------------------------------------------------------------------------------------


async def test_worker_that_knows_the_secret_is_welcome() -> None:
    worker = shaken()
    welcome = await worker.client.welcomed()
    assert (welcome.worker, worker.client.worker) == ("worker-1", "worker-1")
    worker.client.close()


async def test_worker_that_does_not_know_the_secret_is_left() -> None:
    worker = Worker()
    worker.shake(secret=b"other")
    assert worker.transport.is_ended
    with pytest.raises(WorkerLost, match="secrets"):
        await worker.client.welcomed()


async def test_worker_of_another_version_is_left_before_anything_is_proven() -> None:
    worker = Worker()
    worker.challenge((link.VERSION[0] + 1, 0))
    assert worker.frames() == []
    with pytest.raises(WorkerLost, match="link version"):
        await worker.client.welcomed()


async def test_worker_one_minor_version_older_or_newer_is_welcome() -> None:
    major, minor = link.VERSION
    for version in ((major, minor - 1), (major, minor + 1)):
        worker = Worker()
        worker.challenge(version)
        (hello,) = worker.frames()
        assert hello.version == link.VERSION
        worker.client.close()


async def test_silent_worker_is_left_after_the_handshake_limit() -> None:
    worker = Worker(ClientLimits(handshake_s=0.02))
    with pytest.raises(WorkerStalled, match=r"nothing for 0\.02 s"):
        await worker.client.welcomed()
    assert worker.transport.is_ended


async def test_worker_that_loads_keeps_the_link_alive_by_heartbeats() -> None:
    worker = Worker(ClientLimits(handshake_s=0.2, stall_s=5))
    worker.challenge()
    (hello,) = worker.frames()
    for _ in range(8):
        await asyncio.sleep(0.05)
        worker.send(Stats(accepting=False))
    assert len(worker.stats) == 8
    worker.send(
        Welcome(link.proof(SECRET, hello.nonce, b"worker"), "worker-1", ["m"], 4096, 16, {}, "f", [], {})
    )
    assert (await worker.client.welcomed()).worker == "worker-1"
    worker.client.close()


async def test_worker_that_hangs_up_after_our_hello_hints_at_the_secret() -> None:
    worker = Worker()
    worker.challenge()
    worker.client.connection_lost(None)
    with pytest.raises(WorkerLost, match="do the shared secrets differ"):
        await worker.client.welcomed()


# -- dispatch ----------------------------------------------------------------------------------------------


async def test_tokens_reach_their_sink_with_all_that_belongs_to_them() -> None:
    worker = shaken()
    sink, submit, _ = worker.submit(logprobs=1)
    assert submit.sampling == {"logprobs": 1, "max_tokens": 8}
    entry = ([5, 5, 9], [-0.5, -0.5, -2.0], 1)
    worker.send(Step([Delta(submit.slot, submit.generation, [5], extra=Extra(64, 1.5, 2.5, True, [entry]))]))
    worker.send(Step([Delta(submit.slot, submit.generation, [6])]))
    worker.send(Step([Delta(submit.slot, submit.generation, [7], "stop", 7)]))
    assert (sink.ids, sink.ended.result(), sink.stop) == ([5, 6, 7], "stop", 7)
    assert sink.first == FirstToken(64, 1.5, 2.5)
    assert sink.logprobs == [TokenLogprobs([5, 5, 9], [-0.5, -0.5, -2.0], 1)]
    assert worker.client.slots.num_requests == worker.client.slots.outstanding_tokens == 0
    worker.client.close()


NUM_LATER = 10  # enough tokens of other streams to be worth another turn of the loop


def long_step(worker: Worker) -> tuple[list[RecordingSink], Step]:
    """The sinks of one stream that begins and of others that run, and a step that has tokens for all."""
    submits = [worker.submit() for _ in range(1 + NUM_LATER)]
    first, *others = [frame for _, frame, _ in submits]
    deltas = [Delta(first.slot, first.generation, [1], extra=Extra(is_first=True))]
    deltas += [Delta(frame.slot, frame.generation, [2]) for frame in others]
    return [sink for sink, _, _ in submits], Step(deltas)


async def test_first_token_does_not_wait_for_those_of_other_streams() -> None:
    worker = shaken()
    (first, *others), step = long_step(worker)
    worker.send(step)
    assert (first.ids, [sink.ids for sink in others]) == ([1], [[]] * NUM_LATER)
    await asyncio.sleep(0)
    assert [sink.ids for sink in others] == [[2]] * NUM_LATER
    worker.client.close()


async def test_a_few_other_tokens_come_at_once() -> None:
    worker = shaken()
    (first, *others), step = long_step(worker)
    worker.send(Step(step.deltas[:4]))
    assert [sink.ids for sink in (first, *others[:3])] == [[1], [2], [2], [2]]
    worker.client.close()


async def test_next_frame_finds_all_tokens_of_the_step_before_handed_on() -> None:
    worker = shaken()
    (first, *others), step = long_step(worker)
    later = [Delta(delta.slot, delta.generation, [3], "stop") for delta in step.deltas]
    worker.send(step, Step(later))
    assert first.ids == [1, 3]
    assert [sink.ids for sink in others] == [[2, 3]] * NUM_LATER
    await asyncio.sleep(0)
    assert [sink.ids for sink in others] == [[2, 3]] * NUM_LATER, "nothing comes twice"
    worker.client.close()


async def test_lost_link_ends_streams_behind_their_last_tokens() -> None:
    worker = shaken()
    (_, *others), step = long_step(worker)
    worker.send(step)
    worker.client.connection_lost(None)
    for sink in others:
        assert sink.ids == [2]
        assert isinstance(sink.ended.result(), WorkerLost)
    await asyncio.sleep(0)
    assert [sink.ids for sink in others] == [[2]] * NUM_LATER


async def test_sink_that_closes_the_link_while_it_catches_up_ends_it_once() -> None:
    worker = shaken()
    (_, other, *_), step = long_step(worker)

    def tokens(*_: Any) -> None:
        worker.client.close("enough")

    other.tokens = tokens  # type: ignore[method-assign, assignment]
    slot = worker.client.slots.find(step.deltas[1].slot, step.deltas[1].generation)
    assert slot is not None
    slot.tokens = tokens  # type: ignore[assignment]
    worker.send(step)
    worker.client.connection_lost(None)
    assert "enough" in str(worker.client.ended.result())


async def test_slot_never_used_in_what_waits_of_a_step_ends_the_link() -> None:
    worker = shaken()
    _, step = long_step(worker)
    worker.send(Step([*step.deltas, Delta(500, 1, [2])]))
    assert worker.client.is_open
    await asyncio.sleep(0)
    assert "broke the protocol" in str(worker.client.ended.result())


async def test_tokens_of_another_generation_or_slot_are_dropped_and_counted() -> None:
    worker = shaken()
    first, old, _ = worker.submit()
    other, kept, _ = worker.submit()
    worker.send(Step([Delta(old.slot, old.generation, [1], "stop")]))
    second, new, _ = worker.submit()
    assert new.slot == old.slot
    worker.send(Step([Delta(old.slot, old.generation, [66]), Delta(kept.slot, new.generation, [66])]))
    worker.send(Closed([(old.slot, old.generation)]), Error(old.slot, old.generation, "engine", "x"))
    worker.send(Step([Delta(new.slot, new.generation, [2]), Delta(kept.slot, kept.generation, [3])]))
    assert (first.ids, second.ids, other.ids) == ([1], [2], [3])
    assert worker.client.slots.num_dropped == 4
    worker.client.close()


async def test_tokens_that_cross_an_abort_are_dropped_and_not_counted() -> None:
    worker = shaken()
    sink, submit, handle = worker.submit()
    handle.abort()
    handle.abort()
    assert worker.frames() == [Abort([(submit.slot, submit.generation)])]
    worker.send(Step([Delta(submit.slot, submit.generation, [5])]))
    _, other, _ = worker.submit()
    assert other.slot != submit.slot
    worker.send(Closed([(submit.slot, submit.generation)]))
    assert worker.client.slots.find(submit.slot, submit.generation) is None
    handle.abort()
    assert worker.frames() == []
    assert (sink.num_calls, sink.ended.done(), worker.client.slots.num_dropped) == (0, False, 0)
    worker.client.close()


async def test_finish_that_crosses_an_abort_frees_the_slot() -> None:
    worker = shaken()
    sink, submit, handle = worker.submit()
    handle.abort()
    worker.send(Step([Delta(submit.slot, submit.generation, [5], "length")]))
    assert worker.client.slots.table[submit.slot].state is FREE
    assert sink.num_calls == 0
    worker.client.close()


@pytest.mark.parametrize(
    ("kind", "error"), [("busy", QueueFull), ("rejected", EngineRejected), ("engine", WorkerLost)]
)
async def test_error_of_a_slot_fails_its_sink_by_whose_fault_it_is(kind: str, error: type) -> None:
    worker = shaken()
    sink, submit, _ = worker.submit()
    worker.send(Error(submit.slot, submit.generation, kind, "the reason"))
    told = sink.ended.result()
    assert isinstance(told, error)
    assert "the reason" in str(told)
    worker.client.close()


async def test_sink_that_raises_ends_only_its_own_stream(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RecordingSink):
        def tokens(self, *arguments: Any) -> None:
            raise RuntimeError("a bug in this sink")

    worker = shaken()
    broken, bad, _ = worker.submit(Broken())
    sink, good, _ = worker.submit()
    for frame_ids in ([1], [2]):
        worker.send(
            Step([Delta(bad.slot, bad.generation, frame_ids), Delta(good.slot, good.generation, frame_ids)])
        )
    assert sink.ids == [1, 2]
    assert type(broken.ended.result()) is HeadraceError
    assert worker.frames() == [Abort([(bad.slot, bad.generation)])]
    assert "a bug in this sink" in caplog.text
    worker.client.close()


async def test_sink_that_raises_at_its_finish_is_told_and_leaves_the_slot_free() -> None:
    class Broken(RecordingSink):
        def tokens(self, *arguments: Any) -> None:
            raise RuntimeError("a bug in this sink")

    worker = shaken()
    broken, submit, _ = worker.submit(Broken())
    worker.send(Step([Delta(submit.slot, submit.generation, [5], "stop")]))
    assert worker.frames() == []
    assert type(broken.ended.result()) is HeadraceError
    _, again, _ = worker.submit()
    assert again.slot == submit.slot
    worker.client.close()


async def test_sink_may_abort_and_submit_from_inside_its_callback() -> None:
    worker = shaken()
    inner = RecordingSink()

    class Chaining(RecordingSink):
        handle: Any = None

        def tokens(self, ids: list[int], finish: str | None, *rest: Any) -> None:
            super().tokens(ids, finish, *rest)
            self.handle.abort()
            worker.client.submit(make_call([4]), inner)

    sink = Chaining()
    _, submit, sink.handle = worker.submit(sink)
    worker.send(
        Step([Delta(submit.slot, submit.generation, [5]), Delta(submit.slot, submit.generation, [6])])
    )
    assert sink.ids == [5]
    (abort, chained) = worker.frames()
    assert abort == Abort([(submit.slot, submit.generation)])
    worker.send(Step([Delta(chained.slot, chained.generation, [7])]))
    assert inner.ids == [7]
    worker.client.close()


async def test_clock_is_read_once_for_all_tokens_of_a_read() -> None:
    times: list[float] = []

    class Timed(RecordingSink):
        def tokens(self, *arguments: Any) -> None:
            times.append(arguments[-1])
            worker.now_s += 1.0

    worker = shaken()
    worker.now_s = 5.0
    submits = [worker.submit(Timed())[1] for _ in range(3)]
    worker.send(Step([Delta(submit.slot, submit.generation, [1]) for submit in submits]))
    assert times == [5.0, 5.0, 5.0]
    worker.client.close()


# -- submits -----------------------------------------------------------------------------------------------


async def test_abort_overtakes_the_rest_of_a_long_prompt() -> None:
    worker = shaken()
    worker.client.pause_writing()
    sink = RecordingSink()
    handle = worker.client.submit(make_call(list(range(100_000))), sink)
    assert worker.frames() == []
    worker.transport.write = paused_after_one(worker)  # type: ignore[method-assign]
    worker.client.resume_writing()
    (piece,) = worker.frames()
    assert isinstance(piece, Piece)
    handle.abort()
    assert worker.frames() == [Abort([(piece.slot, piece.generation)])]
    worker.client.resume_writing()
    assert worker.frames() == []
    worker.send(Closed([(piece.slot, piece.generation)]))
    assert worker.client.slots.table[piece.slot].state is FREE
    worker.client.close()


def paused_after_one(worker: Worker) -> Any:
    write = worker.transport.write

    def write_and_pause(data: Any) -> None:
        write(data)
        worker.client.pause_writing()

    return write_and_pause


async def test_short_submit_overtakes_a_long_prompt() -> None:
    worker = shaken()
    worker.client.pause_writing()
    worker.client.submit(make_call(list(range(100_000))), RecordingSink())
    _, submit, _ = worker.submit()
    assert len(submit.ids) == 12
    worker.client.close()


async def test_abort_of_a_prompt_that_was_never_sent_needs_no_worker() -> None:
    worker = shaken()
    worker.client.pause_writing()
    handle = worker.client.submit(make_call(list(range(100_000))), RecordingSink())
    handle.abort()
    worker.client.resume_writing()
    assert worker.frames() == []
    assert worker.client.slots.table[0].state is FREE
    worker.client.close()


@pytest.mark.parametrize(
    ("last_word", "fault"),
    [
        (lambda piece: Error(piece.slot, piece.generation, "busy", "full"), QueueFull),
        (lambda piece: Closed([(piece.slot, piece.generation)]), WorkerLost),
    ],
)
async def test_last_word_while_a_long_prompt_is_on_its_way_drops_the_rest(
    last_word: Any, fault: type
) -> None:
    worker = shaken()
    worker.transport.write = paused_after_one(worker)  # type: ignore[method-assign]
    sink = RecordingSink()
    worker.client.submit(make_call(list(range(100_000))), sink)
    (piece,) = worker.frames()
    worker.send(last_word(piece))
    worker.client.resume_writing()
    assert worker.frames() == []
    assert isinstance(sink.ended.result(), fault)
    worker.client.close()


def lent_call(num_pieces: int) -> tuple[bytearray, EngineCall]:
    """A pooled buffer, and a call whose prompt is a view of it."""
    buffer = bytearray(ids_of(range(num_pieces * link.PIECE_BYTES // 4)))
    return buffer, EngineCall("m", Prompt(memoryview(buffer).toreadonly(), len(buffer) // 4, 0), {}, 5)


@pytest.mark.parametrize("num_sent", range(5))
@pytest.mark.parametrize("end", ["abort", "loss", "error", "close"])
async def test_prompts_buffer_is_free_when_its_choice_ends_after_any_piece(num_sent: int, end: str) -> None:
    worker = shaken()
    worker.transport.write = paused_after_one(worker)  # type: ignore[method-assign]
    worker.client.pause_writing()
    buffer, call = lent_call(4)
    handle = worker.client.submit(call, RecordingSink())
    del call
    for _ in range(num_sent):
        worker.client.resume_writing()
    sent = worker.frames()
    assert [type(frame) for frame in sent] == [Piece, Piece, Piece, Piece, Submit][: num_sent + num_sent // 4]
    assert is_lent(buffer) == (num_sent < 4)
    if end == "abort":
        handle.abort()
    elif end == "loss":
        worker.client.connection_lost(ConnectionResetError())
    elif end == "error":
        worker.send(Error(handle._slot.number, handle._slot.generation, "busy", "full"))
    else:
        worker.client.close()
    assert not is_lent(buffer)
    worker.client.close()


async def test_choices_of_a_prompt_lend_its_buffer_until_the_last_is_sent() -> None:
    worker = shaken()
    worker.client.pause_writing()
    buffer, call = lent_call(2)
    handles = [worker.client.submit(call, RecordingSink()) for _ in range(3)]
    del call
    handles[1].abort()
    assert is_lent(buffer)
    worker.client.resume_writing()
    assert not is_lent(buffer)
    ids = b"".join(frame.ids for frame in worker.frames() if isinstance(frame, Piece | Submit))
    assert ids == bytes(buffer) * 2
    assert worker.client.copied_bytes == 0
    worker.client.close()


async def test_prompt_can_be_submitted_to_another_worker_after_a_loss() -> None:
    first, second = shaken(), shaken()
    first.transport.write = paused_after_one(first)  # type: ignore[method-assign]
    buffer, call = lent_call(3)
    first.client.submit(call, RecordingSink())
    first.client.connection_lost(None)
    assert is_lent(buffer)  # by the call
    second.client.submit(call, RecordingSink())
    del call
    assert not is_lent(buffer)
    assert b"".join(frame.ids for frame in second.frames()) == bytes(buffer)
    second.client.close()


async def check_reader_that_stops(end: str, has_views: bool) -> None:
    """Over a real socket whose other end does not read: what was written but not sent."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with theirs:
        client = LinkClient(Address(path="/nowhere"), SECRET, "g")
        await loop.create_connection(lambda: client, sock=ours)
        client.data_received(link.encode(link.Challenge(b"w" * 32, link.VERSION)))
        mac = link.proof(SECRET, client._nonce, b"worker")
        client.data_received(link.encode(Welcome(mac, "worker-1", ["m"], 1 << 20, 16, {}, "f", [], {})))
        buffer, call = lent_call(2)
        handle = client.submit(call, RecordingSink())
        del call
        assert is_lent(buffer)
        handle.abort()
        assert is_lent(buffer) == has_views  # uvloop keeps the piece, asyncio a copy of it
        if end == "read":
            theirs.setblocking(False)
            data = b""
            while not data.endswith(link.encode(Abort([(0, 1)]))):
                data += await loop.sock_recv(theirs, 1 << 20)
            sent = [frame.ids for frame in Framer().feed(data) if isinstance(frame, Piece)]
            assert sent == [bytes(buffer)[: link.PIECE_BYTES]]
        client.close()
        await until(lambda: not is_lent(buffer))


@pytest.mark.parametrize("end", ["read", "lost"])
def test_buffer_is_free_when_the_socket_has_taken_or_lost_the_last_piece(end: str) -> None:
    gc.disable()
    try:
        asyncio.run(check_reader_that_stops(end, has_views=False))
        uvloop.run(check_reader_that_stops(end, has_views=True))
    finally:
        gc.enable()


async def test_request_that_cannot_be_encoded_leaves_no_slot_behind() -> None:
    worker = shaken()
    with pytest.raises(InvalidRequest):
        worker.client.submit(make_call([1], seed=object()), RecordingSink())
    assert worker.client.slots.num_requests == 0
    assert worker.client.slots.table[0].state is FREE
    worker.client.close()


async def test_submit_to_a_closed_link_is_refused() -> None:
    worker = shaken()
    worker.client.close()
    with pytest.raises(WorkerLost):
        worker.client.submit(make_call([1]), RecordingSink())


# -- endings -----------------------------------------------------------------------------------------------


async def test_lost_connection_fails_every_live_sink_once_and_names_the_worker() -> None:
    worker = shaken()
    sinks = [worker.submit()[0] for _ in range(3)]
    aborted, _, handle = worker.submit()
    handle.abort()
    worker.client.connection_lost(ConnectionResetError("reset by peer"))
    worker.client.connection_lost(None)
    for sink in sinks:
        told = sink.ended.result()
        assert isinstance(told, WorkerLost)
        assert "worker-1" in str(told)
        assert "reset by peer" in str(told)
    assert not aborted.ended.done()
    handle.abort()
    assert isinstance(worker.client.ended.result(), WorkerLost)


@pytest.mark.parametrize(
    "frame",
    [
        link.Challenge(b"w", link.VERSION),
        Step([Delta(77, 1, [5])]),
        FilePiece("a" * 64, 0, b"abc", True),
        link.Hello(link.VERSION, b"m", b"n", "x"),
        Submit(0, 1, b"", {}),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_frame_that_no_worker_may_send_ends_the_link(frame: link.Frame) -> None:
    worker = shaken()
    sink = worker.submit()[0]
    worker.send(frame)
    assert worker.transport.is_ended
    told = sink.ended.result()
    assert isinstance(told, WorkerLost)
    assert "broke the protocol" in str(told)


async def test_garbage_ends_the_link_and_fails_the_sinks() -> None:
    rng = random.Random(5)
    for _ in range(200):
        worker = shaken()
        sink = worker.submit()[0]
        for _ in range(50):
            worker.client.data_received(rng.randbytes(rng.randint(1, 200)))
        worker.client.data_received(b"\xff" * 5)
        assert worker.transport.is_ended
        assert isinstance(sink.ended.result(), WorkerLost)


async def test_slot_that_was_closed_without_an_abort_fails_its_sink() -> None:
    worker = shaken()
    sink, submit, _ = worker.submit()
    worker.send(Closed([(submit.slot, submit.generation)]))
    assert isinstance(sink.ended.result(), WorkerLost)
    worker.client.close()


async def test_stalled_worker_is_left_and_named() -> None:
    worker = shaken(ClientLimits(stall_s=0.05))
    sink = worker.submit()[0]
    await until(sink.ended.done)
    told = sink.ended.result()
    assert isinstance(told, WorkerStalled)
    assert "worker-1" in str(told)
    assert worker.transport.is_ended


async def test_files_come_together_from_their_pieces() -> None:
    worker = shaken()
    future = worker.client.fetch("a" * 64, 6)
    assert worker.frames() == [link.Fetch("a" * 64)]
    worker.send(FilePiece("a" * 64, 0, b"abc", False), FilePiece("a" * 64, 3, b"def", True))
    assert await future == b"abcdef"
    worker.client.close()


@pytest.mark.parametrize(
    "pieces", [[FilePiece("a" * 64, 1, b"abc", False)], [FilePiece("a" * 64, 0, b"too long", True)]]
)
async def test_file_out_of_order_or_too_long_ends_the_link(pieces: list[FilePiece]) -> None:
    worker = shaken()
    future = worker.client.fetch("a" * 64, 6)
    worker.send(*pieces)
    with pytest.raises(WorkerLost, match="announced 6 bytes"):
        await future
    assert worker.transport.is_ended


async def test_fetch_over_a_lost_link_fails() -> None:
    worker = shaken()
    before = worker.client.fetch("a" * 64, 6)
    worker.client.connection_lost(None)
    for future in (before, worker.client.fetch("b" * 64, 6)):
        with pytest.raises(WorkerLost):
            await future
