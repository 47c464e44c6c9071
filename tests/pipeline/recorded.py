"""What models say, as the token ids of their real tokenizers: for tests of the whole way out.

Here: answers of many kinds in each model's own markup, as ids; and all the ways to cut them. Not here: what
must come of them. An answer's ids are those of its text, or of parts of it (`… in odd tokens`), because a
model does not always choose the tokens that an encoder would; and some end in mid-character.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from backend.embedded import default_cache_dir, find_embedded_model
from pipeline.vocabulary import Vocabulary
from tests.components import TOKENIZERS, missing
from tests.pipeline.splits import splits
from tests.tokenizers import tokenizer_folder

MODELS: Final = (*TOKENIZERS, "embedded")

# Control tokens that are not special, by model, as their templates have them.
_CONTROLS: Final = {
    "qwen3": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    "deepseek_v3": tuple(
        f"<｜{name}｜>"
        for name in (
            *("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end"),
            *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end", "tool▁sep"),
        )
    ),
}
_ENDS: Final = {
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "llama3_1": "<|eot_id|>",
    "gptoss": "<|return|>",
    "embedded": "<|im_end|>",
}

_PROSE: Final = {
    "Chinese": "今天天气很好，我们去公园散步吧。“敏感词”这三个字，并不敏感；感觉𠮷野家的饭也不错……42元！",
    "English": "The product doesn't ship today: it's naïve, I'm afraid. See https://example.org/a?b=c.",
    "emoji": "👩\u200d👩\u200d👧\u200d👦 👍🏽 🇨🇳🇺🇸 ❤\ufe0f\u200d🔥 1\ufe0f\u20e3 🙂🙂 "
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "code": '```python\ndef f(x: int) -> dict[str, int]:\n\treturn {"a": x << 2}  # 注释\n```\n\n\nx;\r\n',
    "scripts": "Привет, мир! こんにちは 안녕하세요 שלום مرحبا नमस्ते สวัสดี ﷽ 𝔘𝔫𝔦 e\u0301 \u200b\ufeff½",
    "white space": "  two\n\n\n\n    four\t\t\tthree \u3000\xa0 x   \n",
    "JSON": '{"q": "\\u654f\\u611f 词", "n": [1, 2.5e-3, null], "s": "a\\"b\\\\", "o": {"k": "🙂"}}',
    "nearly markup": "<tool_call <think < think> <|im_ end|> </ <｜tool {{x}} [TOOL <|channel",
}

_CALLS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("get_weather", {"city": "北京", "days": 3, "units": "°C"}),
    ("search", {"q": 'naïve "café" \\ 🙂 </tool_call>?', "options": {"safe": True, "tags": ["敏感", "b"]}}),
    ("ping", {}),
)


class Recorded(NamedTuple):
    """One answer: what it is, and its ids."""

    name: str
    ids: list[int]


@cache
def tokenizer(model: str) -> Tokenizer:
    """The tokenizer of one of `MODELS`. Takes 1 to 3 s. Skips or fails the test where it is missing."""
    return Tokenizer.from_file(str(_folder(model) / "tokenizer.json"))


@cache
def vocabulary(model: str) -> Vocabulary:
    """Its token tables, with its control tokens. Takes 1 s more."""
    token_id = tokenizer(model).token_to_id
    found = [token_id(string) for string in _CONTROLS.get(model, ())]
    return Vocabulary(tokenizer(model), [each for each in found if each is not None])


@cache
def recorded(model: str) -> tuple[Recorded, ...]:
    """All kinds of answers of a model."""
    rng = random.Random(model)
    texts = {**_PROSE, **dict(_tool_calls(model)), **dict(_reasoning(model))}
    whole = [Recorded(name, _ids(model, text)) for name, text in texts.items()]
    end = vocabulary(model).tokenizer.token_to_id(_ENDS[model])
    ended = [Recorded(f"{name}, ended", [*ids, end]) for name, ids in whole[:2]]
    odd = [Recorded(f"{name} in odd tokens", _odd_ids(model, text, rng)) for name, text in texts.items()]
    return (*whole, *ended, *odd, *_cut(model))


def prose(model: str) -> list[Recorded]:
    """Text without any markup."""
    return [each for each in recorded(model) if each.name.split(" in odd")[0] in _PROSE]


def tool_calls(model: str) -> list[Recorded]:
    """Answers with tool calls in the model's own markup, and in that of parsers that any model may have."""
    return [each for each in recorded(model) if each.name.startswith("calls")]


