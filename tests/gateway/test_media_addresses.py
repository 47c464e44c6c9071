from __future__ import annotations

import random
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest

from gateway.media_addresses import is_public

REFUSED_NETWORKS = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
    *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    *("::/8", "100::/64", "64:ff9b:1::/48", "2001::/32", "2001:2::/48", "2001:10::/28", "2001:20::/28"),
    *(
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
        "4000::/3",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
    ),
    *("ff00::/8",),
)
PUBLIC = (
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255"),
    *(
        "128.0.0.0",
        "169.253.255.255",
        "169.255.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.1.0",
        "192.0.3.0",
    ),
    *("192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255", "168.63.129.15"),
    *("2606:4700:4700::1111", "2001:4860:4860::8888", "2a00:1450:4001:81b::200e", "2400:cb00::1"),
    *("::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "64:ff9b::808:808"),
)
METADATA = (
    "169.254.169.254",
    "169.254.170.2",
    "100.100.100.200",
    "192.0.0.192",
    "168.63.129.16",
    "fd00:ec2::254",
)
NO_ADDRESS = (
    *(
        "",
        "localhost",
        "example.com",
        "2130706433",
        "0x7f000001",
        "017700000001",
        "127.1",
        "8.8",
        "8.8.8.010",
    ),
    *(
        "08.8.8.8",
        "0x8.8.8.8",
        " 8.8.8.8",
        "8.8.8.8 ",
        "8.8.8.8.",
        "8.8.8.8:80",
        "8.8.8.8/32",
        "[2400:cb00::1]",
    ),
    *("8.8.8.８", "2400:cb00::1%eth0", "2400:cb00::1%1", "fe80::1%lo", "2400:cb00::1/64", "2400:cb00:::1"),
)
OTHER_WAYS_V4 = (
    "10.0.0.1",
    "127.0.0.1",
    "169.254.169.254",
    "192.168.0.1",
    "100.64.0.1",
    "0.0.0.0",
    "255.255.255.255",
)


@pytest.mark.parametrize("network", REFUSED_NETWORKS)
def test_no_address_of_a_special_network_is_public(network: str) -> None:
    parsed, chance = ip_network(network), random.Random(network)
    last = parsed.num_addresses - 1
    for offset in (0, 1, last, *(chance.randint(0, last) for _ in range(20))):
        assert not is_public(str(parsed[offset])), parsed[offset]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_up_to_the_edges_of_special_networks(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", METADATA)
def test_metadata_services_of_clouds_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("text", NO_ADDRESS)
def test_what_is_no_address_in_its_usual_notation_is_not_public(text: str) -> None:
    assert not is_public(text)


@pytest.mark.parametrize("address", OTHER_WAYS_V4)
def test_an_inner_address_inside_an_ipv6_one_is_not_public(address: str) -> None:
    inner = int(IPv4Address(address))
    flipped = inner ^ 0xFFFF_FFFF  # Teredo hides a client's address so
    for wrapped in (
        0xFFFF << 32 | inner,  # mapped
        inner,  # compatible
        0xFFFF_0000 << 32 | inner,  # translated
        0x0064_FF9B << 96 | inner,  # NAT64
        0x0064_FF9B_0001 << 80 | inner,  # NAT64 of a network's own
        0x2002 << 112 | inner << 80 | 1,  # 6to4
        0x2001_0000 << 96 | 0x0808_0808 << 64 | flipped,  # Teredo, client
        0x2001_0000 << 96 | inner << 64 | 0xF7F7_F7F7,  # Teredo, server
        0x2400_CB00 << 96 | 0x5EFE << 32 | inner,  # ISATAP
        0x2400_CB00 << 96 | 0x0200_5EFE << 32 | inner,
    ):
        assert not is_public(str(IPv6Address(wrapped))), IPv6Address(wrapped)


def test_nothing_is_public_that_the_standard_library_knows_to_be_special() -> None:
    chance = random.Random(6)
    for _ in range(5000):
        address = ip_address(
            chance.getrandbits(32) if chance.random() < 0.5 else 0x2 << 124 | chance.getrandbits(124)
        )
        assert not is_public(str(address)) or (address.is_global and not address.is_multicast), address
