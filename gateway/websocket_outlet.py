"""One client's WebSocket as those see it who send: text messages, then perhaps a close.

How they leave without a task, and what happens to a client that reads slowly: `gateway/outlet.py`. Not here:
frames (`gateway/websocket_protocol.py`), and what the messages say.
"""

from __future__ import annotations

from typing import Final

from gateway.outlet import Message, MessageOutlet

MAX_REASON_BYTES: Final = 123  # a control frame has 125, and the code takes two (RFC 6455, 5.5)
# No message counts for more than this share of what may wait: whoever is sent a large item, or the end of a
# long answer, which tells its text five times, reads no slower for that.
_LARGEST_SHARE: Final = 8
_MOST: Final = 128  # times the bound are too much, whatever the messages


class WebSocketOutlet(MessageOutlet):
    """The sending side of an accepted WebSocket."""

    __slots__ = ()

    @property
    def is_behind(self) -> bool:
        """Whether so much waits that the client should be asked for nothing more."""
        return 2 * self.num_buffered > self._max_bytes

    def push(self, text: bytes) -> None:
        """Send one text message, given in UTF-8, the way `Outlet.push` sends a part of a body."""
        write = self._write
        if write is None:
            self._push({"type": "websocket.send", "text": text.decode()})
            self.go_direct()
            return
        try:
            write(text)
        except Exception as error:  # as in `_push`
            self._gone(f"send failed: {type(error).__name__}")

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close after what was pushed; nothing may follow. A reason that is too long is cut."""
        self._write = None
        short = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        self._push({"type": "websocket.close", "code": code, "reason": short})
        self.closed = True

    def _is_too_much(self) -> bool:
        if self.num_buffered <= self._max_bytes:
            return False
        most = self._max_bytes // _LARGEST_SHARE
        counted = sum(min(most, len(message.get("text", ""))) for message in self._buffer)
        return counted > self._max_bytes or self.num_buffered > _MOST * self._max_bytes

    def _num_bytes(self, message: Message) -> int:
        return len(message["text"].encode()) if "text" in message else 0

    def _next(self) -> Message:
        """One at a time: each is a message of its own, and joined they would be another one."""
        message = self._buffer.pop(0)
        self.num_buffered -= self._num_bytes(message)
        return message
