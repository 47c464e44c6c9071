"""Hops 9 to 11 for one choice: ids -> text -> stop strings -> channels -> filter -> text that may leave.

One object per choice. The order is fixed: UTF-8, stop strings on the raw text, channels, then the filter,
so that a stop ends the text *before* the filter looks at its tail. What derives from a character (its
logprobs) waits here until that character has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from filters.hit import Hit
from pipeline.detokenizer import Detokenizer
from pipeline.events import PositionLogprobs
from pipeline.ports import TextFilter
from pipeline.stop_strings import StopMatcher
from pipeline.values import FinishReason, TokenLogprobs

# vLLM's finish reasons in OpenAI's words; `abort` and `error` are no finish but a fault.
FINISH: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "repetition": "stop"}
REWRITES: Final = frozenset(("mask", "redact", "block"))


class Outbound:
    """Safe text of one choice, in order. `finish` is set when the choice has ended; then it refuses more.

    `ended_here` says that the end was decided here (a stop string, a block): the engine must be aborted.
    """

    __slots__ = (
        "_detokenizer",
        "_filter",
        "_hides_stop",
        "_hold_end",
        "_open",
        "_queue",
        "_rewritten",
        "_stops",
        "_text_end",
        "ended_here",
        "finish",
        "hits",
        "is_new_hold",
        "logprobs",
        "num_held",
        "stop_reason",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher | None = None,
        text_filter: TextFilter | None = None,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._filter = text_filter
        self._hides_stop = not include_stop
        self._open: list[tuple[int, int, TokenLogprobs]] = []  # token, start: its text is not all there yet
        self._queue: deque[PositionLogprobs] = deque()
        self._rewritten: list[tuple[int, int]] = []
        self._text_end = 0  # raw characters so far; counted only for logprobs
        self.finish: FinishReason | None = None
        self.ended_here = False
        self.stop_reason: int | str | None = None
        self.num_held = 0  # raw characters that the filter holds now
        self.is_new_hold = False  # the last feed began to hold, or what was held before it has all left
        self._hold_end = 0  # raw characters up to which the present hold reached when it began
        self.hits: list[Hit] = []
        self.logprobs: list[PositionLogprobs] = []  # released with the text, for the owner to take

    def feed(
        self,
        ids: list[int],
        finish: str | None = None,
        stop: int | str | None = None,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> str:
        """The text that may leave now. `finish` and `stop` as in `pipeline.ports.Sink.tokens`."""
        if finish is None and logprobs is None and self._stops is None and self.finish is None:
            text = self._detokenizer.feed(ids)  # the token path
            return text if self._filter is None else self._filtered(text)
        assert self.finish is None, "fed after its end"
        if finish == "stop" and self._hides_stop:
            ids = ids[:-1]  # the token that stopped it is not shown, as in vLLM
        text = self._decoded(ids, logprobs)
        if finish is not None and self.finish is None:
            text += self._last_text(FINISH[finish], stop)
        elif self.finish is not None:
            self.ended_here = finish is None
        if self._filter is not None:
            text = self._filtered(text)
        if self._queue:
            self._release_logprobs()
        return text

    def expire(self) -> str:
        """Text was held for longer than its limit: what the filter's policy lets go now."""
        assert self._filter is not None, "only a filter holds text"
        text = self._filter.expire()
        self._settle()
        if self._queue:
            self._release_logprobs()
        return text

    @property
    def peak_held(self) -> int:
        """The most raw characters that the filter ever held."""
        return 0 if self._filter is None else self._filter.peak_held

    @property
    def num_leaked(self) -> int:
        """Raw characters that the filter let go undecided at one of its bounds."""
        return 0 if self._filter is None else self._filter.num_leaked

    def _decoded(self, ids: list[int], logprobs: Sequence[TokenLogprobs] | None) -> str:
        """The text of these ids up to a stop string; id by id where it matters which id made which text."""
        stops = self._stops
        if logprobs is None and (stops is None or not stops.num_exempt_tokens):
            return self._searched(self._detokenizer.feed(ids), len(ids))
        parts = []
        for position, token_id in enumerate(ids):
            text = self._detokenizer.feed([token_id])
            if logprobs is not None:
                self._place(token_id, text, logprobs[position])
            parts.append(self._searched(text, 1))
            if self.finish is not None:
                break
        return "".join(parts)

    def _searched(self, text: str, num_ids: int) -> str:
        """Without what may be the beginning of a stop string; a whole one ends the choice."""
        stops = self._stops
        if stops is None:
            return text
        text = stops.feed(text, num_ids)
        if stops.matched is not None:
            self.finish, self.stop_reason = "stop", stops.matched
        return text

    def _last_text(self, finish: FinishReason, stop: int | str | None) -> str:
        """The engine has ended: what an incomplete character or stop string held back."""
        rest = self._detokenizer.flush()
        self._text_end += len(rest)
        self._close_open()
        text = self._searched(rest, 0)
        if self.finish is None:
            self.finish, self.stop_reason = finish, stop
            if self._stops is not None:
                text += self._stops.flush()
        return text

    def _place(self, token_id: int, text: str, entry: TokenLogprobs) -> None:
        """Queue a token's logprobs behind its text, which may end with a later token, in mid-character."""
        start = self._text_end
        self._text_end += len(text)
        if text:
            self._close_open()
        self._open.append((token_id, start, self._visible(entry)))
        if not self._detokenizer.is_mid_character:
            self._close_open()

    def _close_open(self) -> None:
        """The text so far is certain: it is all that the open tokens took part in."""
        end = self._text_end
        self._queue += [PositionLogprobs(token, start, end, entry) for token, start, entry in self._open]
        self._open.clear()

    def _visible(self, entry: TokenLogprobs) -> TokenLogprobs:
        """With rules that deny, alternatives stay here: one of them could complete a denied word."""
        if self._filter is None or not self._filter.is_active or len(entry.token_ids) == 1:
            return entry
        return TokenLogprobs(entry.token_ids[:1], entry.logprobs[:1], entry.rank)

    def _filtered(self, text: str) -> str:
        text_filter = self._filter
        assert text_filter is not None
        if text:
            text = text_filter.feed(text)
        if self.finish is not None and not text_filter.blocked:
            text += text_filter.flush()
        self.num_held = held = text_filter.held
        if held:
            released = text_filter.released
            self.is_new_hold = released >= self._hold_end
            if self.is_new_hold:
                self._hold_end = released + held
        if text_filter.hits or text_filter.blocked:
            self._settle()
        return text

    def _settle(self) -> None:
        """Take over what the filter found; a block ends the choice."""
        text_filter = self._filter
        assert text_filter is not None
        self.num_held = text_filter.held
        self.hits += text_filter.hits
        if self._queue or self._open:
            self._rewritten += [
                (hit.start, hit.end) for hit in text_filter.hits if hit.action in REWRITES and not hit.shadow
            ]
        text_filter.hits.clear()
        if text_filter.blocked:
            self.ended_here = self.ended_here or self.finish is None
            self.finish, self.stop_reason = "content_filter", None

    def _release_logprobs(self) -> None:
        """Move the entries whose characters have all left;

        drop those that touch a rewritten or a cut character.
        """
        released = self._released()
        queue = self._queue
        while queue and queue[0].end <= released:
            entry = queue.popleft()
            if not any(start < entry.end and entry.start < end for start, end in self._rewritten):
                self.logprobs.append(entry)
        if self.finish is not None:
            queue.clear()
            self._open.clear()
        if not queue and not self._open:
            self._rewritten.clear()

    def _released(self) -> int:
        """Raw characters whose fate is settled."""
        if self._filter is not None:
            return self._filter.released
        return self._text_end if self._stops is None else self._stops.released
