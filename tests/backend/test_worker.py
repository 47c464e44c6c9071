"""A worker process from start to exit code: signals, draining, the engine's death, its HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.worker import EXIT_ENGINE_DIED, EXIT_NOT_STARTED, EXIT_STOPPED
from tests.components import need

ROOT = Path(__file__).parents[2]
PROGRAM = textwrap.dedent(
    """
    import json, logging, sys
    from pathlib import Path
    from backend.scripted import Faults, ScriptedOptions
    from backend.worker import WorkerOptions, run_worker
    logging.basicConfig(level=logging.INFO)
    given = json.loads(sys.argv[1])
    scripted = given.pop("scripted", None)
    if scripted is not None:
        scripted["faults"] = Faults(**scripted.pop("faults", {}))
        scripted = ScriptedOptions(tokenizer=Path(scripted.pop("tokenizer")), **scripted)
    options = WorkerOptions(cache_dir=Path(given.pop("cache_dir")), scripted=scripted, **given)
    sys.exit(run_worker(options, lambda: print("on_ready", flush=True)))
    """
)


class Worker:
    """A worker process; `said` is what has been read of its output."""

    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""

    def ready(self) -> tuple[str, str]:
        """Wait for `on_ready`; the link's address and the HTTP port's URL out of the ready line."""
        assert self.process.stdout is not None
        while "on_ready\n" not in self.said:
            line = self.process.stdout.readline()
            assert line, self.said
            self.said += line
        found = re.search(r"ready: \S+ on (\S+); metrics on (\S+)", self.said)
        assert found is not None, self.said
        return found[1], found[2]

    def end(self, limit_s: float = 30) -> int:
        """The exit code."""
        self.said += self.process.communicate(timeout=limit_s)[0]
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def worker(tmp_path: Path, **options: Any) -> Iterator[Worker]:
    options = {"listen": "tcp://127.0.0.1:0", "cache_dir": str(tmp_path), **options}
    started = Worker(**options)
    try:
        yield started
    finally:
        started.kill()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def has_a_job(url: str) -> None:
    """Wait until the worker's own metrics show one."""
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(_shows_a_job, url):  # noqa: ASYNC110 - it asks another process
            await asyncio.sleep(0.01)


def _shows_a_job(url: str) -> bool:
    return "headrace_link_jobs 1.0\n" in get(f"{url}/metrics")[1]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with the smallest tokenizer that there is."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    words = {f"w{number}": number for number in range(50)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return str(folder)


async def run_one(address: str, max_tokens: int) -> tuple[int, str | None]:
    """One job over the link, by hand: how many tokens came, and how it ended."""
    from backend import link
    from backend.address import connect, parse_address
    from backend.framing import Framer

    done: asyncio.Future[tuple[int, str | None]] = asyncio.get_running_loop().create_future()

    class Gateway(asyncio.Protocol):
        def __init__(self) -> None:
            self.framer = Framer()
            self.num_tokens = 0

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            for frame in self.framer.feed(data):
                self.received(frame)

        def received(self, frame: Any) -> None:
            if isinstance(frame, link.Challenge):
                mac = link.proof(b"", frame.nonce, b"gateway")
                self.transport.write(link.encode(link.Hello(link.VERSION, mac, b"n" * 32, "test")))
            elif isinstance(frame, link.Welcome):
                sampling = {"max_tokens": max_tokens, "ignore_eos": True}
                self.transport.write(link.encode(link.Submit(0, 1, b"\1\0\0\0" * 4, sampling)))
            elif isinstance(frame, link.Step):
                for delta in frame.deltas:
                    self.num_tokens += len(delta.ids)
                    self.end(delta.finish)
            elif isinstance(frame, link.Error):
                self.end(frame.kind)

        def connection_lost(self, error: Exception | None) -> None:
            self.end("lost")

        def end(self, how: str | None) -> None:
            if how is not None and not done.done():
                done.set_result((self.num_tokens, how))

    transport, _ = await connect(Gateway, parse_address(address))
    try:
        return await asyncio.wait_for(done, 60)
    finally:
        transport.close()


def test_worker_serves_metrics_and_health_and_stops_on_sigterm(tmp_path: Path, tokenizer: str) -> None:
    with worker(tmp_path, scripted={"tokenizer": tokenizer}) as started:
        _, url = started.ready()
        assert get(f"{url}/health") == (200, '{"status":"ok"}')
        status, text = get(f"{url}/metrics")
        assert status == 200
        assert "headrace_link_ready 1.0\n" in text
        assert "headrace_link_jobs 0.0\n" in text
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == EXIT_STOPPED


