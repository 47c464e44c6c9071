"""One choice's answer through both parts of its parser, and what happens when vLLM fails in the middle of
it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from backend.parser_composed import Answer
from backend.parser_ending import NOTHING, beyond, content_fragments, ending, problem_of, whole_characters
from backend.parser_parts import CallsPart, ReasoningPart
from pipeline.events import CONTENT, REASONING, Fragment


class ChoiceParser:
    """One choice: reasoning and content told apart, calls found in the content. See `OutputParser`."""

    __slots__ = (
        "_calls",
        "_content",
        "_max_calls",
        "_problems",
        "_reasoned",
        "_reasoning",
        "_texts",
        "_unread",
        "_whole",
    )

    def __init__(
        self,
        reasoning: ReasoningPart,
        calls: CallsPart,
        whole: Callable[[str, Sequence[int]], Answer],
        texts: list[str],
        max_calls: int | None,
        problems: Counter[str],
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._whole = whole
        self._texts = texts  # all that came
        self._max_calls = max_calls
        self._problems = problems
        self._reasoned: list[str] = []  # that has left
        self._content: list[str] = []
        self._unread: list[str] | None = None  # since vLLM's parser has failed

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        """See `OutputParser`. The ids are not looked at: only the text counts, as in vLLM's whole parse."""
        self._texts.append(text)
        if self._unread is not None:
            self._unread.append(text)
            return NOTHING
        try:
            return self._cut(self._note(self._route(self._reasoning.feed(text))))
        except Exception:  # whatever vLLM's parsers raise
            self._problems["stream_raised"] += 1
            self._unread = [text]
            return NOTHING

    def finish(self) -> Sequence[Fragment]:
        """See `OutputParser`."""
        if self._unread is not None:
            return self._recover(self._unread)
        try:
            last = self._note(self._route(self._reasoning.finish()))
        except Exception:
            self._problems["stream_raised"] += 1
            return self._recover([])
        try:
            return self._cut([*last, *self._calls.finish()])
        except Exception as error:
            self._problems[problem_of(error)] += 1
            return self._cut([*last, *content_fragments(self._calls.rest())])

    def _route(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        routed: list[Fragment] = []
        for fragment in fragments:
            if fragment.channel == CONTENT:
                routed += self._calls.feed(fragment.text)
            else:
                routed.append(fragment)
        return routed

    def _note(self, fragments: list[Fragment]) -> list[Fragment]:
        for fragment in fragments:
            if fragment.channel == CONTENT:
                self._content.append(fragment.text)
            elif fragment.channel == REASONING:
                self._reasoned.append(fragment.text)
        return fragments

    def _recover(self, unread: list[str]) -> Sequence[Fragment]:
        """What the whole parse has beyond what has left; if it fails too, that is content, all of it.

        But not where a call has begun: then it is most likely a part of that.
        """
        begun = self._calls.begun
        try:
            reasoning, whole = self._whole("".join(self._texts), ())
        except Exception as error:
            self._problems[problem_of(error)] += 1
            return content_fragments("" if begun else self._calls.rest() + "".join(unread))
        more = beyond("".join(self._reasoned), reasoning, self._problems)
        reasoned = (Fragment(REASONING, whole_characters(more)),) if more else NOTHING
        left = "".join(self._content)
        return self._cut([*reasoned, *ending(left, "", whole, self._problems, begun)])

    def _cut(self, fragments: list[Fragment]) -> list[Fragment]:
        limit = self._max_calls
        return fragments if limit is None else [each for each in fragments if each.call < limit]
