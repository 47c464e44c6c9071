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
