"""The second level of the token cache in Redis, for gateways on several machines. Only where configured.

It holds token ids, from which anyone with the model's tokenizer can read the prompts: prompts at rest. Keys
are digests of (model fingerprint, segment); a value is the ids and a digest of key and ids, so that neither a
mixed-up answer nor a damaged value can become a wrong id.

Nothing here fails a request. A lookup that is late is a miss; it runs on, for cancelling it would close the
connection, and until it is over nobody else asks. After an error nobody asks for a second. Both are counted,
and logged once a minute, without text.

Not here: who asks (`gateway/encoders.py`), and the processes of one machine (`gateway/shared_tokens.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.shared_tokens import DIGEST_BYTES, ids_digest, segment_key
from pipeline.encoding import BYTES_PER_ID

log = logging.getLogger("headrace.redis_tokens")

# As long a text takes 0.4 ms to encode. A lookup over a Unix socket takes 0.1 ms (0.14 for 4,000 tokens, 0.25
# for 20 texts), over a network as much longer as that is.
MIN_CHARS: Final = 1000
PREFIX: Final = b"headrace:tokens:1:"
_PAUSE_S: Final = 1.0
_LOG_INTERVAL_S: Final = 60.0
_SOCKET_LIMIT_S: Final = 1.0
_MAX_WAITING_BYTES: Final = 4 << 20  # ids on their way to a Redis that is slow
_MAX_PER_WRITE: Final = 64


class RedisTokens:
    """`gateway.encoders.FarTokens`. Made and used on one event loop.

    `url`: redis://, rediss:// or unix://; raises `ValueError` for another one.
    """

    def __init__(
        self,
        url: str,
        ttl_s: int = 3600,
        limit_ms: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis: Redis = Redis.from_url(
            url,
            socket_timeout=_SOCKET_LIMIT_S,
            socket_connect_timeout=_SOCKET_LIMIT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._ttl_s = ttl_s
        self._limit_s = limit_ms / 1000
        self._clock = clock
        self._quiet_until_s = 0.0
        self._log_after_s = 0.0
        self._late: asyncio.Task[dict[str, bytes]] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._waiting_bytes = 0
        self.hits = 0
        self.misses = 0
        self.num_late = 0
        self.num_errors = 0
        self.num_broken = 0  # values that are no ids of their key
        self.num_not_written = 0

    async def get(self, fingerprint: str, segments: Sequence[str]) -> dict[str, bytes]:
        """Segment -> packed ids, of those that are there and long enough to ask for."""
        long = [segment for segment in segments if len(segment) >= MIN_CHARS]
        if not long or not self._may_ask():
            return {}
        task: asyncio.Task[dict[str, bytes]] = self._spawn(self._look_up(fingerprint, long))
        await asyncio.wait([task], timeout=self._limit_s)
        if not task.done():
            self._late = task
            self.num_late += 1
            self._tell(f"no answer within {self._limit_s * 1000:g} ms")
            return {}
        found = task.result()
        self.hits += len(found)
        self.misses += len(long) - len(found)
        return found

    def offer(self, fingerprint: str, pairs: Sequence[tuple[str, bytes]]) -> None:
        """Write those that are long enough, in the background. What is too much is dropped, and counted."""
        for segment, ids in pairs:
            if len(segment) < MIN_CHARS:
                continue
            if self._clock() < self._quiet_until_s or self._waiting_bytes + len(ids) > _MAX_WAITING_BYTES:
                self.num_not_written += 1
                continue
            key = segment_key(fingerprint, segment)
            self._waiting.append((PREFIX + key, ids + ids_digest(key, ids)))
            self._waiting_bytes += len(ids)
        if self._waiting and (self._writer is None or self._writer.done()):
            self._writer = self._spawn(self._write_all())

    async def close(self) -> None:
        """Drop what is not written yet, and the connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._redis.aclose()

    def _may_ask(self) -> bool:
        return self._clock() >= self._quiet_until_s and (self._late is None or self._late.done())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="redis tokens")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _look_up(self, fingerprint: str, segments: Sequence[str]) -> dict[str, bytes]:
        keys = [segment_key(fingerprint, segment) for segment in segments]
        try:
            values = await self._redis.mget([PREFIX + key for key in keys])
            return self._found(segments, keys, values)
        except Exception as error:  # whatever it is, the text can be encoded
            self._failed(error)
            return {}

    def _found(
        self, segments: Sequence[str], keys: Sequence[bytes], values: Sequence[Any]
    ) -> dict[str, bytes]:
        """What is right of an answer. Raises anything for one that is none to this question."""
        found = {}
        for segment, key, value in zip(segments, keys, values, strict=True):
            if value is not None:
                ids = _checked(key, value)
                if ids is None:
                    self.num_broken += 1
                else:
                    found[segment] = ids
        return found

    async def _write_all(self) -> None:
        while self._waiting:
            pipeline = self._redis.pipeline(transaction=False)
            num_pairs = min(len(self._waiting), _MAX_PER_WRITE)
            for _ in range(num_pairs):
                key, value = self._waiting.popleft()
                self._waiting_bytes -= len(value) - DIGEST_BYTES
                pipeline.set(key, value, ex=self._ttl_s)
            try:
                await pipeline.execute()
            except Exception as error:
                self.num_not_written += num_pairs + len(self._waiting)
                self._waiting.clear()
                self._waiting_bytes = 0
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.num_errors += 1
        self._quiet_until_s = self._clock() + _PAUSE_S
        self._tell(type(error).__name__)

    def _tell(self, what: str) -> None:
        """Once in a while. The error's own words may hold addresses and more."""
        if self._clock() >= self._log_after_s:
            self._log_after_s = self._clock() + _LOG_INTERVAL_S
            log.warning("Redis for token ids: %s; texts are encoded instead", what)


def _checked(key: bytes, value: object) -> bytes | None:
    """The ids in a value, if they are this key's."""
    if not isinstance(value, bytes):  # text, if an option in the URL has asked for it
        return None
    ids, digest = value[:-DIGEST_BYTES], value[-DIGEST_BYTES:]
    return ids if ids and len(ids) % BYTES_PER_ID == 0 and ids_digest(key, ids) == digest else None
