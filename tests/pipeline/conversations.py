"""Seeded chats in OpenAI's shape, as clients send them, within what each model's template takes.

Here: texts of all kinds, chats of all shapes, and what a family's template demands of them. Not here: what
their ids must be (`reference.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Json = Any
Message = dict[str, Json]

_WORDS: Final = (
    *(
        "the",
        "product",
        "ships",
        "today",
        "price",
        "naïve",
        "café",
        "don't",
        "I'll",
        "HTTP/1.1",
        "…",
        "—",
        "“q”",
    ),
    *(
        "42",
        "3.14159",
        "1000000",
        "x=1",
        "_a_b",
        "½",
        "²",
        "™",
        "©",
        "€",
        "¥",
        "①②③",
        "ﬁ",
        "Ａｂｃ",
        "𝔘𝔫𝔦",
        "﷽",
    ),
    *(
        "你好",
        "世界",
        "今天天气很好",
        "敏感词",
        "産品",
        "東京",
        "こんにちは",
        "カタカナ",
        "ｶﾀｶﾅ",
        "안녕하세요",
        "한국어",
    ),
    *("Привет", "мир", "Ελληνικά", "שלום", "עולם", "مرحبا", "بالعالم", "สวัสดี", "नमस्ते", "தமிழ்", "ქართული"),
    *(
        "🙂",
        "👩\u200d👩\u200d👧\u200d👦",
        "👍🏽",
        "🇨🇳🇺🇸",
        "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    ),
    *(
        "e\u0301",
        "é",
        "n\u0303",
        "ñ",
        "\u1100\u1161\u11a8",
        "각",
        "Å",
        "\u212b",
        "q\u0323\u0307",
        "q\u0307\u0323",
    ),
    *("\u200b", "\u200d", "\ufeff", "\u202e", "\u00ad", "\ufdd0", "\ufdd1", "\uffff", "\ufffd", "\U0001fffe"),
    *("\u0085", "\u2028", "\x1b", "\x7f", "▁", "Ġ", "ĠĠ", "Ċ", "##", "<table>", "</table>", "<div>", "&lt;"),
    # Nearly control strings; two of them in a row make none.
    *(
        "<!-- -->",
        "{{ 7 * 7 }}",
        "{% if %}",
        "%}",
        "[INST",
        "[/",
        "<|",
        "<|im",
        "<thin",
        "<",
        "|",
        "</",
        "<｜",
    ),
)
_BLOCKS: Final = (
    "```python\ndef f(x: int) -> int:\n    return x * 2  # twice\n```",
    '{"a": [1, 2.5, null, "ü"], "b": {"c": true}}',
    "SELECT *\n\tFROM t\r\n WHERE a <> 'b';",
    "- one\n- two\n\n  1. three\n\n\n\nfour",
    "https://example.org/a?b=c&d=%20#e",
    "a" * 70,
    "0123456789" * 4,
    "\n \n  \n   \n",
    "\t\t\tx\n\t\ty",
    "!!!???...,,,;;;---___***",
)
EDGES: Final = (
    *(
        "",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\n\n\n",
        "\t",
        "\r\n",
        " \n",
        "\n ",
        "\u3000",
        "\xa0",
        "\u2003",
        "\u200b",
    ),
    *("\ufeff", "\u0301", "\u200d", "\x1f"),
)


def text(rng: random.Random, max_words: int = 14) -> str:
    """Words, blocks and white space of many kinds; now and then empty, or white space alone."""
    kind = rng.random()
    if kind < 0.05:
        return rng.choice(EDGES)
    words = [rng.choice(_WORDS) for _ in range(rng.randint(1, max_words))]
    if kind < 0.25:
        words.insert(rng.randrange(len(words) + 1), rng.choice(_BLOCKS))
    if kind > 0.995:
        words *= 60
    separators = rng.choices((" ", "", "\n", "  ", "\n\n", ", "), (12, 3, 2, 1, 1, 1), k=len(words))
    body = "".join(word + separator for word, separator in zip(words, separators, strict=True))
    return rng.choice(EDGES) + body.strip() + rng.choice(EDGES) if kind > 0.4 else body.strip()


def _identity(message: Mapping[str, Json]) -> Message:
    return dict(message)


def _joined(message: Mapping[str, Json]) -> Message:
    """Parts as one string with line ends between, where a template takes strings only; null is empty."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content or ""}


def _for_qwen3(message: Mapping[str, Json]) -> Message:
    """Tool arguments as objects; reasoning under the name that the template reads."""
    prepared = _joined(message)
    if "reasoning" in prepared:
        prepared["reasoning_content"] = prepared["reasoning"]
    if "tool_calls" in prepared:
        calls = [json.loads(json.dumps(call)) for call in prepared["tool_calls"]]
        for call in calls:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        prepared["tool_calls"] = calls
    return prepared


def _for_deepseek(message: Mapping[str, Json]) -> Message:
    """Tool arguments are the client's text, and only a null content shows the calls."""
    return dict(message) if message.get("content") is None else _joined(message)


@dataclass(frozen=True, slots=True)
class Family:
    """What a model's template takes.

    `prepare`: an OpenAI-shaped message -> what `apply_chat_template` is given. `parsed`: template code that
    looks for a control string in a message, and that string.
    """

    name: str
    prepare: Callable[[Mapping[str, Json]], Message] = _joined
    has_tools: bool = False
    has_reasoning: bool = False
    null_content_with_calls: bool = False
    alternates: bool = False
    parsed: tuple[tuple[str, str], ...] = ()


