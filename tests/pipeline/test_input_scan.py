"""Input rules on requests."""

from __future__ import annotations

from typing import Any

import pytest

from filters.patterns import Patterns
from filters.rules import load_rules
from pipeline.errors import ContentBlocked
from pipeline.input_scan import scan_request
from tests.pipeline.requests import chat, completion

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
        chat(["看黄", "片"]),
        chat([{"type": "refusal", "refusal": "黄"}, {"type": "thinking", "thinking": "片"}]),
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
