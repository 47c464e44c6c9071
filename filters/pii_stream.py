"""Personal data in a stream: detectors on a window of the text that grows at one end and is cut at the other.

A detector says up to where everything is decided; from there on text is held if a rule of its classes changes
what leaves. In ordinary text there is no sign of personal data: then it only matters how many characters at
the end may become the beginning of some, which is known of every piece that was there before.

Not here: the shapes of personal data (`pii.py`), and which matches stand (`settling.py`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

from filters.folding import fold, fold_and_tell
from filters.patterns import Patterns
from filters.pii import LOOK_BACK, MAX_TRIES, SIGNS, Detector, find_emails
from filters.reading import Reading
from filters.rule_folding import DEFAULT, Uneven
from filters.rules import Rule
from filters.settling import Found, Settling

_MAX_WINDOW: Final = 512  # folded characters that are kept before the window is cut
MAX_RUN: Final = max(signs.max_run for signs in SIGNS.values())
_MAX_KNOWN: Final = 8_192  # pieces whose tails are remembered: 3 MiB at most
_MAX_KNOWN_CHARS: Final = 32  # tokens are shorter


class Tail(NamedTuple):
    """What an ordinary piece leaves open at its end.

    `held`: how many characters rules hold back. `runs`: for each detector, how many may become part of
    something. `is_joined`: some run is the whole piece, so that it goes on with what was before.
    """

    held: int
    runs: Sequence[int]
    is_joined: bool


class Tails:
    """The tails of pieces, for all streams of some rules. Remembers those of short pieces, some thousands."""

    def __init__(self, rules: Patterns) -> None:
        self._signs = [SIGNS[detect] for detect in rules.detectors]
        self._has_sign = _pattern_of("".join(signs.signs for signs in self._signs))
        # For each detector: how long its runs may be, what a longer one counts and holds, whether any holds.
        self._limits: list[tuple[int, int, int, bool]] = []
        for detect, signs in zip(rules.detectors, self._signs, strict=True):
            most, keeps_end = signs.max_run, signs.keeps_end_of_run
            holds = any(rule.holds() for rule in rules.pii_of(detect))
            self._limits.append((most, most if keeps_end else most + 1, most if keeps_end else 0, holds))
        self.known: dict[str, Tail | None] = {}

    def learn(self, piece: str) -> Tail | None:
        """The tail of a piece; None if detectors must look, or it does not fold character by character."""
        folded, is_even = fold_and_tell(piece)
        tail = None
        if piece and is_even and self._has_sign.search(folded) is None:
            rests = [folded.rstrip(signs.run_chars) if signs.run_chars else folded for signs in self._signs]
            sizes = [len(folded) - len(rest) for rest in rests]
            tail = Tail(*self.held_of(sizes), len(piece) in sizes)
        if len(piece) <= _MAX_KNOWN_CHARS:
            if len(self.known) >= _MAX_KNOWN:
                self.known.clear()
            self.known[piece] = tail
        return tail

    def held_of(self, sizes: Sequence[int]) -> tuple[int, Sequence[int]]:
        """How much is held by runs of these sizes at the end of a text; the runs as far as they matter."""
        held = 0
        runs = []
        for run, (most, counted, kept, holds) in zip(sizes, self._limits, strict=True):
            if run > most:
                runs.append(counted)
                run = kept
            else:
                runs.append(run)
            if holds and run > held:
                held = run
        return held, runs


class PiiStream:
    """The matches of one detector, for each rule that asks for their class. A `settling.StreamTrack`.

    `done`: what begins before this folded offset is decided. `is_quiet`: there is no sign from there on; then
    `run` is how many characters at the end may become part of something.
    """

    __slots__ = (
        "_blocks",
        "_detect",
        "_has_sign",
        "_holds_closed",
        "_is_settled",
        "_keeps_end_of_run",
        "_max_run",
        "_num_found",
        "_reading",
        "_rules_of",
        "_run_chars",
        "_settling",
        "_shortest",
        "_track",
        "done",
        "holds",
        "is_quiet",
        "run",
    )

    def __init__(
        self, detect: Detector, rules: Sequence[Rule], reading: Reading, track: int, settling: Settling
    ) -> None:
        self._detect = detect
        signs, self._run_chars, self._max_run, self._keeps_end_of_run, self._shortest = SIGNS[detect]
        self._has_sign = _pattern_of(signs)
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
        self.is_quiet = True
        self.done = 0
        self.run = 0

    def read(self, piece: str) -> None:
        """The window has grown by a piece."""
        if self.is_quiet and self._has_sign.search(piece) is None:
            run = 0
            if self._run_chars:
                run = len(piece) - len(piece.rstrip(self._run_chars))
                if run == len(piece):
                    run += self.run
            self.pass_over(run)
        else:
            self.look()

    def pass_over(self, run: int) -> None:
        """The window has grown, and there is no sign; the run at its end is that long."""
        end, most = self._reading.end, self._max_run
        if run <= most or self._keeps_end_of_run:
            done = end - (run if run < most else most)
            if done > self.done:
                self.done = done
            self.run = end - self.done  # what is decided of it is no part
        else:
            self.done = end
            self.run = most + 1
        self._is_settled = False

    def look(self) -> None:
        """Finds what is decided in the window."""
        self._is_settled = False
        self._look(is_last=False)
        reading, most = self._reading, self._max_run
        self.is_quiet = self._has_sign.search(reading.window, self.done - reading.at) is None
        if self.is_quiet and most:
            tail = reading.window[-most - 1 :]
            run = len(tail) - len(tail.rstrip(self._run_chars))
            is_too_long = run > most and not self._keeps_end_of_run
            self.run = run if is_too_long else min(run, reading.end - self.done)

    def finish(self) -> None:
        """Finds what there is if the text ends here."""
        done = self.done
        self.done = max(done, self._look(is_last=True))  # the rest may still become more
        self._is_settled = True

    @property
    def found_to(self) -> int:
        reading = self._reading
        last = self.done + self._shortest - 1
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
    """What all detectors of a stream look at: the last of the text, under the default folding.

    Ordinary pieces are passed over: they are not in the window before `catch_up`.
    """

    __slots__ = ("_is_quiet", "_known", "_last_uneven", "_passed", "_reading", "_runs", "_tails", "streams")

    def __init__(self, rules: Patterns, tails: Tails, first_track: int, settling: Settling) -> None:
        self._reading = Reading(DEFAULT)
        self.streams = [
            PiiStream(detect, rules.pii_of(detect), self._reading, first_track + position, settling)
            for position, detect in enumerate(rules.detectors)
        ]
        self._tails = tails
        self._known = tails.known
        self._runs: Sequence[int] = [0] * len(self.streams)
        # None of them is empty, so these have all that detectors may look back to.
        self._passed: deque[str] = deque(maxlen=LOOK_BACK + MAX_RUN + 1)
        self._is_quiet = True  # there is no sign in what is not decided, and what is held is straight
        self._last_uneven = 0  # from this folded offset on, the text is as long as it is raw

    def pass_over(self, piece: str) -> int:
        """More text, if it is ordinary; returns how much is held at its end.

        Returns -1 if it must be read instead.
        """
        if not self._is_quiet:
            return -1
        tail = self._known[piece] if piece in self._known else self._tails.learn(piece)
        if tail is None:
            return -1
        self._passed.append(piece)
        held, runs, is_joined = tail
        if is_joined:
            size = len(piece)
            sizes = [
                run if run < size else run + before for run, before in zip(runs, self._runs, strict=True)
            ]
            held, runs = self._tails.held_of(sizes)
        self._runs = runs
        return held

    def catch_up(self, num_raw: int) -> None:
        """So long is the text with what was passed over."""
        if not self._passed:
            return
        reading = self._reading
        reading.pass_over(fold("".join(self._passed)), num_raw - reading.raw_end)
        self._passed.clear()
        for stream, run in zip(self.streams, self._runs, strict=True):
            stream.pass_over(run)

    def read(self, folded: str, uneven: Uneven, start: int, end: int) -> int:
        """The text from `start` to `end`, raw; returns from where on it is held."""
        self.catch_up(start)
        reading = self._reading
        if len(reading.window) > _MAX_WINDOW:
            first_open = min([stream.done for stream in self.streams])
            reading.forget_before(max(0, first_open - LOOK_BACK))
        reading.take(folded, uneven, end - start)
        held_from = folded_end = reading.end
        if uneven:
            self._last_uneven = folded_end
        for stream in self.streams:
            stream.read(folded)
            if stream.holds and stream.done < held_from:
                held_from = stream.done
        self._runs = [stream.run for stream in self.streams]
        is_straight = held_from >= self._last_uneven
        self._is_quiet = is_straight and all(stream.is_quiet for stream in self.streams)
        return end - folded_end + held_from if is_straight else reading.raw_of(held_from)


@cache
def _pattern_of(signs: str) -> re.Pattern[str]:
    return re.compile(f"[{''.join(sorted(set(signs)))}]")
