"""Whose address a request is from: what proxies say, how far they are believed, what anyone can invent."""

from __future__ import annotations

import random
from ipaddress import ip_address
from typing import Any

import pytest

from gateway.client_address import LOGGED_CLIENT, MAX_HOPS, ClientAddresses, read_address
from gateway.settings_load import SettingsError, load

PEER = "10.0.0.1"
PROXIES = ("10.0.0.0/8", "192.168.1.1", "2001:db8::/32")


def scope(*forwarded_for: str | bytes, peer: str | None = PEER) -> dict[str, Any]:
    """The scope of a request whose X-Forwarded-For has these lines."""
    lines = [line.encode("latin-1") if isinstance(line, str) else line for line in forwarded_for]
    headers = [(b"host", b"x"), *((b"x-forwarded-for", line) for line in lines)]
    return {"type": "http", "headers": headers, "client": None if peer is None else (peer, 4711)}


def client(addresses: ClientAddresses, *forwarded_for: str | bytes, peer: str | None = PEER) -> str | None:
    one = scope(*forwarded_for, peer=peer)
    addresses.note(one)
    assert one.get(LOGGED_CLIENT) == (one["client"] and one["client"][0])
    logged: str | None = one.get(LOGGED_CLIENT)
    return logged


@pytest.mark.parametrize(
    ("entry", "address"),
    [
        ("1.2.3.4", "1.2.3.4"),
        ("1.2.3.4:80", "1.2.3.4"),
        ("2001:DB8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("2001:db8:0:0:0:0:0:1", "2001:db8::1"),
        ("::1:80", "::1:80"),
        ("::ffff:1.2.3.4", "1.2.3.4"),
        ("[::ffff:1.2.3.4]:5", "1.2.3.4"),
        ("", None),
        ("unknown", None),
        ("_hidden", None),
        ("1.2.3", None),
        ("1.2.3.4.5", None),
        ("1.2.3.256", None),
        ("01.2.3.4", None),
        ("1.2.3.4:", None),
        ("1.2.3.4:123456", None),
        ("1.2.3.4:x", None),
        ("[1.2.3.4]", None),
        ("[::1", None),
        ("::1]", None),
        ("[::1]80", None),
        ("fe80::1%eth0", None),
        ("fe80::1%MARKER of a user", None),
        ('"[::1]"', None),
        ("1.2.3.4 5", None),
        ("1.2.3.4\n", None),
        ("1234567", None),
        ("١.٢.٣.٤", None),
        ("example.com", None),
        ("::" + "0" * 100 + "1", None),
    ],
)
def test_an_entry_is_an_address_or_nothing(entry: str, address: str | None) -> None:
    found = read_address(entry.encode())
    assert found == (None if address is None else ip_address(address))


@pytest.mark.parametrize(
    ("forwarded_for", "address"),
    [
        ([], PEER),
        ([""], PEER),
        ([" , ,"], PEER),
        (["1.2.3.4"], "1.2.3.4"),
        (["[2a00::1]:443"], "2a00::1"),
        (["6.6.6.6, 1.2.3.4"], "1.2.3.4"),  # what a client has sent stands left of what our proxy saw
        (["6.6.6.6", "1.2.3.4"], "1.2.3.4"),
        (["6.6.6.6,", ", 1.2.3.4 ,"], "1.2.3.4"),
        (["6.6.6.6, 1.2.3.4, 10.9.9.9"], "1.2.3.4"),
        (["6.6.6.6, 1.2.3.4, 10.9.9.9:80, 192.168.1.1, [2001:db8::7]"], "1.2.3.4"),
        (["1.2.3.4, 192.168.1.2"], "192.168.1.2"),
        (["1.2.3.4, ::ffff:10.9.9.9"], "1.2.3.4"),
        (["10.0.0.3, 10.0.0.2"], "10.0.0.3"),  # the client is one of ours
        (["unknown"], PEER),
        (["1.2.3.4, unknown"], PEER),
        (["1.2.3.4, unknown, 10.0.0.2"], PEER),
        (["MARKER, 1.2.3.4"], "1.2.3.4"),
        ([b"\xff\xfe"], PEER),
    ],
)
def test_the_last_address_that_no_proxy_has_is_the_clients(
    forwarded_for: list[str | bytes], address: str
) -> None:
    assert client(ClientAddresses(PROXIES), *forwarded_for) == address


@pytest.mark.parametrize("peer", ["11.0.0.1", "2001:db9::1", "::ffff:11.0.0.1", "localhost"])
def test_a_peer_that_is_no_proxy_is_not_believed(peer: str) -> None:
    assert client(ClientAddresses(PROXIES), "1.2.3.4", peer=peer) == peer


@pytest.mark.parametrize(
    "peer", ["10.255.0.1", "192.168.1.1", "2001:db8::1", "2001:db8::1%eth0", "::ffff:10.0.0.1"]
)
def test_a_peer_that_is_a_proxy_is_believed(peer: str) -> None:
    assert client(ClientAddresses(PROXIES), "1.2.3.4", peer=peer) == "1.2.3.4"


def test_nobody_is_believed_by_default() -> None:
    assert client(ClientAddresses(), "1.2.3.4", peer="127.0.0.1") == "127.0.0.1"
    assert client(ClientAddresses(), "1.2.3.4", peer=None) is None


@pytest.mark.parametrize("trusted", [("*",), ("10.0.0.1, *",)])
def test_where_everyone_is_trusted_the_first_address_counts(trusted: tuple[str, ...]) -> None:
    assert client(ClientAddresses(trusted), "6.6.6.6, 1.2.3.4", peer="9.9.9.9") == "6.6.6.6"


def test_the_peer_of_a_unix_socket_is_our_proxy() -> None:
    assert client(ClientAddresses(is_unix=True), "6.6.6.6, 1.2.3.4", peer=None) == "1.2.3.4"
    assert client(ClientAddresses(["1.2.3.0/24"], is_unix=True), "6.6.6.6, 1.2.3.4", peer=None) == "6.6.6.6"
    assert client(ClientAddresses(is_unix=True), peer=None) is None


def test_a_tcp_peer_that_is_gone_already_is_not_believed() -> None:
    assert client(ClientAddresses(PROXIES), "1.2.3.4", peer=None) is None


@pytest.mark.parametrize("num_hops", [1, MAX_HOPS - 1, MAX_HOPS, MAX_HOPS + 1, 4000])
def test_a_long_way_is_read_up_to_its_bound(num_hops: int) -> None:
    way = [f"10.0.{hop >> 8}.{hop & 255}" for hop in range(num_hops)]
    assert client(ClientAddresses(PROXIES), ", ".join(["1.2.3.4", *way])) == (
        "1.2.3.4" if num_hops < MAX_HOPS else way[-MAX_HOPS]
    )


def test_an_address_need_not_be_logged() -> None:
    one = scope("1.2.3.4")
    ClientAddresses(PROXIES, is_logged=False).note(one)
    assert LOGGED_CLIENT not in one
    assert one["client"] == ("1.2.3.4", 0)


def test_whatever_is_sent_the_client_is_the_peer_or_an_entry_that_is_an_address() -> None:
    """Seeded garbage, with and without addresses in it. What stands left of our proxy's word never counts."""
    rng = random.Random(5)
    parts = [*("1.2.3.4", "10.1.1.1", "2a00::1", "[2a00::2]:80", "unknown"), *",:[]%, ,,", "\x00", "é"]
    trusting, deaf = ClientAddresses(PROXIES), ClientAddresses()
    for number in range(1000):
        garbage = bytes(rng.randrange(256) for _ in range(rng.randrange(20)))
        mixed = "".join(rng.choice(parts) for _ in range(rng.randrange(12))).encode()
        sent = mixed if number % 2 else garbage
        entries = {str(read_address(entry.strip())) for entry in sent.split(b",")}
        assert client(trusting, sent) in entries | {PEER}
        assert client(trusting, sent, b"7.7.7.7") == "7.7.7.7"
        assert client(trusting, sent + b", 7.7.7.7, 10.3.3.3") == "7.7.7.7"
        assert client(deaf, sent) == PEER


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["127.0.0.1", "10.0.0.0/8", "::1", "2001:db8::/32", "*", "10.0.0.1,10.0.0.2 , ::1", "0.0.0.0/0"]
)
def test_proxies_are_addresses_and_networks(given: str) -> None:
    settings = load({"forwarded_allow_ips": [given]}).settings
    ClientAddresses(settings.access.forwarded_allow_ips)
    assert load({"forwarded_allow_ips": given}).settings.access.forwarded_allow_ips


@pytest.mark.parametrize(
    "bad", ["localhost", "10.0.0.1/8", "10.0.0.0/33", "1.2.3", "unix:", "[::1]", "10.0.0.*"]
)
def test_what_is_no_address_is_refused_by_name(bad: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({"forwarded_allow_ips": ["127.0.0.1", bad]})
    (problem,) = caught.value.problems
    assert problem.startswith(f"forwarded_allow_ips: {bad!r} is not allowed; ")
