"""The schemas of JSON answers, compiled once for all the requests that bring the same, and bounded before.

Compiling is done on the event loop: 0.1 ms for a small schema, 0.8 ms per KB for a large one, and up to some
milliseconds per pattern. Clients send the same few schemas again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from filters.json_schema import Schema, compile_schema
from pipeline.errors import InvalidRequest

MAX_SCHEMA_BYTES: Final = 65_536  # 50 ms
MAX_PATTERNS: Final = 100
_MAX_KEPT: Final = 64


def compiled(schema: Mapping[str, Any] | bool) -> Schema:
    """A decoded schema, ready to check answers. Raises `ValueError` for what cannot be compiled."""
    return _compiled(msgspec.json.encode(schema))


def check_compiles(schema: Mapping[str, Any] | bool, param: str) -> None:
    """Raises `InvalidRequest`, in the name of the field `param`, for a schema that is wrong or too large."""
    encoded = msgspec.json.encode(schema)
    if len(encoded) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"'{param}' has {len(encoded)} bytes of JSON; the limit is {MAX_SCHEMA_BYTES}.", param
        )
    num_patterns = encoded.count(b'"pattern') and _num_patterns(schema)
    if num_patterns > MAX_PATTERNS:
        raise InvalidRequest(f"'{param}' has {num_patterns} patterns; the limit is {MAX_PATTERNS}.", param)
    try:
        _compiled(encoded)
    except ValueError as error:
        raise InvalidRequest(f"'{param}' cannot be used: {error}.", param) from None


@lru_cache(_MAX_KEPT)
def _compiled(encoded: bytes) -> Schema:
    return compile_schema(msgspec.json.decode(encoded))


def _num_patterns(node: Any) -> int:
    """At least as many as there are: keys of that name in data count, too."""
    if isinstance(node, list):
        return sum(map(_num_patterns, node))
    if not isinstance(node, dict):
        return 0
    named = node.get("patternProperties")
    own = isinstance(node.get("pattern"), str) + (len(named) if isinstance(named, dict) else 0)
    return own + sum(map(_num_patterns, node.values()))
