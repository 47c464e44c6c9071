"""`headrace serve` as a newcomer meets it: one command, a real model, the printed lines, and a clean end.

One start, for the engine takes its time: what one user does, in its order. Faults of the children are tested
with scripted workers in `tests/gateway/test_run_serve.py`.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from backend.embedded import MODEL_NAME
from tests.components import need
from tests.e2e.resting import children
from tests.gateway.programs import is_alive, wait_until
from tests.processes import Process, answers, headrace
from tests.stack import ENGINE_START_S, running

pytestmark = pytest.mark.engine

READY = re.compile(r"^headrace: ready; (\S+) answers at (http://127\.0\.0\.1:(\d+))$", re.MULTILINE)
ANSWER_LIMIT_S = 60


@pytest.fixture
def serve(embedded_model: Path, tmp_path: Path) -> Iterator[Process]:
    """The command without any option but a free port, and a bound on answers that nobody bounds."""
    command = headrace("serve", "--port", "0", "--default-max-tokens", "24")
    with running(Process("serve", command, tmp_path / "serve.log")) as process:
        yield process


def shell(command: str) -> str:
    """What a command prints when it is pasted into a shell."""
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=ANSWER_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def begin_stream(port: int) -> Iterator[http.client.HTTPResponse]:
    """An answer of exactly 30 tokens."""
    fields = {"model": MODEL_NAME, "stream": True, "max_tokens": 30, "ignore_eos": True}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)) as connection:
        body = json.dumps({**fields, "prompt": "Once upon a time"})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        yield response


def family(pid: int) -> list[int]:
    """A process's descendants."""
    return [each for child in children(pid) for each in (child, *family(child))]


def test_a_newcomer_starts_it_asks_chats_and_ends_it(serve: Process) -> None:
    need("curl")
    serve.wait_until(lambda: READY.search(serve.log_text()) is not None, ENGINE_START_S, "ready")
    log = serve.log_text()
    ready = READY.search(log)
    assert ready
    model, url, port = ready.groups()
    assert model == MODEL_NAME
    assert log.index("importing vLLM") < log.index("loading weights") < ready.start(), "progress is shown"
    assert answers(int(port), "/ready") == 200
    assert answers(int(port), "/") == 200, "the chat page"
    assert f"chat page:     {url}/" in log
    assert f"in this shell: headrace chat --url {url}" in log

    curl = re.search(r"^ +(curl -N .*\\\n.*)$", log, re.MULTILINE)
    assert curl
    *chunks, done, rest = shell(curl[1]).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks if chunk[0] != ":"]
    assert len("".join(choice["delta"].get("content", "") for choice in choices)) > 1
    assert choices[-1]["finish_reason"] in ("stop", "length")

    chat = [*headrace("chat", "--url", url, "--max-tokens", "12"), "What is the capital of France?"]
    answer = subprocess.run(chat, capture_output=True, text=True, timeout=ANSWER_LIMIT_S, check=True)
    assert len(answer.stdout.strip()) > 1
    assert answer.stderr == ""

    pids = family(serve.pid)
    assert len(pids) >= 3, "gateway, worker, and the engine's own process"
    with begin_stream(int(port)) as stream:
        assert stream.readline().startswith(b"data: "), "it has begun"
        serve.signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n"), "what runs is finished"
    wait_until(lambda: serve.returncode is not None, serve.log_text)
    assert serve.returncode == 0, serve.log_text()
    assert not [pid for pid in pids if is_alive(pid)]
    assert answers(int(port), "/health") == 0
    assert "Traceback" not in serve.log_text()
