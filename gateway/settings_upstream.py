"""Settings of servers that Headrace does not ship, and of the tokenizers that belong to their models.

How all settings hang together: `gateway/settings.py`. What these do: `backend/upstream_server.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from gateway.settings_field import ALL, GATEWAY, About


@dataclass(frozen=True, slots=True)
class Upstream:
    """Servers in the place of workers."""

    TOPIC: ClassVar = "Other engines"
    COMMANDS: ClassVar = frozenset({GATEWAY})

    upstream: Annotated[
        tuple[str, ...],
        About(
            "server to send to instead of a worker: vllm+http://HOST:PORT or sglang+http://HOST:PORT (token "
            "ids, needs a tokenizer), openai+http://HOST:PORT (text); https likewise; repeat for several"
        ),
    ] = ()
    tokenizer: Annotated[
        tuple[str, ...],
        About(
            "folder with the tokenizer of an upstream's model, or of a scripted worker; MODEL=PATH where "
            "upstreams serve several models; repeat for several",
            commands=ALL,
        ),
    ] = ()
    upstream_api_key: Annotated[
        str | None, About("key that upstream servers are shown, as a bearer token", secret=True)
    ] = field(default=None, repr=False)
    upstream_cafile: Annotated[
        Path | None,
        About("authority that the certificates of https upstreams are signed by (PEM)", is_file=True),
    ] = None
    upstream_connect_s: Annotated[float, About("time to connect to an upstream server", "s", above=0)] = 5.0
    upstream_fields: Annotated[
        tuple[str, ...],
        About(
            "further field of chats and completions that goes to openai+http servers, as user or metadata; "
            "content rules see it; repeat for several"
        ),
    ] = ()
    passthrough: Annotated[
        bool, About("pass /v1 routes that are not the gateway's own on to an upstream server, as embeddings")
    ] = True


def tokenizer_folder(tokenizers: Sequence[str], model: str) -> Path | None:
    """The folder of a model's tokenizer: the one that names the model, else the one that names none."""
    named = [(name, folder) for name, folder in map(_split, tokenizers) if name in (model, None)]
    named.sort(key=lambda pair: pair[0] is None)
    return Path(named[0][1]).expanduser() if named else None


def check_upstreams(upstream: Upstream) -> Iterator[str]:
    """One line for each problem."""
    yield from check_tokenizers(upstream.tokenizer)
    key = upstream.upstream_api_key or ""
    if not (key.isascii() and key.isprintable()) or key != key.strip():  # not shown: it is a secret
        yield (
            "upstream_api_key: it has characters that no header can hold, as the line break at the end of a "
            "file; it must be printable ASCII without spaces around it"
        )
    if not upstream.upstream:
        return
    from backend.address import AddressError  # with asyncio, which no --help needs
    from backend.upstream_address import parse_upstream

    good = []
    for address in upstream.upstream:
        try:
            good.append(str(parse_upstream(address)))
        except AddressError as error:
            yield f"upstream: {error}"
    if len(set(good)) < len(good):  # of the others nothing is shown: they may hold a password
        yield f"upstream: an address is given twice: {', '.join(good)}"


def check_tokenizers(tokenizers: Sequence[str]) -> Iterator[str]:
    """One line for each problem."""
    names = [name for name, _ in map(_split, tokenizers)]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            whose = "without a model's name" if name is None else f"for {name!r}"
            yield f"tokenizer: {names.count(name)} folders are given {whose}; only one is allowed"


def _split(tokenizer: str) -> tuple[str | None, str]:
    """MODEL=PATH. A path that begins like one is a path, whatever is in it."""
    name, equals, folder = tokenizer.partition("=")
    if not equals or name.startswith(("/", ".", "~")):
        return None, tokenizer
    return name, folder
