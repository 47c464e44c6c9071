"""In which form a stream leaves, by the request's `Accept`, and what the form cannot carry.

`stream` in the body alone decides whether there is a stream. Only an `Accept` that names one of two other
forms before all else changes its form: every client in the field sends some `Accept`, and reads SSE.

Not here: the forms themselves (`gateway/writers.py`, `gateway/text_writers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from pipeline.errors import InvalidRequest
from pipeline.values import ChatRequest, CompletionRequest

Form = Literal["sse", "ndjson", "text"]

MAX_ACCEPT_BYTES: Final = 4096  # what is longer is nobody's wish; it is read only so far
_FORMS: Final[Mapping[str, Form]] = {
    "text/plain": "text",
    "application/x-ndjson": "ndjson",
    "application/ndjson": "ndjson",
    "application/jsonl": "ndjson",
}


def stream_form(
    headers: Mapping[bytes, bytes], request: ChatRequest | CompletionRequest, http_version: str = "1.1"
) -> Form:
    """The form of this request's stream. Raises `InvalidRequest` for what that form cannot carry."""
    form = accepted_form(headers.get(b"accept", b""))
    if form == "text":
        _check_plain_text(request)
        if http_version == "1.0":
            raise _no_end()
    return form


def accepted_form(accept: bytes) -> Form:
    """The form of the best type: of the highest `q`, the first of them. SSE where that is any other type.

    Parameters of types do not count, and neither do wildcards: axios sends `application/json, text/plain,
    */*`. A malformed part is as good as absent (RFC 9110, section 12.5.1, lets a server ignore all of it).
    """
    best: tuple[float, str] = (0.0, "")
    for media_type, quality in _weighted(accept[:MAX_ACCEPT_BYTES].decode("latin-1")):
        if quality > best[0] and "/" in media_type and "*" not in media_type:
            best = quality, media_type
    return _FORMS.get(best[1], "sse")


def _weighted(accept: str) -> Iterator[tuple[str, float]]:
    """Each type in lower case with its weight from 0 to 1, in order."""
    for part in accept.split(","):
        media_type, *parameters = part.lower().split(";")
        pairs = (parameter.partition("=") for parameter in parameters)
        weight = next((value for name, _, value in pairs if name.strip() == "q"), "1")
        try:
            quality = float(weight)
        except ValueError:
            continue
        if 0 <= quality <= 1:
            yield media_type.strip(), quality


def _check_plain_text(request: ChatRequest | CompletionRequest) -> None:
    """Plain text is one choice's content and nothing else."""
    generation, delivery = request.generation, request.delivery
    if generation.n > 1:
        raise _not_in_text("n", "more than one choice")
    if isinstance(request, CompletionRequest) and len(request.prompts) > 1:
        raise _not_in_text("prompt", "more than one choice")
    if isinstance(request, ChatRequest) and request.tools and request.tool_choice.kind != "none":
        raise _not_in_text("tools", "tool calls")
    if generation.logprobs is not None:
        raise _not_in_text("logprobs", "log probabilities")
    if delivery.include_usage or delivery.include_timings:
        raise _not_in_text("stream_options", "token counts or timings")


def _no_end() -> InvalidRequest:
    """Proxies that were not told otherwise speak HTTP/1.0 to us, and would pass a cut text on as if whole."""
    return InvalidRequest(
        "'Accept: text/plain' cannot be used over HTTP/1.0: a body ends there with its connection, so that "
        "an answer that was cut off would look whole. Use HTTP/1.1 (nginx: proxy_http_version 1.1), or "
        "accept application/x-ndjson or text/event-stream instead.",
        "accept",
    )


def _not_in_text(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}' cannot be used with 'Accept: text/plain': plain text cannot carry {what}. "
        "Accept application/x-ndjson or text/event-stream instead.",
        param,
    )
