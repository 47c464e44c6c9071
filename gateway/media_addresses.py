"""Which network addresses are public: those that a server may connect to because a client says so.

Text in, yes or no out. Nothing here looks a name up (`gateway/media_http.py`) or reads a URL
(`gateway/media_urls.py`).

The registries are IANA's for special-purpose addresses of IPv4 and IPv6. The standard library's `is_global`
follows them too, but differently in each Python, and calls a NAT64 address public whatever it leads to.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

_NOT_PUBLIC_V4: Final = tuple(
    IPv4Network(each)
    for each in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # of carriers, behind their NAT; one cloud's metadata, too
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's platform, inside each of its machines
        "169.254.0.0/16",  # link-local; the metadata of most clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; one cloud's metadata, too
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
# All that IANA has given out for hosts is in here: loopback, link-local, private and multicast are not.
_UNICAST_V6: Final = IPv6Network("2000::/3")
_NOT_PUBLIC_V6: Final = tuple(
    IPv6Network(each)
    for each in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: leads to any IPv4 address
        "2620:4f:8000::/48",  # AS112
        "3ffe::/16",  # the 6bone of old
        "3fff::/20",  # documentation
    )
)
_MAPPED: Final = IPv6Network("::ffff:0:0/96")
_NAT64: Final = IPv6Network("64:ff9b::/96")  # what names of IPv4 hosts resolve to in a network without IPv4
_ISATAP: Final = (0x0000_5EFE, 0x0200_5EFE)  # upper half of an interface's id; the lower is an IPv4 address


def is_public(address: str) -> bool:
    """Whether a numeric address is that of a host in the public internet.

    An IPv4 address inside an IPv6 one (mapped, NAT64) is unwrapped. False, too, for what is no address in its
    usual notation: a name, a zone (`fe80::1%eth0`), leading zeros, a decimal number.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return _is_public_v4(parsed) if isinstance(parsed, IPv4Address) else _is_public_v6(parsed)


def _is_public_v4(address: IPv4Address) -> bool:
    return not any(address in network for network in _NOT_PUBLIC_V4)


def _is_public_v6(address: IPv6Address) -> bool:
    if address.scope_id is not None:
        return False
    if address in _MAPPED or address in _NAT64:
        return _is_public_v4(IPv4Address(int(address) & 0xFFFF_FFFF))
    if int(address) >> 32 & 0xFFFF_FFFF in _ISATAP:
        return False
    return address in _UNICAST_V6 and not any(address in network for network in _NOT_PUBLIC_V6)
