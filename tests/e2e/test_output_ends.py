"""How an answer ends that goes wrong: its engine is killed while text is held, or it breaks its format.

Scripted workers, which ignore structured outputs and die when they are told to.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests import stack
from tests.e2e.asking import CHAT, MODEL
from tests.e2e.listening import Listener, said_in
from tests.e2e.resting import assert_no_fault, audit_lines, enter_all, logged, wait_for
from tests.stack import Gateway, Worker
from tests.wire import connect

StartWorker = Callable[..., Worker]
StartGateway = Callable[..., Gateway]


def chat(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 200, **fields}


async def stream(gateway: Gateway, body: dict[str, Any], request_id: str = "-", **more: Any) -> Listener:
    """To its end."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    listener = Listener(body.get("n", 1))
    async with connect(gateway.port) as wire:
        assert (await wire.post(CHAT, body | options | more, {"x-request-id": request_id})).status == 200
        return listener.take_all(await wire.frames())


# -- the engine is killed ------------------------------------------------------------------------------------

OPENING: Final = "Well then: "
NUM_STARS: Final = 60
LONG_WORD: Final = "star" * NUM_STARS  # no token of it decides anything before its end
NUM_SAID: Final = 40  # tokens that come before the engine goes silent


@pytest.mark.parametrize(("fail", "n"), [("closed", 1), ("closed", 2), ("open", 2)])
async def test_held_text_leaves_a_lost_engine_only_by_rules_that_fail_open(
    scripted_worker: StartWorker, gateway: StartGateway, tmp_path: Path, fail: str, n: int
) -> None:
    script, rules = tmp_path / "script.json", tmp_path / "rules.yaml"
    script.write_text(json.dumps([OPENING + LONG_WORD]))
    rules.write_text(json.dumps([{"id": "stars", "match": [LONG_WORD], "action": "mask", "fail": fail}]))
    worker = scripted_worker("--script", str(script), "--stall-after-tokens", str(NUM_SAID * n))
    started = gateway([worker], "--rules", str(rules))
    listener = Listener(n)
    async with connect(started.port) as wire:
        body = chat("Hold it", stream=True, n=n)
        assert (await wire.post(CHAT, body, {"x-request-id": "held"})).status == 200
        while not all(said.content == OPENING for said in listener.choices):
            frame = await wire.frame()
            assert frame is not None
            listener.take(frame)
        name = "headrace_time_between_tokens_seconds_count"
        most = (NUM_SAID - 5) * n  # the step in which the engine goes silent is lost
        await asyncio.to_thread(wait_for, started, lambda: started.metric(name) > most, "holding")
        worker.process.signal(signal.SIGKILL)
        listener.take_all(await wire.frames())

    assert listener.error is not None
    assert listener.error["code"] == "worker_lost"
    assert not listener.is_done
    for said in listener.choices:
        assert said.finish is None
        if fail == "closed":
            assert said.content == OPENING
        else:
            held = said.content.removeprefix(OPENING)
            assert held
            assert LONG_WORD.startswith(held)
    line = await asyncio.to_thread(logged, started, "held")
    assert line["ended"] == "worker_lost"
    if fail == "closed":
        assert line["undecided_characters"] > (NUM_SAID - 10) * n
    assert "star" not in started.log.read_text()
    wait_for(started, lambda: not started.metric("headrace_open_requests"), "at rest")
    assert_no_fault(started)


async def test_a_whole_answer_of_a_lost_engine_says_nothing(
    scripted_worker: StartWorker, gateway: StartGateway, tmp_path: Path
) -> None:
    script, rules = tmp_path / "script.json", tmp_path / "rules.yaml"
    script.write_text(json.dumps([OPENING + LONG_WORD]))
    rules.write_text(json.dumps([{"id": "stars", "match": [LONG_WORD], "action": "mask", "fail": "open"}]))
    worker = scripted_worker("--script", str(script), "--die-after-tokens", str(NUM_SAID))
    started = gateway([worker], "--rules", str(rules))
    async with connect(started.port) as wire:
        head = await wire.post(CHAT, chat("Hold it"))
        document = await wire.json()
    assert head.status == 502
    assert document.keys() == {"error"}
    assert "star" not in json.dumps(document)
    worker.process.wait_until(lambda: worker.process.returncode is not None, stack.START_S, "dead")


# -- JSON that is none ---------------------------------------------------------------------------------------

