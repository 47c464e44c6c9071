"""Two gateways behind the real nginx, as `nginx/two-gateways.conf` says: what goes to the other and what not.

The gateways are the test itself but in the last test, which kills a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import stack
from tests.e2e.asking import CHAT, COMPLETE, CUT, ask, chat
from tests.e2e.nginx_site import Nginx, start_nginx, two_gateways
from tests.e2e.played_upstream import EMPTY, Request, Upstream, listening
from tests.wire import Wire, connect

EVENTS = "/v1/streams/0123456789abcdef/events?token=t"
GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/streams")
OPEN = "headrace_open_requests"
ASK = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode()
CLOSE = EMPTY.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n")


@dataclass(frozen=True, slots=True)
class Site:
    """nginx, and where it expects its two gateways."""

    nginx: Nginx
    sockets: tuple[Path, Path]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Site]:
    """An nginx of its own for each test, as it remembers which gateway failed."""
    sockets = (tmp_path / "a.sock", tmp_path / "b.sock")
    with start_nginx(tmp_path, "", two_gateways(*(f"unix:{each}" for each in sockets))) as nginx:
        yield Site(nginx, sockets)


@pytest.fixture
async def client(two: Site) -> AsyncIterator[Wire]:
    async with connect(two.nginx.port) as wire:
        yield wire


async def ask_one(client: Wire, gateway: Upstream, method: str = "POST", path: str = CHAT) -> None:
    """A request that this gateway gets and answers."""
    body: dict[str, str] | None = {} if method == "POST" else None
    reading = asyncio.create_task(client.request(method, path, body))
    request = await gateway.next()
    assert request.path == path
    await request.send(CLOSE)
    assert (await reading).status == 200
    assert await client.body() == b"{}"


async def take_one(*gateways: Upstream) -> tuple[Request, Upstream]:
    """The next request, and the other gateway."""
    first, second = gateways
    getters = [asyncio.create_task(each.next()) for each in gateways]
    (done,), (waiting,) = await asyncio.wait(getters, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return done.result(), second if done is getters[0] else first


@pytest.mark.parametrize("down", [0, 1])
async def test_requests_go_to_the_other_gateway_when_one_is_down(two: Site, client: Wire, down: int) -> None:
    """Also those that generate: they had not been sent."""
    async with listening(two.sockets[1 - down]) as other:
        for path in (*GENERATE, CHAT, CHAT):
            await ask_one(client, other, "POST", path)
        await ask_one(client, other, "GET", EVENTS)
        assert other.requests.empty()


@pytest.mark.parametrize("path", GENERATE)
async def test_what_generates_is_not_repeated_once_it_was_sent(two: Site, client: Wire, path: str) -> None:
    async with listening(two.sockets[0]) as first, listening(two.sockets[1]) as second:
        reading = asyncio.create_task(client.post(path, {}))
        request, other = await take_one(first, second)
        request.writer.close()
        head = await reading
        assert head.status == 502
        assert (await client.json())["error"]["code"] == "gateway_unreachable"
        assert other.requests.empty()


async def test_what_generates_is_not_repeated_on_a_kept_connection_that_breaks(
    two: Site, client: Wire
) -> None:
    """There nginx adds a try of its own accord, but for a POST that was sent."""
    async with listening(two.sockets[0]) as first, listening(two.sockets[1]) as second:
        kept = []
        for _ in range(2):  # one on each gateway
            reading = asyncio.create_task(client.post(CHAT, {}))
            request, _ = await take_one(first, second)
            await request.send(EMPTY)
            assert (await reading).status == 200
            assert await client.body() == b"{}"
            kept.append(request)
        reading = asyncio.create_task(client.post(CHAT, {}))
        asked = [asyncio.create_task(each.read(len(each.head + each.body))) for each in kept]
        (done,), (waiting,) = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert done.result().startswith(f"POST {CHAT} ".encode())
        kept[asked.index(done)].writer.close()
        assert (await reading).status == 502
        assert not waiting.done()
        assert first.requests.empty()
        assert second.requests.empty()
        waiting.cancel()


@pytest.mark.parametrize("path", [EVENTS, "/v1/models"])
async def test_a_get_goes_to_the_other_gateway_when_the_first_breaks(
    two: Site, client: Wire, path: str
) -> None:
    """It generates nothing, so it can be asked again."""
    async with listening(two.sockets[0]) as first, listening(two.sockets[1]) as second:
        reading = asyncio.create_task(client.request("GET", path))
        request, other = await take_one(first, second)
        request.writer.close()
        again = await other.next()
        assert again.path == path
        await again.send(CLOSE)
        assert (await reading).status == 200


async def test_a_request_goes_where_fewer_are_open(two: Site) -> None:
    """Taking turns would send every other one to the gateway that is busy."""
    async with (
        listening(two.sockets[0]) as first,
        listening(two.sockets[1]) as second,
        AsyncExitStack() as clients,
    ):
        asked = []
        for _ in range(6):
            client = await clients.enter_async_context(connect(two.nginx.port))
            await client.send(ASK)
            request, other = await take_one(first, second)
            asked.append((client, request, other))
        assert [other for _, _, other in asked].count(first) == 3
        for client, request, other in asked:
            if other is second:  # so it is on the first
                await client.close()
                await request.peer_gone()
        for _ in range(3):
            client = await clients.enter_async_context(connect(two.nginx.port))
            await client.send(ASK)
            await first.next()


async def test_both_gateways_down_is_502(client: Wire) -> None:
    for _ in range(3):  # also while nginx remembers that both have failed
        assert (await client.post(CHAT, {})).status == 502
        assert (await client.json())["error"]["code"] == "gateway_unreachable"


@pytest.mark.long
async def test_a_real_gateway_that_dies_costs_only_what_runs_on_it(
    embedded_model: Path, tmp_path: Path
) -> None:
    with (
        stack.start_scripted(tmp_path, embedded_model, "--step-ms", "5") as worker,
        stack.start_gateway(tmp_path, [worker], name="first") as first,
        stack.start_gateway(tmp_path, [worker], name="second") as second,
    ):
        text = two_gateways(f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}")
        with start_nginx(tmp_path, "", text) as nginx:
            before = await asyncio.gather(*(ask(nginx.port, chat(max_tokens=20)) for _ in range(20)))
            running = [asyncio.create_task(ask(nginx.port, chat(max_tokens=400))) for _ in range(10)]
            await asyncio.to_thread(
                first.process.wait_until, lambda: first.metric(OPEN) + second.metric(OPEN) == 10, 20, "busy"
            )
            num_lost = int(first.metric(OPEN))
            first.process.kill()
            after = await asyncio.gather(*(ask(nginx.port, chat(max_tokens=20)) for _ in range(40)))
            ended = await asyncio.gather(*running)
    assert [outcome.kind for outcome in (*before, *after)] == [COMPLETE] * 60
    assert num_lost > 0
    assert sorted(outcome.kind for outcome in ended) == [COMPLETE] * (10 - num_lost) + [CUT] * num_lost
