"""The events of one resumable stream: numbered, bounded, and written before anyone is told of them.

A number is what EventSource sends back as `Last-Event-ID`. No reader may hold one that the journal lacks, so
an event is first written and only then published; where a shared store keeps the journal, it is published
once the store has it (`gateway/store_appender.py`). Readers are in `gateway/stream_reader.py`.

Only the text differs from token to token. So an entry is not the frame of 250 bytes that leaves, but the text
and the number of the template that it goes into: 40 bytes a token, here and in the store.

    entry      one byte, and what it says follows: 0 a whole frame; k > 0 a JSON string, for template k
    template   the parts of a frame around its text, which stands once or more
    wire       `id: N`, then the frame

Not here: what an event says (`gateway/journal_writer.py`), and how long a journal lives
(`gateway/streams.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pipeline.errors import HeadraceError

MAX_TEMPLATES: Final = 255  # one byte says which; what finds no place is written as a whole frame
ENTRY_OVERHEAD_BYTES: Final = 41  # of a bytes object and its place in a list
_MAX_EVENTS_AT_ONCE: Final = 1024
_WHOLE: Final = b"\0"


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """How much of one stream is kept. What is past it is dropped from the front."""

    max_events: int = 32_768
    max_bytes: int = 8 << 20


class Follower(Protocol):
    """Who is told that there is more to read, or nothing more."""

    def advance(self) -> None: ...

    def fail(self, error: HeadraceError) -> None:
        """What comes next cannot be had here; the journal itself has no end."""


class Journal:
    """One stream's events. `on_written`: told of each event, which then waits for `publish`; without it
    events are public at once."""

    __slots__ = (
        "_entries",
        "_limits",
        "_on_written",
        "first",
        "followers",
        "has_end",
        "last",
        "num_bytes",
        "templates",
        "written",
    )

    def __init__(self, limits: JournalLimits, on_written: Callable[[Journal], None] | None = None) -> None:
        self._limits = limits
        self._on_written = on_written
        self._entries: list[bytes] = []
        self.templates: list[tuple[bytes, ...]] = []
        self.first = 1  # number of the oldest event that is kept
        self.written = 0  # number of the newest event
        self.last = 0  # number of the newest event that readers may have
        self.has_end = False  # the newest event is the last there will be
        self.num_bytes = 0  # of the entries, with what they cost in memory
        self.followers: set[Follower] = set()

    @property
    def is_over(self) -> bool:
        """Readers may have everything there will ever be."""
        return self.has_end and self.last == self.written

    def template(self, around: Sequence[bytes]) -> int | None:
        """The number of a new template, for `text`; None if there is no room for one more."""
        if len(self.templates) == MAX_TEMPLATES:
            return None
        self.templates.append(tuple(around))
        return len(self.templates)

    def text(self, template: int, text: bytes) -> None:
        """An event: the template around a JSON string."""
        assert not self.has_end, "an event after the last"
        self._append(template.to_bytes() + text)

    def frame(self, frame: bytes) -> None:
        """An event: lines that end with a blank one, without an id."""
        assert not self.has_end, "an event after the last"
        self._append(whole_entry(frame))

    def end(self, frame: bytes) -> None:
        """The last event."""
        assert not self.has_end, "an event after the last"
        self.has_end = True
        self._append(whole_entry(frame))

    def restore(self, number: int, entry: bytes, is_end: bool) -> None:
        """An event as another process has written it.

        The first may have any number; then each is the next.
        """
        if not self.written:
            self.first, self.written, self.last = number, number - 1, number - 1
        assert number == self.written + 1, f"event {number} after {self.written}"
        self.has_end = is_end
        self._append(entry)

    def publish(self, number: int) -> None:
        """Readers may have every event up to this one."""
        if number > self.last:
            self.last = number
            for follower in tuple(self.followers):
                follower.advance()

    def fail(self, error: HeadraceError) -> None:
        """This copy is filled no more. Its stream may go on elsewhere, so that it gets no event."""
        for follower in tuple(self.followers):
            follower.fail(error)

    def entries(self, after: int) -> list[bytes]:
        """All entries that were written after a number that is not below `first - 1`."""
        return self._entries[after + 1 - self.first :]

    def wire(self, after: int, max_bytes: int) -> tuple[bytes, int]:
        """What a reader gets next, at least one event if there is one, and the number of its last event.

        `after` must not be below `first - 1`.
        """
        start = after + 1 - self.first
        if after + 1 == self.last:  # a reader that keeps up: once a token
            return self._event(self.last, self._entries[start]), self.last
        events: list[bytes] = []
        num_bytes = 0
        num_events = min(self.last - after, _MAX_EVENTS_AT_ONCE)
        for number, entry in enumerate(self._entries[start : start + num_events], after + 1):
            event = self._event(number, entry)
            events.append(event)
            num_bytes += len(event)
            if num_bytes >= max_bytes:
                break
        return b"".join(events), after + len(events)

    def _event(self, number: int, entry: bytes) -> bytes:
        kind, rest = entry[0], entry[1:]
        return b"id: %d\n%b" % (number, rest.join(self.templates[kind - 1]) if kind else rest)

    def _append(self, entry: bytes) -> None:
        self._entries.append(entry)
        self.written += 1
        self.num_bytes += len(entry) + ENTRY_OVERHEAD_BYTES
        if self.num_bytes > self._limits.max_bytes or len(self._entries) > self._limits.max_events:
            self._drop_oldest()
        if self._on_written is not None:
            self._on_written(self)
        else:
            self.publish(self.written)

    def _drop_oldest(self) -> None:
        """An eighth at a time: each cut moves the rest. What is not public yet stays."""
        limits = self._limits
        num_events, num_bytes = len(self._entries), self.num_bytes
        dropped = 0
        while dropped < self.last + 1 - self.first and (
            num_events > limits.max_events * 7 // 8 or num_bytes > limits.max_bytes * 7 // 8
        ):
            num_bytes -= len(self._entries[dropped]) + ENTRY_OVERHEAD_BYTES
            num_events -= 1
            dropped += 1
        del self._entries[:dropped]
        self.first += dropped
        self.num_bytes = num_bytes


def whole_entry(frame: bytes) -> bytes:
    """The entry of an event that goes into no template."""
    return _WHOLE + frame
