"""What of a passed request and of its response crosses the gateway: the path, the headers, and no more.

Values in, values out. Sending, receiving and who may ask are in `gateway/passthrough.py`.

Dropped both ways is what belongs to one connection (RFC 9110, 7.6.1). Of a request also what is between the
client and this gateway: its key, its cookies, and who it came through. Of a response also what only this
gateway may say: which pages may read it, its date, its request id; and what a proxy on the way or a browser
would obey far beyond this one response: send a file of mine, forget all of this site, report to that server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

import msgspec

from backend.http_ports import Headers
from backend.upstream_key import MIN_CHARS
from pipeline.errors import ClientError, InvalidRequest

METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
# What Headrace serves itself, with filters and limits that a passed request would go around. With all below.
OWN_PATHS: Final = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/streams", "/v1/realtime")
# Routes that change a server, or an account, for everybody: a gateway's key is no administrator's. vLLM has
# the first two (VLLM_ALLOW_RUNTIME_LORA_UPDATING). It and SGLang have aborts elsewhere, which for an empty id
# end every request; OpenAI has the last two.
ADMINISTRATIVE_PATHS: Final = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/abort_request", "/v1/abort_requests"),
    *("/v1/organization", "/v1/fine_tuning"),
)
# Routes whose answers are numbers: no content rule could find anything in them.
WITHOUT_TEXT: Final = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/pooling",
    "/v1/moderations",
)
ANY_ROUTE: Final = "/v1/*"  # as logs and metrics name all others: a path is the client's to invent

# Plain segments. No `%2e`, `%2f`, `%5c`, `%25` nor control characters: servers differ in what they make of
# them. No `%c0` and `%c1`: old servers read a dot or a slash in two bytes. No `;`: some servers take what
# follows it for no part of the path.
_SEGMENT: Final = (
    r"(?:[A-Za-z0-9_~!$&'()*+,=:@.-]|%(?!2[EeFf5]|5[Cc]|[01][0-9A-Fa-f]|7[Ff]|[Cc][01])[0-9A-Fa-f]{2})+"
)
_PATH: Final = re.compile(rf"/v1(?:/(?!\.\.?(?:/|$)){_SEGMENT})+/?")
_QUERY: Final = re.compile(rb"[\x21-\x7e]*")

_OF_CONNECTION: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"),
        *(b"upgrade", b"proxy-authenticate", b"proxy-authorization", b"http2-settings"),
    }
)
_NOT_ASKED: Final = _OF_CONNECTION | {
    *(b"host", b"content-length", b"expect", b"authorization", b"cookie", b"x-api-key", b"api-key"),
    *(b"x-goog-api-key", b"ocp-apim-subscription-key", b"openai-organization", b"openai-project"),
    *(b"forwarded", b"x-real-ip", b"true-client-ip", b"cf-connecting-ip", b"x-client-ip", b"via"),
    *(b"origin", b"referer", b"x-request-id"),
    # Another path or method than the one that was looked at: some servers and proxies obey them.
    *(b"x-original-url", b"x-rewrite-url", b"x-http-method", b"x-http-method-override"),
    b"x-method-override",
}
_NOT_ASKED_KINDS: Final = (b"x-forwarded-",)
_ONLY_OURS: Final = _OF_CONNECTION | {
    *(b"set-cookie", b"date", b"server", b"x-request-id", b"alt-svc", b"strict-transport-security"),
    *(b"www-authenticate", b"location", b"content-location"),
}
_POWERFUL: Final = frozenset(
    {
        *(b"x-sendfile", b"x-lighttpd-send-file", b"x-reproxy-url", b"clear-site-data", b"refresh", b"link"),
        *(b"service-worker-allowed", b"sourcemap", b"x-sourcemap", b"nel", b"report-to"),
        *(b"reporting-endpoints", b"content-security-policy-report-only", b"speculation-rules"),
        *(b"accept-ch", b"critical-ch", b"origin-agent-cluster", b"public-key-pins", b"expect-ct"),
        *(b"timing-allow-origin", b"x-permitted-cross-domain-policies", b"set-login", b"use-as-dictionary"),
    }
)
_POWERFUL_KINDS: Final = (b"access-control-", b"x-accel-", b"x-litespeed-")
_OF_CONTENT: Final = frozenset((b"content-type", b"content-encoding", b"content-length", b"cache-control"))
_WITHOUT_BODY: Final = (204, 304)
_UNBUFFERED: Final = (b"x-accel-buffering", b"no")  # as with our own streams: nginx would hold events back


class NotPassed(ClientError):
    """A route that is not passed on."""

    status_hint = 404
    code = "not_found"
    param = "path"


class MethodNotPassed(ClientError):
    status_hint = 405
    code = "method_not_allowed"
    param = "method"

    def __init__(self, method: str) -> None:
        super().__init__(
            f"The method {method[:20]!r} is not passed on; those that are: {', '.join(METHODS)}."
        )


def target_of(raw_path: bytes, query: bytes) -> str:
    """Path and query as they go to the upstream: the very bytes that came.

    Raises `NotPassed` for a path of ours or an administrator's, `InvalidRequest` for one that servers could
    read in two ways. Such a path has dot segments, empty ones, encoded slashes, dots, percent signs or
    control characters, backslashes, or semicolons. It is not mended: the upstream would be told what nobody
    has asked for.
    """
    path = raw_path.decode("latin-1")
    if not _PATH.fullmatch(path):
        raise InvalidRequest(
            f"The path {path[:80]!r} is not passed on: it must begin with /v1/ and have plain segments only.",
            "path",
        )
    if not _QUERY.fullmatch(query):
        raise InvalidRequest("The query holds a byte that must be percent-encoded.", "query")
    if is_own(unquote(path)):
        raise NotPassed(f"There is no {path[:80]!r} here.")
    if _is_below(unquote(path), ADMINISTRATIVE_PATHS):
        raise NotPassed(f"{path[:80]!r} is not passed on: it would change the server for everybody.")
    return path + "?" * bool(query) + query.decode("ascii")


def is_own(path: str) -> bool:
    """Whether a path, without encodings, is one of ours or below it, however it is written."""
    return _is_below(path, OWN_PATHS)


def _is_below(path: str, parents: Sequence[str]) -> bool:
    plain = path.lower()
    return any(plain == parent or plain.startswith(parent + "/") for parent in parents)


def route_of(path: str) -> str:
    """The name of a path's route for logs and metrics."""
    return path if path in WITHOUT_TEXT else ANY_ROUTE


