"""The shared store of resumable streams, in the Redis protocol, for gateways on several machines.

    appending    this process's events, in one command for all streams (gateway/store_appender.py)
    reading      other processes' events and this one's inbox (gateway/store_follower.py)
    asking       everything else, from here: streams made and found, claims, messages, leases

Each has a connection of its own: a blocking read would hold up the others. What a request waits for is there
within 2 s, or raises `StoreUnavailable`. A request that fails so may have reached the store all the same;
what it made there is taken back when the store answers again.

Not here: what is in the store (`gateway/store_script.py`), and what becomes of a stream
(`gateway/streams.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Final
from uuid import uuid4

from backend.fault_log import log_fault
from gateway.journal import Journal
from gateway.metrics import Metrics
from gateway.store_appender import StoreAppender
from gateway.store_copies import (
    CANCEL,
    FORGET,
    INBOX_KEPT_MS,
    MAX_INBOX,
    CopyCare,
    message,
)
from gateway.store_follower import StoreFollower
from gateway.store_link import COMMAND_LIMIT_S, Command, StoreHealth, StoreLink, connections
from gateway.store_script import (
    CLAIM,
    CREATE,
    DELETE,
    END_FIELD,
    INBOX_PREFIX,
    META_SUFFIX,
    RELEASE,
    STREAM_PREFIX,
    claim_key,
    inbox_key,
    lease_key,
    meta_key,
    reader_key,
    stream_key,
)
from gateway.stream_meta import PENDING, Pending, StreamMeta
from gateway.stream_ports import StoreEvents
from pipeline.stream_errors import KeyInProgress, KeyReused, StoreUnavailable

LEASE_S: Final = 10.0  # a process whose loop hangs for so long has lost its streams
LEASE_RENEWAL_S: Final = 2.0
LEASE_RETRY_S: Final = 0.2
CLAIM_S: Final = 60.0  # while a prompt is prepared; its process may have died
CLOSE_LIMIT_S: Final = 1.0
MAX_UNDONE: Final = 4096
MAX_UNDONE_AT_ONCE: Final = 256  # at each renewal, which it must not hold up
_META_FIELDS: Final = ("token", "owner", "created_s", "expires_s", "body_digest", "key_id")


class StreamStore:
    """`gateway.stream_ports.Store`. Made and used on one event loop.

    `url`: redis://, rediss:// or unix://; raises `ValueError` for another one. `limit_s`: a store that is
    away for so long breaks the streams that wait for it.
    """

    def __init__(
        self, url: str, *, keep_s: float, grace_s: float, lifetime_s: float, limit_s: float, metrics: Metrics
    ) -> None:
        self.owner = uuid4().hex
        self._lifetime_ms = max(1, round(lifetime_s * 1000))
        self._health = StoreHealth(metrics)
        pool = connections(url)
        self._asking = StoreLink(pool, self._health, with_script=True)
        self._appending = StoreLink(pool, self._health, with_script=True)
        self._reading = StoreLink(pool, self._health)
        self._appender = StoreAppender(self._appending, keep_s, limit_s, metrics)
        self._care = CopyCare(self._asking, self.owner, grace_s, keep_s)
        self._follower = StoreFollower(self._reading, self._asking, self._care, self.owner, limit_s)
        self._undone: deque[Command] = deque(maxlen=MAX_UNDONE)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_up(self) -> bool:
        """The last command to the store was answered; there is one every 2 s."""
        return self._health.is_up

    async def start(self, events: StoreEvents) -> None:
        """`Store.start`. Does not wait for a store that is away."""
        self._appender.broken = events.broken
        self._care.lost = events.copy_lost
        self._follower.cancel_asked = events.cancel_asked
        self._follower.forget_asked = events.forget_asked
        with contextlib.suppress(StoreUnavailable):
            await self._renew_lease()
        works = (self._appender.run, self._follower.run, self._care.run, self._keep_lease)
        self._tasks = [asyncio.create_task(work(), name="stream store") for work in works]

    async def close(self) -> None:
        """`Store.close`. What was written last has a moment to get there."""
        self._appender.finish()
        if self._tasks:
            await asyncio.wait(self._tasks[:1], timeout=CLOSE_LIMIT_S)
        await asyncio.gather(*map(_ended, self._tasks))
        with contextlib.suppress(StoreUnavailable):
            await self._asking.ask([("UNLINK", lease_key(self.owner), inbox_key(self.owner))], CLOSE_LIMIT_S)
        for link in (self._asking, self._appending, self._reading):
            await link.close()

    async def claim(self, key: str, stream_id: str, body_digest: str) -> StreamMeta | Pending | None:
        """`Store.claim`."""
        value = _claim("claimed", stream_id, body_digest)
        with self._undo(key, stream_id):
            held = await self._script(
                CLAIM,
                [claim_key(key)],
                [STREAM_PREFIX, META_SUFFIX, value, round(CLAIM_S * 1000), *_META_FIELDS],
            )
        if not held or held[0] == value:
            return None
        _, holder, digest = held[0].decode().split(" ")
        if digest != body_digest:
            raise KeyReused
        return _meta_of(holder, held[1]) if len(held) > 1 else PENDING

    async def release(self, key: str, stream_id: str) -> None:
        """`Store.release`."""
        with self._undo(key, stream_id):
            await self._script(RELEASE, [claim_key(key)], [stream_id])

    async def create(self, meta: StreamMeta, key: str | None) -> None:
        """`Store.create`. Raises `KeyInProgress` if preparing took so long that another has taken the key."""
        keys = [stream_key(meta.id), meta_key(meta.id), *([claim_key(key)] if key is not None else [])]
        claims = [_claim(state, meta.id, meta.body_digest) for state in ("claimed", "created")]
        with self._undo(key, meta.id):
            is_made = await self._script(CREATE, keys, [self._lifetime_ms, *claims, *_fields_of(meta)])
        if not is_made:
            raise KeyInProgress

    def journal_of(self, stream_id: str) -> Callable[[Journal], None]:
        """`Store.journal_of`."""
        return partial(self._appender.written, stream_id)

    async def meta(self, stream_id: str) -> StreamMeta | None:
        """`Store.meta`."""
        (values,) = await self._ask(("HMGET", meta_key(stream_id), *_META_FIELDS))
        return _meta_of(stream_id, values)

    def follow(self, meta: StreamMeta, copy: Journal) -> None:
        """`Store.follow`."""
        self._follower.follow(meta.id, meta.owner, copy)

    def unfollow(self, stream_id: str) -> None:
        """`Store.unfollow`."""
        self._follower.unfollow(stream_id)

    async def cancel(self, meta: StreamMeta) -> bool:
        """`Store.cancel`. What its owner cannot end any more is deleted, too; its readers are then told."""
        newest, has_owner, *_ = await self._ask(
            ("XREVRANGE", stream_key(meta.id), "+", "-", "COUNT", 1),
            ("EXISTS", lease_key(meta.owner)),
            *message(inbox_key(meta.owner), CANCEL, meta.id),
        )
        is_over = bool(newest) and newest[0][1][0] == END_FIELD
        if is_over or not has_owner:
            await self.delete(meta.id)
        return is_over

    async def delete(self, stream_id: str) -> None:
        """`Store.delete`. Its claim then stands for nothing, and is free."""
        self._appender.forget(stream_id)
        with self._undo(None, stream_id):
            await self._ask(self._deletion(stream_id))

    async def read_elsewhere(self, stream_ids: Collection[str]) -> set[str]:
        """`Store.read_elsewhere`."""
        if not stream_ids:
            return set()
        (values,) = await self._ask(("MGET", *map(reader_key, stream_ids)))
        return {each for each, value in zip(stream_ids, values, strict=True) if value is not None}

    async def _ask(self, *commands: Command) -> list[Any]:
        return await self._asking.ask(commands, COMMAND_LIMIT_S)

    async def _script(self, script: str, keys: Collection[str], arguments: Collection[Any]) -> Any:
        (reply,) = await self._ask(("EVAL", script, len(keys), *keys, *arguments))
        return reply

    @contextlib.contextmanager
    def _undo(self, key: str | None, stream_id: str) -> Iterator[None]:
        """If this fails, or is given up, nothing of the stream is to stay in the store."""
        try:
            yield
        except BaseException:
            if key is not None:
                self._undone.append(("EVAL", RELEASE, 1, claim_key(key), stream_id))
            self._undone.append(self._deletion(stream_id))
            raise

    def _deletion(self, stream_id: str) -> Command:
        keys = meta_key(stream_id), stream_key(stream_id), reader_key(stream_id)
        to_owner = (INBOX_PREFIX, MAX_INBOX, FORGET, stream_id, INBOX_KEPT_MS)
        return ("EVAL", DELETE, len(keys), *keys, self.owner, *to_owner)

    async def _keep_lease(self) -> None:
        while True:
            pause_s = LEASE_RENEWAL_S
            try:
                await self._renew_lease()
            except StoreUnavailable:
                pause_s = LEASE_RETRY_S
            except Exception as error:  # others would take our streams for lost
                log_fault(error, "none")
            await asyncio.sleep(pause_s)

    async def _renew_lease(self) -> None:
        await self._ask(("SET", lease_key(self.owner), "1", "PX", round(LEASE_S * 1000)))
        undone = [self._undone.popleft() for _ in range(min(len(self._undone), MAX_UNDONE_AT_ONCE))]
        if undone:
            try:
                await self._ask(*undone)
            except BaseException:
                self._undone.extendleft(reversed(undone))
                raise


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel it until it has ended: a library may swallow a cancel."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_LIMIT_S)


def _claim(state: str, stream_id: str, body_digest: str) -> bytes:
    return f"{state} {stream_id} {body_digest}".encode()


def _fields_of(meta: StreamMeta) -> list[str]:
    values = {
        "token": meta.token,
        "owner": meta.owner,
        "created_s": repr(meta.created_s),
        "expires_s": repr(meta.expires_s),
        "body_digest": meta.body_digest,
    }
    if meta.key_id is not None:
        values["key_id"] = meta.key_id
    return [word for pair in values.items() for word in pair]


def _meta_of(stream_id: str, values: Collection[bytes | None]) -> StreamMeta | None:
    """None if something is missing: the stream has expired, or is none of ours."""
    *required, key_id = (None if value is None else value.decode() for value in values)
    token, owner, created_s, expires_s, body_digest = required
    if token is None or owner is None or created_s is None or expires_s is None or body_digest is None:
        return None
    return StreamMeta(stream_id, token, owner, key_id, float(created_s), float(expires_s), body_digest)
