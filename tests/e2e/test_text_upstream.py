"""A gateway in front of OpenAI-compatible servers: what clients get of them, whatever the server's dialect.

The servers are played (`tests/fake_openai_server.py`), so that each can fail when it should; a real one is in
`test_vllm_upstream.py`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, NotFoundError, OpenAI

from tests.e2e import asking
from tests.e2e.asking import COMPLETE, CUT, FAILED, REFUSED
from tests.e2e.realtime import talking
from tests.e2e.resting import assert_no_fault, logged, statuses, wait_for
from tests.fake_openai_server import DIALECTS, MODEL, Play, playing
from tests.fake_upstream import Asked, FakeUpstream
from tests.stack import Gateway, start_gateway
from tests.wire import connect

RULES = "- {id: hide, match: [secret], action: mask, replacement: '*'}\n"


@dataclass(slots=True)
class Stage:
    """A server that is played, and the gateway in front of it."""

    play: Play
    server: FakeUpstream
    gateway: Gateway

    def plays(self, **changes: Any) -> None:
        """From now on; what is not named is as at the start."""
        for name, value in {
            **{each.name: getattr(Play(), each.name) for each in fields(Play)},
            **changes,
        }.items():
            setattr(self.play, name, value)

    @property
    def last(self) -> Asked:
        """The last generation that it was asked for."""
        return [asked for asked in self.server.asked if asked.method == "POST"][-1]


@contextmanager
def in_thread(play: Play) -> Iterator[FakeUpstream]:
    """A loop of its own, for fixtures block theirs while processes start."""
    loop, started, made = asyncio.new_event_loop(), threading.Event(), []
    over = asyncio.Event()

    async def serve() -> None:
        async with playing(play) as server:
            made.append(server)
            started.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        yield made[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def module_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder, play = tmp_path_factory.mktemp("text"), Play()
    rules = folder / "rules.yaml"
    rules.write_text(RULES)
    with in_thread(play) as server:
        flags = ("--upstream", f"openai+{server.url}", "--upstream-api-key", "server-key")
        with start_gateway(folder, (), *flags, "--rules", str(rules), "--api-key", "k") as gateway:
            yield Stage(play, server, gateway)


@pytest.fixture
def stage(module_stage: Stage) -> Iterator[Stage]:
    module_stage.plays()
    yield module_stage
    assert_no_fault(module_stage.gateway)


@pytest.fixture
def client(stage: Stage) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stage.gateway.url}/v1", api_key="k", timeout=30.0, max_retries=0) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "my secret"}]
    return {"model": MODEL, "stream": True, "messages": messages, **fields}


async def ask(stage: Stage, **fields: Any) -> asking.Outcome:
    return await asking.ask(stage.gateway.port, chat(**fields), {"authorization": "Bearer k"})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
def test_the_openai_client_reads_every_dialect(
    stage: Stage, client: OpenAI, dialect: str, stream: bool
) -> None:
    """Content with a word that a rule hides, cut over events; usage; the server's finish."""
    stage.plays(dialect=dialect, content=("the se", "cr", "et!"), finish="length")
    messages: Any = [{"role": "user", "content": "my secret"}]
    if stream:
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        finishes = [
            choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason
        ]
        usage = chunks[-1].usage
    else:
        whole = client.chat.completions.create(model=MODEL, messages=messages)
        text, finishes = whole.choices[0].message.content or "", [whole.choices[0].finish_reason]
        usage = whole.usage
    assert text == "the ******!"
    assert finishes == ["length"]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)
    asked = stage.last
    assert asked.headers["authorization"] == "Bearer server-key"
    assert asked.body["messages"] == [{"role": "user", "content": "my ******"}]
    assert asked.body["stream"] is True


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp", "trtllm", "ollama"])
def test_reasoning_and_parallel_tool_calls_reach_the_client(
    stage: Stage, client: OpenAI, dialect: str
) -> None:
    calls = (("look", ('{"at"', ': "secret"}')), ("go", ('{"to": 1}',)))
    stage.plays(dialect=dialect, content=(), reasoning=("think ", "secret"), calls=calls)
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "go")
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], tools=tools
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    made = [
        (call.function.name, json.loads(call.function.arguments))  # type: ignore[union-attr]
        for call in choice.message.tool_calls or ()
    ]
    assert made == [("look", {"at": "******"}), ("go", {"to": 1})]
    assert choice.message.model_dump()["reasoning"] == "think ******"
    assert stage.last.body["tools"] == tools


