"""What an upstream server says when it fails, as errors of the one tree.

Servers have no common form: OpenAI's `{"error": {"message", "type", "code"}}` (vLLM, SGLang, llama.cpp,
Ollama), TGI's `{"error": "words", "error_type": "overloaded"}`, older vLLM's `{"object": "error",
"message"}`, FastAPI's `{"detail": …}`. Their words may quote the request: bounded, and never logged.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pipeline.errors import EngineFailed, EngineRejected, HeadraceError, QueueFull

MAX_WORDS: Final = 500
_OVERLOADED: Final = frozenset((429, 503))
_NOT_THE_CLIENTS: Final = frozenset((401, 403, 407, 408, 499))  # the gateway's own key, or the way there
# TGI's `error_type` and OpenAI's `type` instead of a number.
_CODES: Final = {
    "overloaded": 429,
    "rate_limit_exceeded": 429,
    "validation": 422,
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "not_found_error": 404,
}


class UpstreamFailed(EngineFailed):
    """An upstream server gave up this one request; the message is its own, and may quote the request."""

    @property
    def log_detail(self) -> str:
        return ""


def server_error(status: int | None, words: str, has_begun: bool = False) -> HeadraceError:
    """The error for what a server has said. `status`: HTTP's, or the code in its error event.

    `has_begun`: some of the answer has come, so that it is too late to refuse the request.
    """
    words = words[:MAX_WORDS] or "no reason given"
    if not has_begun and status in _OVERLOADED:
        return QueueFull("The upstream server takes no more requests now.")
    if not has_begun and status is not None and 400 <= status < 500 and status not in _NOT_THE_CLIENTS:
        return EngineRejected(f"The upstream server refuses the request: {words}")
    return UpstreamFailed(f"The upstream server gave up the request: {words}")


def words_of(found: Any) -> tuple[str, int | None]:
    """The words and the code in a decoded error, of whatever form; the code is None where it has none."""
    code = None
    while isinstance(found, dict):
        code = _code(found) or code
        inner = next((found[key] for key in ("error", "message", "detail", "msg") if found.get(key)), None)
        if inner is None:
            return "", code
        found = inner
    if isinstance(found, list):  # FastAPI's: one entry for each field
        return words_of(found[0])[0] if found else "", code
    return ("" if found is None else str(found)[:MAX_WORDS]), code


def body_words(body: bytes) -> tuple[str, int | None]:
    """The same for the body of a response that is none of 2xx; a page of HTML is shown as it is."""
    try:
        return words_of(msgspec.json.decode(body))
    except ValueError:
        return body[: 4 * MAX_WORDS].decode("utf-8", "replace")[:MAX_WORDS].strip(), None


def _code(found: dict[str, Any]) -> int | None:
    for key in ("code", "status_code", "http_status_code", "error_type", "type"):
        value = found.get(key)
        if isinstance(value, str):
            value = int(value) if value.isdecimal() and len(value) == 3 else _CODES.get(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
