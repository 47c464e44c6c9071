"""Which control strings of a rendered chat are the template's own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeline.controls import ControlStrings
from pipeline.rendering import ChatTemplate, Rendered
from pipeline.template_probe import examine
from pipeline.values import ChatRequest
from tests.pipeline import chat_templates, small_tokenizers
from tests.pipeline.requests import chat

CONTROLS = ControlStrings({"<|im_start|>": 1, "<|im_end|>": 2, "<think>": 3, "</think>": 4, "<|user|>": 5})
NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def render(source: str, request: ChatRequest) -> Rendered:
    return ChatTemplate(source, NAMES, CONTROLS).render(request, now_s=0.0)


def pieces(source: str, content: Any = "x", **fields: Any) -> list[str]:
    rendered = render(source, chat(content, **fields))
    return [rendered.opening, *rendered.segments]


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("<think>{{ messages[0].content }}", "<think>", ["", "<think><think>"]),
        (
            "{{ '<think>' + messages[0].content + '</think>' }}",
            "</think>",
            ["", "<think></think>", "</think>"],
        ),
        ("{{ '<think>' ~ messages[0].content }}", "</think>", ["", "<think></think>"]),
        ("{{ bos_token }}{{ messages[0].content }}", "<|im_start|>", ["", "<|im_start|><|im_start|>"]),
        ("{% set a = '<think>' %}{{ a }}{{ messages[0].content }}", "<think>", ["", "<think><think>"]),
        ("{% set ns = namespace(a='<think>') %}{{ ns.a }}{{ messages[0].content }}", "x", ["", "<think>x"]),
        (
            "{% macro m(a) %}{{ a }}{% endmacro %}{{ m('<think>' + messages[0].content) }}",
            "x",
            ["", "<think>x"],
        ),
        ("{{ {'user': '<|user|>'}[messages[0].role] }}{{ messages[0].content }}", "x", ["", "<|user|>x"]),
        ("{{ ['<think>', messages[0].content] | join('</think>') }}", "x", ["", "<think>", "</think>x"]),
        ("{{ messages[0].name | default('<think>') }}", "x", ["", "<think>"]),
        ("{{ '<think>' if messages[0].content == 'x' else '</think>' }}", "x", ["", "<think>"]),
        ("{{ 'a%s' % '<think>' }}", "x", ["a", "<think>"]),
        ("{{ messages[0].content.replace('[T]', '<think>') }}", "a[T]b", ["a", "<think>b"]),
        ("{{ messages[0].content.split('</think>')[-1] }}", "a</think>b<think>", ["b<think>"]),
        ("{{ ('<think>' + messages[0].content + ' ').strip() }}", " <think> ", ["", "<think> <think>"]),
        ("{{ ('<think>' + messages[0].content) | trim }}", "a ", ["", "<think>a"]),
        ("{% set x %}<think>{{ messages[0].content }}{% endset %}{{ x }}", "<think>", ["", "<think><think>"]),
        ("{% filter trim %}<think>{{ messages[0].content }} {% endfilter %}", "a", ["", "<think>a"]),
        ("{% for a in ['<think>', '</think>'] %}{{ a }}{% endfor %}", "x", ["", "<think>", "</think>"]),
        ("{% if '<think>' in messages[0].content %}yes{% else %}no{% endif %}", "a<think>", ["yes"]),
    ],
)
def test_literals_begin_segments_and_user_text_never_does(
    source: str, content: str, expected: list[str]
) -> None:
    assert pieces(source, content) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ '<|' + messages[0].role + '|>' + messages[0].content }}",
        "{{ '<|' + messages[0]['role'] + '|>' }}{{ messages[0].content }}",
        "<|{{ messages[0].role }}|>{{ messages[0].content }}",
        "{{ '<|' ~ messages[0].role ~ '|>' ~ messages[0].content }}",
        "{% set role = messages[0].role %}{{ '<|' }}{{ role }}{{ '|>' }}{{ messages[0].content }}",
    ],
)
def test_control_string_around_a_role_is_the_templates_own(source: str) -> None:
    assert pieces(source, "<|user|>") == ["", "<|user|><|user|>"]
    stranger = chat(messages=[{"role": "u<|user|>", "content": "x"}])
    assert render(source, stranger).segments == []


@pytest.mark.parametrize(
    "source",
    [
        # It looks at what it wrote itself.
        "{% set a = '<think>' %}{% if a == '<think>' %}{{ a }}{% endif %}{{ messages[0].content }}",
        "{% set a = '<think>' + 'x' %}{{ a.split('<think>')[0] }}<think>{{ messages[0].content }}",
        "{% macro m(a) %}{% if a == '<think>' %}{{ a }}{% endif %}{% endmacro %}"
        "{{ m('<think>') }}{{ messages[0].content }}",
    ],
)
def test_template_that_examines_its_own_literals_is_rendered_exactly(source: str) -> None:
    """Then the request is disguised instead, which is as safe."""
    for content in ("x", "<think>", "</think>y", "<thi", "nk>"):
        assert pieces(source, content) == ["", "<think>" + content]


def test_control_string_that_is_put_together_from_leaves_begins_no_segment() -> None:
    parts = [{"role": "user", "content": "a<|im_"}, {"role": "user", "content": "end|>b"}]
    source = "{{ '<think>' }}{{ messages[0].content }}{{ messages[1].content }}"
    assert render(source, chat(messages=parts)).segments == ["<think>a<|im_end|>b"]
    template = ChatTemplate(source, NAMES, CONTROLS)
    assert template.render_disguised(chat(messages=parts), 0.0).segments == ["<think>a<|im_end|>b"]


def test_halves_are_broken_although_a_template_trims_them() -> None:
    parts = [{"role": "user", "content": "a<|im_ \n"}, {"role": "user", "content": "\u00a0end|>b"}]
    source = "{% set a = '<think>' %}{{ a | trim if a == '<think>' }}{% for message in messages %}"
    source += "{{ message.content | trim }}{% endfor %}"
    assert render(source, chat(messages=parts)).segments == ["<think>a<|im_end|>b"]
    template = ChatTemplate(source, NAMES, CONTROLS)
    assert template.render_disguised(chat(messages=parts), 0.0).segments == ["<think>a<|im_end|>b"]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ '<|%s|>' % m.role }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ ['<|', m.role, '|>', m.content] | join }}{% endfor %}",
        "{% macro r(a) %}<|{{ a }}|>{% endmacro %}{% for m in messages %}{{ r(m.role) }}{{ m.content }}"
        "{% endfor %}{{ 'x' if messages[0].role == 'poet' }}",
    ],
)
def test_roles_make_control_strings_only_if_the_template_means_them(source: str) -> None:
    template = ChatTemplate(source, NAMES, CONTROLS)
    examine(template)
    assert not template.follows_marks
    roles = ("user", "im_end", "poet", "im_start|>a<|im_end")
    rendered = template.render(chat(messages=[{"role": role, "content": "x"} for role in roles]), 0.0)
    assert rendered.segments[0].startswith("<|user|>x<|im_end|>x<|poet|>x<|im_start|>a<|im_end|>x")
    assert len(rendered.segments) == 1


def test_marks_in_user_text_are_no_marks() -> None:
    source = "<think>{{ messages[0].content }}</think>"
    for code in (1, *range(0xFDD0, 0xFDF0)):
        content = f"a{chr(code)}<think>{chr(code)}b"
        assert pieces(source, content) == ["", "<think>" + content, "</think>"]
    both = "\x01\ufdd0\ufdd1<|im_end|>"
    assert pieces(source, both) == ["", "<think>" + both, "</think>"]


def test_request_with_every_mark_is_refused() -> None:
    everything = "\x01" + "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(Exception, match=r"all of the noncharacters U\+FDD0 to U\+FDED"):
        pieces("<think>{{ messages[0].content }}", everything)


@pytest.mark.parametrize("name", [name for name in vars(chat_templates) if name.isupper()])
def test_marks_change_no_text_whatever_the_chat_spells(name: str) -> None:
    source = getattr(chat_templates, name)
    marked, plain = ChatTemplate(source, NAMES, CONTROLS), ChatTemplate(source, NAMES)
    rng = random.Random(name)
    spice = [*CONTROLS.ids, "", " ", "\n", "<|im_", "end|>", "\ufdd0", "\x01"]
    for _ in range(100):
        messages = [
            {"role": role, "content": rng.choice(spice) + small_tokenizers.text(rng, 3) + rng.choice(spice)}
            for role in ["system", "user", "assistant", "user"][rng.randint(0, 1) :]
        ]
        request = chat(messages=messages)
        rendered = marked.render(request, 0.0)
        assert rendered.text == plain.render(request, 0.0).text
        harmless = [{**message, "content": "x"} for message in messages]
        if "</think>" not in str(messages):  # which a template may cut at
            assert len(rendered.segments) == len(marked.render(chat(messages=harmless), 0.0).segments)
        assert all(map(CONTROLS.match, rendered.segments))
