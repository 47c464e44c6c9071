"""Fields of OpenAI's and vLLM's bodies that Headrace knows and does not serve.

A field is here when ignoring it would change the answer: it gets a 400 that names it. Fields that only tune,
label or bill a request (`metadata`, `store`, `service_tier`, `stream_interval`, …) are ignored like unknown
ones.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.json_body import show
from pipeline.errors import InvalidRequest

# What to do instead, where there is something.
_STRUCTURED: Final = "use 'structured_outputs' or 'response_format'"
_IDS: Final = "they would show what content rules take out of the text"
_HINTS: Final = {
    "chat_template": "the server's own template is used",
    "echo": "the answer holds only what is generated",
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "guided_whitespace_pattern": _STRUCTURED,
    "prompt_embeds": "use 'prompt'",
    "prompt_logprobs": "'logprobs' gives those of the answer",
    "return_token_ids": _IDS,
    "return_tokens_as_token_ids": _IDS,
    "truncate_prompt_tokens": "shorten the prompt",
}
# Values that ask for what happens anyway, besides null, false, [] and {}.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "function_call": ("none",),
    "modalities": (["text"],),
    "suffix": ("",),
}


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Every one of these is refused unless it asks for nothing."""

    audio: Any = None
    chat_template: Any = None
    echo: Any = None
    ec_transfer_params: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    logprob_token_ids: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    return_prompt_text: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    suffix: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


NAMES: Final = UnsupportedFields.__struct_fields__


def refuse_unsupported(body: UnsupportedFields) -> None:
    """Raises `InvalidRequest` for the first field that asks for something."""
    for name in NAMES:
        value = getattr(body, name)
        if value is not None and value is not False and value != [] and value != {}:
            _refuse(name, value)


def _refuse(name: str, value: object) -> None:
    if value in _NEUTRAL.get(name, ()):
        return
    hint = f"; {_HINTS[name]}" if name in _HINTS else ""
    raise InvalidRequest(
        f"'{name}' is not supported by this server{hint}. Got {show(value, is_text=True)}.",
        name,
        "unsupported_field",
    )
