"""The two settings that are more than a value: `templates` and `warm`, from YAML to frozen values and back.

Only the configuration file can give them. Each problem names its entry
(`templates[2].messages[0].content`).

Not here: what a template does (`pipeline/prompt_templates.py`), and when a prompt is warmed
(`gateway/warmup.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pipeline.prompt_templates import (
    PromptTemplate,
    TemplateMessage,
    TemplateSyntaxError,
    Texts,
    beginnings,
    paired_requests,
    shown,
)
from pipeline.values import ChatRequest, TemplateUse

Entry = TypeVar("Entry")

MAX_ROLE_CHARS: Final = 64  # as in a request


class PromptSettingsError(ValueError):
    """A setting does not have its shape. `problems` has one line for each reason."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """The beginning of prompts that workers keep in their prefix cache: messages, or a template of which
    some slots are bound. The first unbound slot is where it ends.

    `cache_salts`: warmed once for each; None is that of requests without one. `model` None: every model.
    """

    messages: tuple[Mapping[str, str], ...] = ()
    template: TemplateUse | None = None
    cache_salts: tuple[str | None, ...] = (None,)
    model: str | None = None

    @property
    def title(self) -> str:
        """The template's name, else how many messages; never text."""
        if self.template is not None:
            return self.template.name
        num_messages = len(self.messages)
        return f"{num_messages} message{'s' * (num_messages > 1)}"

    def __str__(self) -> str:
        num_salts = len(self.cache_salts)
        return self.title if num_salts == 1 else f"{self.title} for {num_salts} salts"


