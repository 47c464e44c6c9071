"""The fields of a Realtime session or response -> those of a chat body, and its errors in the words that the
client used. Which fields are in force is the business of `gateway/realtime_session.py`.

Both generations of OpenAI's names are read, and every field of `POST /v1/chat/completions` that has a meaning
here. Fields that only concern audio have none, since there is none: they are accepted and not kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from gateway.chat_schema import ChatBody, parse_chat
from gateway.json_body import show
from gateway.media_parts import PCM_RATE
from gateway.sampling_fields import RequestLimits
from pipeline.errors import InvalidRequest
from pipeline.speech import Speech
from pipeline.values import ChatRequest, Json

Settings = Mapping[str, Json]  # by the newer names, as the client gave them; null is left out

TEXT_ONLY: Final = ["text"]
MAX_INCLUDES: Final = 16
TIMINGS: Final = "timings"
# What may be asked for beside events' own fields. The second is OpenAI's, and has no effect.
INCLUDES: Final = (TIMINGS, "item.input_audio_transcription.logprobs")
# Older names of the Realtime API, and the names that chats have for the same.
_ALIASES: Final = {
    "modalities": "output_modalities",
    "max_response_output_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
# Fields of a chat body that something else is in the place of; values that ask for what happens anyway.
_ELSEWHERE: Final[dict[str, tuple[str, tuple[Json, ...]]]] = {
    "messages": ("create conversation items", ()),
    "n": ("a response has one choice", (1,)),
    "logprobs": ("no event carries them", (False,)),
    "top_logprobs": ("no event carries them", (0,)),
    "stream": ("a response is always streamed", (True,)),
    "stream_options": ('"include": ["timings"] gives the timings', ({},)),
    "continue_final_message": ("a response is a new item", (False,)),
    "add_generation_prompt": ("a response is a new item", (True,)),
    "prompt": ("use 'instructions' or 'template'", ()),
}
# What may be set, beside the fields of a chat body.
_OWN: Final = frozenset(
    {"instructions", "output_modalities", "max_output_tokens", "reasoning", "truncation", "speech", "include"}
)
_SETTINGS: Final = (_OWN | set(ChatBody.__struct_fields__)) - {"model", "audio", "modalities", *_ELSEWHERE}
_TRUNCATIONS: Final = {"auto": "drop_oldest", "disabled": "error"}
_SOME_MESSAGE: Final = [{"role": "user", "content": ""}]  # a chat body must have one
_TOP: Final = re.compile(r"[^.\[]+")


@dataclass(frozen=True, slots=True)
class Given:
    """What one event sets. `settings` by the newer names, null where the client reset one.

    `names`: the name that the client used for each. `where`: `session` or `response`.
    """

    where: str
    settings: dict[str, Json]
    names: dict[str, str]

    def path(self, name: str) -> str:
        """How an error names a setting."""
        where = self.where if name in self.settings else "session"
        return f"{where}.{self.names.get(name, name)}"


def read_fields(fields: Mapping[str, Json], where: str) -> Given:
    """The settings in the fields of a session or response. Raises `InvalidRequest`.

    Only what a chat body does not have is checked here.
    """
    settings: dict[str, Json] = {}
    names: dict[str, str] = {}
    for given_name, value in fields.items():
        param, name = f"{where}.{given_name}", _ALIASES.get(given_name, given_name)
        if name in _ELSEWHERE:
            _refuse_elsewhere(name, value, param)
        check = _CHECKS.get(name)
        if check is not None and value is not None:
            check(value, param)
        if name in _SETTINGS and (name == given_name or name not in settings):
            settings[name], names[name] = value, given_name
    return Given(where, settings, names)


def chat_request(settings: Settings, given: Given, model: str, limits: RequestLimits) -> ChatRequest:
    """The request that these settings make, with a message in it that stands for the conversation's.

    `given`: what was set last, for errors. Raises `InvalidRequest`.
    """
    body = {"model": model, "messages": _SOME_MESSAGE, **_chat_fields(settings)}
    try:
        return parse_chat(json.dumps(body).encode(), limits, always_streams=True)
    except InvalidRequest as error:
        raise _in_own_words(error, settings, given) from None


def _chat_fields(settings: Settings) -> dict[str, Json]:
    chat = {name: value for name, value in settings.items() if name not in _OWN}
    if settings.get("max_output_tokens", "inf") != "inf":
        chat["max_tokens"] = settings["max_output_tokens"]
    if isinstance(reasoning := settings.get("reasoning"), dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    if "truncation" in settings and "context_policy" not in settings:
        truncation = settings["truncation"]
        chat["context_policy"] = _TRUNCATIONS["auto" if isinstance(truncation, dict) else truncation]
    if isinstance(tools := chat.get("tools"), list):
        chat["tools"] = [_nested(tool) for tool in tools] or None
    if chat.get("tools") is None and chat.get("tool_choice") == "auto":
        del chat["tool_choice"]  # the Realtime API's default, also where there are none
    if "tool_choice" in chat:
        chat["tool_choice"] = _nested(chat["tool_choice"])
    return chat


def _nested(value: Json) -> Json:
    """A flat tool, or a flat choice of one, as chats have it: with its fields in `function`."""
    if not _is_flat(value):
        return value
    function = {name: field for name, field in value.items() if name != "type"}
    return {"type": value.get("type", "function"), "function": function}


def _is_flat(value: Json) -> bool:
    return isinstance(value, dict) and "function" not in value and "allowed_tools" not in value


def _in_own_words(error: InvalidRequest, settings: Settings, given: Given) -> InvalidRequest:
    """An error of the chat body that names the field as the client wrote it."""
    match = _TOP.match(error.param or "")
    if match is None:
        return InvalidRequest(
            str(error).replace("The body", f"The {given.where}", 1), given.where, error.code
        )
    name, rest = match[0], (error.param or "")[match.end() :]
    if name == "max_tokens":
        name = "max_output_tokens"
    elif name == "reasoning_effort" and "reasoning" in settings:
        name, rest = "reasoning", ".effort"
    elif name == "tools" and (found := re.match(r"\[(\d+)\]\.function", rest)):
        if _is_flat(settings["tools"][int(found[1])]):
            rest = f"[{found[1]}]{rest[found.end() :]}"
    elif name == "tool_choice" and _is_flat(settings.get(name)):
        rest = rest.removeprefix(".function")
    param = given.path(name) + rest
    message = str(error).replace(f"'{error.param}'", f"'{param}'", 1)
    return InvalidRequest(message, param, error.code)


def _refuse_elsewhere(name: str, value: Json, param: str) -> None:
    hint, neutral = _ELSEWHERE[name]
    if value is not None and not any(
        value is each or (value == each and type(value) is type(each)) for each in neutral
    ):
        raise InvalidRequest(
            f"'{param}' is not supported here: {hint}. Got {show(value, is_text=True)}.",
            param,
            "unsupported_field",
        )


def _check_modalities(value: Json, param: str) -> None:
    if value == TEXT_ONLY:
        return
    asked = ' with "audio" in it' if isinstance(value, list) and "audio" in value else ""
    raise InvalidRequest(
        f"'{param}' must be [\"text\"], for this server answers in text; got {show(value)}{asked}.",
        param,
        "unsupported_field",
    )


def _check_instructions(value: Json, param: str) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"'{param}' must be a string, got {show(value)}.", param)


def _check_max_output_tokens(value: Json, param: str) -> None:
    if isinstance(value, str) and value != "inf":
        raise InvalidRequest(f"'{param}' must be an integer or \"inf\", got {show(value)}.", param)


def _check_reasoning(value: Json, param: str) -> None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{param}' must be an object, got {show(value)}.", param)


def _check_tools(value: Json, param: str) -> None:
    """Only their kinds: a chat body's errors would miss the fields of a function in those of another kind."""
    for index, tool in enumerate(value if isinstance(value, list) else ()):
        if isinstance(tool, dict):
            _one_of(tool.get("type", "function"), ("function",), f"{param}[{index}].type")


