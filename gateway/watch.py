"""The clock of all open requests: one task that looks ten times a second at those that are due.

A timer per request would cost more to move at every token than this costs in total. Ten times a second, so
that a deadline reaches the worker within 200 ms. A look takes 1 to 2 us, for all that it reads is cold, and
with 20 tokens a second half of that is a token's. So an answer says when the next look may be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import Final

from backend.fault_log import log_fault
from gateway.answer import Answer
from gateway.client import Client
from gateway.metrics import Metrics
from pipeline.errors import HeadraceError

PERIOD_S: Final = 0.1
PUBLISH_PERIODS: Final = 10  # once a second


@dataclass(slots=True, eq=False)
class _Open:
    """An open request. `request` is None once it is removed: its place in the heap holds nothing of it."""

    request: tuple[Client, Answer] | None


class OpenRequests:
    """Every request whose response is not complete."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._open: dict[Client, _Open] = {}
        self._due: list[tuple[float, int, _Open]] = []  # a heap; removed ones keep their place
        self._numbers = count()
        self._peak = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, client: Client, answer: Answer) -> None:
        self._open[client] = one = _Open((client, answer))
        heappush(self._due, (0.0, next(self._numbers), one))

    def remove(self, client: Client) -> None:
        one = self._open.pop(client, None)
        if one is not None:
            one.request = None
        self._peak = max(self._peak, client.outlet.peak)

    def fail_all(self, error: HeadraceError) -> None:
        """Cut every running answer with a named error."""
        for one in list(self._open.values()):
            if one.request is not None:
                one.request[1].fail(error)

    async def watch(self, publish: Callable[[], None], looks: Sequence[Callable[[float], None]] = ()) -> None:
        """Until it is cancelled. `publish` brings metrics up to date, `looks` watch over other things."""
        try:
            await self._watch(publish, looks)
        finally:
            self._metrics.flush()  # what other processes show of this one when it has ended

    async def _watch(self, publish: Callable[[], None], looks: Sequence[Callable[[float], None]]) -> None:
        periods = 0
        while True:
            await asyncio.sleep(PERIOD_S)
            for look in (self.look, *looks):
                try:
                    look(monotonic())
                except Exception as error:  # a fault in one must not stop the clock of all limits
                    log_fault(error, "none")
            periods += 1
            if periods % PUBLISH_PERIODS == 0:
                try:
                    publish()
                except Exception as error:  # gauges are not worth the clock of all limits
                    log_fault(error, "none")

    def look(self, now_s: float) -> None:
        """Enforce the limits of every open request. `now_s` never goes back."""
        due: list[_Open] = []
        while self._due and self._due[0][0] <= now_s:
            due.append(heappop(self._due)[2])
        for one in due:
            if one.request is not None:
                heappush(self._due, (_next_look_s(*one.request, now_s), next(self._numbers), one))

    def publish(self) -> None:
        """Bring the metrics that are counted elsewhere up to date."""
        metrics = self._metrics
        metrics.flush()
        metrics.open_requests.set(len(self._open))
        outlets = {client.outlet for client in self._open}  # a conversation's responses share one
        metrics.buffered_bytes.set(sum(outlet.num_buffered for outlet in outlets))
        self._peak = max([self._peak, *(outlet.peak for outlet in outlets)])
        metrics.buffered_peak.set(self._peak)


def _next_look_s(client: Client, answer: Answer, now_s: float) -> float:
    """Enforce a request's limits; the time before which none can be passed."""
    try:
        _look_at(client, answer, now_s)
        return answer.next_check_s(now_s)
    except Exception as error:  # one stream's fault must not stop the clock of all the others
        log_fault(error, client.record.request_id)
        _give_up(client, answer)
        return now_s


def _give_up(client: Client, answer: Answer) -> None:
    """End a stream that cannot be looked after any more, politely if that still works."""
    try:
        answer.fail(HeadraceError("An internal error ended this stream."))
    except Exception as error:
        log_fault(error, client.record.request_id)
        client.close()


def _look_at(client: Client, answer: Answer, now_s: float) -> None:
    if not answer.is_ended:
        answer.check(now_s)
    reason = answer.check_reader(now_s)
    if reason is not None:
        client.outlet.drop()
        client.on_gone(reason)
        client.close()
