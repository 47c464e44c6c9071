"""A chat -> the prompt's text, through the model's own chat template.

The Jinja environment is the one that Hugging Face's `apply_chat_template` uses, and so is the result: a
sandbox without side effects, blocks trimmed, `tojson` without HTML escaping, `raise_exception`,
`strftime_now`, loop controls and the `generation` tag. The time comes in as `now_s`. Not here: encoding,
and making control strings within user text harmless.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline import content_format
from pipeline.conversation import conversation
from pipeline.errors import InvalidRequest
from pipeline.values import ChatRequest

_MAX_MESSAGE_CHARACTERS: Final = 500  # of a template's error
_NOT_FOR_TEMPLATES: Final = ("chat_template", "tokenize")  # as in vLLM: the server decides these
# Marks where the final message ends. Noncharacters, so that no text has them, and a space, which shows
# whether the template trims.
_END_MARK: Final = "\ufdd0\ufdd1 "


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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


class ChatTemplate:
    """One compiled chat template. `special_tokens` are variables in it (`bos_token`, …).

    Raises `ValueError` with the line number for a template that does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is broken in line {error.lineno}: {error.message}"
            ) from error
        self.source = source
        self.content_format = content_format.detect(tree)
        self._special_tokens = dict(special_tokens)
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, request: ChatRequest, now_s: float) -> str:
        """The prompt's text. Raises `InvalidRequest` with the template's own message if it fails."""
        for name in _NOT_FOR_TEMPLATES:
            if name in request.chat_template_kwargs:
                raise InvalidRequest(f"{name} can't be set by a request.", f"chat_template_kwargs.{name}")
        messages = conversation(request.messages, self.content_format, self._knows_developer)
        if not request.continue_final_message:
            return self._render(request, messages, now_s)
        final_text = _mark_end(messages)
        return _cut_at_end(self._render(request, messages, now_s), final_text)

    def _render(self, request: ChatRequest, messages: Sequence[Mapping[str, Any]], now_s: float) -> str:
        variables = {
            **self._special_tokens,
            **request.chat_template_kwargs,
            "messages": messages,
            "tools": request.tools,
            "documents": request.documents,
            "add_generation_prompt": request.add_generation_prompt,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime(now_s),
        }
        try:
            return self._template.render(variables)
        except TemplateError as error:
            raise _template_error(str(error)) from error
        except Exception as error:
            # A template is a program: what it can't do with this chat is any exception.
            raise _template_error(f"{type(error).__name__}: {error}") from error


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
