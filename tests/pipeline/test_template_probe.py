"""What is found out about a template and its tokenizer when a model is loaded."""

from __future__ import annotations

from array import array

import pytest
from tokenizers import AddedToken, Tokenizer

from pipeline.model_text import ModelText
from tests.pipeline import chat_templates, small_tokenizers
from tests.pipeline.model_files import model_files
from tests.pipeline.requests import chat

TEMPLATES = {name: source for name, source in vars(chat_templates).items() if name.isupper()}


def load(template: str, tokenizer: Tokenizer | None = None) -> ModelText:
    files = model_files(chat_template=template)
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_str().encode()
    return ModelText.from_files(files)


def with_flags(**flags: bool) -> Tokenizer:
    """The byte-level tokenizer, its control tokens with other flags."""
    tokenizer = Tokenizer.from_str(small_tokenizers.byte_level().to_str())
    tokenizer.add_special_tokens([AddedToken("<|swallows|>", **flags)])
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_usual_templates_are_followed_and_exact_in_segments(name: str) -> None:
    text = load(TEMPLATES[name])
    assert text.chat_template is not None
    assert text.chat_template.follows_marks
    assert text.is_segmentable
    assert not text.chat_template.arguments_as_text


def test_template_that_takes_its_own_text_apart_is_not_followed_but_rendered() -> None:
    source = (
        "{% set head = '<|im_start|>user' %}{{ head[0:12] }}{{ messages[0].content }}"
        "{{ '<|im_' }}{{ messages[0].name }}end|>"
    )
    text = load(source)
    assert text.chat_template is not None
    assert not text.chat_template.follows_marks or text.chat_template.render(chat("x"), 0.0).segments
    rendered = text.chat_template.render(chat("<|im_end|>"), 0.0)
    assert rendered.text == "<|im_start|><|im_end|><|im_end|>"
    assert rendered.segments == ["<|im_start|><|im_end|>", "<|im_end|>"]


def test_template_that_joins_arguments_to_text_gets_them_as_text() -> None:
    source = (
        "{% for message in messages %}<|im_start|>{% for call in message.tool_calls or [] %}"
        "{{ 'call ' + call.function.arguments }}{% endfor %}{{ message.content or '' }}{% endfor %}"
    )
    template = load(source).chat_template
    assert template is not None
    assert template.arguments_as_text
    for given, expected in (('{"a":  1}', '{"a":  1}'), ({"a": "é"}, '{"a": "é"}'), (None, "{}")):
        calls = [{"type": "function", "function": {"name": "f", "arguments": given}}]
        messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
        assert template.render(chat(messages=messages), 0.0).text == f"<|im_start|>call {expected}"


@pytest.mark.parametrize(
    ("flags", "is_segmentable"), [({}, True), ({"rstrip": True}, True), ({"lstrip": True}, False)]
)
def test_token_that_swallows_the_space_before_it_makes_segments_inexact(
    flags: dict[str, bool], is_segmentable: bool
) -> None:
    source = "{% for message in messages %}{{ message.content }}<|swallows|>{% endfor %}"
    text = load(source, with_flags(**flags))
    assert text.is_segmentable == is_segmentable


def test_dummy_space_after_every_control_token_leaves_segments_exact() -> None:
    source = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"
    assert load(source, small_tokenizers.byte_fallback()).is_segmentable


def test_user_text_is_no_control_token_where_segments_are_not_exact() -> None:
    source = "{% for message in messages %}{{ message.content }} <|swallows|>{% endfor %}"
    text = load(source, with_flags(lstrip=True))
    control = text.tokenizer.token_to_id("<|swallows|>")
    assert text.chat_template is not None
    for content, expected in (("a", 1), ("a<|swallows|>b", 1), ("<|swallows|>", 1)):
        rendered = text.chat_template.render(chat(content), 0.0)
        ids = array("i", text.encoder.encode_whole(rendered.opening, rendered.segments)).tolist()
        assert ids.count(control) == expected


def test_own_template_replaces_the_models() -> None:
    text = ModelText.from_files(model_files(), chat_template="<|im_start|>{{ messages[0].content }}")
    assert text.chat_template is not None
    assert text.chat_template.render(chat("x"), 0.0).text == "<|im_start|>x"


def test_named_template_for_tools_is_used_with_tools() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    text = ModelText.from_files(model_files(chat_template=named))
    tool = {"type": "function", "function": {"name": "f"}}
    for tools, expected in ((None, "plain"), ([], "plain"), ([tool], "tools")):
        template = text.template_for(tools)
        assert template is not None
        assert template.render(chat("x", tools=tools), 0.0).text == expected


def test_fingerprint_is_of_what_decides_about_ids() -> None:
    base = load(chat_templates.CHATML).fingerprint
    assert load(chat_templates.CHATML).fingerprint == base
    assert load(chat_templates.CHATML, with_flags()).fingerprint != base
    assert load(chat_templates.CHATML + "<think>").fingerprint != base, "another control string"
    assert load(chat_templates.CHATML + "x").fingerprint == base
