"""Token ids that one gateway process has made serve another one: of the same machine, and through Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import CHAT, MODEL
from tests.e2e.recording_worker import RecordingWorker, recording_worker
from tests.e2e.resting import wait_for
from tests.stack import Gateway
from tests.valkey import Valkey

ENCODED = "headrace_encoded_texts_total"
LONG = "Headrace brings the water to the wheel at the right speed. " * 100  # far too long to encode at once


@pytest.fixture
def recorder(tmp_path: Path, embedded_model: Path) -> Iterator[RecordingWorker]:
    with recording_worker(tmp_path, embedded_model) as worker:
        yield worker


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path, password="guess")
    server.start()
    yield server
    server.kill()


def post(gateway: Gateway, text: str) -> None:
    """A chat on a connection of its own, so that any process may take it."""
    messages = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 1}
    response = httpx.post(gateway.url + CHAT, json=body, headers={"connection": "close"}, timeout=30)
    assert response.status_code == 200, response.text


def told(gateway: Gateway) -> float:
    """How many texts were encoded for the first request, once its process has told the others."""
    wait_for(gateway, lambda: gateway.metric(ENCODED) > 0, "the first text to be encoded")
    return gateway.metric(ENCODED)


def test_text_that_one_process_has_encoded_is_not_encoded_by_the_other(
    gateway: Callable[..., Gateway], recorder: RecordingWorker
) -> None:
    front = gateway([recorder.address], "--processes", "2")
    post(front, LONG)
    num_encoded = told(front)
    num_posts = 1

    def has_the_other_found_it() -> bool:
        nonlocal num_posts
        num_posts += 1
        post(front, LONG)
        return front.metric("headrace_token_cache_shared_hits_total") > 0

    wait_for(front, has_the_other_found_it, "the other process to find the text")
    assert num_encoded < front.metric(ENCODED) < 2 * num_encoded, "all but what is too short to be shared"
    prompts = recorder.take()
    assert len(prompts) == num_posts
    assert all(prompt == prompts[0] for prompt in prompts)


def test_processes_that_share_nothing_encode_for_themselves(
    gateway: Callable[..., Gateway], recorder: RecordingWorker
) -> None:
    front = gateway([recorder.address], "--processes", "2", "--token-cache-shared-bytes", "0")
    post(front, LONG)
    num_encoded = told(front)

    def have_both_encoded_it() -> bool:
        post(front, LONG)
        return front.metric(ENCODED) == 2 * num_encoded

    wait_for(front, have_both_encoded_it, "both processes to encode the text")
    assert front.metric("headrace_token_cache_shared_hits_total") == 0


def test_gateways_share_ids_through_redis_and_survive_its_end(
    gateway: Callable[..., Gateway], recorder: RecordingWorker, valkey: Valkey
) -> None:
    options = ("--token-cache-redis", valkey.url, "--token-cache-redis-limit-ms", "1000")
    first, second = (gateway([recorder.address], *options) for _ in range(2))
    post(first, LONG)
    wait_for(first, lambda: bool(valkey.client.dbsize()), "ids in Redis")
    for key in valkey.client.scan_iter():
        assert 0 < valkey.client.ttl(key) <= 3600
        assert b"Headrace" not in key + (valkey.client.get(key) or b""), "no text at rest"
    post(second, LONG)
    assert second.metric("headrace_token_cache_redis_hits_total") == 1
    assert second.metric(ENCODED) == first.metric(ENCODED) - 1, "all but the long one"
    valkey.kill()
    post(second, LONG + "More.")
    assert second.metric(ENCODED) == first.metric(ENCODED)
    assert second.metric("headrace_token_cache_redis_failures_total") > 0
    prompts = recorder.take()
    assert prompts[0] == prompts[1]
    assert not any("guess" in each.log.read_text() for each in (first, second))
