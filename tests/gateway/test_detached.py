"""Whom a detached answer is for: never gone by itself, over with its last event."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from gateway.client import Client
from gateway.detached import Detached
from gateway.frames import ChatShape
from gateway.journal import Journal, JournalLimits
from gateway.journal_writer import JournalOutlet, JournalWriter
from gateway.metrics import Metrics
from gateway.record import RequestRecord
from gateway.watch import OpenRequests
from pipeline.errors import Draining, WorkerLost
from pipeline.values import Delivery
from tests.gateway.answering import CREATED, MODEL, REQUEST_ID, Case, turns, vocabulary


def detached() -> Detached:
    record = RequestRecord(REQUEST_ID, "/v1/streams", 0.0)
    return Detached(record, JournalOutlet(Journal(JournalLimits())))


def case_of(client: Detached) -> Case:
    """An answer for it, from an engine driven by hand."""
    case = Case()
    shape = ChatShape(REQUEST_ID, CREATED, MODEL)
    writer = JournalWriter(client.outlet, shape, vocabulary(), case.record, Delivery(stream=True), 1)
    case.writer = case.answer.writer = writer
    case.answer.outlet = client.outlet
    client.on_gone = case.answer.client_gone
    return case.start()


async def test_it_is_over_with_the_last_event_and_not_before() -> None:
    client: Client = detached()
    assert isinstance(client, Detached)
    over = asyncio.create_task(client.finished())
    client.outlet.push(b"data: {}\n\n")
    client.refuse(Draining())
    client.close()
    client.on_gone("nobody has gone")
    await turns()
    assert not over.done()
    assert not client.outlet.closed
    client.outlet.end(b"data: [DONE]\n\n")
    await asyncio.wait_for(over, 5)
    await asyncio.wait_for(client.finished(), 5)  # also for who asks later
    assert client.read_timeout_s is None


@pytest.mark.parametrize("end", ["complete", "failed", "dropped"])
async def test_every_end_of_its_answer_is_its_end(end: str) -> None:
    client = detached()
    case, journal = case_of(client), client.outlet.journal
    over = asyncio.create_task(client.finished())
    case.streams[0].say("a")
    await turns()
    assert not over.done()
    if end == "complete":
        case.streams[0].say("b", "stop")
    elif end == "failed":
        case.answer.fail(WorkerLost("gone"))
    else:
        client.on_gone("the server has ended the connection")
    await asyncio.wait_for(over, 5)
    assert journal.is_over
    assert case.streams[0].is_over


async def test_no_look_takes_it_for_a_client_that_does_not_read() -> None:
    client = detached()
    case = case_of(client)
    requests = OpenRequests(Metrics())
    requests.add(client, case.answer)
    case.streams[0].say("a")
    for ahead_s in (1, 20, 29):  # the worker speaks every 30 s
        requests.look(case.engine.now_s + ahead_s)
    assert not case.answer.is_ended
    assert client.outlet.journal.written == 2  # and no heartbeat is an event
    requests.publish()
    requests.look(case.engine.now_s + 31)
    assert case.record.ended == "worker_stalled"
    requests.remove(client)
    assert len(requests) == 0


async def test_it_holds_its_answer_in_no_circle() -> None:
    client = detached()
    case = case_of(client)
    gc.collect()
    gc.disable()
    try:
        watched = weakref.ref(client)
        case.streams[0].say("a", "stop")
        del client
        assert watched() is None
    finally:
        gc.enable()
