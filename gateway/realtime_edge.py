"""The route of Realtime conversations, put together: which model a conversation is with, and its limits."""

from __future__ import annotations

import contextlib

from gateway.edge import EdgeParts, Endpoint
from gateway.outlet import ReaderLimits
from gateway.realtime import RealtimeTalk, TalkParts
from gateway.realtime_admission import Admission
from gateway.realtime_conversation import Memory
from gateway.realtime_ports import OpenedSocket
from gateway.realtime_socket import RealtimeLimits, RealtimeSocket
from gateway.sampling_fields import RequestLimits
from gateway.settings_realtime import Realtime
from pipeline.errors import InvalidRequest, NoWorker, QueueFull
from pipeline.ports import Engine


def realtime_socket(
    edge: EdgeParts,
    admission: Admission,
    engine: Engine,
    limits: RequestLimits,
    settings: Realtime,
    reader: ReaderLimits,
) -> RealtimeSocket:
    """The route as an ASGI callable."""
    remember = Endpoint(edge).remember
    parts = TalkParts(
        edge.flow,
        remember,
        limits,
        settings.max_conversation_items,
        settings.max_conversation_bytes,
        Memory(settings.conversations_bytes),
        settings.max_responses,
        settings.realtime_limit_s,
    )

    def talk(socket: OpenedSocket) -> RealtimeTalk:
        return RealtimeTalk(parts, socket, model_of(socket.query.get("model"), engine))

    times = RealtimeLimits(settings.max_conversations, settings.realtime_idle_s, settings.realtime_limit_s)
    return RealtimeSocket(talk, admission, times, reader, remember)


def model_of(name: str | None, engine: Engine) -> str:
    """The model that a conversation asks for; the only one, if it names none.

    Raises `UnknownModel`, `NoWorker`, or `InvalidRequest` where there is a choice.
    """
    names = sorted(info.name for info in engine.models())
    if name is None:
        if len(names) == 1:
            return names[0]
        if not names:
            raise NoWorker("No worker is ready.")
        raise InvalidRequest(f"'model' is required in the query: one of {', '.join(names)}.", "model")
    with contextlib.suppress(QueueFull):  # there will be room again, and nothing is asked of it yet
        engine.check_room(name)
    return name
