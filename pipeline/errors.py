"""The one error tree, split first by whose fault it is.

    HeadraceError
    ├── ClientError                 the request is at fault; 4xx
    │   ├── InvalidRequest          400, names the field
    │   │   └── DuplicateKey
    │   ├── ContextTooLong          400, names both numbers
    │   ├── ContentBlocked          400, a rule stopped the prompt
    │   ├── BadKey                  401
    │   ├── EngineRejected          400, the engine refuses its parameters
    │   ├── UnknownModel            404
    │   ├── BodyTooSlow             408
    │   ├── BodyTooLarge            413
    │   └── HeadersTooLarge         431
    ├── Overloaded                  503 + Retry-After, nothing was done, try again
    │   ├── QueueFull
    │   ├── NoWorker
    │   └── Draining
    ├── EngineFault                 the engine or the way to it failed; 502/504
    │   ├── WorkerLost
    │   │   └── EngineDied
    │   ├── WorkerStalled
    │   ├── QueueTimeout
    │   ├── DeadlineExceeded
    │   ├── EngineFailed
    │   └── InvalidAnswer
    └── ClientGone                  nobody is left to answer

Errors here carry facts; turning one into an HTTP status or an in-stream error frame happens in one place,
`gateway/error_body.py`. A message holds the number read and the number allowed, never user text.
"""

from __future__ import annotations

import re
from typing import Final

_FIELD: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")


class HeadraceError(Exception):
    """Base of all errors that Headrace raises on purpose."""

    status_hint = 500
    type = "server_error"
    code: str | None = None
    param: str | None = None

    @property
    def message(self) -> str:
        return str(self)

    @property
    def log_detail(self) -> str:
        """What a log may hold of it: the message, unless that may quote the request."""
        return self.message


class ClientError(HeadraceError):
    """The request is at fault; sending it again unchanged cannot help."""

    status_hint = 400
    type = "invalid_request_error"

    @property
    def log_detail(self) -> str:
        """The top-level field alone: the message shows the value read, and a path the client's own keys."""
        found = _FIELD.match(self.param or "")
        return found[0] if found else ""


class InvalidRequest(ClientError):
    """A field has a wrong type, a value outside its limits, or is not supported. `param` names it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class DuplicateKey(InvalidRequest):
    """A key stands twice in one JSON object. `param` is the client's own key, so that no log may hold it."""

    @property
    def log_detail(self) -> str:
        return ""


class ContextTooLong(ClientError):
    """Prompt plus reserved output does not fit into the model's context."""

    code = "context_length_exceeded"

    def __init__(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        max_model_len: int,
        param: str = "messages",
        is_least: bool = False,
    ) -> None:
        least = "at least " * is_least
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt has "
            f"{least}{num_prompt_tokens} tokens and {max_tokens} were reserved for the completion "
            f"({num_prompt_tokens + max_tokens} in total)."
        )
        self.param = param


class ContentBlocked(ClientError):
    """An input rule with the action `block` matched. Names the rule, never the text."""

    code = "content_filter"

    def __init__(self, rule_id: str, param: str = "messages") -> None:
        super().__init__(f"The prompt was blocked by the content rule {rule_id!r}.")
        self.rule_id = rule_id
        self.param = param


class BadKey(ClientError):
    status_hint = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def __init__(
        self, message: str = "Missing or wrong API key. Send it as 'Authorization: Bearer KEY'."
    ) -> None:
        super().__init__(message)


class EngineRejected(ClientError):
    """The engine refuses what the request asks (a grammar that does not compile); the message is its own."""

    code = "engine_rejected"


class UnknownModel(ClientError):
    status_hint = 404
    code = "model_not_found"
    param = "model"

    def __init__(self, model: str, known: tuple[str, ...] = ()) -> None:
        super().__init__(
            f"The model {model[:200]!r} does not exist. "
            f"This server has: {', '.join(known) or 'no model yet'}."
        )


class BodyTooSlow(ClientError):
    status_hint = 408
    code = "body_too_slow"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request body took longer than {limit_s:g} s.")


class BodyTooLarge(ClientError):
    status_hint = 413
    code = "body_too_large"

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"The request body has {num_bytes} bytes or more; the limit is {max_bytes}.")


class HeadersTooLarge(ClientError):
    status_hint = 431
    code = "headers_too_large"

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"The request headers have {num_bytes} bytes or more; the limit is {max_bytes}.")


class Overloaded(HeadraceError):
    """Nothing was done; the client may try again after `retry_after_s`."""

    status_hint = 503
    type = "overloaded_error"
    code = "overloaded"
    retry_after_s = 1.0


class QueueFull(Overloaded):
    """The queue bound of every worker of this model is reached."""

    code = "queue_full"


class NoWorker(Overloaded):
    """No worker of this model is ready."""

    code = "no_worker"


class Draining(Overloaded):
    """The gateway is shutting down and takes no new requests."""

    code = "draining"

    def __init__(self, message: str = "The server is shutting down and takes no new requests.") -> None:
        super().__init__(message)


class EngineFault(HeadraceError):
    """The engine, or the way to it, failed after the request was accepted."""

    status_hint = 502
    type = "engine_error"


class WorkerLost(EngineFault):
    """The connection to the worker broke, or its engine died."""

    code = "worker_lost"


class EngineDied(WorkerLost):
    """The worker says that its engine failed; the message is the engine's own, and may quote the request."""

    @property
    def log_detail(self) -> str:
        return ""


class WorkerStalled(EngineFault):
    """The worker is connected but has sent nothing for longer than the stall limit."""

    status_hint = 504
    code = "worker_stalled"


class QueueTimeout(EngineFault):
    """No first token within the queue limit."""

    status_hint = 504
    code = "queue_timeout"


class DeadlineExceeded(EngineFault):
    """The whole request took longer than its limit."""

    status_hint = 504
    code = "deadline_exceeded"


class EngineFailed(EngineFault):
    """The engine gave up this one request without a finish."""

    code = "engine_failed"


class InvalidAnswer(EngineFault):
    """The answer breaks its `response_format`. The message may name keys of the schema: not logged."""

    code = "invalid_answer"

    def __init__(self, problem: str) -> None:
        super().__init__(f"The answer does not have the form that 'response_format' asks for: {problem}")

    @property
    def log_detail(self) -> str:
        return ""


class ClientGone(HeadraceError):
    """The client closed its connection, or did not read within its limits."""

    status_hint = 499
    type = "client_closed"
    code = "client_closed"
