from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest

from gateway.media import MediaLoader
from gateway.media_addresses import is_public
from gateway.media_fetch import MediaFetcher
from gateway.media_http import PublicHttp
from gateway.settings_media import Media
from pipeline.media_errors import (
    BadMedia,
    MediaBusy,
    MediaError,
    MediaNotAllowed,
    MediaTimeout,
    MediaTooLarge,
    MediaUnreachable,
)
from pipeline.values import MediaRef
from tests.components import need
from tests.gateway.media_files import data_uri, image
from tests.tcp_server import listening

PATH = "messages[0].content[1]"
SERVER = "127.0.0.1"
OTHER = "127.0.0.2"  # as reachable, but not counted as public
FILE = bytes(range(256)) * 300
INNER = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
    *("198.18.0.1", "192.0.2.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
    *("::1", "::", "fe80::1", "fe80::1%lo", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1", "2002:7f00:1::"),
    *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2001:0:808:808::1", "2400:cb00::5efe:7f00:1"),
)

Answer = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Site:
    """A web server on loopback that answers each path with given bytes, or plays what a function does."""

    answers: dict[str, Answer] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)  # of the requests that came
    port: int = 0
    num_open: int = 0
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.all_closed.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.all_closed.clear()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            self.was_asked.set()
            answer = self.answers[head.split()[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        writer.close()
        self.num_open -= 1
        if not self.num_open:
            self.all_closed.set()

    def url(self, path: str, host: str = "good.test") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with served() as site:
        yield site


@contextlib.asynccontextmanager
async def served(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    site = Site()
    async with listening(site.serve, host=SERVER, tls=tls) as first:
        site.port = first.port
        async with listening(site.serve, host=OTHER, port=site.port, tls=tls):
            yield site
            await asyncio.wait_for(site.all_closed.wait(), 5)


def ok(body: bytes, *headers: str) -> bytes:
    head = ("HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers)
    return "".join(f"{line}\r\n" for line in (*head, "")).encode() + body


def to(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


async def until_closed(reader: asyncio.StreamReader, _writer: object = None) -> None:
    await reader.read()


@dataclass
class Names:
    """A name server in memory: each look-up of a name gives its next answer, and the last again and again."""

    answers: dict[str, list[Sequence[str]]]
    asked: list[str] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        answers = self.answers[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def fetcher(
    site: Site, limit_s: float = 5.0, max_redirects: int = 3, max_fetches: int = 4, **names: object
) -> MediaFetcher:
    """Knows `good.test` as the site's name, and takes the site's address alone of loopback for public."""
    known = Names({"good.test": [[SERVER]], **{f"{name}.test": each for name, each in names.items()}})  # type: ignore[dict-item]
    hosts = [f"{host}:{site.port}" for host in known.answers]
    return MediaFetcher(
        hosts, limit_s, max_redirects, max_fetches, resolve=known.resolve, is_allowed_address=site_or_public
    )


def site_or_public(address: str) -> bool:
    return address == SERVER or is_public(address)


async def fetched(fetcher: MediaFetcher, url: str, max_bytes: int = 1 << 20) -> bytes:
    try:
        return await fetcher.fetch(url, PATH, max_bytes)
    finally:
        await fetcher.close()


async def refused(fetcher: MediaFetcher, url: str, kind: type[MediaError], max_bytes: int = 1 << 20) -> str:
    """The message; the URL's secret and every address stay out of it."""
    with pytest.raises(kind) as caught:
        await fetched(fetcher, url, max_bytes)
    assert type(caught.value) is kind
    assert caught.value.param == PATH
    message = caught.value.message
    assert PATH in message
    assert not [
        secret
        for secret in ("secret", *(each for each in INNER if len(each) > 2), OTHER)
        if secret in message
    ]
    return message


async def test_a_file_comes_as_it_is(site: Site) -> None:
    site.answers["/a.png?secret=%2B"] = ok(FILE, "Set-Cookie: a=b")
    assert await fetched(fetcher(site), site.url("/a.png?secret=%2B#x")) == FILE
    head = site.heads[0].lower()
    assert f"host: good.test:{site.port}\r\n" in head
    assert f"user-agent: headrace/{version('headrace')}\r\n" in head
    assert "accept-encoding: identity\r\n" in head
    assert not [each for each in ("cookie", "authorization", "referer", "secret=+") if each in head]


async def test_a_fetched_image_is_loaded_like_one_in_the_request(site: Site) -> None:
    site.answers["/a"] = to("/b.png")
    site.answers["/b.png"] = ok(image("png"), "Content-Type: text/html")
    site.answers["/c.png"] = ok(FILE, "Content-Type: image/png")
    loader = MediaLoader(fetcher(site))
    medium, own = await loader.load(
        [MediaRef("image", site.url("/a"), PATH), MediaRef("image", data_uri(image("png")), PATH)]
    )
    assert medium == own
    with pytest.raises(BadMedia, match="no image"):
        await loader.load([MediaRef("image", site.url("/c.png"), PATH)])
    await loader.close()


async def test_no_cookie_and_no_connection_is_kept_for_the_next_fetch(site: Site) -> None:
    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ok(FILE, "Set-Cookie: a=b"))
        await until_closed(reader)

    site.answers["/"] = stay
    fetching = fetcher(site)
    for _ in range(2):
        assert await fetching.fetch(site.url("/"), PATH, 1 << 20) == FILE
        await asyncio.wait_for(site.all_closed.wait(), 5)
    await fetching.close()
    assert len(site.heads) == 2
    assert "cookie" not in site.heads[1].lower()


async def test_nothing_is_fetched_unless_hosts_are_named(site: Site) -> None:
    message = await refused(MediaFetcher(Media().allowed_media_domains), site.url("/secret"), MediaNotAllowed)
    assert "fetches none" in message
    assert not site.heads


def test_who_fetches_nothing_does_not_load_the_client() -> None:
    code = "import sys, gateway.media_fetch as m; m.MediaFetcher(()); print('aiohttp' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


async def test_a_host_that_is_not_allowed_is_not_even_looked_up(site: Site) -> None:
    names = Names({})
    only = MediaFetcher(["good.test"], resolve=names.resolve)
    message = await refused(only, "https://evil.test/secret", MediaNotAllowed)
    assert "'evil.test', which this server does not fetch from" in message
    assert not names.asked


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/secret", "http://[::1]/secret", "http://2130706433/secret"]
)
async def test_an_inner_address_in_the_url_is_refused(url: str) -> None:
    assert "not public" in await refused(MediaFetcher(["*"]), url, MediaNotAllowed)


@pytest.mark.parametrize("address", INNER)
async def test_a_name_of_an_inner_address_is_refused(address: str) -> None:
    names = Names(
        {
            "inner.test": [[address]],
            "first.test": [[address, "8.8.8.8"]],
            "last.test": [["8.8.8.8", "1.1.1.1", address]],
        }
    )
    for host in names.answers:
        message = await refused(
            MediaFetcher(["*"], resolve=names.resolve), f"http://{host}/secret", MediaNotAllowed
        )
        assert f"{host!r}, which has no public address" in message
    assert len(names.asked) == 3


async def test_a_name_without_address_cannot_be_told_from_an_inner_one() -> None:
    names = Names({"inner.test": [["10.0.0.1"]], "empty.test": [[]]})
    messages = set()
    for host in ("inner", "empty", "nobody"):
        fetching = MediaFetcher(["*"], resolve=names.resolve)
        message = await refused(fetching, f"http://{host}.test/", MediaNotAllowed)
        messages.add(message.replace(host, ""))
    assert len(messages) == 1


async def test_the_systems_own_names_of_this_machine_are_refused() -> None:
    await refused(MediaFetcher(["localhost"]), "http://localhost/secret", MediaNotAllowed)


async def test_the_connection_goes_to_the_address_that_was_checked(site: Site) -> None:
    """DNS rebinding: whoever looked up twice would connect to the second answer."""
    site.answers["/"] = ok(FILE)
    fetching = fetcher(site, turning=[[SERVER], [OTHER]])
    assert await fetching.fetch(site.url("/", "turning.test"), PATH, 1 << 20) == FILE
    assert "no public address" in await refused(fetching, site.url("/", "turning.test"), MediaNotAllowed)
    assert len(site.heads) == 1


async def test_a_redirect_is_looked_up_anew(site: Site) -> None:
    site.answers["/"] = to("/again")
    site.answers["/again"] = ok(b"secret")
    message = await refused(
        fetcher(site, turning=[[SERVER], [OTHER]]), site.url("/", "turning.test"), MediaNotAllowed
    )
    assert "no public address" in message
    assert len(site.heads) == 1


async def test_a_socket_to_an_inner_address_is_refused_whatever_led_to_it(site: Site) -> None:
    """The last look: here it stands alone, since a literal address needs no look-up."""
    from yarl import URL

    site.answers["/"] = ok(FILE)
    http = PublicHttp(is_public)
    with pytest.raises(MediaUnreachable):
        async with http.get(URL(f"http://{SERVER}:{site.port}/"), PATH):
            pass
    await http.close()
    assert not site.heads


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(site: Site, status: int) -> None:
    site.answers["/a/b?secret"] = to("../c", status)
    site.answers["/c"] = to(f"//GOOD.test.:{site.port}/d", status)
    site.answers["/d"] = to(site.url("/e"), status)
    site.answers["/e"] = ok(FILE)
    assert await fetched(fetcher(site), site.url("/a/b?secret")) == FILE
    assert [head.split()[1] for head in site.heads] == ["/a/b?secret", "/c", "/d", "/e"]


@pytest.mark.parametrize(("max_redirects", "num_requests"), [(0, 1), (1, 2), (3, 4)])
async def test_a_loop_of_redirects_ends(site: Site, max_redirects: int, num_requests: int) -> None:
    site.answers["/"] = to("/")
    message = await refused(fetcher(site, max_redirects=max_redirects), site.url("/"), MediaUnreachable)
    assert f"redirected more than {max_redirects} times" in message
    assert len(site.heads) == num_requests


@pytest.mark.parametrize(
    "location",
    [
        *(
            f"http://[{address}]/secret" if ":" in address else f"http://{address}/secret"
            for address in INNER
        ),
        *(
            "http://2130706433/",
            "http://0177.0.0.1/",
            "http://0x7f.1/",
            "http://127.1/",
            "//[::ffff:7f00:1]/",
        ),
        *(
            "http://inner.test/",
            "http://mixed.test/",
            "http://evil.test/secret",
            "http://good.test:22/secret",
        ),
        *(
            "file:///etc/passwd",
            "ftp://good.test/",
            "http://u:p@good.test/",
            "http://good.test\\@evil.test/",
            "/a b",
        ),
        *("data:image/png;base64,AAAA", "http://", "//"),
    ],
)
async def test_a_redirect_is_checked_like_the_first_url(site: Site, location: str) -> None:
    site.answers["/"] = to(location)
    names = Names(
        {"good.test": [[SERVER]], "inner.test": [["10.0.0.1"]], "mixed.test": [["8.8.8.8", "10.0.0.1"]]}
    )
    hosts = [f"good.test:{site.port}", "inner.test", "mixed.test"]
    fetching = MediaFetcher(hosts, resolve=names.resolve, is_allowed_address=site_or_public)
    await refused(fetching, site.url("/"), MediaNotAllowed)
    assert len(site.heads) == 1


@pytest.mark.parametrize("status", [201, 204, 206, 300, 304, 400, 401, 403, 404, 418, 500, 503])
async def test_every_other_status_is_told(site: Site, status: int) -> None:
    site.answers["/secret"] = f"HTTP/1.1 {status} Secret\r\nContent-Length: 0\r\n\r\n".encode()
    message = await refused(fetcher(site), site.url("/secret"), MediaUnreachable)
    assert f"the host 'good.test' answered {status}" in message


async def test_a_redirect_to_nowhere_is_told_by_its_status(site: Site) -> None:
    site.answers["/"] = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n"
    assert "answered 302" in await refused(fetcher(site), site.url("/"), MediaUnreachable)


@pytest.mark.parametrize("num_bytes", [1000, 1001, 1 << 40])
async def test_a_length_over_the_limit_is_refused_before_the_body(site: Site, num_bytes: int) -> None:
    async def announce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {num_bytes}\r\n\r\n".encode())
        await until_closed(reader)

    site.answers["/"] = announce
    message = await refused(fetcher(site), site.url("/"), MediaTooLarge, max_bytes=999)
    assert f"has {num_bytes} bytes; the limit is 999" in message


async def test_a_body_of_exactly_the_limit_passes(site: Site) -> None:
    site.answers["/"] = ok(FILE)
    assert await fetched(fetcher(site), site.url("/"), len(FILE)) == FILE
    await refused(fetcher(site), site.url("/"), MediaTooLarge, len(FILE) - 1)


@pytest.mark.parametrize("head", [b"", b"Transfer-Encoding: chunked\r\n"])
async def test_an_endless_body_is_cut_at_the_limit(site: Site, head: bytes) -> None:
    num_sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        piece = b"4000\r\n" + bytes(0x4000) + b"\r\n" if head else bytes(0x4000)
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")
        while True:
            writer.write(piece)
            await writer.drain()
            num_sent += len(piece)

    site.answers["/"] = pour
    message = await refused(fetcher(site), site.url("/"), MediaTooLarge, max_bytes=100_000)
    assert "bytes or more; the limit is 100000" in message
    await site.all_closed.wait()
    assert num_sent < 32 << 20  # what fits into the buffers of two sockets


async def test_a_body_without_length_ends_with_its_connection(site: Site) -> None:
    site.answers["/"] = b"HTTP/1.1 200 OK\r\n\r\n" + FILE
    assert await fetched(fetcher(site), site.url("/")) == FILE


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "br", "zstd", "gzip, gzip"])
async def test_a_compressed_body_is_refused_unread(site: Site, encoding: str) -> None:
    site.answers["/"] = ok(gzip.compress(bytes(1 << 20)), f"Content-Encoding: {encoding}")
    message = await refused(fetcher(site), site.url("/"), MediaUnreachable, max_bytes=2000)
    assert "compressed" in message


async def test_a_file_that_is_compressed_itself_is_not_unpacked(site: Site) -> None:
    packed = gzip.compress(bytes(1 << 20))
    site.answers["/a.gz"] = ok(packed, "Content-Type: application/gzip", "Content-Encoding: identity")
    assert await fetched(fetcher(site), site.url("/a.gz"), 2000) == packed


@pytest.mark.parametrize(
    "reply",
    [
        ok(FILE)[:-1],
        ok(FILE)[: len(FILE) // 2],
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(2000)) + b"\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x89PNG\r\n\x1a\n",
        b"",
    ],
)
async def test_a_reply_that_breaks_off_or_is_none_is_a_clear_error(site: Site, reply: bytes) -> None:
    site.answers["/secret"] = reply
    message = await refused(fetcher(site), site.url("/secret"), MediaUnreachable)
    assert "'good.test' broke off or is not HTTP" in message


async def test_nobody_listens(site: Site) -> None:
    with socket.socket() as closed:
        closed.bind((SERVER, 0))
        names = Names({"good.test": [[SERVER]]})
        port = closed.getsockname()[1]
        fetching = MediaFetcher(
            [f"good.test:{port}"], resolve=names.resolve, is_allowed_address=site_or_public
        )
        message = await refused(fetching, f"http://good.test:{port}/", MediaUnreachable)
    assert "no connection to the host 'good.test'" in message


async def trickle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [trickle, until_closed])
async def test_a_slow_site_has_one_limit_for_all(site: Site, answer: Answer) -> None:
    site.answers["/secret"] = answer
    message = await refused(fetcher(site, limit_s=0.1), site.url("/secret"), MediaTimeout)
    assert "within 0.1 s" in message
    await site.all_closed.wait()


async def test_slow_redirects_share_the_limit(site: Site) -> None:
    async def slow(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.06)
        writer.write(to("/"))
        await writer.drain()

    site.answers["/"] = slow
    await refused(fetcher(site, limit_s=0.15, max_redirects=20), site.url("/"), MediaTimeout)
    assert len(site.heads) < 10


async def test_a_name_that_takes_long_to_look_up_counts_into_the_limit() -> None:
    async def never(_host: str, _port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    fetching = MediaFetcher(["*"], 0.05, resolve=never)
    await refused(fetching, "http://good.test/", MediaTimeout)


@pytest.mark.parametrize("answer", [until_closed, trickle])
async def test_who_is_cancelled_closes_the_connection_at_once(site: Site, answer: Answer) -> None:
    site.answers["/"] = answer
    fetching = fetcher(site)
    task = asyncio.create_task(fetching.fetch(site.url("/"), PATH, 1 << 20))
    await site.was_asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await site.all_closed.wait()  # with the session still open
    site.answers["/"] = ok(FILE)
    assert await fetched(fetching, site.url("/")) == FILE  # and its place is free


async def test_no_more_than_the_bound_are_fetched_at_once(site: Site) -> None:
    go = asyncio.Event()

    async def when_told(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(ok(FILE))
        await writer.drain()

    site.answers["/"] = when_told
    fetching = fetcher(site, max_fetches=3)
    tasks = [asyncio.create_task(fetching.fetch(site.url("/"), PATH, 1 << 20)) for _ in range(12)]
    while len(site.heads) < 3:
        site.was_asked.clear()
        await site.was_asked.wait()
    await asyncio.sleep(0.05)  # for a fourth one, if there were any
    assert len(site.heads) == 3
    go.set()
    assert await asyncio.gather(*tasks) == [FILE] * 12
    await fetching.close()


async def test_who_gets_no_place_in_time_may_try_again(site: Site) -> None:
    site.answers["/"] = until_closed
    fetching = fetcher(site, max_fetches=1)
    first = asyncio.create_task(fetching.fetch(site.url("/"), PATH, 1 << 20))
    await site.was_asked.wait()
    fetching._limit_s = 0.01
    with pytest.raises(MediaBusy) as caught:
        await fetching.fetch(site.url("/"), PATH, 1 << 20)
    assert caught.value.status_hint == 503
    first.cancel()
    await asyncio.wait([first])
    fetching._limit_s, site.answers["/"] = 5, ok(FILE)
    assert await fetched(fetching, site.url("/")) == FILE


async def test_proxies_of_the_environment_are_not_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{OTHER}:9")
    site.answers["/"] = ok(FILE)
    assert await fetched(fetcher(site), site.url("/")) == FILE


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of `good.test`, with its key."""
    openssl, path = need("openssl"), tmp_path_factory.mktemp("tls") / "good.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-x509", "-days", "2"]
    names = ["-subj", "/CN=good", "-addext", "subjectAltName=DNS:good.test"]
    files = ["-keyout", str(path), "-out", f"{path}.cert"]
    subprocess.run([openssl, "req", *kind, *names, *files], check=True, capture_output=True, timeout=30)
    path.write_bytes(path.read_bytes() + Path(f"{path}.cert").read_bytes())
    return path


@pytest.fixture
async def secure_site(certificate: Path) -> AsyncIterator[Site]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    async with served(tls) as site:
        yield site


def secure_fetcher(site: Site, certificate: Path | None) -> MediaFetcher:
    names = Names({"good.test": [[SERVER]], "wrong.test": [[SERVER]]})
    tls = ssl.create_default_context(cafile=certificate) if certificate else None
    return MediaFetcher(
        [f"{host}:{site.port}" for host in names.answers],
        resolve=names.resolve,
        is_allowed_address=site_or_public,
        tls=tls,
    )


async def test_https_proves_the_name_and_connects_to_the_address(
    secure_site: Site, certificate: Path
) -> None:
    secure_site.answers["/"] = ok(FILE)
    url = secure_site.url("/").replace("http:", "https:")
    assert await fetched(secure_fetcher(secure_site, certificate), url) == FILE
    assert (
        await fetched(secure_fetcher(secure_site, certificate), url.replace("good.test", "GOOD.test."))
        == FILE
    )
    for who, trusted in (("wrong.test", certificate), ("good.test", None)):
        message = await refused(
            secure_fetcher(secure_site, trusted), url.replace("good.test", who), MediaUnreachable
        )
        assert f"no connection to the host {who!r}" in message
    assert len(secure_site.heads) == 2


async def test_a_redirect_out_of_https_is_not_followed(secure_site: Site, certificate: Path) -> None:
    secure_site.answers["/"] = to(secure_site.url("/secret"))
    url = secure_site.url("/").replace("http:", "https:")
    message = await refused(secure_fetcher(secure_site, certificate), url, MediaNotAllowed)
    assert "from https to http" in message


async def test_who_is_cancelled_closes_an_encrypted_connection_at_once(
    secure_site: Site, certificate: Path
) -> None:
    secure_site.answers["/"] = until_closed
    fetching = secure_fetcher(secure_site, certificate)
    task = asyncio.create_task(fetching.fetch(secure_site.url("/").replace("http:", "https:"), PATH, 1 << 20))
    await secure_site.was_asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await secure_site.all_closed.wait()
    await fetching.close()


async def test_closing_what_has_fetched_nothing() -> None:
    await MediaFetcher(()).close()
    await MediaFetcher(["*"]).close()
