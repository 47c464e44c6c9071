"""The files of a small model, as a worker offers them."""

from __future__ import annotations

import json
from typing import Any

from tests.pipeline import chat_templates, small_tokenizers


def model_files(**config: Any) -> dict[str, bytes]:
    """Byte-level tokenizer and ChatML template; `config`: tokenizer_config.json, None takes a field out."""
    fields = {
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "chat_template": chat_templates.CHATML,
        **config,
    }
    return {
        "tokenizer.json": small_tokenizers.byte_level().to_str().encode(),
        "tokenizer_config.json": json.dumps({k: v for k, v in fields.items() if v is not None}).encode(),
    }
