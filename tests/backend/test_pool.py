"""The pool: states, reconnects, refusals, queue bounds, routing."""

from __future__ import annotations

import asyncio
import random
import shutil
import ssl
import subprocess
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.address import Address, parse_address
from backend.link_client import ClientLimits
from backend.pool import PoolSettings, RemoteWorker, WorkerPool, linked_pool
from backend.scripted import Faults
from pipeline.errors import EngineFault, NoWorker, QueueFull, UnknownModel, WorkerLost, WorkerStalled
from pipeline.values import ModelInfo
from tests.backend.linked import RecordingSink, make_call, make_tokenizer, scripted, until


@asynccontextmanager
async def pooled(
    folder: Path,
    *addresses: Address,
    on_model: Any = None,
    limits: ClientLimits | None = None,
    on_change: Any = lambda worker: None,
    **settings: Any,
) -> AsyncIterator[WorkerPool]:
    async def ignore(info: ModelInfo, files: Mapping[str, bytes]) -> None:
        pass

    chosen = PoolSettings(
        cache_dir=folder / "cache",
        limits=limits or ClientLimits(handshake_s=0.5),
        min_backoff_s=0.01,
        max_backoff_s=0.05,
        **settings,
    )
    pool = linked_pool(addresses, chosen, on_model or ignore, random.Random(1), on_change)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def states(pool: WorkerPool) -> list[str]:
    return [status.state for status in pool.statuses()]


async def all_ready(pool: WorkerPool) -> None:
    await until(lambda: set(states(pool)) == {"ready"})


async def ask(pool: WorkerPool, prompt: list[int], **options: Any) -> RecordingSink:
    sink = RecordingSink()
    pool.submit(make_call(prompt, **options), sink)
    await asyncio.wait_for(sink.ended, 20)
    return sink


# -- models ------------------------------------------------------------------------------------------------


async def test_model_is_told_with_its_files_before_it_is_ready(tmp_path: Path) -> None:
    told: list[tuple[str, set[str], list[str]]] = []

    async def on_model(info: ModelInfo, files: Mapping[str, bytes]) -> None:
        await asyncio.sleep(0.02)
        told.append((info.name, set(files), states(pool)))
        assert pool.models() == []

    async with scripted(tmp_path) as server, pooled(tmp_path, server.address, on_model=on_model) as pool:
        with pytest.raises(NoWorker, match="1 connecting"):
            pool.check_room("scripted")
        await all_ready(pool)
        assert told == [("scripted", {"tokenizer.json", "tokenizer_config.json"}, ["loading"])]
        (info,) = pool.models()
        assert (info.name, info.scripted, info.max_model_len) == ("scripted", True, 32768)
        with pytest.raises(UnknownModel, match="This server has: scripted"):
            pool.check_room("gpt-9")
        sink = await ask(pool, [1, 2, 3], max_tokens=5)
        assert (len(sink.ids), sink.ended.result()) == (5, "length")


async def test_model_that_cannot_be_used_keeps_its_worker_out_and_says_why(tmp_path: Path) -> None:
    num_calls = 0

    async def on_model(info: ModelInfo, files: Mapping[str, bytes]) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise ValueError("unknown tokenizer type")

    async with scripted(tmp_path) as server, pooled(tmp_path, server.address, on_model=on_model) as pool:
        await until(lambda: "unknown tokenizer type" in pool.statuses()[0].reason)
        await all_ready(pool)
        assert num_calls == 3


async def test_model_that_fails_to_load_after_its_link_has_ended_is_tried_again(tmp_path: Path) -> None:
    num_calls = 0

    async def on_model(info: ModelInfo, files: Mapping[str, bytes]) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            (worker,) = pool.replicas
            assert isinstance(worker, RemoteWorker)
            client = worker.client
            assert client is not None
            client.end(WorkerStalled("it has sent nothing"))
            assert states(pool) == ["stalled"]
            raise ValueError("unknown tokenizer type")

    async with scripted(tmp_path) as server, pooled(tmp_path, server.address, on_model=on_model) as pool:
        await all_ready(pool)
        assert num_calls == 2


async def test_unknown_name_is_not_called_unknown_while_a_worker_has_not_spoken(tmp_path: Path) -> None:
    nobody = Address(path=str(tmp_path / "nobody"))
    async with scripted(tmp_path) as server, pooled(tmp_path, server.address, nobody) as pool:
        await until(lambda: "ready" in states(pool))
        with pytest.raises(NoWorker, match="1 connecting"):
            pool.check_room("gpt-9")
        pool.check_room("scripted")


