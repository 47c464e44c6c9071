"""Answers as models of several families write them, by the name of vLLM's parser that reads them.

Each family has: one call, parallel calls, a call after content, content only, empty arguments, nested ones,
arrays, numbers, other scripts and emoji, escapes, strings that look like markup, an answer cut short, broken
markup, and text that looks like a call and is none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tests.pipeline.small_tokenizers import WORDS

TOOLS: Final[Sequence[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "where": {"type": "object"},
                    "list": {"type": "array"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS: Final[Sequence[dict[str, Any]]] = [
    {"city": "Paris"},
    {},
    {"city": 'São\n"Paulo" \\ 🎉 👩‍👩‍👧 {x} 你好', "days": 3, "where": {"a": [1, {"b": None}]}},
    {"list": [1.5, -2, True, False, "x", [], {}], "days": 12},
    {"city": "a } b ] c </b> <tool", "where": {"{": "}"}},
]


Calls = Sequence[tuple[str, str]]


class Answer(NamedTuple):
    """A model's text. `content` and `calls`: what ours must have, where it's on purpose not what vLLM has."""

    text: str
    content: str | None = None
    reason: str = ""  # why not
    calls: Calls | None = None
    uncut: str = ""  # of a text that has been cut short


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {_text(arguments)}}}\n</tool_call>'


def qwen3(name: str, arguments: dict[str, Any]) -> str:
    values = {key: value if isinstance(value, str) else _text(value) for key, value in arguments.items()}
    pieces = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(pieces)}</function>\n</tool_call>"


def llama3(name: str, arguments: dict[str, Any]) -> str:
    return f'{{"name": "{name}", "parameters": {_text(arguments)}}}'


def deepseek_v3(name: str, arguments: dict[str, Any]) -> str:
    block = f"```json\n{_text(arguments)}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{block}<｜tool▁call▁end｜>"


def deepseek_v31(name: str, arguments: dict[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_text(arguments)}<｜tool▁call▁end｜>"


def mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{_text(arguments)}"


def old_mistral(name: str, arguments: dict[str, Any]) -> str:
    return f'{{"name": "{name}", "arguments": {_text(arguments)}}}'


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


Write = Callable[[str, dict[str, Any]], str]


class Family(NamedTuple):
    """How one parser's models write: one call, and several around it."""

    write: Write
    begin: str = ""
    between: str = "\n"
    end: str = ""
    broken: Sequence[Answer] = ()
    only_first: bool = False  # calls come first or not at all
    drops_blanks: bool = False  # vLLM drops white space around the content where calls follow
    streams: bool = False  # calls leave as they pass

    def calls(self, *calls: str) -> str:
        return self.begin + self.between.join(calls) + self.end

    def answers(self) -> list[Answer]:
        calls = [self.write("get_weather", arguments) for arguments in ARGUMENTS]
        long = self.calls(calls[2], calls[3])
        texts = [*map(self.calls, calls), self.calls(self.write("now", {})), long]
        more = [] if self.only_first else [f"Let me look.\n\n{long}", f" \n{self.calls(calls[0])}"]
        if not self.only_first:
            more.append(f"One: {long}\n")
        return [*map(Answer, texts), *self._cuts(long), *map(Answer, [*more, *PLAIN]), *self.broken]

    def _cuts(self, text: str) -> list[Answer]:
        """As `max_tokens` leaves it."""
        return [Answer(text[: len(text) * tenths // 10], uncut=text) for tenths in (1, 3, 5, 7, 9)]


PLAIN: Final = (
    "",
    " \n",
    "Plain text, 你好 🎉.\n\n* a\n* b\n",
    "if (a < b) { return [x](y); }\n<b>bold</b> <tool_",
    'JSON: {"a": 1, "b": [2]} and {"name": "x"}.',
    "Use <tool_call> to call, or [TOOL, or <function now.",
)
_CALL_LEFT: Final = "the call has left before the whole parse finds that it or what follows cannot be read"


def _left(text: str, arguments: str = "{}") -> Answer:
    return Answer(text, "", _CALL_LEFT, [("now" if arguments == "{}" else "get_weather", arguments)])


_LLAMA_LEFT: Final = "content has left before the call that the whole parse finds in the middle of a text"
FAMILIES: Final[dict[str, Family]] = {
    "hermes": Family(
        hermes,
        streams=True,
        broken=[
            Answer('<tool_call>{"name": "now"}</tool_call> text'),
            Answer('<tool_call>{"name": "now", "arguments": null}</tool_call> text'),
            Answer('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'),
            Answer('<tool_call>{"name": "not_a_tool", "arguments": {}}</tool_call>' + hermes("now", {})),
            Answer(hermes("now", {}) + '<tool_call>{"name": "not_a_tool", "arguments": {}}</tool_call>'),
            Answer(hermes("now", {}) + '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
            Answer('<tool_call>{"arguments": {"city": "}"}, "name": "get_weather"}</tool_call>'),
            Answer('<tool_call>{"type": "function", "name": "now", "arguments": {"name": "x"}}</tool_call>'),
            Answer(
                '<tool_call> {\n"name" :"now" ,\t"arguments": { "a" :1.0 , "b":"\\u00e9\\ud83c\\udf89" } }\n'
            ),
            Answer('<tool_call>{"name": "now", "arguments": {"a": 1, "a": 2}, "id": 1}</tool_call>'),
            Answer("<tool_call>{'name': 'now', 'arguments': {}}</tool_call>"),
            _left('<tool_call>{"name": "now", "arguments": {}, }</tool_call>'),
            _left('<tool_call>{"name": "now", "arguments": {}, "name": "get_weather"}</tool_call>'),
            _left(hermes("now", {}) + "\n" + hermes("now", {})[:-16] + "</tool_call> text"),
            _left(hermes("get_weather", {"city": "</tool_call>"}), '{"city": "</tool_call>"}'),
            Answer(hermes("now", {}) + " text"),
            Answer("<tool_call>now</tool_call> text"),
        ],
    ),
    "qwen3_coder": Family(
        qwen3,
        drops_blanks=True,
        broken=[
            Answer("<tool_call>\nnow</tool_call> text"),
            Answer("<function=now>\n</function> text"),
            Answer(qwen3("unknown", {"days": 1})),
            Answer(qwen3("now", {}) + "\nand then\n" + qwen3("now", {}) + " text"),
            Answer(qwen3("get_weather", {"days": "many", "list": "no", "city": "\n\nx\n\n"})),
        ],
    ),
    "llama3_json": Family(
        llama3,
        between="; ",
        only_first=True,
        streams=True,
        broken=[
            Answer(f"Sure: {llama3('now', {})}", "Sure: ", _LLAMA_LEFT),
            Answer(f"<|python_tag|>{llama3('now', {})}", "<|python_tag|>", _LLAMA_LEFT),
            Answer('{"name": "now"} text'),
            Answer(llama3("now", {}) + " text; " + llama3("now", {"a": 1})),
            Answer('{"name": "not_a_tool", "parameters": {}}; ' + llama3("now", {})),
            Answer('{"name": "now", "arguments": {"a": {"name": "now", "parameters": {}}}}'),
            Answer('{"parameters": {"a": 1}, "arguments": {"b": 1}, "name": "now"}'),
            _left('{"name": "get_weather", "parameters": {"a": "\n"}} text', '{"a": "\n"}'),
            _left(llama3("now", {}) + " {text}"),
            _left(llama3("now", {}) + llama3("now", {"a": 1})),
            Answer('{"name": "now", "arguments": {"a": "\\"}"}}'),
        ],
    ),
    "deepseek_v3": Family(
        deepseek_v3,
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
        streams=True,
        broken=[
            Answer("a <｜tool▁calls▁begin｜> text"),
            Answer("a <｜tool▁call▁begin｜> text"),
            Answer("<｜tool▁calls▁begin｜>" + deepseek_v3("not_a_tool", {}) + "\n" + deepseek_v3("now", {})),
            _left("<｜tool▁calls▁begin｜>" + deepseek_v3("now", {}).replace("\n```<", "```<")),
        ],
    ),
    "deepseek_v31": Family(
        deepseek_v31,
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
        streams=True,
        broken=[
            Answer("a <｜tool▁calls▁begin｜> text"),
            Answer("a <｜tool▁call▁begin｜> text"),
            Answer("<｜tool▁calls▁begin｜>" + deepseek_v31("not_a_tool", {}) + deepseek_v31("now", {})),
            Answer("<｜tool▁calls▁begin｜>" + deepseek_v31("now", {}).replace("{}", " {} ")),
            _left("<｜tool▁calls▁begin｜>" + deepseek_v31("now", {}).replace("{}", "{} x")),
            _left(
                "<｜tool▁calls▁begin｜>" + deepseek_v31("get_weather", {"a": 1}).replace(": 1", ":\n1"),
                '{"a":\n1}',
            ),
        ],
    ),
    "mistral": Family(
        mistral,
        between="",
        drops_blanks=True,
        broken=[
            Answer("[TOOL_CALLS]now{} text"),
            Answer("[TOOL_CALLS]now text"),
            Answer("[TOOL_CALLS]{}"),
            Answer('[TOOL_CALLS]get_weather[ARGS]{"list": [[[1], [2]]]}[TOOL_CALLS]now[ARGS]{}'),
            Answer('[TOOL_CALLS]get_weather{"city": "[TOOL_CALLS]"}'),
        ],
    ),
    "pythonic": Family(
        python,
        "[",
        ", ",
        "]",
        only_first=True,
        broken=[
            Answer("[now(1)] text"),
            Answer("[now(1)]"),
            Answer("[a.now(b=1)]"),
            Answer("[now(), get_weather(city='x'), a.b(c=1)]"),
            Answer("[get_weather(city = 'x')]"),
            Answer("[get_weather( city='x')]"),
            Answer("[ now()]"),
            Answer("[get_weather(city='x')]\ntext"),
            Answer("[get_weather(city=x)]"),
            Answer("[get_weather(city='x' 'y',\n days=-3)]"),
            Answer("[now()](a link)"),
        ],
    ),
}
FAMILIES["llama4_json"] = FAMILIES["llama3_json"]
FAMILIES["llama4_pythonic"] = FAMILIES["pythonic"]._replace(
    broken=[
        *FAMILIES["pythonic"].broken,
        Answer("<|python_start|>[get_weather(city='x')]<|python_end|>"),
        Answer("<|python_start|>text"),
    ]
)
FAMILIES["qwen3_xml"] = FAMILIES["qwen3_coder"]
# Mistral's tokenizers before version 11 have no [ARGS].
OLD_MISTRAL: Final = Family(
    old_mistral,
    "[TOOL_CALLS] [",
    ", ",
    "]",
    broken=[Answer("[TOOL_CALLS] now"), Answer("[TOOL_CALLS] [{}]"), Answer("[TOOL_CALLS] [1] text")],
)


def random_arguments(rng: random.Random) -> dict[str, Any]:
    """Any JSON object, of words of many scripts and characters that mean something to some parser."""
    return {f"k{number}": _value(rng, 0) for number in range(rng.randint(0, 4))}


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randint(0, 6 if depth < 3 else 4)
    if kind == 5:
        return [_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == 6:
        return {f"n{number}": _value(rng, depth + 1) for number in range(rng.randint(0, 3))}
    marks = ['"', "\\", "}", "{", "]", "<", ">", "\n", "'", "</", "(", "=", ", "]
    string = "".join(rng.choice([*WORDS, *marks]) for _ in range(rng.randint(0, 6)))
    return [None, rng.choice([True, False]), rng.randint(-999, 999), rng.uniform(-9, 9), string][kind]
