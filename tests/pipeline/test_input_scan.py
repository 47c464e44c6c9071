"""Input rules on requests."""

from __future__ import annotations

import json
import random
from collections.abc import Generator
from typing import Any, TypeVar

import pytest

from filters import scan as scan_module
from filters.hit import Hit
from filters.patterns import Patterns
from filters.rules import load_rules
from filters.scan import SLICE_CHARS, scan
from pipeline import input_scan
from pipeline.errors import ContentBlocked
from pipeline.input_scan import scan_ids
from pipeline.leaves import leaves, untrusted
from pipeline.seen_texts import SeenTexts
from pipeline.values import ChatRequest, CompletionRequest
from tests.pipeline.requests import chat, completion

Result = TypeVar("Result")

RULES = Patterns(
    load_rules(
        """
- {id: no, match: [黄片], action: block, allow: [三黄片]}
- {id: hide, match: [敏感词], action: mask}
- {id: mine, match: [我的], action: redact, replacement: "#"}
- {id: word, match: [ass], action: mask, whole_word: true}
- {id: note, match: [watch], action: flag}
""",
        "rules.yaml",
    )
)


def ran(steps: Generator[None, None, Result]) -> tuple[Result, int]:
    """What a generator returns, and how often it paused."""
    num_pauses = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, num_pauses
        num_pauses += 1


def scan_request(
    request: ChatRequest | CompletionRequest,
    rules: Patterns,
    separator: str = "",
    seen: SeenTexts | None = None,
) -> tuple[Any, tuple[Hit, ...]]:
    return ran(input_scan.scan_request(request, rules, separator, seen))[0]


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def scanned(content: Any, separator: str = "\n") -> Any:
    return scan_request(chat(content), RULES, separator)[0].messages[0]["content"]


def test_clean_request_is_returned_as_it_is() -> None:
    request = chat("all fine", tools=[{"function": {"name": "f"}}])
    assert scan_request(request, RULES) == (request, ())
    assert scan_request(request, RULES)[0] is request


def test_no_rules_find_nothing() -> None:
    request = chat("黄片")
    assert scan_request(request, Patterns(load_rules("", "empty.txt")))[0] is request


@pytest.mark.parametrize(
    "request_",
    [
        chat("看黄片"),
        chat([text_part("看黄"), text_part("片")]),
        chat(messages=[{"role": "黄片", "content": "a"}]),
        chat(messages=[{"role": "user", "name": "黄片", "content": "a"}]),
        chat(messages=[{"role": "assistant", "reasoning": "黄片", "content": "a"}]),
        chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"arguments": "黄片"}}]}]),
        chat(tools=[{"function": {"parameters": {"properties": {"黄片": {}}}}}]),
        chat(documents=[{"title": "黄片"}]),
        chat(chat_template_kwargs={"x": ["黄片"]}),
        completion("a", "看黄片"),
    ],
)
@pytest.mark.parametrize("separator", ["", "\n"])
def test_block_stops_the_request_wherever_the_text_is(request_: Any, separator: str) -> None:
    with pytest.raises(ContentBlocked) as caught:
        scan_request(request_, RULES, separator)
    assert caught.value.rule_id == "no"
    assert caught.value.param in ("messages", "prompt")
    assert "黄片" not in caught.value.message


def test_allow_phrase_counts_as_the_template_joins() -> None:
    parts = [text_part("三"), text_part("黄片")]
    assert scanned(parts, separator="") == parts
    with pytest.raises(ContentBlocked):
        scanned(parts, separator="\n")


@pytest.mark.parametrize(
    ("content", "separator", "expected"),
    [
        ("a敏感词b", "\n", "a***b"),
        ("我的", "\n", "#"),
        ([text_part("a"), text_part("敏感词")], "\n", [text_part("a\n***")]),
        ([text_part("a敏"), text_part("感词b")], "\n", [text_part("a***b")]),
        ([text_part("a敏"), text_part("感词b")], "", [text_part("a***b")]),
        ([text_part("cl"), text_part("ass")], "\n", [text_part("cl\n***")]),
        ([text_part("cl"), text_part("ass")], "", [text_part("cl"), text_part("ass")]),
        ([text_part("敏感词"), {"type": "image_url"}], "", [text_part("***"), {"type": "image_url"}]),
    ],
)
def test_rewrite_changes_what_the_model_sees(content: Any, separator: str, expected: Any) -> None:
    assert scanned(content, separator) == expected


