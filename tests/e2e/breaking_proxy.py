"""A TCP proxy that breaks connections on purpose, at chosen places of the response.

It knows no HTTP but the blank line behind a head. Places inside events are found in the raw bytes: all but
the text is ASCII, so a byte from 0xC0 on begins a character.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from tests.tcp_server import dialled, listening

BEFORE_REQUEST: Final = "before the request"  # the server never sees it
BEFORE_HEAD: Final = "before the head"  # the server has answered
IN_HEAD: Final = "in the head"
AFTER_HEAD: Final = "after the head"
AFTER_BYTES: Final = "after some bytes"
IN_CHARACTER: Final = "in a character"
IN_ID: Final = "in an id"  # `id: 12` loses its last digit
AFTER_ID: Final = "after an id"  # its line is complete, its event is not
IN_END: Final = "in the blank line"  # the second line feed of an event is missing
AFTER_EVENT: Final = "after an event"
PLACES: Final = (
    *(BEFORE_REQUEST, BEFORE_HEAD, IN_HEAD, AFTER_HEAD),
    *(AFTER_BYTES, IN_CHARACTER, IN_ID, AFTER_ID, IN_END, AFTER_EVENT),
)
RESET: Final = "reset"
CLOSE: Final = "close"
_HEAD_END: Final = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Break:
    """Where one connection breaks: at this place, the first after `num_bytes` of the body; and how."""

    place: str
    num_bytes: int = 0
    how: str = CLOSE


def random_breaks(count: int, seed: int, max_bytes: int = 1000) -> list[Break]:
    """So many breaks, each place as often as the others, up to `max_bytes` into a body."""
    rng = random.Random(seed)
    places = [PLACES[number % len(PLACES)] for number in range(count)]
    rng.shuffle(places)
    return [Break(place, rng.randrange(max_bytes), rng.choice((RESET, CLOSE))) for place in places]


class Cut:
    """The bytes of one response, as far as they may pass before a break."""

    def __init__(self, plan: Break) -> None:
        self._plan = plan
        self._passed = b""

    def take(self, data: bytes) -> tuple[bytes, bool]:
        """What of the next bytes may pass, and whether the connection breaks then."""
        whole = self._passed + data
        end = self._end(whole)
        if end is None:
            self._passed = whole
            return data, False
        return whole[len(self._passed) : end], True

    def _end(self, whole: bytes) -> int | None:
        """How many bytes pass in all; None: not known yet, all of these do."""
        place, start = self._plan.place, len(self._passed)
        if place == BEFORE_HEAD:
            return 0
        head = whole.find(_HEAD_END)
        if place == IN_HEAD:
            return max(start, len(whole) // 2 if head < 0 else head // 2)
        if head < 0:
            return None
        body = head + len(_HEAD_END)
        if place == AFTER_HEAD:
            return max(start, body)
        least = max(start, body + self._plan.num_bytes)
        if place == AFTER_BYTES:
            return least if len(whole) > least else None
        return _within(whole, least, place)


def _within(whole: bytes, least: int, place: str) -> int | None:
    """The end at the first place of this kind from `least` on."""
    if place == IN_CHARACTER:
        return next((at + 1 for at in range(least, len(whole)) if whole[at] >= 0xC0), None)
    mark = b"\nid: " if place in (IN_ID, AFTER_ID) else b"\n\n"
    at = whole.find(mark, least)
    if at < 0:
        return None
    if place in (IN_END, AFTER_EVENT):
        return at + (1 if place == IN_END else 2)
    line_end = whole.find(b"\n", at + len(mark))
    if line_end < 0:
        return None
    return line_end - 1 if place == IN_ID else line_end + 1


class BreakingProxy:
    """In front of ports of this machine, by turns. Connections break as `breaks` says, then all pass whole.

    `broken` counts what was done, by place and kind. A break whose place never comes is `num_missed`.
    """

    def __init__(self, upstream_ports: Sequence[int], breaks: Iterable[Break]) -> None:
        self._upstream_ports = itertools.cycle(upstream_ports)
        self._breaks = iter(breaks)
        self.port = 0
        self.broken: Counter[tuple[str, str]] = Counter()
        self.num_missed = 0
        self.num_connections = 0

    @property
    def num_broken(self) -> int:
        return self.broken.total()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection."""
        self.num_connections += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):  # or the end
                await self._serve(reader, writer, next(self._breaks, None))
        finally:
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, plan: Break | None
    ) -> None:
        request = await reader.readuntil(_HEAD_END)
        if plan is not None and plan.place == BEFORE_REQUEST:
            await self._break(writer, plan)
            return
        async with dialled(next(self._upstream_ports)) as (up_reader, up_writer):
            up_writer.write(request)
            back = asyncio.create_task(self._pass_requests(reader, up_writer))
            try:
                await self._pass_response(up_reader, writer, plan)
            finally:
                back.cancel()
                await asyncio.wait([back])

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What else the client sends; its end ends the other side too."""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.transport.abort()

    async def _pass_response(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, plan: Break | None
    ) -> None:
        cut = None if plan is None else Cut(plan)
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                passed, is_broken = (data, False) if cut is None else cut.take(data)
                writer.write(passed)
                await writer.drain()
                if is_broken:
                    assert plan is not None
                    await self._break(writer, plan)
                    return
        self.num_missed += plan is not None

    async def _break(self, writer: asyncio.StreamWriter, plan: Break) -> None:
        self.broken[plan.place, plan.how] += 1
        if plan.how == RESET:
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def breaking_proxy(
    upstream_ports: Sequence[int], breaks: Iterable[Break]
) -> AsyncIterator[BreakingProxy]:
    """A proxy that runs; its port is `port`."""
    proxy = BreakingProxy(upstream_ports, breaks)
    async with listening(proxy.accept, limit=1 << 20) as server:
        proxy.port = server.port
        yield proxy
