"""Bytes of a request body -> a msgspec struct, or `InvalidRequest`. What a field means is not known here.

Stricter than the decoders alone: invalid UTF-8 and repeated keys are refused even inside fields that nobody
reads (RFC 8259, section 4, leaves open which of two equal keys wins; a proxy in front may read the other).
Nothing but `InvalidRequest` leaves, whatever the bytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from pipeline.errors import DuplicateKey, InvalidRequest
from pipeline.leaves import nests_deeper

Body = TypeVar("Body")

# An empty list costs 3 bytes of JSON and 64 bytes of memory: 32 MiB of them would take 700 MB.
MAX_CONTAINERS: Final = 1_000_000
MAX_FIELDS: Final = 1_000_000  # of objects, 1 us each
# The value at fault is looked up by reading the whole body once more; not worth it for a large one.
MAX_LOOKUP_BYTES: Final = 1 << 20
MAX_SHOWN_CHARS: Final = 60
_FEW: Final = 1000  # of a byte that a body of one large string may have: more are counted at an even pace
# Fields whose values are the users' own text: their errors name type and length, never the text.
TEXT_FIELDS: Final = frozenset(
    {"messages", "prompt", "suffix", "documents", "template", "tools", "functions", "stop", "bad_words"}
)

_BEFORE_VALUES: Final = "[{,"
_STRING: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)

_JSON_NAMES: Final = {
    "array": "an array",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_WRONG_TYPE: Final = re.compile(r"^Expected `(?P<types>[^`]*)`, got `(?P<got>[^`]*)`$")
_BOUND: Final = re.compile(r"^Expected `\w+`(?P<length> of length)? (?P<bound><=|<|>=|>) (?P<limit>\S+)$")
_MISSING: Final = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_ESCAPE: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_UNREAD: Final = object()
_BOUNDS: Final = {"<=": "at most", "<": "less than", ">=": "at least", ">": "greater than"}


def decode(
    decoder: msgspec.json.Decoder[Body],
    body: bytes,
    max_containers: int = MAX_CONTAINERS,
    *,
    drop_lone_surrogates: bool = False,
) -> Body:
    """The body as the decoder's struct. Raises `InvalidRequest`, whose `param` names the field if it can.

    `drop_lone_surrogates`: half a surrogate pair, as a client writes an emoji that it has cut in two, is left
    out instead of refused.
    """
    if len(body) > max_containers:  # a shorter one cannot hold as many
        _check_num_containers(body, max_containers)
    if len(body) > MAX_FIELDS:
        _check_num_fields(body)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8 at byte {error.start}.") from None
    try:
        struct = decoder.decode(text)
        _KEY_CHECK.decode(text)
    except msgspec.ValidationError as error:
        _refuse_value(str(error), text)
    except msgspec.DecodeError:
        if drop_lone_surrogates and (without := _without_lone_surrogates(text)) != text:
            return decode(decoder, without.encode(), max_containers)
        _refuse_syntax(text)
    except RecursionError:
        raise InvalidRequest("The body nests arrays and objects too deeply.") from None
    except ValueError:
        raise InvalidRequest("The body holds an integer of thousands of digits.") from None
    return struct


def show(value: object, *, is_text: bool = False) -> str:
    """A JSON value for an error message: at most about 100 characters, and of users' text only its length."""
    if isinstance(value, str):
        quoted = json.dumps(value[:MAX_SHOWN_CHARS], ensure_ascii=False)
        return f"a string of {len(value)} characters" if is_text or len(value) > MAX_SHOWN_CHARS else quoted
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # str() of a huge int is slow, or refused
    return json.dumps(value)


def _check_num_containers(body: bytes, limit: int) -> None:
    num_containers = _num(body, b"[") + _num(body, b"{")
    if num_containers > limit:
        raise InvalidRequest(f"The body has {num_containers} arrays and objects; the limit is {limit}.")


def _check_num_fields(body: bytes) -> None:
    """Counts colons in texts, too: no text that is taken has so many."""
    num_fields = _num(body, b":")
    if num_fields > MAX_FIELDS:
        raise InvalidRequest(
            f"The body has {num_fields} fields of objects, or colons; the limit is {MAX_FIELDS}."
        )


