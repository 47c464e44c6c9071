"""Server-sent events out of the body of a response, as its reads come. No I/O.

Only the `data` of events is of interest here: the APIs of models say all they say in it. Lines end at LF, CR
or CRLF and nowhere else (HTML standard, 9.2.6 "Interpreting an event stream"): JSON may hold U+2028.
Not here: what a payload means (the wires), and writing events (`gateway/frames.py`).
"""

from __future__ import annotations

from typing import Final

_BOM: Final = b"\xef\xbb\xbf"


class SseReader:
    """Cuts one stream into the payloads of its events.

    `max_event_bytes` bounds one event with its other fields and comments, complete or not.
    """

    __slots__ = (
        *("_after_cr", "_held", "_is_at_event", "_is_broken", "_is_first", "_max_event_bytes", "_num_held"),
    )

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._held: list[bytes] = []  # of the event that has begun, with LF for every line end
        self._num_held = 0
        self._after_cr = False  # the CR has ended its line: an LF that comes next is part of that end
        self._is_first = True
        self._is_broken = False
        self._is_at_event = False  # the next byte begins an event, and nothing is special about it

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that `data` completes, several lines of one joined by LF.

        Raises `ValueError` for an event of more than `max_event_bytes`; the object then takes no more. An
        event that the stream's end cuts off is none, says the standard, so there is no `flush`.
        """
        # What nearly every read of a stream of tokens is: one event of one line, in a third of the time. A
        # byte is found ten times as quickly as a number (10 is LF, 13 CR) than as a string.
        if self._is_at_event and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            payload = data[6:-2]
            if not (10 in payload or 13 in payload or len(data) > self._max_event_bytes):
                return [payload]
        return self._feed(data)

    def _feed(self, data: bytes) -> list[bytes]:
        if self._is_broken:
            raise ValueError("the stream had an event over max_event_bytes before")
        if self._after_cr or b"\r" in data:
            data = self._with_lf(data)
        if not data:
            return []
        if b"\n\n" not in data and not (data.startswith(b"\n") and self._ends_line()):
            self._hold(data)
            return []
        self._held.append(data)
        blocks = b"".join(self._held).split(b"\n\n")
        self._held.clear()
        self._num_held = 0
        rest = blocks.pop()
        payloads = [payload for block in blocks if (payload := self._payload(block)) is not None]
        if rest:
            self._hold(rest)
        self._is_at_event = not rest  # after a CR, too: the LF of a CRLF would be one more blank line
        return payloads

    def _with_lf(self, data: bytes) -> bytes:
        """The same with LF for every line end. A CRLF may be cut in two."""
        if not data:
            return data
        skipped = 1 if self._after_cr and data.startswith(b"\n") else 0
        self._after_cr = data.endswith(b"\r")
        return data[skipped:].replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _ends_line(self) -> bool:
        return bool(self._held) and self._held[-1].endswith(b"\n")

    def _hold(self, data: bytes) -> None:
        self._is_at_event = False
        self._held.append(data)
        self._num_held += len(data)
        self._check(self._num_held)

    def _payload(self, event: bytes) -> bytes | None:
        """The data of one event without its blank line; None if it has no such field."""
        self._check(len(event))
        if self._is_first:
            self._is_first = False
            event = event.removeprefix(_BOM)
        if event.startswith(b"data: ") and b"\n" not in event:
            return event[6:]
        values = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if _is_data(line)]
        return b"\n".join(values) if values else None

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_event_bytes:
            self._is_broken, self._is_at_event = True, False
            raise ValueError(
                f"an event of the stream has {num_bytes} bytes or more, over max_event_bytes, "
                f"{self._max_event_bytes}"
            )


def _is_data(line: bytes) -> bool:
    return line.startswith(b"data:") or line == b"data"
