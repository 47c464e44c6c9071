"""A model's text side from its files."""

from __future__ import annotations

import json

import pytest

from pipeline import model_text
from pipeline.model_text import ModelText
from tests.pipeline import chat_templates, small_tokenizers
from tests.pipeline.model_files import model_files
from tests.pipeline.requests import chat


def test_all_parts_come_from_the_files() -> None:
    text = ModelText.from_files(model_files())
    reference = small_tokenizers.byte_level()
    assert text.tokenizer.get_vocab() == reference.get_vocab()
    assert text.vocabulary.is_byte_level
    assert {reference.id_to_token(token_id) for token_id in text.special_ids} == set(
        small_tokenizers.CONTROL_TOKENS
    )
    assert text.chat_template is not None
    assert text.chat_template.render(chat("hi"), 0.0).text.endswith("hi<|im_end|>\n<|im_start|>assistant\n")


def test_template_file_comes_before_the_configuration() -> None:
    text = ModelText.from_files({**model_files(), "chat_template.jinja": b"{{ bos_token }}{{ eos_token }}!"})
    assert text.chat_template is not None
    assert text.chat_template.render(chat(), 0.0).text == "<|endoftext|><|im_end|>!"


def test_of_named_templates_the_default_is_taken() -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    text = ModelText.from_files(model_files(chat_template=templates))
    assert text.chat_template is not None
    assert text.chat_template.source == "plain"


def test_model_without_template_has_none() -> None:
    assert ModelText.from_files(model_files(chat_template=None)).chat_template is None


def test_tokenizer_json_alone_is_enough() -> None:
    text = ModelText.from_files({"tokenizer.json": model_files()["tokenizer.json"]})
    assert text.chat_template is None
    assert text.eos_ids == frozenset()


def test_special_tokens_map_gives_what_the_configuration_lacks() -> None:
    files = model_files(eos_token=None, chat_template="{{ eos_token }}{{ bos_token }}")
    files["special_tokens_map.json"] = json.dumps({"eos_token": "<|im_end|>", "bos_token": "no"}).encode()
    text = ModelText.from_files(files)
    assert text.chat_template is not None
    assert text.chat_template.render(chat(), 0.0).text == "<|im_end|><|endoftext|>"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {2}),
        ({"config.json": b'{"eos_token_id": 5}'}, {5}),
        (
            {"config.json": b'{"eos_token_id": 5}', "generation_config.json": b'{"eos_token_id": [7, 8]}'},
            {7, 8},
        ),
        ({"config.json": b'{"eos_token_id": 5}', "generation_config.json": b"{}"}, {5}),
        ({"config.json": b'{"eos_token_id": null}'}, {2}),
    ],
)
def test_eos_ids_come_from_the_most_specific_file(files: dict[str, bytes], expected: set[int]) -> None:
    assert ModelText.from_files({**model_files(), **files}).eos_ids == expected


def test_truncation_and_padding_of_the_file_are_off() -> None:
    tokenizer = small_tokenizers.byte_level()
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.enable_truncation(2)
    copy.enable_padding(length=50)
    text = ModelText.from_files({"tokenizer.json": copy.to_str().encode()})
    ids = text.encoder.encode("the product ships today", add_special_tokens=False)
    assert len(ids) // 4 == len(tokenizer.encode("the product ships today", add_special_tokens=False).ids)


def test_added_tokens_that_only_the_configuration_has_are_added() -> None:
    new_id = small_tokenizers.byte_level().get_vocab_size()
    added = {
        str(new_id + 1): {"content": "<|b|>", "special": True},
        str(new_id): {"content": "<|a|>", "special": False, "lstrip": False},
        "2": {"content": "<|im_end|>", "special": True},
    }
    text = ModelText.from_files(model_files(added_tokens_decoder=added))
    assert text.tokenizer.encode("<|a|><|b|>", add_special_tokens=False).ids == [new_id, new_id + 1]
    assert new_id + 1 in text.special_ids
    assert new_id not in text.special_ids
    assert len(text.vocabulary) == new_id + 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json is broken"),
        ({**model_files(), "tokenizer_config.json": b"{"}, "tokenizer_config.json is not JSON"),
        ({**model_files(), "tokenizer_config.json": b"\xff"}, "tokenizer_config.json is not JSON"),
        ({**model_files(), "config.json": b"[]"}, "config.json must be an object"),
        ({**model_files(), "chat_template.jinja": b"\xff"}, "chat_template.jinja is not UTF-8"),
        ({**model_files(), "chat_template.jinja": b"{% if %}"}, "line 1"),
        (model_files(chat_template=3), "chat_template in tokenizer_config.json"),
    ],
)
def test_broken_file_is_named(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelText.from_files(files)


def test_fingerprint_is_of_all_that_decides_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ModelText.from_files(model_files()).fingerprint
    assert ModelText.from_files(model_files()).fingerprint == before
    assert ModelText.from_files(model_files(added_tokens_decoder={})).fingerprint != before
    with_think = model_files(chat_template=chat_templates.CHATML + "<think>")
    assert ModelText.from_files(with_think).fingerprint != before
    monkeypatch.setattr(model_text, "tokenizers_version", "0.0.0")
    assert ModelText.from_files(model_files()).fingerprint != before
