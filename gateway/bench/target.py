"""The server under load: where it is, which paths it has, and what each request to it carries.

Not here: the exchange itself (`gateway/bench/client.py`).
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from backend.http_ports import HttpRequest, Origin
from gateway.bench.conversation import Message, as_text

CHAT: Final = "chat"
COMPLETIONS: Final = "completions"
PATHS: Final = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}

FORMS: Final = "http://HOST:PORT, https://HOST:PORT or unix:PATH"


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `url` is told to the user; `prefix` is what stands before `/v1` in its paths."""

    url: str
    origin: Origin
    prefix: str = ""
    endpoint: str = CHAT
    headers: Sequence[tuple[bytes, bytes]] = ()

    @property
    def path(self) -> str:
        return self.prefix + PATHS[self.endpoint]

    def get(self, path: str) -> HttpRequest:
        return HttpRequest("GET", self.prefix + path, (*self.headers, (b"accept", b"application/json")))

    def post(self, body: bytes) -> HttpRequest:
        content = ((b"content-type", b"application/json"), (b"accept", b"text/event-stream"))
        return HttpRequest("POST", self.path, (*self.headers, *content), body)


def parse_target(
    url: str, endpoint: str, headers: Sequence[tuple[bytes, bytes]] = (), is_insecure: bool = False
) -> Target:
    """The server at a base URL; a `/v1`, or the endpoint's own path, may stand at its end.

    Raises `ValueError` for an address of another kind.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its message tells the part, which may be a password
        raise _refused(url) from None
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return Target(url, Origin("localhost", 80, uds=parts.path), "", endpoint, headers)
    is_plain = url.isascii() and url.isprintable() and " " not in url
    has_more = parts.query or parts.fragment or parts.username is not None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not is_plain or has_more:
        raise _refused(url)
    tls = _tls(is_insecure) if parts.scheme == "https" else None
    origin = Origin(parts.hostname, port or (443 if tls else 80), tls)
    return Target(f"{parts.scheme}://{parts.netloc}", origin, _prefix(parts.path), endpoint, headers)


def _refused(url: str) -> ValueError:
    """The error for an address, told without what may be a password or a key."""
    shown = re.sub(r"^([a-z]+://)?.*@", r"\1...@", re.sub(r"[?#].*", "?...", url, flags=re.S), flags=re.S)
    hint = "; a key is given with --api-key" if shown != url else ""
    return ValueError(f"URL is {shown!r}; it must be {FORMS}{hint}")


def _prefix(path: str) -> str:
    path = path.rstrip("/")
    for end in (*PATHS.values(), "/v1"):
        if path.endswith(end):
            return path[: -len(end)]
    return path


def _tls(is_insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if is_insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@dataclass(frozen=True, slots=True)
class BodyMaker:
    """Makes the JSON of requests.

    `ignores_eos`: answers have exactly the wanted length. Only `ignore_eos` says so: vLLM, SGLang, llama.cpp
    and Headrace know it, and those that do not know it would not know `min_tokens` either.
    """

    model: str
    endpoint: str = CHAT
    ignores_eos: bool = True
    asks_timings: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, messages: Sequence[Message], output_tokens: int | None) -> bytes:
        """A request for a stream of at most `output_tokens`. `extra` goes over all other fields."""
        stream_options: dict[str, Any] = {"include_usage": True}
        if self.asks_timings:
            stream_options["include_timings"] = True
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": stream_options}
        if self.endpoint == CHAT:
            body["messages"] = messages
        else:
            body["prompt"] = as_text(messages)
        if output_tokens is not None:
            body["max_tokens"] = output_tokens
            if self.ignores_eos:
                body["ignore_eos"] = True
        return msgspec.json.encode({**body, **self.extra})
