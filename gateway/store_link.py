"""One connection to the shared store: packed commands out, replies in, each within a limit. And how it fares.

redis-py opens it: addresses, TLS, passwords. Then its transport is ours: a command that waits for its reply
costs 8 us so, cold 20, and 19 and 110 through redis-py's reader, which is as much as 50 events cost.

Not here: what is sent (`gateway/store_script.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import hiredis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.metrics import Metrics
from gateway.store_script import APPEND
from pipeline.stream_errors import StoreUnavailable

log = logging.getLogger("headrace.stream_store")

_LOG_INTERVAL_S: Final = 60.0
_CONNECT_LIMIT_S: Final = 1.0
COMMAND_LIMIT_S: Final = 2.0  # what a request waits at most
RETRY_PAUSE_S: Final = 0.2  # of what must be done in the end
Command = Sequence[str | bytes | int]


# Errors of which a new connection may be free: it loads the script, and finds the server that took over.
_OF_THE_CONNECTION: Final = frozenset({"NOSCRIPT", "READONLY", "NOAUTH", "LOADING", "MASTERDOWN"})


class StoreHealth:
    """Whether the store answers, counted and logged once a minute, without the errors' own words."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        help_ = "1 while the store of the streams answers to every process of this gateway."
        self._up = metrics.gauge("headrace_store_up", help_, "livemin")
        self._clock = clock
        self._log_after_s = 0.0
        self.is_up = False
        self.num_errors = 0

    def answered(self) -> None:
        if not self.is_up:
            self.is_up = True
            self._up.set(1)

    def failed(self, error: BaseException) -> None:
        self.is_up = False
        self.num_errors += 1
        self._up.set(0)
        self._metrics.store_errors.inc()
        if self._clock() >= self._log_after_s:
            self._log_after_s = self._clock() + _LOG_INTERVAL_S
            log.warning("store of the streams: %s; tried again", _kind_of(error))


def connections(url: str) -> ConnectionPool:
    """Makes connections to a store. Raises `ValueError` for a URL that is none."""
    pool = ConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), protocol=2)
    # Over what the URL may ask for. With a socket timeout redis-py sends through `asyncio.wait_for`, which
    # swallows a cancel in Python 3.11: our tasks would not end.
    pool.connection_kwargs.update(
        socket_timeout=None,
        socket_connect_timeout=_CONNECT_LIMIT_S,
        protocol=2,
        decode_responses=False,
    )
    return pool


class _Question(NamedTuple):
    """Commands under way."""

    answer: asyncio.Future[list[Any]]
    num_replies: int
    timer: asyncio.TimerHandle


class _Replies(asyncio.Protocol):
    """The replies of one opened connection, in the order of the commands.

    An error reply fails the question that it belongs to. The connection is closed after a late reply, for the
    next one would be another command's, and where a new one may fare better.
    """

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._reader = hiredis.Reader()  # False is no reply in RESP2, but "not enough yet"
        self._questions: deque[_Question] = deque()
        self._replies: list[Any] = []  # to the first question
        self.is_open = True

    def ask(self, packed: bytes, num_replies: int, limit_s: float) -> asyncio.Future[list[Any]]:
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        timer = self._loop.call_later(limit_s, self._fail, TimeoutError())
        self._questions.append(_Question(answer, num_replies, timer))
        self._transport.write(packed)
        return answer

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        try:
            reader.feed(data)
            while self.is_open and (reply := reader.gets()) is not False:
                self._replied(reply)
        except hiredis.HiredisError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("closed by the store"))

    def close(self) -> None:
        self._fail(ConnectionError("closed"))

    def _replied(self, reply: Any) -> None:
        is_error = isinstance(reply, hiredis.ReplyError)
        if not self._questions or (is_error and _kind_of(reply) in _OF_THE_CONNECTION):
            self._fail(reply if is_error else ConnectionError("a reply to nothing"))
            return
        self._replies.append(reply)
        question = self._questions[0]
        if len(self._replies) < question.num_replies:
            return
        self._questions.popleft()
        replies, self._replies = self._replies, []
        question.timer.cancel()
        if question.answer.done():  # nobody waits for it any more
            return
        errors = [each for each in replies if isinstance(each, hiredis.ReplyError)]
        if errors:
            question.answer.set_exception(errors[0])
        else:
            question.answer.set_result(replies)

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        self._transport.abort()
        questions, self._questions = self._questions, deque()
        for question in questions:
            question.timer.cancel()
            if not question.answer.done():
                question.answer.set_exception(_again(error))


class StoreLink:
    """One connection, opened when it is used. Commands may follow each other without waiting.

    Raises `StoreUnavailable` whatever goes wrong, an error reply too. `num_opened` tells one opening from the
    next: what the server has may have changed in between.
    """

    def __init__(self, pool: ConnectionPool, health: StoreHealth, with_script: bool = False) -> None:
        self._connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
        self._replies: _Replies | None = None
        self._health = health
        self._with_script = with_script
        self._lock = asyncio.Lock()
        self.num_opened = 0

    async def open(self, limit_s: float) -> None:
        """Connect, if it is not."""
        if self._replies is None or not self._replies.is_open:
            try:
                async with asyncio.timeout(limit_s), self._lock:
                    await self._open(limit_s)
            except Exception as error:
                self._health.failed(error)
                raise StoreUnavailable from error

    async def send(self, packed: bytes, limit_s: float) -> Any:
        """The reply to one command."""
        return (await self._exchange(packed, 1, limit_s))[0]

    async def ask(self, commands: Sequence[Command], limit_s: float) -> list[Any]:
        """The replies to several commands, sent at once."""
        packed = b"".join(self._connection.pack_commands(commands))
        return await self._exchange(packed, len(commands), limit_s)

    async def close(self) -> None:
        if self._replies is not None:
            self._replies.close()
        await self._connection.disconnect(nowait=True)

    async def _exchange(self, packed: bytes, num_replies: int, limit_s: float) -> list[Any]:
        replies = self._replies
        if replies is None or not replies.is_open:
            await self.open(limit_s)
            replies = self._replies
            assert replies is not None
        try:
            answer = await replies.ask(packed, num_replies, limit_s)
        except Exception as error:
            self._health.failed(error)
            raise StoreUnavailable from error
        self._health.answered()
        return answer

    async def _open(self, limit_s: float) -> None:
        if self._replies is not None and self._replies.is_open:
            return  # by another who waited
        connection = self._connection
        await connection.disconnect(nowait=True)
        await connection.connect()  # type: ignore[no-untyped-call]
        writer = connection._writer
        assert writer is not None
        replies = _Replies(writer.transport)
        writer.transport.set_protocol(replies)
        if self._with_script:
            await replies.ask(b"".join(connection.pack_command("SCRIPT", "LOAD", APPEND)), 1, limit_s)
        self._replies = replies
        self.num_opened += 1


def _kind_of(error: BaseException) -> str:
    """The first word of an error reply, a code; or the error's type. The rest may quote a request."""
    code = str(error).split(" ", 1)[0]
    is_code = isinstance(error, hiredis.ReplyError) and code.isascii() and code.isalnum() and code.isupper()
    return code if is_code else type(error).__name__


def _again(error: Exception) -> Exception:
    """One for each who waits: a traceback is the error's own."""
    return type(error)(*error.args)
