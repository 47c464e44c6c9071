"""How large schemas and JSON documents are, and which schemas would take long to compile.

A schema within the limits, and 64 KiB of JSON, is compiled or refused in 20 to 80 ms. Patterns with flags
such as `(?i)` may name no wide ranges, for folding one takes milliseconds.

Not here: compiling and checking (`json_schema.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

# Of a whole schema: at worst 0.5 ms per pattern to compile; long ones take the square of their length.
_MAX_PATTERNS: Final = 100
_MAX_PATTERN_CHARS: Final = 1500
_MAX_SCHEMA_DEPTH: Final = 100
_MAX_SCHEMA_PARTS: Final = 6000  # objects, lists and booleans; 7 us each to compile
_PARTS_PER_REF: Final = 15  # 90 us
_CHARS_PER_VALUE: Final = 64
REFS: Final = ("$ref", "$dynamicRef", "$recursiveRef")
# What opens flags, and what can name a wide range among them; escapes are left out of the first.
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_FLAGS: Final = re.compile(r"\(\?[-a-zA-OQ-Z]")
_WIDE: Final = re.compile(r"\\[pPuUxWDS]")


def check_size(schema: Any) -> None:
    """Raises `ValueError` for a schema that would take long to compile."""
    if depth_of(schema) > _MAX_SCHEMA_DEPTH:
        raise ValueError(f"the schema is nested more than {_MAX_SCHEMA_DEPTH} levels deep")
    num_parts = _num_parts(schema)
    if num_parts > _MAX_SCHEMA_PARTS:
        raise ValueError(f"the schema has {num_parts} parts; at most {_MAX_SCHEMA_PARTS} may be")
    patterns = list(_patterns(schema))
    if len(patterns) > _MAX_PATTERNS:
        raise ValueError(f"the schema has {len(patterns)} patterns; at most {_MAX_PATTERNS} may be")
    num_chars = sum(map(len, patterns))
    if num_chars > _MAX_PATTERN_CHARS:
        raise ValueError(
            f"the schema has patterns of {num_chars} characters together; at most {_MAX_PATTERN_CHARS} may be"
        )
    if any(map(_folds_wide_ranges, patterns)):
        raise ValueError("a pattern of the schema with flags such as (?i) has classes or ranges beyond ASCII")


def _patterns(schema: Any) -> Iterator[str]:
    """The regular expressions of a schema, and what looks like one in data."""
    for part in _values(schema):
        if isinstance(part, dict):
            if isinstance(pattern := part.get("pattern"), str):
                yield pattern
            if isinstance(by_key := part.get("patternProperties"), dict):
                yield from map(str, by_key)


def _folds_wide_ranges(pattern: str) -> bool:
    """Whether a pattern may take milliseconds for each few of its characters."""
    if _FLAGS.search(_ESCAPED.sub("", pattern)) is None:
        return False
    return _WIDE.search(pattern) is not None or ("-" in pattern and not pattern.isascii())


def _num_parts(schema: Any) -> int:
    """Objects, lists and booleans, and what references take beyond them."""
    num_parts = 0
    for part in _values(schema):
        num_parts += isinstance(part, dict | list | bool)
        if isinstance(part, dict):
            num_parts += _PARTS_PER_REF * sum(name in part for name in REFS)
    return num_parts


def num_checks(schema: Any) -> int:
    """Objects, booleans, and the entries of lists: what may be held against one value."""
    total = 0
    for part in _values(schema):
        total += isinstance(part, dict | bool)
        if isinstance(part, list):
            total += sum(not isinstance(entry, dict | bool) for entry in part)
    return total


class RefSizes:
    """How many parts the references of a schema lead to, without those behind further references."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._sizes: dict[int, int] = {}
        self._whole = self._count(schema)
        # Below such a part, a reference starts elsewhere than at the top.
        self._moves = any(
            isinstance(part, dict)
            and part is not schema
            and any(isinstance(part.get(name), str) for name in ("$id", "id", "$schema"))
            for part in _values(schema)
        )

    def size_of(self, ref: str) -> int:
        """At least 1; that of the whole schema for what is not simply a place in it."""
        place, *names = ref.split("/")
        if self._moves or place != "#" or "%" in ref:
            return self._whole
        part = self._schema
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(part, dict) and name in part:
                part = part[name]
            elif isinstance(part, list) and name.isdecimal() and int(name) < len(part):
                part = part[int(name)]
            else:
                return self._whole
        return self._sizes.get(id(part), 1)

    def _count(self, part: Any) -> int:
        """As `num_checks`, for a part and all within."""
        if not isinstance(part, dict | list):
            return 1
        inner = part.values() if isinstance(part, dict) else part
        counted = isinstance(part, list)
        size = isinstance(part, dict) + sum(
            self._count(value) for value in inner if counted or isinstance(value, dict | list | bool)
        )
        self._sizes[id(part)] = size = max(1, size)
        return size


def weight_of(value: Any, most: int) -> int:
    """How many values a decoded document has, and one more for each 64 characters; counted up to `most`."""
    weight, left = 0, [value]
    while left and weight <= most:
        part = left.pop()
        weight += 1
        if isinstance(part, str):
            weight += len(part) // _CHARS_PER_VALUE
        elif isinstance(part, dict):
            weight += sum(map(len, part)) // _CHARS_PER_VALUE
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
    return weight


def num_values(value: Any) -> int:
    """How many values a decoded document has, itself included."""
    return sum(1 for _ in _values(value))


def _values(value: Any) -> Iterator[Any]:
    """All the values in a decoded document, itself included."""
    left = [value]
    while left:
        part = left.pop()
        yield part
        if isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)


def depth_of(value: Any) -> int:
    """How deep objects and lists are nested."""
    depth, level = 0, [value]
    while level:
        nested = [part for part in level if isinstance(part, dict | list)]
        depth += bool(nested)
        level = [inner for part in nested for inner in (part.values() if isinstance(part, dict) else part)]
    return depth
