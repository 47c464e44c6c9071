"""Cuts what comes over a link into frames. No sockets; what the frames are is `backend.link`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backend import link
from backend.link import LinkError


class Framer:
    """Cuts a byte stream into frames. After a `LinkError` it refuses more.

    `max_frame_bytes` may be raised once the peer is trusted.
    """

    __slots__ = ("_broken", "_buffer", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int = link.MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._broken = False

    @property
    def num_buffered_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Any]:
        """The frames that are complete now, in order. Raises `LinkError` on an oversized or malformed one.

        Lazy: frames that the caller does not take stay buffered for the next call.
        """
        if self._broken:
            raise LinkError("the connection has already failed")
        try:
            yield from self._cut(data)
        except LinkError:
            self._broken = True
            raise

    def _cut(self, data: bytes) -> Iterator[Any]:
        buffer = self._buffer
        source: bytes | bytearray = data
        if buffer:
            buffer += data
            source = buffer
        start, end = 0, len(source)
        try:
            with memoryview(source) as view:
                while end - start >= link.HEADER_BYTES:
                    num_bytes, kind = link.HEADER.unpack_from(view, start)
                    if num_bytes > self.max_frame_bytes:
                        raise LinkError(f"a frame of {num_bytes} bytes; the limit is {self.max_frame_bytes}")
                    stop = start + link.HEADER_BYTES + num_bytes
                    if stop > end:
                        break
                    with view[start + link.HEADER_BYTES : stop] as payload:
                        frame = link.decode(kind, payload)
                    start = stop
                    yield frame
        finally:
            if source is buffer:
                del buffer[:start]
            elif start < end:
                buffer += data[start:]
