"""Errors as clients see them: status, headers and body."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from gateway.error_body import error_response, status_of, stream_error
from pipeline import errors
from pipeline.errors import (
    BadKey,
    BodyTooLarge,
    BodyTooSlow,
    ClientError,
    ContentBlocked,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    EngineRejected,
    HeadersTooLarge,
    HeadraceError,
    InvalidRequest,
    NoWorker,
    QueueFull,
    UnknownModel,
    WorkerLost,
)


def read(error: BaseException, request_id: str | None = None) -> tuple[int, dict[str, str], dict[str, Any]]:
    status, headers, body = error_response(error, request_id)
    return status, {name.decode(): value.decode() for name, value in headers}, json.loads(body)["error"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequest("m", "n"), 400, "invalid_request_error", "n", None),
        (
            InvalidRequest("m", "echo", "unsupported_field"),
            400,
            "invalid_request_error",
            "echo",
            "unsupported_field",
        ),
        (ContextTooLong(9, 4, 10), 400, "invalid_request_error", "messages", "context_length_exceeded"),
        (ContentBlocked("r1"), 400, "invalid_request_error", "messages", "content_filter"),
        (BadKey(), 401, "authentication_error", None, "invalid_api_key"),
        (UnknownModel("m"), 404, "invalid_request_error", "model", "model_not_found"),
        (BodyTooLarge(9, 8), 413, "invalid_request_error", None, "body_too_large"),
        (HeadersTooLarge(9, 8), 431, "invalid_request_error", None, "headers_too_large"),
        (QueueFull("m"), 503, "overloaded_error", None, "queue_full"),
        (NoWorker("m"), 503, "overloaded_error", None, "no_worker"),
        (Draining(), 503, "overloaded_error", None, "draining"),
        (WorkerLost("m"), 502, "engine_error", None, "worker_lost"),
        (EngineRejected("m"), 400, "invalid_request_error", None, "engine_rejected"),
        (BodyTooSlow(60.0), 408, "invalid_request_error", None, "body_too_slow"),
        (EngineFailed("m"), 502, "engine_error", None, "engine_failed"),
        (DeadlineExceeded("m"), 504, "engine_error", None, "deadline_exceeded"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_error_has_openais_shape(
    error: HeadraceError, status: int, kind: str, param: str | None, code: str | None
) -> None:
    answered, headers, body = read(error)
    assert answered == status
    assert headers["content-type"] == "application/json"
    assert body == {"message": error.message, "type": kind, "param": param, "code": code}
    assert stream_error(error) == {"error": body}


def test_every_error_class_has_a_status_and_a_type() -> None:
    classes = [
        value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, HeadraceError)
    ]
    assert len(classes) > 15
    for each in classes:
        assert 400 <= each.status_hint <= 599
        assert (each.status_hint < 500) == issubclass(each, (ClientError, errors.ClientGone))
        assert each.type


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [(1.0, "1", "1000"), (0.25, "1", "250"), (2.0001, "3", "2001"), (0.0, "1", "0"), (-1.0, "1", "0")],
)
def test_overload_says_when_to_come_back(retry_after_s: float, seconds: str, milliseconds: str) -> None:
    error = QueueFull("full")
    error.retry_after_s = retry_after_s
    _, headers, _ = read(error)
    assert headers["retry-after"] == seconds
    assert headers["retry-after-ms"] == milliseconds


def test_too_many_requests_says_when_to_come_back() -> None:
    class RateLimitedError(ClientError):
        status_hint = 429
        retry_after_s = 12.5

    _, headers, _ = read(RateLimitedError("m"))
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("13", "12500")


def test_other_errors_name_no_time() -> None:
    for error in (InvalidRequest("m"), WorkerLost("m"), RuntimeError("m")):
        assert "retry-after" not in read(error)[1]


def test_bad_key_challenges() -> None:
    assert read(BadKey())[1]["www-authenticate"].startswith("Bearer ")
    assert "www-authenticate" not in read(InvalidRequest("m"))[1]


def test_headers_too_large_closes_the_connection() -> None:
    assert read(HeadersTooLarge(9, 8))[1]["connection"] == "close"


def test_unexpected_exception_tells_its_request_id_and_nothing_else() -> None:
    status, _, body = read(KeyError("secret"), "req-1")
    assert status == status_of(KeyError()) == 500
    assert body["type"] == "server_error"
    assert body["code"] == "internal_error"
    assert "req-1" in body["message"]
    assert "secret" not in body["message"]
    assert "None" not in read(KeyError("secret"))[2]["message"]


def test_body_survives_text_that_is_hard_to_encode() -> None:
    assert read(InvalidRequest("敏\u2028\0\n"))[2]["message"] == "敏\u2028\0\n"
