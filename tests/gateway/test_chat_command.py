import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gateway.chat_command import ChatError, Conversation, deltas
from gateway.cli import main

DONE = "data: [DONE]\n\n"


def frame(text: str) -> str:
    return (
        f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]}, ensure_ascii=False)}\n\n"
    )


class FakeGateway(ThreadingHTTPServer):
    """Answers each chat with the next of `answers`: (status, body). `requests` are the bodies that came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["tiny"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeGateway
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._send(*self.server.answers.pop(0))

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    for name in ("HEADRACE_API_KEY", "HEADRACE_PORT", "HEADRACE_HOST", "HEADRACE_UDS"):
        monkeypatch.delenv(name, raising=False)
    with FakeGateway() as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def test_one_question_prints_the_answer_and_ends(
    server: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [(200, ": ping\n\n" + frame("Hel") + frame("lo\u2028世界") + DONE)]
    arguments = [
        "chat",
        "--url",
        server.url,
        "--api-key",
        "k",
        "--system",
        "Be brief.",
        "--max-tokens",
        "5",
        "Hi?",
    ]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "Hello\u2028世界\n"
    assert server.keys == ["Bearer k"]
    assert server.requests == [
        {
            "model": "tiny",
            "stream": True,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}],
            "max_tokens": 5,
        }
    ]


def test_a_conversation_grows_and_can_be_reset(
    server: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [(200, frame(text) + DONE) for text in ("one", "two", "three")]
    lines = "first\n\n second \n/reset\n/system Be kind.\nthird\n/nonsense\n/quit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", "--url", server.url, "--model", "m"]) == 0
    contents = [[message["content"] for message in body["messages"]] for body in server.requests]
    assert contents == [["first"], ["first", "one", "second"], ["Be kind.", "third"]]
    assert capsys.readouterr().out.startswith("one\ntwo\nthree\n/reset forgets")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((401, json.dumps({"error": {"message": "Wrong key."}})), "headrace: Wrong key. (401)"),
        ((502, "<html>"), "headrace: the gateway answered 502"),
        (
            (200, frame("par") + 'data: {"error": {"message": "The worker is lost."}}\n\n'),
            "The worker is lost.",
        ),
        ((200, frame("par")), "the connection ended in the middle of the answer"),
    ],
)
def test_errors_are_shown_and_exit_1(
    server: FakeGateway, capsys: pytest.CaptureFixture[str], answer: tuple[int, str], told: str
) -> None:
    server.answers = [answer]
    assert main(["chat", "--url", server.url, "Hi?"]) == 1
    assert told in capsys.readouterr().err


def test_a_gateway_that_is_not_there_or_has_no_model_is_told(
    server: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "Hi?"]) == 1
    assert "no connection to http://127.0.0.1:1: " in capsys.readouterr().err
    server.models = []
    assert main(["chat", "--url", server.url, "Hi?"]) == 1
    assert "no model yet" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://x", "http://", "unix:"])
def test_an_address_of_another_kind_exits_2(capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert main(["chat", "--url", address, "Hi?"]) == 2
    assert "is not an address" in capsys.readouterr().err


def test_the_address_comes_from_the_gateways_variables(
    server: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [(200, frame("ok") + DONE)]
    monkeypatch.setenv("HEADRACE_PORT", str(server.server_port))
    monkeypatch.setenv("HEADRACE_API_KEY", "first,second")
    assert main(["chat", "Hi?"]) == 0
    assert server.keys == ["Bearer first"]


def test_a_question_that_got_an_error_is_forgotten(server: FakeGateway) -> None:
    server.answers = [(503, "{}"), (200, frame("yes") + DONE)]
    conversation = Conversation(server.url)
    with pytest.raises(ChatError):
        list(conversation.ask("one"))
    assert list(conversation.ask("two")) == ["yes"]
    assert conversation.messages == [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "yes"},
    ]


def test_a_cancelled_answer_stays_as_far_as_it_was_shown(server: FakeGateway) -> None:
    server.answers = [(200, frame("one ") + frame("two ") + frame("three") + DONE)]
    conversation = Conversation(server.url)
    answer = conversation.ask("count")
    assert [next(answer), next(answer)] == ["one ", "two "]
    answer.close()  # what Ctrl-C does
    assert conversation.messages[-1] == {"role": "assistant", "content": "one two "}


def test_ctrl_c_cancels_the_answer_and_not_the_program(
    server: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [(200, frame("one ") + frame("two ") + DONE), (200, frame("again") + DONE)]
    pieces = iter([KeyboardInterrupt])

    def interrupted(reader: Any) -> Iterator[str]:
        for text in deltas(reader):
            yield text
            for interrupt in pieces:
                raise interrupt

    monkeypatch.setattr("gateway.chat_command.deltas", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n"))
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out == "one  [cancelled]\nagain\n"
    assert [m["content"] for m in server.requests[1]["messages"]] == ["first", "one ", "second"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_events_are_cut_at_line_ends_of_the_protocol_only(line_end: str) -> None:
    stream = (frame("a\u2028b\u2029c\x85d\x0be\x0cf") + DONE).replace("\n", line_end)
    assert list(deltas(io.BytesIO(stream.encode()))) == ["a\u2028b\u2029c\x85d\x0be\x0cf"]
