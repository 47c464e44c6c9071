"""A Llama so small that serving it costs more than computing it: two layers with random weights.

It speaks whole words of the embedded model's vocabulary, so that every token is text: rows of the output
layer for pieces of characters and for control tokens are zero, and a greedy choice takes a positive one. Kept
beside the embedded model, made anew when the recipe changes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from backend.embedded import default_cache_dir
from benchmarks.processes import embedded_model

RECIPE: Final = 1  # counted up when the model changes
MAX_MODEL_LEN: Final = 2048
_HIDDEN, _INNER, _NUM_LAYERS, _HEAD = 64, 128, 2, 32
_COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def tiny_model() -> Path:
    """The model's folder, made first where needed, in under two seconds."""
    folder = default_cache_dir(os.environ) / "models" / f"tiny-llama-{RECIPE}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".work-", dir=folder.parent))
        try:
            make_tiny_model(work, embedded_model())
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def make_tiny_model(folder: Path, embedded: Path) -> None:
    """Write the model into `folder`, which exists. The same files every time."""
    for name in _COPIED:
        shutil.copy(embedded / name, folder)
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    (folder / "config.json").write_text(json.dumps(_config(embedded, len(vocabulary))), encoding="utf-8")
    _write_weights(folder, len(vocabulary), words(vocabulary))


def words(vocabulary: dict[str, int]) -> list[int]:
    """The ids of tokens that are a space and ASCII letters: text in themselves, whatever came before."""
    return sorted(
        number
        for token, number in vocabulary.items()
        if token[:1] == "Ġ" and token[1:].isascii() and token[1:].isalpha()
    )


def _config(embedded: Path, vocab_size: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((embedded / "config.json").read_text(encoding="utf-8"))
    return config | {
        "_name_or_path": "tiny-llama",
        "dtype": "float32",
        "head_dim": _HEAD,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "max_position_embeddings": MAX_MODEL_LEN,
        "num_attention_heads": _HIDDEN // _HEAD,
        "num_hidden_layers": _NUM_LAYERS,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }


def _write_weights(folder: Path, vocab_size: int, spoken: list[int]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    ones = np.ones(_HIDDEN, np.float32)
    head = np.zeros((vocab_size, _HIDDEN), np.float32)
    head[spoken] = matrix(len(spoken), _HIDDEN)
    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, _HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    shapes = {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_HEAD, _HIDDEN),
        "self_attn.v_proj": (_HEAD, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    for layer in range(_NUM_LAYERS):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = ones
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
