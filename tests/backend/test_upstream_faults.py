"""What a status means, whether a response or an error event in a stream has it."""

from __future__ import annotations

import pytest

from backend.upstream_faults import UpstreamGaveUp, refusal, server_error
from pipeline.errors import EngineRejected, HeadraceError, QueueFull


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, QueueFull) for status in (408, 429, 503)),
        *((status, EngineRejected) for status in (400, 413, 422)),
        *((status, UpstreamGaveUp) for status in (407, 499, 500, 502)),
    ],
)
def test_status_of_a_response_and_of_an_event_are_one_kind_of_error(
    status: int, kind: type[HeadraceError]
) -> None:
    assert type(refusal("s", status, b"")) is type(server_error(status, "")) is kind
    assert type(server_error(status, "", has_begun=True)) is UpstreamGaveUp


@pytest.mark.parametrize(
    ("told", "wait_s"),
    [
        *((b"7", 7.0), (b"0", 0.0), (b"999999999", 60.0), (b"", 1.0), (b"-3", 1.0), (b"1e3", 1.0)),
        *((b"Wed, 21 Oct 2026 07:28:00 GMT", 1.0), (b"9" * 5000, 1.0), ("٣".encode(), 1.0)),
    ],
)
def test_client_is_told_how_long_the_server_wants_to_be_left_alone(told: bytes, wait_s: float) -> None:
    for status in (429, 503):
        error = refusal("s", status, b"", [(b"x", b"5"), (b"retry-after", told)])
        assert isinstance(error, QueueFull)
        assert error.retry_after_s == wait_s
    assert QueueFull.retry_after_s == 1.0
