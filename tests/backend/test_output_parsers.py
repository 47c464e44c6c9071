"""vLLM's parsers behind the ports, against vLLM's own whole parse of the same text."""

from __future__ import annotations

import json
import logging
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import pytest

from backend.output_parsers import VllmOutputParsers, load_output_parsers
from pipeline.events import CONTENT, REASONING, TOOL_ARGUMENTS, TOOL_NAME, Fragment
from pipeline.values import ChatRequest, Delivery, Generation, ToolChoice
from tests.backend.parser_answers import FAMILIES, OLD_MISTRAL, TOOLS, Answer, Family, random_arguments
from tests.backend.parser_models import encode, files, parsers, units
from tests.backend.vllm_parts import import_vllm
from tests.pipeline.splits import random_split, splits

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    import_vllm()


class Setup(NamedTuple):
    """A model, its parsers, and what its answers look like."""

    model: str
    tool_parser: str
    reasoning_parser: str | None = None
    think: tuple[str, str] | None = None
    must_think: bool = False  # the template is told so

    @property
    def family(self) -> Family:
        return OLD_MISTRAL if self.model == "old_mistral" else FAMILIES[self.tool_parser]

    def parsers(self) -> VllmOutputParsers:
        return parsers(self.model, self.tool_parser, self.reasoning_parser)

    def answers(self) -> Iterator[Answer]:
        """With reasoning before them where there is a parser of it."""
        if self.think is None:
            yield from self.family.answers()
            return
        start, end = self.think
        for answer in self.family.answers():
            content = "\n\n" + answer.content if answer.content else answer.content
            thought = f"{start}\nHm, a < b 🎉.\n{end}\n\n"
            uncut = answer.uncut and thought + answer.uncut
            yield answer._replace(text=thought + answer.text, content=content, uncut=uncut)
        yield Answer(f"{start}\nNo end of it <")
        yield Answer(f"No start.{end}{self.family.calls(self.family.write('now', {}))}")


THINK = ("<think>", "</think>")
SETUPS = [
    Setup("qwen3", "hermes"),
    Setup("hermes", "hermes"),
    Setup("qwen3", "hermes", "qwen3", THINK),
    Setup("qwen3", "hermes", "deepseek_r1", THINK),
    Setup("qwen3", "qwen3_coder"),
    Setup("qwen3", "qwen3_coder", "qwen3", THINK),
    Setup("qwen3", "qwen3_xml", "qwen3", THINK),
    Setup("llama4", "llama3_json"),
    Setup("llama4", "llama4_json"),
    Setup("llama4", "llama4_pythonic"),
    Setup("fallback", "pythonic"),
    Setup("mistral", "mistral"),
    Setup("thinking_mistral", "mistral", "mistral", ("[THINK]", "[/THINK]")),
    Setup("old_mistral", "mistral"),
    Setup("deepseek", "deepseek_v3"),
    Setup("deepseek", "deepseek_v31"),
    Setup("thinking_deepseek", "deepseek_v3", "deepseek_r1", THINK),
    Setup("thinking_deepseek", "deepseek_v31", "deepseek_v3", THINK, True),
]
LONG_SETUPS = [Setup("llama3", "pythonic"), Setup("gemma3", "pythonic")]  # 2 to 4 s each to load
every_setup = pytest.mark.parametrize(
    "setup",
    [*SETUPS, *(pytest.param(setup, marks=pytest.mark.long) for setup in LONG_SETUPS)],
    ids=lambda setup: "-".join(filter(None, [setup.model, *setup[1:3]])),
)


def request(kind: str = "auto", tools: Sequence[Any] | None = TOOLS, **more: Any) -> ChatRequest:
    return ChatRequest(
        model="m",
        messages=[{"role": "user", "content": "hello"}],
        generation=Generation(sampling={}),
        delivery=Delivery(),
        tools=tools,
        tool_choice=ToolChoice(kind, "now" if kind == "named" else ""),  # type: ignore[arg-type]
        **more,
    )


