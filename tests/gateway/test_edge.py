"""What surrounds a request: one log line without text, one count, and errors that give nothing away."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from gateway.edge import EdgeParts, Endpoint
from gateway.exchange import ABORT_EXTENSION, Exchange
from gateway.outlet import ReaderLimits
from gateway.record import RequestRecord
from pipeline.errors import Draining, EngineRejected, HeadraceError, NoWorker
from tests.gateway.answering import until
from tests.gateway.asgi import Request
from tests.gateway.serving import CHAT, RAW, Service, chat, raw, service

MARKER = "xylophone"
FIELDS = {
    *("time", "id", "route", "key", "model", "worker", "stream", "status", "prompt_tokens", "cached_tokens"),
    *(
        "output_tokens",
        "choices",
        "finish",
        "ended",
        "detail",
        "resubmitted",
        "rule_hits",
        "ttft_ms",
        "tpot_ms",
    ),
    *("held_peak_characters", "undecided_characters", "buffered_peak_bytes", "total_ms"),
}


async def test_a_request_leaves_one_line_and_one_count() -> None:
    async with service(keys=["secret"]) as made:
        request = Request(
            CHAT, chat(MARKER, stream=True), headers={"authorization": "Bearer secret", "x-request-id": "abc"}
        )
        task = request.start(made)
        await until(lambda: made.engine.streams)
        made.engine.streams[0].say(MARKER)
        made.engine.streams[0].say(MARKER, "stop")
        await asyncio.wait_for(task, 5)
        (line,) = made.lines
        assert line.keys() >= FIELDS
        assert (line["id"], line["route"], line["model"], line["worker"]) == ("abc", CHAT, "m", "w0")
        assert (line["status"], line["ended"], line["finish"]) == (200, "complete", ["stop"])
        assert (line["cached_tokens"], line["queue_ms"], line["prefill_ms"]) == (3, 1.5, 2.5)
        assert len(line["key"]) == 8
        assert MARKER not in made.log
        assert "secret" not in made.log
        assert made.sample("headrace_requests_total", route=CHAT, status="200", ended="complete") == 1
        assert (
            made.sample("gen_ai_client_token_usage_sum", gen_ai_request_model="m", gen_ai_token_type="output")
            > 2
        )
        assert made.sample("gen_ai_server_time_to_first_token_seconds_count", gen_ai_request_model="m") == 1
        assert made.sample("headrace_stage_seconds_count", stage="tokenize") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, json.dumps({"model": MARKER, "messages": [{"role": "user", "content": "x"}]}).encode()),
        (CHAT, json.dumps({"model": "m", "messages": MARKER}).encode()),
        (CHAT, json.dumps({"model": "m", "messages": [{"role": "user", "content": MARKER + "\0"}]}).encode()),
        (CHAT, chat(MARKER, max_tokens=1 << 20)),
        (CHAT, chat(temperature=MARKER)),
        (CHAT, chat(tool_choice=MARKER)),
        (RAW, raw(MARKER + "\0")),
        (RAW, raw(MARKER, stop=[MARKER] * 100)),
        (RAW, raw(MARKER, logit_bias={MARKER: 1})),
        (CHAT, f'{{"{MARKER} {MARKER}": 1, "{MARKER} {MARKER}": 2}}'.encode()),
        (CHAT, MARKER.encode()),
    ],
)
async def test_refusals_leave_no_text_in_the_log(path: str, body: bytes) -> None:
    async with service() as made:
        client = await Request(path, body).run(made)
        assert client.status is not None
        assert 400 <= client.status < 500
        assert len(made.lines) == 1
        assert MARKER not in made.log
        assert made.lines[0]["status"] == client.status


async def test_engines_refusal_leaves_no_text_in_the_log() -> None:
    async with service() as made:
        request = Request(CHAT, chat())
        task = request.start(made)
        await until(lambda: made.engine.streams)
        made.engine.streams[0].fail(EngineRejected(f"no grammar {MARKER!r}"))
        await asyncio.wait_for(task, 5)
        assert request.client.status == 400
        assert MARKER in request.client.body.decode()
        assert MARKER not in made.log


async def test_an_unexpected_error_is_a_500_that_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError(MARKER)

    async with service() as made:
        monkeypatch.setattr(made.models, "get", broken)
        with caplog.at_level(logging.DEBUG):
            client = await Request(CHAT, chat(), headers={"x-request-id": "abc"}).run(made)
        assert client.status == 500
        assert client.json["error"]["code"] == "internal_error"
        assert MARKER not in client.body.decode() + made.log + caplog.text
        assert "request abc: unexpected KeyError at" in caplog.text
        assert "in broken" in caplog.text
        assert made.lines[0]["ended"] == "internal_error"
        assert made.sample("headrace_requests_total", route=CHAT, status="500", ended="internal_error") == 1


async def test_a_client_that_goes_during_its_body_is_logged() -> None:
    async with service() as made:
        request = Request(CHAT, b"{", b"}")
        request.disconnect()
        await request.run(made)
        assert request.client.messages == []
        assert (made.lines[0]["status"], made.lines[0]["ended"]) == (499, "client_closed")


async def test_each_request_of_many_has_its_line() -> None:
    async with service() as made:
        await asyncio.gather(*(Request(CHAT, b"{").run(made) for _ in range(20)))
        assert len({line["id"] for line in made.lines}) == 20


async def test_a_client_that_does_not_read_its_error_is_cut() -> None:
    async with service(reader=ReaderLimits(1 << 16, 0.05)) as made:
        cut: list[bool] = []
        request = Request(CHAT, b"{", extensions={ABORT_EXTENSION: lambda: cut.append(True)})
        request.client.stops_reading()
        await request.run(made)
        assert cut == [True]
        assert made.lines[0]["status"] == 400


async def test_a_body_that_does_not_end_is_refused_when_the_server_cuts() -> None:
    async with service() as made:
        request = Request(CHAT, b"{")
        request.keep_open()
        task = request.start(made)
        await until(lambda: request.num_received == 2)
        assert len(made.flow.in_progress) == 1
        made.flow.cut(Draining())
        await asyncio.wait_for(task, 5)
        assert (request.client.status, request.client.json["error"]["code"]) == (503, "draining")
        assert not made.flow.in_progress


class Answering(Endpoint):
    """A route of a kind of its own: what it does is the test's."""

    def __init__(self, made: Service, error: BaseException | None = None) -> None:
        super().__init__(EdgeParts(made.flow, made.metrics, made._request_log, ReaderLimits(1 << 16)))
        self.error = error
        self.ended: list[RequestRecord] = []
        self.was_in_progress = False

    async def serve(self, exchange: Exchange) -> None:
        self.was_in_progress = exchange in self.flow.in_progress
        if self.error is not None:
            raise self.error
        exchange.outlet.start(204, [])
        exchange.outlet.end()

    def over(self, exchange: Exchange) -> None:
        assert exchange not in self.flow.in_progress
        self.ended.append(exchange.record)


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 204), (NoWorker("none"), 503), (HeadraceError("ours"), 500), (KeyError(MARKER), 500)],
    ids=repr,
)
async def test_a_kind_of_route_says_what_it_serves_and_remembers(
    error: Exception | None, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with service() as made:
        endpoint = Answering(made, error)
        client = await Request("/x").run(endpoint)
        assert client.status == status
        assert endpoint.was_in_progress
        assert len(endpoint.ended) == 1
        assert made.lines == []  # that is the kind's affair
        assert MARKER not in client.body.decode() + caplog.text
        assert ("unexpected" in caplog.text) == isinstance(error, KeyError)


async def test_a_request_that_the_server_cancels_is_over_as_any_other() -> None:
    async with service() as made:
        endpoint = Answering(made, asyncio.CancelledError())
        with pytest.raises(asyncio.CancelledError):
            await Request("/x").run(endpoint)
        assert len(endpoint.ended) == 1


async def test_a_route_that_serves_nothing_is_a_fault() -> None:
    async with service() as made:
        endpoint = Endpoint(EdgeParts(made.flow, made.metrics, made._request_log, ReaderLimits(1 << 16)))
        client = await Request("/x").run(endpoint)
        assert client.status == 500
        assert made.lines[0]["route"] == "/x"
