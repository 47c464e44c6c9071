"""Listening sockets: bound before anything else starts, so that a taken address is a plain error message."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Final

from gateway.settings import Http

# In the kernel, per connection. It would take 3.8 MB for a client that does not read, minutes of an answer,
# before anything here notices; so it takes 0.2 MB.
MAX_UNSENT_BYTES: Final = 128 << 10
_PROBE_LIMIT_S: Final = 1.0
# As uvicorn does: the web server in front usually runs as another user. The folder's permissions bound who
# may connect, and the API keys who may ask.
_UDS_MODE: Final = 0o666


class ListenError(Exception):
    """The address cannot be listened on; the message names it and the reason."""


def bind(http: Http, *, shared: bool = False) -> list[socket.socket]:
    """Bound sockets, not yet listening: one per address of the host, or one for the Unix socket.

    `shared` lets other processes bind the same TCP port, so that the kernel spreads connections over them.
    Raises `ListenError`.
    """
    if http.uds is not None:
        return [_bind_uds(http.uds)]
    try:
        found = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(f"cannot listen on {http.host}:{http.port}: {error.strerror}") from error
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            port = (
                sockets[0].getsockname()[1] if sockets else http.port
            )  # a free port is the same on all addresses
            sockets.append(_bind_tcp(family, (address[0], port, *address[2:]), shared))
    except OSError as error:
        close(sockets)
        raise ListenError(f"cannot listen on {http.host}:{http.port}: {error.strerror}") from error
    return sockets


def reserve(http: Http) -> list[socket.socket]:
    """Shared sockets that hold the port for processes to come; never listened on, so they get no connections.

    Raises `ListenError` also where `bind` with `shared` would not: when another program shares the port
    already. It would silently take a part of the connections.
    """
    if http.uds is None and http.port:
        close(bind(http))
    return bind(http, shared=True)


def close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def url(http: Http, sockets: list[socket.socket]) -> str:
    """Where a client reaches the gateway. A Unix socket has no URL, so that is its path."""
    if http.uds is not None:
        return f"unix:{http.uds}"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(http.host, http.host)
    scheme = "http" if http.ssl_certfile is None else "https"
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{scheme}://{host}:{sockets[0].getsockname()[1]}"


def _bind_tcp(family: int, address: tuple[object, ...], shared: bool) -> socket.socket:
    # The protocol is named because asyncio sets TCP_NODELAY only where it is: without it small frames wait
    # 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _bind_uds(path: Path) -> socket.socket:
    """Takes the place of a socket file that a dead process left, never of a live one or of another kind of
    file."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            _check_stale(path)
            path.unlink()
        bound.bind(str(path))
        os.chmod(path, _UDS_MODE)
    except OSError as error:
        bound.close()
        raise ListenError(f"cannot listen on {path}: {error.strerror or error}") from error
    return bound


def _check_stale(path: Path) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError("it exists and is not a socket")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
        contextlib.suppress(ConnectionRefusedError),
    ):
        probe.settimeout(_PROBE_LIMIT_S)
        probe.connect(str(path))
        raise OSError("another process listens there")