def test_parts_of_a_tool_s_result_are_lines_for_every_template() -> None:
    parts = [text_part("cl"), text_part("ass")]
    for role, expected in (("user", parts), ("tool", [text_part("cl\n***")])):
        request, _ = scan_request(chat(messages=[{"role": role, "content": parts}]), RULES, "")
        assert request.messages[0]["content"] == expected


def test_rewrite_leaves_names_alone() -> None:
    message = {"role": "tool", "tool_call_id": "敏感词", "name": "敏感词", "content": "敏感词"}
    request, hits = scan_request(chat(messages=[message]), RULES)
    assert request.messages[0] == {**message, "content": "***"}
    assert len(hits) == 3


def test_prompts_are_rewritten_in_place() -> None:
    request, _ = scan_request(completion("a", [5], "敏感词"), RULES)
    assert list(request.prompts) == ["a", [5], "***"]


def test_flag_is_reported_once_and_changes_nothing() -> None:
    for content in ("I watch", [text_part("I"), text_part("watch")], [text_part("I wa"), text_part("tch")]):
        request, hits = scan_request(chat(content), RULES, "\n")
        assert request.messages[0]["content"] == content
        assert [(hit.rule_id, hit.action) for hit in hits] == [("note", "flag")]


@pytest.mark.parametrize(
    "request_",
    [
        chat(tools=[{"function": {"parameters": {"properties": {"id": {"description": "黄片"}}}}}]),
        chat(documents=[{"content": [{"body": "黄片"}]}]),
        chat(
            messages=[
                {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a": "黄\\u7247"}'}}]}
            ]
        ),
    ],
)
def test_block_finds_what_is_nested_or_escaped(request_: Any) -> None:
    with pytest.raises(ContentBlocked):
        scan_request(request_, RULES)


@pytest.mark.parametrize("depth", [65, 66, 400, 900, 100_000])
def test_deep_arguments_with_escapes_are_scanned(depth: int) -> None:
    text = '{"a":' * depth + '"敏感词\\n"' + "}" * depth
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    request, hits = scan_request(chat(messages=[{"role": "assistant", "tool_calls": [call]}]), RULES)
    assert [hit.rule_id for hit in hits] == ["hide"]
    assert "敏感词" not in str(request.messages)


def test_escaped_arguments_are_rewritten_as_what_they_stand_for() -> None:
    def arguments(text: str) -> ChatRequest:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        return chat(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])

    def after(text: str) -> str:
        request, _ = scan_request(arguments(text), RULES)
        return str(request.messages[0]["tool_calls"][0]["function"]["arguments"])

    assert json.loads(after('{"q": "\\u654f\\u611f词", "n": [1, null]}')) == {"q": "***", "n": [1, None]}
    assert json.loads(after('{"q": "a\\nass"}')) == {"q": "a\n***"}
    for unchanged in ('{"q": "\\u654f"}', "\\", '"\\u654f\\u611f词', '{"q": 1}', ""):
        assert after(unchanged) == unchanged
    assert after("{'q': 敏感词") == "{'q': ***"


def one_by_one(request: ChatRequest, separator: str) -> tuple[list[str], list[Hit]]:
    """All texts of a chat after a scan of each by itself, for chats without content parts."""
    texts, hits = [], []
    for text in leaves(list(untrusted(request).values())):
        result = scan(text, RULES)
        assert result.text is not None
        texts.append(result.text)
        hits += result.hits
    return texts, hits


def any_chat(rng: random.Random, num_messages: int) -> ChatRequest:
    words = ["敏感词", "敏", "感词", "我的", "ass", "class", "watch", "\n", " ", "好", "三黄片", "a\u200bss"]

    def text() -> str:
        return "".join(rng.choices(words, k=rng.randrange(8)))

    messages = [
        {"role": rng.choice(["user", "assistant"]), "content": text(), "reasoning": text()}
        for _ in range(num_messages)
    ]
    return chat(
        messages=messages, documents=[{"title": text(), "n": 3}], chat_template_kwargs={"x": [text()]}
    )


