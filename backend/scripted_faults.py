"""Faults that a scripted worker commits on its link on purpose: garbage, silence, slow writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from backend.link_server import LinkServer
from backend.server_connection import GatewayConnection

GARBAGE: Final = b"\xff" * 64  # read as a header it announces a frame of 4 GiB
DRIP_S: Final = 0.05
_SLOW_HIGH_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, after how many tokens over all streams. None: nothing."""

    die_after_tokens: int | None = None  # the engine reports its death
    stall_after_tokens: int | None = None  # from then on nothing is sent, not even heartbeats
    garbage_after_tokens: int | None = None  # one garbage frame on each connection
    slow_write_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("die_after_tokens", "stall_after_tokens", "garbage_after_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        if self.slow_write_bytes_per_s is not None and self.slow_write_bytes_per_s <= 0:
            raise ValueError(f"slow_write_bytes_per_s is {self.slow_write_bytes_per_s}; it must be above 0")


class FaultyServer(LinkServer):
    """A link server whose connections misbehave. `num_tokens` tells how many tokens the engine has made."""

    faults = Faults()
    num_tokens: Callable[[], int] = staticmethod(lambda: 0)

    def protocol(self) -> asyncio.Protocol:
        return _FaultyConnection(self)


class _FaultyConnection(GatewayConnection):
    def __init__(self, server: FaultyServer) -> None:
        super().__init__(server)
        self._faulty_server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        faulty = _FaultyTransport(cast(asyncio.Transport, transport), self, self._faulty_server)
        super().connection_made(faulty)


class _FaultyTransport(asyncio.Transport):
    """Stands between a connection and its real transport; only what the connection uses is here."""

    def __init__(self, inner: asyncio.Transport, protocol: asyncio.Protocol, server: FaultyServer) -> None:
        super().__init__()
        self._inner = inner
        self._link = protocol
        self._server = server
        self._buffer = bytearray()
        self._drip: asyncio.TimerHandle | None = None
        self._is_garbled = False
        self._is_slow_paused = False

    def write(self, data: Any) -> None:
        faults, num_tokens = self._server.faults, self._server.num_tokens()
        if is_due(faults.stall_after_tokens, num_tokens):
            return
        if is_due(faults.garbage_after_tokens, num_tokens) and not self._is_garbled:
            self._is_garbled = True
            self._inner.write(GARBAGE)
        if faults.slow_write_bytes_per_s is None:
            self._inner.write(data)
            return
        self._buffer += data
        if self._drip is None:
            self._drip_on()
        if len(self._buffer) > _SLOW_HIGH_BYTES and not self._is_slow_paused:
            self._is_slow_paused = True
            self._link.pause_writing()

    def _drip_on(self) -> None:
        self._drip = None
        rate = self._server.faults.slow_write_bytes_per_s
        if rate is None or not self._buffer or self._inner.is_closing():
            return
        num_bytes = max(1, int(rate * DRIP_S))
        self._inner.write(bytes(self._buffer[:num_bytes]))
        del self._buffer[:num_bytes]
        self._drip = asyncio.get_running_loop().call_later(DRIP_S, self._drip_on)
        if self._is_slow_paused and len(self._buffer) <= _SLOW_HIGH_BYTES // 4:
            self._is_slow_paused = False
            self._link.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


def is_due(after_tokens: int | None, num_tokens: int) -> bool:
    """Whether a fault's time has come."""
    return after_tokens is not None and num_tokens >= after_tokens
