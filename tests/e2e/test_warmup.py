"""Warm prompts through real processes: on connect, after a restart, after eviction, per salt, and unnoticed.

The engine is scripted, with a simulated prefix cache. `test_real_warmup.py` has the real one.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import stack
from tests.e2e.asking import COMPLETE, ask, chat
from tests.e2e.resting import (
    LIMIT_S,
    assert_no_fault,
    at_rest,
    num_jobs,
    ready,
    request_lines,
    statuses,
    wait_for,
)
from tests.stack import Gateway, Worker

BLOCK = 16
SYSTEM = "You sell tools for mills. " * 20
DOCUMENT = "A wheel has spokes, a hub and a rim, and water turns it. " * 60
OTHER = "A completely different text about boats, harbours and the tide. " * 60
SALTS = (None, "tenant-a", "tenant-b")


def messages(*contents: str) -> list[dict[str, str]]:
    """The first is the system's."""
    roles = ["system", *["user"] * len(contents)]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Two warm prompts: a system prompt for each salt, and a document under it without one."""
    path = tmp_path / "headrace.yaml"
    warm: list[dict[str, Any]] = [
        {"messages": messages(SYSTEM), "cache_salts": list(SALTS)},
        {"messages": messages(SYSTEM + DOCUMENT)},
    ]
    path.write_text(json.dumps({"warm": warm}))  # JSON is YAML
    return path


def rows(gateway: Gateway) -> list[dict[str, Any]]:
    """The warm prompts of all workers."""
    return [row for site in ready(gateway)[1]["warm"] for row in site["prompts"]]


def are_warm(gateway: Gateway, count: int = 4) -> bool:
    return [row["state"] for row in rows(gateway)] == ["warm"] * count


def until_warm(gateway: Gateway, count: int = 4) -> list[dict[str, Any]]:
    wait_for(gateway, lambda: are_warm(gateway, count), "warm")
    return rows(gateway)


async def cached_of(gateway: Gateway, system: str, question: str, **fields: Any) -> int:
    """How many tokens of such a chat the engine found in its cache."""
    body = chat("", 2, messages=messages(system, question), stream_options={"include_usage": True}, **fields)
    outcome = await ask(gateway.port, body)
    assert outcome.kind == COMPLETE, outcome
    assert outcome.usage is not None
    cached: int = outcome.usage["prompt_tokens_details"]["cached_tokens"]
    return cached


async def test_worker_is_warm_before_anybody_asks(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway], config: Path
) -> None:
    worker = scripted_worker()
    front = gateway([worker], "--config", str(config))
    shown = until_warm(front)
    assert [(row["prompt"], row["salt"], row["reason"], row["num_warmups"]) for row in shown] == [
        (0, None, "start", 1),
        (0, 1, "start", 1),
        (0, 2, "start", 1),
        (1, None, "start", 1),
    ]
    system_tokens, document_tokens = shown[0]["warmed_tokens"], shown[3]["warmed_tokens"]
    assert system_tokens % BLOCK == document_tokens % BLOCK == 0
    assert document_tokens > 5 * system_tokens > 5 * BLOCK
    assert front.metric("headrace_warmups_total") == 4
    assert front.metric("headrace_warm_prompts") == 4
    assert front.metric("headrace_warmup_seconds_count") == 4

    assert await cached_of(front, SYSTEM, "Hello?") >= system_tokens
    assert await cached_of(front, SYSTEM + DOCUMENT, "Hello?") >= document_tokens
    assert await cached_of(front, SYSTEM, "Hello?", cache_salt="tenant-a") >= system_tokens
    assert await cached_of(front, SYSTEM, "Hello?", cache_salt="tenant-c") == 0

    # Nobody asked for the warm-ups: they are in no log line and in no time to first token.
    at_rest(front, [worker])
    wait_for(front, lambda: len(request_lines(front)) == 4, "logging the users' requests")
    assert front.metric("gen_ai_server_time_to_first_token_seconds_count") == 4
    assert front.metric("headrace_warmups_total") == 4, "nothing was evicted"
    assert "tenant-" not in json.dumps(ready(front)[1])
    assert_no_fault(front)


async def test_worker_is_warmed_again_when_it_was_killed_and_is_back(
    embedded_model: Path, tmp_path: Path, gateway: Callable[..., Gateway], config: Path
) -> None:
    with stack.start_scripted(tmp_path, embedded_model, name="first") as worker:
        front = gateway([worker], "--config", str(config))
        until_warm(front)
        worker.process.kill()
        wait_for(front, lambda: {row["state"] for row in rows(front)} == {"pending"}, "without a worker")
        with stack.start_scripted(tmp_path, embedded_model, name="first") as again:
            assert again.address == worker.address
            shown = until_warm(front)
            assert {(row["reason"], row["num_warmups"]) for row in shown} == {("reconnect", 2)}
            assert await cached_of(front, SYSTEM + DOCUMENT, "Hello?") >= shown[3]["warmed_tokens"]
            assert front.metric("headrace_warmups_total") == 8


async def test_evicted_prompt_is_warmed_again_when_a_request_misses_it(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway], config: Path
) -> None:
    worker = scripted_worker("--kv-tokens", "2048")
    front = gateway([worker], "--config", str(config), "--rewarm-interval-s", "0.1")
    warmed = until_warm(front)[3]["warmed_tokens"]
    for number in range(4):
        await cached_of(front, f"{number} {OTHER}", "Hello?")
    assert are_warm(front), "nobody has missed it yet"
    assert await cached_of(front, SYSTEM + DOCUMENT, "Hello?") < warmed
    wait_for(front, lambda: rows(front)[3]["num_warmups"] == 2, "warm again")
    row = until_warm(front)[3]
    assert (row["reason"], row["cached_tokens"]) == ("evicted", warmed)
    assert await cached_of(front, SYSTEM + DOCUMENT, "And now?") >= warmed
    # The beginning is another warm prompt's too, whose loss the same request has shown.
    assert [row["reason"] for row in rows(front)] == ["evicted", "start", "start", "evicted"]
    lines = [
        line
        for line in stack.fetch(front.port, "/metrics").splitlines()
        if line.startswith("headrace_warmups_total") and 'reason="evicted"' in line
    ]
    assert [float(line.rsplit(" ", 1)[1]) for line in lines] == [2.0]


async def test_users_are_served_while_a_worker_is_being_warmed(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway], config: Path
) -> None:
    # One second of prefill for the document, and a queue in which a warm-up would leave no room.
    worker = scripted_worker("--prefill-ms-per-1k", "1000")
    bounds = ("--queue-max-requests", "1", "--queue-max-tokens", "100")
    front = gateway([worker], "--config", str(config), *bounds)
    outcomes = []
    while not are_warm(front):
        outcomes.append(await ask(front.port, chat("Hello?", 2)))
    assert outcomes, "it was warm before anybody could ask"
    assert {outcome.kind for outcome in outcomes} == {COMPLETE}
    (status,) = statuses(front)
    assert status["waiting_requests"] == 0


async def test_ready_waits_for_warm_prompts_where_it_should(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway], config: Path
) -> None:
    worker = scripted_worker("--prefill-ms-per-1k", "500")
    front = gateway([worker], "--config", str(config), "--warm-before-ready", until_ready=False)
    answers = []

    def is_ready() -> bool:
        answers.append(ready(front))
        return answers[-1][0] == 200

    wait_for(front, is_ready, "ready")
    early, late = answers[0][1], answers[-1][1]
    assert (early["ready"], early["warming"]) == (False, True)
    assert "warming" not in late
    assert [row["state"] for row in late["warm"][0]["prompts"]] == ["warm"] * 4


async def test_several_processes_make_the_engine_compute_a_prompt_once(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway], config: Path
) -> None:
    worker = scripted_worker()
    front = gateway([worker], "--config", str(config), "--processes", "2")
    wait_for(front, lambda: front.metric("headrace_warmups_total") == 8, "warm in both processes")
    warmed = [row["warmed_tokens"] for row in until_warm(front)]
    seen: set[tuple[int, ...]] = set()  # what each process was told that the engine had

    def both_asked() -> bool:
        seen.add(tuple(row["cached_tokens"] for row in rows(front)))
        return len(seen) == 2

    wait_for(front, both_asked, "answering from both processes")
    for first, second, all_of_it in zip(*seen, warmed, strict=True):
        assert min(first, second) < max(first, second) == all_of_it


async def test_drain_ends_a_warm_up_at_once(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway], config: Path
) -> None:
    worker = scripted_worker("--prefill-ms-per-1k", "1000000")
    front = gateway([worker], "--config", str(config))
    wait_for(front, lambda: num_jobs(worker) == 1, "warming")
    front.process.signal(signal.SIGTERM)
    async with asyncio.timeout(LIMIT_S):
        while front.process.returncode is None:  # noqa: ASYNC110 - a process has no event to wait for
            await asyncio.sleep(0.01)
    assert front.process.returncode == 0
    assert "Traceback" not in front.log.read_text()
    worker.process.wait_until(lambda: num_jobs(worker) == 0, LIMIT_S, "without the warm-up")
