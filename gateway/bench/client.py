"""One measured request: sent, read frame by frame as the event loop sees it, and written into its `Sample`.

Not here: when requests are sent (`gateway/bench/run.py`), what a frame holds
(`gateway/bench/answer_frames.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from backend.http_client import HttpClient
from backend.http_ports import Headers, HttpCall, HttpFault, HttpRequest
from gateway.bench.answer_frames import AnswerFrames, StreamFault, error_text
from gateway.bench.phrases import one_line
from gateway.bench.progress import Tally
from gateway.bench.sample import INTERRUPTED, Sample
from gateway.bench.target import Target

_OK: Final = 200
_MAX_ERROR_BYTES: Final = 4096
# After [DONE] the body's end is at most one read away. A server that keeps it open loses the connection.
_MAX_AFTER_DONE_S: Final = 0.1


class BenchClient:
    """Sends requests to one server. All times are seconds since `started_s`, of the monotonic clock."""

    def __init__(
        self, http: HttpClient, target: Target, started_s: float, timeout_s: float, tally: Tally | None = None
    ) -> None:
        self.tally = Tally() if tally is None else tally
        self._http = http
        self._target = target
        self._started_s = started_s
        self._timeout_s = timeout_s

    @property
    def target(self) -> Target:
        return self._target

    def now_s(self) -> float:
        return monotonic() - self._started_s

    async def ask(self, body: bytes, sample: Sample, keeps_text: bool = False) -> str:
        """Send a body and follow its answer to the end or to a failure, both told in `sample`.

        Returns the answer's text where it is kept. If the task is cancelled, the request is aborted.
        """
        exchange = _Exchange(self, sample, keeps_text)
        self.tally.sent()
        try:
            await exchange.run(self._http, self._target, self._timeout_s, self._target.post(body))
        finally:
            exchange.close()
            self.tally.ended(sample)
        return exchange.text


class _Exchange:
    """The receiver of one answer. Work is done in callbacks; the task that waits wakes once, at the end."""

    def __init__(self, client: BenchClient, sample: Sample, keeps_text: bool) -> None:
        self._now_s = client.now_s
        self._tally = client.tally
        self._sample = sample
        self._frames = AnswerFrames(sample, keeps_text)
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._call: HttpCall | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._content_type = b""
        self._refusal = b""  # the body of an answer that is no stream

    @property
    def text(self) -> str:
        return self._frames.text

    async def run(self, http: HttpClient, target: Target, timeout_s: float, request: HttpRequest) -> None:
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out, timeout_s)
        self._sample.sent_s = self._now_s()
        self._call = http.send(target.origin, request, self)
        await self._end

    def close(self) -> None:
        """Abort what has not ended: the load test is over."""
        if self._sample.ended_s is None:
            self._fail(INTERRUPTED, "the load test was ended")
        if self._timer is not None:
            self._timer.cancel()
        if self._call is not None:
            self._call.abort()

    def begun(self, status: int, headers: Headers) -> None:
        self._sample.headers_s = self._now_s()
        self._sample.status = status
        self._content_type = dict(headers).get(b"content-type", b"")

    def data(self, data: bytes) -> None:
        now_s = self._now_s()
        self._sample.num_bytes += len(data)
        if not self._is_stream():
            self._refusal += data[: _MAX_ERROR_BYTES - len(self._refusal)]
            return
        if self._sample.ended_s is not None:
            return
        frames_s = self._sample.frames_s
        num_before = len(frames_s)
        with self._faults():
            self._frames.feed(data, now_s)
            self._tally.num_frames += len(frames_s) - num_before
            if self._frames.is_done:
                self._done(now_s)

    def ended(self) -> None:
        if self._sample.ended_s is None:
            with self._faults():
                self._judge()
                self._sample.ended_s = self._now_s()
        self._release()

    def failed(self, fault: HttpFault) -> None:
        if self._sample.ended_s is not None:  # after [DONE], which has ended it
            self._release()
        elif fault.is_unreachable:
            self._fail("connect", str(fault))
        elif self._sample.headers_s is None and not fault.began:
            self._fail("no_response", str(fault))
        else:
            self._fail("lost", str(fault))

    def _done(self, now_s: float) -> None:
        """[DONE] has come: OpenAI's clients have their whole answer, and do not wait for the body's end.

        The connection is of use again after that end, so that it is waited for, a little.
        """
        self._judge()
        self._sample.ended_s = now_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_MAX_AFTER_DONE_S, self._release)

    def _is_stream(self) -> bool:
        media_type = self._content_type.partition(b";")[0].strip().lower()
        return self._sample.status == _OK and media_type == b"text/event-stream"

    def _judge(self) -> None:
        """Raise `StreamFault` unless this was a whole answer."""
        if self._sample.status != _OK:
            raise StreamFault(f"http_{self._sample.status}", error_text(self._refusal))
        if not self._is_stream():
            shown = one_line(self._content_type.decode("latin-1"))
            said = f": {error_text(self._refusal)}" if self._refusal else ""
            raise StreamFault("no_stream", f"the answer is {shown!r}, not text/event-stream{said}")
        self._frames.finish()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """What is wrong with an answer ends its request, at once: it must not wait for its time limit."""
        try:
            yield
        except StreamFault as fault:
            self._fail(fault.kind, str(fault))
        except Exception as error:  # whatever a server may send, the load goes on
            self._fail("bad_frame", f"{type(error).__name__}: {error}")

    def _time_out(self, timeout_s: float) -> None:
        where = "headers" if self._sample.headers_s is None else "its end"
        self._fail("timeout", f"no answer up to {where} within {timeout_s:g} s")

    def _fail(self, kind: str, detail: str) -> None:
        if self._sample.ended_s is None:
            self._sample.error, self._sample.detail = kind, one_line(detail)
            self._sample.ended_s = self._now_s()
            if self._call is not None:
                self._call.abort()
            self._release()

    def _release(self) -> None:
        """Let the task that waits go on."""
        if not self._end.done():
            self._end.set_result(None)