FAMILIES: Final = {
    family.name: family
    for family in (
        Family(
            "qwen3",
            _for_qwen3,
            has_tools=True,
            has_reasoning=True,
            parsed=(
                ("startswith('<tool_response>')", "<tool_response>"),
                ("endswith('</tool_response>')", "</tool_response>"),
                ("'</think>' in message.content", "</think>"),
                ("split('</think>')", "</think>"),
                ("split('<think>')", "<think>"),
            ),
        ),
        Family("gemma3", _identity, alternates=True),
        Family("deepseek_v3", _for_deepseek, has_tools=True, null_content_with_calls=True),
        Family("llama3_1"),
        Family("embedded"),
    )
}

Text = Callable[[random.Random], str]


class ChatMaker:
    """Makes chats of one family. `text` makes every leaf's text."""

    def __init__(self, rng: random.Random, family: Family, text: Text = text) -> None:
        self._rng = rng
        self._family = family
        self._text = text

    def body(self, max_turns: int = 5) -> dict[str, Json]:
        """A chat body, to be sent as JSON."""
        rng = self._rng
        messages = self.system()
        for _ in range(rng.randint(1, max_turns)):
            messages += self.turn()
        if rng.random() < 0.7:
            messages.append(self.user())
        return self.with_options(messages)

    def growing(self, num_turns: int) -> Iterator[dict[str, Json]]:
        """One chat at each of its user messages and after each tool result."""
        messages = self.system()
        options = self.with_options([self.user()])
        options.pop("continue_final_message", None)
        options["add_generation_prompt"] = True
        for _ in range(num_turns):
            for message in self.turn():
                messages.append(message)
                if message["role"] in ("user", "tool"):
                    yield {**options, "messages": list(messages)}

    def with_options(self, messages: list[Message]) -> dict[str, Json]:
        """The body around the messages: tools, template variables, how it ends."""
        rng = self._rng
        body: dict[str, Json] = {"model": "m", "messages": messages}
        if self._family.has_tools and rng.random() < 0.4:
            body |= {"tools": [self.tool() for _ in range(rng.randint(1, 3))], "tool_choice": "none"}
        if self._family.has_reasoning and rng.random() < 0.4:
            body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
        ends_with_text = messages[-1]["role"] == "assistant" and bool(messages[-1].get("content"))
        if ends_with_text and "tool_calls" not in messages[-1] and rng.random() < 0.3:
            body["continue_final_message"] = True
        elif rng.random() < 0.2:
            body["add_generation_prompt"] = False
        return body

    def system(self) -> list[Message]:
        """A system message or none."""
        if self._rng.random() < 0.4:
            return []
        return [{"role": "system", "content": self.content()}]

    def user(self) -> Message:
        return {"role": "user", "content": self.content()}

    def turn(self) -> list[Message]:
        """A user's message and the assistant's answer, with tool rounds between."""
        messages = [self.user()]
        if self._family.has_tools:
            while self._rng.random() < 0.35:
                messages += self.tool_round()
        return [*messages, self.assistant()]

    def tool_round(self) -> list[Message]:
        num_calls = self._rng.randint(1, 3)
        calling = self.assistant() | {"tool_calls": [self.call(index) for index in range(num_calls)]}
        if self._family.null_content_with_calls or self._rng.random() < 0.3:
            calling["content"] = None
        results = [
            {"role": "tool", "tool_call_id": f"call_{index}", "content": self._text(self._rng)}
            for index in range(num_calls)
        ]
        return [calling, *results]

    def assistant(self) -> Message:
        rng = self._rng
        message: Message = {"role": "assistant", "content": self._text(rng)}
        kind = rng.random()
        if self._family.has_reasoning and kind < 0.3:
            name = rng.choice(("reasoning", "reasoning_content"))
            message[name] = self._text(rng)
        elif self._family.has_reasoning and kind < 0.6:
            thought = rng.choice(("\n", "", "\n\n")) + self._text(rng) + rng.choice(("\n", ""))
            end = rng.choice(("\n\n", "\n", ""))
            message["content"] = f"{rng.choice(('<think>', ''))}{thought}</think>{end}{message['content']}"
        return message

    def content(self) -> Json:
        """A string, or parts."""
        if self._rng.random() < 0.8:
            return self._text(self._rng)
        return [{"type": "text", "text": self._text(self._rng)} for _ in range(self._rng.randint(1, 3))]

    def call(self, index: int) -> dict[str, Json]:
        arguments = {self.name(): self.value() for _ in range(self._rng.randint(0, 2))}
        separators = (",", ":") if self._family.null_content_with_calls and self._rng.random() < 0.5 else None
        return {
            "id": f"call_{index}",
            "type": "function",
            "function": {
                "name": self.name(),
                "arguments": json.dumps(arguments, ensure_ascii=False, separators=separators),
            },
        }

    def tool(self) -> dict[str, Json]:
        properties = {self.name(): {"type": "string", "description": self._text(self._rng)} for _ in range(2)}
        return {
            "type": "function",
            "function": {
                "name": self.name(),
                "description": self._text(self._rng),
                "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
            },
        }

    def name(self) -> str:
        return self._rng.choice(("get_weather", "search", "city", "名前", "q"))

    def value(self) -> Json:
        texts = [self._text(self._rng), self._text(self._rng)]
        return self._rng.choice((texts[0], texts, 3, -1.5, True, None, {"k": texts[1]}))
