"""Reasoning, tool calls and content of one answer: read by vLLM's parsers, filtered each by its own rules.

A scripted worker says what a Qwen3 model would say, token by token, and OpenAI's own client reads it. What is
forced on an engine, and needs no parser, is in `test_real_answers.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from tests import stack
from tests.components import need
from tests.e2e.asking import CHAT, MODEL
from tests.e2e.listening import Listener, Said, assert_without, said_in
from tests.e2e.resting import assert_no_fault, audit_lines, logged, wait_for
from tests.e2e.rule_oracle import Keyword, rules_file
from tests.stack import Gateway, Worker, fetch
from tests.tokenizers import tokenizer_folder
from tests.wire import connect

THOUGHT: Final = "\nFirst a secret, then the whisper.\n"
PLAIN: Final = f"<think>{THOUGHT}</think>\n\nA secret answer, no whisper."


def call(name: str, arguments: Any) -> str:
    """As models say it whose format is hermes."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


ROME: Final = {"city": "Rome", "notes": ["a secret \u00e9", {"deep": "no whisper"}]}
TWO_CALLS: Final = (
    f"<think>\nBoth.\n</think>\n\nI look.\n{call('weather', ROME)}\n{call('time', {'city': '北京'})}"
)
MAX_HOLD_S: Final = 0.5  # steps take 1 ms
RESULT: Final = "sunny, 31 degrees"
RULES: Final = [
    Keyword("thoughts", "secret", "mask", channels=("reasoning",)),
    Keyword("arguments", "rome", "redact", replacement='"R"', channels=("tool_arguments",)),
    Keyword("names", "weapon", "mask", channels=("tool_name",)),
    Keyword("all", "whisper", "redact", replacement="[W]"),
    Keyword("blocks", "forbidden", "block"),
]
SCRIPT: Final = {
    RESULT: f"<think>\nIt is hot.\n</think>\n\nIt is {RESULT}.",
    "Say it plainly": PLAIN,
    "Make two calls": TWO_CALLS,
    "Go round the loop": f"<think>\nI must ask.\n</think>\n\n{call('weather', {'city': 'Paris'})}",
    "Say the name": f"<think>To shop, whis</think>{call('weapon_shop', {'city': 'Paris'})}",
    "A forbidden thought": "<think>\nThis is forbidden, is it?\n</think>\n\nYes.",
    "A forbidden argument": f"Fine. {call('weather', {'city': 'a forbidden city'})}",
    "Say it at once": "Not one thought.",
    "It never ends": "<think>\nWhat if a secret",
    "A broken call": '<think>\n</think>Look: <tool_call>\n{"name": "weather", "why": "whisper, ',
    "A cut call": '<think>\n</think>Look: <tool_call>\n{"name": "weather", "arguments": {"a": "whisper, ',
    # The beginning of a denied word, before a call that takes longer than text may be held.
    "A long call": f"<think>Long.</think>Fine, whis{call('weather', {'city': 'Rome, ' * 600})}",
}
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time", "weapon_shop")
]


@dataclass(frozen=True, slots=True)
class Served:
    gateway: Gateway
    worker: Worker
    client: OpenAI
    tokenizer: Tokenizer

    async def streamed(self, request: dict[str, Any]) -> Listener:
        """Frame by frame; a word that may stand nowhere stands in none of them."""
        listener = Listener(request.get("n", 1))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with connect(self.gateway.port) as wire:
            assert (await wire.post(CHAT, request | options)).status == 200
            while frame := await wire.frame():
                listener.take(frame)
                if not frame.is_comment and not frame.is_done:
                    assert_without(["whisper", "forbidden", "<tool", "think>"], frame.raw, frame.data)
        assert listener.is_done
        return listener

    async def both(self, request: dict[str, Any]) -> tuple[Said, dict[str, Any]]:
        """Streamed and whole, which are equal: what was said, and the usage."""
        listener = await self.streamed(request)
        async with connect(self.gateway.port) as wire:
            assert (await wire.post(CHAT, request)).status == 200
            document = await wire.json()
        (whole,) = said_in(document)
        assert listener.said.texts == whole.texts
        usage = document["usage"]
        del usage["prompt_tokens_details"]  # the second finds the prompt in the cache
        assert listener.usage is not None
        assert listener.usage | usage == listener.usage
        return whole, usage

    def num_ids(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need("vllm")
    folder, tokenizer = tmp_path_factory.mktemp("channels"), tokenizer_folder("qwen3")
    script, rules = folder / "script.json", folder / "rules.yaml"
    script.write_text(json.dumps(SCRIPT))
    rules.write_text(rules_file(RULES))
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--reasoning-content")
    limits = ("--max-hold-s", str(MAX_HOLD_S))
    options = ("--script", str(script), "--reasoning-parser", "qwen3")
    with ExitStack() as started:
        worker = started.enter_context(stack.start_scripted(folder, tokenizer, *options))
        gateway = started.enter_context(
            stack.start_gateway(
                folder, [worker], *parsers, *limits, "--rules", str(rules), limit_s=stack.PARSERS_START_S
            )
        )
        client = OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=30.0, max_retries=0)
        started.enter_context(client)
        yield Served(gateway, worker, client, Tokenizer.from_file(str(tokenizer / "tokenizer.json")))
        wait_for(gateway, lambda: not worker.metric("headrace_link_jobs"), "idle")
        assert_no_fault(gateway)


