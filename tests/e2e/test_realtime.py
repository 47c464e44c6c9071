"""Conversations over /v1/realtime with real processes: items, responses, settings, limits, and how they end.

What reaches the engine is compared, id for id, with a chat request of the same visible conversation. Cancels
are in `test_realtime_cancel.py`, wrong events in `test_realtime_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests import stack
from tests.e2e.asking import REFUSED, ask, chat
from tests.e2e.realtime import DELTA, DONE, Spoken, Talk, message, talking
from tests.e2e.recording_worker import RecordingWorker, recording_worker
from tests.e2e.resting import assert_no_fault, logged, request_lines, wait_for
from tests.stack import Gateway

ENDLESS: Final = 20_000
SONG: Final = (
    "The wheel turns, the water sings. Who hears it? Nobody knows; the stones do not say. So it goes on"
)
CALL: Final = '{"city": "Rome"}'
RESULT: Final = "sunny, 31 degrees"
SCRIPT: Final = {
    RESULT: "It is sunny in Rome.",
    "weather in Rome": CALL,
    "Sing the song": SONG,
    "Sing for ever": SONG * 40,
    "Say nothing": "No\x00thing",
    "Do what is forbidden": "It is a forbidden thing to do",
    "Tell a secret": "This is a secret, is it not?",
}
RULES: Final[list[dict[str, Any]]] = [
    {"id": "masked", "match": ["secret"], "action": "mask", "direction": "output"},
    {"id": "output", "match": ["forbidden"], "action": "block", "direction": "output"},
    {"id": "input", "match": ["weapon"], "action": "block", "direction": "input"},
]
TOOL: Final = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway, and a worker that remembers every prompt."""

    gateway: Gateway
    worker: RecordingWorker

    @property
    def port(self) -> int:
        return self.gateway.port

    async def assert_prompt(self, messages: list[dict[str, Any]], **fields: Any) -> None:
        """The prompt that came last is that of a chat request with these messages, id for id."""
        prompt = self.worker.prompt()
        body = chat("", 1, **fields) | {"messages": messages}
        outcome = await ask(self.port, body)
        assert outcome.kind != REFUSED, outcome
        assert prompt == self.worker.prompt()


