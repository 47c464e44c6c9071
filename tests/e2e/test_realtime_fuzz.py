"""Whatever a client sends over /v1/realtime: it is told what is wrong with it, and the conversation goes on.

Seeded messages: no JSON, no object, events that nobody knows, fields of other types, ids that are too long,
deep and large values, and good events in any order. Frames that break RFC 6455 are not here
(`tests/gateway/test_websocket_protocol.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests import stack
from tests.e2e.realtime import DONE, ERROR, Event, Talk, error_in, message, talking
from tests.e2e.resting import assert_no_fault, at_rest, kept_bytes, resident_bytes, wait_until_held
from tests.stack import Gateway, Worker

NUM_TALKS: Final = 6  # side by side
AT_ONCE: Final = 25  # messages that are sent before their answers are read
SHORT: Final[dict[str, Any]] = {"max_output_tokens": 2}
IDS: Final = ("a", "b", "c", "root", "", "nobody", "\x00", "é" * 40, "i" * 600, "../../x", "' or 1=1")
ODD: Final[Sequence[Any]] = [
    *[None, True, False, 0, -1, 1.5, 2**53, -(2**63), 1e308],
    *["", "text", "\u2028", "😀" * 50, "inf", "none", "auto"],
    *[[], {}, [[]], [None], ["text"] * 300, {"type": None}, {"type": "message"}, {"a": {"b": {}}}],
]
SETTINGS: Final = [
    *["temperature", "max_output_tokens", "max_response_output_tokens", "modalities", "output_modalities"],
    *[
        "instructions",
        "tools",
        "tool_choice",
        "metadata",
        "input",
        "conversation",
        "speech",
        "include",
        "stop",
    ],
    *[
        "seed",
        "top_p",
        "logit_bias",
        "response_format",
        "structured_outputs",
        "chat_template_kwargs",
        "audio",
    ],
    *["voice", "turn_detection", "model", "n", "prompt", "truncation", "messages", "stream"],
]
UNKNOWN: Final = [
    *["input_audio_buffer.append", "input_audio_buffer.commit", "output_audio_buffer.clear", "response.done"],
    *["session.created", "conversation.item.created", "transcription_session.update", "error"],
    *["", "x" * 5000],
]


@dataclass(frozen=True, slots=True)
class Served:
    gateway: Gateway
    worker: Worker


@pytest.fixture(scope="module")
def served(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("realtime_fuzz")
    with (
        stack.start_scripted(folder, embedded_model, "--prefill-ms-per-1k", "0") as worker,
        stack.start_gateway(folder, [worker]) as gateway,
    ):
        yield Served(gateway, worker)
        assert_no_fault(gateway)


# -- messages ------------------------------------------------------------------------------------------------


def good_event(rng: random.Random) -> dict[str, Any]:
    """An event in the right form, which may come at the wrong moment."""
    item_id = rng.choice(IDS[:3])
    role = rng.choice(["user", "assistant", "system"])
    call = {"type": "function_call", "name": "f", "call_id": "c1", "arguments": "{}"}
    return rng.choice(
        [
            {
                "type": "session.update",
                "session": {"type": "realtime", "instructions": rng.choice(["", "Be."])},
            },
            {"type": "conversation.item.create", "item": message("Hello", role, id=item_id)},
            {
                "type": "conversation.item.create",
                "item": message("Well", role),
                "previous_item_id": rng.choice(IDS[:4]),
            },
            {"type": "conversation.item.create", "item": call},
            {
                "type": "conversation.item.create",
                "item": {"type": "function_call_output", "call_id": "c1", "output": "1"},
            },
            {"type": "conversation.item.delete", "item_id": item_id},
            {"type": "conversation.item.retrieve", "item_id": item_id},
            {
                "type": "conversation.item.truncate",
                "item_id": item_id,
                "content_index": 0,
                "text_end": rng.randrange(8),
            },
            {"type": "response.create", "response": SHORT | {"conversation": rng.choice(["auto", "none"])}},
            {"type": "response.cancel"},
        ]
    )


def odd_field(rng: random.Random) -> str:
    """A good event with one field, at any depth, that is something else."""
    event = good_event(rng)
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            places.append((value, key))
            visit(value[key])

    event = json.loads(json.dumps(event))
    visit(event)
    holder, key = rng.choice(places)
    holder[key] = rng.choice(ODD)
    return json.dumps(event)


def odd_settings(rng: random.Random) -> str:
    """Settings of a session or a response, of which one is odd."""
    settings = {rng.choice(SETTINGS): rng.choice(ODD)}
    if rng.random() < 0.5:
        return json.dumps({"type": "session.update", "session": settings})
    # It has an end, whatever the odd one says.
    return json.dumps({"type": "response.create", "response": {"conversation": "none", **SHORT, **settings}})


def cut(rng: random.Random) -> str:
    """The beginning of a good event."""
    text = json.dumps(good_event(rng))
    return text[: rng.randrange(len(text))]


def broken(rng: random.Random) -> str:
    """A good event of which some characters are others."""
    text = list(json.dumps(good_event(rng)))
    for _ in range(rng.randrange(1, 4)):
        text[rng.randrange(len(text))] = rng.choice('{}[]",:\\\x00é😀0')
    return "".join(text)


def no_object(rng: random.Random) -> str:
    return rng.choice(
        ["", " ", "null", "[]", "1", '"response.create"', "{}", "[{}]", "\x00", "NaN", "{}{}", "'"]
    )


def unknown(rng: random.Random) -> str:
    """Types of other servers and of nobody."""
    return json.dumps({"type": rng.choice(UNKNOWN), "event_id": "mine", "audio": "AAAA"})


def deep(rng: random.Random) -> str:
    """Values within values, up to far more than any parser takes."""
    depth = rng.choice([40, 200, 5000, 50_000])
    inner = rng.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth])
    name, kind = rng.choice([("session", "session.update"), ("item", "conversation.item.create")])
    wrapped = rng.choice(
        [f'{{"type":"{kind}","{name}":{inner}}}', f'{{"type":"{kind}","{name}":{{"x":{inner}}}}}']
    )
    return rng.choice([inner, wrapped])


def long_id(rng: random.Random) -> str:
    event = good_event(rng) | {"event_id": rng.choice([*IDS, "e" * 512, "e" * 513, "e" * 100_000])}
    if "item_id" in event:
        event["item_id"] = rng.choice(IDS)
    if "item" in event:
        event["item"] = event["item"] | {"id": rng.choice(IDS)}
    return json.dumps(event, ensure_ascii=rng.random() < 0.5)


def large(rng: random.Random) -> str:
    """Much text, or many values."""
    if rng.random() < 0.5:
        return json.dumps(
            {"type": "conversation.item.create", "item": message("😀 \n" * rng.randrange(20_000))}
        )
    content = [{"type": "input_text", "text": "x"}] * rng.randrange(3000)
    item = {"type": "message", "role": "user", "content": content}
    return json.dumps({"type": "conversation.item.create", "item": item})


def escapes(rng: random.Random) -> str:
    """Lone surrogates, and a key that comes twice."""
    return rng.choice(
        [
            '{"type":"conversation.item.create","item":{"type":"message","role":"user","content":"\\ud800"}}',
            '{"type":"\\ud83d","event_id":"\\udfff"}',
            '{"type":"response.cancel","type":"response.cancel"}',
            '{"type":"conversation.item.delete","item_id":"a","item_id":"b"}',
            '{"type":"conversation.item.delete","item_id":"\\u0000"}',
        ]
    )


def binary(rng: random.Random) -> bytes:
    return rng.choice([b"", b"\x00", rng.randbytes(100), json.dumps(good_event(rng)).encode()])


def good(rng: random.Random) -> str:
    event = good_event(rng)
    return json.dumps(event | {"event_id": f"mine {rng.random()}"} if rng.random() < 0.5 else event)


Case = Callable[[random.Random], str | bytes]
COMMON: Final[list[Case]] = [good, good, good, odd_field, odd_field, odd_field, odd_settings, odd_settings]
CASES: Final[list[Case]] = [
    *COMMON,
    *(cut, broken, no_object, unknown, deep, long_id, large, escapes, binary),
]


# -- what comes of them --------------------------------------------------------------------------------------


async def exchange(talk: Talk, sent: Sequence[str | bytes], number: int) -> None:
    """Send some messages; each has an answer before that of the mark behind it."""
    for at, text in enumerate(sent):
        await talk.send_text(text)
        await talk.send("conversation.item.retrieve", item_id="-", event_id=f"mark {number} {at}")
    for at, text in enumerate(sent):
        answered = False
        while not is_mark(event := await talk.next(), f"mark {number} {at}"):
            if event["type"] == ERROR:
                error_in(event)
            answered |= is_answer(event)
        assert answered, f"nothing was said to {text[:2000]!r}"


def is_mark(event: Event, name: str) -> bool:
    return bool(event["type"] == ERROR and event["error"]["event_id"] == name)


def is_answer(event: Event) -> bool:
    """To a client's event. Responses have others, at any time."""
    kind = event["type"]
    is_items = kind.startswith("conversation.item.") and not kind.endswith(".added")
    return is_items or kind in (ERROR, DONE, "session.updated", "response.created")


