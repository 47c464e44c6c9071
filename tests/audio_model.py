"""A tiny model that hears, for sounds on the real engine: Qwen2-Audio without weights.

The engine makes weights of its own for it (`--load-format dummy`), which are next to nothing: what it says
does not depend on the sound. How many tokens a sound becomes does, and what the prefix cache makes of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from tests.vision_model import write_tokenizer

AUDIO_TOKEN: Final = "<|AUDIO|>"
TOKENS_PER_S: Final = 25
RATE: Final = 16_000  # Hz; other rates need libraries
MAX_MODEL_LEN: Final = 2048
_ADDED: Final = (AUDIO_TOKEN, "<|audio_bos|>", "<|audio_eos|>")


def make_audio_model(folder: Path, embedded_model: Path) -> Path:
    """Write the model into `folder`, a new one, and return it."""
    folder.mkdir(parents=True)
    first_id = write_tokenizer(folder, embedded_model, _ADDED, "Qwen2AudioProcessor")
    for name, value in (("config", _config(first_id)), ("processor_config", _PROCESSOR)):
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    shutil.copy(embedded_model / "generation_config.json", folder)
    return folder


def _config(first_id: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "dtype": "float32",
        "audio_token_index": first_id,
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 64,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "encoder_layers": 1,
            "max_source_positions": 1500,
            "num_mel_bins": 128,
        },
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": first_id + len(_ADDED),
            "max_position_embeddings": MAX_MODEL_LEN,
        },
    }


_PROCESSOR: Final = {
    "processor_class": "Qwen2AudioProcessor",
    "feature_extractor": {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": RATE,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "return_attention_mask": False,
        "padding_value": 0.0,
    },
}
