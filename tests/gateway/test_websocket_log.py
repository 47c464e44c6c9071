"""Nothing of what libraries say about a WebSocket is logged, and of a fault its place."""

from __future__ import annotations

import logging

import pytest

from gateway.websocket_log import QuietLog


def test_only_the_place_of_a_fault_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log = QuietLog(logging.getLogger("a.library"), {})
    assert not log.isEnabledFor(logging.CRITICAL)
    log.error("secret")
    log.debug("secret")
    try:
        raise ValueError("secret")
    except ValueError:
        log.info("secret", exc_info=True)
        assert not caplog.records
        log.exception("secret")
    (record,) = caplog.records
    assert "unexpected ValueError" in record.getMessage()
    assert "secret" not in caplog.text.replace('ValueError("secret")', "")
