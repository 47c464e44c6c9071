"""The images and sounds of a request: whether the model takes them, and their places in a prompt.

Not here: what is behind their addresses (`gateway/media.py`), and what the engine makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pipeline.encoding import BYTES_PER_ID
from pipeline.errors import InvalidRequest
from pipeline.media_errors import PLURALS, TooManyMedia
from pipeline.needs import LoadMedia, Steps
from pipeline.values import ChatRequest, Json, MediaRef, Medium, ModelInfo

_MAX_LOOKS: Final = 256  # 0.2 us each; beyond that counting integers is quicker, 3 ms for 100,000


def media_of(messages: Sequence[Mapping[str, Json]]) -> tuple[MediaRef, ...]:
    """The images and sounds of a chat, in order. Without any: 60 ns a message."""
    contents = [content for message in messages if type(content := message.get("content")) is list]
    return tuple(part["media"] for content in contents for part in content if "media" in part)


def without_media(request: ChatRequest) -> ChatRequest:
    """The request for whoever keeps it longer than its prompt takes to make: data URIs are megabytes."""
    if not media_of(request.messages):
        return request
    return replace(request, messages=tuple(map(_without_media, request.messages)))


def _without_media(message: Mapping[str, Json]) -> Mapping[str, Json]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if "media" not in part]}


def check_taken(refs: Sequence[MediaRef], model: ModelInfo, max_count: int) -> None:
    """Raises `InvalidRequest` for a kind that the model does not take, and `TooManyMedia`.

    `max_count`: the server's own limit, for each kind.
    """
    for kind in dict.fromkeys(ref.kind for ref in refs):
        of_kind = [ref for ref in refs if ref.kind == kind]
        support = model.media.get(kind)
        if support is None:
            path = of_kind[0].path
            raise InvalidRequest(
                f"'{path}' is of the kind {kind}, but the model {model.name} takes no {PLURALS[kind]}.", path
            )
        limit = min(max_count, support.max_count)
        if len(of_kind) > limit:
            raise TooManyMedia(kind, len(of_kind), limit)


def loaded(messages: Sequence[Mapping[str, Json]], ids: bytes, model: ModelInfo) -> Steps[tuple[Medium, ...]]:
    """The images and sounds of a chat whose prompt is these packed ids. Needs `LoadMedia`.

    Raises `InvalidRequest` unless the prompt has a place for each.
    """
    refs = media_of(messages)
    _check_places(ids, refs, model)
    if not refs:
        return ()
    media: tuple[Medium, ...] = yield LoadMedia(refs)
    return media


def _check_places(ids: bytes, refs: Sequence[MediaRef], model: ModelInfo) -> None:
    """The engine would take a placeholder alone in silence, and fail at an image without one."""
    for kind, support in model.media.items():
        num_places = count_id(ids, support.token_id)
        num_media = sum(ref.kind == kind for ref in refs)
        if num_places != num_media:
            raise InvalidRequest(
                f"The model's chat template makes {num_places} places for {num_media} {PLURALS[kind]}.",
                "messages",
            )


def refuse_places(ids: bytes | memoryview, path: str, model: ModelInfo) -> None:
    """Raises `InvalidRequest` for a placeholder in a prompt that comes without images and sounds."""
    for kind, support in model.media.items():
        if count_id(bytes(ids), support.token_id):
            raise InvalidRequest(
                f"'{path}' holds the token id {support.token_id}, the place of one of the model's "
                f"{PLURALS[kind]}; those are only taken by /v1/chat/completions.",
                path,
            )


def count_id(ids: bytes, token_id: int) -> int:
    """How often an id is among packed ids. 0.3 ms for 100,000 of which few are it."""
    pattern = token_id.to_bytes(BYTES_PER_ID, "little", signed=True)
    if ids.count(pattern) > _MAX_LOOKS:
        return memoryview(ids).cast("i").tolist().count(token_id)
    return sum(1 for _ in _places(ids, pattern))


def first_medium(ids: memoryview, media: Sequence[Medium], model: ModelInfo) -> str:
    """The digest of the medium whose placeholder comes first in the first block; empty if none is there."""
    block, places = bytes(ids[: model.block_size * BYTES_PER_ID]), {}
    for kind in dict.fromkeys(medium.kind for medium in media):
        pattern = model.media[kind].token_id.to_bytes(BYTES_PER_ID, "little", signed=True)
        place = next(_places(block, pattern), None)
        if place is not None:
            places[place] = kind
    if not places:
        return ""
    first = places[min(places)]
    return next(medium.digest for medium in media if medium.kind == first)


def _places(ids: bytes, pattern: bytes) -> Iterator[int]:
    """Where an id stands among packed ids. Bytes of two neighbours can look like it."""
    place = ids.find(pattern)
    while place >= 0:
        if place % BYTES_PER_ID == 0:
            yield place
        place = ids.find(pattern, place + 1)
