"""What an answer says, as the events of its journal: the chunks of SSE, and a named one at the end.

    data: {chunk}                           as `SseWriter` writes them, the usage chunk is the last
    event: done     data: [DONE]            the answer is whole
    event: failed   data: {"error": {…}}    it is not, and why

No connection is needed, nobody waits for a head, and no heartbeat is kept: each reader sends its own
(`gateway/stream_reader.py`). How events are kept is in `gateway/journal.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from gateway.answer_logprobs import TokenTexts
from gateway.error_body import stream_error
from gateway.frames import DONE, Shape, data_frame, json_string, text_template
from gateway.journal import Journal, JournalLimits
from gateway.outlet import nothing
from gateway.record import RequestRecord
from gateway.writers import SseWriter, WriteText
from pipeline.errors import HeadraceError
from pipeline.values import Delivery

DONE_EVENT: Final = b"event: done\n" + DONE
_NO_JOURNAL: Final = Journal(JournalLimits())


class JournalOutlet:
    """Stands for the client of an answer that nobody need be connected to: what is pushed is an event.

    `on_closed()`: the last event was written. The journal is then let go: an answer and its writer hold each
    other until the collector comes, and megabytes must not wait for that.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.on_closed: Callable[[], None] = nothing
        self.closed = False
        self.num_buffered = 0  # nothing waits here, ever
        self.peak = 0
        self.blocked_since_s: float | None = None

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Each reader gets a head of its own."""

    def push(self, body: bytes) -> None:
        """An event."""
        if not self.closed:
            self.journal.frame(body)

    def end(self, body: bytes = b"") -> None:
        """The last event; what follows is dropped."""
        if not self.closed:
            self.closed = True
            self.journal.end(body)
            self.journal = _NO_JOURNAL
            self.on_closed()

    def drop(self) -> None:
        """The answer was given up without a word. Its readers must not wait for the rest."""
        self.end(failed_event(HeadraceError("The server gave this answer up.")))


class JournalWriter(SseWriter):
    """A stream of which each chunk is an event. Takes what `SseWriter` takes."""

    def __init__(
        self,
        outlet: JournalOutlet,
        shape: Shape,
        texts: TokenTexts,
        record: RequestRecord,
        delivery: Delivery,
        num_choices: int,
        keeps_text: bool = False,
    ) -> None:
        self._events = outlet
        super().__init__(outlet, shape, texts, record, delivery, num_choices, keeps_text=keeps_text)

    def end(self, timings: Callable[[], dict[str, Any]]) -> None:
        usage = self._usage(timings)
        if usage:
            self._outlet.push(usage)
        self._num_frames += 1
        self._outlet.end(DONE_EVENT)

    def fail(self, error: HeadraceError) -> None:
        self._num_frames += 1
        self._outlet.end(failed_event(error))

    def ping(self) -> None:
        pass

    def text_writer(self, index: int) -> WriteText | None:
        return None if self._is_continuous else partial(self.text, index)

    def _text_into(self, choice: Any) -> WriteText:
        outlet = self._events
        template = outlet.journal.template(text_template(self._shape, choice))
        if template is None:
            return super()._text_into(choice)

        def write(text: str) -> None:
            if not outlet.closed:
                outlet.journal.text(template, json_string(text))

        return write

    def _send_head(self) -> None:
        pass


def failed_event(error: BaseException) -> bytes:
    """The event that ends a stream which is not whole."""
    return b"event: failed\n" + data_frame(stream_error(error))
