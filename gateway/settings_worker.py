"""The worker's settings. Those of the gateway, and how all of them hang together: `gateway/settings.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from gateway.settings_field import ENGINE, WORKER, About


@dataclass(frozen=True, slots=True)
class Engine:
    """The worker and its engine."""

    TOPIC: ClassVar = "Worker"
    COMMANDS: ClassVar = ENGINE

    model: Annotated[
        str | None, About("model folder or hub name; without it the embedded model is served")
    ] = None
    served_model_name: Annotated[tuple[str, ...], About("name that clients use; repeat for several")] = ()
    max_model_len: Annotated[
        int | None, About("context length, if shorter than the model's", "tokens", at_least=1)
    ] = None
    listen: Annotated[
        str,
        About(
            "where the worker takes gateways: tcp://HOST:PORT or unix:///PATH", commands=frozenset({WORKER})
        ),
    ] = "tcp://127.0.0.1:7400"
    metrics_host: Annotated[str, About("address of the worker's own /metrics and /health")] = "127.0.0.1"
    metrics_port: Annotated[
        int,
        About(
            "port of the worker's own /metrics and /health; 0 takes a free one",
            "port",
            at_least=0,
            at_most=65535,
        ),
    ] = 0
    max_waiting: Annotated[
        int, About("requests without a first token that the worker takes", "requests", at_least=0)
    ] = 1024
    engine_path: Annotated[
        Literal["auto", "steps", "generate"],
        About("how tokens leave vLLM: step batches, its generate(), or the first where it works"),
    ] = "auto"
    engine_args: Annotated[
        tuple[str, ...], About("vLLM engine arguments; on the command line everything after `--`")
    ] = ()


@dataclass(frozen=True, slots=True)
class Scripted:
    """The scripted worker, which makes tokens without a model: for tests, load tests and simulations."""

    TOPIC: ClassVar = "Scripted worker"
    COMMANDS: ClassVar = ENGINE

    scripted: Annotated[bool, About("make deterministic tokens without a model")] = False
    script: Annotated[
        Path | None,
        About("file with its answers: a JSON list or object (.json), else one answer a line", is_file=True),
    ] = None
    step_ms: Annotated[float, About("time of one step", "ms", at_least=0)] = 20.0
    jitter_ms: Annotated[float, About("random part of a step's time", "ms", at_least=0)] = 0.0
    prefill_ms_per_1k: Annotated[float, About("prefill time per 1,000 prompt tokens", "ms", at_least=0)] = 5.0
    max_running: Annotated[int, About("requests that run at the same time", "requests", at_least=1)] = 4096
    block_size: Annotated[int, About("block of its simulated prefix cache", "tokens", at_least=1)] = 16
    kv_tokens: Annotated[int, About("tokens that this cache holds", "tokens", at_least=1)] = 4_194_304
    seed: Annotated[int, About("seed of its tokens", "number", at_least=0)] = 0
    scripted_media: Annotated[
        tuple[str, ...],
        About("media that it takes, with their placeholder, as image=<image>; repeat for several"),
    ] = ()
    die_after_tokens: Annotated[
        int | None, About("fault: the engine dies after so many", "tokens", at_least=0)
    ] = None
    stall_after_tokens: Annotated[
        int | None, About("fault: nothing is sent after so many", "tokens", at_least=0)
    ] = None
    garbage_after_tokens: Annotated[
        int | None, About("fault: a garbage frame after so many", "tokens", at_least=0)
    ] = None
    slow_write_bytes_per_s: Annotated[
        float | None, About("fault: the link is written this slowly", "bytes/s", above=0)
    ] = None
