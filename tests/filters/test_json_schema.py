"""Schemas: what fits, in which words it does not, and that nobody's schema or answer can take the process."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from filters.json_schema import (
    MAX_DEPTH,
    MAX_PROBLEM_CHARS,
    Schema,
    check_schema,
    compile_schema,
)

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_6 = "http://json-schema.org/draft-06/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
ROOT = {"$ref": "#"}
TOO_MUCH = "it is too much to check whether the JSON fits the schema"


def check(value: Any, schema: Any) -> str | None:
    return check_schema(value if isinstance(value, str) else json.dumps(value), compile_schema(schema))


def operation(name: str, **more: Any) -> dict[str, Any]:
    """A node of a sum or a product, as a discriminated union has it."""
    return {"type": "object", "properties": {"left": ROOT, "op": {"const": name}}, "required": ["op"], **more}


def nested(depth: int, leaf: object) -> object:
    for _ in range(depth):
        leaf = {"op": "mul", "left": leaf}
    return leaf


def test_problem_names_place_and_rule() -> None:
    schema = {"properties": {"items": {"items": {"properties": {"n": {"type": "integer"}}}}}}
    assert check({"items": [{"n": 1}]}, schema) is None
    assert (
        check({"items": [{"n": 1}, {"n": "敏感"}]}, schema)
        == "the JSON does not fit the schema at /items/1/n: type"
    )
    assert check([1], {"type": "object"}) == "the JSON does not fit the schema at /: type"


def test_problem_never_has_words_of_the_answer() -> None:
    schema = {"additionalProperties": {"type": "integer", "enum": [1]}, "propertyNames": {"maxLength": 9}}
    for value in ({"敏感": "词"}, {"敏感" * 9: 1}, {"敏感": 3}):
        problem = check(value, schema)
        assert problem is not None
        assert not set("敏感词") & set(problem)


def test_problem_is_short() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    value: Any = "x"
    for _ in range(40):
        schema, value = {"properties": {"a-long-name": schema}}, {"a-long-name": value}
    problem = check(value, schema)
    assert problem is not None
    assert len(problem) == MAX_PROBLEM_CHARS


def test_draft_is_that_of_the_schema() -> None:
    bounded = {"minimum": 3, "exclusiveMinimum": True}
    assert check(3, {"$schema": DRAFT_4, **bounded}) is not None
    with pytest.raises(ValueError, match="wrong at /exclusiveMinimum"):
        compile_schema(bounded)
    assert check([1], {"prefixItems": [{"type": "string"}]}) is not None
    assert check([1], {"$schema": DRAFT_7, "prefixItems": [{"type": "string"}]}) is None


@pytest.mark.parametrize("schema", [True, {}, {"$schema": DRAFT_2019}])
def test_schema_without_demands_takes_all(schema: Any) -> None:
    assert check({"a": [1, None]}, schema) is None


def test_false_takes_nothing() -> None:
    assert check(1, False) == "the JSON does not fit the schema at /: falseSchema"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (None, "neither an object nor a boolean"),
        ("{}", "neither an object nor a boolean"),
        ({"type": "strin"}, "wrong at /type"),
        ({"properties": {"a": {"pattern": "("}}}, "wrong at /properties/a/pattern"),
        ({"pattern": "(?=a)b"}, "wrong at /pattern"),
        ({"pattern": "(a{1000}){1000}"}, "wrong at /pattern"),
        ({"$ref": "#/no"}, "'/no' does not exist"),
        ({"$ref": "http://127.0.0.1:9/x"}, "disabled"),
        ({"$ref": "file:///etc/passwd"}, "disabled"),
        ({"$schema": "http://127.0.0.1:9/x"}, "Unknown meta-schema"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "retrieving it failed"),
        ({"a": {1: 2}}, "must be str"),
    ],
)  # fmt: skip
def test_schema_that_does_not_compile_is_refused_in_words(schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        compile_schema(schema)
    assert type(refusal.value) is ValueError
    assert len(str(refusal.value)) <= MAX_PROBLEM_CHARS


def test_schema_that_takes_long_to_compile_is_refused() -> None:
    with pytest.raises(ValueError, match="has 20002 parts; at most 6000"):
        compile_schema({"anyOf": [{"items": {}} for _ in range(10_000)]})
    with pytest.raises(ValueError, match="has 6403 parts"):
        compile_schema({"properties": {str(i): ROOT for i in range(400)}, "not": False})
    patterns = {"allOf": [{"pattern": f"{i}"} for i in range(60)]}
    with pytest.raises(ValueError, match="has 120 patterns; at most 100"):
        compile_schema({**patterns, "patternProperties": dict.fromkeys(map(str, range(60)), True)})
    assert check("7", {"enum": [f"{i}" for i in range(30_000)]}) is not None  # a number
    assert check('"7"', {"enum": [f"{i}" for i in range(30_000)]}) is None


def test_document_that_takes_too_many_checks_is_undecided() -> None:
    for union in ("anyOf", "oneOf"):
        schema = {"contains": {union: [{"const": i} for i in range(1, 1900)]}}
        assert check([0] * 6000, schema) == TOO_MUCH
        assert check([0] * 1000, schema) != TOO_MUCH
    assert check([0] * 6000, {"items": {"enum": list(range(1000))}}) == TOO_MUCH
    assert check([0] * 6000, {"items": {"not": {"allOf": [True] * 1000}}}) == TOO_MUCH
    assert check([",[{" * 2000], {"items": {"enum": [",[{" * 2000, *range(1000)]}}) is None


def test_references_to_what_loops_are_bounded() -> None:
    for num_parts, undecided in ((10, False), (800, True)):
        loops = {"contains": {"anyOf": [{"const": i} for i in range(1, num_parts)]}}
        schema = {"$defs": {"d": loops}, "anyOf": [{"$ref": "#/$defs/d"}] * 150}
        assert (check([0] * 700, schema) == TOO_MUCH) == undecided
        assert "does not fit" in str(check([0], schema))
    by_anchor = {"$defs": {"d": {"$anchor": "d", **loops}}, "anyOf": [{"$ref": "#d"}] * 150}
    assert check([0] * 700, by_anchor) == TOO_MUCH


def test_values_handed_to_steps_are_bounded() -> None:
    value: object = [0] * 5000
    for _ in range(100):
        value = [value]
    schema = {"anyOf": [{"type": "integer"}, {"items": ROOT}, *[{"$ref": "#/$defs/d"}] * 40]}
    assert check(value, {**schema, "$defs": {"d": {"type": "string"}}}) == TOO_MUCH
    assert (
        check(["x" * 60_000], {"$ref": "#/$defs/d", "$defs": {"d": {"enum": list(range(6000))}}}) == TOO_MUCH
    )


def test_too_much_to_name_the_place_still_has_a_verdict() -> None:
    loops = {"items": {"anyOf": [{"const": i} for i in range(1, 800)]}}
    schema = {"$defs": {"d": loops}, "$ref": "#/$defs/d"}
    assert check([1] * 1400 + [0], schema) == "the JSON does not fit the schema"
    assert check([1] * 99 + [0], schema) == "the JSON does not fit the schema at /99: anyOf"


def tree_of(num_nodes: int, rng: random.Random) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = [{"kind": "k0", "children": [], "name": "root"}]
    for _ in range(num_nodes - 1):
        node = {"kind": f"k{rng.randrange(10)}", "children": [], "name": "a"}
        rng.choice(nodes)["children"].append(node)
        nodes.append(node)
    return nodes[0]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind_first", [False, True])
def test_tree_of_ten_kinds_of_nodes_takes_many_values(shared: bool, kind_first: bool) -> None:
    kinds: dict[str, Any] = {}
    for i in range(10):
        tag, children = {"kind": {"const": f"k{i}"}}, {"children": {"items": {"$ref": "#/$defs/node"}}}
        properties = {**tag, **children} if kind_first else {**children, **tag}
        properties |= {"name": {"type": "string"}, "at": {"properties": {"line": {"type": "integer"}}}}
        kinds[f"k{i}"] = {"type": "object", "properties": properties, "required": ["kind", "children"]}
    union = [{"$ref": f"#/$defs/{name}"} for name in kinds] if shared else list(kinds.values())
    schema = compile_schema(
        {"$defs": {"node": {"anyOf": union}, **(kinds if shared else {})}, "$ref": "#/$defs/node"}
    )
    tree = tree_of(500, random.Random(3))
    assert check_schema(json.dumps(tree), schema) is None
    tree["children"][0]["kind"] = "k10"
    assert "does not fit" in str(check_schema(json.dumps(tree), schema))


def test_models_that_refer_to_each_other_take_many_values() -> None:
    """About 300 parts and 40 references, as a program makes them from its classes."""
    defs: dict[str, Any] = {}
    for i in range(39):
        fields = {f"f{j}": {"type": "string", "title": f"F{j}"} for j in range(4)}
        last = {"items": {"$ref": f"#/$defs/M{i + 1}"}, "type": "array"} if i < 38 else {"type": "null"}
        defs[f"M{i}"] = {"type": "object", "properties": {**fields, "last": last}, "required": list(fields)}
    schema = {"$defs": defs, "type": "array", "items": {"$ref": "#/$defs/M0"}}

    def model(depth: int) -> dict[str, Any]:
        return {
            **dict.fromkeys(["f0", "f1", "f2", "f3"], "text"),
            "last": [model(depth - 1)] if depth else [],
        }

    assert check([model(11) for _ in range(8)], schema) is None
    assert check([model(0) for _ in range(100)], schema) is None


def test_legitimate_schema_of_many_parts_takes_many_values() -> None:
    names = [f"n{i}" for i in range(100)]
    row = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    assert check([dict.fromkeys(names, 1) for _ in range(20)], {"items": row}) is None


def test_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        compile_schema(schema)
    while schema:  # else taking it apart recurses
        schema = schema.pop("not")


def test_catastrophic_pattern_takes_linear_time() -> None:
    """A backtracking engine would need longer than there is."""
    schema = compile_schema({"pattern": "^(a|a)*(a+)+$"})
    assert check_schema(json.dumps("a" * 50_000 + "b"), schema) is not None
    assert check_schema(json.dumps("a" * 50_000), schema) is None


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
def test_deep_document_is_a_problem(depth: int) -> None:
    assert "nested" in str(check("[" * depth + "]" * depth, {"items": ROOT}))
    assert check("[" * MAX_DEPTH + "]" * MAX_DEPTH, {"items": ROOT}) is None
    assert check(json.dumps(["[{" * 500]), {"items": {"type": "string"}}) is None


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", "1 2"])
def test_text_that_is_not_json_is_a_problem(text: str) -> None:
    assert "not JSON" in str(check(text, True))


def test_key_that_is_there_twice_is_a_problem() -> None:
    assert check('{"a":{"b":1,"\\u0062":2}}', True) == "an object of the JSON has the same key twice"


@pytest.mark.parametrize("digits", ["1" * 1001, "1e400", "-1e400", "0." + "1" * 1000])
def test_number_that_few_can_read_is_a_problem(digits: str) -> None:
    assert "a number" in str(check(f"[{digits}]", True))


def test_big_numbers_are_compared_exactly() -> None:
    schema = {"type": "integer", "maximum": 10**30}
    assert check("1" + "0" * 30, schema) is None
    assert check("1" + "0" * 29 + "1", schema) is not None


def test_lone_surrogate_is_one_character() -> None:
    schema = {"maxLength": 2, "pattern": "^[^a]*$"}
    for text in (r'"\ud83d\ud83d"', r'"\ude00\\"', r'"\ud83d\ude00\ud83d"', '"\ud800b"'):
        assert check(text, schema) is None
    assert check(r'"\ud83d\ud83d\ud83d"', schema) == "the JSON does not fit the schema at /: maxLength"
    assert check(r'"\\ud83d"', schema) == "the JSON does not fit the schema at /: maxLength"


@pytest.mark.parametrize("place", ["$defs", "$defs/const/$defs", "properties/enum/definitions"])
def test_references_that_double_the_work_end(place: str) -> None:
    refs = [{"$ref": f"#/{place}/d{i}"} for i in range(61)]
    inner: dict[str, Any] = {f"d{i}": {"allOf": [refs[i + 1]] * 2} for i in range(60)}
    inner["d60"] = {"type": "integer"}
    schema: dict[str, Any] = inner
    for name in reversed(place.split("/")):
        schema = {name: schema}
    schema["$ref"] = refs[0]["$ref"]
    assert check(1, schema) == "it takes too many steps to tell whether the JSON fits the schema"


@pytest.mark.parametrize("draft", [DRAFT_4, DRAFT_6, DRAFT_7, DRAFT_2019, ""])
@pytest.mark.parametrize("kind", ["anyOf", "oneOf"])
def test_nested_union_ends_and_is_decided(draft: str, kind: str) -> None:
    sum_, product = operation("add"), operation("mul")
    if draft == DRAFT_4:
        for each in (sum_, product):
            each["properties"]["op"] = {"enum": [each["properties"]["op"]["const"]]}
    schema = {kind: [sum_, product, {"type": "integer"}]}
    if draft:
        schema["$schema"] = draft  # type: ignore[assignment]
    compiled = compile_schema(schema)
    for depth in (1, 5, 120):
        assert check_schema(json.dumps(nested(depth, 1)), compiled) is None
        assert "does not fit the schema" in str(check_schema(json.dumps(nested(depth, "bad")), compiled))


def test_mutual_references_end() -> None:
    """Random schemas of definitions that refer to each other in every way: each check comes to an end."""
    rng = random.Random(228)
    for _ in range(50):
        compiled = compile_schema(tangled(rng))
        value: object = 1
        for _ in range(30):
            value = {"x": value}
        check_schema(json.dumps(value), compiled)


def tangled(rng: random.Random) -> dict[str, Any]:
    size, num_refs = rng.randint(5, 30), rng.randint(1, 3)
    kind = rng.choice(["anyOf", "allOf", "oneOf"])
    defs: dict[str, Any] = {}
    for i in range(size):
        refs: list[dict[str, Any]] = [
            {"$ref": f"#/$defs/d{rng.randrange(size) if rng.random() < 0.3 else min(size - 1, i + 1)}"}
            for _ in range(num_refs)
        ]
        defs[f"d{i}"] = {
            kind: [
                {"properties": {"x": ref}, "type": ["object", "integer"]} if rng.random() < 0.6 else ref
                for ref in refs
            ]
        }
    defs[f"d{size - 1}"] = {"type": ["integer", "object"]}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def test_references_mean_what_they_did_without_the_counting() -> None:
    """References beside other keywords, into `allOf`, by anchor, and in data."""
    integer, unevaluated = {"type": "integer"}, {"unevaluatedProperties": False}
    beside = {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": integer}}
    into = {
        "properties": {
            "a": {"allOf": [integer], "$ref": "#/$defs/b"},
            "c": {"$ref": "#/properties/a/allOf/0"},
        }
    }
    into["$defs"] = {"b": {"minimum": 3}}
    annotated = {"$ref": "#/$defs/a", **unevaluated, "$defs": {"a": {"properties": {"b": True}}}}
    cases: list[tuple[Any, Any, bool]] = [
        (beside, 2, False),
        (beside, "x", False),
        (beside, 4, True),
        ({"$schema": DRAFT_7, "$ref": "#/definitions/a", "minimum": 3, "definitions": {"a": True}}, 2, True),
        ({"$schema": DRAFT_4, "$ref": "#/definitions/a", "definitions": {"a": {"type": "null"}}}, 2, False),
        ({"allOf": [integer], "items": {"$ref": "#/allOf/0"}}, [1], False),
        (into, {"a": 3, "c": 1}, True),
        (into, {"a": 2}, False),
        (into, {"c": "x"}, False),
        ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}}, 1, False),
        ({"const": {"$ref": "#/no"}}, {"$ref": "#/no"}, True),
        ({"properties": {"$ref": integer, "const": ROOT}}, {"const": {"$ref": "x"}}, False),
        (annotated, {"b": 1}, True),
        (annotated, {"c": 1}, False),
    ]
    for schema, value, fits in cases:
        assert (check(value, schema) is None) == fits, (schema, value)


def test_schema_can_be_checked_again() -> None:
    schema = compile_schema({"items": {"type": "integer"}})
    assert isinstance(schema, Schema)
    assert [check_schema(text, schema) is None for text in ("[1]", '["x"]', "[2]")] == [True, False, True]
