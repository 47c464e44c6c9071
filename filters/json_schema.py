"""Does a JSON text fit its schema? By `jsonschema-rs`, within bounds: both may be written by a stranger.

* Patterns are matched in linear time, so look-around and back references are not known.
* Nothing is fetched: a `$ref` leads to a place in the schema.
* Schemas that refer to each other can multiply the work with every level, although the validator remembers
  much (two references per level: twice the time for each level). So every reference counts a step, and a
  check that has taken `_MAX_STEPS` is undecided, which is a problem like any other.
* Naming the place of a violation multiplies as well (16 s for a sum nested 240 deep, where the verdict takes
  0.2 ms). It has fewer steps; without them the message names no place.
* Every part of a schema may be held against every value of a document. More than `_MAX_CHECKS` of these are
  undecided, too. References do so again, so each step also takes the parts it leads to times the values it
  has, and the sum is bounded.

Beyond the schema, a text fits none if an object has a key twice, for then what it means depends on the
reader, or if it has a number that most readers cannot take: more than 1,000 characters, or beyond a double.
`format` is an annotation, as JSON Schema has it.

Not here: the grammar (`json_check.py`), and how large a schema may be (`schema_size.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

import jsonschema_rs

from filters.schema_size import REFS, RefSizes, check_size, depth_of, num_checks, num_values, weight_of

MAX_PROBLEM_CHARS: Final = 200
# Far more than answers have; a validator that recurses has trouble with 100,000 on a small stack.
MAX_DEPTH: Final = 256
_MAX_NUMBER_CHARS: Final = 1000
_MAX_PATTERN_BYTES: Final = 100_000  # of one compiled pattern
_MAX_STEPS: Final = 100_000  # 1 us each
_MAX_CHECKS: Final = 2_000_000  # parts of the schema times values of the document; 40 ns each
_MAX_CHECKS_OF_STEPS: Final = 5_000_000
_CHECKS_PER_VALUE: Final = 4  # what handing a value to the step counter takes, and counting it there
_MAX_STEPS_TO_NAME: Final = 200  # 0.3 ms each at worst
_MAX_CHECKS_TO_NAME: Final = 1_000_000
_STEP: Final = "x-headrace-step"
_TOO_MUCH: Final = "it is too much to check whether the JSON fits the schema"

_DATA: Final = frozenset(("const", "default", "enum", "examples"))
_MAPS: Final = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)
# In these drafts nothing beside a `$ref` counts, and the first two have no `if`.
_DRAFTS_BEFORE_IF: Final = ("json-schema.org/draft-04/", "json-schema.org/draft-06/")
_DRAFTS_BEFORE_SIBLINGS: Final = (*_DRAFTS_BEFORE_IF, "json-schema.org/draft-07/")
_BESIDE_REF: Final = frozenset(("$schema", "$defs", "definitions"))


class Schema:
    """A compiled schema. Shared by the choices of a request; one check at a time."""

    __slots__ = ("_budget", "_names", "_num_parts", "_validator")

    def __init__(self, schema: Mapping[str, Any] | bool) -> None:
        self._names = frozenset(_property_names(schema))
        self._num_parts = max(1, num_checks(schema))
        self._budget = _Budget()
        draft = str(schema.get("$schema", "")) if isinstance(schema, Mapping) else ""
        counted = _counted(schema, draft, RefSizes(schema))
        self._validator = _validator(counted, {_STEP: _step_counter(self._budget)})

    def takes_too_many_checks(self, num_values: int) -> bool:
        """Whether a document of so many values is too much to check."""
        return self._num_parts * num_values > _MAX_CHECKS

    def problem(self, value: Any) -> str | None:
        """What is wrong with a decoded document. Raises `UnicodeEncodeError` for lone surrogates in it."""
        self._budget.start(_MAX_STEPS, _MAX_CHECKS_OF_STEPS)
        fits = self._validator.is_valid(value)
        if self._budget.steps_left < 0:
            return "it takes too many steps to tell whether the JSON fits the schema"
        if self._budget.checks_left < 0:
            return _TOO_MUCH
        return None if fits else self._named(value)

    def _named(self, value: Any) -> str:
        """Where and how a document that does not fit violates the schema."""
        self._budget.start(_MAX_STEPS_TO_NAME, _MAX_CHECKS_TO_NAME)
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            if not self._budget.is_spent:
                # Keys that the schema does not name are the model's words, and may be denied ones.
                path = [
                    part if isinstance(part, int) or part in self._names else "*"
                    for part in error.instance_path
                ]
                return f"the JSON does not fit the schema at {_pointer(path)}: {error.kind.name}"[
                    :MAX_PROBLEM_CHARS
                ]
        return "the JSON does not fit the schema"


def compile_schema(schema: object) -> Schema:
    """A schema, decoded (an object or a boolean), of the draft that its `$schema` names, else 2020-12.

    Raises `ValueError` in words that may be shown to whoever wrote it.
    """
    if not isinstance(schema, dict | bool):
        raise ValueError("the schema is neither an object nor a boolean")
    check_size(schema)
    try:
        _validator(schema, {})  # by itself first, for the places in messages
        return Schema(schema)
    except jsonschema_rs.ValidationError as error:
        place = _pointer(error.instance_path)
        raise ValueError(f"the schema is wrong at {place}: {error.message}"[:MAX_PROBLEM_CHARS]) from None
    except (jsonschema_rs.ReferencingError, ValueError) as error:
        raise ValueError(f"the schema is wrong: {error}"[:MAX_PROBLEM_CHARS]) from None


def check_schema(text: str, schema: Schema) -> str | None:
    """What is wrong with a JSON text by this schema, in at most 200 characters; None if it fits."""
    try:
        value = _DECODER.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and depth_of(value) > MAX_DEPTH:
            return f"the JSON is nested more than {MAX_DEPTH} levels deep"
    except _Unfit as unfit:
        return str(unfit)
    except (ValueError, RecursionError):
        return "the text is not JSON, or nested too deeply"
    # Marks in strings count, too; if they are too many, the values are counted.
    num_marks = 1 + text.count(",") + text.count("[") + text.count("{")
    if schema.takes_too_many_checks(num_marks) and schema.takes_too_many_checks(num_values(value)):
        return _TOO_MUCH
    try:
        return schema.problem(value)
    except UnicodeEncodeError:  # lone surrogates; each counts as one character
        return schema.problem(_DECODER.decode(_SURROGATES.sub(_replaced, text)))


class _Unfit(Exception):
    """JSON that fits no schema, whatever the schema says."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _Unfit("an object of the JSON has the same key twice")
    return members


