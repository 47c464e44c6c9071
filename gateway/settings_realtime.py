"""The settings of Realtime conversations over WebSocket: how many, how long, how much at once.

What they do: `gateway/realtime_socket.py` and `gateway/websocket_protocol.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from gateway.settings_field import EDGE, About


@dataclass(frozen=True, slots=True)
class Realtime:
    """Conversations over WebSocket."""

    TOPIC: ClassVar = "Realtime"
    COMMANDS: ClassVar = EDGE

    max_conversations: Annotated[
        int, About("open conversations of one process; more is 503", "conversations", at_least=1)
    ] = 1000
    realtime_idle_s: Annotated[
        float,
        About("time that a conversation is kept in which nothing is said or answered", "s", above=0),
    ] = 600.0
    realtime_limit_s: Annotated[
        float, About("longest life of a conversation; a running answer is not cut by it", "s", above=0)
    ] = 3600.0
    max_conversation_items: Annotated[
        int, About("items of one conversation; more are refused", "items", at_least=2)
    ] = 1000
    max_conversation_bytes: Annotated[int, About("all items of one conversation", "bytes", at_least=1024)] = (
        32 << 20
    )
    conversations_bytes: Annotated[
        int, About("items of all conversations of one process", "bytes", at_least=1024)
    ] = 512 << 20
    max_responses: Annotated[
        int, About("responses of one conversation at the same time", "responses", at_least=1)
    ] = 8
    # Base64 makes an image of 12 MB as large as this.
    websocket_max_bytes: Annotated[
        int, About("one message of a client; more ends its connection", "bytes", at_least=1024)
    ] = 16 << 20
    # Shorter than the time after which proxies close what is silent; nginx's default is 60 s.
    websocket_ping_s: Annotated[float, About("time between pings to a client", "s", above=0)] = 20.0
    websocket_ping_limit_s: Annotated[
        float, About("time for its answer; without one the connection is closed", "s", above=0)
    ] = 20.0