async def test_worker_with_another_tokenizer_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_tokenizer(tmp_path / "other", num_words=400)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(scripted(tmp_path, name="worker-a"))
        listen = f"unix://{tmp_path}/b.sock"
        second = await stack.enter_async_context(
            scripted(tmp_path, name="worker-b", tokenizer=other, listen=listen)
        )
        pool = await stack.enter_async_context(pooled(tmp_path, first.address))
        await all_ready(pool)
        late = await stack.enter_async_context(pooled(tmp_path, first.address, second.address))
        await until(lambda: sorted(states(late)) in (["ready", "refused"], ["connecting", "ready"]))
        await until(lambda: "refused" in states(late))
        assert len(late.models()) == 1
        assert "worker-b" in caplog.text
        assert "templates differ" in caplog.text
        refused = next(status for status in late.statuses() if status.state == "refused")
        assert "worker-a" in refused.reason


async def test_several_models_are_served_by_their_own_workers(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                scripted(tmp_path, model_names=(name,), listen=f"unix://{tmp_path}/{name}.sock", name=name)
            )
            for name in ("big", "small")
        ]
        pool = await stack.enter_async_context(pooled(tmp_path, *(server.address for server in servers)))
        await all_ready(pool)
        assert sorted(info.name for info in pool.models()) == ["big", "small"]
        for name in ("big", "small"):
            sink = RecordingSink()
            assert pool.submit(make_call([1], model=name), sink).worker == name
            await sink.ended


async def test_shortest_context_of_a_names_workers_is_the_models(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                scripted(tmp_path, max_model_len=length, listen=f"unix://{tmp_path}/{length}.sock")
            )
            for length in (2048, 1024)
        ]
        pool = await stack.enter_async_context(pooled(tmp_path, *(server.address for server in servers)))
        await all_ready(pool)
        assert [info.max_model_len for info in pool.models()] == [1024]


async def test_worker_with_another_reasoning_parser_is_refused_told_once_and_never_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        scripted(tmp_path / "a", reasoning_parser="qwen3", name="good") as good,
        scripted(tmp_path / "b", reasoning_parser="olmo3", name="bad") as bad,
        pooled(tmp_path, good.address, bad.address, reasoning_parser_of=lambda model: "qwen3") as pool,
    ):
        await until(pool.is_settled)
        (misfit,) = pool.misfits()
        assert "worker bad serves 'scripted'" in misfit
        await until(lambda: bad.num_connections == 0)
        for _ in range(3):  # it comes back, and is refused again
            await until(lambda: bad.num_connections == 1)
            await until(lambda: bad.num_connections == 0)
        assert pool.misfits() == [misfit]
        assert caplog.text.count(misfit) == 1
        (info,) = pool.models()
        assert info.reasoning_parser == "qwen3"
        for _ in range(4):
            await ask(pool, [1, 2])
        assert bad.num_running == 0
        assert pool.statuses()[1].models == ()


async def test_worker_that_comes_back_with_the_right_parser_is_no_misfit_any_more(tmp_path: Path) -> None:
    address = parse_address(f"unix://{tmp_path}/worker.sock")
    async with pooled(tmp_path, address, reasoning_parser_of=lambda model: "qwen3") as pool:
        await until(pool.is_settled)  # nobody is there
        assert pool.misfits() == []
        async with scripted(tmp_path):
            await until(pool.misfits)
        await until(lambda: not pool.misfits())
        async with scripted(tmp_path, reasoning_parser="qwen3"):
            await all_ready(pool)
            assert pool.misfits() == []


async def test_worker_listed_twice_is_refused(tmp_path: Path) -> None:
    async def ignore(info: ModelInfo, files: Mapping[str, bytes]) -> None:
        pass

    address = parse_address("tcp://127.0.0.1:7400")
    with pytest.raises(ValueError, match="listed twice"):
        linked_pool([address, address], PoolSettings(cache_dir=tmp_path), ignore)


# -- bounds and routing ------------------------------------------------------------------------------------


async def test_queue_bound_in_requests_counts_those_without_a_first_token(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, max_running=2) as server,
        pooled(tmp_path, server.address, max_waiting_requests=3) as pool,
    ):
        await all_ready(pool)
        sinks = [RecordingSink() for _ in range(3)]
        for number, sink in enumerate(sinks):
            pool.submit(make_call([number], max_tokens=2000), sink)
        with pytest.raises(QueueFull, match="1 ready"):
            pool.check_room("scripted")
        with pytest.raises(QueueFull):
            pool.submit(make_call([9]), RecordingSink())
        await until(lambda: sum(sink.first is not None for sink in sinks) == 2)
        pool.check_room("scripted")
        (status,) = pool.statuses()
        assert (status.waiting_requests, status.outstanding_requests) == (1, 3)


