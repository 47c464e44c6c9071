"""What is settled before a load begins: the model, how the server counts, and the conversations to come.

Not here: the requests for it (`gateway/bench/server_probe.py`), the load (`gateway/bench/session.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from backend.http_client import HttpClient
from gateway.bench.client import BenchClient
from gateway.bench.conversation import Conversation
from gateway.bench.options import BenchOptions
from gateway.bench.prompts import Measure, Texts, words_of_one_token
from gateway.bench.server_probe import (
    LIMIT_S,
    BenchError,
    ServerVersion,
    calibrate,
    check,
    first_model,
    server_version,
)
from gateway.bench.target import BodyMaker
from gateway.bench.word_list import WORDS
from gateway.bench.workload import from_records, made_up


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before the load."""

    maker: BodyMaker
    version: ServerVersion
    measure: Measure
    conversations: Iterator[Conversation]


async def prepare(http: HttpClient, options: BenchOptions) -> Prepared:
    """Ask the server what has to be known. Raises `BenchError`, also where a tokenizer cannot be used."""
    target, shape = options.target, options.shape
    limit_s = min(options.timeout_s, LIMIT_S)
    model = options.model or await first_model(http, target, limit_s)
    version = await server_version(http, target, limit_s)
    asks_timings = version.is_headrace if options.asks_timings is None else options.asks_timings
    maker = BodyMaker(model, target.endpoint, options.ignores_eos, asks_timings, options.extra_body)
    client = BenchClient(http, target, monotonic(), options.timeout_s)
    words = WORDS if options.tokenizer is None else _exact_words(options.tokenizer)
    texts = Texts(shape.seed, words)  # without a salt, so that runs with one seed count alike
    if options.records:
        await check(client, maker, texts)
        return Prepared(maker, version, Measure(), from_records(options.records, shape.output, shape.seed))
    has_prefix = shape.prefix_tokens > 0
    measure = await calibrate(client, maker, texts, has_prefix)
    if options.tokenizer is not None:
        num_words, tokens = await check(client, maker, texts, has_prefix)
        measure = Measure(1.0, max(0, (tokens or num_words) - num_words), "tokenizer")
    return Prepared(maker, version, measure, made_up(shape, Texts(shape.seed, words, shape.salt), measure))


def _exact_words(path: Path) -> tuple[str, ...]:
    try:
        return words_of_one_token(path)
    except ValueError as error:
        raise BenchError(f"--tokenizer: {error}") from error
