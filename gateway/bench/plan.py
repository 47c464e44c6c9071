"""When a load test sends, how much, and what of it is measured: the settings of its loops, checked.

Not here: what is sent (`gateway/bench/workload.py`), the sending (`gateway/bench/run.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.bench.arrivals import POISSON


@dataclass(frozen=True, slots=True)
class Plan:
    """An open loop has a `rate` of conversations a second and perhaps a cap; a closed loop has users.

    Of `warm_up_requests` and `warm_up_s` at most one is set; what it covers comes before the `num_requests`
    or the `duration_s` that are measured.
    """

    rate: float | None = None
    arrivals: str = POISSON
    users: int | None = None  # of a closed loop
    max_concurrency: int | None = None  # of an open loop
    num_requests: int | None = None
    duration_s: float | None = None
    ramp_s: float = 0.0
    warm_up_requests: int = 0
    warm_up_s: float = 0.0
    turn_gap_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        assert (self.rate is None) != (self.users is None)
        assert self.num_requests is not None or self.duration_s is not None

    @property
    def is_open(self) -> bool:
        return self.rate is not None


class Part(NamedTuple):
    """What may be asked of a conversation: its first turns."""

    is_warm_up: bool
    num_turns: int


class Quota:
    """Says what of one more conversation may be asked, so that as many requests are sent as were wanted."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._num_warm_up = 0
        self._num_measured = 0
        self._measured_from_s: float | None = None

    @property
    def has_begun_warm_up(self) -> bool:
        """All the requests of a warm-up in requests have been begun; not that they have ended."""
        return 0 < self._plan.warm_up_requests <= self._num_warm_up

    @property
    def has_more(self) -> bool:
        """There are requests left, which a conversation has given back perhaps."""
        num_requests = self._plan.num_requests
        return num_requests is not None and self._num_measured < num_requests

    def is_over(self, due_s: float) -> bool:
        """The time in which conversations begin has passed, whatever is left."""
        duration_s, from_s = self._plan.duration_s, self._measured_from_s
        return duration_s is not None and from_s is not None and due_s - from_s >= duration_s

    def begin(self, due_s: float, num_turns: int) -> Part | None:
        """Begin a conversation. None: it must not begin, for what was wanted has been begun."""
        plan = self._plan
        if self._measured_from_s is None:
            left = num_turns if due_s < plan.warm_up_s else plan.warm_up_requests - self._num_warm_up
            if left > 0:
                part = Part(True, min(num_turns, left))
                self._num_warm_up += part.num_turns
                return part
            self._measured_from_s = due_s
        if self.is_over(due_s):
            return None
        left = num_turns if plan.num_requests is None else plan.num_requests - self._num_measured
        if left <= 0:
            return None
        part = Part(False, min(num_turns, left))
        self._num_measured += part.num_turns
        return part

    def give_back(self, part: Part, num_turns: int) -> None:
        """So many turns of a part are not asked, for one before them has failed."""
        if part.is_warm_up:
            self._num_warm_up -= num_turns  # for others only if nothing has been measured yet
        else:
            self._num_measured -= num_turns