async def test_queue_bound_in_tokens_lets_a_single_long_prompt_in(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, step_ms=50.0) as server,
        pooled(tmp_path, server.address, max_waiting_tokens=100) as pool,
    ):
        await all_ready(pool)
        sink = RecordingSink()
        pool.submit(make_call([1] * 150), sink)
        with pytest.raises(QueueFull):
            pool.submit(make_call([2]), RecordingSink())
        await until(lambda: sink.first is not None)
        pool.submit(make_call([2]), RecordingSink())


async def test_call_in_the_background_goes_to_its_worker_and_refuses_nobody(tmp_path: Path) -> None:
    ready: list[RemoteWorker] = []
    async with (
        scripted(tmp_path, step_ms=50.0) as server,
        pooled(
            tmp_path,
            server.address,
            max_waiting_requests=1,
            max_waiting_tokens=100,
            on_change=ready.append,
        ) as pool,
    ):
        await all_ready(pool)
        (worker,) = ready
        background = RecordingSink()
        worker.submit_background(make_call([1] * 5000, max_tokens=1), background)
        pool.check_room("scripted")
        (status,) = pool.statuses()
        assert (status.outstanding_requests, status.waiting_requests) == (1, 0)
        assert (status.outstanding_tokens, status.waiting_tokens) == (0, 0)
        user = RecordingSink()
        pool.submit(make_call([2] * 50, max_tokens=1), user)
        with pytest.raises(QueueFull):
            pool.check_room("scripted")
        assert await asyncio.wait_for(background.ended, 20) == "length"
        assert await asyncio.wait_for(user.ended, 20) == "length"
        assert pool.statuses()[0].outstanding_requests == 0


async def test_change_is_told_when_a_worker_becomes_ready_or_is_no_longer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    told: list[tuple[str, str]] = []

    def note(worker: RemoteWorker) -> None:
        assert worker.welcome is not None
        told.append((worker.welcome.worker, worker.state))
        if worker.state == "ready":
            worker.submit_background(make_call([1]), RecordingSink())
        else:
            with pytest.raises(WorkerLost, match=worker.state):
                worker.submit_background(make_call([1]), RecordingSink())

    async with AsyncExitStack() as stack:
        async with scripted(tmp_path, tokenizer=tokenizer, name="first") as server:
            pool = await stack.enter_async_context(pooled(tmp_path, server.address, on_change=note))
            await all_ready(pool)
            for state in ("draining", "ready"):
                server._refusal = "for a while" if state == "draining" else None
                server._broadcast_stats()
                await until(lambda state=state: states(pool) == [state])
            for connection in list(server._connections):
                connection.abort()
        await until(lambda: states(pool) == ["connecting"])
        await stack.enter_async_context(scripted(tmp_path, tokenizer=tokenizer, name="second"))
        await all_ready(pool)
        assert told == [
            ("first", "ready"),
            ("first", "draining"),
            ("first", "ready"),
            ("first", "connecting"),
            ("second", "ready"),
        ]


async def test_prefix_stays_with_its_worker_until_that_has_too_much(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                scripted(tmp_path, name=name, listen=f"unix://{tmp_path}/{name}.sock", step_ms=20.0)
            )
            for name in ("a", "b", "c")
        ]
        pool = await stack.enter_async_context(pooled(tmp_path, *(server.address for server in servers)))
        await all_ready(pool)

        def submit() -> str:
            return pool.submit(make_call([1] * 100, max_tokens=2000, affinity=77), RecordingSink()).worker

        favourite = submit()
        assert submit() == favourite
        assert {submit() for _ in range(10)} - {favourite}
        assert sum(status.outstanding_requests for status in pool.statuses()) == 12
        assert sum(status.outstanding_tokens for status in pool.statuses()) >= 12 * 2000


# -- losses ------------------------------------------------------------------------------------------------