class Parsed(NamedTuple):
    """What an answer is in the end."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def joined(fragments: Iterable[Fragment]) -> Parsed:
    """Joins fragments, and checks the promises of `Fragment` on their order."""
    texts = {REASONING: "", CONTENT: ""}
    calls: list[tuple[str, str]] = []
    for fragment in fragments:
        assert fragment.text or fragment.channel in (TOOL_NAME, TOOL_ARGUMENTS)
        if fragment.channel == TOOL_NAME:
            assert fragment.call == len(calls)
            calls.append((fragment.text, ""))
        elif fragment.channel == TOOL_ARGUMENTS:
            assert fragment.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + fragment.text)
        else:
            texts[fragment.channel] += fragment.text
    return Parsed(texts[REASONING], texts[CONTENT], calls)


Pieces = Iterable[tuple[str, Sequence[int]]]


def ours(parsers: VllmOutputParsers, asked: ChatRequest, pieces: Pieces, prompt: Any = ()) -> Parsed:
    parser = parsers.open(asked, prompt)
    fragments = [fragment for text, ids in pieces for fragment in parser.feed(text, ids)]
    return joined([*fragments, *parser.finish()])


@cache
def their_request(kind: str, has_tools: bool) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tools = {"tools": TOOLS, "tool_choice": kind} if has_tools else {}
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hello"}], **tools)


def vllms(setup: Setup, asked: ChatRequest, text: str) -> Parsed:
    """vLLM's own whole parse, called as its server does."""
    theirs = their_request(asked.tool_choice.kind, bool(asked.tools))
    kit = setup.parsers()._kit
    arguments = template_arguments(setup)
    parser = kit.parser_class(kit.tokenizer, theirs.tools, chat_template_kwargs=arguments)
    reasoning, content, calls = parser.parse(text, theirs, enable_auto_tools=True)
    return Parsed(reasoning or "", content or "", [(call.name, call.arguments) for call in calls or ()])


def expected(setup: Setup, asked: ChatRequest, answer: Answer) -> Parsed:
    """What vLLM makes of it, but for what the families and answers say."""
    theirs = vllms(setup, asked, answer.text)
    if asked.tool_choice.kind != "auto":
        return theirs
    if answer.content is not None:
        theirs = theirs._replace(content=answer.content)
    return theirs if answer.calls is None else theirs._replace(calls=list(answer.calls))


def check_cut(got: Parsed, uncut: Parsed, text: str) -> None:
    """Of an answer that was cut short the calls are what has come of those of the whole."""
    assert got._replace(calls=[]) == uncut._replace(calls=[])
    last = len(got.calls) - 1
    for number, (name, arguments) in enumerate(got.calls):
        whole_name, whole = uncut.calls[number]
        assert name == whole_name
        if number < last or not text.endswith(arguments):
            assert arguments == whole  # spelled alike, since vLLM's spelling is that of our answers
        assert whole.startswith(arguments)