def test_sigterm_during_a_fetch_ends_the_fetching_program(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        from backend import worker
        from backend.child import run_child
        log = Path(sys.argv[1])
        command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
        def told():
            if log.read_text():
                print("fetching", flush=True)
        worker.ensure_embedded_model = lambda *_: run_child(command, os.environ, log, 60, told)
        sys.exit(worker.run_worker(worker.WorkerOptions("tcp://127.0.0.1:0", Path("unused"))))
        """
    )
    log = tmp_path / "log"
    command = [sys.executable, "-c", program, str(log)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "fetching\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == EXIT_STOPPED
    assert not Path(f"/proc/{log.read_text().strip()}").exists()


async def test_running_jobs_finish_before_the_exit(tmp_path: Path, tokenizer: str) -> None:
    with worker(tmp_path, scripted={"tokenizer": tokenizer, "step_ms": 20}) as started:
        address, url = await asyncio.to_thread(started.ready)
        job = asyncio.create_task(run_one(address, max_tokens=40))
        await has_a_job(url)
        started.process.send_signal(signal.SIGTERM)
        assert await job == (40, "length")
        assert await asyncio.to_thread(started.end) == EXIT_STOPPED


@pytest.mark.parametrize("how", ["limit", "second signal"])
async def test_jobs_that_take_too_long_are_cut(tmp_path: Path, tokenizer: str, how: str) -> None:
    drain_s = 0.2 if how == "limit" else 3600.0
    scripted = {"tokenizer": tokenizer, "step_ms": 20}
    with worker(tmp_path, scripted=scripted, drain_s=drain_s) as started:
        address, url = await asyncio.to_thread(started.ready)
        job = asyncio.create_task(run_one(address, max_tokens=20_000))
        await has_a_job(url)
        started.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            await asyncio.sleep(0.2)
            started.process.send_signal(signal.SIGINT)
        _, end = await job
        assert end == "engine"
        assert await asyncio.to_thread(started.end) == EXIT_STOPPED


async def test_engine_that_dies_fails_its_jobs_and_the_exit_code_says_so(
    tmp_path: Path, tokenizer: str
) -> None:
    scripted = {"tokenizer": tokenizer, "step_ms": 5, "faults": {"die_after_tokens": 3}}
    with worker(tmp_path, scripted=scripted) as started:
        address, _ = await asyncio.to_thread(started.ready)
        _, end = await run_one(address, max_tokens=1000)
        assert end in ("engine", "lost")
        assert await asyncio.to_thread(started.end) != EXIT_STOPPED


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"listen": "tcp://0.0.0.0:0"}, "neither a shared secret nor TLS"),
        ({"listen": "nonsense"}, "nonsense"),
        ({"scripted": {"tokenizer": "/nonexistent"}}, "nonexistent"),
    ],
)
def test_bad_options_end_the_start_and_say_why(
    tmp_path: Path, tokenizer: str, options: dict[str, Any], said: str
) -> None:
    with worker(tmp_path, **{"scripted": {"tokenizer": tokenizer}, **options}) as started:
        assert started.end() == EXIT_NOT_STARTED
        assert said in started.said


def test_taken_http_port_ends_the_start(tmp_path: Path, tokenizer: str) -> None:
    with worker(tmp_path, scripted={"tokenizer": tokenizer}) as first:
        _, url = first.ready()
        port = int(url.rsplit(":", 1)[1])
        with worker(tmp_path, scripted={"tokenizer": tokenizer}, http_port=port) as second:
            assert second.end() == EXIT_NOT_STARTED
            assert "Address already in use" in second.said


@pytest.mark.engine
async def test_real_worker_with_a_killed_engine_core_fails_its_jobs_and_exits(
    tmp_path: Path, embedded_model: Path
) -> None:
    need("vllm")
    args = ["--max-num-seqs", "4"]
    options = {"model": str(embedded_model), "served_model_names": ["tiny"], "engine_args": args}
    with worker(tmp_path, max_model_len=4096, **options) as started:
        address, url = await asyncio.to_thread(started.ready)
        assert await run_one(address, max_tokens=3) == (3, "length")
        text = (await asyncio.to_thread(get, f"{url}/metrics"))[1]
        assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in text
        job = asyncio.create_task(run_one(address, max_tokens=4000))
        await has_a_job(url)
        core = _engine_core(started.process.pid)
        os.kill(core, signal.SIGKILL)
        _, end = await job
        assert end == "engine"
        assert await asyncio.to_thread(started.end) == EXIT_ENGINE_DIED


def _engine_core(pid: int) -> int:
    """The one child that is a Python process of vLLM: the other is the reaper's shell."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for file in children for child in file.read_text().split()]
    (core,) = [child for child in pids if b"VLLM" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return core
