"""Rules between settings: combinations that are not allowed, although each value alone is."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from gateway.settings import Settings


def check_together(settings: Settings) -> Iterator[str]:
    """One line for each problem."""
    yield from _pairs(settings)
    for address in settings.link.worker:
        if problem := address_problem(address):
            yield f"worker: {address!r} {problem}"
    if problem := address_problem(settings.engine.listen):
        yield f"listen: {settings.engine.listen!r} {problem}"
    elif not _is_trusted(settings) and not is_local(settings.engine.listen):
        yield (
            f"listen: {settings.engine.listen} can be reached from other machines, which needs link_secret, "
            "link_secret_file, or link_certfile with link_keyfile"
        )
    for path in settings.text.rules:
        if not Path(path).expanduser().is_file():
            yield f"rules: {path!r} is not allowed (there is no such file)"


def _pairs(settings: Settings) -> Iterator[str]:
    http, link = settings.http, settings.link
    for cert, key, name in (
        (http.ssl_certfile, http.ssl_keyfile, "ssl"),
        (link.link_certfile, link.link_keyfile, "link"),
    ):
        if (cert is None) != (key is None):
            yield f"{name}_certfile and {name}_keyfile belong together; only one is given"
    if settings.scripted.scripted and settings.engine.model is not None:
        yield "scripted and model are both given; a scripted worker has no model, it needs a tokenizer"
    if settings.scripted.scripted and settings.scripted.tokenizer is None:
        yield "tokenizer is missing; a scripted worker needs the folder of one"


def _is_trusted(settings: Settings) -> bool:
    link = settings.link
    return link.link_secret is not None or link.link_certfile is not None


def address_problem(address: str) -> str:
    """What is wrong with a link address, or nothing: tcp://HOST:PORT, or unix:PATH (also unix:///PATH)."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        return "has no port from 0 to 65535"
    if parts.scheme == "unix":
        return "" if parts.path and not parts.netloc else "has no path; write unix:PATH"
    if parts.scheme != "tcp":
        return "is not an address of the form tcp://HOST:PORT or unix:PATH"
    return "" if parts.hostname and port is not None and not parts.path else "must be tcp://HOST:PORT"


def is_local(address: str) -> bool:
    """Whether only this machine can reach a link address."""
    parts = urlsplit(address)
    if parts.scheme == "unix" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
