"""Request bodies for the schema's tests: a minimal one of each kind, and changes to it."""

from __future__ import annotations

import json
import random
from typing import Any

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def chat(**fields: Any) -> bytes:
    return encode(CHAT | fields)


def completion(**fields: Any) -> bytes:
    return encode(COMPLETION | fields)


# A value for every sampling field, each different from every default.
FIELDS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "seed": 42,
    "stop": ["END", "\n\n"],
    "stop_token_ids": [3, 4, 3],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "logit_bias": {"5": 200.0, "6": -1.5},
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["ugly", "bad", "ugly"],
    "thinking_token_budget": 11,
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3},
    "watermarking": False,
    "vllm_xargs": {"a": 1, "b": "x", "c": [1, 2.5, "y"]},
    "structured_outputs": {"regex": "[a-z]+", "whitespace_pattern": " "},
}


def random_fields(rng: random.Random) -> dict[str, Any]:
    """A random choice of sampling fields with values that are allowed."""
    fields: dict[str, Any] = {
        "temperature": rng.choice([0, 0.0, 1e-6, 0.001, 0.3, 1, 1.5, 2, None]),
        "top_p": rng.choice([0.01, 0.5, 1, None]),
        "top_k": rng.choice([-1, 0, 1, 50, 100_000, 20.0, None]),
        "min_p": rng.choice([0, 0.05, 1, None]),
        "presence_penalty": rng.choice([-2, -0.1, 0, 2, None]),
        "frequency_penalty": rng.choice([-2, 0.1, 0, 2, None]),
        "repetition_penalty": rng.choice([0.5, 1, 1.3, None]),
        "seed": rng.choice([-1, 0, 7, -(2**63), 2**63 - 1, None]),
        "stop": rng.choice(["a", ["a"], ["a", "bc", "a"], [], None]),
        "stop_token_ids": rng.choice([[], [1], [5, 5, 2], [9, 1], None]),
        "ignore_eos": rng.random() < 0.5,
        "min_tokens": rng.choice([0, 1, 16]),
        "skip_special_tokens": rng.random() < 0.5,
        "include_stop_str_in_output": rng.random() < 0.5,
        "logit_bias": rng.choice([{}, {"1": -100}, {"7": 1e9, "8": -1e9, "9": 0.25}, None]),
        "allowed_token_ids": rng.choice([[1], [3, 3], None]),
        "bad_words": rng.choice([[], ["x"], ["x", "y", "x"]]),
        "thinking_token_budget": rng.choice([-1, 0, 100, None]),
        "watermarking": rng.choice([True, False, None]),
        "priority": rng.choice([0, -5, 2**40]),
        "response_format": rng.choice(
            [
                None,
                {"type": "text"},
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
            ]
        ),
    }
    names = rng.sample(sorted(fields), rng.randint(0, len(fields)))
    return {name: fields[name] for name in names}
