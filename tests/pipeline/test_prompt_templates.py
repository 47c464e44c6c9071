"""Slots, their syntax, and what a request's values make of a template."""

from __future__ import annotations

import random

import pytest

from pipeline.errors import InvalidRequest
from pipeline.prompt_templates import (
    PromptTemplate,
    TemplateMessage,
    TemplateSyntaxError,
    beginnings,
    expanded,
    paired_requests,
)
from pipeline.values import ChatRequest, Delivery, Generation, TemplateUse

QA = PromptTemplate(
    "qa",
    (
        TemplateMessage("system", "You sell for {shop}."),
        TemplateMessage("user", "{product}\n\nQuestion: {question} ({shop})"),
    ),
)
TEMPLATES = {"qa": QA, "plain": PromptTemplate("plain", (TemplateMessage("system", "Be brief."),))}
VALUES = {"shop": "A", "product": "", "question": "{shop} {{?}}"}


def request(use: TemplateUse | None, *texts: str) -> ChatRequest:
    messages = tuple({"role": "user", "content": text} for text in texts)
    return ChatRequest("m", messages, Generation({}), Delivery(), template=use)


# -- syntax --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        ("", ("",)),
        ("a", ("a",)),
        ("{a}", ("", "a", "")),
        ("x{a}y{a}{b}", ("x", "a", "y", "a", "", "b", "")),
        ("{{a}}", ("{a}",)),
        ("{{{a}}}", ("{", "a", "}")),
        ("{{}}{{{{", ("{}{{",)),
        ("{é_1}", ("", "é_1", "")),
        ("{{{{{a}", ("{{", "a", "")),
    ],
)
def test_a_content_is_cut_at_its_slots(content: str, pieces: tuple[str, ...]) -> None:
    message = TemplateMessage("user", content)
    assert message.pieces == pieces
    assert message.slots == pieces[1::2]


@pytest.mark.parametrize(
    ("content", "position"),
    [("{", 0), ("ab}", 2), ("{}", 0), ("x{a b}", 1), ("{1}", 0), ("{a.b}", 0), ("{a!r}", 0), ("{a}}", 3)],
)
def test_a_broken_content_names_the_position(content: str, position: int) -> None:
    with pytest.raises(TemplateSyntaxError, match=f"at character {position}$") as caught:
        TemplateMessage("user", content)
    assert caught.value.position == position


def test_it_reads_what_pythons_format_reads() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        content = "".join(
            rng.choice(["{{", "}}", "{a}", "{b}", "x", "\n", "é"]) for _ in range(rng.randint(0, 8))
        )
        filled = TemplateMessage("user", content).filled({"a": "1", "b": "{2}"})
        assert filled == {"role": "user", "content": content.format(a="1", b="{2}")}


# -- requests ------------------------------------------------------------------------------------------------


def test_a_templates_messages_come_first_and_values_are_not_looked_into() -> None:
    full = expanded(request(TemplateUse("qa", VALUES), "more"), TEMPLATES)
    assert full.template is None
    assert full.messages == (
        {"role": "system", "content": "You sell for A."},
        {"role": "user", "content": "\n\nQuestion: {shop} {{?}} (A)"},
        {"role": "user", "content": "more"},
    )


def test_without_a_template_nothing_changes() -> None:
    plain = request(None, "x")
    assert expanded(plain, TEMPLATES) is plain


@pytest.mark.parametrize(
    ("use", "param", "message"),
    [
        (
            TemplateUse("qx", {}),
            "template.name",
            "'template.name' is 'qx'; this server's templates are: qa, plain.",
        ),
        (
            TemplateUse("qa", {**VALUES, "shp": ""}),
            "template.variables",
            "'template.variables' has the unknown slot 'shp'; "
            "the slots of 'qa' are: shop, product, question.",
        ),
        (
            TemplateUse("qa", {"shop": ""}),
            "template.variables.product",
            "'template.variables' lacks product, question; the slots of 'qa' are: shop, product, question.",
        ),
        (
            TemplateUse("plain", {"x": ""}),
            "template.variables",
            "'template.variables' has the unknown slot 'x'; the slots of 'plain' are: none.",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(use: TemplateUse, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        expanded(request(use), TEMPLATES)
    assert (caught.value.param, caught.value.message) == (param, message)


def test_a_long_name_is_shown_in_part() -> None:
    with pytest.raises(InvalidRequest) as caught:
        expanded(request(TemplateUse("q" * 10_000, {})), TEMPLATES)
    assert len(caught.value.message) < 200


# -- what is known before a request --------------------------------------------------------------------------


def test_beginnings_share_the_text_before_the_first_unbound_slot() -> None:
    first, second = beginnings(QA, {"shop": "A"})
    assert first[0] == second[0] == {"role": "system", "content": "You sell for A."}
    one, other = first[1]["content"], second[1]["content"]
    assert one[0] != other[0]
    assert one[1:12] == other[1:12] == "\n\nQuestion:"
    assert one.endswith(" (A)")


def test_bound_in_full_both_beginnings_are_the_same() -> None:
    first, second = beginnings(QA, VALUES)
    assert first == second == list(expanded(request(TemplateUse("qa", VALUES)), TEMPLATES).messages)


def test_paired_requests_end_with_a_user_and_differ_there() -> None:
    for template in TEMPLATES.values():
        first, second = paired_requests(beginnings(template, {}), "m")
        for each in (first, second):
            assert each.model == "m"
            assert [message["role"] for message in each.messages] == ["system", "user"]
        assert first.messages[1]["content"] != second.messages[1]["content"]
    assert first.messages[0] == second.messages[0] == {"role": "system", "content": "Be brief."}
