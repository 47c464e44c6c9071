"""The tokenizer that vLLM's parsers ask for the ids of their markers: Hugging Face's, made once per model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.model_text import SPECIAL_TOKENS_MAP, TOKENIZER, TOKENIZER_CONFIG, named_tokens


def parser_tokenizer(files: Mapping[str, bytes]) -> Any:
    """From a model's files (`pipeline.model_text.FILES`). Takes 1 s for a large vocabulary.

    The vocabulary is a dictionary made once: vLLM asks for it for each choice, and making it takes 100 ms.
    Raises `ValueError` for a file that is missing or broken.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.hf import get_cached_tokenizer

    try:
        config = json.loads(files.get(SPECIAL_TOKENS_MAP, b"{}")) | json.loads(
            files.get(TOKENIZER_CONFIG, b"{}")
        )
        backend = Tokenizer.from_buffer(files[TOKENIZER])
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"no tokenizer for vLLM's parsers: {error}") from error
    named = {name: text for name, text in named_tokens(config).items() if text}
    return get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **named))