def as_json(calls: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Calls to be compared by the values of their arguments."""
    values: list[tuple[str, Any]] = []
    for name, arguments in calls:
        try:
            values.append((name, json.loads(arguments)))
        except ValueError:
            values.append((name, arguments))
    return values


def forgets_text(theirs: Parsed, answer: Answer) -> bool:
    """Mistral's old format: of a call that cannot be read vLLM keeps the end only. Ours keeps all."""
    before = answer.text.partition("[TOOL_CALLS]")[0]
    return not theirs.calls and bool(before) and not theirs.content.startswith(before)


def check(setup: Setup, asked: ChatRequest, answer: Answer, pieces: Pieces) -> None:
    theirs = expected(setup, asked, answer)
    got = ours(setup.parsers(), asked, pieces)
    if setup.model == "old_mistral" and forgets_text(theirs, answer):
        theirs = theirs._replace(content=answer.text)
    if setup.family.drops_blanks and got.content.lstrip() == theirs.content:
        got = got._replace(content=theirs.content)  # before a text, white space has left when calls come
    if setup.family.streams:
        if answer.uncut and got.calls:
            check_cut(got, vllms(setup, asked, answer.uncut), answer.text)
            return
        theirs = theirs._replace(calls=as_json(theirs.calls))
        got = got._replace(calls=as_json(got.calls))
    assert got == theirs, answer.text


def template_arguments(setup: Setup) -> dict[str, bool]:
    return {"thinking": True} if setup.must_think else {}


def with_arguments(setup: Setup, kind: str = "auto") -> ChatRequest:
    return request(kind, chat_template_kwargs=template_arguments(setup))


@every_setup
def test_answers_are_what_vllms_whole_parse_makes_of_them(setup: Setup) -> None:
    rng = random.Random(f"{setup.model} {setup.tool_parser}")
    asked = with_arguments(setup)
    for answer in setup.answers():
        ids = encode(setup.model, answer.text)
        check(setup, asked, answer, units(setup.model, [ids]))
        check(setup, asked, answer, [(character, ()) for character in answer.text])
        check(setup, asked, answer, [(piece, ()) for piece in random_split(answer.text, rng) if piece])
    assert set(setup.parsers().problems) <= {"contradiction"}


@every_setup
def test_every_split_of_the_ids_gives_the_same_fragments(setup: Setup) -> None:
    rng = random.Random(5)
    answer = list(setup.answers())[6]  # two calls, cut by nothing
    ids = encode(setup.model, answer.text)
    asked = with_arguments(setup)
    whole = ours(setup.parsers(), asked, units(setup.model, [ids]))
    assert whole.calls
    all_splits = list(splits(ids, rng))
    for split in all_splits[:2] + rng.sample(all_splits[2:], 6):
        assert ours(setup.parsers(), asked, units(setup.model, split)) == whole


@every_setup
def test_arguments_are_json(setup: Setup) -> None:
    family = setup.family
    asked = with_arguments(setup)
    for arguments in ({"city": "x"}, {}, {"list": [1, {"a": "}"}], "city": '"\\\n🎉'}):
        text = family.calls(family.write("get_weather", arguments))
        if setup.think:
            text = f"{setup.think[0]}Hm.{setup.think[1]}{text}"
        calls = ours(setup.parsers(), asked, units(setup.model, [encode(setup.model, text)])).calls
        assert [(name, json.loads(value)) for name, value in calls] == [("get_weather", arguments)]


@pytest.mark.long
@every_setup
def test_answers_are_the_same_however_the_text_is_cut(setup: Setup) -> None:
    rng = random.Random(9)
    asked = with_arguments(setup)
    for answer in setup.answers():
        for split in splits(answer.text, rng):
            check(setup, asked, answer, [(piece, ()) for piece in split if piece])


@pytest.mark.long
@every_setup
def test_random_arguments_are_what_vllms_whole_parse_makes_of_them(setup: Setup) -> None:
    rng = random.Random(11)
    asked = with_arguments(setup)
    for _ in range(2000 // len(SETUPS)):
        calls = [setup.family.write("get_weather", random_arguments(rng)) for _ in range(rng.randint(1, 3))]
        text = setup.family.calls(*calls)
        if setup.think:
            text = f"{setup.think[0]}Hm.{setup.think[1]}{text}"
        pieces = list(units(setup.model, [encode(setup.model, text)]))
        uncut = text = "".join(piece for piece, _ in pieces)  # a tokenizer may have normalized it
        if rng.random() < 0.3:
            text = text[: rng.randint(1, len(text))]
            pieces = [(character, []) for character in text]
        answer = Answer(text, uncut=uncut)
        check(setup, asked, answer, pieces)
        check(setup, asked, answer, [(piece, ()) for piece in random_split(text, rng) if piece])


STREAMING = [setup for setup in SETUPS if setup.family.streams]


@pytest.mark.parametrize("setup", STREAMING, ids=str)
def test_arguments_leave_as_they_pass(setup: Setup) -> None:
    family = setup.family
    arguments = {"city": "a long } text, 你好 🎉 " * 9, "where": {"a": [1, {"b": None}]}}
    raw = json.dumps(arguments, ensure_ascii=False)
    before, after = family.calls(family.write("get_weather", arguments), family.write("now", {})).split(raw)
    parser = setup.parsers().open(with_arguments(setup), ())
    parser.feed(f"{setup.think[0]}Hm.{setup.think[1]}" if setup.think else "", ())
    assert not [each for character in before for each in parser.feed(character, ())]
    assert list(parser.feed(raw[0], ())) == [
        Fragment(TOOL_NAME, "get_weather"),
        Fragment(TOOL_ARGUMENTS, raw[0]),
    ]
    for start in range(1, len(raw), 3):
        piece = raw[start : start + 3]
        assert list(parser.feed(piece, ())) == [Fragment(TOOL_ARGUMENTS, piece)]
    second = [each for character in after for each in parser.feed(character, ())]
    assert [(each.text, each.call) for each in second] == [("now", 1), ("{", 1), ("}", 1)]
    assert not parser.finish()


@pytest.mark.parametrize("setup", STREAMING, ids=str)
def test_a_call_that_is_not_whole_stays_when_the_answer_is_cut_off(setup: Setup) -> None:
    loaded, family = setup.parsers(), setup.family
    first, second = family.write("now", {}), family.write("get_weather", {"city": "Paris"})
    text = family.calls(first, second).partition("ris")[0]
    text = f"{setup.think[0]}Hm.{setup.think[1]}{text}" if setup.think else text
    loaded.problems.clear()
    got = ours(loaded, with_arguments(setup), units(setup.model, [encode(setup.model, text)]))
    assert (got.content, got.calls) == ("", [("now", "{}"), ("get_weather", '{"city": "Pa')])
    assert loaded.problems == {"contradiction": 1}
    loaded.problems.clear()


@every_setup
def test_without_a_choice_of_tools_there_are_no_calls(setup: Setup) -> None:
    for asked in (
        with_arguments(setup, "none"),
        request("none", None, chat_template_kwargs=template_arguments(setup)),
    ):
        for answer in list(setup.answers())[::5]:
            check(setup, asked, answer, units(setup.model, [encode(setup.model, answer.text)]))


@pytest.mark.parametrize("kind", ["required", "named"])
def test_a_forced_choice_reads_the_reasoning_only(kind: str) -> None:
    text = '<think>Hm.</think>[{"name": "now", "parameters": {}}]<tool_call>'
    got = ours(parsers("qwen3", "hermes", "qwen3"), request(kind), units("qwen3", [encode("qwen3", text)]))
    assert got == Parsed("Hm.", text.partition("</think>")[2], [])


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[5], SETUPS[10]], ids=str)
def test_without_parallel_calls_only_the_first_counts(setup: Setup) -> None:
    text = setup.family.calls(setup.family.write("now", {}), setup.family.write("get_weather", {"city": "x"}))
    asked = request(parallel_tool_calls=False)
    got = ours(
        setup.parsers(),
        asked,
        units(setup.model, [encode(setup.model, "</think>" * bool(setup.think) + text)]),
    )
    assert got.calls == [("now", "{}")]
    assert not got.content