async def test_killed_worker_fails_its_streams_and_is_linked_again_when_it_is_back(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    async with AsyncExitStack() as stack:
        pool: WorkerPool
        async with scripted(tmp_path, tokenizer=tokenizer, step_ms=5.0, name="first") as server:
            pool = await stack.enter_async_context(pooled(tmp_path, server.address))
            await all_ready(pool)
            sink = RecordingSink()
            pool.submit(make_call([1], max_tokens=2000), sink)
            await until(lambda: len(sink.ids) > 3)
            for connection in list(server._connections):
                connection.abort()
        error = await sink.ended
        assert isinstance(error, WorkerLost)
        assert "first" in str(error)
        with pytest.raises(NoWorker, match="1 connecting"):
            pool.check_room("scripted")
        with pytest.raises(NoWorker):
            pool.submit(make_call([1]), RecordingSink())
        await stack.enter_async_context(scripted(tmp_path, tokenizer=tokenizer, name="second"))
        await all_ready(pool)
        assert (await ask(pool, [1])).ended.result() == "length"
        (status,) = pool.statuses()
        assert (status.name, status.num_connects) == ("second", 2)


async def test_ids_of_a_model_that_was_exchanged_go_to_no_worker_of_the_new_one(tmp_path: Path) -> None:
    fingerprints: list[str] = []

    async def note(info: ModelInfo, files: Mapping[str, bytes]) -> None:
        fingerprints.append(info.fingerprint)

    async with AsyncExitStack() as stack:
        async with scripted(tmp_path, tokenizer=make_tokenizer(tmp_path / "old")) as server:
            pool = await stack.enter_async_context(pooled(tmp_path, server.address, on_model=note))
            await all_ready(pool)
        await until(lambda: states(pool) == ["connecting"])
        other = make_tokenizer(tmp_path / "new", num_words=400)
        await stack.enter_async_context(scripted(tmp_path, tokenizer=other))
        await all_ready(pool)
        old, new = fingerprints
        with pytest.raises(NoWorker, match="another model has its name now"):
            pool.submit(replace(make_call([1]), fingerprint=old), RecordingSink())
        sink = RecordingSink()
        pool.submit(replace(make_call([1]), fingerprint=new), sink)
        assert await asyncio.wait_for(sink.ended, 20) == "length"


async def test_sink_that_submits_again_when_its_worker_is_lost_gets_another(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(
                scripted(tmp_path, name=name, listen=f"unix://{tmp_path}/{name}.sock", step_ms=5.0)
            )
            for name in ("a", "b")
        }
        pool = await stack.enter_async_context(
            pooled(tmp_path, *(server.address for server in servers.values()))
        )
        await all_ready(pool)
        again = RecordingSink()

        class Resubmitting(RecordingSink):
            def failed(self, error: Any) -> None:
                super().failed(error)
                workers.append(pool.submit(make_call([1], max_tokens=3), again).worker)

        sink = Resubmitting()
        workers = [pool.submit(make_call([1], max_tokens=2000), sink).worker]
        for connection in list(servers[workers[0]]._connections):
            connection.abort()
        assert await asyncio.wait_for(again.ended, 20) == "length"
        assert sorted(workers) == ["a", "b"]


async def test_dead_engine_fails_its_streams_by_name(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, faults=Faults(die_after_tokens=5), name="doomed") as server,
        pooled(tmp_path, server.address) as pool,
    ):
        await all_ready(pool)
        sink = await ask(pool, [1], max_tokens=100)
        error = sink.ended.result()
        assert isinstance(error, WorkerLost)
        assert "doomed" in str(error)
        assert "scripted to die after 5 tokens" in str(error)
        assert len(sink.ids) == 5
        assert server.died.done()


async def test_stalled_worker_fails_its_streams_and_is_tried_again(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, faults=Faults(stall_after_tokens=5), name="sleepy") as server,
        pooled(tmp_path, server.address, limits=ClientLimits(handshake_s=0.3, stall_s=0.1)) as pool,
    ):
        await all_ready(pool)
        sink = await ask(pool, [1], max_tokens=100)
        error = sink.ended.result()
        assert isinstance(error, WorkerStalled)
        assert "sleepy" in str(error)
        await until(lambda: states(pool) == ["stalled"])
        await until(lambda: states(pool) == ["connecting"])
        await until(lambda: server.num_running == 0 or server.num_connections > 0)
        assert pool.models() == []


async def test_garbage_from_a_worker_fails_its_streams(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, faults=Faults(garbage_after_tokens=5)) as server,
        pooled(tmp_path, server.address) as pool,
    ):
        await all_ready(pool)
        sink = await ask(pool, [1], max_tokens=100)
        assert isinstance(sink.ended.result(), WorkerLost)
        assert "broke the protocol" in str(sink.ended.result())
        await until(lambda: server.num_running == 0)


async def test_slow_writes_of_a_worker_lose_nothing(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, faults=Faults(slow_write_bytes_per_s=40_000)) as server,
        pooled(tmp_path, server.address) as pool,
    ):
        await all_ready(pool)
        sink = await ask(pool, [1, 2], max_tokens=300)
        engine: Any = server._engine
        walk = engine.tape.walk(array("i", [1, 2]).tobytes())
        assert sink.ids == [next(walk) for _ in range(300)]