@pytest.fixture(scope="module")
def served(embedded_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("realtime")
    script, rules = folder / "script.json", folder / "rules.yaml"
    script.write_text(json.dumps(SCRIPT))
    rules.write_text(json.dumps(RULES))
    with ExitStack() as started:
        worker = started.enter_context(recording_worker(folder, embedded_model, script=script))
        gateway = started.enter_context(stack.start_gateway(folder, [worker.address], "--rules", str(rules)))
        yield Served(gateway, worker)
        assert_no_fault(gateway)


def turn(role: str, content: str) -> dict[str, Any]:
    """A message of a chat."""
    return {"role": role, "content": content}


# -- conversations -------------------------------------------------------------------------------------------


async def test_each_turn_has_the_prompt_of_a_chat_with_the_same_messages(served: Served) -> None:
    messages = []
    async with talking(served.port) as talk:
        for number in range(5):
            messages.append(turn("user", f"Question {number}?"))
            said = await talk.ask(messages[-1]["content"], max_output_tokens=8)
            assert said.status == "incomplete"
            await served.assert_prompt(messages)
            messages.append(turn("assistant", said.text))


async def test_a_response_says_what_it_took(served: Served) -> None:
    async with talking(served.port) as talk:
        said = await talk.ask("Sing the song.", include=["timings"], metadata={"line": "one"})
    assert (said.text, said.status, said.reason) == (SONG, "completed", None)
    assert len(said.deltas) > 8, "an answer in few pieces"
    response = said.response
    assert response["metadata"] == {"line": "one"}
    assert response["usage"]["input_tokens"] == len(served.worker.prompt())
    assert (
        response["usage"]["total_tokens"]
        == response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
    )
    assert {"tokenize_ms", "ttft_ms", "total_ms"} <= response["timings"].keys()
    line = logged(served.gateway, said.id)
    assert line["finish"] == ["stop"]
    assert line["output_tokens"] == response["usage"]["output_tokens"]
    assert line["ended"] == "complete"


async def test_what_no_prompt_may_hold_is_said_once_and_stops_no_turn(served: Served) -> None:
    async with talking(served.port) as talk:
        assert (await talk.ask("Say nothing.")).text == "No\x00thing"
        served.worker.take()
        await talk.ask("And now?", max_output_tokens=3)
        messages = [turn("user", "Say nothing."), turn("assistant", "Nothing"), turn("user", "And now?")]
        await served.assert_prompt(messages)


async def test_many_conversations_are_told_apart(served: Served) -> None:
    async def talked(number: int) -> list[str]:
        async with talking(served.port) as talk:
            return [(await talk.ask(f"{number}, turn {at}", max_output_tokens=8)).text for at in range(3)]

    alone = [await talked(number) for number in range(2)]
    together = await asyncio.gather(*(talked(number) for number in range(12)))
    assert together[:2] == alone
    assert len({text for texts in together for text in texts}) == 36
    served.worker.take()


# -- items ---------------------------------------------------------------------------------------------------


async def test_items_have_the_ids_and_places_that_a_client_gives(served: Served) -> None:
    async with talking(served.port) as talk:
        assert await talk.say("Second", id="second") == "second"
        assert await talk.say("Third", role="assistant", id="third") == "third"
        assert await talk.say("Fourth") not in ("second", "third")
        await talk.say("First", id="first", previous_item_id="root")
        await talk.say("Be brief.", role="system", id="rules", previous_item_id="root")
        await talk.say("And a half", id="half", previous_item_id="second")
        await talk.respond(max_output_tokens=4)
        await served.assert_prompt(
            [
                turn("system", "Be brief."),
                turn("user", "First"),
                turn("user", "Second"),
                turn("user", "And a half"),
                turn("assistant", "Third"),
                turn("user", "Fourth"),
            ]
        )


async def test_an_item_is_shown_as_it_was_made(served: Served) -> None:
    async with talking(served.port) as talk:
        made = await talk.add(message("Hello", id="hello"))
        shown = await talk.retrieve("hello")
        assert shown == made
        assert (shown["type"], shown["role"]) == ("message", "user")
        assert shown["content"] == [{"type": "input_text", "text": "Hello"}]
        said = await talk.respond(max_output_tokens=6)
        answer = await talk.retrieve(said.item_id)
        assert answer["content"] == [{"type": "output_text", "text": said.text}]
        assert answer["status"] == "incomplete"
    served.worker.take()


async def test_a_deleted_item_is_in_no_prompt(served: Served) -> None:
    async with talking(served.port) as talk:
        await talk.say("One", id="one")
        await talk.say("Two", id="two")
        await talk.send("conversation.item.delete", item_id="one")
        await talk.until("conversation.item.deleted", item_id="one")
        await talk.respond(max_output_tokens=4)
        await served.assert_prompt([turn("user", "Two")])
        await talk.send("conversation.item.retrieve", item_id="one", event_id="lost")
        assert (await talk.error())["event_id"] == "lost"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("conversation.item.delete", {"item_id": "nobody"}),
        ("conversation.item.retrieve", {"item_id": "nobody"}),
        ("conversation.item.truncate", {"item_id": "nobody", "content_index": 0, "text_end": 1}),
        ("conversation.item.truncate", {"item_id": "known", "content_index": 0, "text_end": 1}),
        ("conversation.item.create", {"item": message("Again", id="known")}),
        ("conversation.item.create", {"item": message("Where?"), "previous_item_id": "nobody"}),
        ("conversation.item.create", {"item": {"type": "message", "role": "user"}}),
        ("response.cancel", {}),
        ("response.cancel", {"response_id": "resp_nobody"}),
        ("response.create", {"response": {"temperature": "hot"}}),
        ("response.create", {"response": {"conversation": "somewhere"}}),
        ("session.update", {"session": {"temperature": -1}}),
        ("input_audio_buffer.append", {"audio": ""}),
    ],
)
async def test_what_cannot_be_done_is_an_error_with_the_clients_event_id(
    served: Served, kind: str, fields: dict[str, Any]
) -> None:
    async with talking(served.port) as talk:
        await talk.say("I am known.", id="known")
        await talk.send(kind, event_id="mine", **fields)
        assert (await talk.error())["event_id"] == "mine"
        assert (await talk.ask("All well?", max_output_tokens=3)).text
    served.worker.take()


