import json
import re
import ssl

import pytest

from gateway.bench.target import CHAT, COMPLETIONS, BodyMaker, parse_target

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://h:8000", "h", 8000, "/v1/chat/completions"),
        ("http://h:8000/", "h", 8000, "/v1/chat/completions"),
        ("http://h:8000/v1", "h", 8000, "/v1/chat/completions"),
        ("http://h:8000/v1/chat/completions", "h", 8000, "/v1/chat/completions"),
        ("http://h:8000/team/a/v1/", "h", 8000, "/team/a/v1/chat/completions"),
        ("http://h/team", "h", 80, "/team/v1/chat/completions"),
        ("https://h", "h", 443, "/v1/chat/completions"),
        ("http://[::1]:81", "::1", 81, "/v1/chat/completions"),
    ],
)
def test_a_base_url_may_have_a_prefix_and_end_in_v1(url: str, host: str, port: int, path: str) -> None:
    target = parse_target(url, CHAT)
    assert (target.origin.host, target.origin.port, target.path) == (host, port, path)
    assert target.url + target.path == url.rstrip("/").partition("/v1")[0] + "/v1/chat/completions"


def test_a_unix_socket_is_a_target() -> None:
    target = parse_target("unix:/run/h.sock", COMPLETIONS)
    assert (target.origin.uds, target.path) == ("/run/h.sock", "/v1/completions")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "h:8000",
            "ftp://h",
            "http://",
            "http://h:x",
            "http://h:0",
            "http://h:99999",
            "http://[::1",
            "unix:",
        ),
        *("http://h\u00e9", "http://a b", "http://h/a b", "http://h/\x1b", ""),
    ],
)
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"URL is {url!r}; it must be http://HOST:PORT, ")):
        parse_target(url, CHAT)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:s3cret@h:1/v1", "http://...@h:1/v1"),
        ("http://user:s3/cret@h", "http://...@h"),
        ("user:s3cret@h", "...@h"),
        ("http://u:p@s3cret@h:x", "http://...@h:x"),
        ("http://h/v1?key=s3cret", "http://h/v1?..."),
        ("http://h/v1#s3cret", "http://h/v1?..."),
        ("http://h/?a=\ns3cret", "http://h/?..."),
    ],
)
def test_what_is_secret_in_an_address_is_not_told(url: str, shown: str) -> None:
    told = (
        f"URL is {shown!r}; it must be http://HOST:PORT, https://HOST:PORT or unix:PATH; a key is given with"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_target(url, CHAT)


def test_certificates_are_checked_unless_told_otherwise() -> None:
    checked, unchecked = (parse_target("https://h", CHAT, (), flag).origin.tls for flag in (False, True))
    assert checked is not None
    assert checked.verify_mode is ssl.CERT_REQUIRED
    assert unchecked is not None
    assert (unchecked.verify_mode, unchecked.check_hostname) == (ssl.CERT_NONE, False)


def test_requests_carry_the_given_headers() -> None:
    target = parse_target("http://h/p", CHAT, ((b"x-a", b"b"),))
    get, post = target.get("/v1/models"), target.post(b"{}")
    assert (get.method, get.target, get.body) == ("GET", "/p/v1/models", b"")
    assert (post.method, post.target, post.body) == ("POST", "/p/v1/chat/completions", b"{}")
    assert dict(get.headers)[b"x-a"] == dict(post.headers)[b"x-a"] == b"b"
    assert dict(post.headers)[b"content-type"] == b"application/json"


def test_a_body_asks_for_a_stream_with_usage_of_exactly_so_many_tokens() -> None:
    assert json.loads(BodyMaker("m").body(MESSAGES, 9)) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": MESSAGES,
        "max_tokens": 9,
        "ignore_eos": True,
    }


def test_a_body_of_completions_has_one_prompt() -> None:
    body = json.loads(BodyMaker("m", COMPLETIONS, ignores_eos=False, asks_timings=True).body(MESSAGES, None))
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True, "include_timings": True},
        "prompt": "s\n\nu",
    }


def test_extra_fields_go_over_all_others() -> None:
    body = json.loads(BodyMaker("m", extra={"max_tokens": 1, "top_k": 2}).body(MESSAGES, 9))
    assert (body["max_tokens"], body["top_k"]) == (1, 2)