GOOD: Final = '{"name": "Ann", "age": 7}'
TOO_LATE: Final = '{"name": "Ann", "age": "whisper"}'
NO_JSON: Final = '{"name": "Ann", whisper}'
CUT: Final = '{"name": "Ann'
AFTER_IT: Final = GOOD + " That was all."
SCRIPT: Final = {"good": GOOD, "too late": TOO_LATE, "no json": NO_JSON, "cut": CUT, "more": AFTER_IT}
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
AS_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
AS_OBJECT: Final = {"type": "json_object"}
# What leaves of each before the problem is known, and the kind of format that sees it.
BAD: Final = [
    ("too late", AS_SCHEMA, '{"name": "***", "age": "[W]"}'),
    ("no json", AS_SCHEMA, '{"name": "***", '),
    ("no json", AS_OBJECT, '{"name": "***", '),
    ("cut", AS_OBJECT, '{"name": "***'),
    ("more", AS_OBJECT, '{"name": "***", "age": 7} '),
]


@pytest.fixture(scope="module")
def strict_and_lenient(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Gateway]]:
    """One gateway ends what breaks its format with an error, the other marks it. Both have rules."""
    folder = tmp_path_factory.mktemp("formats")
    script, rules = folder / "script.json", folder / "rules.yaml"
    script.write_text(json.dumps(SCRIPT))
    rules.write_text(
        json.dumps(
            [
                {"id": "name", "match": ["Ann"], "action": "mask"},
                {"id": "w", "match": ["whisper"], "action": "redact", "replacement": "[W]"},
            ]
        )
    )
    with ExitStack() as running:
        worker = running.enter_context(stack.start_scripted(folder, embedded_model, "--script", str(script)))
        flags = ("--rules", str(rules))
        starting = [
            stack.start_gateway(folder, [worker], *flags, "--format-policy", policy, name=policy)
            for policy in ("error", "flag")
        ]
        yield (gateways := enter_all(running, starting))
        for each in gateways:
            wait_for(each, lambda: not worker.metric("headrace_link_jobs"), "idle")
            assert_no_fault(each)


@pytest.mark.parametrize("form", [AS_SCHEMA, AS_OBJECT], ids=["schema", "object"])
async def test_json_that_is_right_passes_rewritten(
    strict_and_lenient: list[Gateway], form: dict[str, Any]
) -> None:
    for each in strict_and_lenient:
        listener = await stream(each, chat("good", response_format=form))
        assert json.loads(listener.said.content) == {"name": "***", "age": 7}
        assert listener.said.end is not None
        assert listener.said.finish == "stop"
        assert "format_results" not in listener.said.end


@pytest.mark.parametrize(("what", "form", "before"), BAD)
async def test_a_broken_format_ends_with_a_named_error(
    strict_and_lenient: list[Gateway], what: str, form: dict[str, Any], before: str
) -> None:
    strict = strict_and_lenient[0]
    listener = await stream(strict, chat(what, response_format=form), f"strict-{what}")
    assert listener.error is not None
    assert (listener.error["type"], listener.error["code"]) == ("engine_error", "invalid_answer")
    assert "response_format" in listener.error["message"]
    assert "whisper" not in listener.error["message"]
    assert not listener.is_done
    assert listener.said.content == before
    async with connect(strict.port) as wire:
        head = await wire.post(CHAT, chat(what, response_format=form))
        document = await wire.json()
    assert head.status == 502
    assert document["error"]["code"] == "invalid_answer"
    assert "whisper" not in strict.log.read_text()


@pytest.mark.parametrize(("what", "form", "before"), BAD)
async def test_a_broken_format_is_marked_where_the_settings_say_so(
    strict_and_lenient: list[Gateway], what: str, form: dict[str, Any], before: str
) -> None:
    lenient = strict_and_lenient[1]
    listener = await stream(lenient, chat(what, response_format=form))
    said = listener.said
    assert said.end is not None
    assert listener.is_done
    assert said.finish == "stop"
    assert said.content.startswith(before)
    assert "whisper" not in said.content
    results = said.end["format_results"]
    assert results["valid"] is False
    assert results["problem"]
    assert "whisper" not in json.dumps(results)
    async with connect(lenient.port) as wire:
        await wire.post(CHAT, chat(what, response_format=form))
        (whole,) = said_in(await wire.json())
    assert whole.texts == said.texts


async def test_an_answer_that_is_cut_short_need_not_be_complete(strict_and_lenient: list[Gateway]) -> None:
    for more in ({"max_tokens": 5}, {"stop": '"age'}):
        listener = await stream(strict_and_lenient[0], chat("good", response_format=AS_SCHEMA, **more))
        assert listener.is_done
        assert listener.said.finish in ("length", "stop")
        assert listener.said.content.startswith('{"name": "')
    assert audit_lines(strict_and_lenient[0])