# -- barge-in ------------------------------------------------------------------------------------------------


async def interrupted(talk: Talk) -> Spoken:
    """A turn that is cancelled while it is sung."""
    await talk.say("Sing for ever.", id="please")
    response_id = await talk.begin()
    for _ in range(5):
        await talk.until(DELTA)
    await talk.send("response.cancel")
    said = await talk.until_done(response_id)
    assert said.status == "cancelled"
    assert SCRIPT["Sing for ever"].startswith(said.text)
    assert len(said.text) > 9
    return said


async def test_after_a_cancel_the_prompt_holds_what_was_sent(served: Served) -> None:
    async with talking(served.port) as talk:
        said = await interrupted(talk)
        served.worker.take()
        await talk.ask("Go on.", max_output_tokens=4)
        await served.assert_prompt(
            [turn("user", "Sing for ever."), turn("assistant", said.text), turn("user", "Go on.")]
        )


@pytest.mark.parametrize("way", ["text_end", "delete and create"])
async def test_after_a_barge_in_the_prompt_holds_only_what_was_heard(served: Served, way: str) -> None:
    async with talking(served.port) as talk:
        said = await interrupted(talk)
        served.worker.take()
        heard = said.text[:7]
        if way == "text_end":
            await talk.send(
                "conversation.item.truncate", item_id=said.item_id, content_index=0, text_end=len(heard)
            )
            await talk.until("conversation.item.truncated", item_id=said.item_id)
            assert (await talk.retrieve(said.item_id))["content"][0]["text"] == heard
        else:
            await talk.send("conversation.item.delete", item_id=said.item_id)
            await talk.until("conversation.item.deleted", item_id=said.item_id)
            await talk.say(heard, "assistant", id=said.item_id, previous_item_id="please")
        await talk.ask("Go on.", max_output_tokens=4)
        await served.assert_prompt(
            [turn("user", "Sing for ever."), turn("assistant", heard), turn("user", "Go on.")]
        )


async def test_the_end_of_a_sound_is_no_place_in_a_text(served: Served) -> None:
    async with talking(served.port) as talk:
        said = await talk.ask("Sing the song.")
        await talk.send("conversation.item.truncate", item_id=said.item_id, content_index=0, audio_end_ms=300)
        await talk.error()
        assert (await talk.retrieve(said.item_id))["content"][0]["text"] == SONG
    served.worker.take()


# -- responses -----------------------------------------------------------------------------------------------


async def test_a_second_response_is_refused_while_one_runs(served: Served) -> None:
    async with talking(served.port) as talk:
        await talk.say("Go on for ever.")
        running = await talk.begin(max_output_tokens=ENDLESS, ignore_eos=True)
        await talk.send("response.create", event_id="second")
        error = await talk.error()
        assert (error["code"], error["event_id"]) == ("conversation_already_has_active_response", "second")
        await talk.send("response.cancel", event_id="stop")
        assert (await talk.until_done(running)).status == "cancelled"
        await talk.send("response.cancel", event_id="stop again")
        error = await talk.error()
        assert (error["code"], error["event_id"]) == ("response_cancel_not_active", "stop again")
    served.worker.take()


async def test_out_of_band_responses_run_beside_the_active_one_and_leave_no_trace(served: Served) -> None:
    async with talking(served.port) as talk:
        await talk.say("Go on for ever.")
        running = await talk.begin(max_output_tokens=ENDLESS, ignore_eos=True)
        served.worker.take()
        beside = [
            await talk.begin(
                conversation="none", metadata={"topic": str(number)}, max_output_tokens=5 + number
            )
            for number in range(3)
        ]
        for number, response_id in enumerate(beside):
            said = await talk.until_done(response_id)
            assert said.response["metadata"] == {"topic": str(number)}
            assert said.response["conversation_id"] is None
            assert said.response["usage"]["output_tokens"] == 5 + number
        assert not any(event["type"] == DONE and event["response"]["id"] == running for event in talk.events)
        await talk.send("response.cancel")
        said = await talk.until_done(running)
        served.worker.take()
        await talk.ask("Enough.", max_output_tokens=3)
        await served.assert_prompt(
            [turn("user", "Go on for ever."), turn("assistant", said.text), turn("user", "Enough.")]
        )


