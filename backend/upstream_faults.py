"""What goes wrong at an upstream server, as errors of the one tree: by its status, or its code in a stream.

Not here: how its words and its code are found (`upstream_errors.py`).
"""

from __future__ import annotations

import re
from typing import Final

from backend.http_ports import Headers
from backend.upstream_errors import MAX_WORDS, body_words
from pipeline.errors import EngineFailed, EngineRejected, HeadraceError, QueueFull, WorkerLost

MAX_BODY_BYTES: Final = 64 << 10  # of a refusal, read for its words
KEY_STATUSES: Final = frozenset((401, 403))  # the gateway's own
MAX_RETRY_S: Final = 60.0  # more is ignored by OpenAI's clients
_SECONDS: Final = re.compile(rb"[0-9]{1,9}")
_FULL: Final = frozenset((408, 429, 503))
_GONE: Final = frozenset((404, 405))
_NOT_THE_CLIENTS: Final = KEY_STATUSES | {407, 499}  # nor the way there


class UpstreamFault(EngineFailed):
    """A server that answers, but not as it should. The message is ours, and says what to do."""


class UpstreamGaveUp(EngineFailed):
    """An upstream server gave up this one request; the message is its own, and may quote the request."""

    @property
    def log_detail(self) -> str:
        return ""


class ModelGone(WorkerLost):
    """The server had a model when it was asked, and says that it has not, or that it has no such route."""

    status_hint = 404
    type = "invalid_request_error"
    code = "not_served"


def refusal(server: str, status: int, body: bytes, headers: Headers = ()) -> HeadraceError:
    """The error of a call that was answered with this status instead of a stream."""
    if status in KEY_STATUSES:
        return UpstreamFault(bad_key(server, status))
    if status in _FULL:
        full = QueueFull(f"upstream {server} takes no more requests (HTTP {status})")
        full.retry_after_s = retry_after_s(headers, full.retry_after_s)
        return full
    if status in _GONE:
        return ModelGone(f"upstream {server} has no such route, or no longer this model (HTTP {status})")
    if status < 400:
        return UpstreamFault(f"upstream {server} answered with HTTP {status} where 200 was expected")
    words, _ = body_words(body)
    return server_error(status, words)


def retry_after_s(headers: Headers, default_s: float) -> float:
    """How long the server wants to be left alone: whole seconds; dates are not read, clocks differ.

    No longer than `MAX_RETRY_S`: it may count to the end of the day, and there may be other servers by then.
    """
    told = next((value for name, value in headers if name == b"retry-after"), b"")
    return min(float(told), MAX_RETRY_S) if _SECONDS.fullmatch(told) else default_s


def server_error(status: int | None, words: str, has_begun: bool = False) -> HeadraceError:
    """The error for what a server has said. `status`: HTTP's, or the code in its error event.

    `has_begun`: some of the answer has come, so that it is too late to refuse the request.
    """
    words = words[:MAX_WORDS] or "no reason given"
    if not has_begun and status in _FULL:
        return QueueFull("The upstream server takes no more requests now.")
    if not has_begun and status is not None and 400 <= status < 500 and status not in _NOT_THE_CLIENTS:
        return EngineRejected(f"The upstream server refuses the request: {words}")
    return UpstreamGaveUp(f"The upstream server gave up the request: {words}")


def bad_key(server: str, status: int) -> str:
    """For the operator, whose it is."""
    return f"upstream {server} refuses this gateway's key (HTTP {status}): is upstream_api_key right?"
