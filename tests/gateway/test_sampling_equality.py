"""The engine gets the sampling parameters that vLLM's own server would give it for the same body.

Ours go the whole way: body, schema, assembly over the model's defaults, the link's frame, the worker's
`SamplingParams`. Left out are the fields that are ours by design: stop strings and special tokens, which the
gateway handles (compared with what the schema hands on), and how output is delivered.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import random
import warnings
from typing import Any

import jsonschema
import pytest

from backend import link
from backend.vllm_request import sampling_params
from gateway.openai_schema import parse_chat, parse_completion
from pipeline.assembly import GenerationDefaults, assemble
from pipeline.errors import InvalidRequest
from pipeline.tool_choice import forced_schema
from pipeline.values import ModelInfo
from tests.components import need
from tests.gateway.bodies import CHAT, COMPLETION, FIELDS, SCHEMA, encode, random_fields
from tests.pipeline.called_tools import BAD, EXTRA, GOOD, REQUIRED, TOOLS, WORDS, request, tool

NOT_COMPARED = {
    "n",  # a job is one choice
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "detokenize",
    "output_kind",
    "output_text_buffer_length",
    "skip_clone",
}
MAX_TOKENS = 32
VOCAB_SIZE = 2**31
DEFAULTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
    {"repetition_penalty": 1.05, "temperature": 0.7, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.0},
    {"stop_token_ids": [9, 10]},
]
TABLE: list[dict[str, Any]] = [
    {},
    FIELDS,
    {"temperature": 0},
    {"temperature": 0, "top_p": 0.5, "top_k": 5, "min_p": 0.1},
    {"temperature": 1e-3},
    {"n": 3, "seed": 5, "temperature": 1},
    {"n": 2, "seed": -1, "temperature": 1},
    {"stop_token_ids": [10, 1]},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"structured_outputs": {"json": "{}"}, "response_format": {"type": "text"}},
    {
        "structured_outputs": {"json": {}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    {"structured_outputs": {"grammar": 'root ::= "a"'}},
]


@pytest.fixture(scope="module")
def vllm_requests() -> tuple[Any, Any]:
    """vLLM's own request classes, chat and completion. The import takes about 10 s."""
    need("vllm")
    with warnings.catch_warnings(action="ignore"):  # torch's own, at import
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return ChatCompletionRequest, CompletionRequest


def engine_params(request: Any, defaults: dict[str, Any], index: int) -> dict[str, Any]:
    """What reaches the engine for choice `index`."""
    model = ModelInfo("m", 4096, 16, defaults, "f")
    calls = assemble(request, [memoryview(bytes(8))], model, GenerationDefaults(max_tokens=MAX_TOKENS))
    sampling = {**calls[index].sampling, "max_tokens": calls[index].max_tokens}
    frame = link.encode(link.Submit(0, 1, b"", sampling))
    read = link.decode(link.SUBMIT, bytes(frame[link.HEADER_BYTES :]))
    return comparable(sampling_params(read.sampling, VOCAB_SIZE))


def comparable(params: Any) -> dict[str, Any]:
    fields = {name: getattr(params, name) for name in params.__struct_fields__ if name not in NOT_COMPARED}
    return {name: plain(value) for name, value in fields.items()}


def plain(value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def server_params(request_class: Any, body: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """What vLLM's server makes of the body."""
    request = request_class(**copy.deepcopy(body))
    max_tokens = body.get("max_tokens")
    if max_tokens is None:
        max_tokens = MAX_TOKENS if "messages" in body else request.max_tokens
    return request.to_sampling_params(max_tokens, copy.deepcopy(defaults))


def check_equal(request_class: Any, parse: Any, body: dict[str, Any], defaults: dict[str, Any]) -> None:
    theirs = server_params(request_class, body, defaults)
    request = parse(encode(body))
    generation = request.generation
    assert generation.n == theirs.n
    for index in range(theirs.n):  # the engine gives choice i the seed + i
        expected = comparable(theirs)
        if theirs.seed is not None:
            expected["seed"] = theirs.seed + index
        assert engine_params(request, defaults, index) == expected
    assert list(generation.stop) == list(dict.fromkeys(theirs.stop))
    assert generation.include_stop_str_in_output == theirs.include_stop_str_in_output
    assert generation.skip_special_tokens == theirs.skip_special_tokens


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_table_of_bodies_gives_vllms_parameters(
    vllm_requests: tuple[Any, Any], defaults: dict[str, Any]
) -> None:
    for fields in TABLE:
        if fields.get("n") and defaults.get("temperature") == 0.0 and "temperature" not in fields:
            continue
        for logprobs in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 4}):
            check_equal(vllm_requests[0], parse_chat, CHAT | fields | logprobs, defaults)
        for number in (None, 0, 3):
            check_equal(
                vllm_requests[1], parse_completion, COMPLETION | fields | {"logprobs": number}, defaults
            )


