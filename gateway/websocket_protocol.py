"""uvicorn's WebSocket protocol with what it lacks: bounds on what a client can make it hold or do in one
turn, a quick way out for text, ends that reach the client, and logs without paths and user text.

The frames themselves are the `websockets` package's (RFC 6455). Not here: the handshake as HTTP
(`gateway/http_protocol.py`), and who may connect (`gateway/realtime_admission.py`).

Where the package is milder or sterner than RFC 6455: a length in more bytes than it needs is taken (5.2); a
close in the middle of a fragmented message is answered 1002; whole messages that come in one piece with a
malformed frame behind them are dropped with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from gateway.direct_body import DIRECT_EXTENSION
from gateway.direct_text import DirectText, text_frame
from gateway.exchange import ABORT_EXTENSION
from gateway.websocket_handshake import refusal
from gateway.websocket_log import QuietLog
from pipeline.errors import HeadraceError

log = logging.getLogger("headrace.websocket")

# What is parsed before other connections have their turn. A read has up to 256 KiB, and the smallest frame
# 6 bytes and 5 us: 0.2 s in which no token would leave.
PIECE_BYTES: Final = 2048
MAX_FRAMES_PER_TURN: Final = 256
# Of one message: 16 MiB in frames of 256 bytes. Empty ones would never meet the limit on bytes.
MAX_FRAGMENTS: Final = 65_536
# Pings, and pongs to nothing, between two messages or two of our own pings: fifty a second.
MAX_CONTROL_FRAMES: Final = 1024
# For the client to answer a close, and to read what was sent before it.
CLOSE_LIMIT_S: Final = 2.0

_PONG: Final = b"\x8a"


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket, from its handshake to its end.

    `begin` takes the connection over from HTTP. Nothing is read before the app has accepted, and later only
    while the app has taken what came; `_input` is what has come beyond that, one read at most.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = cast(logging.Logger, QuietLog(log, {}))
        # Without extensions: permessage-deflate would compress every delta by itself. The state OPEN is for
        # the parser, which shall not wait for a head: that was read as HTTP.
        self.conn = ServerProtocol(state=State.OPEN, max_size=self.config.ws_max_size, logger=self.logger)
        self.conn.state = State.CONNECTING
        self.close_timeout = CLOSE_LIMIT_S
        self._input = b""
        self._offset = 0
        self._is_open = False  # accepted, and neither side has begun to close
        self._is_deaf = False  # what comes is of no interest any more
        self._num_fragments = 0
        self._num_control_frames = 0
        self._late_pong = b""
        self._direct = DirectText()
        self._turn: asyncio.Handle | None = None

    def refusal(self, request: Request) -> HeadraceError | None:
        """Why this handshake cannot lead to a WebSocket."""
        return refusal(self.conn, request)

    def begin(self, transport: asyncio.Transport, request: Request, rest: bytes) -> None:
        """Serve the connection from here on. `rest` is what came behind the handshake."""
        self.connection_made(transport)
        self._input = rest
        self._regulate()
        self.handle_connect(request)
        extensions = cast(dict[str, Any], self.scope["extensions"])
        extensions[ABORT_EXTENSION] = transport.abort
        extensions[DIRECT_EXTENSION] = self._direct.begin
        transport.set_protocol(self)

    # What comes in

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._input = self._input[self._offset :] + data if self._input else data
        self._offset = 0
        if self._turn is None and self._wants_input():
            self._parse()
        self._regulate()

    def _wants_input(self) -> bool:
        """Whether the app has taken all that came before. After our close it takes nothing more."""
        return (self._is_open and self.queue.empty()) or (self.close_sent and not self._is_deaf)

    def _parse(self) -> None:
        """Parse until the app has something to do, or for one turn; the rest waits for the next one."""
        data, offset, num_frames = self._input, self._offset, 0
        while offset < len(data) and num_frames < MAX_FRAMES_PER_TURN and self._wants_input():
            piece = data[offset : offset + PIECE_BYTES] if len(data) > PIECE_BYTES else data
            offset += len(piece)
            self.conn.receive_data(piece)
            if self.conn.parser_exc is not None:
                self.handle_parser_exception()
                break
            self._answer(self.conn.data_to_send())
            events = cast(Sequence[Frame], self.conn.events_received())
            num_frames += len(events)
            self._handle(events)
        if self._is_deaf or offset >= len(data):
            data, offset = b"", 0
        self._input, self._offset = data, offset

    def _handle(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if self._is_deaf:
                return
            if frame.opcode is Opcode.TEXT or frame.opcode is Opcode.BINARY:
                self._num_fragments = 0
                (self.handle_text if frame.opcode is Opcode.TEXT else self.handle_bytes)(frame)
            elif frame.opcode is Opcode.CONT:
                self.handle_cont(frame)
            elif frame.opcode is Opcode.CLOSE:
                self.handle_close(frame)
            else:
                self._handle_control(frame)

    def _next_turn(self) -> None:
        self._turn = None
        if self._wants_input():
            self._parse()
        self._regulate()

    def _regulate(self) -> None:
        """Read while there is nothing left to parse, and the app waits for more."""
        if self.transport.is_closing():
            return
        waits = not self._is_deaf and (bool(self._input) or not self._wants_input())
        if waits != self.read_paused:
            self.read_paused = waits
            (self.transport.pause_reading if waits else self.transport.resume_reading)()
        if self._input and self._turn is None and self._wants_input():
            self._turn = self.loop.call_soon(self._next_turn)

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.queue.empty():
            self._regulate()
        return message

    def handle_cont(self, event: Frame) -> None:
        """Into one buffer: an object for each would take a hundred times what it holds."""
        self._num_fragments += 1
        if self._num_fragments > MAX_FRAGMENTS:
            self._fail(CloseCode.POLICY_VIOLATION, f"more than {MAX_FRAGMENTS} fragments")
            return
        if self._num_fragments == 1:
            self.frames = [bytearray(self.frames[0])]  # type: ignore[list-item]
        self.frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """As uvicorn's, which logs malformed text with a traceback, and pauses by itself."""
        (data,), self.frames = self.frames, []
        self._num_control_frames = 0
        if self.close_sent:
            return
        if self.curr_msg_data_type == "bytes":
            self.queue.put_nowait({"type": "websocket.receive", "bytes": bytes(data)})
            return
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            self._fail(CloseCode.INVALID_DATA, f"{error.reason} at position {error.start}")
        else:
            self.queue.put_nowait({"type": "websocket.receive", "text": text})

    def _handle_control(self, frame: Frame) -> None:
        self._num_control_frames += 1
        if self._num_control_frames > MAX_CONTROL_FRAMES:
            self._fail(CloseCode.POLICY_VIOLATION, f"more than {MAX_CONTROL_FRAMES} pings or pongs")
        elif frame.opcode is Opcode.PONG:
            self.handle_pong(frame)

    def _answer(self, output: Sequence[bytes]) -> None:
        """Send what the package answers by itself: pongs, and a close at the end.

        A client that does not read gets its last pong when it does (RFC 6455, 5.5.3), or they would pile up.
        """
        if not output or self.transport.is_closing():
            return
        if not self.writable.is_set():
            pongs = [each for each in output if each.startswith(_PONG)]
            self._late_pong = pongs[-1] if pongs else self._late_pong
            output = [each for each in output if not each.startswith(_PONG)]
        self.transport.write(b"".join(output))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._direct.stop()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_open:
            self._direct.allow(self.transport)
        pong, self._late_pong = self._late_pong, b""
        if pong and not self.transport.is_closing():
            self.transport.write(pong)

    def handle_pong(self, event: Frame) -> None:
        if self.pending_ping_payload is not None and bytes(event.data) == self.pending_ping_payload:
            self._num_control_frames = 0
        super().handle_pong(event)

    # What goes out

    async def send(self, message: Any) -> None:
        """A text message on an open connection is framed here: the general way costs twice as much."""
        text = message.get("text")
        if not self._is_open or text is None:
            await self._send_other(message)
            return
        if not self.writable.is_set():
            await self.writable.wait()
            if not self._is_open:
                raise ClientDisconnected
        self.transport.write(text_frame(text.encode()))

    async def _send_other(self, message: Any) -> None:
        if self.handshake_complete and not self._is_open:
            raise ClientDisconnected
        await super().send(message)
        if self.close_sent:
            self._end(is_deaf=self._is_deaf)
        elif message["type"] == "websocket.accept" and self.handshake_complete:
            self._is_open = True
            self._direct.allow(self.transport)
        self._regulate()

    # Ends

    def _end(self, is_deaf: bool = True) -> None:
        """Nothing more goes out but what closes the connection. `is_deaf`: nothing more is taken in.

        A polite end waits for a client that reads; this one does not.
        """
        self._is_open, self._is_deaf = False, is_deaf
        self._direct.stop()
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(CLOSE_LIMIT_S, self.transport.abort)

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._end()

    def handle_parser_exception(self) -> None:
        """The package has given up, and made the close frame that says why."""
        close = self.conn.close_sent
        if close is not None and not self.close_sent:
            event = {"type": "websocket.disconnect", "code": int(close.code), "reason": close.reason}
            self.queue.put_nowait(cast(Any, event))
        self.close_sent = True
        self._linger()

    def keepalive_timeout(self) -> None:
        self.pong_timer = None
        if self._is_open and self.read_paused:  # the answer may be there
            self.pong_timer = self.loop.call_later(self.ping_timeout or 0.0, self.keepalive_timeout)
        elif self._is_open:
            self._fail(CloseCode.INTERNAL_ERROR, "no answer to a ping")

    def shutdown(self) -> None:
        if self._is_open:
            self._fail(CloseCode.SERVICE_RESTART, "")
        elif self.handshake_complete or self.close_sent:
            self.transport.close()
            self._end()
        else:
            super().shutdown()

    def eof_received(self) -> None:
        """The transport closes by itself then, when the client has read the rest."""
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        if self._turn is not None:
            self._turn.cancel()
        self._input, self.frames = b"", []
        self.conn.parser.close()  # it holds itself: half a message would wait for the garbage collector
        super().connection_lost(exc)

    def _fail(self, code: CloseCode, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def _linger(self) -> None:
        """Close so that the client still gets the close frame.

        Closing a socket with unread input resets the connection, and the reset can overtake what was sent.
        """
        self._end()
        self._input = b""
        self.stop_keepalive()
        if not self.transport.is_closing():
            self.transport.write(b"".join(self.conn.data_to_send()))
            self._regulate()
            if self.transport.can_write_eof():
                self.transport.write_eof()
