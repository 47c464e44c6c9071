"""Turns of conversations over /v1/realtime: what a waiting one takes, and when a turn's first token comes.

For `bench_websocket.py`, whose docstring says what is compared. Not here: CPU per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.bench_streams import HOST, metric
from benchmarks.load import StreamResult, open_stream, request
from benchmarks.processes import Measured
from benchmarks.report import Report
from benchmarks.texts import prompt
from benchmarks.websocket_load import TurnResult, WebSocketClient, open_conversation

QUICK_MODEL: Final = "quick"  # of the worker whose steps take 1 ms
SETTLE_S: Final = 0.3  # until what was left is aborted
AT_ONCE: Final = 8  # clients that come at the same time
NUM_TOKENS: Final = 300  # of a turn's question
NUM_ANSWERED: Final = 60  # of its answer
NUM_TURNS: Final = 10
# Of `timings`: no stages of the gateway's.
WAITS: Final = ("queue_ms", "prefill_ms", "ttft_ms", "tpot_ms", "total_ms")


async def ended(client: WebSocketClient, text: str, **response: Any) -> TurnResult:
    """One turn to its end, which must be its limit."""
    async with asyncio.timeout(60):
        result = await client.turn(text, **response)
    if result.response["status"] not in ("completed", "incomplete") or not result.num_deltas:
        raise RuntimeError(f"a response is {result.response}")
    return result


async def one_stream(port: int, fields: dict[str, Any]) -> StreamResult:
    client = await open_stream(HOST, port, request(fields))
    async with asyncio.timeout(60):
        result = await client.done
    if not result.is_done:
        raise RuntimeError(f"a stream broke: {result.status} {result.error}")
    return result


# -- memory --------------------------------------------------------------------------------------------------


async def idle(report: Report, served: Measured, num_conversations: int) -> None:
    """Resident memory of conversations that are open and silent, before and after a turn."""
    warm = [await talked(served.port, number, NUM_TOKENS) for number in range(AT_ONCE)]
    empty = served.memory_bytes()
    clients = await _all(num_conversations, lambda number: open_conversation(HOST, served.port, QUICK_MODEL))
    opened = served.memory_bytes()
    buffers = metric(served.port, "headrace_token_buffer_bytes")
    await _all(
        num_conversations,
        lambda number: ended(clients[number], prompt(NUM_TOKENS, number), max_output_tokens=NUM_TOKENS),
    )
    await asyncio.sleep(SETTLE_S)
    used = served.memory_bytes()
    buffers = metric(served.port, "headrace_token_buffer_bytes") - buffers
    if any(client.error for client in clients):
        raise RuntimeError("a conversation was closed")
    for client in (*clients, *warm):
        client.close()
    report.add("opened_conversation_kb", (opened - empty) / num_conversations / 1e3, "kB")
    report.add("idle_conversation_kb", (used - empty) / num_conversations / 1e3, "kB")
    report.add("idle_conversation_buffer_kb", buffers / num_conversations / 1e3, "kB")
    report.add("idle_conversations", num_conversations)


async def _all(count: int, start: Callable[[int], Any]) -> list[Any]:
    """So many, a few at a time, by their numbers."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def run(number: int) -> Any:
        async with at_once:
            return await start(number)

    return await asyncio.gather(*(run(number) for number in range(count)))


async def talked(port: int, number: int, num_tokens: int) -> WebSocketClient:
    """A conversation after its first turn."""
    client = await open_conversation(HOST, port, QUICK_MODEL)
    await ended(client, prompt(NUM_TOKENS, -1 - number), max_output_tokens=num_tokens)
    return client


# -- the time to the first token -----------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """One turn of one conversation: the gateway's stages, the client's clock, and tokens."""

    stages_ms: float
    seen_ms: float
    prompt_tokens: int
    new_tokens: float  # that were not in the conversation's buffer


async def turns(report: Report, port: int, num_conversations: int) -> None:
    """One conversation after the other, so that none waits for another's steps."""
    found = [await conversation(port, number) for number in range(num_conversations)]
    names = {"turn_1": 0, f"turn_{NUM_TURNS}": NUM_TURNS - 1, f"stateless_{NUM_TURNS}": NUM_TURNS}
    for name, at in names.items():
        chosen = [each[at] for each in found]
        if at < NUM_TURNS:
            report.add(f"{name}_prompt_tokens", [turn.prompt_tokens for turn in chosen])
        report.add(f"{name}_new_tokens", [turn.new_tokens for turn in chosen])
        report.add(f"{name}_stages_ms", [turn.stages_ms for turn in chosen], "ms")
        report.add(f"{name}_ttft_ms", [turn.seen_ms for turn in chosen], "ms")
    last = NUM_TURNS - 1
    report.add("turn_10_added_stages_ms", [each[last].stages_ms - each[0].stages_ms for each in found], "ms")
    report.add("turn_10_added_ttft_ms", [each[last].seen_ms - each[0].seen_ms for each in found], "ms")


async def conversation(port: int, number: int) -> list[Turn]:
    """All turns, and the last one, with another question, as a request without a conversation."""
    client = await open_conversation(HOST, port, QUICK_MODEL)
    found: list[Turn] = []
    messages: list[dict[str, str]] = []
    for at in range(NUM_TURNS):
        text = prompt(NUM_TOKENS, 1000 * (number + 1) + at)
        reused = metric(port, "headrace_token_buffer_reused_tokens_total")
        result = await ended(client, text, max_output_tokens=NUM_ANSWERED, include=["timings"])
        reused = metric(port, "headrace_token_buffer_reused_tokens_total") - reused
        num_prompt = result.response["usage"]["input_tokens"]
        stages_ms = of_gateway(result.response["timings"])
        found.append(Turn(stages_ms, seen_ms(result), num_prompt, num_prompt - reused))
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": text_of(result.response)})
    client.close()
    messages[-2:] = [{"role": "user", "content": prompt(NUM_TOKENS, 1000 * (number + 1) + NUM_TURNS)}]
    fields = {"model": QUICK_MODEL, "max_tokens": NUM_ANSWERED, "messages": messages}
    reused = metric(port, "headrace_token_buffer_reused_tokens_total")
    streamed = await one_stream(port, fields)
    reused = metric(port, "headrace_token_buffer_reused_tokens_total") - reused
    num_prompt = streamed.num_prompt_tokens
    found.append(Turn(of_gateway(streamed.timings), seen_ms(streamed), num_prompt, num_prompt - reused))
    return found


def of_gateway(timings: dict[str, float]) -> float:
    """The gateway's own stages of `timings`, in milliseconds."""
    stages = {name: spent for name, spent in timings.items() if name.endswith("_ms") and name not in WAITS}
    if not stages:
        raise RuntimeError(f"no stages in {timings}")
    return sum(stages.values())


def seen_ms(result: TurnResult | StreamResult) -> float:
    """By the client's clock, from asking to the first text."""
    assert result.first_s is not None
    return (result.first_s - result.started_s) * 1e3


def text_of(response: dict[str, Any]) -> str:
    """What the one message of a response says, without NUL, which no chat may hold."""
    (item,) = response["output"]
    (part,) = item["content"]
    return str(part["text"]).replace("\0", "")