def reasoning(model: str) -> list[Recorded]:
    """Answers that begin with reasoning, with and without a call after it."""
    return [each for each in recorded(model) if each.name.startswith("reasoning")]


def cut_in_mid_character(model: str) -> list[Recorded]:
    """Answers whose last token is part of a character, or whose middle has a part of one."""
    return [each for each in recorded(model) if each.name.startswith("cut")]


def every_split(ids: Sequence[int], rng: random.Random, num_random: int = 3) -> Iterator[list[list[int]]]:
    """The ids at once, one at a time, cut in two everywhere, and cut at random."""
    return splits(list(ids), rng, num_random)


def _folder(model: str) -> Path:
    if model != "embedded":
        return tokenizer_folder(model)
    found = find_embedded_model(default_cache_dir(os.environ))
    if found is None:
        missing("embedded model: not in the cache; any test that serves it brings it")
    return found


def _ids(model: str, text: str) -> list[int]:
    ids: list[int] = tokenizer(model).encode(text, add_special_tokens=False).ids
    return ids


def _odd_ids(model: str, text: str, rng: random.Random) -> list[int]:
    """The ids of short parts, cut where no control token is."""
    controls = vocabulary(model).controls
    ids = []
    for token_id in _ids(model, text):
        part = vocabulary(model).token_text(token_id)
        cut = rng.randint(0, len(part))
        if token_id in controls or "�" in part or not 0 < cut < len(part) or part[:cut].isspace():
            ids.append(token_id)
        else:
            ids += [*_ids(model, part[:cut]), *_ids(model, part[cut:])]
    return ids


def _cut(model: str) -> Iterator[Recorded]:
    """Rare characters are several tokens each in every vocabulary."""
    ids = _ids(model, "好𓀀")
    yield Recorded("cut at the end", ids[:-1])
    yield Recorded("cut in the middle", [*ids[:-1], *_ids(model, "a👩‍👩‍👧")])
    yield Recorded("cut before the end", [*ids[:-1], tokenizer(model).token_to_id(_ENDS[model])])
    yield Recorded("cut twice", [*ids[:-1], *ids[-2:]])


def _tool_calls(model: str) -> Iterator[tuple[str, str]]:
    """(name, text) in the markup of the model's parser in vLLM; hermes, JSON and pythonic for all."""
    dumped = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in _CALLS]
    hermes = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in dumped
    ]
    yield "calls, hermes", "好的，我来查。\n" + "\n".join(hermes)
    as_json = [f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in dumped]
    yield "calls, llama3", "; ".join(as_json)
    python = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in _CALLS
    )
    yield "calls, pythonic", f"[{python}]"
    mistral = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in dumped]
    yield "calls, mistral", f"[TOOL_CALLS][{', '.join(mistral)}]"
    if model == "llama3_1":
        yield "calls, llama4", f"<|python_start|>[{python}]<|python_end|>"
        yield "calls, llama3 with its tag", f"<|python_tag|>{as_json[0]}"
    if model == "deepseek_v3":
        calls = "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
            for name, arguments in dumped
        )
        yield "calls, deepseek", f"我来查。<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"
    if model == "gptoss":
        name, arguments = dumped[0]
        yield (
            "calls, harmony",
            (
                f"<|channel|>analysis<|message|>需要天气。<|end|><|start|>assistant<|channel|>commentary"
                f" to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
            ),
        )


def _reasoning(model: str) -> Iterator[tuple[str, str]]:
    yield "reasoning", "<think>\n好的，用户问天气。🙂 Let me think…\n</think>\n\n今天晴，32 °C。"
    yield "reasoning that the prompt began", "好的。\n</think>\n\nIt's sunny."
    yield "reasoning without an end", "<think>\nHmm, 𠮷野家 is"
    yield "reasoning and calls", "<think>\n查一下。\n</think>\n\n" + dict(_tool_calls(model))["calls, hermes"]
    if model == "gptoss":
        yield (
            "reasoning, harmony",
            (
                "<|channel|>analysis<|message|>好的。🙂<|end|><|start|>assistant<|channel|>final<|message|>今天晴。"
            ),
        )