async def attack(port: int, count: int, seed: int) -> None:
    """One conversation that survives so many messages."""
    rng = random.Random(seed)
    async with talking(port) as talk:
        for number in range(0, count, AT_ONCE):
            sent = [rng.choice(CASES)(rng) for _ in range(min(AT_ONCE, count - number))]
            await exchange(talk, sent, number)
            talk.forget()
    async with talking(port) as talk:
        said = await talk.ask("All well?", **SHORT)
        assert said.response["usage"]["output_tokens"] == 2


async def attack_all(served: Served, count: int, seed: int) -> None:
    await asyncio.gather(*(attack(served.gateway.port, count, seed + each) for each in range(NUM_TALKS)))


async def test_every_message_is_answered_and_the_conversation_goes_on(served: Served) -> None:
    await attack_all(served, 10, seed=0)  # whatever is made once is made
    before = await asyncio.to_thread(at_rest, served.gateway, [served.worker])
    await attack_all(served, 75, seed=1000)
    await asyncio.to_thread(wait_until_held, served.gateway, [served.worker], before)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_forty_thousand_messages_leave_nothing_behind(served: Served) -> None:
    """Memory goes up by what the largest messages take while they are read, several at once by chance: 794 MB
    after 20,000 messages, and the same after 40,000."""
    await attack_all(served, 10, seed=0)
    before = await asyncio.to_thread(at_rest, served.gateway, [served.worker])
    memory = []
    for seed in range(10_000, 90_000, 10_000):
        await attack_all(served, 850, seed)
        await asyncio.to_thread(wait_until_held, served.gateway, [served.worker], before)
        memory.append(resident_bytes(served.gateway.pid) - kept_bytes(served.gateway))
    grown = min(memory[6:]) - max(memory[4:6])
    assert grown < 32 << 20, memory  # 3 KiB for each of the last 10,000 messages, of which some have 400
