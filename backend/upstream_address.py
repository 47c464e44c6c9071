"""Where an upstream server is and what it is: `vllm+http://HOST:PORT/PREFIX`, `openai+https://…`, `sglang+…`.

Parsing only. What a kind means is `backend/upstream_kinds.py`; connections are `backend/http_client.py`.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from backend.address import AddressError
from backend.http_ports import Origin

KINDS: Final = ("vllm", "openai", "sglang")
_PORTS: Final = {"http": 80, "https": 443}
_PREFIX: Final = re.compile(r"(/([A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})+)*")
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+")
_MAY_BE_SECRET: Final = re.compile(r"[@?#]")
_MAX_SHOWN: Final = 200
_WANTED: Final = f"expected KIND+http://HOST:PORT or KIND+https://HOST:PORT, KIND one of {', '.join(KINDS)}"


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """`prefix`: what stands before every path of its API; empty, or a path without a slash at its end."""

    kind: str  # of `KINDS`
    origin: Origin
    prefix: str = ""

    def __str__(self) -> str:
        origin = self.origin
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        scheme = "http" if origin.tls is None else "https"
        return f"{self.kind}+{scheme}://{host}:{origin.port}{self.prefix}"


def parse_upstream(text: str, tls: ssl.SSLContext | None = None) -> UpstreamAddress:
    """The address that `text` names. `tls` is for https; None: the system's authorities.

    A `/v1` at the end of the path is no part of the prefix: it begins the API's own paths. Raises
    `AddressError`, which says what is wrong with it, and shows none of it where there may be a password or a
    key in it.
    """
    kind, plus, url = text.partition("+")
    try:
        _check_form(text)
        if not plus or kind not in KINDS:
            raise ValueError("no such kind of server")
        scheme, host, port, path = _parts(url)
    except ValueError as error:
        raise AddressError(f"bad upstream{_shown(text, kind)}: {error}; {_WANTED}") from None
    context = (tls or ssl.create_default_context()) if scheme == "https" else None
    return UpstreamAddress(kind, Origin(host, port or _PORTS[scheme], context), path)


def _shown(text: str, kind: str) -> str:
    """What may be shown of it: all, or the kind."""
    if not _MAY_BE_SECRET.search(text):
        return f" {text[:_MAX_SHOWN]!r}"
    return f" of kind {kind!r}" if kind in KINDS else ""


def _check_form(text: str) -> None:
    """Raises `ValueError` for what nothing of it may have; `urlsplit` overlooks some of that."""
    if "@" in text:
        raise ValueError("a user name, or any @, is not allowed: it would be logged; use --upstream-api-key")
    if "?" in text or "#" in text:
        raise ValueError("a query or fragment is not allowed")
    if not text.isprintable():
        raise ValueError("it has a control character, or a line break")


def _parts(url: str) -> tuple[str, str, int | None, str]:
    """Scheme, host, port, prefix. Raises `ValueError` for what none of them can be."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS:
        raise ValueError(f"unknown scheme {parts.scheme!r}")
    host = parts.hostname or ""
    if ":" in host:
        ipaddress.IPv6Address(host)
    elif not _HOST.fullmatch(host):
        raise ValueError("no host, or one that is no plain name in ASCII")
    if parts.port == 0:
        raise ValueError("port 0 cannot be connected to")
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    plain = unquote(prefix)
    if not _PREFIX.fullmatch(prefix) or not plain.isprintable() or {".", ".."} & {*plain.split("/")}:
        raise ValueError("its path is no plain one")
    return parts.scheme, host, parts.port, prefix
