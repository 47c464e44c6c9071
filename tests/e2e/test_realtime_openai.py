"""The `openai` client's realtime connection on the real engine: five turns with a cancel and two barge-ins.

Every prompt is compared, id for id, with that of a chat request of the same visible conversation; every event
is read by the client's own types. Then cancels where the engine itself says that it is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from gateway.settings import Text
from tests.e2e import prompts
from tests.e2e.realtime import DELTA, DONE, Talk, talking
from tests.e2e.recording import RecordingGateway, Run, recording_gateway
from tests.stack import Gateway, Worker

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MODEL: Final = "smollm2-135m-instruct"
LIMIT_S: Final = 90.0
HELD: Final = "Ok" * 40  # what the engine is made to say to a rule that waits for one more character
ENDLESS: Final[dict[str, Any]] = {"max_output_tokens": 4000, "temperature": 0, "ignore_eos": True}
SERVER_EVENT: Final[TypeAdapter[Any]] = TypeAdapter(RealtimeServerEvent)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded(
    engine_worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RecordingGateway]:
    """One that masks a word which is never complete, and holds what could become it without limit."""
    folder = tmp_path_factory.mktemp("realtime_openai")
    rules = folder / "words.txt"
    rules.write_text(HELD + "!\n")
    text = Text(rules=(str(rules),), max_hold_s=600)
    async with recording_gateway(engine_worker, folder / "cache", text=text) as started:
        yield started


# -- five turns ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Conversation:
    """What a user of the client has: the connection, and the chat as it stands on the page."""

    connection: AsyncRealtimeConnection
    gateway: RecordingGateway
    messages: list[dict[str, str]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    async def next(self) -> Any:
        async with asyncio.timeout(LIMIT_S):
            event = await self.connection.recv()
        assert event.type != "error", event
        SERVER_EVENT.validate_python(event.model_dump(exclude_unset=True))
        self.kinds.append(event.type)
        return event

    async def until(self, kind: str) -> Any:
        while (event := await self.next()).type != kind:
            pass
        return event

    async def ask(self, text: str, **response: Any) -> str:
        """A user's message and a response; the message's item id, as soon as it is there."""
        self.messages.append({"role": "user", "content": text})
        content: Any = [{"type": "input_text", "text": text}]
        await self.connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": content}
        )
        item_id: str = (await self.until("conversation.item.done")).item.id
        fields: Any = {"max_output_tokens": 12, "ignore_eos": "max_output_tokens" in response, **response}
        await self.connection.response.create(response=fields)
        return item_id

    async def answer(self) -> Any:
        """The item of a response, to its end."""
        response = (await self.until(DONE)).response
        (item,) = response.output
        assert response.status in ("completed", "incomplete", "cancelled")
        self.messages.append({"role": "assistant", "content": item.content[0].text})
        return item

    async def cancelled(self, num_deltas: int = 4) -> Any:
        """The item of a response that is cancelled after so many deltas."""
        for _ in range(num_deltas):
            await self.until(DELTA)
        await self.connection.response.cancel()
        item = await self.answer()
        assert item.status == "incomplete"
        return item

    def run(self) -> Run:
        """What the engine got for the one turn since the last call."""
        (run,) = self.gateway.take_runs()
        return run

    async def assert_stateless(self, run: Run, num_messages: int) -> None:
        """Its prompt is that of a chat request with the first so many messages."""
        body = {"model": MODEL, "messages": self.messages[:num_messages], "max_tokens": 1, "temperature": 0}
        answer = await self.gateway.ask("/v1/chat/completions", body, stream=False)
        assert run.prompt_ids == answer.run.prompt_ids
        self.gateway.take_runs()


@asynccontextmanager
async def conversing(gateway: RecordingGateway) -> AsyncIterator[Conversation]:
    base_url = f"http://127.0.0.1:{gateway.port}/v1"
    gateway.take_runs()
    async with (
        AsyncOpenAI(base_url=base_url, api_key="none", timeout=LIMIT_S) as client,
        client.realtime.connect(model=MODEL) as connection,
    ):
        talk = Conversation(connection, gateway)
        await talk.until("session.created")
        settings: Any = {"type": "realtime", "output_modalities": ["text"], "temperature": 0}
        await connection.session.update(session=settings)
        updated = await talk.until("session.updated")
        assert updated.session.output_modalities == ["text"]
        yield talk


async def test_five_turns_with_a_cancel_and_two_barge_ins(recorded: RecordingGateway) -> None:
    async with conversing(recorded) as talk:
        await talk.ask("What is the capital of France?")
        first = await talk.answer()
        assert "Paris" in first.content[0].text
        await talk.assert_stateless(talk.run(), 1)

        await talk.ask("Count from one to fifty.", max_output_tokens=200)
        await talk.cancelled()
        await talk.assert_stateless(talk.run(), 3)

        question = await talk.ask("Tell me a long story about a river.", max_output_tokens=200)
        item = await talk.cancelled(8)
        await talk.assert_stateless(talk.run(), 5)  # of what was sent before the cancel, all is in it
        heard = item.content[0].text[:9]
        await talk.connection.conversation.item.delete(item_id=item.id)
        await talk.until("conversation.item.deleted")
        content: Any = [{"type": "output_text", "text": heard}]
        await talk.connection.conversation.item.create(
            item={"type": "message", "role": "assistant", "content": content, "id": item.id},
            previous_item_id=question,
        )
        assert (await talk.until("conversation.item.done")).previous_item_id == question
        talk.messages[-1]["content"] = heard

        await talk.ask("And one about a mill.", max_output_tokens=200)
        item = await talk.cancelled(6)
        await talk.assert_stateless(talk.run(), 7)
        heard = item.content[0].text[:5]
        truncate: Any = {"type": "conversation.item.truncate", "item_id": item.id, "content_index": 0}
        await talk.connection.send(truncate | {"text_end": len(heard)})
        await talk.until("conversation.item.truncated")
        talk.messages[-1]["content"] = heard

        await talk.ask("What did you count?")
        last = await talk.answer()
        run = talk.run()
        assert last.content[0].text
        assert run.first is not None
        assert run.first.cached_tokens > 0, "the engine knows the turns before"
        await talk.assert_stateless(run, 9)
        assert talk.kinds.count(DONE) == 5


# The client's own way to connect, of which its WebSocket library warns.
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
async def test_the_sync_client_talks_and_its_answers_are_those_of_a_chat(engine_gateway: Gateway) -> None:
    await asyncio.to_thread(talk_in_sync, engine_gateway)


def talk_in_sync(engine_gateway: Gateway) -> None:
    client = OpenAI(base_url=f"{engine_gateway.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)
    text = "Name three colours."
    with client, client.realtime.connect(model=MODEL) as connection:
        item: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        connection.conversation.item.create(item=item)
        response: Any = {"max_output_tokens": 8, "temperature": 0, "metadata": {"of": "mine"}}
        connection.response.create(response=response)
        deltas = []
        for event in connection:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            elif event.type == "response.done":
                done = event.response
                break
        whole = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=8, temperature=0
        )
    assert "".join(deltas) == whole.choices[0].message.content
    assert len(deltas) > 3, "an answer in few pieces"
    assert done.metadata == {"of": "mine"}
    assert done.usage
    assert whole.usage
    assert (done.usage.input_tokens, done.usage.output_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


# -- cancels -------------------------------------------------------------------------------------------------


async def until_counts(worker: Worker, running: int, waiting: int = 0) -> None:
    """Until vLLM says so itself."""
    kinds = {"running": running, "waiting": waiting}

    def are_true() -> bool:
        return all(worker.metric(f"vllm:num_requests_{kind}") == kinds[kind] for kind in kinds)

    await until(worker, are_true, f"{running} running and {waiting} waiting requests")


async def until(worker: Worker, is_true: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(worker.process.wait_until, is_true, LIMIT_S, what)


@asynccontextmanager
async def engines_talk(gateway: RecordingGateway, worker: Worker) -> AsyncIterator[Talk]:
    """After it the engine has nothing to do."""
    async with talking(gateway.port, MODEL) as talk:
        yield talk
    await until_counts(worker, 0)


@pytest.fixture(params=["cancel", pytest.param("vanish", marks=pytest.mark.long)])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def end(talk: Talk, worker: Worker, response_id: str, way: str) -> None:
    """The engine is free at once, whatever the connection does then."""
    if way == "vanish":
        talk.vanish()
    else:
        await talk.send("response.cancel")
        said = await talk.until_done(response_id)
        assert said.status == "cancelled"
    await until_counts(worker, 0)


async def test_in_prefill(
    recorded: RecordingGateway, engine_worker: Worker, embedded_model: Path, way: str
) -> None:
    """After the first of two steps of a long prompt, which nothing in the cache shortens."""
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    async with engines_talk(recorded, engine_worker) as talk:
        await talk.say(prompts.long_text("english", tokenizer, seed=3003, num_tokens=3000))
        response_id = await talk.begin(**ENDLESS, cache_salt=f"realtime {way}")
        await until_counts(engine_worker, 1)
        await end(talk, engine_worker, response_id, way)
        assert not any(event["type"] == DELTA for event in talk.events)


async def test_in_decode(recorded: RecordingGateway, engine_worker: Worker, way: str) -> None:
    async with engines_talk(recorded, engine_worker) as talk:
        await talk.say("Hello")
        response_id = await talk.begin(**ENDLESS)
        for _ in range(4):
            await talk.until(DELTA)
        await until_counts(engine_worker, 1)
        await end(talk, engine_worker, response_id, way)


async def test_while_the_filter_holds_text(
    recorded: RecordingGateway, engine_worker: Worker, way: str
) -> None:
    """Tokens flow from the engine, and none of their text has left."""
    made = engine_worker.metric("vllm:generation_tokens_total")
    async with engines_talk(recorded, engine_worker) as talk:
        await talk.say("Say it.")
        response_id = await talk.begin(
            **ENDLESS | {"ignore_eos": False}, structured_outputs={"regex": f"({HELD})+"}
        )
        await until(
            engine_worker,
            lambda: engine_worker.metric("vllm:generation_tokens_total") > made + 8,
            "some tokens on",
        )
        await end(talk, engine_worker, response_id, way)
        assert not any(event["type"] == DELTA for event in talk.events)
