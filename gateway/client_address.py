"""The client's address behind proxies: the last one in X-Forwarded-For that no trusted proxy has.

Anyone can send that header, so it is read from its right end, where our own proxies write, and only as far as
each address is that of a proxy which the settings trust.

Not here: what an address is good for. Only the request log shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Final

from gateway.settings_access import ANY, split_entries

Address = IPv4Address | IPv6Address

LOGGED_CLIENT: Final = "headrace.logged_client"  # in the ASGI scope: the address for the request log

MAX_HOPS: Final = 16  # that are read of the header; longer ways lead through nobody's data center
_MAX_CHARS: Final = 64  # of one entry: an IPv6 address in brackets with its port has 47
_FORWARDED_FOR: Final = b"x-forwarded-for"
# Bare, `IPv4:port`, `[IPv6]` or `[IPv6]:port`. No zones: their names are free text.
_ENTRY: Final = re.compile(
    rb"(?P<v4>[0-9.]+)(?::[0-9]{1,5})?|\[(?P<v6>[0-9A-Fa-f:.]+)\](?::[0-9]{1,5})?|(?P<bare>[0-9A-Fa-f:.]+)"
)


class ClientAddresses:
    """Finds clients' addresses. `trusted`: addresses and networks of proxies, or `*` for all.

    `is_unix`: the gateway listens on a Unix socket; then the peer has no address, and is our proxy.
    """

    def __init__(self, trusted: Sequence[str] = (), is_unix: bool = False, is_logged: bool = True) -> None:
        entries = split_entries(trusted)
        self._trusts_all = ANY in entries
        self._networks = tuple(ip_network(entry) for entry in entries if entry != ANY)
        self._trusts_unnamed = is_unix
        self._is_logged = is_logged

    def note(self, scope: MutableMapping[str, Any]) -> None:
        """Put the client's address into an ASGI scope, in the place of a trusted proxy's."""
        address = self._forwarded_for(scope)
        if address is not None:
            scope["client"] = (address, 0)  # as ASGI servers say it where the port is not known
        if self._is_logged and scope.get("client"):
            scope[LOGGED_CLIENT] = scope["client"][0]

    def _forwarded_for(self, scope: MutableMapping[str, Any]) -> str | None:
        """The client's address as the proxies tell it; None: the peer's own is the best that is known."""
        if not (self._networks or self._trusts_all or self._trusts_unnamed):
            return None
        values = [value for name, value in scope["headers"] if name == _FORWARDED_FOR]
        if not values or not self._trusts_peer(scope.get("client")):
            return None
        address = None
        for entry in _from_the_right(values):
            address = read_address(entry)
            if address is None or not self._trusts(address):
                break
        return None if address is None else str(address)

    def _trusts_peer(self, peer: Sequence[Any] | None) -> bool:
        if self._trusts_all:
            return True
        if peer is None:  # also of a TCP connection that is gone already: what it claims is not believed
            return self._trusts_unnamed
        address = read_address(peer[0].partition("%")[0].encode())
        return address is not None and self._trusts(address)

    def _trusts(self, address: Address) -> bool:
        return self._trusts_all or any(address in network for network in self._networks)


def _from_the_right(values: Iterable[bytes]) -> Iterator[bytes]:
    """The last `MAX_HOPS` entries of a header that may have come in several lines, the last one first."""
    entries = b",".join(values).rsplit(b",", MAX_HOPS)[-MAX_HOPS:]
    return (entry for entry in map(bytes.strip, reversed(entries)) if entry)


def read_address(entry: bytes) -> Address | None:
    """An address with or without a port and brackets; None for anything else."""
    match = _ENTRY.fullmatch(entry) if len(entry) <= _MAX_CHARS else None
    if match is None:
        return None
    try:
        address = ip_address((match["v4"] or match["v6"] or match["bare"]).decode())
    except ValueError:
        return None
    if (match["v4"] is not None) != (address.version == 4):
        return None
    return getattr(address, "ipv4_mapped", None) or address  # ::ffff:1.2.3.4: what a dual-stack proxy sees
