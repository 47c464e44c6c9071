"""Hops 9 to 11 for one choice: ids -> text -> stop strings -> channels -> text that may leave, as events.

One object per choice; every kind of delivery is made of what its `feed` returns. The order is fixed: UTF-8,
stop strings on the raw text, channels, then each channel's own stages (`channel_text.py`), so that a stop
ends the text *before* a filter looks at its tail. What derives from a character (its logprobs) leaves after
it.

Not here: which stages a request has (`outbound_plan.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from filters.text_filter import TextFilter
from pipeline.any_outbound import NOTHING, AnyOutbound
from pipeline.channel_text import NO_STARTS
from pipeline.channels import Channels
from pipeline.events import CONTENT, Event, TextDelta
from pipeline.logprob_queue import LogprobQueue
from pipeline.pieces import Detokenizer
from pipeline.stop_strings import StopMatcher
from pipeline.values import FinishReason, TokenLogprobs
from pipeline.vocabulary import TextsById

# vLLM's finish reasons in OpenAI's words; `abort` and `error` are no finish but a fault.
FINISH: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "repetition": "stop"}


class Outbound(AnyOutbound):
    """The way out of ids. A stop string ends the choice here, as a block does."""

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_filter",
        "_hides_stop",
        "_num_free",
        "_queue",
        "_starts",
        "_stops",
        "_texts",
        "_units",
        "is_new_hold",
        "is_plain",
    )

    is_new_hold: bool

    def __init__(
        self,
        detokenizer: Detokenizer,
        channels: Channels,
        stops: StopMatcher | None = None,
        include_stop: bool = False,
        queue: LogprobQueue | None = None,
    ) -> None:
        super().__init__(channels)
        self._detokenizer = detokenizer
        self._stops = stops
        self._hides_stop = not include_stop
        self._queue = queue
        # All is content, and it does not matter which id made which text: `feed_text` may be used.
        self.is_plain = not channels.has_parser and (stops is None or not stops.num_exempt_tokens)
        self.is_new_hold = False
        # While nothing is under way: the text of an id, the characters for which it must be fed, what else
        # must see it.
        self._texts: TextsById | None = None
        self._starts: frozenset[str] = NO_STARTS
        self._filter: TextFilter | None = None
        self._units: deque[tuple[str, Sequence[int]]] = deque()  # the stop matcher holds a part of their text
        self._num_free = 0  # characters of them that it does not
        self._entries: deque[TokenLogprobs] = deque()  # of ids that are not yet whole characters

    def feed(
        self,
        ids: list[int],
        finish: str | None = None,
        stop: int | str | None = None,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> Sequence[Event]:
        """What may leave now. `finish`, `stop` and `logprobs` as in `pipeline.ports.Sink.tokens`."""
        assert self.finish is None, "fed after its end"
        if finish is None and logprobs is None and self.is_plain:
            text = self.feed_text(ids)
            if self.needs_look:
                return self.look(text)
            return (TextDelta(CONTENT, text),) if text else NOTHING
        self._texts = None
        if finish == "stop" and self._hides_stop:
            ids = ids[:-1]  # the token that stopped it is not shown, as in vLLM
        self._decode(ids, logprobs)
        if finish is not None:
            if self.finish is None:
                self._engine_ended(FINISH[finish], stop)
            self.ended_here = False
        self.is_new_hold = self._channels.active.is_new_hold
        return self._channels.take_events()

    def feed_text(self, ids: list[int]) -> str:
        """The token path, while `is_plain`: the content that may leave now. What else follows is in `look`.

        Mostly nothing is under way but in the filter. Then the other stages are not even touched: with many
        streams what costs is not work but how many objects a token finds cold.
        """
        texts = self._texts
        if texts is None or len(ids) != 1:
            return self._feed_text(ids)
        try:
            text = texts[ids[0]]
        except IndexError:  # no token of the vocabulary
            text = None
        if not text or not self._starts.isdisjoint(text):
            return self._feed_text(ids)
        text_filter = self._filter
        if text_filter is None:
            return text
        text = text_filter.feed(text)
        self.is_new_hold = text_filter.held > 0 and self._content.note_hold(text_filter)
        if text_filter.hits or text_filter.blocked:
            self._content.settle(text_filter)
            self.needs_look = True
        return text

    def _feed_text(self, ids: list[int]) -> str:
        """The same through all stages."""
        assert self.finish is None, "fed after its end"
        content, stops = self._content, self._stops
        text = self._detokenizer.feed(ids)
        if stops is not None:
            text = stops.feed(text, len(ids))
        text = content.feed(text)
        self.is_new_hold = content.is_new_hold
        self.needs_look = content.needs_look or (stops is not None and stops.matched is not None)
        now = content.filter_now if stops is None else None
        self._texts = None if now is None else self._detokenizer.texts_now
        if now is not None:
            self._starts, self._filter = now
        return text

    def _end_if_found(self) -> None:
        super()._end_if_found()
        if self._stops is not None and self._stops.matched is not None:
            self._close("stop", self._stops.matched)

    @property
    def waits_for_parser(self) -> bool:
        return self._channels.num_kept > 0

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._channels.num_reasoning_tokens

    def _decode(self, ids: list[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """The text of these ids; in pieces where it matters which id made which text."""
        stops = self._stops
        needs_pieces = self._channels.has_parser or logprobs is not None
        if not needs_pieces and (stops is None or not stops.num_exempt_tokens):
            self._found(self._detokenizer.feed(ids), ids)
            return
        self._entries += (logprobs or ())[: len(ids)]
        for piece in self._detokenizer.pieces(ids):
            self._note_logprobs(piece.text, len(piece.ids))
            self._found(piece.text, piece.ids)
            if self.finish is not None:
                return

    def _note_logprobs(self, text: str, num_ids: int) -> None:
        """The logprobs of the next ids wait for the text that those made."""
        if self._queue is not None and self._entries:
            entries = [self._entries.popleft() for _ in range(num_ids)]
            self._queue.add([entry.token_ids[0] for entry in entries], text, entries)

    def _found(self, text: str, ids: Sequence[int]) -> None:
        """Whole characters and their ids: on to the channels as far as no stop string may begin in them."""
        stops = self._stops
        if stops is None:
            self._pass(text, ids)
            return
        free = stops.feed(text, len(ids))
        if self._channels.has_parser:
            self._units.append((text, ids))
            self._release_units(len(free))
        else:
            self._pass(free, ids)
        if stops.matched is not None:
            if self._num_free and self.finish is None:
                text, ids = self._units[0]
                self._pass(text[: self._num_free], ids)
            self._close("stop", stops.matched)

    def _release_units(self, num_characters: int) -> None:
        """So many more characters are free of stop strings. A parser gets the text of a token whole."""
        self._num_free += num_characters
        while self._units and len(self._units[0][0]) <= self._num_free and self.finish is None:
            text, ids = self._units.popleft()
            self._num_free -= len(text)
            self._pass(text, ids)

    def _engine_ended(self, finish: FinishReason, stop: int | str | None) -> None:
        """What an incomplete character or stop string held back, and the end."""
        for piece in self._detokenizer.flush_pieces():
            self._note_logprobs(piece.text, len(piece.ids))
            self._found(piece.text, piece.ids)
        if self._stops is not None and self.finish is None:
            held = self._stops.flush()
            if self._channels.has_parser:
                self._release_units(len(held))
            else:
                self._pass(held, ())
        self._close(finish, stop)

    def _pass(self, text: str, ids: Sequence[int]) -> None:
        self._channels.feed(text, ids)
        self._end_if_over()

    def _close(self, finish: FinishReason, stop_reason: int | str | None) -> None:
        self._texts = None
        super()._close(finish, stop_reason)
