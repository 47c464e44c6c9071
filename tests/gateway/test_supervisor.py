import asyncio
import http.client
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway import supervisor
from gateway.http_client import open_connection
from gateway.supervisor import Child, ChildError, Supervisor
from gateway.supervisor import Program as ChildProgram
from tests.gateway.programs import Program, is_alive, running, wait_until

TINY = ("-m", "tests.gateway.tiny_supervisor")


def ask(url: str, path: str = "/pid") -> str:
    connection = open_connection(url, 10.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def pids(program: Program, role: str, count: int) -> list[int]:
    return [int(pid) for pid in program.wait_for(f"child {role}", count)]


@pytest.fixture
def two() -> Iterator[Program]:
    """Two gateway processes and a worker, ready."""
    with running(*TINY, HEADRACE_PORT="0", HEADRACE_PROCESSES="2") as program:
        program.wait_for("listening")
        yield program


def test_connections_spread_over_the_processes(two: Program) -> None:
    url = two.wait_for("listening")[0]
    gateways = {str(pid) for pid in pids(two, "gateway", 2)}
    answered: set[str] = set()
    wait_until(lambda: answered.add(ask(url)) or answered == gateways)


def test_a_killed_process_is_started_again_and_the_other_one_serves_on(two: Program) -> None:
    url = two.wait_for("listening")[0]
    first, second = pids(two, "gateway", 2)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_alive(first))
    assert ask(url) == str(second)
    third = pids(two, "gateway", 3)[2]
    wait_until(lambda: ask(url) == str(third))
    assert "gateway process" in two.output
    assert "died (signal SIGKILL)" in two.output


def test_sigterm_ends_the_children_and_exits_0(two: Program) -> None:
    children = [*pids(two, "gateway", 2), *pids(two, "worker", 1)]
    folder = Path(two.wait_for("folder")[0])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    two.signal(signal.SIGTERM)
    assert two.exit_code() == 0, two.output
    assert not any(is_alive(pid) for pid in children)
    assert not folder.exists()


def test_sigterm_lets_open_streams_end_and_answers_503_meanwhile() -> None:
    with running(*TINY, HEADRACE_PORT="0", HEADRACE_PROCESSES="2", HEADRACE_DRAIN_LIMIT_S="1.5") as program:
        url = program.wait_for("listening")[0]
        connections = [open_connection(url, 10.0) for _ in range(4)]
        streams = [stream_of(connection) for connection in connections]
        worker = pids(program, "worker", 1)[0]
        program.signal(signal.SIGINT)
        wait_until(lambda: ask(url, "/") == "draining")
        assert is_alive(worker)  # the gateways still need it
        assert [stream.read().splitlines()[-1] for stream in streams] == [b"cut"] * 4
        assert program.exit_code() == 0, program.output
        for connection in connections:
            connection.close()


def stream_of(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """A stream that has begun."""
    connection.request("GET", "/stream")
    response = connection.getresponse()
    assert response.readline() == b"tick\n"
    return response


def test_a_second_signal_kills_the_children_at_once() -> None:
    with running(*TINY, HEADRACE_PORT="0", HEADRACE_DRAIN_LIMIT_S="600") as program:
        connection = open_connection(program.wait_for("listening")[0], 10.0)
        stream_of(connection)
        children = [*pids(program, "gateway", 1), *pids(program, "worker", 1)]
        program.signal(signal.SIGTERM)
        wait_until(lambda: ask(program.wait_for("listening")[0], "/") == "draining")
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 128 + signal.SIGTERM
        assert not any(is_alive(pid) for pid in children)
        connection.close()


def test_sighup_reaches_the_gateways_and_nothing_else(two: Program) -> None:
    gateways, worker = pids(two, "gateway", 2), pids(two, "worker", 1)[0]
    two.signal(signal.SIGHUP)
    assert sorted(pids(two, "reload", 2)) == sorted(gateways)
    assert all(map(is_alive, [*gateways, worker]))
    two.signal(signal.SIGTERM)
    assert two.exit_code() == 0, two.output


def test_a_killed_parent_leaves_no_orphans(two: Program) -> None:
    children = [*pids(two, "gateway", 2), *pids(two, "worker", 1)]
    two.signal(signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in children))


def child(body: str, **options: Any) -> Child:
    """A small child. `fd` is where it reports that it is ready."""
    code = f"import os, signal, sys, time; fd = int(sys.stdin.readline()); {body}"
    options = {"orders": lambda fd, _: b"%d\n" % fd, "stop_limit_s": 20.0, **options}
    return Child(ChildProgram(name="tiny", command=(sys.executable, "-ISc", code), **options))


