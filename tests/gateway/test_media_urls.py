from __future__ import annotations

import random
import re
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

import pytest
from yarl import URL

from gateway.media_urls import MAX_URL_CHARS, AllowedHosts, UrlRefused, checked_url, shown_host

INNER = ("127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.10", "172.16.5.4", "100.64.0.1", "0.0.0.0")
INNER_V6 = (
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "2001::1",
)


def spellings(address: str) -> Iterator[str]:
    """Ways to write an IPv4 address as a host that some resolver or parser takes for it."""
    number, (a, b, c, d) = int(IPv4Address(address)), map(int, address.split("."))
    yield from (
        address,
        address + ".",
        str(number),
        hex(number),
        hex(number).upper(),
        oct(number).replace("o", ""),
    )
    yield from (
        f"{a}.{number & 0xFFFFFF}",
        f"{a}.{b}.{number & 0xFFFF}",
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}",
        f"{a}.{b}.{c}.{d:#x}",
    )
    yield from (
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"{a:03}.{b:03}.{c:03}.{d:03}",
        f"{a:#x}.{b}.0{c:o}.{d}",
        f"0{a:o}.{number & 0xFFFFFF}",
    )
    yield from (
        str(number + (1 << 32)),
        f"{a + 256}.{b}.{c}.{d}",
        f"0x{number:020x}",
        f"{address}.0",
        f"00{number:o}",
    )
    yield from (
        address.translate({ord("0") + i: 0xFF10 + i for i in range(10)}),
        address.replace(".", "\u3002"),
    )
    yield from (
        address.replace(".", "\uff0e"),
        address.replace(".", "%2e"),
        address.replace("1", "\u2460"),
        address + "%00.test",
    )
    yield from (
        f"[::ffff:{address}]",
        f"[::{address}]",
        f"[64:ff9b::{address}]",
        f"[0:0:0:0:0:ffff:{address}]",
        f"[{address}]",
    )
    for wrapped in (
        0xFFFF << 32 | number,
        0x2002 << 112 | number << 80,
        0x2001 << 112 | (number ^ 0xFFFFFFFF),
    ):
        yield from (f"[{IPv6Address(wrapped)}]", f"[{IPv6Address(wrapped).exploded.upper()}]")
    yield from (
        f"user@{address}",
        f"user:word@{address}",
        f"@{address}",
        f"[::ffff:{address}%25eth0]",
        f"{address}\u3000",
        f"{address}\u00ad",
    )


REFUSED_HOSTS = [each for address in INNER for each in spellings(address)]
REFUSED_HOSTS += [f"[{host}{zone}]" for host in INNER_V6 for zone in ("", "%25eth0", "%1")]

REFUSED_TEXTS = (
    *(
        "",
        "x",
        "/etc/passwd",
        "//a.test/x",
        "http:a.test",
        "http:/a.test",
        "http:///a.test",
        "http://",
        "http://:80/",
    ),
    *(
        "file:///etc/passwd",
        "ftp://a.test/x",
        "gopher://a.test/",
        "ws://a.test/",
        "javascript://a.test/",
        "blob:http://a.test/",
    ),
    *(
        "http+unix://a.test/",
        "jar:http://a.test/!/",
        "HTTPX://a.test/",
        "http//a.test",
        "h\u0442tp://a.test/",
        "data:,x",
    ),
    *(
        " http://a.test/",
        "http://a.test/ ",
        "http://a.test/a b",
        "http://a.test/\t",
        "http://a.test/\r\nHost: b",
        "http://a.test/\0",
    ),
    *(
        "http://a.te\nst/",
        "\x01http://a.test/",
        "http://a.test\\@b.test/",
        "http://a.test\\b",
        "http:\\\\a.test/",
        "http://a.test/\\",
    ),
    *(
        "http://a.test/\x7f",
        "http://a.test/\u200b",
        "http://a.test/\u2028",
        "http://a.test/\u202e",
        "http://a.test/\ud800",
        "http://a.test/\u3000",
    ),
    *(
        "http://u@a.test/",
        "http://u:p@a.test/",
        "http://@a.test/",
        "http://:@a.test/",
        "http://u:p@",
        "http://a.test@b.test/",
        "http://a@b@c.test/",
    ),
    *(
        "http://a.test:/",
        "http://a.test:x/",
        "http://a.test:-1/",
        "http://a.test:+80/",
        "http://a.test:8_0/",
        "http://a.test:８０/",
        "http://a.test:0/",
    ),
    *(
        "http://a.test:65536/",
        "http://a.test:080000/",
        "http://a.test:80:80/",
        "http://a.test: 80/",
        "http://a.test:99999999999999999999/",
    ),
    *(
        "http://a..test/",
        "http://.a.test/",
        "http://a.test../",
        "http://./",
        "http://-a.test/",
        "http://a-.test/",
        "http://*/",
        "http://*.test/",
    ),
    *(
        "http://a%2etest/",
        "http://%61.test/",
        "http://a.test%00/",
        "http://a.test%2f@b.test/",
        "http://a.test;b/",
        "http://a.test,b/",
        "http://a!/",
    ),
    *(
        "http://[::1/",
        "http://::1/",
        "http://[::1]x/",
        "http://[::1]:x/",
        "http://x[::1]/",
        "http://[a.test]/",
        "http://[v1.x]/",
        "http://[]/",
    ),
    *(
        "http://" + "a" * 64 + ".test/",
        "http://" + "a." * 127 + "test/",
        "http://a.test/" + "x" * MAX_URL_CHARS,
        "http://\ud800.test/",
    ),
    *(
        "http://a.test&@127.0.0.1/",
        "http://127.0.0.1#@a.test/",
        "http://127.0.0.1?@a.test/",
        "http://127.0.0.1/@a.test",
        "http://1.2.3/",
    ),
)


