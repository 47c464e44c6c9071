"""Submits on their way out: short ones at once, long prompts in pieces that an abort can overtake. No I/O."""

from __future__ import annotations

from collections import deque

from backend import link
from backend.link import Piece, Submit
from pipeline.errors import InvalidRequest
from pipeline.values import EngineCall


class _Upload:
    """A long prompt: the next byte to send, and the SUBMIT frame that ends it."""

    __slots__ = ("generation", "ids", "offset", "slot", "submit")

    def __init__(self, slot: int, generation: int, ids: memoryview, submit: bytearray) -> None:
        self.slot = slot
        self.generation = generation
        self.ids = ids
        self.offset = 0
        self.submit = submit


class Uploads:
    """Long prompts go one after the other: the first is complete, and prefilling, before the next starts."""

    def __init__(self) -> None:
        self._long: deque[_Upload] = deque()

    def start(self, slot: int, generation: int, call: EngineCall) -> bytearray | None:
        """The SUBMIT to send now, or None for a long prompt, which is queued instead.

        Raises `InvalidRequest` if the sampling values cannot be encoded, or are too long.
        """
        ids = bytes(call.prompt.ids)[
            : 4 * call.prompt.num_tokens
        ]  # a copy: the buffer may go to another call
        cut = (len(ids) - 1) // link.PIECE_BYTES * link.PIECE_BYTES if ids else 0
        submit = _encode(slot, generation, ids[cut:], call)
        if not cut:
            return submit
        self._long.append(_Upload(slot, generation, memoryview(ids)[:cut], submit))
        return None

    def drop(self, slot: int) -> bool:
        """Forget what is left of a slot's submit. True if nothing of it was ever sent."""
        for index, upload in enumerate(self._long):
            if upload.slot == slot:
                del self._long[index]
                return upload.offset == 0
        return False

    def take_piece(self) -> bytearray | None:
        """The next part of the first long prompt, None when there is none."""
        if not self._long:
            return None
        upload = self._long[0]
        if upload.offset >= len(upload.ids):
            return self._long.popleft().submit
        data = bytes(upload.ids[upload.offset : upload.offset + link.PIECE_BYTES])
        upload.offset += len(data)
        return link.encode(Piece(upload.slot, upload.generation, data))


def _encode(slot: int, generation: int, ids: bytes, call: EngineCall) -> bytearray:
    sampling = {**call.sampling, "max_tokens": call.max_tokens}
    try:
        frame = link.encode(Submit(slot, generation, ids, sampling, call.priority, call.cache_salt))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"a sampling parameter cannot be sent to the engine: {error}") from error
    if len(frame) > link.MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"the request's parameters take {len(frame)} bytes; the limit is {link.MAX_FRAME_BYTES}"
        )
    return frame
