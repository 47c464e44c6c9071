"""Images and sounds for the scripted engine: each stands for a few tokens that depend on its bytes alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from tokenizers import Tokenizer

from backend.media_support import KINDS, Support
from pipeline.values import MediaKind, MediaSupport, Medium

NUM_MEDIA_TOKENS: Final = 7  # what one placeholder becomes, as in an engine
MAX_MEDIA: Final = 16  # of a kind in one prompt


def parse_media(entries: Sequence[str]) -> dict[MediaKind, str]:
    """`KIND=TOKEN` entries, such as `image=<image>`. Raises `ValueError`, which shows the entry."""
    tokens: dict[MediaKind, str] = {}
    for entry in entries:
        name, _, token = entry.partition("=")
        kind = next((kind for kind in KINDS if kind == name), None)
        if kind is None or not token:
            raise ValueError(f"scripted_media is {entry!r}; it must be one of {', '.join(KINDS)}, =, a token")
        tokens[kind] = token
    return tokens


def scripted_support(entries: Sequence[str], tokenizer: Tokenizer) -> dict[MediaKind, MediaSupport]:
    """What the engine takes. Raises `ValueError` for a placeholder that is no token."""
    support: dict[MediaKind, MediaSupport] = {}
    for kind, token in parse_media(entries).items():
        token_id = tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"scripted_media: the tokenizer has no token {token!r}")
        support[kind] = MediaSupport(token_id, MAX_MEDIA)
    return support


def expanded(ids: bytes, media: Sequence[Medium], support: Support) -> bytes:
    """A prompt (int32 bytes) with made-up ids in place of its placeholders.

    Equal files give equal ids, so that a prefix cache sees what it would of a real engine. Raises
    `ValueError` unless there is one of each kind for each placeholder.
    """
    if not support:
        return ids
    prompt = array("i", ids)
    waiting: dict[int, list[bytes]] = {}
    for kind, each in support.items():
        files = [medium.data for medium in media if medium.kind == kind]
        if prompt.count(each.token_id) != len(files):
            raise ValueError(
                f"the prompt has {prompt.count(each.token_id)} placeholders for {len(files)} of kind {kind!r}"
            )
        waiting[each.token_id] = files[::-1]
    if not media:
        return ids
    parts = []
    for token_id in prompt:
        files = waiting.get(token_id, [])
        parts.append(_made_up(files.pop()) if files else token_id.to_bytes(4, "little", signed=True))
    return b"".join(parts)


def _made_up(file: bytes) -> bytes:
    return blake2b(file, digest_size=4 * NUM_MEDIA_TOKENS).digest()
