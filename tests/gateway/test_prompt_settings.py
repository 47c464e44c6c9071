"""`templates:` and `warm:` from a configuration file, into settings, to a child process and onto a screen."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from gateway.prompt_settings import (
    WarmPrompt,
    plain_templates,
    plain_warm,
    read_templates,
    read_warm,
    warm_requests,
)
from gateway.settings_load import SettingsError, load, plain, restore
from gateway.settings_table import table, with_values
from gateway.settings_text import written
from pipeline.prompt_templates import PromptTemplate, TemplateMessage
from pipeline.values import TemplateUse

TEMPLATE = {"name": "qa", "messages": [{"role": "system", "content": "For {shop}."}]}
CONFIG = """
templates:
  - name: product_qa
    messages:
      - {role: system, content: "You sell for {shop}."}
      - {role: user, content: "{product}\\n\\nQuestion: {question}"}
  - name: plain
    messages: [{role: system, content: ""}]
warm:
  - messages: [{role: system, content: "Be brief {not a slot}."}]
    cache_salts: [null, tenant-a, null]
    model: m
  - template: {name: product_qa, variables: {shop: "A", product: ""}}
  - template: {name: plain}
"""


@pytest.fixture(autouse=True)
def _no_inherited_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "headrace.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load({"config": str(path)})
    return [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]


def test_a_file_gives_templates_and_warm_prompts(tmp_path: Path) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text(CONFIG)
    loaded = load({"config": str(path)})
    prompts = loaded.settings.prompts
    assert prompts.templates == (
        PromptTemplate(
            "product_qa",
            (
                TemplateMessage("system", "You sell for {shop}."),
                TemplateMessage("user", "{product}\n\nQuestion: {question}"),
            ),
        ),
        PromptTemplate("plain", (TemplateMessage("system", ""),)),
    )
    assert prompts.warm == (
        WarmPrompt(
            messages=({"role": "system", "content": "Be brief {not a slot}."},),
            cache_salts=(None, "tenant-a"),
            model="m",
        ),
        WarmPrompt(template=TemplateUse("product_qa", {"shop": "A", "product": ""})),
        WarmPrompt(template=TemplateUse("plain", {})),
    )
    assert loaded.sources["templates"] == f"{path}: templates"


def test_they_travel_to_a_child_as_json(tmp_path: Path) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text(CONFIG)
    settings = load({"config": str(path)}).settings
    assert restore(json.loads(json.dumps(plain(settings)))) == with_values(settings, config=None)


def test_reading_what_was_made_plain_changes_nothing() -> None:
    templates = read_templates([TEMPLATE])
    assert read_templates(plain_templates(templates)) == templates
    warm = read_warm([{"template": {"name": "qa", "variables": {"shop": "x"}}, "cache_salts": ["a"]}])
    assert read_warm(plain_warm(warm)) == warm


def test_a_listing_shows_names_and_counts_alone(tmp_path: Path) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text(CONFIG)
    prompts = load({"config": str(path)}).settings.prompts
    rows = {row.name: row for row in table()}
    assert written(rows["templates"], prompts.templates) == "product_qa, plain"
    assert written(rows["warm"], prompts.warm) == "1 message for 2 salts, product_qa, plain"
    assert written(rows["warm"], ()) == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("x", "templates: 'x' is not allowed; it must be a list"),
        ([1], "templates[0]: 1 is not allowed; it must be a mapping of name, messages"),
        ([{}], "templates[0].name: it is missing"),
        ([{**TEMPLATE, "mesages": 1}], "templates[0]: unknown key 'mesages'; it takes name, messages"),
        ([{**TEMPLATE, "name": 7}], "templates[0].name: 7 is not allowed; it must be a text"),
        ([{**TEMPLATE, "name": ""}], "templates[0].name: '' is not allowed; it must be a text"),
        ([{**TEMPLATE, "messages": []}], "templates[0].messages: an empty list; it needs at least one entry"),
        ([TEMPLATE, TEMPLATE], "templates[1].name: an earlier template has the same name"),
    ],
)
def test_a_template_of_another_shape_is_refused_by_its_entry(
    tmp_path: Path, value: Any, expected: str
) -> None:
    assert expected in problems(tmp_path, json.dumps({"templates": value}))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user"}, "content: it is missing"),
        ({"role": "user", "content": None}, "content: None is not allowed; it must be a text"),
        ({"role": "", "content": ""}, "role: '' is not allowed; it must be a text"),
        ({"role": "r" * 65, "content": ""}, "role: 65 characters; at most 64 are allowed"),
        ({"role": "user", "content": "ab{"}, "content: a single '{' (write '{{' for a brace) at character 2"),
        (
            {"role": "user", "content": "{sh op}"},
            "content: 'sh op' is no slot's name (write {{ and }} for braces) at character 0",
        ),
    ],
)
def test_a_message_of_another_shape_is_refused_by_its_position(
    tmp_path: Path, message: dict[str, Any], expected: str
) -> None:
    second = {"name": "b", "messages": [{"role": "user", "content": "ok"}, message]}
    found = problems(tmp_path, json.dumps({"templates": [TEMPLATE, second]}))
    assert found == [f"templates[1].messages[1].{expected}"]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({}, "warm[0]: it needs either messages or a template"),
        (
            {"messages": [{"role": "user", "content": ""}], "template": {"name": "qa"}},
            "warm[0]: it needs either messages or a template",
        ),
        ({"template": {"name": "qx"}}, "warm[0].template.name: 'qx' is not allowed; the templates are: qa"),
        (
            {"template": {"name": "qa", "variables": {"shap": ""}}},
            "warm[0].template.variables: 'shap' is not allowed; its slots are: shop",
        ),
        (
            {"template": {"name": "qa", "variables": {"shop": 1}}},
            "warm[0].template.variables.shop: 1 is not allowed; it must be a text",
        ),
        (
            {"template": {"name": "qa", "variables": [1]}},
            "warm[0].template.variables: [1] is not allowed; it must be a mapping",
        ),
        (
            {"template": {"name": "qa"}, "cache_salts": []},
            "warm[0].cache_salts: an empty list; it needs at least one entry",
        ),
        (
            {"template": {"name": "qa"}, "cache_salts": [None, 3]},
            "warm[0].cache_salts[1]: 3 is not allowed; it must be a text",
        ),
        ({"template": {"name": "qa"}, "model": 3}, "warm[0].model: 3 is not allowed; it must be a text"),
    ],
)
def test_a_warm_prompt_of_another_shape_is_refused_by_its_entry(
    tmp_path: Path, entry: dict[str, Any], expected: str
) -> None:
    assert problems(tmp_path, json.dumps({"templates": [TEMPLATE], "warm": [entry]})) == [expected]


def test_the_problems_of_all_entries_are_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, json.dumps({"templates": [{"name": "a"}, 1], "warm": [2], "port": "x"}))
    assert [problem.split(":")[0] for problem in found] == [
        "port (" + found[0].removeprefix("port (").split(":")[0],
        "templates[0].messages",
        "templates[1]",
        "warm[0]",
    ]


def shared(prompt: WarmPrompt) -> str:
    """The text that both requests of a warm prompt begin with, roles and contents in a row."""
    first, second = warm_requests(prompt, {each.name: each for each in read_templates([TEMPLATE])}, "m")
    assert (first.model, second.model) == ("m", "m")
    texts = ["".join(f"<{m['role']}>{m['content']}" for m in each.messages) for each in (first, second)]
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"messages": [{"role": "system", "content": "Hi {x}."}]}, "<system>Hi {x}.<user>"),
        ({"messages": [{"role": "user", "content": "Hi."}]}, "<user>Hi."),
        ({"template": {"name": "qa"}}, "<system>For "),
        ({"template": {"name": "qa", "variables": {"shop": "A"}}}, "<system>For A.<user>"),
    ],
)
def test_a_warm_prompt_is_what_its_two_requests_share(entry: dict[str, Any], expected: str) -> None:
    (prompt,) = read_warm([entry])
    assert shared(prompt) == expected


def test_a_variable_cannot_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TEMPLATES", "[]")
    with pytest.raises(SettingsError, match="unknown variable HEADRACE_TEMPLATES"):
        load()
