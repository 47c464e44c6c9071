"""Logprobs in OpenAI's two shapes."""

from __future__ import annotations

import math

import pytest

from gateway.answer_logprobs import MIN_LOGPROB, chat_logprobs, completion_logprobs
from gateway.frames import json_bytes
from pipeline.events import PositionLogprobs
from pipeline.values import TokenLogprobs
from tests.gateway.answering import vocabulary


class Texts:
    """A vocabulary of three tokens."""

    WORDS = (b"a", "é".encode()[:1], "敏".encode())

    def token_bytes(self, token_id: int) -> bytes:
        return self.WORDS[token_id]

    def token_text(self, token_id: int) -> str:
        return self.WORDS[token_id].decode(errors="replace")


def entry(start: int, ids: list[int], values: list[float], length: int = 1) -> PositionLogprobs:
    return PositionLogprobs(ids[0], start, start + length, TokenLogprobs(ids, values, 1))


def test_chat_logprobs_have_the_sampled_token_and_then_the_likeliest() -> None:
    assert chat_logprobs([entry(0, [1, 0, 2], [-2.5, -0.25, -0.5])], Texts()) == {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -2.5,
                "bytes": [0xC3],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.25, "bytes": [97]},
                    {"token": "敏", "logprob": -0.5, "bytes": list("敏".encode())},
                ],
            }
        ],
        "refusal": None,
    }


def test_legacy_logprobs_are_four_lists() -> None:
    entries = [entry(0, [0, 0, 2], [-0.5, -0.5, -1.5]), entry(1, [2, 0, 2], [-1.25, -0.75, -1.25])]
    assert completion_logprobs(entries, Texts()) == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -1.25],
        "tokens": ["a", "敏"],
        "top_logprobs": [{"a": -0.5, "敏": -1.5}, {"敏": -1.25, "a": -0.75}],
    }


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_logprobs_that_json_lacks_are_openais_least(value: float) -> None:
    entries = [entry(0, [0, 0, 2], [value, value, value])]
    for shape in (chat_logprobs, completion_logprobs):
        encoded = json_bytes(shape(entries, Texts()))
        assert encoded.count(b"%.1f" % MIN_LOGPROB) == 3
        assert b"null" not in encoded.replace(b'"refusal":null', b"")


def test_logprobs_of_a_real_vocabulary_join_to_the_text() -> None:
    ids = vocabulary().tokenizer.encode("敏感词 👋 café", add_special_tokens=False).ids
    shown = chat_logprobs([entry(0, [each], [-1.0]) for each in ids], vocabulary())["content"]
    assert b"".join(bytes(each["bytes"]) for each in shown).decode() == "敏感词 👋 café"