def _check_truncation(value: Json, param: str) -> None:
    if isinstance(value, dict):
        _one_of(value.get("type"), ("retention_ratio",), f"{param}.type")
    else:
        _one_of(value, tuple(_TRUNCATIONS), param)


def _check_speech(value: Json, param: str) -> None:
    _one_of(value, get_args(Speech), param)


def _check_type(value: Json, param: str) -> None:
    _one_of(value, ("realtime",), param)


def _check_include(value: Json, param: str) -> None:
    if not isinstance(value, list) or len(value) > MAX_INCLUDES:
        raise InvalidRequest(
            f"'{param}' must be an array of at most {MAX_INCLUDES}, got {show(value)}.", param
        )
    for index, name in enumerate(value):
        _one_of(name, INCLUDES, f"{param}[{index}]")


def _check_audio(value: Json, param: str) -> None:
    """Sound in content parts has one format; what else is said of audio concerns nothing."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{param}' must be an object, got {show(value)}.", param)
    given = value.get("input")
    form = given.get("format") if isinstance(given, dict) else None
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type", "audio/pcm") != "audio/pcm":
        kind = form.get("type") if isinstance(form, dict) else form
        raise _bad_format(f"{param}.input.format.type", '"audio/pcm"', kind)
    if form.get("rate", PCM_RATE) not in (None, PCM_RATE):
        raise _bad_format(f"{param}.input.format.rate", str(PCM_RATE), form["rate"])


def _check_audio_format(value: Json, param: str) -> None:
    if value != "pcm16":
        raise _bad_format(param, '"pcm16"', value)


def _bad_format(param: str, wanted: str, value: Json) -> InvalidRequest:
    return InvalidRequest(f"'{param}' must be {wanted}, got {show(value)}.", param, "unsupported_field")


def _one_of(value: Json, allowed: Sequence[str], param: str) -> None:
    if value not in allowed:
        raise InvalidRequest(f"'{param}' must be one of {', '.join(allowed)}; got {show(value)}.", param)


_CHECKS: Final[dict[str, Callable[[Any, str], None]]] = {
    "type": _check_type,
    "audio": _check_audio,
    "input_audio_format": _check_audio_format,
    "output_modalities": _check_modalities,
    "instructions": _check_instructions,
    "max_output_tokens": _check_max_output_tokens,
    "reasoning": _check_reasoning,
    "tools": _check_tools,
    "truncation": _check_truncation,
    "speech": _check_speech,
    "include": _check_include,
}
