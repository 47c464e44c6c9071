"""A chat -> the prompt's text, through the model's own chat template, cut where its control strings stand.

The Jinja environment is the one that Hugging Face's `apply_chat_template` uses, and so is the text: a
sandbox without side effects, blocks trimmed, `tojson` without HTML escaping, `raise_exception`,
`strftime_now`, loop controls and the `generation` tag. The time comes in as `now_s`.

Which control strings are the template's own is known by marks in its literals (`template_marks.py`): user
text can spell any of them and starts no segment with it. Where marks cannot be followed (a template that
compares or measures what it wrote), control strings in the *request* are disguised while it is rendered,
which is as safe, but hides them from a template that looks for them. Not here: encoding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline import content_format
from pipeline.controls import ControlStrings
from pipeline.conversation import conversation
from pipeline.errors import InvalidRequest
from pipeline.leaves import leaves, mapped, replaced, untrusted
from pipeline.template_marks import COMPOSE, Marker, literals
from pipeline.values import ChatRequest

_MAX_MESSAGE_CHARACTERS: Final = 500  # of a template's error
_NOT_FOR_TEMPLATES: Final = ("chat_template", "tokenize")  # as in vLLM: the server decides these
# Noncharacters of Unicode, which no text needs. One that the request does not hold marks control strings.
_NONCHARACTERS: Final = tuple(map(chr, range(0xFDD0, 0xFDEE)))
# Marks where the final message ends; the space shows whether the template trims.
_END_MARK: Final = "\ufdee\ufdef "
_MARKED: Final = "_headrace_"  # prefix of the variables that hold special tokens with their marks


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text. Each of `segments` begins with a control string that the template wrote.

    `opening` is the text before the first of them, mostly empty.
    """

    opening: str
    segments: list[str]

    @property
    def text(self) -> str:
        return self.opening + "".join(self.segments)

    @property
    def num_characters(self) -> int:
        return len(self.opening) + sum(map(len, self.segments))


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it renders its body."""

    tags: Final = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Jinja's hook: the statements within the tag, in their own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime(now_s: float) -> Callable[[str], str]:
    """The template's clock: local time, as in Hugging Face's."""
    return lambda format_: datetime.fromtimestamp(now_s).strftime(format_)


# What JSON's objects have beside their keys, and methods of strings that can do no harm.
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_SAFE_STRING_METHODS: Final = frozenset(
    ("startswith", "endswith", "split", "strip", "lstrip", "rstrip", "replace", "upper", "lower", "title")
)


_SAFE_ATTRIBUTES: Final[Mapping[type, frozenset[str]]] = {
    str: _SAFE_STRING_METHODS,
    LoopContext: frozenset(("index", "index0", "first", "last", "length", "previtem", "nextitem")),
}
_SCOPES: Final = frozenset(("_loop_vars", "_block_vars"))  # which Jinja hands to whatever it calls


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with short cuts for what templates do most: a third of the time per message."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        if (
            type(obj) is BuiltinMethodType
            and type(obj.__self__) is str
            and obj.__name__ in _SAFE_STRING_METHODS
            and kwargs.keys() <= _SCOPES
        ):
            return obj(*args)
        return super().call(context, obj, *args, **kwargs)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def template_literals(source: str) -> list[str]:
    """All texts in a template, for `pipeline.controls.control_strings`. Raises like `ChatTemplate`."""
    return list(literals(_parse(_environment(), source)))


def _parse(environment: ImmutableSandboxedEnvironment, source: str) -> nodes.Template:
    try:
        return environment.parse(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is broken in line {error.lineno}: {error.message}") from error


class _Marked:
    """The template with one mark in its literals."""

    def __init__(self, source: str, controls: ControlStrings, mark: str, tokens: Mapping[str, str]) -> None:
        environment = _environment()
        tree = _parse(environment, source)
        marker = Marker(controls, mark, {name: _MARKED + name for name in tokens})
        marker.run(tree)
        environment.globals[COMPOSE] = marker.compose
        self.mark = mark
        self.template = environment.from_string(tree)
        self.is_sure = marker.is_sure
        self.tokens = {_MARKED + name: controls.marked(token, mark) for name, token in tokens.items()}


class ChatTemplate:
    """One compiled chat template. `special_tokens` are variables in it (`bos_token`, …).

    `follows_marks` and `arguments_as_text` are found out when a model is loaded (`template_probe.py`).
    Raises `ValueError` with the line number for a template that does not parse.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], controls: ControlStrings | None = None
    ) -> None:
        environment = _environment()
        tree = _parse(environment, source)
        self.source = source
        self.content_format = content_format.detect(tree)
        self.controls = controls or ControlStrings({})
        self.follows_marks = True
        self.arguments_as_text = False  # the template joins a tool call's arguments to text
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._marked: dict[str, _Marked] = {}

    def render(self, request: ChatRequest, now_s: float, text: str | None = None) -> Rendered:
        """The prompt's text. Raises `InvalidRequest` with the template's own message if it fails.

        `text`: all texts of the request in one, or more than those, if it is at hand.
        """
        for name in _NOT_FOR_TEMPLATES:
            if name in request.chat_template_kwargs:
                raise InvalidRequest(f"{name} can't be set by a request.", f"chat_template_kwargs.{name}")
        if not len(self.controls):
            return Rendered(self.plain(request, now_s), [])
        if self.follows_marks:
            rendered = self.render_marked(request, now_s, text)
            if all(map(self.controls.match, rendered.segments)):
                return rendered
        return self.render_disguised(request, now_s)

    def render_marked(self, request: ChatRequest, now_s: float, text: str | None = None) -> Rendered:
        """Render with marks; what comes out is not checked, unless the template may have looked at marks."""
        marked = self._marked_by(_unused(_texts_of(request) if text is None else [text]))
        opening, *segments = self._text(request, now_s, marked.template, marked.tokens).split(marked.mark)
        rendered = Rendered(opening, segments)
        if not marked.is_sure and rendered.text != self.plain(request, now_s):
            return self.render_disguised(request, now_s)
        return rendered

    def plain(self, request: ChatRequest, now_s: float) -> str:
        """The text alone, without any protection: what Hugging Face renders."""
        return self._text(request, now_s, self._template, {})

    def render_disguised(self, request: ChatRequest, now_s: float) -> Rendered:
        """Render with control strings and halves of them in the request broken by a noncharacter."""
        texts = _texts_of(request)
        guard = _unused(texts)
        fields = {
            name: mapped(value, lambda text: self._disguised(text, guard))
            for name, value in untrusted(request).items()
        }
        text = self.plain(replaced(request, fields), now_s)
        opening, *segments = [piece.replace(guard, "") for piece in self.controls.split(text)]
        return Rendered(opening, segments)

    def spells_control(self, request: ChatRequest) -> bool:
        """Whether a single text of the request holds a whole control string."""
        return any(self.controls.search(text) is not None for text in _texts_of(request))

    def _disguised(self, text: str, guard: str) -> str:
        first, *others = self.controls.split(text)
        text = first + "".join(other[0] + guard + other[1:] for other in others)
        if text.endswith(self.controls.beginnings):
            text += guard
        return guard + text if text.startswith(self.controls.ends) else text

    def _marked_by(self, mark: str) -> _Marked:
        if mark not in self._marked:
            self._marked[mark] = _Marked(self.source, self.controls, mark, self._special_tokens)
        return self._marked[mark]

    def _text(
        self, request: ChatRequest, now_s: float, template: Template, marked_tokens: Mapping[str, str]
    ) -> str:
        messages = conversation(
            request.messages, self.content_format, self._knows_developer, self.arguments_as_text
        )
        final_text = _mark_end(messages) if request.continue_final_message else None
        variables = {
            **self._special_tokens,
            **request.chat_template_kwargs,
            **marked_tokens,
            "messages": messages,
            "tools": request.tools,
            "documents": request.documents,
            "add_generation_prompt": request.add_generation_prompt,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime(now_s),
        }
        try:
            text = template.render(variables)
        except TemplateError as error:
            raise _template_error(str(error)) from error
        except Exception as error:
            # A template is a program: what it can't do with this chat is any exception.
            raise _template_error(f"{type(error).__name__}: {error}") from error
        return text if final_text is None else _cut_at_end(text, final_text)