@pytest.mark.parametrize(
    ("play", "kind", "code"),
    [
        ({"fault": "error"}, FAILED, "engine_failed"),
        ({"fault": "cut"}, FAILED, "worker_lost"),
        ({"fault": "breaks_off"}, FAILED, "worker_lost"),
        ({"fault": "no_done"}, COMPLETE, None),
        ({"fault": "no_usage"}, COMPLETE, None),
        ({"status": 400}, REFUSED, None),
        ({"status": 422}, REFUSED, None),
        ({"status": 429}, REFUSED, "queue_full"),
        ({"status": 401}, REFUSED, None),
        ({"status": 500}, REFUSED, None),
        ({"ignores_stream": True}, COMPLETE, None),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
async def test_each_fault_of_a_server_has_its_end(
    stage: Stage, play: dict[str, Any], kind: str, code: str | None
) -> None:
    wait_for(stage.gateway, lambda: statuses(stage.gateway)[0]["state"] == "ready", "ready")
    stage.plays(dialect="vllm", **play)
    outcome = await ask(stage)
    assert outcome.kind == kind, outcome
    if code is not None:
        assert outcome.code == code
    if code == "queue_full":  # for a moment it is not asked again

        async def is_asked_again() -> bool:
            stage.plays()
            return (await ask(stage)).kind == COMPLETE

        async with asyncio.timeout(20):
            while not await is_asked_again():  # noqa: ASYNC110 - the gateway has no event for this
                await asyncio.sleep(0.05)
    if kind == COMPLETE:
        assert outcome.text == "Hello!"


@pytest.mark.parametrize("when", ["before the first event", "between events"])
async def test_a_client_that_leaves_closes_the_servers_connection(stage: Stage, when: str) -> None:
    stage.plays(fault="hangs", num_before=0 if when == "before the first event" else 2)
    num_left, num_asked = stage.server.num_left, len(stage.server.asked)
    async with connect(stage.gateway.port) as wire:
        await wire.send(asking_bytes(stage))
        await until(lambda: len(posts(stage)) > 0 and len(stage.server.asked) > num_asked)
    await until(lambda: stage.server.num_left == num_left + 1)


def posts(stage: Stage) -> list[Asked]:
    return [asked for asked in stage.server.asked if asked.method == "POST"]


def asking_bytes(stage: Stage) -> bytes:
    body = json.dumps(chat()).encode()
    head = (
        f"POST {asking.CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def until(is_true: Callable[[], object], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not is_true():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.01)


async def test_connections_are_kept_and_a_stale_one_costs_nothing(stage: Stage) -> None:
    num = stage.server.num_connections
    for _ in range(5):
        assert (await ask(stage)).kind == COMPLETE
    assert stage.server.num_connections - num <= 2


async def test_a_conversation_over_websocket_with_a_server_of_text(stage: Stage) -> None:
    headers = {"authorization": "Bearer k"}
    async with talking(stage.gateway.port, MODEL, additional_headers=headers) as talk:
        first = await talk.ask("Hello?")
        assert first.text == "Hello!"
        stage.plays(content=("no ", "secret"))
        second = await talk.ask("And?")
        assert second.text == "no ******"
        assert second.response["usage"]["input_tokens"] == 7
    assert stage.last.body["messages"] == [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And?"},
    ]


def test_embeddings_pass_through_behind_the_gateways_own_key(stage: Stage, client: OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    assert answer.data[0].embedding == [0.5, -0.5]
    assert stage.last.headers["authorization"] == "Bearer server-key"
    with (
        OpenAI(base_url=f"{stage.gateway.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.embeddings.create(model=MODEL, input="x")
    with pytest.raises(NotFoundError):
        client.embeddings.create(model="another", input="x")


def test_what_rules_cannot_see_is_not_passed_through_under_rules(stage: Stage, client: OpenAI) -> None:
    num_asked = len(posts(stage))
    with pytest.raises(NotFoundError) as raised:
        client.post("/responses", body={"model": MODEL, "input": "my secret"}, cast_to=object)
    assert "content rules" in str(raised.value)
    assert len(posts(stage)) == num_asked


async def test_the_log_says_what_the_server_counted(stage: Stage) -> None:
    headers = {"authorization": "Bearer k", "x-request-id": "counted"}
    await asking.ask(stage.gateway.port, chat(), headers)
    line = logged(stage.gateway, "counted")
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (7, 4, 3)
    assert line["worker"] == f"openai+{stage.server.url}"
    assert "secret" not in stage.gateway.log.read_text()


async def test_a_server_that_knows_no_stream_options_is_asked_without_them(stage: Stage) -> None:
    """From then on, for as long as the gateway runs: the last test of this gateway."""
    stage.plays(refuses_stream_options=True)
    for _ in range(2):
        outcome = await ask(stage)
        assert (outcome.kind, outcome.text) == (COMPLETE, "Hello!")
    assert "stream_options" not in stage.last.body
    refused = [asked for asked in posts(stage) if "stream_options" in asked.body][-1]
    assert posts(stage).index(refused) == len(posts(stage)) - 3


def test_two_servers_share_the_load_and_one_that_is_gone_is_left_out(tmp_path: Path) -> None:
    with in_thread(Play()) as first, in_thread(Play()) as second:
        flags = ("--upstream", f"openai+{first.url}", "--upstream", f"openai+{second.url}")
        with start_gateway(tmp_path, (), *flags, "--upstream", "openai+http://127.0.0.1:9") as gateway:
            wait_for(
                gateway, lambda: [s["state"] for s in statuses(gateway)][:2] == ["ready", "ready"], "ready"
            )
            assert statuses(gateway)[2]["state"] == "connecting"
            bodies = [chat(messages=[{"role": "user", "content": f"{number}"}]) for number in range(16)]

            async def all_of() -> list[asking.Outcome]:
                return await asyncio.gather(*(asking.ask(gateway.port, body) for body in bodies))

            assert {outcome.kind for outcome in asyncio.run(all_of())} == {COMPLETE}
            counts = [len([a for a in server.asked if a.method == "POST"]) for server in (first, second)]
            assert sum(counts) == 16
            assert min(counts) >= 3, counts
            assert CUT not in counts
