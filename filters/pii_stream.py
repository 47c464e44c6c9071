"""Personal data in a stream: detectors on a window of the text that grows at one end and is cut at the other.

A detector says up to where everything is decided; from there on text is held if a rule of its classes changes
what leaves. In ordinary text there is no sign of personal data, and only the length of a run is counted that
may become the beginning of some.

Not here: the shapes of personal data (`pii.py`), and which matches stand (`settling.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Final

from filters.patterns import Patterns
from filters.pii import LOOK_BACK, MAX_TRIES, SIGNS, Detector, find_emails
from filters.reading import Reading
from filters.rule_folding import DEFAULT, Uneven
from filters.rules import Rule
from filters.settling import Found, Settling

_MAX_WINDOW: Final = 512  # folded characters that are kept before the window is cut


class PiiStream:
    """The matches of one detector, for each rule that asks for their class. A `settling.StreamTrack`.

    `done`: what begins before this folded offset is decided. `run`: how many characters at the end of the
    text may become part of something, where there is no sign of it yet.
    """

    __slots__ = (
        "_blocks",
        "_detect",
        "_holds_closed",
        "_is_settled",
        "_num_found",
        "_reading",
        "_rules_of",
        "_settling",
        "_track",
        "done",
        "holds",
        "run",
        "signs",
    )

    def __init__(
        self, detect: Detector, rules: Sequence[Rule], reading: Reading, track: int, settling: Settling
    ) -> None:
        self._detect = detect
        self.signs = SIGNS[detect]
        self._rules_of: dict[str, list[Rule]] = {}
        for rule in rules:
            self._rules_of.setdefault(rule.pii, []).append(rule)
        self.holds = any(rule.holds() for rule in rules)
        self._holds_closed = any(rule.holds(closed_only=True) for rule in rules)
        self._blocks = any(rule.blocks for rule in rules)
        self._reading = reading
        self._track = track
        self._settling = settling
        self._num_found = 0
        self._is_settled = False
        self.done = 0
        self.run = 0

    def look(self) -> None:
        """Finds what is decided in the window."""
        self._is_settled = False
        self._look(is_last=False)

    def pass_over(self, piece: str, end: int) -> None:
        """The text goes on to `end`, folded, with a piece that has no sign."""
        _, run_chars, max_run, keeps_end, _ = self.signs
        num_last = len(piece) - len(piece.rstrip(run_chars)) if run_chars else 0
        self.run = run = self.run + num_last if num_last == len(piece) else num_last
        if run > max_run:
            run = max_run if keeps_end else 0
        if end - run > self.done:
            self.done = end - run
        self._is_settled = False

    def finish(self) -> None:
        """Finds what there is if the text ends here."""
        done = self.done
        self.done = max(done, self._look(is_last=True))  # the rest may still become more
        self._is_settled = True

    @property
    def found_to(self) -> int:
        reading = self._reading
        last = self.done + self.signs.shortest - 1
        if self._is_settled or last >= reading.end:
            return reading.raw_end
        # No address ends before its @ has come.
        if self._detect is find_emails and reading.window.find("@", self.done - reading.at) < 0:
            return reading.raw_end
        return reading.raw_of(last)

    @property
    def blocks_from(self) -> int:
        return self.found_to + 1 if self._blocks else self._reading.raw_end

    @property
    def live_from(self) -> int:
        return self._reading.raw_of(self.done) if self.holds else self._reading.raw_end

    @property
    def live_from_closed(self) -> int:
        return self._reading.raw_of(self.done) if self._holds_closed else self._reading.raw_end

    def _look(self, is_last: bool) -> int:
        """Finds what is decided; returns where the last match ends."""
        reading = self._reading
        window, at = reading.window, reading.at
        last_end = 0
        while True:
            before = self.done - at
            matches, decided = self._detect(window, before, is_last)
            for start, end, kind in matches:
                last_end = at + end
                self._take(at + start, at + end, kind)
            self.done = at + decided
            if decided - before < MAX_TRIES:  # it has not stopped after so many places
                return last_end

    def _take(self, start: int, end: int, kind: str) -> None:
        raw_start, raw_end = self._reading.span(start, end)
        for rule in self._rules_of.get(kind, ()):
            self._num_found += 1
            self._settling.open.append(
                Found(raw_end, self._track, self._num_found, raw_start, start, end, rule)
            )


class PiiWindow:
    """What all detectors of a stream look at: the last of the text, under the default folding."""

    __slots__ = ("_has_sign", "_is_quiet", "_last_uneven", "_reading", "streams")

    def __init__(self, rules: Patterns, first_track: int, settling: Settling) -> None:
        self._reading = Reading(DEFAULT)
        self.streams = [
            PiiStream(detect, rules.pii_of(detect), self._reading, first_track + position, settling)
            for position, detect in enumerate(rules.detectors)
        ]
        self._has_sign = _pattern_of("".join(stream.signs.signs for stream in self.streams))
        self._is_quiet = True  # there is no sign in what is not decided
        self._last_uneven = 0  # from this folded offset on, the text is as long as it is raw

    def read(self, folded: str, uneven: Uneven, num_raw: int) -> int:
        """More text; returns from where on it is held."""
        reading = self._reading
        if len(reading.window) > _MAX_WINDOW:
            first_open = min([stream.done for stream in self.streams])
            reading.forget_before(max(0, first_open - LOOK_BACK))
        reading.take(folded, uneven, num_raw)
        end = reading.end
        if uneven:
            self._last_uneven = end
        if self._is_quiet and self._has_sign.search(folded) is None:
            for stream in self.streams:
                stream.pass_over(folded, end)
        else:
            self._look()
        held_from = end
        for stream in self.streams:
            if stream.holds and stream.done < held_from:
                held_from = stream.done
        if held_from >= self._last_uneven:
            return reading.raw_end - end + held_from
        return reading.raw_of(held_from)

    def _look(self) -> None:
        """Lets the detectors look, and finds out whether they must do so again at the next piece."""
        reading = self._reading
        for stream in self.streams:
            stream.look()
        window = reading.window
        first_open = min([stream.done for stream in self.streams]) - reading.at
        self._is_quiet = self._has_sign.search(window, first_open) is None
        if self._is_quiet:
            for stream in self.streams:
                tail = window[-stream.signs.max_run - 1 :] if stream.signs.max_run else ""
                stream.run = len(tail) - len(tail.rstrip(stream.signs.run_chars))


@cache
def _pattern_of(signs: str) -> re.Pattern[str]:
    return re.compile(f"[{''.join(sorted(set(signs)))}]")
