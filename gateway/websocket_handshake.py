"""The handshake of RFC 6455 as far as it can be malformed. A good one says nothing about who may come in
(`gateway/realtime_admission.py`)."""

from __future__ import annotations

from typing import Final

from websockets.http11 import Request
from websockets.server import ServerProtocol

from pipeline.errors import ClientError, HeadraceError

VERSION: Final = "13"
_MAX_SHOWN_CHARS: Final = 40


class HandshakeRefused(ClientError):
    """The offer of a WebSocket breaks RFC 6455, section 4.2.1."""

    code = "bad_websocket_handshake"


class UpgradeRequired(ClientError):
    """There is no offer, or one of a version that is not spoken here (RFC 6455, section 4.2.2)."""

    status_hint = 426
    code = "websocket_required"


# What a refusal says of the protocol that must be offered, and of its version.
UPGRADE_HEADERS: Final = (
    (b"connection", b"Upgrade"),
    (b"upgrade", b"websocket"),
    (b"sec-websocket-version", VERSION.encode()),
)


def refusal(connection: ServerProtocol, request: Request) -> HeadraceError | None:
    """Why this handshake cannot lead to a WebSocket; None for a good one."""
    versions = request.headers.get_all("sec-websocket-version")
    if versions != [VERSION]:
        shown = ", ".join(versions)[:_MAX_SHOWN_CHARS]
        return UpgradeRequired(f"The WebSocket version must be {VERSION}, not {shown!r}.")
    if connection.accept(request).status_code == 101:
        return None
    return HandshakeRefused(f"This is not a valid WebSocket handshake: {connection.handshake_exc}"[:200])
