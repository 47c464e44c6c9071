"""The one place that turns an error into what a client sees: a response, or the last frame of a stream.

    {"error": {"message": str, "type": str, "param": str | null, "code": str | null}}

openai-python retries 408, 409, 429 and 5xx twice and obeys `retry-after-ms` and `retry-after`.
An exception that Headrace did not raise on purpose tells the client nothing but the id to look up in the log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.errors import BadKey, BodyTooSlow, HeadersTooLarge, HeadraceError, Overloaded

Header = tuple[bytes, bytes]
ErrorBody = Mapping[str, Mapping[str, str | None]]

INTERNAL_STATUS: Final = 500
INTERNAL_CODE: Final = "internal_error"
TOO_MANY_REQUESTS: Final = 429
DEFAULT_RETRY_AFTER_S: Final = 1.0
_JSON: Final = (b"content-type", b"application/json")


def error_response(error: BaseException, request_id: str | None = None) -> tuple[int, list[Header], bytes]:
    """Status, headers (without content-length) and body of the response to a request with this error."""
    body = msgspec.json.encode(stream_error(error, request_id))
    return status_of(error), [_JSON, *_headers(error)], body


def stream_error(error: BaseException, request_id: str | None = None) -> ErrorBody:
    """The payload of the error frame that ends a stream, to be sent as `data: {…}`."""
    if isinstance(error, HeadraceError):
        return _body(error.message, error.type, error.param, error.code)
    where = f" The request's id is {request_id}." if request_id else ""
    return _body(f"The server failed on this request.{where}", HeadraceError.type, None, INTERNAL_CODE)


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    return error.status_hint if isinstance(error, HeadraceError) else INTERNAL_STATUS


def how_it_ended(error: BaseException) -> tuple[str, str]:
    """What a log says of it: a code, and the detail that may stand there."""
    if isinstance(error, HeadraceError):
        return error.code or error.type, error.log_detail
    return INTERNAL_CODE, ""


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _headers(error: BaseException) -> list[Header]:
    if isinstance(error, BadKey):
        return [(b"www-authenticate", b'Bearer realm="headrace"')]
    if isinstance(error, HeadersTooLarge | BodyTooSlow):  # the rest is not read
        return [(b"connection", b"close")]
    if isinstance(error, Overloaded) or status_of(error) == TOO_MANY_REQUESTS:
        return _retry_after(getattr(error, "retry_after_s", DEFAULT_RETRY_AFTER_S))
    return []


def _retry_after(retry_after_s: float) -> list[Header]:
    """Whole seconds, rounded up, for every client (RFC 9110, 10.2.3), and milliseconds for OpenAI's."""
    wait_s = max(0.0, retry_after_s)
    return [
        (b"retry-after", b"%d" % max(1, math.ceil(wait_s))),
        (b"retry-after-ms", b"%d" % math.ceil(wait_s * 1000)),
    ]
