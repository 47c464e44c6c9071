"""One channel of one choice on its way out: without control strings, checked, filtered, escaped.

What leaves has passed all four; what derives from it (logprobs) comes behind it. One object per channel, and
one per tool call, so that no state is shared between texts that are read apart.

Not here: which text belongs to which channel (`channels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from filters.hit import Hit
from filters.text_filter import TextFilter
from pipeline.control_dropper import ControlDropper
from pipeline.events import PositionLogprobs
from pipeline.logprob_queue import LogprobQueue

NO_STARTS: Final = frozenset[str]()


class TextCheck(Protocol):
    """Looks at a text as it passes. `filters.json_check.JsonCheck` is one."""

    @property
    def problem(self) -> str | None:
        """What is wrong."""

    def feed(self, text: str) -> int | None:
        """How many of these characters are fine if something is wrong, else None."""


class ChannelText:
    """Text in, text that may leave out. `flush` ends it; after a block nothing more leaves.

    `ends_at_problem`: no text leaves that the check finds wrong. The owner then ends the choice.
    `is_new_hold`: the last feed began to hold, or what was held before it has all left. `hits`: for the owner
    to take.
    """

    __slots__ = (
        "_check",
        "_dropper",
        "_ends_at_problem",
        "_escape",
        "_filter",
        "_hold_end",
        "_queue",
        "blocked",
        "channel",
        "hits",
        "is_ended",
        "is_new_hold",
        "needs_look",
        "problem",
    )

    def __init__(
        self,
        channel: str,
        dropper: ControlDropper | None = None,
        check: TextCheck | None = None,
        ends_at_problem: bool = True,
        text_filter: TextFilter | None = None,
        escape: Callable[[str], str] | None = None,
        queue: LogprobQueue | None = None,
    ) -> None:
        self.channel = channel
        self._dropper = dropper
        self._check = check
        self._ends_at_problem = ends_at_problem
        self._filter = text_filter
        self._escape = escape
        self._queue = queue
        self._hold_end = 0  # raw characters up to which the present hold reached when it began
        self.is_new_hold = False
        self.hits: list[Hit] = []
        self.needs_look = False  # there are hits, a block or a problem; for the owner to reset
        self.is_ended = False
        self.blocked = False
        self.problem: str | None = None  # the check's; the text was cut before it

    @property
    def held(self) -> int:
        """Raw characters that the filter holds."""
        return 0 if self._filter is None else self._filter.held

    @property
    def filter_now(self) -> tuple[frozenset[str], TextFilter | None] | None:
        """For who does without `feed`: of a text with none of these characters only this filter must know.

        None: every text must be fed. After such a text: `note_hold` while something is held, `settle` when
        the filter has found something.
        """
        starts = NO_STARTS if self._dropper is None else self._dropper.starts_now
        is_bare = self._check is None and self._queue is None and self._escape is None
        if starts is None or not is_bare or self.is_ended or self.blocked:
            return None
        return starts, self._filter

    def feed(self, text: str) -> str:
        """What may leave now."""
        if self._dropper is not None:
            text = self._dropper.feed(text)
        if text:
            return self._pass(text)
        self.is_new_hold = False
        return ""

    def flush(self) -> str:
        """The text has ended. After the first time nothing is left."""
        if self.is_ended:
            return ""
        self.is_ended = True
        rest = self._dropper.flush() if self._dropper is not None else ""
        text = self._pass(rest) if rest else ""
        if self._filter is not None and not self.blocked:
            text += self._decided(self._filter.flush)
        return text

    def pause(self) -> str:
        """Another channel goes on. What is held leaves as if the text ended here.

        It may go on: a word that then turns out to be denied cannot be taken back, but it does not get whole.
        What may become a control string stays.
        """
        return self._decided(self._filter.pause) if self._filter is not None and self.held else ""

    def expire(self) -> str:
        """Text was held for longer than its limit: what the filter's policy lets go."""
        return self._decided(self._filter.expire) if self._filter is not None and self.held else ""

    def abandon(self) -> str:
        """The text breaks off: what only rules that fail open hold."""
        return self._decided(self._filter.abandon) if self._filter is not None and self.held else ""

    def logprobs(self) -> Sequence[PositionLogprobs]:
        """The entries whose text has left since the last call."""
        if self._queue is None:
            return ()
        return self._queue.released(None if self._filter is None else self._filter.reported)

    @property
    def peak_held(self) -> int:
        """The most raw characters that the filter ever held."""
        return 0 if self._filter is None else self._filter.peak_held

    @property
    def num_leaked(self) -> int:
        """Raw characters that the filter let go undecided at one of its bounds."""
        return 0 if self._filter is None else self._filter.num_leaked

    def _pass(self, text: str) -> str:
        if self._check is not None:
            num_fine = self._check.feed(text)
            if num_fine is not None:
                self.problem, self._check, self.needs_look = self._check.problem, None, True
                if self._ends_at_problem:
                    text = text[:num_fine]
        if self._queue is not None:
            self._queue.passed(text)
        text_filter = self._filter
        if text_filter is not None:
            text = text_filter.feed(text)
            if self._queue is not None:
                self._queue.num_held = text_filter.held
            self.is_new_hold = text_filter.held > 0 and self.note_hold(text_filter)
            if text_filter.hits or text_filter.blocked:
                self.settle(text_filter)
        return text if self._escape is None else self._escape(text)

    def note_hold(self, text_filter: TextFilter) -> bool:
        """After a text of which the filter holds something: `is_new_hold`."""
        released = text_filter.released
        self.is_new_hold = is_new = released >= self._hold_end
        if is_new:
            self._hold_end = released + text_filter.held
        return is_new

    def _decided(self, act: Callable[[], str]) -> str:
        text = act()
        if self._filter is not None:
            self.settle(self._filter)
        return text if self._escape is None else self._escape(text)

    def settle(self, text_filter: TextFilter) -> None:
        """Take over what the filter found."""
        self.blocked = text_filter.blocked
        self.needs_look = self.needs_look or self.blocked or bool(text_filter.hits)
        self.hits += text_filter.hits
        if self._queue is not None:
            for hit in text_filter.hits:
                if hit.is_active:
                    self._queue.rewritten(hit.start, hit.end)
        text_filter.hits.clear()
