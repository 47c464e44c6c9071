"""Fetching the images and sounds that requests name by URL: from whom, how much and how long.

Which URLs are good is `gateway/media_urls.py`, the connections are `gateway/media_http.py`, and what came is
looked at in `gateway/media.py`. A server that fetches what strangers name is a way into the network that it
stands in; so it fetches nothing unless the operator names hosts, and from these only from public addresses,
checked for the URL, for the answer of its name's look-up and for each redirect.

No message tells a URL (it may hold a secret) or an address (the name's look-up may have told it).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from yarl import URL

from gateway.media_addresses import is_public
from gateway.media_urls import AllowedHosts, UrlRefused, checked_url, shown_host
from pipeline.media_errors import MediaBusy, MediaNotAllowed, MediaTimeout, MediaTooLarge, MediaUnreachable

if TYPE_CHECKING:
    import aiohttp

    from gateway.media_http import PublicHttp

_REDIRECTS: Final = (301, 302, 303, 307, 308)
_UNCHANGED: Final = ("", "identity")


class MediaFetcher:
    """Fetches files from the hosts that the operator allows (`media_urls.AllowedHosts`).

    `limit_s`: for one file from the wish to its last byte, waiting for one of `max_fetches` places included.
    `resolve(host, port)`: the addresses of a name. Raises ValueError for a host that is none.
    """

    def __init__(
        self,
        allowed_domains: Sequence[str],
        limit_s: float = 10.0,
        max_redirects: int = 3,
        max_fetches: int = 32,
        *,
        resolve: Callable[[str, int], Awaitable[Sequence[str]]] | None = None,
        is_allowed_address: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = AllowedHosts(allowed_domains)
        self._limit_s = limit_s
        self._max_redirects = max_redirects
        self._max_fetches = max_fetches
        self._places = asyncio.Semaphore(max_fetches)
        self._http: PublicHttp | None = None
        if self._hosts:
            from gateway.media_http import PublicHttp

            self._http = PublicHttp(is_allowed_address, resolve, tls)

    async def fetch(self, url: str, path: str, max_bytes: int) -> bytes:
        """The file. `path` is the content part, for errors; raises `MediaError` or `MediaBusy`."""
        http, target = self.check(url, path)
        has_place = False
        try:
            async with asyncio.timeout(self._limit_s), self._places:
                has_place = True
                return await self._followed(http, target, path, max_bytes)
        except TimeoutError:
            raise MediaTimeout(path, self._limit_s) if has_place else MediaBusy(self._max_fetches) from None

    def check(self, url: str, path: str) -> tuple[PublicHttp, URL]:
        """Raises `MediaNotAllowed` for what is known not to be fetched without asking anybody."""
        if self._http is None:
            raise MediaNotAllowed(
                path,
                "is a URL, and this server fetches none (allowed_media_domains): send the data (data:…).",
            )
        return self._http, self._allowed(url, path)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _followed(self, http: PublicHttp, url: URL, path: str, max_bytes: int) -> bytes:
        for _ in range(self._max_redirects + 1):
            async with http.get(url, path) as reply:
                location = reply.headers.get("Location")
                if reply.status not in _REDIRECTS or location is None:
                    return await _body(reply, url, path, max_bytes)
            url = self._allowed(location, path, url)
        raise MediaUnreachable(path, f"was redirected more than {self._max_redirects} times.")

    def _allowed(self, text: str, path: str, base: URL | None = None) -> URL:
        try:
            url = checked_url(text, base)
        except UrlRefused as refusal:
            raise MediaNotAllowed(path, refusal.problem) from None
        if not self._hosts.allows(url):
            raise MediaNotAllowed(path, f"is at {shown_host(url)}, which this server does not fetch from.")
        return url


async def _body(reply: aiohttp.ClientResponse, url: URL, path: str, max_bytes: int) -> bytes:
    if reply.status != 200:
        raise MediaUnreachable(path, f"could not be fetched: {shown_host(url)} answered {reply.status}.")
    if reply.headers.get("Content-Encoding", "").lower() not in _UNCHANGED:
        raise MediaUnreachable(path, f"could not be fetched: {shown_host(url)} sends it compressed, unasked.")
    if (reply.content_length or 0) > max_bytes:
        raise MediaTooLarge(path, reply.content_length or 0, max_bytes)
    body = bytearray()
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise MediaTooLarge(path, len(body), max_bytes, is_least=True)
    return bytes(body)
