"""The answer of a chat that goes on is tokenized before the next turn asks for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from filters.rules import Rule
from gateway.next_turns import BATCH_TURNS
from pipeline.encoding import MAX_INLINE_CHARACTERS
from pipeline.needs import Encode
from pipeline.values import ChatRequest, Delivery, Generation
from tests.gateway.answering import until
from tests.gateway.asgi import Request
from tests.gateway.serving import CHAT, MODEL, RAW, Service, service

LONG = "A river carries water to the wheel. " * (1 + MAX_INLINE_CHARACTERS // 36)
HISTORY = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


async def answered(made: Service, body: dict[str, Any], *texts: str, path: str = CHAT) -> str:
    """The whole text that a client got; the engine says the texts."""
    number = len(made.engine.streams)
    request = Request(path, json.dumps({"model": MODEL, **body}).encode())
    task = request.start(made)
    await until(lambda: len(made.engine.streams) > number)
    for text in texts[:-1]:
        made.engine.streams[number].say(text)
    made.engine.streams[number].say(texts[-1], "stop")
    await asyncio.wait_for(task, 5)
    assert request.client.status == 200
    await until(lambda: made.next_turns.is_idle)
    return request.client.body.decode()


def new_texts(made: Service, *messages: dict[str, str]) -> tuple[str, ...]:
    """What a chat would have to encode elsewhere: a long text that is not known."""
    request = ChatRequest(MODEL, messages, Generation({}), Delivery())
    steps = made.models.get(MODEL).inbound.prepare(request, 0.0)
    try:
        need = next(steps)
    except StopIteration:
        return ()
    assert isinstance(need, Encode)
    return need.texts


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_of_a_chat_that_goes_on_is_known_to_the_next_turn(stream: bool) -> None:
    async with service() as made:
        await answered(made, {"messages": HISTORY, "stream": stream}, LONG[:50], LONG[50:])
        counts = made.store.cache.stats()
        assert (counts["hits"], counts["misses"]) == (0, 9), "learning is no use of what is known"
        answer = {"role": "assistant", "content": LONG}
        assert new_texts(made, *HISTORY, answer, {"role": "user", "content": "d"}) == ()
        changed = answer | {"content": LONG + "!"}
        assert new_texts(made, *HISTORY, changed, {"role": "user", "content": "d"}) != ()


async def test_answer_is_known_as_the_client_saw_it() -> None:
    async with service(rules=[Rule("m", ("river",), "mask", replacement="*")]) as made:
        await answered(made, {"messages": HISTORY, "stream": True}, LONG)
        seen = {"role": "assistant", "content": LONG.replace("river", "*****")}
        assert new_texts(made, *HISTORY, seen) == ()
        assert new_texts(made, *HISTORY, seen | {"content": LONG}) != ()


@pytest.mark.parametrize(
    ("options", "path", "body"),
    [
        ({}, CHAT, {"messages": HISTORY[:1]}),
        ({}, CHAT, {"messages": HISTORY, "n": 2}),
        ({}, CHAT, {"messages": HISTORY[:2], "continue_final_message": True}),
        ({}, RAW, {"prompt": "a"}),
        ({"remember_answers": False}, CHAT, {"messages": HISTORY}),
    ],
)
async def test_other_answers_cost_nothing(options: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    async with service(**options) as made:
        number = len(made.engine.streams)
        request = Request(path, json.dumps({"model": MODEL, "stream": True, **body}).encode())
        task = request.start(made)
        await until(lambda: len(made.engine.streams) > number)
        num_entries = made.store.cache.num_entries
        for stream in made.engine.streams:
            stream.say(LONG, "stop")
        await asyncio.wait_for(task, 5)
        assert made.next_turns.is_idle
        assert made.store.cache.num_entries == num_entries


async def test_answer_that_was_broken_off_is_not_learned() -> None:
    async with service() as made:
        request = Request(CHAT, json.dumps({"model": MODEL, "messages": HISTORY, "stream": True}).encode())
        task = request.start(made)
        await until(lambda: bool(made.engine.streams))
        made.engine.streams[0].say(LONG)
        request.disconnect()
        await asyncio.wait_for(task, 5)
        assert made.next_turns.is_idle


async def test_nothing_is_learned_while_others_wait_for_a_tokenizer() -> None:
    async with service() as made:
        made.encoders.num_queue_chars = 1
        await answered(made, {"messages": HISTORY, "stream": True}, LONG)
        assert new_texts(made, *HISTORY, {"role": "assistant", "content": LONG}) != ()
        made.encoders.num_queue_chars = 0


async def test_template_that_takes_no_such_chat_harms_nothing() -> None:
    async with service() as made:
        model = made.models.get(MODEL)
        refusing = ChatRequest(
            MODEL, HISTORY, Generation({}), Delivery(), chat_template_kwargs={"tokenize": 1}
        )
        made.next_turns.learn(model, refusing, LONG)
        await until(lambda: made.next_turns.is_idle)
        assert await answered(made, {"prompt": "a"}, "b", path=RAW)


async def test_fault_in_learning_is_logged_without_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with service() as made:
        model = made.models.get(MODEL)

        def broken(*_: Any) -> Any:
            raise RuntimeError(LONG)

        monkeypatch.setattr(model.inbound, "learn", broken)
        made.next_turns.learn(model, ChatRequest(MODEL, HISTORY, Generation({}), Delivery()), LONG)
        await until(lambda: made.next_turns.is_idle)
        assert "unexpected RuntimeError" in caplog.text
        assert "A river" not in caplog.text


async def test_stop_leaves_nothing_under_way() -> None:
    async with service() as made:
        model = made.models.get(MODEL)
        made.next_turns.learn(model, ChatRequest(MODEL, HISTORY, Generation({}), Delivery()), LONG)
        assert not made.next_turns.is_idle
        await made.next_turns.stop()
        assert made.next_turns.is_idle


async def test_answers_that_end_together_are_encoded_in_one_batch() -> None:
    async with service() as made:
        model = made.models.get(MODEL)
        request = ChatRequest(MODEL, HISTORY, Generation({}), Delivery())
        answers = [f"{number} {LONG}" for number in range(2 * BATCH_TURNS)]
        for answer in answers:
            made.next_turns.learn(model, request, answer)
        await until(lambda: made.next_turns.is_idle)
        assert made.encoders.num_batches <= 4, "two rounds of the tokenizer, its first text alone"
        for answer in answers:
            assert new_texts(made, *HISTORY, {"role": "assistant", "content": answer}) == ()


async def test_more_answers_than_may_wait_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.next_turns.MAX_WAITING", 2)
    async with service() as made:
        model = made.models.get(MODEL)
        request = ChatRequest(MODEL, HISTORY, Generation({}), Delivery())
        for number in range(3):
            made.next_turns.learn(model, request, f"{number} {LONG}")
        await until(lambda: made.next_turns.is_idle)
        known = [
            new_texts(made, *HISTORY, {"role": "assistant", "content": f"{number} {LONG}"}) == ()
            for number in range(3)
        ]
        assert known == [True, True, False]
