"""What vLLM's whole parse makes of an answer, and what of that is still to leave when the text has ended.

What has left cannot be taken back. Where the whole parse contradicts it, it stays, nothing leaves twice, and
`problems["contradiction"]` counts the case. Not here: who knows what has left (`parser_parts.py`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from pipeline.events import CONTENT, TOOL_ARGUMENTS, TOOL_NAME, Fragment

NOTHING: Final[tuple[Fragment, ...]] = ()


_HALF: Final = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which no encoding has


class TooLong(Exception):
    """A whole parse would hold the event loop for too long."""


def problem_of(error: Exception) -> str:
    """What a whole parse that failed is counted as."""
    return "too_long" if isinstance(error, TooLong) else "whole_parse_raised"


def whole_characters(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)


def escape_halves(arguments: str) -> str:
    """JSON with the same value, and each half of a surrogate pair in an escape."""
    return arguments if arguments.isascii() else _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", arguments)


class Call(NamedTuple):
    """A whole tool call."""

    name: str
    arguments: str
    call_id: str | None = None


class Begun(NamedTuple):
    """A tool call of which something has left: its name, and its arguments so far."""

    name: str
    arguments: str


class Whole(NamedTuple):
    """What a whole parse makes of a content."""

    content: str
    calls: Sequence[Call]


def ending(
    left: str, rest: str, whole: Whole, problems: Counter[str], begun: Sequence[Begun] = ()
) -> Sequence[Fragment]:
    """What the whole parse has beyond what has left; all of it if that makes no call and forgets text.

    Where calls have begun that it does not have, those stay, and nothing is added: for all it says, what is
    not yet a part of them could be.
    """
    if begun:
        calls = calls_beyond(begun, whole.calls, problems)
        return (*calls, *content_fragments(beyond(left, whole.content, problems) if whole.calls else ""))
    if not whole.calls and not whole.content.startswith(left):
        problems["contradiction"] += 1
        return content_fragments(rest)
    return (*content_fragments(beyond(left, whole.content, problems)), *call_fragments(whole.calls))


def calls_beyond(begun: Sequence[Begun], calls: Sequence[Call], problems: Counter[str]) -> Sequence[Fragment]:
    """What `calls` have beyond those that have left, which stay. Nothing if they are other calls."""
    if [call.name for call in begun] != [call.name for call in calls[: len(begun)]]:
        problems["contradiction"] += 1
        return NOTHING
    more = ""
    for number, (_, arguments) in enumerate(begun):
        whole = calls[number].arguments
        value = _json(arguments)
        if arguments == whole or (value is not None and value == _json(whole)):
            continue
        if value is None and number == len(begun) - 1 and whole.startswith(arguments):
            more = whole[len(arguments) :]
        else:
            problems["contradiction"] += 1
    last = (Fragment(TOOL_ARGUMENTS, more, len(begun) - 1),) if more else NOTHING
    return (*last, *call_fragments(calls[len(begun) :], len(begun)))


def _json(text: str) -> str | None:
    """Arguments in a spelling by which they can be compared; None for what is no JSON."""
    try:
        return json.dumps(json.loads(text))
    except (ValueError, RecursionError):
        return None


def beyond(left: str, whole: str, problems: Counter[str]) -> str:
    """What `whole` has beyond the text that has left. Nothing if they contradict: what has left stays."""
    if whole.startswith(left):
        return whole[len(left) :]
    problems["contradiction"] += 1
    return ""


def content_fragments(text: str) -> tuple[Fragment, ...]:
    """The text as content, if there is any."""
    return (Fragment(CONTENT, whole_characters(text)),) if text else NOTHING


def call_fragments(calls: Sequence[Call], first: int = 0) -> list[Fragment]:
    """Whole calls, in order; `first`: the number of the first."""
    fragments = []
    for number, call in enumerate(calls, first):
        fragments.append(Fragment(TOOL_NAME, call.name, number, call.call_id))
        fragments.append(Fragment(TOOL_ARGUMENTS, call.arguments, number))
    return fragments
