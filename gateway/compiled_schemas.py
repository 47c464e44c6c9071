"""The schemas of JSON answers, compiled once for all the requests that bring the same, and bounded before.

Compiling is done on the event loop: 0.1 ms for a small schema, 20 to 80 ms at worst (`filters.schema_size`
bounds parts and patterns). Clients send the same few again and again, refused ones among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from filters.json_schema import Schema, compile_schema
from pipeline.errors import InvalidRequest

MAX_SCHEMA_BYTES: Final = 65_536
_MAX_KEPT: Final = 64
# What the link to the workers carries.
_INTEGERS: Final = range(-(2**63), 2**64)


def compiled(schema: Mapping[str, Any] | bool) -> Schema:
    """A decoded schema, ready to check answers. Raises `ValueError` for what cannot be compiled."""
    outcome = _outcome(msgspec.json.encode(schema))
    if isinstance(outcome, str):
        raise ValueError(outcome)
    return outcome


def check_compiles(schema: Mapping[str, Any] | bool, param: str) -> None:
    """Raises `InvalidRequest`, in the name of the field `param`, for a schema that is wrong or too large."""
    encoded = msgspec.json.encode(schema)
    if len(encoded) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"'{param}' has {len(encoded)} bytes of JSON; the limit is {MAX_SCHEMA_BYTES}.", param
        )
    outcome = _outcome(encoded)
    if isinstance(outcome, str):
        raise InvalidRequest(f"'{param}' cannot be used: {outcome}.", param)


@lru_cache(_MAX_KEPT)
def _outcome(encoded: bytes) -> Schema | str:
    """The compiled schema, or in words why there is none: a cache keeps no exceptions."""
    schema = msgspec.json.decode(encoded)
    if _has_wide_integer(schema):
        return "the schema has an integer beyond 64 bits"
    try:
        return compile_schema(schema)
    except ValueError as error:
        return str(error)


def _has_wide_integer(value: Any) -> bool:
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
        elif type(part) is int and part not in _INTEGERS:
            return True
    return False
