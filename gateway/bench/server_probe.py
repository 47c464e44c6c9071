"""What is found out about the server before the load: its model, whether it is Headrace, how it counts.

Not here: the load (`gateway/bench/run.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import msgspec

from backend.http_client import HttpClient
from backend.http_ports import HttpFault
from gateway.bench.answer_frames import UNREADABLE, error_text
from gateway.bench.client import BenchClient
from gateway.bench.conversation import Message
from gateway.bench.phrases import one_line
from gateway.bench.prompts import Measure, Texts, measured
from gateway.bench.sample import Sample
from gateway.bench.target import BodyMaker, Target

LIMIT_S: Final = 30.0  # for what a server tells of itself
_MAX_BYTES: Final = 4 << 20
_MAX_VERSION: Final = 100  # characters
_OK: Final = 200
_FEW_WORDS, _MANY_WORDS = 16, 144


class BenchError(Exception):
    """The load cannot begin; the message is for the user."""


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """What the server says it is; `text` is None where it says nothing."""

    text: str | None = None
    is_headrace: bool = False


async def first_model(http: HttpClient, target: Target, limit_s: float = LIMIT_S) -> str:
    """The first of the server's models. Raises `BenchError`."""
    status, body = await _get(http, target, "/v1/models", limit_s)
    if status != _OK:
        raise BenchError(f"GET {target.prefix}/v1/models answered {status}: {error_text(body)}; give --model")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except UNREADABLE as error:
        told = f"{target.url} answers GET {target.prefix}/v1/models with what is not JSON: {error}"
        raise BenchError(f"{told}; give --model") from None
    except (KeyError, IndexError, TypeError):
        raise BenchError(f"{target.url} lists no model; give --model") from None


async def server_version(http: HttpClient, target: Target, limit_s: float = LIMIT_S) -> ServerVersion:
    """Of `GET /version`, which vLLM has too; only Headrace's tells workers."""
    try:
        status, body = await _get(http, target, "/version", limit_s)
        found: Any = msgspec.json.decode(body) if status == _OK else None
    except (BenchError, *UNREADABLE):
        found = None
    if not isinstance(found, Mapping) or not isinstance(found.get("version"), str):
        return ServerVersion()
    is_headrace = isinstance(found.get("workers"), Mapping)
    version = one_line(found["version"])[:_MAX_VERSION]
    return ServerVersion(("headrace " if is_headrace else "") + version, is_headrace)


async def _get(http: HttpClient, target: Target, path: str, limit_s: float) -> tuple[int, bytes]:
    try:
        response = await http.fetch(target.origin, target.get(path), limit_s, _MAX_BYTES)
    except HttpFault as fault:
        raise BenchError(f"{target.url} does not answer GET {target.prefix}{path}: {fault}") from fault
    return response.status, response.body


async def check(
    client: BenchClient, maker: BodyMaker, texts: Texts, has_prefix: bool = False
) -> tuple[int, int | None]:
    """One short request: the number of its words, and the tokens that the server counted.

    `has_prefix`: with a system prompt, for which a template adds tokens of its own. Raises `BenchError` if it
    fails, for then the load would fail too.
    """
    return await _ask(client, maker, texts, _FEW_WORDS, has_prefix)


async def calibrate(client: BenchClient, maker: BodyMaker, texts: Texts, has_prefix: bool = False) -> Measure:
    """How many tokens the server counts for our words, of two short requests. Raises `BenchError`."""
    few = await _ask(client, maker, texts, _FEW_WORDS, has_prefix)
    if few[1] is None:
        return Measure()
    many = await _ask(client, maker, texts, _MANY_WORDS, has_prefix)
    if many[1] is None:
        return Measure()
    return measured((few[0], few[1]), (many[0], many[1]))


async def _ask(
    client: BenchClient, maker: BodyMaker, texts: Texts, num_words: int, has_prefix: bool
) -> tuple[int, int | None]:
    messages = [_message("user", texts, num_words)]
    if has_prefix:
        messages.insert(0, _message("system", texts, _FEW_WORDS))
        num_words += _FEW_WORDS
    sample = Sample(number=-1, due_s=client.now_s())
    await client.ask(maker.body(messages, 1), sample)
    # Of one token an answer may be empty, as far as a user sees it.
    if sample.error not in (None, "empty"):
        raise BenchError(
            f"the first request to {client.target.url} failed, so there is no load: "
            f"{sample.error}: {sample.detail}"
        )
    return num_words, sample.prompt_tokens


def _message(role: str, texts: Texts, num_words: int) -> Message:
    return {"role": role, "content": texts.draw(Random(f"probe {role} {num_words}"), num_words)}