def chat(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 400, **fields}


# -- reasoning -----------------------------------------------------------------------------------------------


async def test_reasoning_and_content_are_told_apart_and_have_rules_of_their_own(served: Served) -> None:
    said, usage = await served.both(chat("Say it plainly"))
    assert said.reasoning == "\nFirst a ******, then the [W].\n"
    assert said.content == "\n\nA secret answer, no [W]."
    assert said.finish == "stop"
    assert usage["completion_tokens"] == served.num_ids(PLAIN) + 1, "with the end token"
    assert usage["completion_tokens_details"] == {"reasoning_tokens": served.num_ids(THOUGHT)}


def test_the_openai_client_finds_reasoning_beside_the_content(served: Served) -> None:
    with served.client.chat.completions.create(**chat("Say it plainly"), stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    for name in ("reasoning", "reasoning_content"):
        thoughts = [getattr(delta, name) for delta in deltas if hasattr(delta, name)]
        assert "".join(thoughts) == "\nFirst a ******, then the [W].\n"
        assert len(thoughts) > 3, "reasoning in few pieces"
    assert not any(delta.content for delta in deltas if hasattr(delta, "reasoning"))
    message = served.client.chat.completions.create(**chat("Say it plainly")).choices[0].message
    assert message.reasoning == message.reasoning_content == "\nFirst a ******, then the [W].\n"


async def test_reasoning_that_is_not_wanted_is_counted_and_not_sent(served: Served) -> None:
    said, usage = await served.both(chat("Say it plainly", include_reasoning=False))
    assert said.reasoning == ""
    assert said.content == "\n\nA secret answer, no [W]."
    assert usage["completion_tokens_details"] == {"reasoning_tokens": served.num_ids(THOUGHT)}


async def test_an_answer_without_thoughts_is_content(served: Served) -> None:
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    said, usage = await served.both(chat("Say it at once", **switch))
    assert (said.reasoning, said.content) == ("", "Not one thought.")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_thoughts_that_never_end_are_cut_with_the_answer(served: Served) -> None:
    said, usage = await served.both(chat("It never ends", stop="secret"))
    assert (said.reasoning, said.content) == ("\nWhat if a ", "")
    assert said.finish == "stop"
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


# -- tools ---------------------------------------------------------------------------------------------------


async def test_parallel_calls_come_in_order_with_their_rules(served: Served) -> None:
    said, usage = await served.both(chat("Make two calls", tools=TOOLS))
    assert said.finish == "tool_calls"
    assert said.reasoning == "\nBoth.\n"
    assert said.content.strip() == "I look."
    assert [each.name for each in said.calls] == ["weather", "time"]
    first, second = (json.loads(each.arguments) for each in said.calls)
    assert first == {"city": '"R"', "notes": ["a secret é", {"deep": "no [W]"}]}
    assert second == {"city": "北京"}
    assert usage["completion_tokens"] == served.num_ids(TWO_CALLS) + 1


async def test_a_client_that_wants_no_parallel_calls_gets_the_first(served: Served) -> None:
    said, _ = await served.both(chat("Make two calls", tools=TOOLS, parallel_tool_calls=False))
    assert [each.name for each in said.calls] == ["weather"]
    assert said.finish == "tool_calls"


def test_the_openai_client_goes_round_a_tool_loop(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "Go round the loop"}]
    request: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "max_tokens": 200}
    with served.client.chat.completions.stream(messages=messages, **request) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    (made,) = choice.message.tool_calls
    assert made.type == "function"
    assert json.loads(made.function.arguments) == {"city": "Paris"}

    asked = {
        "id": made.id,
        "type": "function",
        "function": {"name": made.function.name, "arguments": made.function.arguments},
    }
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": made.id, "content": RESULT},
    ]
    choice = served.client.chat.completions.create(messages=messages, **request).choices[0]
    assert choice.finish_reason == "stop"
    assert (choice.message.content or "").strip() == f"It is {RESULT}."
    assert not choice.message.tool_calls


