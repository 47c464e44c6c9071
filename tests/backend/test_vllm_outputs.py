"""Batches of a real ZeroMQ socket, sent as the engine core sends them, to vLLM's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.backend.linked import until
from tests.backend.vllm_parts import FakeCore, import_vllm


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    import_vllm()


class Setup:
    """vLLM's client without an engine: what it reads comes from `send`."""

    def __init__(self, address: str) -> None:
        import zmq
        import zmq.asyncio
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.address = address
        self.context = zmq.Context()
        core: Any = AsyncMPClient.__new__(AsyncMPClient)
        core.resources = BackgroundResources(ctx=self.context)
        core.ctx = zmq.asyncio.Context(self.context)
        core.resources.output_socket = core.ctx.socket(zmq.PULL)
        core.resources.output_socket.bind(address)
        core.decoder = MsgpackDecoder(EngineCoreOutputs)
        core.utility_results = {}
        core.outputs_queue = asyncio.Queue()
        core.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace())
        self.core = core
        self.encoder = MsgpackEncoder()
        self.taken: list[Any] = []
        self.failed: list[Exception] = []

    def connect(self) -> None:
        import zmq

        self.sender = self.context.socket(zmq.PUSH)
        self.sender.setsockopt(zmq.SNDHWM, 0)  # as vLLM's
        self.sender.connect(self.address)

    async def outputs(self, take: Any = None) -> Any:
        from backend.vllm_outputs import open_outputs

        return await open_outputs(self.core, take or self.taken.append, self.failed.append)

    def send(self, *request_ids: str, **fields: Any) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        outputs = [EngineCoreOutput(request_id=each, new_token_ids=[7]) for each in request_ids]
        self.sender.send_multipart(self.encoder.encode(EngineCoreOutputs(outputs=outputs, **fields)))

    @property
    def ids(self) -> list[str]:
        return [item.request_id for batch in self.taken for item in batch.outputs]

    def close(self) -> None:
        self.core.resources.output_socket.close(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture
async def alone(tmp_path: Any) -> AsyncIterator[Setup]:
    """Without an engine core that connects."""
    made = Setup(f"ipc://{tmp_path}/outputs")
    yield made
    task = made.core.resources.output_queue_task
    if task is not None:
        task.cancel()
        await asyncio.sleep(0)
    made.close()


@pytest.fixture
def setup(alone: Setup) -> Setup:
    alone.connect()
    return alone


async def test_batches_come_in_order_however_many_wait(setup: Setup) -> None:
    from backend.vllm_outputs import SocketOutputs

    sent = [str(number) for number in range(2000)]
    outputs = await setup.outputs()
    assert type(outputs) is SocketOutputs
    for request_id in sent[:-1]:  # more than one read takes
        setup.send(request_id)
    await until(lambda: len(setup.taken) == len(sent) - 1)
    setup.send(sent[-1])  # one that finds the reader asleep
    await until(lambda: len(setup.taken) == len(sent))
    assert setup.ids == sent
    await outputs.close()


async def test_nobody_gets_in_after_the_engine_core(setup: Setup) -> None:
    path = setup.address.removeprefix("ipc://")
    outputs = await setup.outputs()
    setup.send("a")
    await until(lambda: setup.taken)
    with pytest.raises(FileNotFoundError):
        await asyncio.open_unix_connection(path)
    await outputs.close()


async def test_engine_core_that_does_not_come_is_left_to_the_client(
    alone: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backend import vllm_outputs

    monkeypatch.setattr(vllm_outputs, "CONNECT_LIMIT_S", 0.01)
    outputs = await alone.outputs()
    assert type(outputs) is vllm_outputs.QueuedOutputs
    alone.connect()
    alone.send("a")
    await until(lambda: alone.taken)
    assert alone.failed == []
    await outputs.close()


async def test_client_that_closes_its_sockets_at_the_start_is_a_dead_engine(alone: Setup) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    starting = asyncio.create_task(alone.outputs())
    await until(lambda: alone.core.resources.output_queue_task is not None)
    alone.core.resources()
    with pytest.raises(EngineDeadError):
        await starting


async def test_start_that_is_cancelled_leaves_all_to_the_client(alone: Setup) -> None:
    from backend.vllm_outputs import QueuedOutputs

    starting = asyncio.create_task(alone.outputs())
    await until(lambda: alone.core.resources.output_queue_task is not None)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert alone.core.resources.output_queue_task is None
    outputs = QueuedOutputs(alone.core, alone.taken.append, alone.failed.append)
    await outputs.start()
    alone.connect()
    alone.send("a")
    await until(lambda: alone.taken)
    assert alone.failed == []
    await outputs.close()


async def test_engine_core_that_goes_without_a_word_ends_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    from backend import vllm_outputs

    monkeypatch.setattr(vllm_outputs, "GONE_S", 0.01)
    outputs = await setup.outputs()
    setup.send("a")
    await until(lambda: setup.taken)
    setup.sender.close(linger=0)
    await until(lambda: setup.failed)
    assert [type(error) for error in setup.failed] == [EngineDeadError]
    await outputs.close()


async def test_peer_that_is_no_zeromq_socket_ends_it(alone: Setup) -> None:
    from backend.zmtp import ZmtpError

    starting = asyncio.create_task(alone.outputs())
    await until(lambda: alone.core.resources.output_queue_task is not None)
    _, writer = await asyncio.open_unix_connection(alone.address.removeprefix("ipc://"))
    outputs = await starting
    writer.write(bytes(64))
    await until(lambda: alone.failed)
    assert [type(error) for error in alone.failed] == [ZmtpError]
    writer.close()
    await outputs.close()


async def test_arrays_in_frames_of_their_own_come_with_their_batch(setup: Setup) -> None:
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists

    ids = np.arange(4096).reshape(2, 2048)
    arrays = LogprobsLists(ids, ids.astype(np.float32), np.array([1, 2]))
    item = EngineCoreOutput(request_id="a", new_token_ids=[1, 2], new_logprobs=arrays)
    frames = setup.encoder.encode(EngineCoreOutputs(outputs=[item]))
    assert len(frames) > 1
    outputs = await setup.outputs()
    setup.sender.send_multipart(frames)
    setup.send("b")
    await until(lambda: len(setup.taken) == 2)
    assert (setup.taken[0].outputs[0].new_logprobs.logprob_token_ids == ids).all()
    assert setup.ids == ["a", "b"]
    await outputs.close()


async def test_batch_with_nothing_in_it_is_nobodys(setup: Setup) -> None:
    outputs = await setup.outputs()
    setup.send()
    setup.send("a")
    await until(lambda: setup.taken)
    assert setup.ids == ["a"]
    await outputs.close()


async def test_results_of_utility_calls_reach_their_futures(setup: Setup) -> None:
    from vllm.v1.engine import UtilityOutput

    outputs = await setup.outputs()
    result = setup.core.utility_results[5] = asyncio.get_running_loop().create_future()
    setup.send(utility_output=UtilityOutput(call_id=5, failure_message="no such method"))
    with pytest.raises(Exception, match="no such method"):
        await asyncio.wait_for(result, 10)
    assert (setup.taken, setup.failed) == ([], [])
    await outputs.close()


async def test_message_of_a_dead_engine_ends_it_once(setup: Setup) -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.exceptions import EngineDeadError

    outputs = await setup.outputs()
    setup.sender.send(EngineCoreProc.ENGINE_CORE_DEAD)
    setup.send("late")
    await until(lambda: setup.failed)
    await asyncio.sleep(0.02)
    assert [type(error) for error in setup.failed] == [EngineDeadError]
    assert setup.taken == []
    assert setup.core.resources.engine_dead
    await outputs.close()


async def test_client_that_closes_its_sockets_counts_as_a_dead_engine(setup: Setup) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    outputs = await setup.outputs()
    await asyncio.to_thread(setup.core.resources)  # as vLLM's monitor does, from a thread of its own
    await until(lambda: setup.failed)
    assert [type(error) for error in setup.failed] == [EngineDeadError]
    await outputs.close()


async def test_bytes_that_are_no_batch_end_it(setup: Setup) -> None:
    outputs = await setup.outputs()
    setup.sender.send(b"\xc1")
    await until(lambda: setup.failed)
    assert len(setup.failed) == 1
    await outputs.close()


async def test_error_of_the_taker_ends_it(setup: Setup) -> None:
    def take(batch: Any) -> None:
        raise ValueError("cannot")

    outputs = await setup.outputs(take)
    setup.send("a")
    setup.send("b")
    await until(lambda: setup.failed)
    await asyncio.sleep(0.02)
    assert [str(error) for error in setup.failed] == ["cannot"]
    await outputs.close()


async def test_after_close_the_client_reads_by_itself(setup: Setup) -> None:
    outputs = await setup.outputs()
    setup.send("a")
    await until(lambda: setup.taken)
    await outputs.close()
    await outputs.close()
    setup.send("b")
    setup.send("c")
    for expected in ("b", "c"):
        batch = await asyncio.wait_for(setup.core.get_output_async(), 10)
        assert [item.request_id for item in batch.outputs] == [expected]
    assert (setup.ids, setup.failed) == (["a"], [])


@pytest.mark.parametrize("name", ["enable_elastic_ep", "enable_fault_tolerance"])
async def test_setups_with_messages_of_their_own_are_left_to_the_client(setup: Setup, name: str) -> None:
    from backend.vllm_outputs import QueuedOutputs, socket_fault

    setattr(setup.core.vllm_config.parallel_config, name, True)
    assert socket_fault(setup.core) == f"{name} is set"
    outputs = await setup.outputs()
    assert type(outputs) is QueuedOutputs
    setup.send("a")
    await until(lambda: setup.taken)
    await outputs.close()


async def test_engine_core_on_another_machine_is_left_to_the_client(setup: Setup) -> None:
    from backend.vllm_outputs import socket_fault

    setup.core.resources.output_socket.bind("tcp://127.0.0.1:*")
    assert socket_fault(setup.core) == "the engine core need not be on this machine"


async def test_client_that_reads_already_is_left_alone(setup: Setup) -> None:
    from backend.vllm_outputs import socket_fault

    setup.core._ensure_output_queue_task()
    assert socket_fault(setup.core) == "the client reads already"


async def test_clients_that_look_at_each_batch_are_left_alone() -> None:
    from vllm.v1.engine.core_client import DPAsyncMPClient

    from backend.vllm_outputs import socket_fault

    core = DPAsyncMPClient.__new__(DPAsyncMPClient)
    assert socket_fault(core) == "the client is a DPAsyncMPClient"
    assert socket_fault(FakeCore()) == "the client is a FakeCore"
