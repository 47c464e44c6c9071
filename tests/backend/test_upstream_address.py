"""What names an upstream server, and what does not."""

from __future__ import annotations

import ssl

import pytest

from backend.address import AddressError
from backend.upstream_address import parse_upstream


@pytest.mark.parametrize(
    ("text", "kind", "host", "port", "prefix"),
    [
        ("vllm+http://gpu1:8000", "vllm", "gpu1", 8000, ""),
        ("vllm+http://gpu1:8000/", "vllm", "gpu1", 8000, ""),
        ("openai+http://10.0.0.1", "openai", "10.0.0.1", 80, ""),
        ("openai+http://api.example/team/v1/", "openai", "api.example", 80, "/team"),
        ("openai+http://api.example/v1", "openai", "api.example", 80, ""),
        ("sglang+http://[::1]:30000/a/b", "sglang", "::1", 30000, "/a/b"),
    ],
)
def test_address_is_read(text: str, kind: str, host: str, port: int, prefix: str) -> None:
    address = parse_upstream(text)
    assert (address.kind, address.origin.host, address.origin.port) == (kind, host, port)
    assert (address.prefix, address.origin.tls) == (prefix, None)
    assert parse_upstream(str(address)) == address


def test_https_has_the_systems_authorities_unless_others_are_given() -> None:
    own = ssl.create_default_context()
    assert parse_upstream("openai+https://api.example", own).origin.tls is own
    address = parse_upstream("openai+https://api.example")
    assert address.origin.tls is not None
    assert address.origin.tls.verify_mode is ssl.CERT_REQUIRED
    assert str(address) == "openai+https://api.example:443"
    assert parse_upstream("openai+http://api.example", own).origin.tls is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://gpu1:8000", "no such kind"),
        ("tgi+http://gpu1:8000", "no such kind"),
        ("vllm+ftp://gpu1:8000", "unknown scheme 'ftp'"),
        ("vllm+gpu1:8000", "unknown scheme"),
        ("vllm+http://", "no host"),
        ("vllm+http://gpü1", "no host, or one that is no plain name"),
        ("vllm+http://a b", "no plain name"),
        ("vllm+http://a\\b", "no plain name"),
        ("vllm+http://[::g]", "'::g'"),
        ("vllm+http://gpu1:x", "Port could not be cast"),
        ("vllm+http://gpu1:0", "port 0"),
        ("vllm+http://gpu1:99999", "out of range"),
        ("vllm+http://gpu1/a b", "no plain one"),
        *(
            (f"vllm+http://gpu1/{path}", "no plain one")
            for path in (
                "..",
                "../x",
                "x/../y",
                "./x",
                "%2e%2e/x",
                ".%2E",
                "x/..%2fy",
                "a//b",
                "%zz",
                "a%0ab",
            )
        ),
    ],
)
def test_bad_address_is_named_with_its_fault(text: str, words: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_upstream(text)
    assert repr(text) in str(caught.value)
    assert words in str(caught.value)


def test_key_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(AddressError, match="upstream-api-key") as caught:
        parse_upstream("openai+http://user:hunter2@api.example")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "openai+http://user:PW-7@h:99999",
        "openai+http://user:PW-7@h:8000",
        "openai+http://user:PW-7#x@h:8000",
        "openai+http://user:PW-7/x@h",
        "user:PW-7@vllm+http://h",
        "PW-7@",
        "openai+http://h:8000?key=PW-7",
        "openai+http://h:PW-7?x",
        "openai+http://h:8000/v1#PW-7",
        "openai+ftp://h:8000#PW-7",
        "tgi+http://h?PW-7",
    ],
)
def test_what_may_be_a_secret_is_never_shown(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_upstream(text)
    assert "PW-7" not in f"{caught.value}{caught.value.__cause__}"
    assert "bad upstream" in str(caught.value)


@pytest.mark.parametrize("character", ["\n", "\r", "\t", "\x00", "\x7f", "\u2028"])
def test_control_characters_are_refused_wherever_they_are(character: str) -> None:
    text = "vllm+http://gpu1/v1/"
    for place in range(1, len(text)):
        with pytest.raises(AddressError) as caught:
            parse_upstream(text[:place] + character + text[place:])
        assert character not in str(caught.value), place