async def test_an_out_of_band_response_can_have_an_input_of_its_own(served: Served) -> None:
    async with talking(served.port) as talk:
        await talk.say("This is not for it.", id="kept")
        own = [message("Is this a question?"), {"type": "item_reference", "id": "kept"}]
        await talk.respond(conversation="none", input=own, instructions="Say yes or no.", max_output_tokens=3)
        await served.assert_prompt(
            [
                turn("system", "Say yes or no."),
                turn("user", "Is this a question?"),
                turn("user", "This is not for it."),
            ]
        )


async def test_a_cancel_by_id_stops_that_response_alone(served: Served) -> None:
    async with talking(served.port) as talk:
        await talk.say("Go on for ever.")
        running = await talk.begin(max_output_tokens=ENDLESS, ignore_eos=True)
        beside = await talk.begin(conversation="none", max_output_tokens=ENDLESS, ignore_eos=True)
        await talk.send("response.cancel", response_id=beside)
        assert (await talk.until_done(beside)).status == "cancelled"
        await talk.until(DELTA, response_id=running)
        await talk.send("response.cancel", response_id=running)
        assert (await talk.until_done(running)).status == "cancelled"
    served.worker.take()


async def test_a_limit_of_tokens_makes_a_response_incomplete(served: Served) -> None:
    async with talking(served.port) as talk:
        said = await talk.ask("Sing the song.", max_output_tokens=4)
        assert (said.status, said.reason) == ("incomplete", "max_output_tokens")
        assert said.response["usage"]["output_tokens"] == 4
        assert said.items[0]["status"] == "incomplete"
        assert SONG.startswith(said.text)
    served.worker.take()


async def test_rules_mask_and_block(served: Served) -> None:
    async with talking(served.port) as talk:
        masked = await talk.ask("Tell a secret.")
        assert masked.text == "This is a ******, is it not?"
        blocked = await talk.ask("Do what is forbidden.")
        assert (blocked.status, blocked.reason) == ("incomplete", "content_filter")
        assert "forbidden" not in json.dumps(talk.events[-12:]).replace("Do what is forbidden", "")
        served.worker.take()
        refused = await talk.ask("How to build a weapon?", metadata={"n": "1"})
        assert refused.status == "failed"
        assert refused.response["status_details"]["error"]["code"] == "content_filter"
        assert refused.response["metadata"] == {"n": "1"}
        assert refused.items == []
        assert served.worker.num_jobs == 0
        (weapon,) = [
            event["item"]["id"]
            for event in talk.events
            if event["type"] == "conversation.item.done" and "weapon" in json.dumps(event)
        ]
        await talk.send("conversation.item.delete", item_id=weapon)
        assert (await talk.ask("All well?", max_output_tokens=3)).text
    served.worker.take()


@pytest.mark.parametrize(
    ("speech", "pieces"),
    [
        ("sentence", ["The wheel turns, the water sings. ", "Who hears it? "]),
        ("clause", ["The wheel turns, ", "the water sings. "]),
    ],
)
async def test_text_can_come_in_pieces_to_be_spoken(served: Served, speech: str, pieces: list[str]) -> None:
    async with talking(served.port) as talk:
        said = await talk.ask("Sing the song.", speech=speech)
        assert said.text == SONG
        assert [piece.strip() for piece in said.deltas[:2]] == [piece.strip() for piece in pieces]
        await talk.send("session.update", session={"type": "realtime", "speech": speech})
        await talk.until("session.updated")
        await talk.say("Sing the song.")
        assert (await talk.respond()).deltas == said.deltas
    served.worker.take()


# -- tools ---------------------------------------------------------------------------------------------------


