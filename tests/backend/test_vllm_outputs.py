"""Batches off a real ZeroMQ socket, sent as the engine core sends them, into vLLM's own client."""

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

        self.context = zmq.Context()
        self.sender = self.context.socket(zmq.PUSH)
        self.sender.bind(address)
        core: Any = AsyncMPClient.__new__(AsyncMPClient)
        core.resources = BackgroundResources(ctx=self.context)
        core.resources.output_socket = zmq.asyncio.Context(self.context).socket(zmq.PULL)
        core.resources.output_socket.connect(address)
        core.decoder = MsgpackDecoder(EngineCoreOutputs)
        core.utility_results = {}
        core.outputs_queue = asyncio.Queue()
        core.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace())
        self.core = core
        self.encoder = MsgpackEncoder()
        self.taken: list[Any] = []
        self.failed: list[Exception] = []

    def outputs(self, take: Any = None) -> Any:
        from backend.vllm_outputs import outputs_of

        return outputs_of(self.core, take or self.taken.append, self.failed.append)

    def send(self, *request_ids: str, **fields: Any) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        outputs = [EngineCoreOutput(request_id=each, new_token_ids=[7]) for each in request_ids]
        self.sender.send_multipart(self.encoder.encode(EngineCoreOutputs(outputs=outputs, **fields)))

    @property
    def ids(self) -> list[str]:
        return [item.request_id for batch in self.taken for item in batch.outputs]

    def close(self) -> None:
        self.core.resources.output_socket.close(linger=0)
        self.sender.close(linger=0)
        self.context.term()


@pytest.fixture
async def setup(tmp_path: Any) -> AsyncIterator[Setup]:
    made = Setup(f"ipc://{tmp_path}/outputs")
    yield made
    task = made.core.resources.output_queue_task
    if task is not None:
        task.cancel()
        await asyncio.sleep(0)
    made.close()


async def test_batches_come_in_order_however_many_wait(setup: Setup) -> None:
    from backend.vllm_outputs import MAX_BATCHES, SocketOutputs

    sent = [str(number) for number in range(5 * MAX_BATCHES + 3)]
    for request_id in sent[:MAX_BATCHES]:  # these before anybody reads
        setup.send(request_id)
    outputs = setup.outputs()
    assert type(outputs) is SocketOutputs
    outputs.start()
    await until(lambda: len(setup.taken) == MAX_BATCHES)
    for request_id in sent[MAX_BATCHES:-1]:
        setup.send(request_id)
    await until(lambda: len(setup.taken) == len(sent) - 1)
    setup.send(sent[-1])  # one that finds the reader asleep
    await until(lambda: len(setup.taken) == len(sent))
    assert setup.ids == sent
    await outputs.close()


async def test_others_have_their_turn_while_many_batches_wait(setup: Setup) -> None:
    from backend.vllm_outputs import MAX_BATCHES

    seen: list[int] = []
    outputs = setup.outputs()
    for number in range(3 * MAX_BATCHES):
        setup.send(str(number))
    await asyncio.sleep(0.05)  # they are in the socket by now, or the count below is only smaller
    outputs.start()
    asyncio.get_running_loop().call_soon(lambda: seen.append(len(setup.taken)))
    await until(lambda: len(setup.taken) == 3 * MAX_BATCHES)
    assert seen[0] <= MAX_BATCHES
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
    outputs = setup.outputs()
    outputs.start()
    setup.sender.send_multipart(frames)
    setup.send("b")
    await until(lambda: len(setup.taken) == 2)
    assert (setup.taken[0].outputs[0].new_logprobs.logprob_token_ids == ids).all()
    assert setup.ids == ["a", "b"]
    await outputs.close()


async def test_batch_with_nothing_in_it_is_nobodys(setup: Setup) -> None:
    outputs = setup.outputs()
    outputs.start()
    setup.send()
    setup.send("a")
    await until(lambda: setup.taken)
    assert setup.ids == ["a"]
    await outputs.close()


async def test_results_of_utility_calls_reach_their_futures(setup: Setup) -> None:
    from vllm.v1.engine import UtilityOutput

    outputs = setup.outputs()
    outputs.start()
    result = setup.core.utility_results[5] = asyncio.get_running_loop().create_future()
    setup.send(utility_output=UtilityOutput(call_id=5, failure_message="no such method"))
    with pytest.raises(Exception, match="no such method"):
        await asyncio.wait_for(result, 10)
    assert (setup.taken, setup.failed) == ([], [])
    await outputs.close()


async def test_message_of_a_dead_engine_ends_it_once(setup: Setup) -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.exceptions import EngineDeadError

    outputs = setup.outputs()
    outputs.start()
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

    outputs = setup.outputs()
    outputs.start()
    await asyncio.to_thread(setup.core.resources)  # as vLLM's monitor does, from a thread of its own
    await until(lambda: setup.failed)
    assert [type(error) for error in setup.failed] == [EngineDeadError]
    await outputs.close()


async def test_bytes_that_are_no_batch_end_it(setup: Setup) -> None:
    outputs = setup.outputs()
    outputs.start()
    setup.sender.send(b"\xc1")
    await until(lambda: setup.failed)
    assert len(setup.failed) == 1
    await outputs.close()


async def test_error_of_the_taker_ends_it(setup: Setup) -> None:
    def take(batch: Any) -> None:
        raise ValueError("cannot")

    outputs = setup.outputs(take)
    outputs.start()
    setup.send("a")
    setup.send("b")
    await until(lambda: setup.failed)
    await asyncio.sleep(0.02)
    assert [str(error) for error in setup.failed] == ["cannot"]
    await outputs.close()


async def test_after_close_the_client_reads_by_itself(setup: Setup) -> None:
    outputs = setup.outputs()
    outputs.start()
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
    outputs = setup.outputs()
    assert type(outputs) is QueuedOutputs
    outputs.start()
    setup.send("a")
    await until(lambda: setup.taken)
    await outputs.close()


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
