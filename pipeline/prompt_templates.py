"""Named prompt templates: messages with slots that a request fills.

`{slot}` in a content is a slot, `{{` and `}}` are braces. Nothing else is a language here: no conditions, no
loops. A template's text is the operator's own, a slot's value is the client's, and once expanded both are
plain message contents, so that whatever makes content harmless holds for them too. Not here: the model's chat
template (`pipeline/rendering.py`), and where templates are configured (`gateway/prompt_settings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pipeline.errors import InvalidRequest
from pipeline.values import ChatRequest, Delivery, Generation

_PIECE: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_MAX_SHOWN_CHARS: Final = 60

Texts = Sequence[Mapping[str, str]]  # messages with plain contents
# Two values that share no beginning and no end, in the same Unicode class, so that what a tokenizer joins to
# one it joins to the other.
_DUMMIES: Final = ("x", "k")


class TemplateSyntaxError(ValueError):
    """A content that is no template. `position` counts characters from 0."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(f"{message} at character {position}")
        self.position = position


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """One message. `pieces` is its text cut at the slots: text, slot, text, slot, …, text."""

    role: str
    content: str
    pieces: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", tuple(_pieces(self.content)))

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the slots in the order of the text, each as often as it stands there."""
        return self.pieces[1::2]

    def filled(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The message with every slot replaced. Values are not looked into for slots."""
        parts = list(self.pieces)
        parts[1::2] = [variables[slot] for slot in self.slots]
        return {"role": self.role, "content": "".join(parts)}


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A named list of messages. Raises `TemplateSyntaxError` where a content does not parse."""

    name: str
    messages: tuple[TemplateMessage, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the slots, each once, in the order in which they first stand in the text."""
        return tuple(dict.fromkeys(slot for message in self.messages for slot in message.slots))


def expanded(request: ChatRequest, templates: Mapping[str, PromptTemplate]) -> ChatRequest:
    """The request with its template's messages before its own, and no template.

    `templates`: by name. Raises `InvalidRequest` for an unknown template, an unknown slot or a missing one.
    """
    use = request.template
    if use is None:
        return request
    template = templates.get(use.name)
    if template is None:
        known = ", ".join(templates) or "none"
        raise InvalidRequest(
            f"'template.name' is {shown(use.name)}; this server's templates are: {known}.", "template.name"
        )
    check_variables(template, use.variables)
    messages = [message.filled(use.variables) for message in template.messages]
    return replace(request, messages=(*messages, *request.messages), template=None)


def check_variables(template: PromptTemplate, variables: Iterable[str]) -> None:
    """Raises `InvalidRequest` unless there is a variable for each slot, and no other."""
    slots = template.slots
    allowed = f"the slots of {template.name!r} are: {', '.join(slots) or 'none'}"
    for name in variables:
        if name not in slots:
            param = "template.variables"
            raise InvalidRequest(f"'{param}' has the unknown slot {shown(name)}; {allowed}.", param)
    missing = [slot for slot in slots if slot not in variables]
    if missing:
        raise InvalidRequest(
            f"'template.variables' lacks {', '.join(missing)}; {allowed}.",
            f"template.variables.{missing[0]}",
        )


def beginnings(template: PromptTemplate, variables: Mapping[str, str]) -> tuple[Texts, Texts]:
    """The template's messages twice, unbound slots filled differently.

    What the two prompts share is what every prompt with these variables begins with.
    """
    first, second = (
        [message.filled(_with_dummies(template, variables, dummy)) for message in template.messages]
        for dummy in _DUMMIES
    )
    return first, second


def paired_requests(both: tuple[Texts, Texts], model: str) -> tuple[ChatRequest, ChatRequest]:
    """A request for each of two beginnings: what both prompts have in common holds for all that begin so.

    A user's message follows those that do not end with one: a different one in each, and chat templates want
    it.
    """
    first, second = (
        ChatRequest(model=model, messages=messages, generation=Generation({}), delivery=Delivery())
        for messages in map(_with_user, both, _DUMMIES)
    )
    return first, second


def _with_user(messages: Texts, dummy: str) -> Texts:
    ends_with_user = messages[-1]["role"] == "user"
    return messages if ends_with_user else [*messages, {"role": "user", "content": dummy}]


def _with_dummies(template: PromptTemplate, variables: Mapping[str, str], dummy: str) -> dict[str, str]:
    return {slot: variables.get(slot, dummy) for slot in template.slots}


def _pieces(content: str) -> Iterator[str]:
    """Text and slots in turn. Raises `TemplateSyntaxError`."""
    text, end = "", 0
    for match in _PIECE.finditer(content):
        text += content[end : match.start()]
        end = match.end()
        found, slot = match[0], match[1]
        if found in ("{{", "}}"):
            text += found[0]
        elif slot is None:
            raise TemplateSyntaxError(f"a single {found!r} (write {found * 2!r} for a brace)", match.start())
        elif not slot.isidentifier():
            raise TemplateSyntaxError(
                f"{shown(slot)} is no slot's name (write {{{{ and }}}} for braces)", match.start()
            )
        else:
            yield text
            yield slot
            text = ""
    yield text + content[end:]


def shown(value: object) -> str:
    """What stands in an error for a name or value that may be of any length."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
