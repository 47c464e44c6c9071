"""A response that no socket's buffers hold at once, for tests of who reads slowly."""

from __future__ import annotations

import random
from typing import Final

from tests.backend.http_server import Peer

_PIECE_BYTES: Final = 1 << 16


class LongBody:
    """A `Script`. `num_sent`: bytes of the body that the server's socket has taken so far."""

    def __init__(self, num_bytes: int) -> None:
        self.body = random.Random(3).randbytes(num_bytes)
        self.num_sent = 0

    async def __call__(self, peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(self.body))
        for at in range(0, len(self.body), _PIECE_BYTES):
            await peer.say(self.body[at : at + _PIECE_BYTES])
            self.num_sent += _PIECE_BYTES
        await peer.gone()