def read_templates(value: Any) -> tuple[PromptTemplate, ...]:
    """The value of `templates:`. Raises `PromptSettingsError`."""
    templates = _each(value, "templates", _template)
    names = [template.name for template in templates]
    twice = [f"templates[{index}].name" for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise PromptSettingsError(*(f"{path}: an earlier template has the same name" for path in twice))
    return templates


def read_warm(value: Any) -> tuple[WarmPrompt, ...]:
    """The value of `warm:`. Raises `PromptSettingsError`."""
    return _each(value, "warm", _warm)


def plain_templates(templates: Sequence[PromptTemplate]) -> list[dict[str, Any]]:
    """What `read_templates` reads, as JSON types."""
    return [
        {
            "name": template.name,
            "messages": [{"role": message.role, "content": message.content} for message in template.messages],
        }
        for template in templates
    ]


def plain_warm(warm: Sequence[WarmPrompt]) -> list[dict[str, Any]]:
    """What `read_warm` reads, as JSON types."""
    return [_plain_warm(prompt) for prompt in warm]


def check_warm(warm: Sequence[WarmPrompt], templates: Sequence[PromptTemplate]) -> Iterator[str]:
    """One line for each template or slot that a warm prompt names and that is not there."""
    known = {template.name: template for template in templates}
    for index, prompt in enumerate(warm):
        if prompt.template is None:
            continue
        path, template = f"warm[{index}].template", known.get(prompt.template.name)
        if template is None:
            names = ", ".join(known) or "none"
            yield f"{path}.name: {shown(prompt.template.name)} is not allowed; the templates are: {names}"
            continue
        for slot in prompt.template.variables:
            if slot not in template.slots:
                slots = ", ".join(template.slots) or "none"
                yield f"{path}.variables: {shown(slot)} is not allowed; its slots are: {slots}"


def warm_requests(
    prompt: WarmPrompt, templates: Mapping[str, PromptTemplate], model: str
) -> tuple[ChatRequest, ChatRequest]:
    """Two requests for the prompt: it is what their prompts' ids have in common at the beginning.

    `templates`: by name. With everything bound and a user's message at the end, the two are equal.
    """
    both: tuple[Texts, Texts] = prompt.messages, prompt.messages
    if prompt.template is not None:
        both = beginnings(templates[prompt.template.name], prompt.template.variables)
    return paired_requests(both, model)


def _plain_warm(prompt: WarmPrompt) -> dict[str, Any]:
    plain: dict[str, Any] = {"cache_salts": list(prompt.cache_salts)}
    if prompt.template is None:
        plain["messages"] = [dict(message) for message in prompt.messages]
    else:
        plain["template"] = {"name": prompt.template.name, "variables": dict(prompt.template.variables)}
    return plain if prompt.model is None else plain | {"model": prompt.model}


def _template(value: Any, path: str) -> PromptTemplate:
    fields = _fields(value, path, needed=("name", "messages"))
    name = _text(fields["name"], f"{path}.name")
    return PromptTemplate(name, _some(fields["messages"], f"{path}.messages", _template_message))


def _template_message(value: Any, path: str) -> TemplateMessage:
    message = _message(value, path)
    try:
        return TemplateMessage(message["role"], message["content"])
    except TemplateSyntaxError as error:
        raise PromptSettingsError(f"{path}.content: {error}") from None


def _message(value: Any, path: str) -> dict[str, str]:
    fields = _fields(value, path, needed=("role", "content"))
    role = _text(fields["role"], f"{path}.role")
    if len(role) > MAX_ROLE_CHARS:
        raise PromptSettingsError(
            f"{path}.role: {len(role)} characters; at most {MAX_ROLE_CHARS} are allowed"
        )
    return {"role": role, "content": _text(fields["content"], f"{path}.content", may_be_empty=True)}


def _warm(value: Any, path: str) -> WarmPrompt:
    fields = _fields(value, path, optional=("messages", "template", "cache_salts", "model"))
    if ("messages" in fields) == ("template" in fields):
        raise PromptSettingsError(f"{path}: it needs either messages or a template")
    messages: tuple[Mapping[str, str], ...] = ()
    template = None
    if "messages" in fields:
        messages = _some(fields["messages"], f"{path}.messages", _message)
    else:
        template = _template_use(fields["template"], f"{path}.template")
    salts = _some(fields.get("cache_salts", [None]), f"{path}.cache_salts", _salt)
    model = fields.get("model")
    return WarmPrompt(
        messages=messages,
        template=template,
        cache_salts=tuple(dict.fromkeys(salts)),
        model=None if model is None else _text(model, f"{path}.model"),
    )


def _template_use(value: Any, path: str) -> TemplateUse:
    fields = _fields(value, path, needed=("name",), optional=("variables",))
    variables = fields.get("variables") or {}
    if not isinstance(variables, dict):
        raise PromptSettingsError(
            f"{path}.variables: {shown(variables)} is not allowed; it must be a mapping"
        )
    texts = {
        slot: _text(text, f"{path}.variables.{slot}", may_be_empty=True) for slot, text in variables.items()
    }
    return TemplateUse(_text(fields["name"], f"{path}.name"), texts)


def _salt(value: Any, path: str) -> str | None:
    return None if value is None else _text(value, path)


def _some(value: Any, path: str, read: Callable[[Any, str], Entry]) -> tuple[Entry, ...]:
    entries = _each(value, path, read)
    if not entries:
        raise PromptSettingsError(f"{path}: an empty list; it needs at least one entry")
    return entries


def _each(value: Any, path: str, read: Callable[[Any, str], Entry]) -> tuple[Entry, ...]:
    """Every entry, read. The problems of all entries are told at once."""
    if not isinstance(value, list | tuple):
        raise PromptSettingsError(f"{path}: {shown(value)} is not allowed; it must be a list")
    entries: list[Entry] = []
    problems: list[str] = []
    for index, entry in enumerate(value):
        try:
            entries.append(read(entry, f"{path}[{index}]"))
        except PromptSettingsError as error:
            problems += error.problems
    if problems:
        raise PromptSettingsError(*problems)
    return tuple(entries)


def _fields(
    value: Any, path: str, needed: Sequence[str] = (), optional: Sequence[str] = ()
) -> dict[str, Any]:
    """The entry as a mapping with these keys and no other."""
    allowed = ", ".join((*needed, *optional))
    if not isinstance(value, dict):
        raise PromptSettingsError(f"{path}: {shown(value)} is not allowed; it must be a mapping of {allowed}")
    problems = [f"{path}.{key}: it is missing" for key in needed if key not in value]
    problems += [
        f"{path}: unknown key {shown(key)}; it takes {allowed}"
        for key in value
        if key not in needed and key not in optional
    ]
    if problems:
        raise PromptSettingsError(*problems)
    return value


def _text(value: Any, path: str, *, may_be_empty: bool = False) -> str:
    if isinstance(value, str) and (value or may_be_empty):
        return value
    raise PromptSettingsError(f"{path}: {shown(value)} is not allowed; it must be a text")
