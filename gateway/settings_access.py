"""Settings of who may ask: keys, the pages of other sites, and the proxies whose word counts.

How all settings hang together: `gateway/settings.py`. What these do: `gateway/keys.py`, `gateway/cors.py` and
`gateway/client_address.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv6Address, ip_network
from typing import Annotated, ClassVar, Final

from gateway.settings_field import EDGE, About

ANY: Final = "*"
NULL_ORIGIN: Final = "null"  # of local files, sandboxed frames and some redirects: no site in particular
_MAX_SHOWN_CHARS: Final = 80
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'+.^_`|~-]+")  # RFC 9110, 5.6.2, without the asterisk
# As browsers write it (HTML, "serialization of an origin"); extensions and apps have schemes of their own.
_ORIGIN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:[a-z0-9._-]+|\[(?P<ipv6>[0-9a-f:]+)\])(?::(?P<port>[1-9][0-9]{0,4}))?"
)
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask."""

    TOPIC: ClassVar = "Access"
    COMMANDS: ClassVar = EDGE

    api_key: Annotated[
        tuple[str, ...], About("key that clients must send; repeat for several", secret=True)
    ] = field(default=(), repr=False)
    allowed_origins: Annotated[
        tuple[str, ...],
        About(
            "origin whose pages may call the gateway (CORS), as https://app.example.com; repeat for several; "
            "`*` is every page, and none given is none but the gateway's own"
        ),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], About("method that such pages may use; repeat for several; `*` is every one")
    ] = (ANY,)
    allowed_headers: Annotated[
        tuple[str, ...],
        About(
            "request header that such pages may send, besides content-type; repeat for several; `*` is every "
            "one"
        ),
    ] = (ANY,)
    allow_credentials: Annotated[
        bool, About("such pages may send cookies and client certificates; not with the origin `*`")
    ] = False
    cors_max_age_s: Annotated[
        int,
        About("time that a browser remembers what a page may do; they cap it at hours", "s", at_least=0),
    ] = 600
    forwarded_allow_ips: Annotated[
        tuple[str, ...],
        About(
            "proxy whose X-Forwarded-For is believed, an address or a network as 10.0.0.0/8; repeat for "
            "several; `*` is every one; over a Unix socket it always is"
        ),
    ] = ()
    log_client_address: Annotated[bool, About("the request log names the client's address")] = True


def split_entries(values: Sequence[str]) -> list[str]:
    """The entries of a setting that was repeated, comma separated, or both."""
    return [part.strip() for value in values for part in value.split(",")]


def check_access(access: Access) -> Iterator[str]:
    """One line for each problem."""
    yield from _bad("allowed_origins", access.allowed_origins, _origin_problem)
    for name in ("allowed_methods", "allowed_headers"):
        yield from _bad(name, getattr(access, name), _token_problem)
    yield from _bad("forwarded_allow_ips", access.forwarded_allow_ips, _network_problem)
    if access.allow_credentials and ANY in split_entries(access.allowed_origins):
        yield (
            "allow_credentials: it is not allowed with the origin '*' in allowed_origins, or every page "
            "could act in its visitor's name; list the origins"
        )


def _bad(name: str, values: Sequence[str], problem: Callable[[str], str]) -> Iterator[str]:
    for entry in split_entries(values):
        if entry != ANY and (what := problem(entry)):
            yield f"{name}: {entry[:_MAX_SHOWN_CHARS]!r} is not allowed; {what}"


def _origin_problem(entry: str) -> str:
    """What is wrong with an origin; empty for one that a browser can send."""
    if entry == NULL_ORIGIN:
        return ""
    match = _ORIGIN.fullmatch(entry)
    if match is None:
        return (
            "it must be an origin as browsers send it: scheme://host or scheme://host:port, in lower case, "
            "without a path or a slash at its end"
        )
    port = match["port"]
    if port is not None and (int(port) > 65535 or port == _DEFAULT_PORTS.get(match["scheme"])):
        return "no browser sends this port: leave out a scheme's own, and none is over 65535"
    return "" if match["ipv6"] is None else _ipv6_problem(match["ipv6"])


def _ipv6_problem(address: str) -> str:
    try:
        return "" if str(IPv6Address(address)) == address else f"browsers write [{IPv6Address(address)}]"
    except AddressValueError:
        return "this is not an IPv6 address"


def _token_problem(entry: str) -> str:
    return "" if _TOKEN.fullmatch(entry) else "it must be a name, or '*'"


def _network_problem(entry: str) -> str:
    try:
        ip_network(entry)
    except ValueError as error:
        reason = " (it has host bits set)" if "host bits" in str(error) else ""
        return f"it must be an IP address or a network, as 10.0.0.0/8{reason}, or '*'"
    return ""