def test_no_spelling_of_an_inner_address_is_let_through() -> None:
    shapes = ("http://{}/", "HTTPS://{}:443/x?y#z", "https://{}")
    spelled = [shape.format(host) for host in REFUSED_HOSTS for shape in shapes]
    assert [text for text in spelled if not is_refused(text)] == []


def is_refused(text: str) -> bool:
    try:
        checked_url(text)
    except UrlRefused:
        return True
    return False


@pytest.mark.parametrize("text", REFUSED_TEXTS, ids=lambda text: ascii(text)[:40])
def test_what_is_no_plain_url_is_refused(text: str) -> None:
    with pytest.raises(UrlRefused) as caught:
        checked_url(text)
    assert "a.test" not in caught.value.problem  # no message tells the URL
    assert len(caught.value.problem) < 100


def test_there_are_hundreds_of_refused_spellings() -> None:
    assert len({*REFUSED_HOSTS, *REFUSED_TEXTS}) > 300


@pytest.mark.parametrize(
    ("text", "compared"),
    [
        ("http://A.Test", "http://a.test"),
        ("HTTPS://a.test.:443/x", "https://a.test/x"),
        ("http://a.test./x?a=%2B&b=c+d#e", "http://a.test/x?a=%2B&b=c+d"),
        ("http://b\u00fccher.test/\u00fc", "http://xn--bcher-kva.test/%C3%BC"),
        ("https://a_b.my-bucket.test:8443/", "https://a_b.my-bucket.test:8443/"),
        ("http://8.8.8.8/x", "http://8.8.8.8/x"),
        ("http://8.8.8.8./x", "http://8.8.8.8/x"),
        ("http://[2400:CB00:0::1]:81/x", "http://[2400:cb00::1]:81/x"),
        ("http://\uff41.test/", "http://a.test/"),
        ("http://a.test?x=http://127.0.0.1/", "http://a.test/?x=http://127.0.0.1/"),
        ("http://1.2.3.4.test/@b", "http://1.2.3.4.test/@b"),
    ],
)
def test_a_good_url_is_compared_in_one_form(text: str, compared: str) -> None:
    assert str(checked_url(text)) == compared


@pytest.mark.parametrize(
    ("entry", "yes", "no"),
    [
        (
            "a.test",
            ("http://a.test", "https://A.TEST.", "https://a.test:443/"),
            (
                "http://b.a.test",
                "http://xa.test",
                "http://a.test.b",
                "http://a.test:81",
                "http://a.test:443",
                "https://a.test:80",
            ),
        ),
        (
            "*.a.test",
            ("http://b.a.test", "https://c.b.a.test"),
            ("http://a.test", "http://xa.test", "http://b.a.test.c", "http://b.a.test:8080"),
        ),
        (
            "A.Test.:8443",
            ("https://a.test:8443", "http://a.test:8443"),
            ("https://a.test", "http://a.test", "https://b.a.test:8443"),
        ),
        (
            "b\u00fccher.test",
            ("http://b\u00dccher.test", "http://xn--bcher-kva.test"),
            ("http://bucher.test",),
        ),
        ("8.8.8.8", ("http://8.8.8.8",), ("http://8.8.4.4", "http://8.8.8.8:22")),
        (
            "*",
            ("http://a.test", "https://b.test", "http://8.8.8.8", "https://[2400:cb00::1]"),
            ("http://a.test:22", "http://[2400:cb00::1]:6379"),
        ),
    ],
)
def test_an_entry_allows_its_own_hosts_and_ports(
    entry: str, yes: tuple[str, ...], no: tuple[str, ...]
) -> None:
    hosts = AllowedHosts([entry])
    assert all(hosts.allows(checked_url(text)) for text in yes)
    assert not [text for text in no if hosts.allows(checked_url(text))]


