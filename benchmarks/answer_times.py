"""When the text of a streamed answer comes, as its client sees it: every frame of one stream with its time.

Not here: load (`load.py`), and which answers are compared.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from benchmarks.load import StreamClient, StreamResult
from filters.stream import CompiledRules


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `pieces`: the text of each frame that has any; without rules there is one for each token.

    `ttft_ms`: to the first piece. `visible_ms`: to the first one that is more than white space.
    `tpot_ms`: per token after the first piece; too short where that was held.
    """

    pieces: tuple[str, ...]
    num_cached_tokens: float
    ttft_ms: float
    visible_ms: float
    tpot_ms: float

    @classmethod
    def of(cls, result: StreamResult, chunks: Sequence[tuple[float, bytes]]) -> Answer:
        """`chunks`: what came off the socket, with monotonic seconds.

        Raises `RuntimeError` for an answer that failed or that has nothing to see.
        """
        pieces = pieces_of(chunks)
        visible = [at_s for at_s, text in pieces if text.strip()]
        if not result.is_done or not visible or result.ended_s is None or (result.num_tokens or 0) < 2:
            raise RuntimeError(f"the answer failed: {result.status} {result.error} {result.num_tokens}")
        first_s = pieces[0][0]
        num_steps = (result.num_tokens or 0) - 1
        return cls(
            tuple(text for _, text in pieces),
            result.timings["cached_tokens"],
            (first_s - result.started_s) * 1e3,
            (visible[0] - result.started_s) * 1e3,
            (result.ended_s - first_s) * 1e3 / num_steps,
        )


def pieces_of(chunks: Sequence[tuple[float, bytes]]) -> list[tuple[float, str]]:
    """The text of each frame that has any, with the time at which its last byte came."""
    pieces: list[tuple[float, str]] = []
    rest = b""
    for at_s, data in chunks:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                texts = [choice["delta"].get("content") for choice in choices]
                pieces.extend((at_s, text) for text in texts if text)
    return pieces


class ListeningClient(StreamClient):
    """One request, whose frames are kept."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self.chunks: list[tuple[float, bytes]] = []

    def data_received(self, data: bytes) -> None:
        self.chunks.append((monotonic(), data))
        super().data_received(data)


async def listen(port: int, request: bytes) -> Answer:
    """Ask on a new connection and take all of the answer."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: ListeningClient(request), "127.0.0.1", port)
    return Answer.of(await client.done, client.chunks)


def num_held(rules: CompiledRules, pieces: Sequence[str]) -> int:
    """How many pieces go by before the first one after which something visible leaves the filter."""
    stream = rules.stream()
    if stream is None:
        return 0
    for number, piece in enumerate(pieces):
        if stream.feed(piece).strip():
            return number
    return len(pieces)
