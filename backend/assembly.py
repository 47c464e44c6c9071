"""Prompts and media on their way to a worker in pieces: put together, bounded in bytes over all connections.
No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias, cast

from backend.link import LinkError, MediaHead, Submit
from backend.media_support import Support, lack
from backend.ports import Job
from pipeline.values import MediaKind, Medium

_Refusal: TypeAlias = tuple[str, str] | None  # kind and message, as in `link.Error`


class Arriving(Protocol):
    """What a prompt is collected in; `backend.server_stream.Stream` is one."""

    pieces: list[bytes]
    num_bytes: int  # of the pieces
    media: bytearray


class Assembly:
    """One worker's prompts in pieces, and their media. `num_bytes` is the sum of both."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def refusal(self, stream: Arriving, ids: bytes, max_tokens: int) -> _Refusal:
        """Kind and message of why these further ids (int32 bytes) cannot be taken, or None."""
        num_bytes = stream.num_bytes + len(ids)
        if len(ids) % 4:
            return "rejected", f"a part of the prompt has {len(ids)} bytes, not 4 per id"
        if num_bytes > 4 * max_tokens:
            return "rejected", f"the prompt has {num_bytes // 4} tokens or more; the limit is {max_tokens}"
        return self._refusal(len(ids))

    def media_refusal(self, stream: Arriving, data: bytes, supported: Support) -> _Refusal:
        """As `refusal`, for a part of media."""
        num_bytes = len(stream.media) + len(data)
        if not supported:
            return "rejected", "the model takes text only"
        if num_bytes > self._max_bytes:
            return "rejected", f"the media have {num_bytes} bytes or more; the limit is {self._max_bytes}"
        return self._refusal(len(data))

    def _refusal(self, num_bytes: int) -> _Refusal:
        if self.num_bytes + num_bytes > self._max_bytes:
            return "busy", f"prompts on their way exceed {self._max_bytes} bytes"
        return None

    def add(self, stream: Arriving, ids: bytes) -> None:
        """A piece that is not the last."""
        stream.pieces.append(ids)
        stream.num_bytes += len(ids)
        self.num_bytes += len(ids)

    def add_media(self, stream: Arriving, data: bytes) -> None:
        """A part of media."""
        stream.media += data
        self.num_bytes += len(data)

    def submit_refusal(
        self, stream: Arriving, submit: Submit, max_tokens: int, supported: Support
    ) -> _Refusal:
        """As `refusal`, for the last part. Raises `LinkError` where it names other media than came."""
        heads = submit.media or []
        num_bytes = sum(head.num_bytes for head in heads)
        if num_bytes != len(stream.media):
            raise LinkError(f"{len(stream.media)} bytes of media came; their SUBMIT says {num_bytes}")
        if heads and (problem := lack(supported, [head.kind for head in heads])) is not None:
            return "rejected", problem
        return self.refusal(stream, submit.ids, max_tokens)

    def finish(self, stream: Arriving, submit: Submit) -> Job:
        """The whole job; the submit's ids are the last of the prompt, none after pieces of a gateway that
        pools ids.

        One join for all pieces: a single part is the prompt itself, without a copy.
        """
        ids = b"".join((*stream.pieces, submit.ids) if submit.ids else stream.pieces)
        media = tuple(_cut(stream.media, submit.media)) if submit.media else ()
        self.drop(stream)
        return Job(
            ids,
            submit.sampling,
            submit.priority,
            submit.cache_salt,
            submit.reasoning_ended,
            submit.reasoning_parser_kwargs,
            media,
        )

    def drop(self, stream: Arriving) -> None:
        """Forget the pieces of a prompt, and its media."""
        self.num_bytes -= stream.num_bytes + len(stream.media)
        stream.pieces, stream.num_bytes, stream.media = [], 0, bytearray()


def _cut(media: bytearray, heads: Sequence[MediaHead]) -> Iterator[Medium]:
    """Views of what came, not copies: it may be large, and the event loop has tokens to send."""
    whole, start = memoryview(media), 0
    for head in heads:
        data = whole[start : start + head.num_bytes]
        yield Medium(cast(MediaKind, head.kind), cast(bytes, data), head.format, head.digest)
        start += head.num_bytes
