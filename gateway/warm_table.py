"""What is known of each warm prompt on one worker, and which is due next. No I/O: time comes in as `now_s`.

    pending -> warming -> warm -> (evicted) -> pending
                       -> (error) -> pending, later; failed after too many, or when trying again is no use
    pending -> short                    it has not even one KV block, so nothing of it can be cached
    any     -> (the worker is lost, drains or was restarted) -> pending

What a lost block proves. A live request that finds fewer of a prompt's blocks than were warmed shows that the
engine has evicted them, and it has just computed them again itself. So where it begins with a whole warm
prompt, warming again only costs a step; it checks that the engine really keeps the prompt (prefix caching may
be off, or the cache too small) and learns what a use can expect. Where it shares just the beginning of a
longer one, the rest of that one is lost and only warming again brings it back. Engines evict the least
recently used first, so prompts that nobody uses go first, and under pressure warming them drives out others:
each warm-up that no use has rewarded doubles the pause before the next.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.warm_tree import WarmTree
from pipeline.encoding import BYTES_PER_ID

PENDING, WARMING, WARM, FAILED, SHORT = "pending", "warming", "warm", "failed", "short"
STATES: Final = (PENDING, WARMING, WARM, FAILED, SHORT)
LIFECYCLE: Final[dict[str, dict[str, str]]] = {
    PENDING: {"begin": WARMING, "skip": SHORT, "give_up": FAILED, "lose": PENDING},
    WARMING: {"done": WARM, "retry": PENDING, "give_up": FAILED, "lose": PENDING},
    WARM: {"evict": PENDING, "lose": PENDING},
    FAILED: {"lose": PENDING},
    SHORT: {"lose": SHORT},
}
START, RECONNECT, EVICTED = "start", "reconnect", "evicted"  # why a prompt is warmed

MAX_ATTEMPTS: Final = 8  # with these pauses over about two minutes
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0
MAX_DOUBLINGS: Final = 6  # of the pause between two warm-ups that no use has rewarded
_ORDER: Final = {FAILED: 0, WARMING: 1, PENDING: 2, WARM: 3, SHORT: 4}


@dataclass(frozen=True, slots=True)
class WarmKey:
    """One warm prompt for one salt. `number` is its place in the configuration, `salt_number` its salt's."""

    number: int
    salt_number: int
    model: str
    salt: str | None
    title: str  # the prompt's


class WarmRow:
    """One warm prompt for one salt on one worker."""

    __slots__ = (
        "best_tokens",
        "cached_tokens",
        "due_s",
        "error",
        "expected_tokens",
        "ids",
        "is_check",
        "is_indexed",
        "is_tried",
        "key",
        "num_attempts",
        "num_tokens",
        "num_unused",
        "num_warmups",
        "position",
        "reason",
        "state",
        "warmed_s",
        "warmed_tokens",
    )

    def __init__(self, key: WarmKey, position: int) -> None:
        self.key = key
        self.position = position
        self.state = PENDING
        self.reason = START
        self.error = ""
        self.ids: bytes | None = None  # None: not yet rendered
        self.num_tokens = 0
        self.warmed_tokens = 0  # of them, those in whole blocks: what can be cached
        self.num_warmups = 0
        self.is_indexed = False
        self.due_s = 0.0
        self.forget()

    def forget(self) -> None:
        """The worker's cache may be gone."""
        self.is_tried = False  # since the worker became ready
        self.num_attempts = 0  # that failed, one after the other
        self.num_unused = 0  # warm-ups after an eviction that no use has rewarded yet
        self.warmed_s: float | None = None
        self.cached_tokens: int | None = None  # what the engine found at the last use or warm-up
        self.best_tokens = 0  # the most that it ever found, up to `warmed_tokens`
        self.expected_tokens = self.warmed_tokens  # fewer at a use mean that some were evicted
        self.is_check = False  # the warm-up that is due follows a use which has computed the prompt itself

    def shown(self, now_s: float) -> dict[str, Any]:
        """For /ready. Salts may be secret, so only their place in the configuration is told."""
        key = self.key
        age_s = None if self.warmed_s is None else round(max(0.0, now_s - self.warmed_s), 1)
        return {
            "prompt": key.number,
            "title": key.title,
            "model": key.model,
            "salt": None if key.salt is None else key.salt_number,
            "state": self.state,
            "reason": self.reason,
            "error": self.error,
            "tokens": self.num_tokens,
            "warmed_tokens": self.warmed_tokens,
            "cached_tokens": self.cached_tokens,
            "warmed_age_s": age_s,
            "num_warmups": self.num_warmups,
        }