def _num(body: bytes, mark: bytes) -> int:
    """How often a byte occurs. `find` leaps: 5 MB of base64 take 0.05 ms; `count` alone takes 2.8 ms."""
    at = -1
    for number in range(_FEW):
        at = body.find(mark, at + 1)
        if at < 0:
            return number
    return _FEW + body.count(mark, at + 1)


def num_values(texts: Iterable[str], enough: int) -> int:
    """At least how many values JSON in strings has; exact only above `enough`. Decodes nothing."""
    texts = list(texts)
    num_marks = sum(text.count(mark) for text in texts for mark in _BEFORE_VALUES)
    if num_marks <= enough:
        return num_marks
    without_strings = (_STRING.sub("", text) for text in texts)
    return sum(rest.count(mark) for rest in without_strings for mark in _BEFORE_VALUES)


def check_depth(value: object, max_depth: int, param: str) -> None:
    """Raises `InvalidRequest` if arrays and objects nest deeper than `max_depth`."""
    if nests_deeper(value, max_depth):
        raise InvalidRequest(f"'{param}' nests arrays and objects deeper than {max_depth} levels.", param)


def _without_lone_surrogates(text: str) -> str:
    """JSON without the escapes of surrogates that have no other half. Reads escapes from left to right."""
    return _ESCAPE.sub(lambda escape: "" if escape["lone"] else escape[0], text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) == len(pairs):
        return
    twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
    raise DuplicateKey(f"The key {show(twice)} appears twice in one object.", twice[:MAX_SHOWN_CHARS])


_KEY_CHECK: Final = json.JSONDecoder(object_pairs_hook=_unique_keys)  # keeps no object; 2 us/KB


def _refuse_syntax(text: str) -> NoReturn:
    try:
        json.loads(text, parse_int=float)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"The body is not valid JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise InvalidRequest("The body nests arrays and objects too deeply.") from None
    # Python's decoder takes lone surrogates and NaN, msgspec does not.
    raise InvalidRequest(
        "The body is not valid JSON: it holds NaN, Infinity, or half a surrogate pair (\\ud800 to \\udfff)."
    )


def _refuse_value(report: str, text: str) -> NoReturn:
    match = _AT.match(report)
    assert match is not None, "the pattern matches every string"
    what, path = str(match["what"]), str(match["path"] or "")
    param: str | None
    if missing := _MISSING.match(what):
        param = f"{path}.{missing['name']}".lstrip(".")
        raise InvalidRequest(f"'{param}' is required.", param)
    param = path.replace("[...]", "").lstrip(".") or None
    raise InvalidRequest(f"{_subject(param)} {_requirement(what)}{_value_read(what, path, text)}.", param)


def _subject(param: str | None) -> str:
    return f"'{param}'" if param else "The body"


def _requirement(what: str) -> str:
    """msgspec's report in the words of JSON."""
    if wrong := _WRONG_TYPE.match(what):
        return f"must be {_type_names(wrong['types'])}"
    if bound := _BOUND.match(what):
        measure = "have a length of" if bound["length"] else "be"
        return f"must {measure} {_BOUNDS[bound['bound']]} {bound['limit']}"
    if "multiple of" in what:
        return "must be an integer"
    if "out of range" in what:
        return "is a number out of range"
    return "has a value that is not allowed"


def _type_names(types: str) -> str:
    names = types.split(" | ")
    if "int" in names and "float" in names:  # integers may be written as 16.0
        names.remove("float")
    return " or ".join(_JSON_NAMES.get(name, name) for name in names)


def _value_read(what: str, path: str, text: str) -> str:
    value = _value_at(text, path) if "out of range" not in what else _UNREAD
    if value is not _UNREAD:
        is_text = path.lstrip(".").split("[")[0].split(".")[0] in TEXT_FIELDS
        return f", got {show(value, is_text=is_text)}"
    wrong = _WRONG_TYPE.match(what)
    return f", got {_type_names(wrong['got'])}" if wrong else ""


def _value_at(text: str, path: str) -> Any:
    """The value at msgspec's path. `_UNREAD`: a large body, a path through unnamed keys, or another fault."""
    if len(text) > MAX_LOOKUP_BYTES or "[...]" in path:
        return _UNREAD
    try:
        value = msgspec.json.decode(text)
        for key, index in _STEP.findall(path):
            value = value[key] if key else value[int(index)]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return _UNREAD
    return value