def test_without_entries_nothing_is_allowed() -> None:
    assert not AllowedHosts([])
    assert not AllowedHosts([]).allows(checked_url("http://a.test"))
    assert AllowedHosts(["a.test"])
    assert AllowedHosts(["*"])


@pytest.mark.parametrize(
    "entry",
    [
        *(
            "",
            " ",
            "http://a.test",
            "a.test/",
            "a b",
            "*a.test",
            "a.*.test",
            "*.*",
            "*.",
            "a..test",
            "a.test:0",
            "a.test:65536",
        ),
        *(
            "a.test:",
            "u@a.test",
            "127.0.0.1",
            "10.0.0.1",
            "2130706433",
            "*.8.8.8.8",
            "127.1",
            "0x7f.1",
            "[::1]",
            "a" * 64,
            "*:80",
        ),
    ],
)
def test_an_entry_that_is_no_public_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        AllowedHosts([entry])


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/y", "https://a.test/y"),
        ("y?z", "https://a.test/x/y?z"),
        ("?z", "https://a.test/x/?z"),
        ("../../../y", "https://a.test/y"),
        ("//b.test/y", "https://b.test/y"),
        ("/x//b.test/", "https://a.test/x//b.test/"),
        ("./b:c", "https://a.test/x/b:c"),
        ("https://B.test./y#z", "https://b.test/y"),
        ("https://a.test:8443/", "https://a.test:8443/"),
    ],
)
def test_a_redirect_leads_to_what_its_location_says(location: str, target: str) -> None:
    assert str(checked_url(location, URL("https://a.test/x/"))) == target


@pytest.mark.parametrize(
    "location",
    [
        *(
            "http://a.test/",
            "file:///etc/passwd",
            "//127.0.0.1/",
            "https://169.254.169.254/",
            "https://[::1]/",
        ),
        *("//u@b.test/", "\\\\127.0.0.1\\", "/\\127.0.0.1", "/a b", "/\x00", "//2130706433/", "http:x"),
        *("https:127.0.0.1", "https:/b.test", "https:///b.test", "///127.0.0.1/", "https://", "//", "b:c"),
        *("javascript:x", "data:image/png;base64,AAAA", "//b.test:0/", "//b.test:-1/", "//[::1"),
        *("/" + "x" * MAX_URL_CHARS, "//b\ud800.test/"),
    ],
)
def test_a_redirect_is_checked_like_a_url(location: str) -> None:
    with pytest.raises(UrlRefused):
        checked_url(location, URL("https://a.test/x/"))


def test_a_redirect_to_https_is_fine() -> None:
    assert str(checked_url("https://a.test/", URL("http://a.test/"))) == "https://a.test/"


def test_a_message_names_hosts_and_no_addresses() -> None:
    assert shown_host(URL("http://a.test:81/x")) == "the host 'a.test'"
    assert shown_host(URL("http://8.8.8.8/x")) == "an IP address"
    assert shown_host(URL("http://[2400:cb00::1]/x")) == "an IP address"


def test_what_passes_is_a_plain_host_whatever_was_sent() -> None:
    """Seeded pieces of URLs in any order: refused, or a URL whose host and port are plain."""
    chance = random.Random(6)
    starts = ("http://", "https://", "http://a.test", "HTTP://A.", "https://8.8.8.8", "http://[2400:cb00::1]")
    words = ("a.test", "127.0.0.1", "[::1]", ":80", "0x7f", "//", "u:p", "%2f", "http://", "\u3002", "x", "1")
    pieces = (*words, *"@/\\?#%.[]:-")
    num_passed = 0
    for _ in range(3000):
        text = chance.choice(starts) + "".join(chance.choices(pieces, k=chance.randint(0, 5)))
        try:
            url = checked_url(text)
        except UrlRefused:
            continue
        num_passed += 1
        assert url.raw_host is not None
        assert re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:]+", url.raw_host), text
        assert (url.raw_user, url.raw_password, url.raw_fragment) == (None, None, ""), text
        assert str(checked_url(str(url))) == str(url)
        assert "127.0.0.1" not in url.raw_host or not url.raw_host.endswith("1"), text
    assert num_passed > 500
