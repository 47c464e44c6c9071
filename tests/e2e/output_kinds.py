"""Kinds of answers for soaks: what a scripted worker says, what is asked, and what must come of it.

Every stage of the way out is in some of them. The rules are in `RULES`, and what they deny in `DENIED`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.e2e.asking import MODEL
from tests.e2e.listening import Said

RULES: Final[list[dict[str, Any]]] = [
    {"id": "masked", "match": ["secret", "敏感词"], "action": "mask"},
    {"id": "redacted", "match": ["whisper"], "action": "redact", "replacement": "[W]"},
    {"id": "blocked", "match": ["forbidden"], "action": "block", "direction": "output"},
    {"id": "whole", "match": ["ass"], "action": "mask", "whole_word": True},
    {"id": "flagged", "match": ["noticed"], "action": "flag"},
    {"id": "spelled", "match": ["傻瓜"], "action": "mask", "skip_symbols": True},
    {"id": "phone", "pii": "phone_cn", "action": "redact"},
    {"id": "email", "pii": "email", "action": "redact"},
]
DENIED: Final = ("secret", "敏感词", "whisper", "forbidden", "傻瓜", "13812345678", "@example.com")
FILLER: Final = " The mill wheel turns, and nobody has noticed the class of grass beside it."


@dataclass(frozen=True, slots=True)
class Kind:
    """`number` stands in the question, by which the script knows what to say. `says` None: made-up tokens.

    `content`, `reasoning` and `calls` are what must come; `content` None where nobody knows.
    """

    number: int
    says: str | None
    content: str | None
    finish: str = "stop"
    reasoning: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False

    @property
    def question(self) -> str:
        return f"Question {self.number}."

    @property
    def num_choices(self) -> int:
        n: int = self.fields.get("n", 1)
        return n

    def body(self, salt: int) -> dict[str, Any]:
        """Another prompt for each number."""
        messages = [{"role": "user", "content": f"{self.question} Number {salt}"}]
        thinking = {} if self.thinks else {"chat_template_kwargs": {"enable_thinking": False}}
        return {"model": MODEL, "messages": messages, "max_tokens": 400, **thinking, **self.fields}

    def assert_on_its_way(self, said: Said) -> None:
        """What has come so far is the beginning of what must come."""
        assert self.content is None or self.content.startswith(said.content), said.content
        assert self.reasoning.startswith(said.reasoning)
        assert [call.name for call in said.calls] == [name for name, _ in self.calls[: len(said.calls)]]

    def assert_all(self, said: Said) -> None:
        """It is whole."""
        assert said.finish == self.finish
        assert self.content is None or said.content == self.content
        assert said.reasoning == self.reasoning
        assert [(call.name, json.loads(call.arguments)) for call in said.calls] == list(self.calls)


def kinds(has_parsers: bool) -> list[Kind]:
    """Those that need no parser of a model's format, and those that do."""
    made = [
        Kind(
            0,
            "A secret, ＳＥＣＲＥＴ, s\u200becret, 敏\u200b感词, 敏感; no ass in class; 傻 * 瓜, 傻子."
            + FILLER,
            "A ******, ******, *******, ****, 敏感; no *** in class; *****, 傻子." + FILLER,
        ),
        Kind(
            1,
            "Call 13812345678 now, or write to ann.lee@example.com, or 138123 in 2024." + FILLER,
            "Call [PHONE] now, or write to [EMAIL], or 138123 in 2024." + FILLER,
        ),
        Kind(
            2, "Some words before the forbidden one." + FILLER * 3, "Some words before the ", "content_filter"
        ),
        Kind(
            3,
            "Say a secret and sto, stop h, stop here and go on." + FILLER,
            "Say a ****** and sto, stop h, ",
            fields={"stop": ["never", "stop here"]},
        ),
        Kind(4, "It ends within a sec|ret." + FILLER, "It ends within a sec", fields={"stop": ["|ret"]}),
        Kind(
            5,
            '{"a": "secret", "b": [1, 2, {"c": "x 敏\\u611f词", "13812345678": null}]}',
            '{"a": "******", "b": [1, 2, {"c": "x ***", "[PHONE]": null}]}',
            fields={"response_format": {"type": "json_object"}},
        ),
        Kind(
            6,
            "Two whispers of a secret 敏感词, twice." + FILLER,
            "Two [W]s of a ****** ***, twice." + FILLER,
            fields={"logprobs": True, "top_logprobs": 2, "n": 2},
        ),
        Kind(
            7,
            '[{"name": "look", "parameters": {"q": "a secret"}}, {"name": "ask", "parameters": {}}]',
            "",
            "tool_calls",
            calls=[("look", {"q": "a ******"}), ("ask", {})],
            fields={"tools": TOOLS, "tool_choice": "required"},
        ),
        Kind(8, None, None, "length", fields={"max_tokens": 60, "ignore_eos": True}),
        Kind(
            9,
            "<b>No secret & more</b>",
            "&lt;b&gt;No ****** &amp; more&lt;/b&gt;",
            fields={"output": {"escape": "html"}},
        ),
    ]
    return made + (_READ_BY_PARSERS if has_parsers else [])


TOOLS: Final[list[dict[str, Any]]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "ask")
]


def _call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


_READ_BY_PARSERS: Final = [
    Kind(
        10,
        "<think>A secret thought, 敏感词.</think>And a whisper." + FILLER,
        "And a [W]." + FILLER,
        reasoning="A ****** thought, ***.",
        thinks=True,
    ),
    Kind(
        11,
        f"<think>I look!</think>{_call('look', {'q': ['secret', 'é']})}\n{_call('ask', {'whisper': 1.5})}",
        "",
        "tool_calls",
        reasoning="I look!",
        calls=[("look", {"q": ["******", "é"]}), ("ask", {"[W]": 1.5})],
        fields={"tools": TOOLS},
        thinks=True,
    ),
    Kind(
        12,
        "<think>Now it is forbidden.</think>Never said." + FILLER,
        "",
        "content_filter",
        reasoning="Now it is ",
        fields={"tools": TOOLS},
        thinks=True,
    ),
]
