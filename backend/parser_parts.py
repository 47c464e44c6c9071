"""The two parts of an answer's parser: one tells reasoning from content, one finds the tool calls in the
content.

Each part takes text and gives what is certain. vLLM's objects come in from outside; what may go wrong in them
is handled in `output_parsers.py`. Which part goes with which of vLLM's parsers: `parser_vllm.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from backend.parser_ending import NOTHING, Begun, Whole, content_fragments, ending
from backend.parser_gates import Gate, Markers, overlap
from backend.parser_stream import CallStream
from pipeline.events import CONTENT, REASONING, Fragment


class ReasoningPart(Protocol):
    """Text in, fragments of `REASONING` and `CONTENT` out."""

    def feed(self, text: str) -> Sequence[Fragment]: ...
    def finish(self) -> Sequence[Fragment]: ...


class CallsPart(Protocol):
    """Content in, fragments out. `finish` raises whatever vLLM raises; then `rest` says what has not left.

    `begun`: the calls of which something has left, with their names and arguments so far.
    """

    @property
    def begun(self) -> Sequence[Begun]: ...
    def feed(self, text: str) -> Sequence[Fragment]: ...
    def finish(self) -> Sequence[Fragment]: ...
    def rest(self) -> str: ...


class PlainContent:
    """All is content."""

    __slots__ = ()
    begun: Sequence[Begun] = ()

    def feed(self, text: str) -> Sequence[Fragment]:
        """See `CallsPart`."""
        return (Fragment(CONTENT, text),)

    def finish(self) -> Sequence[Fragment]:
        """See `CallsPart`."""
        return NOTHING

    def rest(self) -> str:
        """See `CallsPart`."""
        return ""


class MarkedReasoning:
    """Reasoning from the beginning up to an end marker, with or without a start marker before it.

    As vLLM's `BaseThinkingReasoningParser.extract_reasoning`, but for one thing: that drops all text before a
    start marker, wherever it stands; here only blanks before it are dropped, since the rest has left.
    """

    __slots__ = ("_end", "_has_begun", "_has_ended", "_start", "_tail")

    def __init__(self, start: str, end: str) -> None:
        self._start = start
        self._end = end
        self._tail = ""
        self._has_begun = False
        self._has_ended = False

    def feed(self, text: str) -> Sequence[Fragment]:
        """See `ReasoningPart`."""
        if self._has_ended:
            return (Fragment(CONTENT, text),)
        text = self._tail + text
        self._tail = ""
        if not self._has_begun:
            bare = text.lstrip()
            if self._start.startswith(bare):
                if bare != self._start:
                    self._tail = text
                    return NOTHING
                text = ""
            elif bare.startswith(self._start):
                text = bare[len(self._start) :]
            self._has_begun = True
        return self._reason(text)

    def _reason(self, text: str) -> Sequence[Fragment]:
        reasoning, end, content = text.partition(self._end)
        if end:
            self._has_ended = True
        elif kept := overlap(text, self._end):
            self._tail = text[-kept:]
            reasoning = text[:-kept]
        fragments = (Fragment(REASONING, reasoning), Fragment(CONTENT, content))
        return tuple(each for each in fragments if each.text)

    def finish(self) -> Sequence[Fragment]:
        """See `ReasoningPart`."""
        tail, self._tail = self._tail, ""
        return (Fragment(REASONING, tail),) if tail else NOTHING


class EnginePart:
    """One of vLLM's streaming engines, fed with text alone, so that only the text counts and no chunking.

    A feed costs 8 us, most of it for objects made of the answer. So plain text goes past the engine while
    that holds nothing. It does not when a plain text came out as it went in: of `[` that would say nothing,
    for a `[` held before may have come out and this one be held. White space at the end of reasoning never
    goes past it, for some engines drop it before the end.
    """

    __slots__ = ("_close", "_feed", "_last", "_markers")

    def __init__(self, feed: Callable[[str], Any], close: Callable[[], Any], markers: Markers) -> None:
        self._feed = feed
        self._close = close
        self._markers = markers
        self._last: str | None = None  # while nothing is held: the channel that plain text is in

    def feed(self, text: str) -> Sequence[Fragment]:
        """See `ReasoningPart`. Raises whatever vLLM raises."""
        last = self._last
        is_plain = not self._markers.touch(text) and (last == CONTENT or not text[-1:].isspace())
        if is_plain and last is not None:
            return (Fragment(last, text),)
        fragments = self._convert(self._feed(text))
        is_same = is_plain and len(fragments) == 1 and fragments[0].text == text
        self._last = fragments[0].channel if is_same else None
        return fragments

    def finish(self) -> Sequence[Fragment]:
        """See `ReasoningPart`."""
        return self._convert(self._close())

    def _convert(self, delta: Any) -> Sequence[Fragment]:
        if delta is None:
            return NOTHING
        pieces = ((REASONING, delta.reasoning), (CONTENT, delta.content))
        return tuple(Fragment(channel, text) for channel, text in pieces if text)


class GatedCalls:
    """Content up to where a call can begin; what comes after that is parsed whole, at the end.

    Not before the end: one call that cannot be read makes vLLM's whole parse take back the others. What
    `stream` is sure of leaves all the same, and from its first call on nothing is content any more.
    """

    __slots__ = ("_blank", "_gate", "_parts", "_problems", "_stream", "_whole")

    def __init__(
        self,
        gate: Gate,
        whole: Callable[[str], Whole],
        problems: Counter[str],
        stream: CallStream | None = None,  # the gate feeds it
    ) -> None:
        self._gate = gate
        self._whole = whole
        self._problems = problems
        self._stream = stream
        self._parts: list[str] = []  # all text, for the whole parse
        self._blank: str | None = (
            ""  # white space at the beginning: dropped if calls follow; None: text has come
        )

    def feed(self, text: str) -> Sequence[Fragment]:
        """See `CallsPart`."""
        self._parts.append(text)
        content = self._gate.feed(text)
        if self._stream is None or not self._stream.has_begun:
            return self._content(content)
        calls = self._stream.take()
        return (*self._content(content), *calls) if content else calls

    def _content(self, content: str) -> Sequence[Fragment]:
        if self._blank is not None:
            content = self._blank + content
            if not content or content.isspace():
                self._blank = content
                return NOTHING
            self._blank = None
        return content_fragments(content)

    def finish(self) -> Sequence[Fragment]:
        """See `CallsPart`."""
        rest = (self._blank or "") + self._gate.rest()
        if not self._gate.is_open:
            return content_fragments(rest)
        text = "".join(self._parts)
        return ending(text.removesuffix(rest), rest, self._whole(text), self._problems, self.begun)

    def rest(self) -> str:
        """See `CallsPart`."""
        return "" if self.begun else (self._blank or "") + self._gate.rest()

    @property
    def begun(self) -> Sequence[Begun]:
        """See `CallsPart`."""
        return () if self._stream is None else self._stream.begun


class EngineCalls:
    """As `GatedCalls`, for calls that one of vLLM's engines reads: it looks at the content before them too.

    The engine would stream arguments, but reads them from their beginning for each token: 0.8 ms a token at
    1,000 tokens of arguments and 3.3 ms at 4,000. It loses some where it corrects their types, and puts text
    that follows a call into another order if both come at once.

    White space waits for the text after it: where calls follow instead, the whole parse drops it. That parse
    gets `x` for the text that has left, since it takes 0.3 s for a long one.
    """

    __slots__ = ("_blank", "_engine", "_gate", "_has_text", "_problems", "_whole")
    begun: Sequence[Begun] = ()

    def __init__(
        self, gate: Gate, engine: EnginePart, whole: Callable[[str], Whole], problems: Counter[str]
    ) -> None:
        self._gate = gate
        self._engine = engine
        self._whole = whole
        self._problems = problems
        self._blank = ""
        self._has_text = False

    def feed(self, text: str) -> Sequence[Fragment]:
        """See `CallsPart`. Raises whatever vLLM raises."""
        content = self._gate.feed(text)
        return self._without_blank(self._engine.feed(content)) if content else NOTHING

    def finish(self) -> Sequence[Fragment]:
        """See `CallsPart`."""
        rest = self._gate.rest()
        if not self._gate.is_open:
            read = self._without_blank([*(self._engine.feed(rest) if rest else ()), *self._engine.finish()])
            return (*read, *content_fragments(self._blank))
        read = self._without_blank(self._engine.finish())
        left = "x" if self._has_text else ""
        whole = self._whole(left + self._blank + rest)
        return (*read, *ending(left, self._blank + rest, whole, self._problems))

    def rest(self) -> str:
        """See `CallsPart`."""
        return self._blank + self._gate.rest()

    def _without_blank(self, fragments: Sequence[Fragment]) -> Sequence[Fragment]:
        """Keep the white space at the end of the content."""
        if len(fragments) == 1 and not self._blank and not fragments[0].text[-1].isspace():
            self._has_text = self._has_text or fragments[0].channel == CONTENT
            return fragments
        content = self._blank + "".join(each.text for each in fragments if each.channel == CONTENT)
        text = content.rstrip()
        self._blank = content[len(text) :]
        self._has_text = self._has_text or bool(text)
        return (*(each for each in fragments if each.channel != CONTENT), *content_fragments(text))
