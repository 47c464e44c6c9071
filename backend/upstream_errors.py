"""What an upstream server says when it fails: its words, its code, and what it blames.

Servers have no common form: OpenAI's `{"error": {"message", "type", "code"}}` (vLLM, SGLang, llama.cpp,
Ollama), TGI's `{"error": "words", "error_type": "overloaded"}`, older vLLM's `{"object": "error",
"message"}`, FastAPI's `{"detail": …}`. Their words may quote the request: bounded, and never logged.
Not here: the errors that come of it (`upstream_faults.py`).
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

MAX_WORDS: Final = 500
MAX_DEPTH: Final = 3  # of the errors within one
MAX_ENTRIES: Final = 100
# `unknown field 'x'`, `x: Extra inputs are not permitted`, `property 'x' is unsupported`, and pydantic's list
# of errors as text, of which the first place comes before anything that is quoted.
_BLAME: Final = (
    r"^\W*(body\W+)?{field}\b"
    r"|\b(unknown|unrecognized|unexpected|unsupported|invalid|extra|additional|disallowed)\b[\w ]{{0,60}}"
    r"[:(]?\s*[`'\"]?{field}\b"
    r"|\b(property|field|parameter|argument|option) [`'\"]?{field}\b"
    r"|\b{field}[`'\"]? (is|are|was|can only|must|requires)\b"
    r"|\A[^{{]*{{\W*type\W+\w+\W+loc\W+body\W+{field}\b"
)
# TGI's `error_type` and OpenAI's `type` instead of a number.
_CODES: Final = {
    "overloaded": 429,
    "rate_limit_exceeded": 429,
    "validation": 422,
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "not_found_error": 404,
}


def words_of(found: Any) -> tuple[str, int | None]:
    """The words and the code in a decoded error, of whatever form; the code is None where it has none."""
    code = None
    while isinstance(found, dict | list):  # no recursion: the server says how deep it goes
        if isinstance(found, list):  # FastAPI's: one entry for each field
            found = found[0] if found else ""
            continue
        code = _code(found) or code
        found = next((found[key] for key in ("error", "message", "detail", "msg") if found.get(key)), "")
    return ("" if found is None else str(found)[:MAX_WORDS]), code


def body_words(body: bytes) -> tuple[str, int | None]:
    """The same for the body of a response that is none of 2xx; a page of HTML is shown as it is."""
    try:
        return words_of(msgspec.json.decode(body))
    except (ValueError, RecursionError):
        return body[: 4 * MAX_WORDS].decode("utf-8", "replace")[:MAX_WORDS].strip(), None


def blames(body: bytes, name: str) -> bool:
    """Whether a refusal says that this field of the request is what is wrong with it.

    A refusal may quote all of the request, and a client's words: only its `loc` and `param` count, and words
    that say so of the field. They may still be a client's: whoever acts on it must see that it has helped.
    """
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        found = None
    if any(_points_at(entry, name) for entry in _entries(found)):
        return True
    field = re.escape(name)
    return re.search(_BLAME.format(field=field), body_words(body)[0], re.IGNORECASE) is not None


def _entries(found: Any) -> list[dict[str, Any]]:
    """The error itself, and FastAPI's entries, one for each field."""
    entries = []
    for _ in range(MAX_DEPTH):
        if isinstance(found, dict):
            entries.append(found)
            found = found.get("error") or found.get("detail") or found.get("details")
    if isinstance(found, list):
        entries += [entry for entry in found[:MAX_ENTRIES] if isinstance(entry, dict)]
    return entries


def _points_at(entry: dict[str, Any], name: str) -> bool:
    param, place = entry.get("param"), entry.get("loc")
    if isinstance(param, str) and name in param.split(".")[:2]:
        return True
    return isinstance(place, list) and name in place[:2]  # after it: "body"


def _code(found: dict[str, Any]) -> int | None:
    for key in ("code", "status_code", "http_status_code", "error_type", "type"):
        value = found.get(key)
        if isinstance(value, str):
            value = int(value) if value.isdecimal() and len(value) == 3 else _CODES.get(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
