"""Answers that the real engine is made to give: JSON by `response_format`, and forced calls of tools.

With rules on words that it is known to put into the values. How a model calls tools in its own way is in
`test_channels.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jsonschema_rs
import openai
import pytest
from openai import OpenAI

from tests import stack
from tests.e2e.asking import CHAT
from tests.e2e.listening import Listener, Said, assert_without, said_in
from tests.e2e.resting import assert_no_fault, audit_lines
from tests.e2e.rule_oracle import Keyword, rules_file
from tests.stack import Gateway, Worker
from tests.wire import connect

pytestmark = pytest.mark.engine

MODEL: Final = "smollm2-135m-instruct"
LIMIT_S: Final = 90.0
PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "city": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "city", "age"],
    "additionalProperties": False,
}
WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TIME: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
PARAMETERS: Final = {"get_weather": WEATHER, "get_time": TIME}
TOOLS: Final[list[dict[str, Any]]] = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
NAMED: Final[dict[str, Any]] = {"type": "function", "function": {"name": "get_time"}}
AS_PERSON: Final = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def body(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 60, **fields}


DESCRIBE: Final = body("Describe a person who lives in Paris as JSON.", response_format=AS_PERSON)
ASK: Final = body("What is the weather in Paris?", tools=TOOLS)


@dataclass(frozen=True, slots=True)
class Answered:
    """Of one choice, streamed or whole."""

    said: Said
    usage: dict[str, Any]


async def ask(gateway: Gateway, request: Mapping[str, Any], stream: bool, denied: list[str]) -> Answered:
    """One answer in which none of these words may stand in any field."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with connect(gateway.port) as wire:
        head = await wire.post(CHAT, {**request, **options})
        assert head.status == 200, await wire.body()
        if not stream:
            raw = await wire.body()
            document = json.loads(raw)
            assert_without(denied, raw, document)
            return Answered(said_in(document)[0], document["usage"])
        frames = await wire.frames()
    listener = Listener().take_all(frames)
    for frame in frames:
        if not frame.is_comment and not frame.is_done:
            assert_without(denied, frame.raw, frame.data)
    said = listener.said
    spelled = ["".join(entry["token"] for entry in said.logprobs)]
    calls = [(call.name, call.arguments) for call in said.calls]
    assert_without(denied, b"", [said.content, said.reasoning, *map(list, calls), *spelled])
    assert listener.is_done
    assert listener.usage is not None
    return Answered(said, listener.usage)


async def both(gateway: Gateway, request: Mapping[str, Any], *denied: str) -> Said:
    """Streamed and whole, which are equal."""
    streamed, whole = [await ask(gateway, request, stream, list(denied)) for stream in (True, False)]
    assert streamed.said.texts == whole.said.texts
    assert streamed.usage["completion_tokens"] == whole.usage["completion_tokens"]
    return streamed.said


@dataclass(frozen=True, slots=True)
class Known:
    """What the engine says without rules."""

    person: dict[str, Any]
    call: dict[str, Any]


@pytest.fixture(scope="module")
def known(engine_gateway: Gateway) -> Known:
    return asyncio.run(_known(engine_gateway))


async def _known(gateway: Gateway) -> Known:
    for request in (DESCRIBE, ASK | {"tool_choice": "required"}):  # from here on the prefix cache has them
        await ask(gateway, request | {"max_tokens": 1}, False, [])
    person = (await ask(gateway, DESCRIBE, False, [])).said
    (call,) = (await ask(gateway, ASK | {"tool_choice": "required"}, False, [])).said.calls
    return Known(json.loads(person.content), json.loads(call.arguments))


