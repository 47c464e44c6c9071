"""`headrace worker`: settings into the options of a worker, which `backend/worker.py` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli import FAILED
from gateway.commands import say, set_up_logging, with_settings
from gateway.link_tls import server_tls
from gateway.settings import Settings
from gateway.settings_answers import parser_for

if TYPE_CHECKING:
    from backend.scripted import ScriptedOptions
    from backend.worker import WorkerOptions


def main_worker(flags: Mapping[str, Any]) -> int:
    return with_settings(flags, run)


def run(settings: Settings, on_ready: Callable[[], None] | None = None) -> int:
    """A worker, until a signal or its engine's end; the exit code. `on_ready`: it takes jobs now."""
    set_up_logging(settings.general.log_level)
    from backend.worker import run_worker

    try:
        options = worker_options(settings)
    except (ValueError, OSError) as error:  # values that do not go together, and TLS files
        say(str(error))
        return FAILED
    return run_worker(options, on_ready)


def worker_options(settings: Settings) -> WorkerOptions:
    """Raises `ValueError`, and `OSError` for TLS files that cannot be used."""
    from backend.worker import WorkerOptions

    engine, secret = settings.engine, settings.link.link_secret
    return WorkerOptions(
        listen=engine.listen,
        cache_dir=settings.general.cache.expanduser(),
        model=engine.model,
        served_model_names=engine.served_model_name,
        max_model_len=engine.max_model_len,
        engine_args=engine.engine_args,
        engine_path=engine.engine_path,
        reasoning_parser=reasoning_parser(settings),
        scripted=_scripted_options(settings) if settings.scripted.scripted else None,
        secret=secret.encode() if secret else None,
        tls=server_tls(settings.link),
        max_waiting=engine.max_waiting,
        max_image_pixels=settings.media.max_image_pixels,
        http_host=engine.metrics_host,
        http_port=engine.metrics_port,
        drain_s=settings.http.drain_limit_s,
    )


def reasoning_parser(settings: Settings) -> str | None:
    """What the settings say for the model that the worker serves."""
    from backend.embedded import MODEL_NAME
    from backend.vllm_config import default_name

    engine, entries = settings.engine, settings.answers.reasoning_parser
    own = "scripted" if settings.scripted.scripted else MODEL_NAME
    names = engine.served_model_name or (own if engine.model is None else default_name(engine.model),)
    return next((parser for name in names if (parser := parser_for(entries, name)) is not None), None)


def _scripted_options(settings: Settings) -> ScriptedOptions:
    from backend.scripted import Faults, ScriptedOptions

    scripted, engine = settings.scripted, settings.engine
    (tokenizer,) = settings.upstream.tokenizer  # the settings' check has refused anything else
    options = ScriptedOptions(
        tokenizer=Path(tokenizer).expanduser(),
        step_ms=scripted.step_ms,
        jitter_ms=scripted.jitter_ms,
        prefill_ms_per_1k=scripted.prefill_ms_per_1k,
        max_running=scripted.max_running,
        max_waiting=engine.max_waiting,
        block_size=scripted.block_size,
        kv_tokens=scripted.kv_tokens,
        seed=scripted.seed,
        script=scripted.script,
        media=scripted.scripted_media,
        faults=Faults(
            die_after_tokens=scripted.die_after_tokens,
            stall_after_tokens=scripted.stall_after_tokens,
            garbage_after_tokens=scripted.garbage_after_tokens,
            slow_write_bytes_per_s=scripted.slow_write_bytes_per_s,
        ),
    )
    if engine.served_model_name:
        options = replace(options, model_names=engine.served_model_name)
    return options if engine.max_model_len is None else replace(options, max_model_len=engine.max_model_len)
