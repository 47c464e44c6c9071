"""`headrace serve`: a worker and a gateway on this machine, joined by a Unix socket of their own."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any, Final

from backend.vllm_config import argument
from gateway import listen
from gateway.commands import set_up_logging, with_settings
from gateway.embedded_store import with_store
from gateway.http_client import open_connection
from gateway.process import CHILD_COMMAND, Orders
from gateway.run_gateway import (
    bound,
    gateway_programs,
    run_folder,
    shared_tokens,
    supervise,
)
from gateway.run_worker import reasoning_parser
from gateway.settings import Settings
from gateway.settings_load import SettingsError, plain
from gateway.settings_table import with_values
from gateway.settings_text import shown
from gateway.supervisor import Program, Supervisor

_POLL_S: Final = 0.25
_ANSWER_LIMIT_S: Final = 5.0
_WORKER_STOP_S: Final = 20.0  # for the engine's own processes to end and free the GPU's memory


def main_serve(flags: Mapping[str, Any]) -> int:
    return with_settings(flags, run_serve)


def run_serve(settings: Settings) -> int:
    """Run until a signal or a failure; the exit code."""
    check_engine_arguments(settings)
    set_up_logging(settings.general.log_level)
    with (
        run_folder() as folder,
        shared_tokens(settings) as token_fd,
        bound(settings, listen.reserve) as (settings, sockets),
    ):
        address, secret = f"unix://{folder}/worker.sock", secrets.token_hex(32)
        joined = with_values(
            settings,
            worker=(address,),
            listen=address,
            link_secret=secret,
            **dict.fromkeys(("link_certfile", "link_keyfile", "link_cafile")),
        )
        joined, stores = with_store(joined, folder)
        gateways = gateway_programs(joined, sockets, folder, token_fd)
        supervisor = Supervisor([*stores, *gateways, _worker_program(joined)])
        telling = _tell_when_ready(supervisor, settings, listen.url(settings.http, sockets))
        return asyncio.run(supervise(supervisor, telling))


def check_engine_arguments(settings: Settings) -> None:
    """Raises `SettingsError` where vLLM's own arguments say what the gateway must know, and does not."""
    own, ours = argument(settings.engine.engine_args, "--reasoning-parser"), reasoning_parser(settings)
    if own is not None and own != ours:
        raise SettingsError(
            [
                f"reasoning_parser: the engine's arguments say {shown(own)}, but the gateway has "
                f"{'none' if ours is None else shown(ours)}; give --reasoning-parser {own} before the --"
            ]
        )


def _worker_program(settings: Settings) -> Program:
    return Program(
        name="worker",
        command=CHILD_COMMAND,
        orders=lambda ready_fd, _: Orders("worker", plain(settings), os.getpid(), ready_fd=ready_fd).encode(),
        stop_limit_s=_WORKER_STOP_S,
        group=1,
    )


async def _tell_when_ready(supervisor: Supervisor, settings: Settings, url: str) -> None:
    for child in supervisor.children[:-1]:
        await child.ready.wait()
    while (model := await asyncio.to_thread(_first_model, url, settings)) is None:
        if (refusal := await asyncio.to_thread(_refusal, url)) is not None:
            supervisor.fail(refusal)  # it is our only worker
            return
        await asyncio.sleep(_POLL_S)
    supervisor.children[-1].ready.set()
    print(welcome(settings, url, model), file=sys.stderr, flush=True)


def _first_model(url: str, settings: Settings) -> str | None:
    """A model that is ready, if there is one."""
    keys = settings.access.api_key
    try:
        status, body = _get(url, "/v1/models", {"authorization": f"Bearer {keys[0]}"} if keys else {})
    except (OSError, http.client.HTTPException):
        return None
    models = json.loads(body)["data"] if status == http.HTTPStatus.OK else []
    return str(models[0]["id"]) if models else None


def _refusal(url: str) -> str | None:
    """Why the gateway does not take the worker, where it does not."""
    try:
        _, body = _get(url, "/ready?verbose", {})
    except (OSError, http.client.HTTPException):
        return None
    workers = json.loads(body)["workers"]
    return next((str(worker["reason"]) for worker in workers if worker["state"] == "refused"), None)


def _get(url: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    connection = open_connection(url, _ANSWER_LIMIT_S, verify=False)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def welcome(settings: Settings, url: str, model: str) -> str:
    """What a newcomer needs next: the address, a first request, the chat page."""
    unix = settings.http.uds is not None
    base = "http://localhost" if unix else url
    socket_flag = f"--unix-socket {settings.http.uds} " if unix else ""
    key = " -H 'authorization: Bearer KEY'" if settings.access.api_key else ""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    chat_key = " --api-key KEY" if settings.access.api_key else ""
    lines = [
        f"headrace: ready; {model} answers at {url}",
        "",
        f"    curl -N {socket_flag}{base}/v1/chat/completions -H 'content-type: application/json'{key} \\",
        f"        -d '{json.dumps(body)}'",
        "",
        *([] if unix else [f"    chat page:     {base}/"]),
        f"    in this shell: headrace chat --url {url}{chat_key}",
        "",
        "Ctrl-C ends it.",
    ]
    return "\n".join(lines)
