"""Finding and replacing the strings of a request."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import InvalidRequest
from pipeline.leaves import find, leaves, mapped, nests_deeper, replaced, untrusted
from tests.pipeline.requests import chat, completion

VALUE = {"a": ["b", {"c": "d", "e": [3, None, True, "f"]}], "g": ("h",)}


def test_all_strings_are_leaves_and_keys_too() -> None:
    assert sorted(leaves(VALUE)) == list("abcdefgh")


def test_a_value_that_is_no_container_has_itself() -> None:
    assert leaves("a") == ["a"]
    assert leaves(None) == leaves(3) == leaves([]) == []


def test_more_values_than_allowed_are_refused_with_the_limit() -> None:
    num_values = 2 + 2 + 2 + 4 + 1  # a key and its value are one
    leaves({"x": VALUE["a"], "g": VALUE["g"]}, num_values)
    with pytest.raises(InvalidRequest, match=r"limit is 10"):
        leaves({"x": VALUE["a"], "g": VALUE["g"]}, 10)


def test_mapped_changes_every_string_and_nothing_else() -> None:
    assert mapped(VALUE, str.upper) == {"A": ["B", {"C": "D", "E": [3, None, True, "F"]}], "G": ["H"]}
    assert sorted(leaves(VALUE)) == list("abcdefgh")


def test_depth_counts_arrays_and_objects() -> None:
    assert not nests_deeper(VALUE, 3)
    assert nests_deeper(VALUE, 2)
    assert not nests_deeper("a", 0)
    assert not nests_deeper([], 0)
    assert nests_deeper([[]], 0)


def test_depth_of_very_deep_values_is_known_without_recursion() -> None:
    value: Any = 0
    for _ in range(100_000):
        value = [value]
    assert nests_deeper(value, 64)


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ("b", "x.a[0]"),
        ("d", "x.a[1].c"),
        ("f", "x.a[1].e[3]"),
        ("c", "a key of x.a[1]"),
        ("h", "x.g[0]"),
        ("z", None),
    ],
)
def test_find_tells_the_path(wanted: str, path: str | None) -> None:
    found = find({"x": VALUE}, lambda text: text == wanted)
    assert found == (None if path is None else (path, wanted))


def test_find_takes_the_first_in_order() -> None:
    assert find({"x": VALUE}, lambda text: text in "fdh") == ("x.a[1].c", "d")


@pytest.mark.parametrize(
    "field",
    [
        {"messages": [{"role": "user", "content": "SECRET"}]},
        {"messages": [{"role": "SECRET", "content": ""}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "SECRET"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "SECRET"}}]}]},
        {"tools": [{"function": {"parameters": {"properties": {"SECRET": {}}}}}]},
        {"documents": [{"title": "SECRET"}]},
        {"chat_template_kwargs": {"SECRET": 1}},
    ],
)
def test_every_field_of_a_chat_that_reaches_the_prompt_is_untrusted(field: dict[str, Any]) -> None:
    request = chat(**field)
    assert "SECRET" in set(leaves(untrusted(request)))
    changed = replaced(
        request, {k: mapped(v, lambda t: t.replace("SECRET", "x")) for k, v in untrusted(request).items()}
    )
    assert "SECRET" not in repr(changed)


def test_prompts_that_are_texts_are_replaced_in_place() -> None:
    request = completion("a", [1, 2], "b")
    assert untrusted(request) == {"prompt[0]": "a", "prompt[2]": "b"}
    assert list(replaced(request, {"prompt[0]": "A", "prompt[2]": "B"}).prompts) == ["A", [1, 2], "B"]
    assert untrusted(completion("a")) == {"prompt": "a"}