async def test_a_child_that_dies_before_it_was_ready_is_a_failure_with_its_code() -> None:
    with pytest.raises(ChildError, match=r"tiny could not start \(exit code 7\)") as caught:
        await child("sys.exit(7)").keep()
    assert caught.value.code == 7
    with pytest.raises(ChildError, match=r"tiny could not start \(signal SIGKILL\)") as caught:
        await child("os.kill(os.getpid(), signal.SIGKILL)").keep()
    assert caught.value.code == 1


async def test_a_child_is_told_that_it_was_ready_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    told: list[bool] = []
    orders = lambda fd, is_restart: told.append(is_restart) or b"%d\n" % fd  # noqa: E731
    with pytest.raises(ChildError):
        await child("os.write(fd, b'1')", orders=orders).keep()
    assert told == [False, True, True, True, True]


async def test_a_child_that_keeps_dying_is_a_failure_after_five_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    dead: list[int] = []
    with pytest.raises(ChildError, match="tiny died 5 times in a row, the last time: exit code 9") as caught:
        await child("os.write(fd, b'1'); sys.exit(9)", died=dead.append).keep()
    assert caught.value.code == 1
    assert len(set(dead)) == 5


async def test_a_child_that_lives_long_between_its_deaths_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(supervisor, "QUICK_S", 0.0)
    dead: list[int] = []
    kept = child("os.write(fd, b'1')", died=lambda pid: (dead.append(pid), len(dead) == 8 and kept.stop()))
    assert await kept.keep() == 0
    assert len(dead) == 8


async def test_a_stop_interrupts_the_pause_before_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 600.0)
    died = asyncio.Event()
    kept = child("os.write(fd, b'1')", died=lambda pid: died.set())
    keeping = asyncio.create_task(kept.keep())
    await died.wait()
    kept.stop()
    assert await keeping == 0


async def test_a_stop_before_the_child_exists_ends_it_all_the_same() -> None:
    kept = child("os.write(fd, b'1'); time.sleep(60)")
    keeping = asyncio.create_task(kept.keep())
    await asyncio.sleep(0)
    kept.stop()
    assert await keeping == -signal.SIGTERM


@pytest.mark.parametrize(("body", "code"), [("sys.exit(7)", 7), ("os.write(fd, b'1'); sys.exit(0)", 1)])
async def test_a_failed_child_ends_the_others_and_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], body: str, code: int
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    other = child("os.write(fd, b'1'); time.sleep(60)")
    both = Supervisor([child(body).program, other.program])
    assert await both.run() == code
    assert both.children[1].pid is None
    assert "headrace: tiny " in capfd.readouterr().err


async def test_a_failure_from_outside_ends_the_children_and_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ready = child("os.write(fd, b'1'); time.sleep(60)")
    supervised = Supervisor([ready.program])
    running = asyncio.create_task(supervised.run())
    await supervised.children[0].ready.wait()
    supervised.fail("a worker does not fit")
    assert await running == 1
    assert supervised.children[0].pid is None
    assert "headrace: a worker does not fit\n" in capfd.readouterr().err


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    with running(*TINY, HEADRACE_PORT="0", TINY_CHILD_FAULT="deaf") as program:
        program.wait_for("listening")
        worker = pids(program, "worker", 1)[0]
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 0
        assert not is_alive(worker)


def test_processes_share_a_unix_socket_which_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with running(*TINY, HEADRACE_UDS=str(path), HEADRACE_PROCESSES="2") as program:
        url = program.wait_for("listening")[0]
        gateways = {str(pid) for pid in pids(program, "gateway", 2)}
        assert url == f"unix:{path}"
        assert ask(url) in gateways
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 0, program.output
        assert not path.exists()


def test_a_port_that_another_gateway_shares_is_refused(two: Program) -> None:
    port = two.wait_for("listening")[0].rpartition(":")[2]
    with running(*TINY, HEADRACE_PORT=port, HEADRACE_PROCESSES="2") as second:
        assert second.exit_code() == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in second.output


def test_metrics_of_a_dead_process_are_forgotten(two: Program) -> None:
    folder = Path(two.wait_for("folder")[0])
    first = pids(two, "gateway", 2)[0]
    gauge = folder / f"gauge_livesum_{first}.db"
    gauge.touch()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not gauge.exists())


def test_a_reserved_port_takes_no_connections(two: Program) -> None:
    """The parent holds the port without listening, or it would swallow every third connection."""
    host, port = two.wait_for("listening")[0].removeprefix("http://").split(":")
    for _ in range(30):
        with socket.create_connection((host, int(port)), 5.0) as connected:
            connected.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connected.recv(12) == b"HTTP/1.1 200"