class WarmTable:
    """The rows of one worker. `block_tokens` is its KV block, `max_tokens` its context length."""

    def __init__(
        self, keys: Sequence[WarmKey], block_tokens: int, max_tokens: int, rewarm_interval_s: float
    ) -> None:
        self.rows = [WarmRow(key, position) for position, key in enumerate(keys)]
        self.counts: Counter[str] = Counter({PENDING: len(self.rows)})
        self.num_untried = len(self.rows)
        self._block_tokens = block_tokens
        self._max_tokens = max_tokens
        self._rewarm_interval_s = rewarm_interval_s
        self._salts = {key.salt for key in keys}
        self._tree: WarmTree[WarmRow] = WarmTree(block_tokens)
        self._due: list[tuple[float, int]] = []  # a heap of (due_s, position); those of the past may be stale

    # -- the worker ----------------------------------------------------------------------------------------

    def begin(self, reason: str, now_s: float) -> None:
        """The worker is ready: everything is due, in the order of the configuration."""
        for row in self.rows:
            if row.state is PENDING:
                row.reason = reason
                self._schedule(row, now_s)

    def lose(self) -> None:
        """The worker is not ready any more; nothing is due until it is again."""
        for row in self.rows:
            self._advance(row, "lose")
            row.forget()
            row.is_tried = row.state is SHORT
            row.error = row.error if row.is_tried else ""
        self._due = []
        self.num_untried = sum(not row.is_tried for row in self.rows)

    # -- one warm-up ---------------------------------------------------------------------------------------

    def next(self, now_s: float) -> WarmRow | None:
        """The row that is due, None when none is. It stays due until something happens to it."""
        while self._due:
            due_s, position = self._due[0]
            row = self.rows[position]
            if row.state is PENDING and row.due_s == due_s:
                return row if due_s <= now_s else None
            heapq.heappop(self._due)
        return None

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until `next` has a row, None when nothing is planned."""
        if self.next(now_s) is not None:
            return 0.0
        return max(0.0, self._due[0][0] - now_s) if self._due else None

    def learn(self, row: WarmRow, ids: bytes) -> bool:
        """A row's ids are known; whether it can be warmed."""
        num_tokens = len(ids) // BYTES_PER_ID
        row.ids, row.num_tokens = ids, num_tokens
        row.warmed_tokens = row.expected_tokens = num_tokens // self._block_tokens * self._block_tokens
        if not row.warmed_tokens:
            row.error = f"{num_tokens} tokens; a KV block has {self._block_tokens}"
            self._advance(row, "skip")
            self._tried(row)
        elif num_tokens >= self._max_tokens - 1:  # one more for the tail, and one that is generated
            self.give_up(row, f"{num_tokens} tokens; the context has {self._max_tokens}")
        return row.state is PENDING

    def start(self, row: WarmRow) -> bytes:
        """The ids to send: the whole blocks, and one id more.

        The engine computes a prompt's last token always. With one more, a warm-up that finds everything
        reports all of `warmed_tokens`, and the end of the prompt in half a block costs nothing.
        """
        assert row.ids is not None
        self._advance(row, "begin")
        num_bytes = BYTES_PER_ID * row.warmed_tokens
        return row.ids[:num_bytes] + (row.ids[num_bytes : num_bytes + BYTES_PER_ID] or row.ids[:BYTES_PER_ID])

    def done(self, row: WarmRow, cached_tokens: int | None, now_s: float) -> None:
        """The warm-up has ended; `cached_tokens` is what the engine already had, None if it does not tell."""
        assert row.ids is not None
        self._advance(row, "done")
        self._tried(row)
        row.num_warmups += 1
        row.num_attempts, row.error = 0, ""
        row.warmed_s, row.cached_tokens = now_s, cached_tokens
        if cached_tokens is not None:
            self._saw(row, cached_tokens)
            if row.is_check:
                row.expected_tokens = row.best_tokens
        row.is_check = False
        if not row.is_indexed:
            row.is_indexed = True
            self._tree.insert(row.ids[: BYTES_PER_ID * row.warmed_tokens], row.key.salt, row)

    def failed(self, row: WarmRow, error: str, may_retry: bool, now_s: float) -> None:
        """The warm-up has failed. It is tried again after a pause, a bounded number of times."""
        row.num_attempts += 1
        if not may_retry or row.num_attempts >= MAX_ATTEMPTS:
            self.give_up(row, error)
            return
        row.error = error
        self._advance(row, "retry")
        self._tried(row)
        self._schedule(row, now_s + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (row.num_attempts - 1)))

    def give_up(self, row: WarmRow, error: str) -> None:
        """Not tried again before the worker is ready anew."""
        row.error = error
        self._advance(row, "give_up")
        self._tried(row)

    # -- what live requests tell ---------------------------------------------------------------------------

    def observe(
        self, ids: memoryview, salt: str | None, cached_tokens: int, looked_up_s: float, now_s: float
    ) -> bool:
        """A live request found so many of its tokens in the cache; whether a warm-up is due that was not.

        `looked_up_s` is when the engine looked: what was warmed later says nothing.
        """
        if salt not in self._salts:
            return False
        used, damaged = self._tree.match(ids, salt, cached_tokens)
        for row in used:
            self._used(row, cached_tokens)
        if damaged is None:
            return False
        cached_tokens = cached_tokens // self._block_tokens * self._block_tokens
        lost = [row for row in damaged if self._has_lost(row, cached_tokens, looked_up_s)]
        for row in lost:
            self._evict(row, row in used, now_s)
        return bool(lost)

    def _used(self, row: WarmRow, cached_tokens: int) -> None:
        row.cached_tokens = cached_tokens
        self._saw(row, cached_tokens)
        row.expected_tokens = max(row.expected_tokens, row.best_tokens)
        if cached_tokens >= row.warmed_tokens:
            row.num_unused = 0

    def _saw(self, row: WarmRow, cached_tokens: int) -> None:
        row.best_tokens = max(row.best_tokens, min(cached_tokens, row.warmed_tokens))

    def _has_lost(self, row: WarmRow, cached_tokens: int, looked_up_s: float) -> bool:
        is_warm = row.state is WARM and row.warmed_s is not None and row.warmed_s <= looked_up_s
        return is_warm and cached_tokens < row.expected_tokens

    def _evict(self, row: WarmRow, is_check: bool, now_s: float) -> None:
        self._advance(row, "evict")
        row.reason, row.is_check = EVICTED, is_check
        assert row.warmed_s is not None
        pause_s = self._rewarm_interval_s * 2.0 ** min(row.num_unused, MAX_DOUBLINGS)
        row.num_unused += 1
        self._schedule(row, max(now_s, row.warmed_s + pause_s))

    # -- for operators -------------------------------------------------------------------------------------

    def shown(self, now_s: float, max_rows: int) -> list[dict[str, Any]]:
        """At most so many rows, those that are not warm first."""
        rows = self.rows
        if len(rows) > max_rows:
            rows = heapq.nsmallest(max_rows, rows, key=lambda row: (_ORDER[row.state], row.position))
        return [row.shown(now_s) for row in rows]

    def _schedule(self, row: WarmRow, due_s: float) -> None:
        row.due_s = due_s
        heapq.heappush(self._due, (due_s, row.position))

    def _tried(self, row: WarmRow) -> None:
        self.num_untried -= not row.is_tried
        row.is_tried = True

    def _advance(self, row: WarmRow, event: str) -> None:
        self.counts[row.state] -= 1
        row.state = LIFECYCLE[row.state][event]
        self.counts[row.state] += 1
