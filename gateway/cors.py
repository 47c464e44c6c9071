"""CORS (the Fetch standard): which pages of other sites may call the gateway, and what their scripts may
read of its answers.

The headers of each origin are made once, at the start. A request costs one look for its `Origin`, and a token
nothing: what sends a response's head adds them there. On the generation routes that is `gateway/outlet.py`;
Starlette's `send` is wrapped (`with_headers`).

Not here: who may ask at all (`gateway/keys.py`). CORS binds browsers only.
"""

from __future__ import annotations

import re
from collections.abc import Coroutine, MutableMapping, Sequence
from typing import Any, Final

from gateway.outlet import Message, Send
from gateway.settings_access import ANY, Access, split_entries

Header = tuple[bytes, bytes]
Scope = MutableMapping[str, Any]

RESPONSE_HEADERS: Final = "headrace.response_headers"  # in the ASGI scope: what a response's head must have

# Whatever a script may want of ours, beyond the seven headers that it may always read. No `*`: that does not
# count for requests with credentials.
EXPOSED: Final = (
    "allow",
    "etag",
    "location",
    "retry-after",
    "retry-after-ms",
    "server-timing",
    "www-authenticate",
    "x-headrace-context",
    "x-request-id",
)
METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")  # what `*` is; a preflight knows no 405
# A body of JSON needs it: only forms and plain text go without asking.
ALWAYS_ALLOWED_HEADER: Final = "content-type"

_ORIGIN: Final = b"origin"
_REQUEST_METHOD: Final = b"access-control-request-method"
_REQUEST_HEADERS: Final = b"access-control-request-headers"
_REQUEST_PRIVATE: Final = b"access-control-request-private-network"
_VARY: Final = (b"vary", b"Origin")
_PREFLIGHT_VARY: Final = (b"vary", b", ".join((_ORIGIN, _REQUEST_METHOD, _REQUEST_HEADERS, _REQUEST_PRIVATE)))
_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")  # echoed, so nothing else may be in it


class Cors:
    """What pages of which origins may do. One per process."""

    def __init__(self, access: Access) -> None:
        origins = [origin.encode() for origin in split_entries(access.allowed_origins)]
        self._by_origin = {origin: _response_headers(origin, access.allow_credentials) for origin in origins}
        self._of_any = self._by_origin.get(ANY.encode())
        # Or a cache, a browser's too, would give what it was sent without an origin to a page that has one.
        self._of_none = (_VARY,) if self._of_any is None else ()
        methods = split_entries(access.allowed_methods)
        headers = [ALWAYS_ALLOWED_HEADER, *split_entries(access.allowed_headers)]
        self._credentials = _credentials(access.allow_credentials)
        self._methods = ", ".join(METHODS if ANY in methods else methods).encode()
        self._echoes = ANY in headers
        self._headers = ", ".join(name for name in headers if name != ANY).encode()
        self._max_age = b"%d" % access.cors_max_age_s

    async def answered(self, scope: Scope, send: Send) -> bool:
        """Whether the request was a preflight, which is now answered.

        Any other request gets `RESPONSE_HEADERS` into its scope.
        """
        origin = next((value for name, value in scope["headers"] if name == _ORIGIN), None)
        if origin is None:
            scope[RESPONSE_HEADERS] = self._of_none
            return False
        asked = dict(scope["headers"]) if scope["method"] == "OPTIONS" else {}
        if _REQUEST_METHOD not in asked:
            scope[RESPONSE_HEADERS] = self.headers(origin)
            return False
        await send({"type": "http.response.start", "status": 204, "headers": self.preflight(origin, asked)})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    def headers(self, origin: bytes) -> Sequence[Header]:
        """What a response to a page of this origin has beside its own headers."""
        return self._of_any or self._by_origin.get(origin, (_VARY,))

    def preflight(self, origin: bytes, asked: MutableMapping[bytes, bytes]) -> list[Header]:
        """The headers that answer a preflight. Nothing is allowed to an origin that is not."""
        if self._of_any is None and origin not in self._by_origin:
            return [_PREFLIGHT_VARY]
        headers = [
            _PREFLIGHT_VARY,
            (b"access-control-allow-origin", origin if self._of_any is None else ANY.encode()),
            *self._credentials,
            (b"access-control-allow-methods", self._methods),
            (b"access-control-allow-headers", self._allowed_headers(asked.get(_REQUEST_HEADERS, b""))),
            (b"access-control-max-age", self._max_age),
        ]
        if asked.get(_REQUEST_PRIVATE) == b"true":
            headers.append((b"access-control-allow-private-network", b"true"))
        return headers

    def _allowed_headers(self, asked: bytes) -> bytes:
        """`*` is answered with what was asked for: to browsers it does not stand for `authorization`."""
        return asked if self._echoes and _NAMES.fullmatch(asked) else self._headers


def cors(access: Access) -> Cors | None:
    """None while no origin is allowed: then nothing is ever sent or answered."""
    return Cors(access) if access.allowed_origins else None


def with_headers(scope: Scope, send: Send) -> Send:
    """A `send` that adds the scope's `RESPONSE_HEADERS` to the head; the same where there are none.

    They are taken out of the scope, so that nothing further in adds them once more.
    """
    headers = scope.pop(RESPONSE_HEADERS, ())
    if not headers:
        return send

    def send_with_headers(message: Message) -> Coroutine[Any, Any, None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *headers]
        return send(message)

    return send_with_headers


def _response_headers(origin: bytes, allow_credentials: bool) -> Sequence[Header]:
    return (
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", ", ".join(EXPOSED).encode()),
        (b"timing-allow-origin", origin),  # or the Performance API shows no server-timing
        *_credentials(allow_credentials),
        *(() if origin == ANY.encode() else (_VARY,)),
    )


def _credentials(allow_credentials: bool) -> Sequence[Header]:
    return ((b"access-control-allow-credentials", b"true"),) if allow_credentials else ()
