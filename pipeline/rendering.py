"""A chat -> the prompt's text, through the model's own chat template, cut where its control strings stand.

The text is that of Hugging Face's `apply_chat_template`. The time comes in as `now_s`.

Which control strings are the template's own is known by marks in its literals (`template_marks.py`): user
text can spell any of them and starts no segment with it. Where marks cannot be followed (a template that
compares or measures what it wrote), control strings in the *request* are disguised while it is rendered,
which is as safe, but hides them from a template that looks for them. Not here: encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import Template, TemplateError

from pipeline import content_format
from pipeline.controls import ControlStrings
from pipeline.conversation import conversation
from pipeline.errors import InvalidRequest
from pipeline.leaves import leaves, mapped, replaced, untrusted
from pipeline.template_marks import COMPOSE, KNOWN_ROLES, Marker, literals
from pipeline.template_sandbox import new_environment, parse, raise_exception, strftime
from pipeline.values import ChatRequest

_MAX_MESSAGE_CHARACTERS: Final = 500  # of a template's error
_NOT_FOR_TEMPLATES: Final = ("chat_template", "tokenize")  # as in vLLM: the server decides these
# Noncharacters of Unicode, which no text needs. One that the request does not hold breaks control strings.
_NONCHARACTERS: Final = tuple(map(chr, range(0xFDD0, 0xFDEE)))
# One of these marks them. The first leaves ASCII text at a byte a character: quicker to join and to cut.
_MARKS: Final = ("\x01", *_NONCHARACTERS)
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


def template_literals(source: str) -> list[str]:
    """All texts in a template, for `pipeline.controls.control_strings`. Raises like `ChatTemplate`."""
    return list(literals(parse(new_environment(), source)))


class _Marked:
    """The template with one mark in its literals."""

    def __init__(self, source: str, controls: ControlStrings, mark: str, tokens: Mapping[str, str]) -> None:
        environment = new_environment()
        tree = parse(environment, source)
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
        environment = new_environment()
        tree = parse(environment, source)
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
            if all(map(self.controls.begins, rendered.segments)):
                return rendered
        return self.render_disguised(request, now_s)

    def render_marked(self, request: ChatRequest, now_s: float, text: str | None = None) -> Rendered:
        """Render with marks; what comes out is not checked, unless the template may have looked at marks."""
        marked = self._marked_by(_unused(_texts_of(request) if text is None else [text], _MARKS))
        opening, *segments = self._text(request, now_s, marked.template, marked).split(marked.mark)
        rendered = Rendered(opening, segments)
        if not marked.is_sure and rendered.text != self.plain(request, now_s):
            return self.render_disguised(request, now_s)
        return rendered

    def plain(self, request: ChatRequest, now_s: float) -> str:
        """The text alone, without any protection: what Hugging Face renders."""
        return self._text(request, now_s, self._template)

    def render_disguised(self, request: ChatRequest, now_s: float) -> Rendered:
        """Render with control strings and halves of them in the request broken by a noncharacter."""
        texts = _texts_of(request)
        guard = _unused(texts, _NONCHARACTERS)
        fields = {
            name: mapped(value, lambda text: self._disguised(text, guard))
            for name, value in untrusted(request).items()
        }
        fields["messages"] = [self._with_broken_role(message, guard) for message in fields["messages"]]
        text = self.plain(replaced(request, fields), now_s)
        opening, *segments = [piece.replace(guard, "") for piece in self.controls.split(text)]
        if not self.spells_control(request):
            # What was broken were halves; a template that counts characters sees them whole.
            whole = self.controls.split(self.plain(request, now_s))
            if len(whole) == len(segments) + 1:
                opening, *segments = whole
        return Rendered(opening, segments)

    def spells_control(self, request: ChatRequest) -> bool:
        """Whether a single text of the request holds a whole control string."""
        return any(self.controls.search(text) is not None for text in _texts_of(request))

    def _disguised(self, text: str, guard: str) -> str:
        first, *others = self.controls.split(text)
        text = first + "".join(other[0] + guard + other[1:] for other in others)
        # Where a template trims, the guard must stand at what is left.
        rest = text.rstrip()
        if rest.endswith(self.controls.beginnings):
            text = rest + guard + text[len(rest) :]
        elif text.endswith(self.controls.beginnings):
            text += guard
        rest = text.lstrip()
        if rest.startswith(self.controls.ends):
            text = text[: len(text) - len(rest)] + guard + rest
        elif text.startswith(self.controls.ends):
            text = guard + text
        return text

    def _with_broken_role(self, message: dict[str, Any], guard: str) -> dict[str, Any]:
        """Templates put control strings together from roles: from those that they know, and no others."""
        role = message["role"]
        is_known = role in KNOWN_ROLES or f"'{role}'" in self.source or f'"{role}"' in self.source
        return message if is_known else {**message, "role": guard + role}

    def _marked_by(self, mark: str) -> _Marked:
        if mark not in self._marked:
            self._marked[mark] = _Marked(self.source, self.controls, mark, self._special_tokens)
        return self._marked[mark]

    def _text(
        self, request: ChatRequest, now_s: float, template: Template, marked: _Marked | None = None
    ) -> str:
        messages = conversation(
            request.messages, self.content_format, self._knows_developer, self.arguments_as_text
        )
        final_text = _mark_end(messages) if request.continue_final_message else None
        variables = {
            **self._special_tokens,
            **request.chat_template_kwargs,
            **(marked.tokens if marked is not None else {}),
            "messages": messages,
            "tools": request.tools,
            "documents": request.documents,
            "add_generation_prompt": request.add_generation_prompt,
            "raise_exception": raise_exception,
            "strftime_now": strftime(now_s),
        }
        try:
            text = template.render(variables)
        except TemplateError as error:
            raise _template_error(str(error)) from error
        except Exception as error:
            # A template is a program: what it can't do with this chat is any exception.
            raise _template_error(f"{type(error).__name__}: {error}") from error
        return text if final_text is None else _cut_at_end(text, final_text, marked.mark if marked else "")


def _texts_of(request: ChatRequest) -> list[str]:
    return list(leaves(list(untrusted(request).values())))


def _unused(texts: Sequence[str], characters: Iterable[str]) -> str:
    """The first of the characters that none of the texts holds."""
    for character in characters:
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
    if isinstance(content, list) and content and "text" in content[-1]:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _END_MARK
        return text
    raise InvalidRequest(
        "continue_final_message is true, but the final message does not end with a text to continue.",
        "continue_final_message",
    )


def _cut_at_end(rendered: str, final_text: str, mark: str) -> str:
    """The rendered text up to the end mark; without trailing white space if the template trimmed that one's.

    `mark`: what stands before control strings, if anything.
    """
    end = rendered.rfind(_END_MARK.strip())
    if end < 0 or final_text.strip() not in (rendered.replace(mark, "") if mark else rendered):
        raise InvalidRequest(
            "continue_final_message is true, but the chat template drops or rewrites the final message.",
            "continue_final_message",
        )
    return rendered[:end] if rendered.startswith(_END_MARK, end) else rendered[:end].rstrip()
