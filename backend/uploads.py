"""Submits on their way out: short ones at once, long prompts and media in pieces that an abort can overtake.
No I/O.

A frame leaves as parts, for one gathering write. The ids of a prompt that is not short are such a part: a
slice of the prompt's own view, copied by nobody here; so are media. The view keeps its pooled buffer from
being used again, so it is held exactly until the last slice of it was handed over; then the transport holds
what it must.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, TypeAlias, cast

from backend import link
from backend.link import MediaHead, Submit
from pipeline.errors import InvalidRequest
from pipeline.values import EngineCall

# Ids up to this are copied into their frame: 16 KiB cost 4.3 us so and 5.1 us as a part of their own (uvloop,
# Unix socket, with the write), 32 KiB 6.5 us and 5.0 us.
MAX_COPIED_BYTES: Final = 16 << 10

Parts: TypeAlias = tuple[bytes | bytearray | memoryview, ...]  # what to write, one after the other


_HEADS: Final = {link.PIECE: link.piece_head, link.MEDIA: link.media_head}


class _Upload:
    """A long submit: what is left of its media and ids, by frame kind, and the SUBMIT frame that ends it."""

    __slots__ = ("generation", "is_begun", "rest", "slot", "submit")

    def __init__(
        self, slot: int, generation: int, rest: Iterable[tuple[int, memoryview]], submit: bytearray
    ) -> None:
        self.slot = slot
        self.generation = generation
        self.rest = deque(rest)
        self.submit = submit
        self.is_begun = False

    def take(self) -> Parts:
        """The next frame, the last one with the SUBMIT behind it."""
        self.is_begun = True
        if not self.rest:
            return (self.submit,)
        kind, data = self.rest.popleft()
        piece, data = data[: link.PIECE_BYTES], data[link.PIECE_BYTES :]
        if data.nbytes:
            self.rest.appendleft((kind, data))
        head = _HEADS[kind](self.slot, self.generation, piece.nbytes)
        return (head, piece) if self.rest else (head, piece, self.submit)


class Uploads:
    """Long ones go one after the other: the first is complete, and prefilling, before the next starts."""

    def __init__(self) -> None:
        self.copied_bytes = 0  # ids copied here on their way from prompt to transport, so far
        self._long: deque[_Upload] = deque()

    def start(self, slot: int, generation: int, call: EngineCall) -> Parts | None:
        """What to send now, or None for a long prompt or one with media, which is queued instead.

        Raises `InvalidRequest` if the sampling values cannot be encoded, or are too long.
        """
        num_bytes = 4 * call.prompt.num_tokens
        ids = call.prompt.ids[:num_bytes]
        is_copied = num_bytes <= MAX_COPIED_BYTES
        submit = _encode(slot, generation, ids if is_copied else _NO_IDS, call)
        if is_copied:
            self.copied_bytes += num_bytes
        if not call.media:
            if is_copied:
                return (submit,)
            if num_bytes <= link.PIECE_BYTES:
                return link.piece_head(slot, generation, num_bytes), ids, submit
        rest = [(link.MEDIA, memoryview(medium.data)) for medium in call.media if medium.data]
        if not is_copied:
            rest.append((link.PIECE, ids))
        self._long.append(_Upload(slot, generation, rest, submit))
        return None

    def drop(self, slot: int) -> bool:
        """Forget what is left of a slot's submit. True if nothing of it was ever sent."""
        for index, upload in enumerate(self._long):
            if upload.slot == slot:
                del self._long[index]
                return not upload.is_begun
        return False

    def clear(self) -> None:
        """Forget everything: the connection is lost."""
        self._long.clear()

    def take_piece(self) -> Parts | None:
        """The next piece of the first long submit, the last with its SUBMIT; None when there is none."""
        if not self._long:
            return None
        upload = self._long[0]
        parts = upload.take()
        if parts[-1] is upload.submit:
            self._long.popleft()
        return parts


_NO_IDS: Final = memoryview(b"")


def _encode(slot: int, generation: int, ids: memoryview, call: EngineCall) -> bytearray:
    sampling = {**call.sampling, "max_tokens": call.max_tokens}
    try:
        # msgspec takes any buffer for bytes, and copies it once, into the frame.
        submit = Submit(
            slot,
            generation,
            cast(bytes, ids),
            sampling,
            call.priority,
            call.cache_salt,
            call.reasoning_ended,
            cast("dict[str, Any] | None", call.reasoning_parser_kwargs),
            [MediaHead(each.kind, each.format, each.digest, len(each.data)) for each in call.media] or None,
        )
        frame = link.encode(submit)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"a sampling parameter cannot be sent to the engine: {error}") from error
    if len(frame) > link.MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"the request's parameters take {len(frame)} bytes; the limit is {link.MAX_FRAME_BYTES}"
        )
    return frame
