"""A server's list of models, `GET /v1/models`, as vLLM, SGLang and most others write it."""

from __future__ import annotations

from typing import Final

import msgspec

from backend.upstream_ports import UNKNOWN_MODEL_LEN, ServedModel

MAX_MODELS: Final = 1024
MAX_NAME_CHARS: Final = 1024


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None  # of an adapter: its base model


class _List(msgspec.Struct):
    data: list[_Card]


def read_models(body: bytes) -> list[ServedModel]:
    """The models in the list's order, each name once; an adapter has its base model's context.

    Raises `ValueError`.
    """
    cards = msgspec.json.decode(body, type=_List).data
    if len(cards) > MAX_MODELS:
        raise ValueError(f"it lists {len(cards)} models; the limit is {MAX_MODELS}")
    for card in cards:
        if not 0 < len(card.id) <= MAX_NAME_CHARS:
            raise ValueError(
                f"a model's id has {len(card.id)} characters; the limit is 1 to {MAX_NAME_CHARS}"
            )
    by_name = {card.id: card for card in reversed(cards)}  # of one name the first counts
    lengths = {name: card.max_model_len for name, card in by_name.items()}
    return [
        ServedModel(name, _length(by_name[name], lengths))
        for name in dict.fromkeys(card.id for card in cards)
    ]


def _length(card: _Card, lengths: dict[str, int | None]) -> int:
    length = card.max_model_len or (lengths.get(card.parent) if card.parent is not None else None)
    return min(length, UNKNOWN_MODEL_LEN) if length is not None and length > 0 else UNKNOWN_MODEL_LEN
