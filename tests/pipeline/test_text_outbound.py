"""The way out of a server that gives text: its fragments run through the same stages, however they arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from filters.escaping import escape_function
from filters.json_schema import compile_schema
from filters.rules import Rule, RuleSet
from filters.stream import CompiledRules
from pipeline.errors import InvalidAnswer
from pipeline.events import (
    CONTENT,
    REASONING,
    TOOL_ARGUMENTS,
    TOOL_NAME,
    Event,
    Finish,
    Fragment,
    TextDelta,
    ToolCallDelta,
)
from pipeline.outbound_plan import OutboundPlan
from pipeline.text_outbound import TextOutbound
from pipeline.values import AnswerFormat, Generation
from tests.pipeline.splits import random_split, splits

MASK = Rule("m", ("敏感词",), "mask", replacement="*")
BLOCK = Rule("b", ("敏感词",), "block")
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
PIECES = ["敏感词", "敏感", "感词", "敏", "ab", " ", "\n", "<b>", "é", "😀"]


class Heard:
    """What has left of one choice."""

    def __init__(self, outbound: TextOutbound) -> None:
        self.outbound = outbound
        self.events: list[Event] = []

    def feed(self, *fragments: Fragment, num_tokens: int = 1) -> Heard:
        self.events += self.outbound.feed(fragments, num_tokens)
        return self

    def end(self, finish: str = "stop", stop: int | str | None = None) -> Heard:
        self.events += self.outbound.end(finish, stop)
        return self

    def text(self, channel: str = CONTENT) -> str:
        deltas = [event for event in self.events if isinstance(event, TextDelta)]
        return "".join(event.text for event in deltas if event.channel == channel)

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def calls(self) -> list[tuple[str, str, str | None]]:
        calls: list[tuple[str, str, str | None]] = []
        for event in self.events:
            if isinstance(event, ToolCallDelta):
                if event.name is not None:
                    calls.append((event.name, "", event.call_id))
                assert event.call == len(calls) - 1, "a piece of an earlier call"
                name, arguments, call_id = calls[-1]
                calls[-1] = (name, arguments + event.arguments, call_id)
        return calls


@cache
def compiled(rules: tuple[Rule, ...]) -> Mapping[str, CompiledRules]:
    return {
        channel: CompiledRules(RuleSet(rules).for_direction("output", channel), on_max_hold="block")
        for channel in (CONTENT, REASONING, TOOL_NAME, TOOL_ARGUMENTS)
    }


def opened(*rules: Rule, answer_format: AnswerFormat | None = None, **options: Any) -> Heard:
    generation = Generation({}, answer_format=answer_format)
    plan = OutboundPlan(None, generation, None, compiled(rules).__getitem__, **options)
    return Heard(plan.open_text())


def content(text: str) -> Fragment:
    return Fragment(CONTENT, text)


def cut(fragments: Sequence[Fragment], rng: random.Random) -> list[Fragment]:
    """The same fragments in more pieces; a name stays whole."""
    return [
        fragment._replace(text=piece)
        for fragment in fragments
        for piece in ([fragment.text] if fragment.channel == TOOL_NAME else random_split(fragment.text, rng))
    ]


def grouped(fragments: Sequence[Fragment], rng: random.Random) -> Iterator[Sequence[Fragment]]:
    """As events of a server: one or several at a time."""
    yield from random_split(fragments, rng)


def outcome(heard: Heard) -> tuple[Any, ...]:
    outbound = heard.outbound
    hits = [(channel, hit.rule_id, hit.start, hit.end) for channel, hit in outbound.take_hits()]
    return heard.text(), heard.text(REASONING), heard.calls, heard.last, outbound.finish, hits


# -- content -------------------------------------------------------------------------------------------------


def test_plain_content_leaves_as_it_came() -> None:
    heard = opened()
    assert heard.outbound.feed([content("Hi")], 1) == (TextDelta(CONTENT, "Hi"),)
    assert heard.outbound.feed([content("")], 0) == ()
    assert heard.outbound.feed([], 0) == []
    assert heard.end("length", None).last == Finish("length")
    assert (heard.outbound.finish, heard.outbound.ended_here) == ("length", False)


@pytest.mark.parametrize("rule", [MASK, BLOCK], ids=["mask", "block"])
def test_content_is_filtered_alike_for_all_its_splits(rule: Rule) -> None:
    rng = random.Random(rule.id)
    for _ in range(25):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
        outcomes = set()
        for pieces in splits(text, rng):
            heard = opened(rule)
            for piece in pieces:
                if heard.outbound.finish is None:
                    heard.feed(content(piece))
            if heard.outbound.finish is None:
                heard.end()
            outcomes.add((heard.text(), heard.outbound.finish, len(heard.outbound.take_hits())))
            assert heard.outbound.num_held == 0
        before = text.partition("敏感词")[0]
        hidden = text.replace("敏感词", "***") if rule is MASK else before
        finish = "content_filter" if rule is BLOCK and before != text else "stop"
        num_hits = text.count("敏感词") if rule is MASK else int(before != text)
        assert outcomes == {(hidden, finish, num_hits)}


def test_block_ends_the_choice_here() -> None:
    heard = opened(BLOCK).feed(content("abc敏"))
    assert (heard.text(), heard.outbound.num_held, heard.outbound.is_new_hold) == ("abc", 1, True)
    heard.feed(content("感词def"))
    assert (heard.text(), heard.last) == ("abc", Finish("content_filter"))
    assert (heard.outbound.finish, heard.outbound.ended_here, heard.outbound.has_hits) == (
        "content_filter",
        True,
        True,
    )
    assert heard.outbound.peak_held == 1


def test_held_text_leaves_at_the_end_and_what_is_undecided_does_not() -> None:
    assert opened(MASK).feed(content("a敏感")).end().text() == "a敏感"
    heard = opened(MASK).feed(content("a敏感"))
    assert list(heard.outbound.abandon()) == []
    assert heard.text() == "a"


def test_expired_hold_is_decided_by_the_policy() -> None:
    heard = opened(BLOCK).feed(content("a敏感"))
    assert [event for event in heard.outbound.expire() if isinstance(event, Finish)] == [
        Finish("content_filter")
    ]
    assert heard.outbound.ended_here


def test_content_is_escaped() -> None:
    assert opened(escape=escape_function("html")).feed(content("<b>")).end().text() == "&lt;b&gt;"


# -- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("content_filter", "content_filter"),
        ("tool_calls", "stop"),  # without a call there is none to be made
        ("something new", "stop"),
    ],
)
def test_servers_finish_is_kept_as_far_as_it_is_known(told: str, shown: str) -> None:
    assert opened().feed(content("Hi")).end(told).last == Finish(shown)  # type: ignore[arg-type]


def test_stop_string_of_the_server_is_told() -> None:
    assert opened().feed(content("Hi")).end("stop", "END").last == Finish("stop", "END")


def test_nothing_may_come_after_the_end() -> None:
    heard = opened().end()
    with pytest.raises(AssertionError):
        heard.feed(content("x"))
    with pytest.raises(AssertionError):
        heard.end()


# -- channels ------------------------------------------------------------------------------------------------

ANSWER = [
    Fragment(REASONING, "hm 敏感词"),
    Fragment(CONTENT, "Hello 敏感词"),
    Fragment(TOOL_NAME, "f敏感词", 0, "id-0"),
    Fragment(TOOL_ARGUMENTS, '{"a": "x敏感词"}', 0),
    Fragment(TOOL_NAME, "g", 1, "id-1"),
    Fragment(TOOL_ARGUMENTS, '{"敏感词": "\\u654f\\u611f\\u8bcd"}', 1),
]


def test_every_channel_is_filtered_alike_however_it_arrives() -> None:
    rng = random.Random(5)
    for _ in range(100):
        heard = opened(MASK)
        for fragments in grouped(cut(ANSWER, rng), rng):
            heard.feed(*fragments)
        heard.end("tool_calls")
        text, reasoning, calls, last, finish, hits = outcome(heard)
        assert (reasoning, text) == ("hm ***", "Hello ***")
        assert calls == [("f***", '{"a": "x***"}', "id-0"), ("g", '{"***": "***"}', "id-1")]
        assert (last, finish, len(hits)) == (Finish("tool_calls"), "tool_calls", 6)


def test_call_id_with_a_hidden_word_does_not_leave() -> None:
    heard = opened(MASK).feed(Fragment(TOOL_NAME, "f", 0, "call-敏感词"))
    assert heard.end().calls == [("f", "", None)]


def test_calls_make_a_stop_a_finish_by_tool_calls() -> None:
    assert opened().feed(Fragment(TOOL_NAME, "f")).end("stop").last == Finish("tool_calls")
    assert opened().feed(Fragment(TOOL_NAME, "f")).end("length").last == Finish("length")


def test_words_do_not_go_from_one_channel_into_another() -> None:
    heard = opened(MASK).feed(Fragment(REASONING, "敏")).feed(content("感词")).end()
    said = [TextDelta(REASONING, "敏"), TextDelta(CONTENT, "感词"), Finish("stop")]
    assert heard.events == said, "what was held leaves before what follows it"


def test_reasoning_tokens_are_counted_and_hidden_where_nobody_wants_them() -> None:
    heard = opened(include_reasoning=False)
    assert heard.outbound.num_reasoning_tokens is None
    heard.feed(Fragment(REASONING, "hm"), num_tokens=2).feed(Fragment(REASONING, "m")).feed(
        content("a")
    ).end()
    assert heard.outbound.num_reasoning_tokens == 3
    assert (heard.text(REASONING), heard.text()) == ("", "a")


def test_block_in_one_fragment_keeps_the_rest_of_its_event_back() -> None:
    heard = opened(BLOCK).feed(Fragment(REASONING, "敏感词"), content("a"), Fragment(TOOL_NAME, "f"))
    assert heard.events == [Finish("content_filter")]


# -- JSON answers --------------------------------------------------------------------------------------------


def json_answer(*pieces: str, finish: str = "stop", **options: Any) -> Heard:
    heard = opened(MASK, answer_format=AnswerFormat(SCHEMA), schema=compile_schema(SCHEMA), **options)
    for piece in pieces:
        if heard.outbound.finish is None:
            heard.feed(content(piece))
    return heard if heard.outbound.finish is not None else heard.end(finish)


def test_json_answer_is_checked_and_stays_json() -> None:
    rng = random.Random(7)
    for pieces in splits('{"a": "x\\u654f感词"}', rng):
        heard = json_answer(*pieces)
        assert (heard.text(), heard.last) == ('{"a": "x***"}', Finish("stop"))


def test_answer_that_is_no_json_ends_before_what_is_wrong() -> None:
    rng = random.Random(8)
    for pieces in splits('{"a": x}', rng):
        heard = json_answer(*pieces)
        assert isinstance(heard.outbound.failure, InvalidAnswer)
        assert (heard.text(), heard.outbound.ended_here) == ('{"a": ', True)
        assert not [event for event in heard.events if isinstance(event, Finish)]


def test_answer_that_breaks_its_schema_fails() -> None:
    heard = json_answer('{"a": 1}')
    assert isinstance(heard.outbound.failure, InvalidAnswer)
    assert not [event for event in heard.events if isinstance(event, Finish)]


def test_answer_that_was_cut_short_need_not_be_whole() -> None:
    assert json_answer('{"a"', finish="length").last == Finish("length")
    assert isinstance(json_answer('{"a"').outbound.failure, InvalidAnswer)


def test_answer_that_breaks_its_format_passes_with_its_problem_where_that_is_wanted() -> None:
    heard = json_answer('{"a": 1}', fails_on_problem=False)
    assert heard.text() == '{"a": 1}'
    assert isinstance(heard.last, Finish)
    assert heard.last.problem