def test_every_text_is_scanned_and_memory_changes_nothing() -> None:
    rng = random.Random(3)
    seen = SeenTexts(RULES, max_bytes=6000)
    evicted = 0
    for _ in range(300):
        request = any_chat(rng, rng.randrange(1, 5))
        result = scan_request(request, RULES, "\n")
        texts, hits = one_by_one(request, "\n")
        assert sorted(leaves(list(untrusted(result[0]).values()))) == sorted(texts)
        assert sorted(map(repr, result[1])) == sorted(map(repr, hits))
        for _ in range(2):
            before = len(seen)
            assert scan_request(request, RULES, "\n", seen) == result
            evicted += len(seen) < before
            assert seen.num_bytes <= 6000
    assert seen.hits
    assert seen.misses
    assert evicted


def test_next_turn_scans_its_new_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[str] = []

    def spying(text: str, rules: Patterns) -> scan_module.ScanResult:
        scanned.append(text)
        return scan(text, rules)

    monkeypatch.setattr(input_scan, "scan", spying)
    seen = SeenTexts(RULES)
    messages = [{"role": "user", "content": "hide 敏感词"}, {"role": "assistant", "content": "fine"}]
    first = scan_request(chat(messages=messages), RULES, "\n", seen)
    assert sorted(scanned) == ["content", "fine", "hide 敏感词"]
    scanned.clear()
    messages = [*messages, {"role": "user", "content": [text_part("new"), text_part("text")]}]
    second = scan_request(chat(messages=messages), RULES, "\n", seen)
    assert scanned == ["new\ntext", "newtext"]
    assert second[0].messages[:2] == first[0].messages[:2]
    assert second[0].messages[0]["content"] == "hide ***"
    assert second[1] == first[1]


def test_memory_of_other_rules_is_refused() -> None:
    other = Patterns(load_rules("badword", "words.txt"))
    with pytest.raises(ValueError, match="other rules"):
        scan_request(chat("hi"), RULES, "", SeenTexts(other))


def test_blocked_text_is_blocked_again() -> None:
    seen = SeenTexts(RULES)
    for _ in range(3):
        with pytest.raises(ContentBlocked):
            scan_request(chat("看黄片"), RULES, "", seen)


@pytest.mark.parametrize(
    ("request_", "num_pauses"),
    [
        (chat("short"), 0),
        (completion("x" * SLICE_CHARS), 1),
        (completion("x" * (3 * SLICE_CHARS)), 3),
        (chat(documents=[{"a": f"{i} {'x' * 1000}"} for i in range(160)]), 40),
        (chat(documents=[{f"k{i}": f"v{i}"} for i in range(1000)]), 32),
    ],
)
def test_scan_pauses_at_least_once_a_slice(request_: Any, num_pauses: int) -> None:
    seen = SeenTexts(RULES)
    assert ran(input_scan.scan_request(request_, RULES, "", seen)) == ((request_, ()), num_pauses)
    assert ran(input_scan.scan_request(request_, RULES, "", seen)) == ((request_, ()), 0)


def test_requests_that_take_turns_do_not_disturb_each_other() -> None:
    """Pauses let other requests in between, with the same memory."""
    seen = SeenTexts(RULES)
    texts = ["x" * (2 * SLICE_CHARS) + word for word in ("敏感词", "watch", "ass", "")] * 2
    running = {i: input_scan.scan_request(completion(text), RULES, "", seen) for i, text in enumerate(texts)}
    results: dict[int, Any] = {}
    rng = random.Random(8)
    while running:
        index = rng.choice(list(running))
        try:
            next(running[index])
        except StopIteration as end:
            results[index] = end.value
            del running[index]
    for index, text in enumerate(texts):
        request, hits = results[index]
        expected = scan(text, RULES)
        assert (request.prompts[0], hits) == (expected.text, expected.hits)


def test_prompt_of_ids_is_scanned_and_never_rewritten() -> None:
    seen = SeenTexts(RULES)
    for _ in range(2):
        assert ran(scan_ids("fine", RULES, "prompt", seen))[0] == ()
        assert [hit.rule_id for hit in ran(scan_ids("I watch", RULES, "prompt", seen))[0]] == ["note"]
        for text, rule_id in (("watch 敏感词", "hide"), ("黄片", "no"), ("我的", "mine")):
            with pytest.raises(ContentBlocked) as caught:
                ran(scan_ids(text, RULES, "prompt[1]", seen))
            assert (caught.value.rule_id, caught.value.param) == (rule_id, "prompt[1]")
