"""Where an upstream server is and what it is: `vllm+http://HOST:PORT/PREFIX`, `openai+https://…`, `sglang+…`.

Parsing only. What a kind means is `backend/upstream_kinds.py`; connections are `backend/http_client.py`.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from backend.address import AddressError
from backend.http_ports import Origin

KINDS: Final = ("vllm", "openai", "sglang")
_PORTS: Final = {"http": 80, "https": 443}
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")
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
    `AddressError`, which names `text` and what is wrong with it, but no password.
    """
    kind, plus, url = text.partition("+")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressError(f"bad upstream {text!r}: {error}; {_WANTED}") from error
    if parts.username is not None:
        raise AddressError(
            f"bad upstream of kind {kind[:20]!r}: a user name in it would be logged; use --upstream-api-key"
        )
    if not plus or kind not in KINDS:
        raise AddressError(f"bad upstream {text!r}: no such kind of server; {_WANTED}")
    if parts.scheme not in _PORTS:
        raise AddressError(f"bad upstream {text!r}: unknown scheme {parts.scheme!r}; {_WANTED}")
    if not parts.hostname or not parts.hostname.isascii():
        raise AddressError(f"bad upstream {text!r}: no host, or one that is not ASCII; {_WANTED}")
    if parts.query or parts.fragment:
        raise AddressError(f"bad upstream {text!r}: a query or fragment is not allowed; {_WANTED}")
    if port == 0:
        raise AddressError(f"bad upstream {text!r}: port 0 cannot be connected to; {_WANTED}")
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    if not _PREFIX.fullmatch(prefix):
        raise AddressError(f"bad upstream {text!r}: its path is no plain one; {_WANTED}")
    context = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
    return UpstreamAddress(kind, Origin(parts.hostname, port or _PORTS[parts.scheme], context), prefix)
