"""The settings of resumable streams: what is kept of them, how long, and where processes share it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

from gateway.settings_field import EDGE, About

EMBEDDED: Final = "embedded"  # in the place of an address: see gateway/embedded_store.py


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams that a client can leave and come back to."""

    TOPIC: ClassVar = "Resumable streams"
    COMMANDS: ClassVar = EDGE

    redis: Annotated[
        str | None,
        About(
            "store that several gateway processes or machines share, redis://, rediss:// or unix://, or "
            "`embedded`: a Valkey child of this gateway",
            secret=True,
        ),
    ] = field(default=None, repr=False)
    stream_grace_s: Annotated[
        float, About("time that a stream without a reader goes on; then it is cancelled", "s", above=0)
    ] = 30.0
    stream_keep_s: Annotated[
        float, About("time that a stream can still be read after its end", "s", above=0)
    ] = 120.0
    stream_max_events: Annotated[
        int, About("events of one stream that are kept; older ones are dropped", "events", at_least=1)
    ] = 32_768
    stream_max_bytes: Annotated[
        int, About("journal of one stream; older events are dropped", "bytes", at_least=1024)
    ] = 8 << 20
    stream_journal_bytes: Annotated[
        int, About("journals of all streams of one process; more is 503", "bytes", at_least=1024)
    ] = 256 << 20
    store_max_bytes: Annotated[int, About("memory of the embedded store", "bytes", at_least=16 << 20)] = (
        512 << 20
    )
    store_limit_s: Annotated[
        float,
        About("time that streams wait for a store that does not answer; then they fail", "s", above=0),
    ] = 10.0
