"""A tiny vision model with random weights, for images on the real engine: Idefics3, 13 million numbers.

It speaks no sense, but other images give other tokens. Written by hand in under a second, without torch and
without downloads: the tokenizer is the embedded model's, with the tokens around an image added.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

IMAGE_TOKEN: Final = "<image>"
NUM_IMAGE_TOKENS: Final = 7  # what one becomes in the engine: two fences, the global mark, 4 of the picture
MAX_MODEL_LEN: Final = 2048
_ADDED: Final = ("<fake_token_around_image>", IMAGE_TOKEN, "<end_of_utterance>", "<global-img>")
_HIDDEN, _INNER, _KEYS = 128, 256, 64  # of the text model; keys: 2 heads of 32
_EYE, _EYE_INNER, _PATCH, _NUM_PATCHES = 64, 128, 16, 16  # of the vision model: images of 64 x 64 pixels
_NUM_LAYERS: Final = 2  # of each
_LONGEST: Final = {"longest_edge": 64}
TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_vision_model(folder: Path, embedded_model: Path) -> Path:
    """Write the model into `folder`, a new one, and return it. The same files every time."""
    folder.mkdir(parents=True)
    first_id = write_tokenizer(folder, embedded_model, _ADDED, "Idefics3Processor")
    _write_weights(folder, first_id + len(_ADDED))
    _write(folder, "config.json", _config(first_id))
    _write(folder, "processor_config.json", _PROCESSOR)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    shutil.copy(embedded_model / "generation_config.json", folder)
    return folder


def _write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def write_tokenizer(folder: Path, embedded_model: Path, added: tuple[str, ...], processor: str) -> int:
    """The embedded model's tokenizer with more tokens; the first of their ids."""
    tokenizer = json.loads((embedded_model / "tokenizer.json").read_text(encoding="utf-8"))
    first_id: int = len(tokenizer["model"]["vocab"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": first_id + index, "content": token, **plain} for index, token in enumerate(added)
    ]
    _write(folder, "tokenizer.json", tokenizer)
    settings = json.loads((embedded_model / "tokenizer_config.json").read_text(encoding="utf-8"))
    _write(folder, "tokenizer_config.json", {**settings, "processor_class": processor})
    return first_id


def _write_weights(folder: Path, vocab_size: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)

    def fill(name: str, shape: tuple[int, ...]) -> Any:
        if name.endswith("bias"):
            return np.zeros(shape, np.float16)
        if "norm" in name:
            return np.ones(shape, np.float16)
        # As wide as keeps every layer's numbers near 1: each token, image and place then counts.
        scale = 1.0 if "embed_tokens" in name else float(np.prod(shape[1:])) ** -0.5
        return (scale * rng.standard_normal(shape, np.float32)).astype(np.float16)

    save_file(
        {name: fill(name, shape) for name, shape in _shapes(vocab_size)},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def _shapes(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model by its name."""
    yield "lm_head.weight", (vocab_size, _HIDDEN)
    yield "model.connector.modality_projection.proj.weight", (_HIDDEN, 4 * _EYE)
    text, eye = "model.text_model", "model.vision_model"
    yield f"{text}.embed_tokens.weight", (vocab_size, _HIDDEN)
    yield f"{text}.norm.weight", (_HIDDEN,)
    for layer in range(_NUM_LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{text}.layers.{layer}.{norm}.weight", (_HIDDEN,)
        yield f"{text}.layers.{layer}.mlp.down_proj.weight", (_HIDDEN, _INNER)
        for gate in ("gate", "up"):
            yield f"{text}.layers.{layer}.mlp.{gate}_proj.weight", (_INNER, _HIDDEN)
        for part, width in (("q", _HIDDEN), ("k", _KEYS), ("v", _KEYS), ("o", _HIDDEN)):
            yield f"{text}.layers.{layer}.self_attn.{part}_proj.weight", (width, _HIDDEN)
    yield f"{eye}.embeddings.patch_embedding.weight", (_EYE, 3, _PATCH, _PATCH)
    yield f"{eye}.embeddings.patch_embedding.bias", (_EYE,)
    yield f"{eye}.embeddings.position_embedding.weight", (_NUM_PATCHES, _EYE)
    inner = [("layer_norm1", (_EYE,)), ("layer_norm2", (_EYE,))]
    inner += [("mlp.fc1", (_EYE_INNER, _EYE)), ("mlp.fc2", (_EYE, _EYE_INNER))]
    inner += [(f"self_attn.{part}", (_EYE, _EYE)) for part in ("q_proj", "k_proj", "v_proj", "out_proj")]
    parts = [
        (f"encoder.layers.{layer}.{name}", shape) for layer in range(_NUM_LAYERS) for name, shape in inner
    ]
    for name, shape in [*parts, ("post_layernorm", (_EYE,))]:
        yield f"{eye}.{name}.weight", shape
        yield f"{eye}.{name}.bias", shape[:1]


def _config(first_id: int) -> dict[str, Any]:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "dtype": "float32",  # so that cached and computed prefixes choose the same tokens
        "image_token_id": first_id + _ADDED.index(IMAGE_TOKEN),
        "pad_token_id": ids["pad_token_id"],
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "use_cache": True,
        "text_config": {
            "model_type": "llama",
            "vocab_size": first_id + len(_ADDED),
            "hidden_size": _HIDDEN,
            "intermediate_size": _INNER,
            "num_hidden_layers": _NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": MAX_MODEL_LEN,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            **ids,
        },
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": _EYE,
            "intermediate_size": _EYE_INNER,
            "num_hidden_layers": _NUM_LAYERS,
            "num_attention_heads": 2,
            "num_channels": 3,
            "image_size": 64,
            "patch_size": _PATCH,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
    }


_PROCESSOR: Final = {
    "processor_class": "Idefics3Processor",
    "image_seq_len": 4,
    "image_processor": {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": _LONGEST,
        "max_image_size": _LONGEST,
    },
}
