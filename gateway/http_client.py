"""A small HTTP client for our own commands, from the standard library: TCP, TLS and Unix sockets."""

from __future__ import annotations

import http.client
import socket
import ssl
from urllib.parse import urlsplit


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def open_connection(url: str, timeout_s: float, *, verify: bool = True) -> http.client.HTTPConnection:
    """A connection to `http://…`, `https://…` or `unix:PATH`; it connects with its first request.

    `verify` False is for our own process on this machine, whose certificate names another host. Raises
    `ValueError` for an address of another kind.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path:
        return _UnixConnection(parts.path, timeout_s)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"{url!r} is not an address of the form http://HOST:PORT, https://HOST:PORT or unix:PATH"
        )
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
