"""What a scripted worker can be told. One frozen value, checked when it is made."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from backend.scripted_faults import Faults
from backend.scripted_media import parse_media


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """All of a scripted worker. `tokenizer` is a folder with a `tokenizer.json`.

    A value outside its limits is a `ValueError` that names it.
    """

    tokenizer: Path
    listen: str = "tcp://127.0.0.1:7400"
    model_names: tuple[str, ...] = ("scripted",)
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None
    name: str | None = None
    step_ms: float = 20.0
    jitter_ms: float = 0.0  # each step comes up to so much earlier or later; the mean rate stays
    prefill_ms_per_1k: float = 5.0  # per 1,000 tokens that are not cached
    max_running: int = 4096
    max_waiting: int = 1024  # for a place among the running ones
    max_model_len: int = 32768
    block_size: int = 16
    kv_tokens: int = 1 << 22  # what the simulated KV cache holds
    seed: int = 0
    script: Path | None = None
    reasoning_parser: str | None = None  # announced, as if an engine had it; structured outputs are ignored
    media: tuple[str, ...] = ()  # that it takes, with their placeholders: image=<image>, audio=<audio>
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        for name in ("step_ms", "jitter_ms", "prefill_ms_per_1k", "max_waiting"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("max_running", "max_model_len", "block_size", "kv_tokens"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.jitter_ms > self.step_ms:
            raise ValueError(f"jitter_ms is {self.jitter_ms}; it must not exceed step_ms, {self.step_ms}")
        if not self.model_names:
            raise ValueError("model_names is empty; a worker serves at least one name")
        parse_media(self.media)