@every_setup
def test_plain_content_leaves_at_once(setup: Setup) -> None:
    parser = setup.parsers().open(with_arguments(setup), ())
    if setup.think:
        assert joined(parser.feed(setup.think[0] + "Hm", ())).reasoning == "Hm"
        assert joined(parser.feed(" so", ())).reasoning == " so"
        parser.feed(setup.think[1], ())
    for text in ("Plain", " text", " a", " <b", ">", " [x", "](", "{", " return", "}", "."):
        parser.feed(text, ())
    assert joined(parser.feed(" Now", ())).content.endswith(" Now")


@pytest.mark.parametrize("setup", [SETUPS[5], SETUPS[12]], ids=str)
def test_plain_text_does_not_reach_vllms_engines(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.parser.engine.streaming_parser_engine import StreamingParserEngine

    num_feeds = 0
    feed = StreamingParserEngine.feed

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal num_feeds
        num_feeds += 1
        return feed(self, *arguments)

    monkeypatch.setattr(StreamingParserEngine, "feed", counted)
    parser = setup.parsers().open(request(), ())
    for text in [
        "<think>",
        "[THINK]",
        *[" word"] * 500,
        "</think>",
        "[/THINK]",
        *[" word", "\n", "<b>"] * 500,
    ]:
        parser.feed(text, ())
    assert num_feeds < 30


def test_a_prompt_that_has_ended_the_reasoning_is_believed() -> None:
    for reasoning_parser in ("qwen3", "deepseek_r1"):
        loaded = parsers("qwen3", "hermes", reasoning_parser)
        ended = memoryview(array("i", encode("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n")))
        begun = memoryview(array("i", encode("qwen3", "<|im_start|>assistant\n<think>\n")))
        text = f"Look: {FAMILIES['hermes'].write('now', {})}"
        assert ours(loaded, request(), [(text, ())], ended) == Parsed("", "Look: ", [("now", "{}")])
        assert ours(loaded, request(), [("Hm.</think>" + text, ())], begun).reasoning == "Hm."
        assert loaded.reasoning_ended(request(), ended) is True
        assert loaded.reasoning_ended(request(), begun) is False
        assert loaded.reasoning_ended(request(include_reasoning=False), begun) is False


def test_the_engine_is_told_what_the_template_was_told() -> None:
    asked = request(chat_template_kwargs={"enable_thinking": False}, documents=[{"text": "secret"}])
    assert parsers("qwen3", "hermes", "qwen3").reasoning_parser_kwargs(asked) == {
        "chat_template_kwargs": {
            "enable_thinking": False,
            "add_generation_prompt": True,
            "continue_final_message": False,
        }
    }
    without = parsers("qwen3", "hermes")
    assert without.reasoning_parser_kwargs(asked) is None
    assert without.reasoning_ended(asked, ()) is None
    assert (without.has_tools, without.has_reasoning) == (True, False)


def test_a_parser_of_unknown_kind_is_fed_as_vllm_feeds_it() -> None:
    loaded = parsers("composed", "jamba")
    values = '[{"name": "now", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]'
    text = f"Look: <tool_calls>{values}</tool_calls>"
    calls = [("now", '{"a": 1}'), ("now", "{}")]
    assert ours(loaded, request(), units("composed", [encode("composed", text)])) == Parsed(
        "", "Look: ", calls
    )
    once = request(parallel_tool_calls=False)
    assert ours(loaded, once, units("composed", [encode("composed", text)])).calls == calls[:1]


def break_method(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let a method of vLLM's raise. It stays the method of its class in all else."""

    @wraps(getattr(owner, name))
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the model said: a secret")

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[5], SETUPS[10]], ids=str)
def test_a_whole_parse_that_raises_leaves_content(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = setup.parsers()
    break_method(monkeypatch, loaded._kit.parser_class.tool_parser_cls, "extract_tool_calls")
    loaded.problems.clear()
    text = setup.family.calls(setup.family.write("now", {}))
    got = ours(
        loaded,
        request(),
        units(setup.model, [encode(setup.model, f"{'</think>' * bool(setup.think)}{text}")]),
    )
    assert got == (Parsed("", "", [("now", "{}")]) if setup.family.streams else Parsed("", text, []))
    assert loaded.problems == {"whole_parse_raised": 1}
    loaded.problems.clear()


def test_an_engine_that_raises_is_made_good_for_by_the_whole_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.parser.engine.adapters import ParserEngineReasoningAdapter, ParserEngineToolAdapter

    loaded = parsers("qwen3", "qwen3_coder", "qwen3")
    loaded.problems.clear()
    text = f"Hm < a.</think>Look < b: {FAMILIES['qwen3_coder'].write('now', {})}"
    whole = Parsed("Hm < a.", "Look < b:", [("now", "{}")])
    for adapter, name in (
        (ParserEngineReasoningAdapter, "extract_reasoning_streaming"),
        (ParserEngineToolAdapter, "extract_tool_calls_streaming"),
    ):
        with monkeypatch.context() as patch:
            break_method(patch, adapter, name)
            assert ours(loaded, request(), units("qwen3", [encode("qwen3", text)])) == whole
    assert loaded.problems == {"stream_raised": 2}
    break_method(monkeypatch, ParserEngineReasoningAdapter, "extract_reasoning_streaming")
    break_method(monkeypatch, ParserEngineReasoningAdapter, "extract_reasoning")
    assert ours(loaded, request(), units("qwen3", [encode("qwen3", text)])) == Parsed("", text, [])
    loaded.problems.clear()


def test_a_call_that_has_begun_goes_on_from_the_whole_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.parser.engine.adapters import ParserEngineReasoningAdapter

    loaded = parsers("qwen3", "hermes", "qwen3")
    loaded.problems.clear()
    rest = [" <", 'b"}}</tool_call>']
    for is_whole, arguments in ((True, '{"city": "a <b"}'), (False, '{"city": "a')):
        parser = loaded.open(request(), ())
        text = 'Hm.</think>Look: <tool_call>{"name": "get_weather", "arguments": {"city": "a'
        left = list(parser.feed(text, ()))
        assert left[-1] == Fragment(TOOL_ARGUMENTS, '{"city": "a')
        with monkeypatch.context() as patch:
            break_method(patch, ParserEngineReasoningAdapter, "extract_reasoning_streaming")
            if not is_whole:
                break_method(patch, loaded._kit.parser_class.tool_parser_cls, "extract_tool_calls")
            left += [each for piece in rest for each in parser.feed(piece, ())]
            left += parser.finish()
        assert joined(left) == Parsed("Hm.", "Look: ", [("get_weather", arguments)])
    assert loaded.problems == {"stream_raised": 2, "whole_parse_raised": 1}
    loaded.problems.clear()


def test_a_parser_of_unknown_kind_that_raises_leaves_content(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = parsers("composed", "jamba")
    loaded.problems.clear()
    tools = loaded._kit.parser_class.tool_parser_cls
    pieces = [("Look: ", ()), ("<tool_calls>", ()), ('[{"name": "now", ', ()), ('"arguments": {}}]', ())]
    text = "".join(piece for piece, _ in pieces)
    break_method(monkeypatch, tools, "extract_tool_calls")
    assert ours(loaded, request(), pieces) == Parsed("", text, [])
    break_method(monkeypatch, tools, "extract_tool_calls_streaming")
    assert ours(loaded, request(), pieces) == Parsed("", text, [])
    assert loaded.problems == {"whole_parse_raised": 2, "stream_raised": 1}
    monkeypatch.undo()
    break_method(monkeypatch, tools, "extract_tool_calls_streaming")
    assert ours(loaded, request(), [*pieces, ("</tool_calls>", ())]) == Parsed("", "Look: ", [("now", "{}")])
    loaded.problems.clear()


@pytest.mark.parametrize(("model", "tool_parser"), [("qwen3", "qwen3_coder"), ("mistral", "mistral")])
def test_the_arguments_of_a_call_are_converted_once(
    model: str, tool_parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.parser.engine.parser_engine import ParserEngine

    def never(*_: Any) -> Any:
        raise AssertionError("converted before its end")

    values = {"city": "<td><b>x</b></td>\n" * 40}
    text = FAMILIES[tool_parser].calls(FAMILIES[tool_parser].write("get_weather", values))
    loaded = parsers(model, tool_parser)
    loaded.problems.clear()
    monkeypatch.setattr(ParserEngine, "_compute_arg_delta", never)
    calls = ours(loaded, request(), [(text, ())]).calls
    assert [name for name, _ in calls] == ["get_weather"]
    assert json.loads(calls[0][1])["city"].rstrip() == values["city"].rstrip()
    assert not loaded.problems


@pytest.mark.parametrize(
    ("model", "tool_parser", "begin", "max_chars"),
    [
        ("hermes", "hermes", '<tool_call>{"name": "', 128_000),
        ("qwen3", "qwen3_coder", "<tool_call>", 24_000 - 1),  # as parsed: `x` for the text before it
        ("mistral", "mistral", "[TOOL_CALLS]", 24_000 - 1),
        ("llama4", "pythonic", "[a(b=", 24_000),
        ("composed", "jamba", "<tool_calls>", 128_000),
    ],
)
def test_what_is_too_long_is_not_parsed_whole(
    model: str, tool_parser: str, begin: str, max_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = parsers(model, tool_parser)
    break_method(monkeypatch, loaded._kit.parser_class.tool_parser_cls, "extract_tool_calls")
    before = "x" if loaded._kit.parser_class.tool_parser_cls.engine_based_streaming else ""
    for num_chars, problem in ((max_chars, "whole_parse_raised"), (max_chars + 1, "too_long")):
        loaded.problems.clear()
        text = before + begin.ljust(num_chars, "x")
        assert ours(loaded, request(), [(text, ())]) == Parsed("", text, [])
        assert loaded.problems == {problem: 1}
    loaded.problems.clear()


def test_many_begins_and_separators_of_deepseek_are_too_long() -> None:
    for tool_parser in ("deepseek_v3", "deepseek_v31"):
        loaded = parsers("deepseek", tool_parser)
        loaded.problems.clear()
        text = "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>a<｜tool▁sep｜>" * 400
        assert ours(loaded, request(), [(text, ())]) == Parsed("", text, [])
        assert loaded.problems == {"too_long": 1}
        loaded.problems.clear()
        family = FAMILIES[tool_parser]
        assert (
            len(ours(loaded, request(), [(family.calls(*[family.write("now", {})] * 100), ())]).calls) == 100
        )
        assert not loaded.problems


def test_halves_of_surrogate_pairs_can_be_encoded() -> None:
    for model, tool_parser, text in (
        ("hermes", "hermes", '<tool_call>{"name": "w\\ud800", "arguments": {"q": "\\udc00 é"}}</tool_call>'),
        ("llama4", "llama3_json", '{"name": "w\\ud800", "parameters": {"q": "\\udc00 é"}}'),
    ):
        got = ours(parsers(model, tool_parser), request(), [(text, ())])
        assert [(name, json.loads(value)) for name, value in got.calls] == [("w\ufffd", {"q": "\udc00 é"})]
        assert got.calls[0][1].encode()


def test_a_parser_that_cannot_be_made_leaves_content() -> None:
    loaded = parsers("deepseek", None, "deepseek_v3")  # this tokenizer has no <think>
    thinking = request(chat_template_kwargs={"thinking": True})
    assert ours(loaded, thinking, [("Hm.", ()), ("</think>", ())]) == Parsed("", "Hm.</think>", [])
    assert loaded.reasoning_ended(thinking, ()) is None
    assert loaded.problems == {"open_raised": 2}


def test_what_a_model_says_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "handlers", [Keep()])
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.setLevel(logging.DEBUG)  # forgets what loggers have kept of their parents' levels
    asked = request()
    for text in ("<tool_calls>[secret", '<tool_calls>[{"name": "now", "arguments": {"secret'):
        ours(parsers("composed", "jamba"), asked, [(character, ()) for character in text])
    for text in ("[now(secret=secret)]", "[(secret)()]", '[get_weather(city="secret", days=x.y)]'):
        ours(parsers("llama4", "llama4_pythonic"), asked, [(text, ())])
    logger.setLevel(logging.ERROR)
    assert not [record for record in records if "secret" in logging.Formatter().format(record)]


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "words"),
    [
        ("nope", None, "tool_parser: vLLM has no parser 'nope'; it has apertus, "),
        (None, "nope", "reasoning_parser: vLLM has no parser 'nope'; it has "),
        ("deepseek_v3", None, "could not locate tool call start/end tokens"),
        ("hermes", "mistral", "could not locate the tool call token"),
        (None, None, "no parser is named"),
    ],
)
def test_loading_refuses_in_clear_words(tool_parser: str, reasoning_parser: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load_output_parsers(tool_parser, reasoning_parser, files("hermes"), "m")
    assert len(str(caught.value)) < 1200


def test_loading_refuses_a_broken_tokenizer() -> None:
    for model in ({}, {"tokenizer.json": b"{}"}):
        with pytest.raises(ValueError, match="no tokenizer for vLLM's parsers"):
            load_output_parsers("hermes", None, model, "m")


def test_loading_says_that_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed here"):
        load_output_parsers("hermes", None, files("hermes"), "m")