@pytest.fixture(scope="module")
def serving(
    engine_worker: Worker, known: Known, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """It masks the person's name and age, and redacts the cities, with a quote in the replacement."""
    folder = tmp_path_factory.mktemp("real_answers")
    person, call = known.person, known.call
    rules = [
        Keyword("name", person["name"].lower(), "mask"),
        Keyword("age", str(person["age"]), "mask", channels=("content",)),
        Keyword("called", call["city"].lower(), "redact", replacement='a "city"'),
    ]
    if person["city"] != call["city"]:
        rules.append(Keyword("city", person["city"].lower(), "redact", replacement='a "city"'))
    path = folder / "rules.yaml"
    path.write_text(rules_file(rules))
    with stack.start_gateway(folder, [engine_worker], "--rules", str(path)) as gateway:
        yield gateway
        assert_no_fault(gateway)


@pytest.fixture(scope="module")
def client(engine_gateway: Gateway) -> Iterator[OpenAI]:
    """Of the gateway without rules."""
    url = f"{engine_gateway.url}/v1"
    with OpenAI(base_url=url, api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        yield client


# -- JSON ----------------------------------------------------------------------------------------------------


async def test_json_whose_values_are_rewritten_is_still_json(serving: Gateway, known: Known) -> None:
    name, city = known.person["name"], known.person["city"]
    request = DESCRIBE | {"logprobs": True, "top_logprobs": 2}
    said = await both(serving, request, name.lower(), city.lower())
    assert json.loads(said.content) == {"name": "*" * len(name), "city": 'a "city"', "age": "**"}
    assert said.finish == "stop"
    assert said.logprobs


async def test_json_that_keeps_its_schema_passes_the_check(engine_gateway: Gateway, known: Known) -> None:
    said = (await ask(engine_gateway, DESCRIBE, True, [])).said
    assert json.loads(said.content) == known.person
    assert said.end is not None
    assert said.finish == "stop"
    assert "format_results" not in said.end


async def test_a_stop_string_may_cut_json(serving: Gateway, known: Known) -> None:
    said = await both(serving, DESCRIBE | {"stop": ['"age']}, known.person["name"].lower())
    assert said.finish == "stop"
    assert said.end is not None
    assert said.end["stop_reason"] == '"age'
    assert said.content.rstrip().endswith(",")
    assert json.loads(said.content.rstrip()[:-1] + "}").keys() <= PERSON["properties"].keys()


async def test_any_object_is_enforced_and_may_be_cut_by_its_length(serving: Gateway) -> None:
    request = body("Describe a person as JSON.", response_format={"type": "json_object"}, max_tokens=24)
    said = await both(serving, request)
    assert said.content.startswith("{")
    assert said.finish in ("length", "stop")


# -- tools ---------------------------------------------------------------------------------------------------


def assert_calls(said: Said, names: set[str]) -> None:
    """At least one, in OpenAI's shape, of these tools and with arguments of their parameters."""
    assert said.finish == "tool_calls"
    assert said.calls
    assert said.content == said.reasoning == ""
    for call in said.calls:
        assert call.id.startswith("call_")
        assert call.name in names
        assert jsonschema_rs.is_valid(PARAMETERS[call.name], json.loads(call.arguments))


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_forced_calls_obey_the_parameters(engine_gateway: Gateway, choice: Any) -> None:
    said = await both(engine_gateway, ASK | {"tool_choice": choice, "parallel_tool_calls": False})
    assert_calls(said, set(PARAMETERS) if choice == "required" else {"get_time"})
    assert len(said.calls) == 1


async def test_arguments_that_are_rewritten_are_still_json(serving: Gateway, known: Known) -> None:
    said = await both(serving, ASK | {"tool_choice": "required"}, known.call["city"].lower())
    assert_calls(said, set(PARAMETERS))
    assert json.loads(said.calls[0].arguments) == known.call | {"city": 'a "city"'}
    assert ("called", "tool_arguments") in {(line["rule"], line["channel"]) for line in audit_lines(serving)}


async def test_a_forced_call_that_is_cut_is_no_call_that_is_complete(engine_gateway: Gateway) -> None:
    said = await both(engine_gateway, ASK | {"tool_choice": NAMED, "max_tokens": 4})
    assert said.finish == "length"
    (call,) = said.calls
    assert call.name == "get_time"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)


def test_the_openai_client_reads_forced_calls(client: OpenAI) -> None:
    request: dict[str, Any] = ASK | {"tool_choice": "required"}
    (choice,) = client.chat.completions.create(**request).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    with client.chat.completions.stream(**request) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls
    pieces = [
        event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"
    ]
    assert len(pieces) > 3, "arguments in few pieces"
    whole, streamed = choice.message.tool_calls[0], final.message.tool_calls[0]
    assert whole.type == streamed.type == "function"
    assert "".join(pieces) == streamed.function.arguments == whole.function.arguments
    assert streamed.function.name == whole.function.name


@pytest.mark.parametrize("more", [{}, {"tool_choice": "auto"}])
def test_a_model_without_a_parser_may_not_choose(client: OpenAI, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK | more)
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_field")
    (choice,) = client.chat.completions.create(**ASK | {"tool_choice": "none", "max_tokens": 4}).choices
    assert choice.message.content
    assert not choice.message.tool_calls
