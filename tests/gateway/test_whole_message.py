"""What a choice's events add up to."""

from __future__ import annotations

import re

import pytest

from gateway.whole_message import WholeCall, WholeMessage, new_call_id
from pipeline.events import CONTENT, REASONING, PositionLogprobs, TextDelta, ToolCallDelta
from pipeline.values import TokenLogprobs

ENTRY = PositionLogprobs(7, 0, 1, TokenLogprobs([7], [-0.5], 1))


def message(*events: TextDelta | ToolCallDelta) -> WholeMessage:
    made = WholeMessage()
    for event in events:
        made.add(event)
    return made


def test_pieces_are_collected_by_channel() -> None:
    made = message(
        TextDelta(REASONING, "h"),
        TextDelta(REASONING, "m"),
        TextDelta(CONTENT, "a"),
        ToolCallDelta(0, "f", "", "x"),
        ToolCallDelta(0, None, "{"),
        ToolCallDelta(0, None, "}"),
        TextDelta(CONTENT, "b"),
        ToolCallDelta(1, "g", "{}", "y"),
    )
    assert (made.reasoning, made.content) == (["h", "m"], ["a", "b"])
    assert made.calls == [WholeCall("x", "f", ["", "{", "}"]), WholeCall("y", "g", ["{}"])]


def test_logprobs_are_collected_and_the_events_stay_as_they_are() -> None:
    first = TextDelta(CONTENT, "a", [ENTRY])
    made = message(TextDelta(CONTENT, ""), first, TextDelta(CONTENT, "b", [ENTRY, ENTRY]))
    assert made.logprobs == [ENTRY] * 3
    assert first.logprobs == [ENTRY]
    assert message(TextDelta(CONTENT, "a")).logprobs is None


def test_text_is_the_content_unless_there_are_calls() -> None:
    assert message(TextDelta(REASONING, "hm"), TextDelta(CONTENT, "a"), TextDelta(CONTENT, "b")).text == "ab"
    assert message(TextDelta(CONTENT, "a"), ToolCallDelta(0, "f", "{}")).text == ""


@pytest.mark.parametrize(
    "events",
    [
        [ToolCallDelta(0, None, "{}")],
        [ToolCallDelta(1, "f", "")],
        [ToolCallDelta(0, "f", ""), ToolCallDelta(1, None, "{}")],
        [ToolCallDelta(0, "f", ""), ToolCallDelta(1, "g", ""), ToolCallDelta(0, None, "{}")],
    ],
)
def test_calls_out_of_order_are_a_fault(events: list[ToolCallDelta]) -> None:
    with pytest.raises(AssertionError):
        message(*events)


def test_calls_without_an_id_get_one_of_their_own() -> None:
    made = message(ToolCallDelta(0, "f", ""), ToolCallDelta(1, "f", ""))
    ids = [call.call_id for call in made.calls]
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in [*ids, new_call_id()])
    assert len(set(ids)) == 2