def _texts_of(request: ChatRequest) -> list[str]:
    return list(leaves(list(untrusted(request).values())))


def _unused(texts: Iterable[str]) -> str:
    """A noncharacter that none of the texts holds."""
    texts = list(texts)
    for character in _NONCHARACTERS:
        if not any(character in text for text in texts):
            return character
    raise InvalidRequest(
        f"The request holds all of the noncharacters U+FDD0 to U+{ord(_NONCHARACTERS[-1]):04X}; "
        "at least one must be left out.",
        "messages",
    )


def _template_error(message: str) -> InvalidRequest:
    return InvalidRequest(
        f"The model's chat template can't render this request: {message[:_MAX_MESSAGE_CHARACTERS]}",
        "messages",
    )


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text; returns that text."""
    content = messages[-1]["content"] if messages else None
    if isinstance(content, str) and content:
        messages[-1]["content"] = content + _END_MARK
        return content
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _END_MARK
        return text
    raise InvalidRequest(
        "continue_final_message is true, but the final message has no text to continue.",
        "continue_final_message",
    )


def _cut_at_end(rendered: str, final_text: str) -> str:
    """The rendered text up to the mark; without trailing white space if the template trimmed the mark's."""
    end = rendered.rfind(_END_MARK.strip())
    if end < 0 or final_text.strip() not in rendered:
        raise InvalidRequest(
            "continue_final_message is true, but the chat template drops or rewrites the final message.",
            "continue_final_message",
        )
    return rendered[:end] if rendered.startswith(_END_MARK, end) else rendered[:end].rstrip()