def test_random_bodies_give_vllms_parameters(vllm_requests: tuple[Any, Any]) -> None:
    rng = random.Random(77)
    for _ in range(400):
        fields = random_fields(rng) | {"max_tokens": rng.choice([16, 20])}
        defaults = rng.choice(DEFAULTS)
        check_equal(vllm_requests[0], parse_chat, CHAT | fields, defaults)
        check_equal(vllm_requests[1], parse_completion, COMPLETION | fields, defaults)


def test_what_vllm_refuses_is_refused_before_it(vllm_requests: tuple[Any, Any]) -> None:
    """Bodies with one value out of range: a refusal by vLLM's server is a 400 here too."""
    values = [
        -3,
        -2,
        -1,
        -0.1,
        0,
        0.5,
        1,
        1.1,
        2,
        2.1,
        5,
        17,
        2**31,
        2**63,
        "x",
        "",
        [],
        [""],
        ["x"] * 5,
        [-1],
        {},
    ]
    names = [*sorted(FIELDS.keys() - {"vllm_xargs"}), "n", "max_tokens", "priority", "cache_salt"]
    num_refused = 0
    for request_class, parse, base in (
        (vllm_requests[0], parse_chat, CHAT),
        (vllm_requests[1], parse_completion, COMPLETION),
    ):
        for name, value in itertools.product(names, values):
            if is_refused(request_class, base | {name: value}):
                num_refused += 1
                with pytest.raises(InvalidRequest):
                    parse(encode(base | {name: value}))
    assert num_refused > 200


def is_refused(request_class: Any, body: dict[str, Any]) -> bool:
    try:
        server_params(request_class, body, {})
    except Exception:  # pydantic's, vLLM's own, or an OverflowError that would be a 500 there
        return True
    return False


# -- tool choice ---------------------------------------------------------------------------------------

CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "words"}}, "auto", "none", None]


def test_the_grammar_of_the_engine_takes_the_calls_of_the_schema(vllm_requests: tuple[Any, Any]) -> None:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string as takes

    def grammar(**fields: Any) -> Any:
        schema = forced_schema(request(REQUIRED, *TOOLS, **fields))
        return xgrammar.Grammar.from_json_schema(json.dumps(schema))

    for calls in GOOD:
        if "enum" not in calls[0]["parameters"]:  # of an object in an enum it knows one spelling only
            assert takes(grammar(), json.dumps(calls)), calls
    for calls in BAD:
        assert not takes(grammar(), json.dumps(calls)), calls
    two = json.dumps([*GOOD[0], *GOOD[4]])
    assert takes(grammar(), two)
    assert takes(grammar(parallel_tool_calls=False), json.dumps(GOOD[4]))
    assert not takes(grammar(parallel_tool_calls=False), two)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("parallel", [None, True, False])
def test_forced_calls_are_those_of_vllm(
    vllm_requests: tuple[Any, Any], choice: Any, parallel: bool | None
) -> None:
    """Its schema joins the definitions of all tools, so that no two may have one of the same name."""
    from vllm.tool_parsers.utils import get_json_schema_from_tools

    body = CHAT | {"tools": [tool("now"), tool("words", WORDS), tool("empty", {})], "tool_choice": choice}
    body |= {} if parallel is None else {"parallel_tool_calls": parallel}
    given = vllm_requests[0](**copy.deepcopy(body))
    schema = get_json_schema_from_tools(given.tool_choice, given.tools, given.parallel_tool_calls)
    own = forced_schema(parse_chat(encode(body)))
    if choice != "required":
        assert own == schema
        return
    ours, theirs = jsonschema.Draft202012Validator(own), jsonschema.Draft202012Validator(schema)
    for calls in [GOOD[4], GOOD[5], [*GOOD[4], *GOOD[5]], [{"name": "empty", "parameters": {}}], *BAD]:
        if calls != EXTRA:  # which its grammar refuses, too
            assert ours.is_valid(calls) == theirs.is_valid(calls), calls


def test_a_tool_choice_that_vllm_refuses_is_refused(vllm_requests: tuple[Any, Any]) -> None:
    named: list[Any] = [{"function": value} for value in ({}, "words", None, {"name": 1}, {"name": ""})]
    choices = [*CHOICES, *named, "words", "", 3, True, [], {}, {"function": {"name": "later"}}]
    choices += [{"type": kind, "function": {"name": "words"}} for kind in ("function", "tool", None)]
    refused = []
    for choice, tools in itertools.product(choices, ([tool("words", WORDS)], None)):
        body = CHAT | {"tool_choice": choice, "tools": tools}
        if is_refused(vllm_requests[0], body):
            refused.append(choice)
            with pytest.raises(InvalidRequest) as caught:
                parse_chat(encode(body))
            assert str(caught.value.param).startswith("tool_choice")
    assert len(refused) > 20
