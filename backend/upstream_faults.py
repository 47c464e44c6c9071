"""What goes wrong at an upstream server before it streams, as errors of ours; the server's words are
`upstream_errors.py`.
"""

from __future__ import annotations

from typing import Final

from backend.upstream_errors import body_words, server_error
from pipeline.errors import EngineFailed, HeadraceError, QueueFull, WorkerLost

MAX_BODY_BYTES: Final = 64 << 10  # of a refusal, read for its words
KEY_STATUSES: Final = frozenset((401, 403))
_FULL: Final = frozenset((408, 429, 503))
_GONE: Final = frozenset((404, 405))


class UpstreamFault(EngineFailed):
    """A server that answers, but not as it should. The message is ours, and says what to do."""


class ModelGone(WorkerLost):
    """The server had a model when it was asked, and says that it has not, or that it has no such route."""

    status_hint = 404
    type = "invalid_request_error"
    code = "not_served"


def refusal(server: str, status: int, body: bytes) -> HeadraceError:
    """The error of a call that was answered with this status instead of a stream."""
    if status in KEY_STATUSES:
        return UpstreamFault(bad_key(server, status))
    if status in _FULL:
        return QueueFull(f"upstream {server} takes no more requests (HTTP {status})")
    if status in _GONE:
        return ModelGone(f"upstream {server} has no such route, or no longer this model (HTTP {status})")
    if status < 400:
        return UpstreamFault(f"upstream {server} answered with HTTP {status} where 200 was expected")
    words, _ = body_words(body)
    return server_error(status, words)


def bad_key(server: str, status: int) -> str:
    """For the operator, whose it is."""
    return f"upstream {server} refuses this gateway's key (HTTP {status}): is upstream_api_key right?"
