"""`headrace chat`: a conversation with a running gateway, in a shell.

/reset forgets the conversation, /system TEXT sets the system prompt (and forgets), /quit or Ctrl-D ends.
Ctrl-C cancels the answer, which stays in the conversation as far as it was shown, not the program.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from gateway.cli import BAD_USAGE, FAILED, INTERRUPTED, OK
from gateway.http_client import open_connection
from gateway.settings import Settings

# Heartbeats come every few seconds, so a longer silence is a fault.
_SILENCE_LIMIT_S: Final = 60.0
_HELP: Final = (
    "/reset forgets the conversation, /system TEXT sets the system prompt, /quit ends, "
    "Ctrl-C cancels an answer"
)


class ChatError(Exception):
    """What the gateway answered instead of a message, or why it could not be reached."""


class Reader(Protocol):
    def readline(self) -> bytes: ...


@dataclass(slots=True)
class Conversation:
    """The messages so far, and how to send them. Mutable: it grows with each turn."""

    url: str
    api_key: str | None = None
    model: str | None = None
    max_tokens: int | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.messages.clear()

    def ask(self, question: str) -> Generator[str, None, None]:
        """Pieces of the answer. The turn is kept as far as it was shown, also when it is cut short; a
        question that got an error is not.
        """
        self.messages.append({"role": "user", "content": question})
        shown: list[str] = []
        try:
            for piece in self._answer():
                shown.append(piece)
                yield piece
        finally:
            if shown:
                self.messages.append({"role": "assistant", "content": "".join(shown)})
            else:
                self.messages.pop()

    def _answer(self) -> Iterator[str]:
        connection = open_connection(self.url, _SILENCE_LIMIT_S)
        try:
            self.model = self.model or self._first_model(connection)
            response = self._send(connection, "POST", "/v1/chat/completions", self._body())
            yield from deltas(response)
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"no connection to {self.url}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()  # in the middle of an answer this cancels it

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": self.model, "stream": True, "messages": [*system, *self.messages]}
        return body if self.max_tokens is None else {**body, "max_tokens": self.max_tokens}

    def _first_model(self, connection: http.client.HTTPConnection) -> str:
        models = json.loads(self._send(connection, "GET", "/v1/models").read())["data"]
        if not models:
            raise ChatError("the gateway has no model yet; its worker may still be loading")
        return str(models[0]["id"])

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object = None
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ChatError(_error_text(response.status, response.read()))
        return response


def deltas(reader: Reader) -> Iterator[str]:
    """The text of a stream's events. Raises `ChatError` for an error event, or an end without `[DONE]`.

    Lines end at LF alone (a CR before it is dropped): U+2028 and its like are text.
    """
    while line := reader.readline():
        data = line.rstrip(b"\r\n")
        if data == b"data: [DONE]":
            return
        if data.startswith(b"data: "):
            event = json.loads(data[6:])
            if "error" in event:
                raise ChatError(str(event["error"]["message"]))
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
    raise ChatError("the connection ended in the middle of the answer")


def _error_text(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} ({status})"
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {status}"


def main_chat(given: Mapping[str, Any]) -> int:
    """One question, or a conversation where standard input is asked for each."""
    conversation = Conversation(
        url=given.get("url") or _default_url(os.environ),
        api_key=given.get("api_key") or os.environ.get("HEADRACE_API_KEY", "").split(",")[0] or None,
        model=given.get("model"),
        max_tokens=given.get("max_tokens"),
        system=given.get("system"),
    )
    try:
        if given.get("question"):
            return _show(conversation, given["question"])
        return _converse(conversation)
    except ValueError as error:  # of the address
        print(f"headrace: {error}", file=sys.stderr)
        return BAD_USAGE


def _default_url(environ: Mapping[str, str]) -> str:
    """Where a gateway with the same variables listens."""
    http = Settings().http
    if uds := environ.get("HEADRACE_UDS"):
        return f"unix:{uds}"
    return f"http://{environ.get('HEADRACE_HOST') or http.host}:{environ.get('HEADRACE_PORT') or http.port}"


def _converse(conversation: Conversation) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() a line editor

        print(_HELP)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return OK
        except KeyboardInterrupt:
            print()
            continue
        if line == "/quit":
            return OK
        if line.startswith("/"):
            _obey(conversation, line)
        elif line:
            _show(conversation, line)


def _obey(conversation: Conversation, line: str) -> None:
    command, _, rest = line.partition(" ")
    if command == "/system":
        conversation.system = rest.strip() or None
    elif command != "/reset":
        print(_HELP)
        return
    conversation.reset()


def _show(conversation: Conversation, question: str) -> int:
    """Print the answer as it comes; the exit code that it would be worth."""
    answer = conversation.ask(question)
    try:
        for piece in answer:
            print(piece, end="", flush=True)
        print()
    except ChatError as error:
        print(f"\nheadrace: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        answer.close()
        print(" [cancelled]")
        return INTERRUPTED
    return OK
