import json
import os
import signal
import stat
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gateway.http_client import open_connection
from gateway.run_serve import welcome
from gateway.settings import Access, Http, Settings
from tests.backend.linked import make_tokenizer
from tests.components import need
from tests.gateway.programs import Program, is_alive, running, wait_until
from tests.pipeline.small_tokenizers import byte_level


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for the scripted worker, as small as a gateway takes one."""
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def serve(tokenizer: Path, *flags: str, **environ: str) -> AbstractContextManager[Program]:
    return running(
        "-m",
        "gateway",
        "serve",
        "--scripted",
        "--tokenizer",
        str(tokenizer),
        "--port",
        "0",
        *flags,
        **environ,
    )


def address(program: Program) -> str:
    """Where it answers, once it does."""
    return program.wait_for("headrace: ready; ")[0].split()[-1]


def children(program: Program) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()]


def worker_of(program: Program) -> int:
    """The last child that was started: the worker comes after the gateways."""
    return max(children(program))


def complete(url: str, max_tokens: int = 4) -> dict[str, object]:
    connection = open_connection(url, 20.0)
    body = {"model": "scripted", "prompt": "hello", "max_tokens": max_tokens}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return {"status": response.status, **answer}


def test_it_tells_when_it_is_ready_answers_and_drains(tokenizer: Path) -> None:
    with serve(tokenizer) as program:
        url = address(program)
        assert f"curl -N {url}/v1/chat/completions" in program.output
        answer = complete(url)
        assert answer["status"] == 200, answer
        pids = children(program)
        assert len(pids) == 2
        program.signal(signal.SIGINT)
        assert program.exit_code() == 0, program.output
        assert not any(is_alive(pid) for pid in pids)


def test_several_processes_serve_behind_one_address(tokenizer: Path) -> None:
    with serve(tokenizer, "--processes", "2") as program:
        assert complete(address(program))["status"] == 200
        assert len(children(program)) == 3
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 0, program.output


def test_a_killed_worker_is_started_again_and_the_gateway_reconnects(tokenizer: Path) -> None:
    with serve(tokenizer) as program:
        url = address(program)
        before = worker_of(program)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not is_alive(before))
        wait_until(lambda: complete(url)["status"] == 200, lambda: program.output)
        assert worker_of(program) != before
        assert "worker died (signal SIGKILL); starting it again" in program.output


def test_a_worker_that_cannot_start_ends_it_with_its_error_and_code(tmp_path: Path) -> None:
    with serve(tmp_path / "no such folder") as program:
        assert program.exit_code() == 1
        assert "no such folder" in program.output
        assert "headrace: worker could not start (exit code 1)" in program.output


def test_a_worker_that_does_not_fit_ends_it_with_what_to_set(tokenizer: Path) -> None:
    """One engine has one parser: it cannot be a parser of one of the model's names only."""
    names = ("--served-model-name", "a", "--served-model-name", "b")
    with serve(tokenizer, *names, "--reasoning-parser", "a=olmo3") as program:
        assert program.exit_code() == 1, program.output
        (told,) = [line for line in program.starting("headrace: worker ") if "serves 'b'" in line]
        assert "--reasoning-parser olmo3" in told


def test_a_killed_parent_leaves_no_orphans(tokenizer: Path) -> None:
    need("valkey")
    with serve(tokenizer, "--redis", "embedded") as program:
        address(program)
        pids = children(program)
        assert len(pids) == 3
        program.signal(signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_the_link_is_private(tokenizer: Path) -> None:
    """Everyone can read the arguments of processes: no secret is there. The socket's folder is ours alone."""
    with serve(tokenizer, HEADRACE_API_KEY="s3cret-key") as program:
        address(program)
        for pid in children(program):
            assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        socket = Path(program.output.split("unix://")[1].split()[0].rstrip(";:"))
        assert socket.is_socket()
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700


def test_the_welcome_fits_the_settings() -> None:
    assert "'authorization: Bearer KEY'" in welcome(
        Settings(access=Access(api_key=("k",))), "http://a:1", "m"
    )
    unix = welcome(Settings(http=Http(uds=Path("/run/x.sock"))), "unix:/run/x.sock", "m")
    assert "curl -N --unix-socket /run/x.sock http://localhost/v1/chat/completions" in unix
    assert "chat page" not in unix
    assert "headrace chat --url unix:/run/x.sock" in unix