def request_headers(headers: Headers, own: Headers, request_id: str) -> list[tuple[bytes, bytes]]:
    """`own`: the upstream's, its key among them; they replace the client's of the same name."""
    dropped = _NOT_ASKED | _named_in_connection(headers) | {name for name, _ in own}
    kept = [
        header for header in headers if not (header[0] in dropped or header[0].startswith(_NOT_ASKED_KINDS))
    ]
    return [*kept, *own, (b"x-request-id", request_id.encode("ascii"))]


def response_headers(
    headers: Headers, request_id: str, status: int = 200, own: Headers = ()
) -> list[tuple[bytes, bytes]]:
    """`own`: the upstream's request headers, whose key no client may be told by a server that echoes it."""
    dropped = _ONLY_OURS | _POWERFUL | _named_in_connection(headers)
    if status in _WITHOUT_BODY:
        dropped |= {b"content-length"}  # of a body that does not come: a server would wait for it
    secrets = [key for _, value in own if len(key := value.removeprefix(b"Bearer ")) >= MIN_CHARS]
    kept = [
        (name, value)
        for name, value in headers
        if not (name in dropped or name.startswith(_POWERFUL_KINDS))
        and (name in _OF_CONTENT or not any(secret in value for secret in secrets))
    ]
    if any(
        name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in kept
    ):
        kept.append(_UNBUFFERED)
    return [*kept, (b"x-request-id", request_id.encode("ascii"))]


def _named_in_connection(headers: Headers) -> set[bytes]:
    """The names that `Connection` declares to be of this connection, too. Never those of the content."""
    named = {
        name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")
    }
    return named - _OF_CONTENT


class _Model(msgspec.Struct):
    model: str | None = None


_decode: Final = msgspec.json.Decoder(_Model).decode


def model_of(media_type: bytes, body: bytes) -> str | None:
    """The `model` of a JSON body; None where there is none, or the body is not what it says it is."""
    if not is_json(media_type):
        return None
    try:
        return _decode(body).model
    except (msgspec.DecodeError, ValueError, RecursionError):  # the upstream says what is wrong with it
        return None


def is_json(media_type: bytes) -> bool:
    kind = media_type.split(b";")[0].strip().lower()
    return kind == b"application/json" or kind.endswith(b"+json")


def may_be_another_sites(method: str, headers: Sequence[tuple[bytes, bytes]], allowed: Headers) -> bool:
    """Whether a browser may have sent this for a page of another site, without asking first.

    Such a page can post forms and plain text to a gateway without keys on its visitor's machine (CORS's
    simple requests); JSON it can not. `allowed`: what the gateway's CORS rules say to the page.
    """
    found = dict(headers)
    if method != "POST" or b"origin" not in found or is_json(found.get(b"content-type", b"")):
        return False
    if found.get(b"sec-fetch-site") == b"same-origin":
        return False
    return all(name != b"access-control-allow-origin" for name, _ in allowed)