async def test_draining_worker_gets_nothing_new_and_finishes_what_it_has(tmp_path: Path) -> None:
    async with scripted(tmp_path, step_ms=5.0) as server, pooled(tmp_path, server.address) as pool:
        await all_ready(pool)
        sink = RecordingSink()
        pool.submit(make_call([1], max_tokens=30), sink)
        await until(lambda: sink.first)
        draining = asyncio.create_task(server.drain(20))
        await until(lambda: states(pool) == ["draining"])
        with pytest.raises(NoWorker, match="1 draining"):
            pool.check_room("scripted")
        assert await draining == 0
        assert await asyncio.wait_for(sink.ended, 20) == "length"
        assert len(sink.ids) == 30


async def test_stopped_pool_fails_its_streams_and_its_workers_abort_them(tmp_path: Path) -> None:
    async with scripted(tmp_path, step_ms=5.0) as server:
        async with pooled(tmp_path, server.address) as pool:
            await all_ready(pool)
            sink = RecordingSink()
            handle = pool.submit(make_call([1], max_tokens=2000), sink)
        assert isinstance(sink.ended.result(), WorkerLost)
        assert states(pool) == ["closed"]
        handle.abort()
        await until(lambda: server.num_running == server.num_connections == 0)


async def test_wrong_secret_is_named_and_never_ready(tmp_path: Path) -> None:
    async with scripted(tmp_path, secret=b"right") as server:
        async with pooled(tmp_path, server.address, secret=b"wrong") as pool:
            await until(lambda: "secrets differ" in pool.statuses()[0].reason)
        async with pooled(tmp_path, server.address, secret=b"right") as pool:
            await all_ready(pool)


async def test_heartbeat_figures_reach_the_status(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, block_size=4, kv_tokens=1000) as server,
        pooled(tmp_path, server.address) as pool,
    ):
        await all_ready(pool)
        await ask(pool, [1] * 40)
        await ask(pool, [1] * 40)
        server._broadcast_stats()
        await until(lambda: pool.statuses()[0].prefix_queries == 80)
        (status,) = pool.statuses()
        assert status.prefix_hits == 36
        assert (status.engine_path, status.scripted, status.reason) == ("scripted", True, "")


# -- ways to connect ---------------------------------------------------------------------------------------


async def test_figures_of_a_lost_worker_are_zero(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with scripted(tmp_path, step_ms=20.0) as server:
            pool = await stack.enter_async_context(pooled(tmp_path, server.address))
            await all_ready(pool)
            pool.submit(make_call([1], max_tokens=10_000), RecordingSink())
            await until(lambda: pool.statuses()[0].running == 1)
        await until(lambda: states(pool) == ["connecting"])
        (status,) = pool.statuses()
        assert (status.running, status.kv_usage) == (0, 0.0)


async def test_tcp_works_like_a_unix_socket(tmp_path: Path) -> None:
    async with scripted(tmp_path, listen="tcp://127.0.0.1:0") as server:
        assert server.address.port > 0
        async with pooled(tmp_path, server.address) as pool:
            await all_ready(pool)
            assert (await ask(pool, [1])).ended.result() == "length"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make a certificate")
@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "unix://{}/tls.sock"])
async def test_tls_works_and_a_stranger_certificate_does_not(tmp_path: Path, listen: str) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    where = ["-addext", names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *where], check=True, capture_output=True)  # noqa: ASYNC221
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with scripted(tmp_path, listen=listen.format(tmp_path), tls=serving) as server:
        async with pooled(tmp_path, server.address, tls=trusting) as pool:
            await all_ready(pool)
            sink = await ask(pool, list(range(400)) * 60, max_tokens=20)
            assert sink.ended.result() == "length"
        async with pooled(tmp_path, server.address, tls=ssl.create_default_context()) as pool:
            await until(lambda: "CERTIFICATE_VERIFY_FAILED" in pool.statuses()[0].reason)


async def test_backoff_grows_is_jittered_and_bounded(tmp_path: Path) -> None:
    async with pooled(tmp_path, Address(path=str(tmp_path / "nobody"))) as pool:
        (worker,) = pool.replicas
        assert isinstance(worker, RemoteWorker)
        waits = [worker._backoff_s(failures) for failures in (0, 1, 2, 50)]
        assert 0.005 <= waits[0] <= 0.01
        assert 0.01 <= waits[1] <= 0.02
        assert 0.02 <= waits[2] <= 0.04
        assert 0.025 <= waits[3] <= 0.05
        assert worker._backoff_s(1) != worker._backoff_s(1)
        assert issubclass(WorkerLost, EngineFault)
