"""A program: makes the embedded model's GGUF into a folder of safetensors, tokenizer and configs, checked.

    python -m backend.embedded_convert FILE.gguf FOLDER

Run as a process of its own, so that a gateway never imports torch and the memory (1.5 GB for some seconds) is
given back. Ends with status 0 only if the model is the expected one: size, finite weights, working template.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

NUM_PARAMETERS: Final = 134_515_008
NUM_VOCAB: Final = 49_152


def convert(gguf: Path, folder: Path) -> None:
    """Write the model folder. Raises `ValueError` where the result is not the expected model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    check_tokenizer(tokenizer)
    # Only a dequantized model can be saved as safetensors; vLLM's own GGUF loading needs more packages.
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    check_weights(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `ValueError` unless ids and template are the expected ones."""
    if len(tokenizer) != NUM_VOCAB:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens; {NUM_VOCAB} were expected")
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    if text != expected:
        raise ValueError(f"the chat template renders {text!r}; {expected!r} was expected")
    starts = tokenizer.encode(text, add_special_tokens=False).count(
        tokenizer.convert_tokens_to_ids("<|im_start|>")
    )
    if starts != 3:
        raise ValueError(f"the rendered template has {starts} <|im_start|> tokens; 3 were expected")


def check_weights(model: Any) -> None:
    """Raises `ValueError` unless the number of parameters is right and every one is finite."""
    num_parameters = sum(tensor.numel() for tensor in model.parameters())
    if num_parameters != NUM_PARAMETERS:
        raise ValueError(f"the model has {num_parameters} parameters; {NUM_PARAMETERS} were expected")
    for name, tensor in model.named_parameters():
        if not tensor.isfinite().all():
            raise ValueError(f"the tensor {name} holds values that are not finite")


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python -m backend.embedded_convert FILE.gguf FOLDER", file=sys.stderr)
        return 2
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
