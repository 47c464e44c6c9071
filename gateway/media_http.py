"""An HTTP client that connects to public addresses only, and to exactly those that it has checked.

Looking names up, connecting and the head of a reply are here. Which hosts, how many redirects, how many bytes
and how much time: `gateway/media_fetch.py`, which imports this module only when anything may be fetched:
aiohttp costs a process 0.12 s and 14 MB.

A name that answers with a public address when it is checked and with another when it is connected to (DNS
rebinding) finds no second look-up here: the client connects to what `_Checked.resolve` returned.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from gateway.media_urls import shown_host
from pipeline.media_errors import MediaNotAllowed, MediaUnreachable

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_LOOKUPS: Final = 8  # at the same time; a name server that never answers holds one for some seconds
MAX_ADDRESSES: Final = 4  # of one name that are tried
_DISTINCT: Final = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class NotPublic(Exception):
    """The name has no address, or one that is not public. One error for both: two would tell inner names."""


class PublicHttp:
    """GET requests to public hosts, each on a connection of its own, without cookies, proxies or redirects.

    `resolve(host, port)` gives a name's addresses. `tls`: in place of the system's authorities.
    """

    def __init__(
        self,
        is_allowed_address: Callable[[str], bool],
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._names = _SystemNames()
        self._checked = _Checked(resolve or self._names.resolve, is_allowed_address)
        self._tls: ssl.SSLContext | bool = tls or True
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def get(self, url: URL, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply when its head is there; its connection is closed with the block. Raises `MediaError`."""
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._opened().get(url, allow_redirects=False)
            yield response
        except NotPublic:
            raise MediaNotAllowed(path, f"is at {shown_host(url)}, which has no public address.") from None
        except (aiohttp.ClientConnectorError, aiohttp.ClientSSLError):
            raise MediaUnreachable(
                path, f"could not be fetched: no connection to {shown_host(url)}."
            ) from None
        except (aiohttp.ClientError, OSError):
            raise MediaUnreachable(
                path, f"could not be fetched: the reply of {shown_host(url)} broke off or is not HTTP."
            ) from None
        finally:
            if response is not None:
                response.close()

    async def close(self) -> None:
        self._names.close()
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        """The session; made here, since it belongs to the loop that runs."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=self._checked,
                use_dns_cache=False,
                socket_factory=self._checked.new_socket,
                ssl=self._tls,
                force_close=True,
                limit=0,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": f"headrace/{version('headrace')}", "Accept-Encoding": "identity"},
                auto_decompress=False,  # else 16 KB become 16 MB before anybody counts them
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
            )
        return self._session


class _Checked(AbstractResolver):
    """Looks names up, and lets through only what is public: once for the name, once more for each socket."""

    def __init__(self, resolve: Resolve, is_allowed_address: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self._is_allowed_address = is_allowed_address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """All addresses of a name, of either family; one that is not public refuses them all."""
        try:
            addresses = await self._resolve(host, port)
        except OSError:
            raise NotPublic from None
        if not addresses or not all(map(self._is_allowed_address, addresses)):
            raise NotPublic
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=_DISTINCT,
            )
            for address in addresses[:MAX_ADDRESSES]
        ]

    def new_socket(self, address: tuple[Any, ...]) -> socket.socket:
        """A socket for an answer of `getaddrinfo`: the last look before a connection, whatever led here."""
        family, kind, protocol, _, (host, *_) = address
        if not self._is_allowed_address(host):
            raise PermissionError("not a public address")
        return socket.socket(family, kind, protocol)

    async def close(self) -> None:
        pass


class _SystemNames:
    """The system's look-ups, in threads of their own: slow ones must not fill the loop's."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "media-names")

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port)
        return list(dict.fromkeys(found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
