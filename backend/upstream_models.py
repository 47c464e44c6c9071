"""A server's list of models, `GET /v1/models`, as vLLM, SGLang and most others write it."""

from __future__ import annotations

import msgspec

from backend.upstream_ports import UNKNOWN_MODEL_LEN, ServedModel

MAX_MODELS = 1024


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None  # of an adapter: its base model


class _List(msgspec.Struct):
    data: list[_Card]


def read_models(body: bytes) -> list[ServedModel]:
    """The models in the list's order; an adapter has its base model's context. Raises `ValueError`."""
    cards = msgspec.json.decode(body, type=_List).data
    if len(cards) > MAX_MODELS:
        raise ValueError(f"it lists {len(cards)} models; the limit is {MAX_MODELS}")
    lengths = {card.id: card.max_model_len for card in cards}
    return [ServedModel(card.id, _length(card, lengths)) for card in cards]


def _length(card: _Card, lengths: dict[str, int | None]) -> int:
    length = card.max_model_len or (lengths.get(card.parent) if card.parent is not None else None)
    return UNKNOWN_MODEL_LEN if length is None else length
