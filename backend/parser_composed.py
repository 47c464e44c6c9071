"""vLLM's parsers that are one object, or of whose parts too little is known: fed by vLLM's own composition.

What they stream of reasoning and content leaves; calls come from the whole parse at the end. Slower than the
parts: each feed makes the text so far anew, and vLLM looks for ids in all that have come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from backend.parser_ending import NOTHING, Whole, beyond, call_fragments, problem_of, whole_characters
from pipeline.events import CONTENT, REASONING, Fragment

Answer = tuple[str, Whole]  # reasoning, and what the content is


class ComposedParser:
    """An `OutputParser` over `parse_delta`."""

    __slots__ = (
        "_content",
        "_feed",
        "_has_failed",
        "_ids",
        "_max_calls",
        "_problems",
        "_reasoning",
        "_texts",
        "_unread",
        "_whole",
    )

    def __init__(
        self,
        feed: Callable[[str, list[int], bool], Any],
        whole: Callable[[str, Sequence[int]], Answer],
        max_calls: int | None,
        problems: Counter[str],
    ) -> None:
        self._feed = feed
        self._whole = whole
        self._max_calls = max_calls
        self._problems = problems
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._reasoning: list[str] = []  # that has left
        self._content: list[str] = []
        self._unread: list[str] = []  # that gave nothing yet: markup, calls, and all since a failure
        self._has_failed = False

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        """See `OutputParser`."""
        self._texts.append(text)
        self._ids += ids
        if self._has_failed:
            self._unread.append(text)
            return NOTHING
        return self._step(text, list(ids), False)

    def finish(self) -> Sequence[Fragment]:
        """See `OutputParser`."""
        last = NOTHING if self._has_failed else self._step("", [], True)
        try:
            reasoning, whole = self._whole("".join(self._texts), self._ids)
        except Exception as error:  # whatever vLLM's parsers raise
            self._problems[problem_of(error)] += 1
            return (*last, *self._note(("", "".join(self._unread))))
        more_reasoning = beyond("".join(self._reasoning), reasoning, self._problems)
        more_content = beyond("".join(self._content), whole.content, self._problems)
        return (
            *last,
            *self._note((more_reasoning, more_content)),
            *call_fragments(whole.calls[: self._max_calls]),
        )

    def _step(self, text: str, ids: list[int], finished: bool) -> Sequence[Fragment]:
        try:
            delta = self._feed(text, ids, finished)
        except Exception:  # whatever vLLM's parsers raise
            self._problems["stream_raised"] += 1
            self._has_failed = True
            self._unread.append(text)
            return NOTHING
        fragments = NOTHING if delta is None else self._note((delta.reasoning, delta.content))
        if not fragments:
            self._unread.append(text)
        return fragments

    def _note(self, pieces: tuple[str | None, str | None]) -> Sequence[Fragment]:
        reasoning, content = pieces
        if reasoning:
            self._reasoning.append(reasoning)
        if content:
            self._content.append(content)
        named = ((REASONING, reasoning), (CONTENT, content))
        return [Fragment(name, whole_characters(text)) for name, text in named if text]