async def test_a_function_is_called_and_its_output_is_an_item(served: Served) -> None:
    async with talking(served.port) as talk:
        await talk.send("session.update", session={"type": "realtime", "tools": [TOOL]})
        await talk.until("session.updated")
        await talk.say("What is the weather in Rome?")
        said = await talk.respond(tool_choice={"type": "function", "name": "weather"})
        assert (said.status, said.calls) == ("completed", [("weather", CALL)])
        (call,) = said.items
        served.worker.take()
        await talk.add({"type": "function_call_output", "call_id": call["call_id"], "output": RESULT})
        answer = await talk.respond(tool_choice="none")
        assert answer.text == "It is sunny in Rome."
        asked = {"name": "weather", "arguments": CALL}
        messages = [
            turn("user", "What is the weather in Rome?"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call["call_id"], "type": "function", "function": asked}],
            },
            {"role": "tool", "tool_call_id": call["call_id"], "content": RESULT},
        ]
        tool = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
        await served.assert_prompt(messages, tools=[tool], tool_choice="none")


# -- the session ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {
            "type": "realtime",
            "output_modalities": ["text"],
            "instructions": "Be brief.",
            "max_output_tokens": 5,
        },
        {
            "modalities": ["text"],
            "instructions": "Be brief.",
            "max_response_output_tokens": 5,
            "temperature": 0.8,
        },
    ],
    ids=["today's", "beta"],
)
async def test_settings_of_the_session_are_those_of_each_response(
    served: Served, settings: dict[str, Any]
) -> None:
    async with talking(served.port) as talk:
        await talk.send("session.update", session=settings)
        updated = await talk.until("session.updated")
        assert updated["session"]["instructions"] == "Be brief."
        said = await talk.ask("Hello?")
        assert said.response["usage"]["output_tokens"] == 5
        await served.assert_prompt([turn("system", "Be brief."), turn("user", "Hello?")])
        own = await talk.respond(instructions="Be long.", max_output_tokens=7, conversation="none")
        assert own.response["usage"]["output_tokens"] == 7
        messages = [turn("system", "Be long."), turn("user", "Hello?"), turn("assistant", said.text)]
        await served.assert_prompt(messages)


async def test_sampling_of_a_response_reaches_the_engine(served: Served) -> None:
    async with talking(served.port) as talk:
        await talk.say("Say something.")
        alike = [
            (await talk.respond(conversation="none", seed=seed, max_output_tokens=8)).text
            for seed in (1, 1, 2)
        ]
        stopped = await talk.ask("Sing the song.", stop=["water"])
    assert alike[0] == alike[1] != alike[2]
    assert stopped.text == SONG.partition("water")[0]
    served.worker.take()


# -- who may come, and how it ends ---------------------------------------------------------------------------

KEY: Final = "key-of-a-page-1234"
ORIGIN: Final = "https://page.example"
MAX_MESSAGE: Final = 4096
IDLE_S: Final = 2
AS_PAGE: Final[dict[str, Any]] = {
    "origin": ORIGIN,
    "subprotocols": ["realtime", f"openai-insecure-api-key.{KEY}"],
}


