"""When a load test sends, how much, and what of it is measured: the settings of its loops, checked.

Not here: what is sent (`gateway/bench/workload.py`), the sending (`gateway/bench/run.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def is_warm_up(self, num_begun: int, due_s: float) -> bool:
        """Whether a conversation is before what is measured. `num_begun`: requests that came before it."""
        return num_begun < self.warm_up_requests or due_s < self.warm_up_s


class Quota:
    """Says whether one more conversation may begin. Requests are counted in whole conversations."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._num_begun = 0
        self._num_measured = 0
        self._measured_from_s: float | None = None

    def begin(self, due_s: float, num_turns: int) -> bool | None:
        """Begin a conversation: whether it is warm-up. None: it must not begin, the load is over."""
        plan = self._plan
        if plan.is_warm_up(self._num_begun, due_s):
            self._num_begun += num_turns
            return True
        if self._measured_from_s is None:
            self._measured_from_s = due_s
        if plan.num_requests is not None and self._num_measured >= plan.num_requests:
            return None
        if plan.duration_s is not None and due_s - self._measured_from_s >= plan.duration_s:
            return None
        self._num_begun += num_turns
        self._num_measured += num_turns
        return False
