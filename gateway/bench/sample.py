"""One request of a load test and what became of it: the one value between the load and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

INTERRUPTED: Final = "interrupted"  # the error of a request that the end of the run cut off: no failure


class Sample(msgspec.Struct):
    """Times are monotonic seconds from the start of the run.

    `frames_s`: when each frame with output came (content, reasoning, or a piece of a tool call), as the
    client's event loop saw it; the first one is the first token. A request that failed has an `error`:
    a word for its kind (`http_429`, `error_frame`, `truncated`, `connect`, `timeout`, …) and a `detail`.
    """

    number: int  # in the order in which they were to be sent
    due_s: float  # when the load's plan had it sent
    is_warm_up: bool = False
    turn: int = 0  # of a conversation; 0 is the first
    prompt_tokens_wanted: int = 0
    output_tokens_wanted: int = 0
    sent_s: float = 0.0
    headers_s: float | None = None
    frames_s: list[float] = []
    ended_s: float | None = None
    status: int = 0
    prompt_tokens: int | None = None  # the server's usage
    output_tokens: int | None = None
    cached_tokens: int | None = None
    num_bytes: int = 0  # of the response's body
    finish: str | None = None
    error: str | None = None
    detail: str = ""
    timings: Mapping[str, float] | None = None  # the server's, in milliseconds
