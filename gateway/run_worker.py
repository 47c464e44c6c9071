"""`headrace worker`: settings into the options of a worker, which `backend/` runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.cli import FAILED, OK
from gateway.commands import say, with_settings
from gateway.link_tls import server_tls
from gateway.settings import Settings
from gateway.settings_load import SettingsError


def main_worker(flags: Mapping[str, Any]) -> int:
    return with_settings(flags, run_worker)


def run_worker(settings: Settings) -> int:
    """`headrace worker`, until a signal or the engine's end; the exit code."""
    if settings.engine.model is None and not settings.scripted.scripted:
        raise SettingsError(["model is missing: what should the worker serve?"])
    return run(settings)


def run(settings: Settings) -> int:
    """A worker with the settings' model; without one, with the embedded model."""
    if settings.scripted.scripted:
        return _run_scripted(settings)
    say("a worker with vLLM is not there yet")
    return FAILED


def _run_scripted(settings: Settings) -> int:
    from backend.scripted import serve_scripted

    async def serve() -> None:
        stop = asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, stop.set)
        await serve_scripted(options, stop)

    try:
        options = scripted_options(settings)
        asyncio.run(serve())
    except (ValueError, OSError) as error:  # AddressError and ScriptError are such
        say(str(error))
        return FAILED
    return OK


def scripted_options(settings: Settings) -> Any:
    """The scripted worker's options. Raises `ValueError` for values that do not go together."""
    from backend.scripted import Faults, ScriptedOptions

    scripted, engine = settings.scripted, settings.engine
    assert scripted.tokenizer is not None, "the settings' check has refused that"
    options = ScriptedOptions(
        tokenizer=Path(scripted.tokenizer).expanduser(),
        listen=engine.listen,
        model_names=engine.served_model_name or ("scripted",),
        secret=settings.link.link_secret.encode() if settings.link.link_secret else None,
        tls=server_tls(settings.link),
        step_ms=scripted.step_ms,
        jitter_ms=scripted.jitter_ms,
        prefill_ms_per_1k=scripted.prefill_ms_per_1k,
        max_running=scripted.max_running,
        max_waiting=scripted.max_waiting,
        block_size=scripted.block_size,
        seed=scripted.seed,
        script=scripted.script,
        faults=Faults(
            die_after_tokens=scripted.die_after_tokens,
            stall_after_tokens=scripted.stall_after_tokens,
            garbage_after_tokens=scripted.garbage_after_tokens,
            slow_write_bytes_per_s=scripted.slow_write_bytes_per_s,
        ),
    )
    return options if engine.max_model_len is None else replace(options, max_model_len=engine.max_model_len)