def _number(digits: str) -> float | int:
    if len(digits) > _MAX_NUMBER_CHARS:
        raise _Unfit(f"a number of the JSON has more than {_MAX_NUMBER_CHARS} characters")
    if digits.lstrip("-").isdecimal():
        return int(digits)
    number = float(digits)
    if math.isinf(number):
        raise _Unfit("a number of the JSON is beyond the range of a double")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_number, parse_int=_number, parse_constant=_constant
)
# Escapes, of which pairs of surrogates and all others stay, and raw surrogates.
_SURROGATES: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2}|[\ud800-\udfff])|\\."
)


def _replaced(found: re.Match[str]) -> str:
    return "\ufffd" if found["lone"] else found[0]


def _validator(
    schema: Any, keywords: dict[str, type[jsonschema_rs.KeywordValidator]]
) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(
        schema,
        keywords=keywords,
        pattern_options=jsonschema_rs.RegexOptions(
            size_limit=_MAX_PATTERN_BYTES, dfa_size_limit=_MAX_PATTERN_BYTES
        ),
        offline=True,
    )


class _Budget:
    """What is left of the steps of a check, and of the checks that they lead to."""

    __slots__ = ("checks_left", "steps_left")

    def __init__(self) -> None:
        self.start(0, 0)

    def start(self, max_steps: int, max_checks: int) -> None:
        self.steps_left, self.checks_left = max_steps, max_checks

    @property
    def is_spent(self) -> bool:
        return self.steps_left < 0 or self.checks_left < 0

    def take(self, size: int, instance: object) -> None:
        """Takes a step to so many parts of the schema with a value; nothing when no more is left."""
        if self.is_spent:
            return
        self.steps_left -= 1
        # The value is a copy at each step, so its weight cannot be remembered.
        self.checks_left -= size * weight_of(instance, self.checks_left // size)


def _step_counter(budget: _Budget) -> type[jsonschema_rs.KeywordValidator]:
    """A keyword that fails when a budget is spent; its value is the size of what the reference leads to."""

    class StepCounter:
        def __init__(self, parent_schema: dict[str, Any], value: Any, schema_path: list[str | int]) -> None:
            self._size = value + _CHECKS_PER_VALUE

        def validate(self, instance: object) -> None:
            budget.take(self._size, instance)
            if budget.is_spent:
                raise ValueError("no steps or checks are left")

    return StepCounter


def _counted(schema: Any, draft: str, sizes: RefSizes) -> Any:
    """The schema with a step before each reference. Everything keeps its place, for references to it."""
    if not isinstance(schema, Mapping):
        return schema
    counted: dict[str, Any] = {}
    refs: dict[str, str] = {}
    for name, value in schema.items():
        if name in REFS and isinstance(value, str):
            refs[name] = value
        elif name in _DATA:
            counted[name] = value
        elif name in _MAPS and isinstance(value, Mapping):
            counted[name] = {key: _counted(part, draft, sizes) for key, part in value.items()}
        elif isinstance(value, list):
            counted[name] = [_counted(part, draft, sizes) for part in value]
        else:
            counted[name] = _counted(value, draft, sizes)
    if not refs:
        return counted
    if any(name in draft for name in _DRAFTS_BEFORE_SIBLINGS):
        counted = {name: value for name, value in counted.items() if name in _BESIDE_REF}
    step = {_STEP: sum(map(sizes.size_of, refs.values()))}
    guarded: dict[str, Any] = {"if": step, "then": refs, "else": False}
    if any(name in draft for name in _DRAFTS_BEFORE_IF):
        guarded = {"anyOf": [{"not": step}, refs]}
    return {**counted, "allOf": [*counted.get("allOf", ()), guarded]}


def _property_names(schema: Any) -> Iterator[str]:
    """The names that a schema has in any `properties` of it."""
    if isinstance(schema, list):
        for part in schema:
            yield from _property_names(part)
    elif isinstance(schema, Mapping):
        for name, value in schema.items():
            if name == "properties" and isinstance(value, Mapping):
                yield from map(str, value)
            yield from _property_names(value)


def _pointer(path: Iterable[str | int]) -> str:
    """Such as `/items/0/name`; the document itself is `/`."""
    return "/" + "/".join(map(str, path))
