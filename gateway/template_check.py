"""What `check-config` says of prompt templates that work, but make engines compute what they could reuse.

A prefix cache holds the beginnings of prompts, in whole KV blocks: text behind a slot is computed again
whenever the slot's value differs. Not here: templates that do not work (`gateway/prompt_settings.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from backend.vllm_config import VllmConfigError, default_arguments, is_cpu_build
from gateway.settings import Settings
from pipeline.prompt_templates import PromptTemplate

CHARACTERS_PER_TOKEN: Final = 4  # of English; where no tokenizer is at hand
_BLOCK_SIZE: Final = 16  # vLLM's on a GPU, in tokens


def template_warnings(settings: Settings) -> Iterator[str]:
    """One line for each template with more than one KV block of static text after its first slot."""
    templates = settings.prompts.templates
    if not templates:
        return
    count, is_exact = _counter(settings)
    block_size = _block_size(settings)
    for index, template in enumerate(templates):
        num_tokens = sum(map(count, _after_first_slot(template)))
        if num_tokens > block_size:
            number = num_tokens if is_exact else f"about {num_tokens}"
            estimate = "" if is_exact else f" (estimated at {CHARACTERS_PER_TOKEN} characters a token)"
            yield (
                f"templates[{index}] ({template.name}): {number} tokens of static text follow its first slot "
                f"{{{template.slots[0]}}}{estimate}; no prefix cache can reuse them (its blocks have "
                f"{block_size} tokens). Put them before it."
            )


def _after_first_slot(template: PromptTemplate) -> Iterator[str]:
    """The texts between slots, from the first slot on."""
    has_slot = False
    for message in template.messages:
        texts = message.pieces[::2]
        yield from texts if has_slot else texts[1:]
        has_slot = has_slot or bool(message.slots)


def _counter(settings: Settings) -> tuple[Callable[[str], int], bool]:
    """How to count a text's tokens, and whether that is exact: with a tokenizer of this machine, if any."""
    folders = settings.upstream.tokenizer or (settings.engine.model or "",)
    path = Path(folders[0].rpartition("=")[2]).expanduser() / "tokenizer.json"
    if len(folders) != 1 or not folders[0] or not path.is_file():
        return lambda text: len(text) // CHARACTERS_PER_TOKEN, False
    encode = Tokenizer.from_file(str(path)).encode
    return lambda text: len(encode(text, add_special_tokens=False).ids), True


def _block_size(settings: Settings) -> int:
    """Of the KV cache, as far as these settings tell; a worker elsewhere may have another."""
    if settings.scripted.scripted:
        return settings.scripted.block_size
    arguments = settings.engine.engine_args
    try:
        defaults = default_arguments(arguments, is_cpu_build(os.environ))
    except VllmConfigError:  # no engine here
        defaults = []
    return _named_block_size([*defaults, *arguments])


def _named_block_size(arguments: Sequence[str]) -> int:
    """The last `--block-size N` or `--block-size=N`."""
    found = _BLOCK_SIZE
    for argument, following in pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == "--block-size":
            number = value if equals else following
            found = int(number) if number.isdigit() else found  # vLLM itself will refuse another
    return found
