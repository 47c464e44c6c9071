"""A choice with channels: what leaves of each, in which order, and how their filters go side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from filters.escaping import escape_function
from filters.json_schema import compile_schema
from filters.rules import Rule, RuleSet
from filters.stream import CompiledRules
from pipeline.control_dropper import ControlAutomaton
from pipeline.errors import InvalidAnswer
from pipeline.events import CONTENT, REASONING, TOOL_ARGUMENTS, TOOL_NAME, Fragment, ToolCallDelta
from pipeline.outbound_plan import OutboundPlan, stop_matcher
from pipeline.values import AnswerFormat, EngineCall, Generation, Prompt, TokenLogprobs
from tests.pipeline.said import Said
from tests.pipeline.splits import splits
from tests.pipeline.test_outbound import byte_ids, entries_for, ids_of, vocabulary

CALL = EngineCall("m", Prompt(memoryview(b""), 0, 0), {}, 8)
MASK = Rule("m", ("敏感词",), "mask", replacement="*")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class MarkParser:
    """Reasoning stands in round brackets, a call is `[name:arguments]`, the rest is content.

    It holds a name until it is whole.
    """

    def __init__(self) -> None:
        self._channel = CONTENT
        self._name = ""
        self._num_calls = 0

    def feed(self, text: str, ids: Sequence[int]) -> list[Fragment]:
        return [fragment for char in text for fragment in self._char(char)]

    def finish(self) -> list[Fragment]:
        return [Fragment(CONTENT, "[" + self._name)] if self._channel == TOOL_NAME else []

    def _char(self, char: str) -> list[Fragment]:
        if char in "()[]":
            self._channel = {"(": REASONING, "[": TOOL_NAME}.get(char, CONTENT)
            return []
        if self._channel == TOOL_NAME and char == ":":
            name, self._name, self._channel = self._name, "", TOOL_ARGUMENTS
            self._num_calls += 1
            return [Fragment(TOOL_NAME, name, self._num_calls - 1)]
        if self._channel == TOOL_NAME:
            self._name += char
            return []
        return [Fragment(self._channel, char, self._num_calls - 1)]


def opened(*rules: Rule, on_max_hold: str = "block", parser: Any = MarkParser, **options: Any) -> Said:
    generation = Generation({}, **{name: options.pop(name) for name in [*options] if name in GENERATION})
    by_channel = {
        channel: CompiledRules(RuleSet(rules).for_direction("output", channel), on_max_hold=on_max_hold)  # type: ignore[arg-type]
        for channel in (CONTENT, REASONING, TOOL_NAME, TOOL_ARGUMENTS)
    }
    open_parser = None if parser is None else lambda call: parser()
    plan = OutboundPlan(
        vocabulary(),
        generation,
        stop_matcher(generation),
        by_channel.__getitem__,
        open_parser=open_parser,
        reads_reasoning=parser is not None,
        **options,
    )
    return Said(plan.open(CALL))


GENERATION = ("stop", "answer_format", "logprobs", "include_stop_str_in_output")


def said(choice: Said, text: str, finish: str = "stop") -> Said:
    """The whole text in one chunk, and the end."""
    choice.feed(ids_of(text), None)
    if choice.finish is None and choice.failure is None:
        choice.feed([], finish)
    return choice


def test_text_goes_to_its_channels_in_order() -> None:
    choice = said(opened(), '(hm)Hello [f:{"a":1}][g:{}]!')
    assert (choice.reasoning, choice.content) == ("hm", "Hello !")
    assert choice.calls == [("f", '{"a":1}'), ("g", "{}")]
    assert choice.finish == "tool_calls"
    assert choice.outbound.num_reasoning_tokens == len(ids_of("hm"))


def test_finish_stays_when_it_is_not_the_models_own() -> None:
    assert said(opened(), "[f:{}]", "length").finish == "length"
    assert said(opened(), "no call").finish == "stop"


def test_reasoning_that_nobody_wants_is_counted_and_not_sent() -> None:
    choice = said(opened(MASK, include_reasoning=False), "(敏感)a")
    assert (choice.reasoning, choice.content) == ("", "a")
    assert choice.outbound.num_reasoning_tokens == len(ids_of("敏感"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("(敏感词)敏感词", ("***", "***", [])),
        ("(敏)感词", ("敏", "感词", [])),  # no word goes from one channel into the other
        ("[f敏感词:{}]", ("", "", [("f***", "{}")])),
        ('[f:{"敏感词": "a敏感词"}]', ("", "", [("f", '{"***": "a***"}')])),
        ('[f:{"a":"\\u654f\\u611f\\u8bcd"}]', ("", "", [("f", '{"a":"***"}')])),
        ('[f:{"a":"敏"}][g:{"b":"感词"}]', ("", "", [("f", '{"a":"敏"}'), ("g", '{"b":"感词"}')])),
    ],
)
def test_every_channel_is_filtered_by_itself(text: str, shown: tuple[Any, ...]) -> None:
    choice = said(opened(MASK), text)
    assert (choice.reasoning, choice.content, choice.calls) == shown


def test_rules_of_one_channel_leave_the_others_alone() -> None:
    choice = said(opened(Rule("m", ("abc",), "mask", replacement="*", channels=("reasoning",))), "(abc)abc")
    assert (choice.reasoning, choice.content) == ("***", "abc")


def test_held_text_leaves_when_another_channel_goes_on() -> None:
    choice = opened(MASK)
    choice.feed(ids_of("(ab敏"))
    assert (choice.reasoning, choice.num_held) == ("ab", 1)
    choice.feed(ids_of(")c"))
    assert (choice.reasoning, choice.content, choice.num_held) == ("ab敏", "c", 0)
    choice.feed(ids_of("(感词)"))
    assert choice.reasoning == "ab敏**"  # it went on after all: the word does not get whole


def test_blocked_word_that_goes_on_after_a_pause_blocks() -> None:
    choice = opened(Rule("b", ("敏感词",), "block"))
    choice.feed(ids_of("(敏)c(感词)"))
    assert (choice.reasoning, choice.content, choice.finish) == ("敏", "c", "content_filter")


@pytest.mark.parametrize("text", ["(a敏感词)b", "a敏感词b", "[敏感词:{}]b", '[f:{"a敏感词":1}]'])
def test_block_in_any_channel_ends_the_choice(text: str) -> None:
    choice = said(opened(Rule("b", ("敏感词",), "block")), text)
    assert (choice.finish, choice.ended_here) == ("content_filter", True)
    assert "敏" not in choice.reasoning + choice.content + str(choice.calls)
    assert [hit.rule_id for hit in choice.hits] == ["b"]


class AtTheEnd(MarkParser):
    """Says nothing before its end."""

    last: Sequence[Fragment] = ()

    def feed(self, text: str, ids: Sequence[int]) -> list[Fragment]:
        return []

    def finish(self) -> list[Fragment]:
        return [*self.last]


@pytest.mark.parametrize(
    "last",
    [
        [Fragment(REASONING, "a敏感词b"), Fragment(CONTENT, "more")],
        [
            Fragment(TOOL_NAME, "f"),
            Fragment(TOOL_ARGUMENTS, "{}"),
            Fragment(TOOL_NAME, "敏感词", 1),
            Fragment(TOOL_ARGUMENTS, "{}", 1),
        ],
    ],
)
def test_nothing_leaves_after_a_block_in_what_a_parser_says_at_its_end(last: list[Fragment]) -> None:
    class Parser(AtTheEnd):
        pass

    Parser.last = last
    choice = said(opened(Rule("b", ("敏感词",), "block"), parser=Parser), "x")
    assert choice.finish == "content_filter"
    assert (choice.content, choice.reasoning) in (("", "a"), ("", ""))
    assert choice.calls in ([], [("f", "{}")])


def test_nothing_that_waits_elsewhere_leaves_after_a_block() -> None:
    controls = ControlAutomaton(["<|im_end|>"])
    choice = said(opened(Rule("b", ("敏感词",), "block"), controls=controls), "(a<|im_)b敏感词")
    assert (choice.reasoning, choice.content, choice.finish) == ("a", "b", "content_filter")


def test_figures_of_calls_that_are_over_are_kept() -> None:
    choice = said(opened(MASK), '[f:{"a":"敏感x"}]' * 3 + "敏y")
    assert (choice.peak_held, choice.num_leaked, len(choice.calls)) == (2, 0, 3)


def test_call_that_the_clients_stop_string_cuts_is_not_to_be_made() -> None:
    choice = opened(stop=("STOP",))
    choice.feed(ids_of('[f:{"a":"STOP"}]'))
    assert (choice.calls, choice.finish, choice.stop_reason) == ([("f", '{"a":"')], "stop", "STOP")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_block_before_what_breaks_the_form_comes_first(chunked: bool, fails: bool) -> None:
    rule = Rule("b", ("敏感词",), "block")
    choice = opened(rule, answer_format=AnswerFormat(), fails_on_problem=fails, parser=None)
    ids = ids_of('{"a":"敏感词"}x')
    for chunk in [[each] for each in ids] if chunked else [ids]:
        if choice.finish is None:
            choice.feed(chunk)
    assert (choice.content, choice.finish, choice.failure) == ('{"a":"', "content_filter", None)
    assert choice.last is not None
    assert choice.last.problem is None


def test_what_is_wrong_with_an_answer_goes_through_the_rules_of_content() -> None:
    schema = {"type": "object", "properties": {"secret": {"type": "integer"}}}
    for channels, is_shown in ((("content",), False), (("reasoning",), True)):
        rule = Rule("m", ("secret",), "mask", replacement="*", channels=channels)
        choice = answered('{"secret": "1"}', "stop", schema, rule)
        assert choice.failure is not None
        assert ("secret" in str(choice.failure)) == is_shown
        assert "at /" in str(choice.failure)


def test_stop_string_in_a_parsers_text_ends_before_the_parser_sees_it() -> None:
    choice = opened(stop=("STOP",))
    choice.feed(ids_of("(a ST"))
    assert choice.reasoning == "a "
    choice.feed(ids_of("OP)b"))
    assert (choice.reasoning, choice.content, choice.finish, choice.stop_reason) == ("a ", "", "stop", "STOP")


def test_control_strings_are_dropped_behind_the_parser() -> None:
    controls = ControlAutomaton(["<|im_end|>", "<think>"])
    choice = said(opened(MASK, controls=controls), "(敏<|im_end|>感词)a<think>b[f:{}]<|im_")
    assert (choice.reasoning, choice.content, choice.calls) == ("***", "ab<|im_", [("f", "{}")])


def test_text_is_escaped_where_it_is_text() -> None:
    choice = said(opened(MASK, escape=escape_function("html")), '(<敏感词>)&[f:{"a":"<"}]')
    assert (choice.reasoning, choice.content) == ("&lt;***&gt;", "&amp;")
    assert choice.calls == [("f", '{"a":"<"}')]


def test_text_that_breaks_off_stays_held_unless_its_rules_fail_open() -> None:
    for fail, shown in (("closed", "a"), ("open", "a敏")):
        choice = opened(Rule("m", ("敏感词",), "mask", replacement="*", fail=fail))
        choice.feed(ids_of("a敏"))
        choice.abandon()
        assert choice.content == shown
        assert choice.finish is None
        assert choice.num_held == len("a敏") - len(shown)
        assert choice.num_leaked == len(shown) - 1  # what left undecided is counted


TEXTS = [
    '(think 敏感词 👋)answer 敏感词 [call敏:{"敏感词": ["x敏感词", 12, "\\u654f感词"]}] and [g:{}] 敏感',
    "(a)b(敏)c(感词)d敏[f:[1, 2]]感词",
    "STOP in (reasoning STOP)",
    "broken [call",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [(), ("STOP", "感词")], ids=["no stop", "stop"])
@pytest.mark.parametrize("make_ids", [ids_of, byte_ids], ids=["words", "bytes"])
def test_any_chunking_gives_the_same_events(
    text: str, stop: tuple[str, ...], make_ids: Callable[[str], list[int]]
) -> None:
    ids, rng = make_ids(text), random.Random(text)
    cuts = [*splits(ids, rng)]
    outcomes = set()
    for chunks in [*cuts[:2], *rng.sample(cuts, min(25, len(cuts)))]:
        choice = opened(MASK, stop=stop, logprobs=0, controls=ControlAutomaton(["<x>", "[/x]"]))
        for number, chunk in enumerate(chunks):
            finish = "length" if number == len(chunks) - 1 else None
            choice.feed(list(chunk), finish, None, entries_for(chunk))
            if choice.finish is not None:
                break
        entries = tuple((entry.token_id, entry.start, entry.end) for entry in choice.logprobs)
        hits = tuple((hit.rule_id, hit.start, hit.end) for hit in choice.hits)
        outcomes.add(
            (
                choice.reasoning,
                choice.content,
                tuple(choice.calls),
                choice.finish,
                choice.stop_reason,
                entries,
                hits,
            )
        )
    assert len(outcomes) == 1, outcomes


def test_logprobs_are_those_of_the_content() -> None:
    ids = ids_of("(ab)cd[f:{}]e")
    choice = opened(logprobs=0)
    choice.feed(ids, None, None, entries_for(ids))
    choice.feed([], "stop")
    content = "".join(vocabulary().token_text(entry.token_id) for entry in choice.logprobs)
    assert content == choice.content == "cde"
    assert [(entry.start, entry.end) for entry in choice.logprobs][-1] == (2, 3)


def test_no_logprobs_of_a_token_that_a_parser_has_taken_apart() -> None:
    """A token that ends the reasoning and begins the content in one."""
    ids = ids_of("敏感词")
    entry = TokenLogprobs([ids[0], ids[0]], [-0.5, -0.5], 1)

    class Halves(MarkParser):
        def feed(self, text: str, ids: Sequence[int]) -> list[Fragment]:
            return [Fragment(REASONING, text[:1]), Fragment(CONTENT, text[1:])]

    choice = opened(logprobs=0, parser=Halves)
    choice.feed(ids[:1], None, None, [entry])
    choice.feed([], "stop")
    assert choice.logprobs == []


# -- answers that must be JSON -------------------------------------------------------------------------------


def answered(text: str, finish: str = "stop", schema: Any = None, *rules: Rule, **options: Any) -> Said:
    options.setdefault("parser", None)
    compiled = None if schema is None else compile_schema(schema)
    return said(opened(*rules, answer_format=AnswerFormat(schema), schema=compiled, **options), text, finish)


def test_json_answer_is_filtered_value_by_value() -> None:
    choice = answered('{"a": "\\u654f感词", "b": "敏"}', "stop", None, MASK)
    assert (choice.content, choice.finish) == ('{"a": "***", "b": "敏"}', "stop")


@pytest.mark.parametrize(
    ("text", "finish", "schema"),
    [
        ('{"a": 1}', "stop", None),
        ('{"a": 1}', "stop", SCHEMA),
        ('{"a": ', "length", SCHEMA),
        ("[1]", "stop", True),
    ],
)
def test_answer_in_its_form_ends_like_any_other(text: str, finish: str, schema: Any) -> None:
    choice = answered(text, finish, schema)
    assert (choice.content, choice.finish, choice.failure) == (text, finish, None)
    assert choice.last is not None
    assert choice.last.problem is None


@pytest.mark.parametrize(
    ("text", "schema", "shown"),
    [
        ('{"a": 1}x', None, '{"a": 1}'),
        ("[1]", None, ""),
        ('{"a": 1', None, '{"a": 1'),
        ('{"a": "1"}', SCHEMA, '{"a": "1"}'),
        ("{}", SCHEMA, "{}"),
    ],
)
def test_answer_that_breaks_its_form_ends_with_an_error_or_says_so(
    text: str, schema: Any, shown: str
) -> None:
    choice = answered(text, "stop", schema)
    assert isinstance(choice.failure, InvalidAnswer)
    assert choice.content == shown
    assert choice.last is None
    assert text not in choice.failure.log_detail
    choice = answered(text, "stop", schema, fails_on_problem=False)
    assert (choice.content, choice.finish, choice.failure) == (text, "stop", None)
    assert choice.last is not None
    assert choice.last.problem


def test_answer_that_calls_tools_need_not_be_json() -> None:
    choice = answered("[f:{}]", "stop", SCHEMA, parser=MarkParser)
    assert (choice.calls, choice.finish, choice.failure) == ([("f", "{}")], "tool_calls", None)


def test_json_answer_that_a_stop_string_cuts_is_no_problem() -> None:
    choice = answered('{"a": STOP', "stop", SCHEMA, stop=("STOP",))
    assert (choice.content, choice.finish, choice.failure) == ('{"a": ', "stop", None)


def test_events_of_one_step_are_few() -> None:
    choice = said(opened(), '(hm)Hello[f:{"a":1}]')
    assert [type(event).__name__ for event in choice.events] == [
        "TextDelta",
        "TextDelta",
        "ToolCallDelta",
        "Finish",
    ]
    call = choice.events[2]
    assert call == ToolCallDelta(0, "f", '{"a":1}')