async def test_a_tool_name_has_rules_too(served: Served) -> None:
    said, _ = await served.both(chat("Say the name", tools=TOOLS))
    assert [each.name for each in said.calls] == ["******_shop"]


async def test_what_is_held_at_the_end_of_a_channel_leaves_before_the_next(served: Served) -> None:
    said = (await served.streamed(chat("Say the name", tools=TOOLS))).said
    assert said.reasoning == "To shop, whis"
    assert said.channels == ["reasoning", "tool_calls"]


@pytest.mark.parametrize("choice", ["none", None])
async def test_without_tools_a_call_is_text(served: Served, choice: str | None) -> None:
    more = {"tools": TOOLS, "tool_choice": choice} if choice else {}
    async with connect(served.gateway.port) as wire:
        assert (await wire.post(CHAT, chat("Say the name", **more))).status == 200
        (said,) = said_in(await wire.json())
    assert said.calls == []
    assert said.finish == "stop"
    assert "weapon_shop" in said.content


async def test_a_call_that_is_none_in_the_end_is_content_with_its_rules(served: Served) -> None:
    said, _ = await served.both(chat("A broken call", tools=TOOLS))
    assert said.calls == []
    assert said.content.startswith("Look: ")
    assert said.content.endswith('"[W], ')
    assert said.finish == "stop"


async def test_text_that_waits_while_a_parser_reads_a_call_is_not_held_for_too_long(served: Served) -> None:
    """No token that could decide it comes to its channel in that time."""
    listener = await served.streamed(chat("A long call", tools=TOOLS, max_tokens=3000))
    assert listener.usage is not None
    assert listener.usage["completion_tokens"] > MAX_HOLD_S * 1000 * 2, "the call is too short"
    assert listener.said.content == "Fine, whis"
    assert listener.said.finish == "tool_calls"
    (made,) = listener.said.calls
    assert json.loads(made.arguments) == {"city": '"R", ' * 600}


async def test_a_call_that_is_cut_off_stays_as_far_as_it_came_with_its_rules(served: Served) -> None:
    said, _ = await served.both(chat("A cut call", tools=TOOLS))
    assert [(each.name, each.arguments) for each in said.calls] == [("weather", '{"a": "[W], ')]
    assert said.content == "Look: "


async def test_calls_and_reasoning_of_two_choices_never_meet(served: Served) -> None:
    listener = await served.streamed(chat("Make two calls", tools=TOOLS, n=2))
    first, second = listener.choices
    assert first.texts[:3] == second.texts[:3]
    assert {each.id for each in first.calls}.isdisjoint(each.id for each in second.calls)


# -- blocks and audit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["thought", "argument"])
async def test_a_block_in_any_channel_ends_the_answer(served: Served, what: str) -> None:
    said, usage = await served.both(chat(f"A forbidden {what}", tools=TOOLS))
    assert said.finish == "content_filter"
    assert said.end is not None
    assert said.end["content_filter_results"] == {"blocked": True}
    assert usage["completion_tokens"] > 0
    if what == "thought":
        assert (said.reasoning, said.content) == ("\nThis is ", "")


async def test_hits_are_told_with_their_channel(served: Served) -> None:
    async with connect(served.gateway.port) as wire:
        await wire.post(CHAT, chat("Make two calls", tools=TOOLS), {"x-request-id": "told"})
        await wire.json()
    assert logged(served.gateway, "told")["rule_hits"] == 2
    told = {
        (line["rule"], line["channel"], line["direction"], line["action"])
        for line in audit_lines(served.gateway)
        if line["id"] == "told"
    }
    assert told == {
        ("arguments", "tool_arguments", "output", "redact"),
        ("all", "tool_arguments", "output", "redact"),
    }
    labels = 'action="redact",channel="tool_arguments",direction="output",rule="arguments"'
    assert f"headrace_rule_hits_total{{{labels}}}" in fetch(served.gateway.port, "/metrics")
    log = served.gateway.log.read_text()
    assert not any(word in log for word in ("secret", "whisper", "Rome", "北京", RESULT))
