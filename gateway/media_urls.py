"""Which URLs of images and sounds may be fetched at all, decided by looking at them.

Text in, a parsed URL out. What a host's name leads to is `gateway/media_addresses.py`, after the look-up. The
one parser is yarl's, and it is the parsed URL that goes to the HTTP client, never the text: two parsers that
disagree about a backslash or an `@` are how allow-lists are passed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from yarl import URL

from gateway.media_addresses import is_public

ANY: Final = "*"
MAX_URL_CHARS: Final = 8192  # signed ones have 2,000; servers take 8,000
_PORTS: Final = {"http": 80, "https": 443}
_START: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#]*)", re.ASCII | re.IGNORECASE
)
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.ASCII | re.IGNORECASE)
_AUTHORITY: Final = re.compile(r"(?:\[[0-9a-f:.]+\]|[^\[\]:@%]+)(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
# A last label that makes resolvers read the whole as an IPv4 address, in whatever base (WHATWG URL, 3.5).
_NUMBER: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
_ENTRY: Final = re.compile(r"(?P<below>\*\.)?(?P<host>[^*:/@\s]+)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)


class UrlRefused(Exception):
    """`problem` goes on after the name of the content part."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class AllowedHosts:
    """The hosts that an operator allows. Raises ValueError for an entry that is none.

    An entry is a name (`images.example.com`, that name alone), a name after `*.` (all below it, at any depth,
    not itself), a public IPv4 address, or `*` (all). It stands for the ports 80 (http) and 443 (https); with
    a port after it (`images.example.com:8443`), for that one alone.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = [_entry(each) for each in entries if each != ANY]
        self._any = ANY in entries

    def __bool__(self) -> bool:
        return self._any or bool(self._entries)

    def allows(self, url: URL) -> bool:
        """`url` comes from `checked_url`."""
        host, is_usual = url.raw_host or "", url.port == _PORTS[url.scheme]
        return (self._any and is_usual) or any(
            (host.endswith("." + name) if below else host == name)
            and (is_usual if port is None else port == url.port)
            for below, name, port in self._entries
        )


def checked_url(text: str, base: URL | None = None) -> URL:
    """The URL, in the one form that is compared and connected to. Raises `UrlRefused`.

    Only http and https, with a host that is a plain name or a public address in its usual notation; no user
    name, no password, no fragment. `base`: the URL that a redirect to `text` came from.
    """
    url = _parsed(text if base is None else _joined(base, text))
    if base is not None and (base.scheme, url.scheme) == ("https", "http"):
        raise UrlRefused("was redirected from https to http, which is not followed.")
    host = (url.raw_host or "").removesuffix(".")
    if ":" not in host and not _NAME.fullmatch(host):
        raise UrlRefused("is a URL without a valid host.")
    if (":" in host or _NUMBER.fullmatch(host)) and not is_public(host):
        raise UrlRefused("is at an address that is not public.")
    url = url.with_fragment(None)
    return url if host == url.raw_host else url.with_host(host)


def shown_host(url: URL) -> str:
    """The host for a message: a name, never an address, which a redirect may have told."""
    host = url.raw_host or ""
    return "an IP address" if ":" in host or _NUMBER.fullmatch(host) else f"the host {host!r}"


def _joined(base: URL, location: str) -> str:
    """The whole URL. Only a path is joined: of `https:host` and `///host` each parser makes another thing."""
    _check_characters(location)
    if _SCHEME.match(location):
        return location
    if location.startswith("//"):
        return f"{base.scheme}:{location}"
    try:
        return str(base.join(URL(location)))
    except ValueError:
        raise UrlRefused("was redirected to what is no URL.") from None


def _parsed(text: str) -> URL:
    _check_characters(text)
    start = _START.match(text)
    if start is None:
        raise UrlRefused("is no URL: it must begin with http://, https:// or data:")
    if start["scheme"].lower() not in _PORTS:
        raise UrlRefused("is a URL of a scheme other than http, https and data.")
    if "@" in start["authority"]:
        raise UrlRefused("is a URL with a user name or a password, which are not sent.")
    try:
        url = URL(text)
        port_is_clear = bool(_AUTHORITY.fullmatch(start["authority"])) and url.port
    except ValueError:
        port_is_clear = None
    if not port_is_clear:
        raise UrlRefused("is a URL without a valid host.")
    return url


def _check_characters(text: str) -> None:
    if len(text) > MAX_URL_CHARS:
        raise UrlRefused(f"is a URL of {len(text)} characters; the limit is {MAX_URL_CHARS}.")
    if not text.isprintable() or " " in text or "\\" in text:
        raise UrlRefused("is a URL with a space, a backslash or a control character.")


def _entry(text: str) -> tuple[bool, str, int | None]:
    """Whether only what is below the name, the name in its compared form, and the port if there is one."""
    found = _ENTRY.fullmatch(text)
    try:
        name = URL.build(scheme="https", host=found["host"]).raw_host or "" if found else ""
    except ValueError:
        name = ""
    name = name.removesuffix(".")
    port = int(found["port"]) if found and found["port"] else None
    if not _NAME.fullmatch(name) or not (port is None or 0 < port < 1 << 16):
        raise ValueError(f"{text[:80]!r} is no host; write images.example.com, *.example.com or {ANY}")
    if _NUMBER.fullmatch(name) and (found is None or found["below"] or not is_public(name)):
        raise ValueError(f"{text[:80]!r} is no public address")
    return bool(found and found["below"]), name, port