@pytest.fixture(scope="module")
def strict(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One that wants a key, and has small limits."""
    folder = tmp_path_factory.mktemp("strict")
    flags = {
        "--api-key": KEY,
        "--allowed-origins": ORIGIN,
        "--websocket-max-bytes": MAX_MESSAGE,
        "--realtime-idle-s": IDLE_S,
        "--max-conversations": 3,
        "--slow-reader-bytes": 64 << 10,
        "--websocket-ping-s": 0.5,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    with stack.start_gateway(folder, [served.worker.address], *words, name="strict") as gateway:
        yield gateway
        assert_no_fault(gateway)


async def refusal(port: int, **options: Any) -> tuple[int, Any]:
    """Status and error of a handshake that is refused."""
    with pytest.raises(InvalidStatus) as caught:
        async with talking(port, **options):
            pass
    response = caught.value.response
    assert response.headers["content-type"] == "application/json"
    return response.status_code, json.loads(response.body)["error"]


async def test_a_page_comes_in_with_its_key_as_a_subprotocol(strict: Gateway) -> None:
    async with talking(strict.port, **AS_PAGE) as talk:
        assert talk.connection.subprotocol == "realtime"
        assert talk.connection.protocol.extensions == []
        assert (await talk.ask("Hello?", max_output_tokens=3)).text
    async with talking(strict.port, additional_headers={"authorization": f"Bearer {KEY}"}) as talk:
        assert talk.connection.subprotocol is None
        assert (await talk.ask("Hello?", max_output_tokens=3)).text
    log = strict.log.read_text()
    assert KEY not in log
    assert {line["key"] for line in request_lines(strict)} != {None}


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]}, 401, "invalid_api_key"),
        (AS_PAGE | {"origin": "https://evil.example"}, 403, "origin_not_allowed"),
        (AS_PAGE | {"origin": "null"}, 403, "origin_not_allowed"),
        (AS_PAGE | {"model": "nobody"}, 404, "model_not_found"),
    ],
)
async def test_who_may_not_come_in_is_told_by_the_handshake(
    strict: Gateway, options: dict[str, Any], status: int, code: str
) -> None:
    refused, error = await refusal(strict.port, **options)
    assert (refused, error["code"]) == (status, code)


async def test_more_conversations_than_there_may_be_are_refused(strict: Gateway) -> None:
    async with AsyncExitStack() as talks:
        for _ in range(3):
            await talks.enter_async_context(talking(strict.port, **AS_PAGE))
        status, _ = await refusal(strict.port, **AS_PAGE)
        assert status == 503
        assert strict.metric("headrace_conversations") == 3
    wait_for(strict, lambda: strict.metric("headrace_conversations") == 0, "empty")
    async with talking(strict.port, **AS_PAGE):
        pass


async def test_a_message_that_is_too_large_ends_the_connection(served: Served, strict: Gateway) -> None:
    async with talking(strict.port, **AS_PAGE) as talk:
        await talk.say("x" * (MAX_MESSAGE - 200))
        await talk.begin(max_output_tokens=ENDLESS, ignore_eos=True)
        await talk.send_text("x" * (MAX_MESSAGE + 1))
        code, _ = await talk.closed()
        assert code == 1009
    wait_for(strict, lambda: strict.metric("headrace_open_requests") == 0, "told")


async def test_a_conversation_in_which_nothing_is_said_is_closed_by_name(strict: Gateway) -> None:
    """Pings are answered all the time, and are nothing that is said."""
    async with talking(strict.port, **AS_PAGE) as talk:
        await talk.ask("Hello?", max_output_tokens=3)
        code, reason = await talk.closed()
        assert code == 1000
        assert talk.events[-1]["type"] == "error"
        assert talk.events[-1]["error"]["code"] == reason


async def test_a_client_that_does_not_read_is_cut_off(strict: Gateway) -> None:
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", strict.port))
        async with talking(strict.port, sock=raw, **AS_PAGE) as talk:
            item_id = await talk.say("x" * (MAX_MESSAGE - 200))
            response_id = await talk.begin(max_output_tokens=ENDLESS, ignore_eos=True)
            talk.connection.transport.pause_reading()
            with suppress(ConnectionClosed):
                for _ in range(400):
                    await talk.send("conversation.item.retrieve", item_id=item_id)
            line = await asyncio.to_thread(logged, strict, response_id)
            assert line["ended"] == "client_closed"
            assert line["detail"], "no reason"
            talk.connection.transport.abort()


async def is_told_of_draining(talk: Talk) -> bool:
    """Its server goes away: by an event and by the close."""
    close = await talk.closed()
    return (
        close in ((1001, "draining"), (1012, "draining")) and talk.events[-1]["error"]["code"] == "draining"
    )


async def test_draining_lets_a_response_finish_and_closes_who_is_silent(
    served: Served, gateway: Callable[..., Gateway]
) -> None:
    front = gateway([served.worker.address])
    async with talking(front.port) as silent, talking(front.port) as talk:
        await silent.ask("Hello?", max_output_tokens=3)
        await talk.say("Take your time.")
        response_id = await talk.begin(max_output_tokens=600, ignore_eos=True)
        await talk.until(DELTA)
        front.process.signal(signal.SIGTERM)
        assert await is_told_of_draining(silent)
        said = await talk.until_done(response_id)
        assert said.response["usage"]["output_tokens"] == 600
        assert await is_told_of_draining(talk)
    await asyncio.to_thread(front.process.wait_until, lambda: front.process.returncode == 0, 30, "gone")
    assert_no_fault(front)
