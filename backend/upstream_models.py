"""A server's list of models, `GET /v1/models`, as vLLM, SGLang and most others write it.

And what this machine has of them: which folder a model has is the settings'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from backend.catalog import MisfitError
from backend.lenient import count
from backend.local_model import LocalModel, read_local_model
from backend.upstream_faults import UpstreamFault
from backend.upstream_ports import UNKNOWN_MODEL_LEN, ServedModel

logger = logging.getLogger(__name__)

MAX_MODELS: Final = 1024
MAX_NAME_CHARS: Final = 256


class _Card(msgspec.Struct):
    id: Any
    max_model_len: Any = None
    parent: Any = None  # of an adapter: its base model


class _List(msgspec.Struct):
    data: list[_Card]


def read_models(body: bytes) -> list[ServedModel]:
    """The models in the list's order, each name once; an adapter has its base model's context.

    A name that is no string is empty. Raises `ValueError`.
    """
    cards = msgspec.json.decode(body, type=_List).data
    if len(cards) > MAX_MODELS:
        raise ValueError(f"it lists {len(cards)} models; the limit is {MAX_MODELS}")
    for card in cards:
        card.id = card.id if isinstance(card.id, str) else ""
    by_name = {card.id: card for card in reversed(cards)}  # of one name the first counts
    lengths = {name: count(card.max_model_len) for name, card in by_name.items()}
    return [
        ServedModel(name, _length(by_name[name], lengths))
        for name in dict.fromkeys(card.id for card in cards)
    ]


def _length(card: _Card, lengths: dict[str, int | None]) -> int:
    length = lengths[card.id] or (lengths.get(card.parent) if isinstance(card.parent, str) else None)
    return min(length, UNKNOWN_MODEL_LEN) if length else UNKNOWN_MODEL_LEN


class ModelNames:
    """Leaves out of one server's lists what can be no model's name; it logs that once, not at each look."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._num_told = 0

    def named(self, listed: Sequence[ServedModel]) -> Sequence[ServedModel]:
        """Those whose names may be shown: to clients, in logs and as labels of metrics."""
        named = [model for model in listed if _is_name(model.name)]
        num_bad = len(listed) - len(named)
        if num_bad and num_bad != self._num_told:
            logger.warning(
                "%s lists %d names that no model can have here, which must be 1 to %d printable characters: "
                "left out",
                self._server,
                num_bad,
                MAX_NAME_CHARS,
            )
        self._num_told = num_bad
        return named


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def local_models(
    server: str, listed: Sequence[ServedModel], folder_of: Callable[[str], Path | None] | None
) -> list[LocalModel | None]:
    """What the gateway has of a server's models, each folder read once. `folder_of`: None for one of text.

    Raises `MisfitError` where the gateway lacks what it needs, `UpstreamFault` for a server without models.
    """
    if not listed:
        raise UpstreamFault(f"upstream {server} lists no model")
    if folder_of is None:
        return [None] * len(listed)
    known: dict[Path, LocalModel] = {}
    found: list[LocalModel | None] = []
    for model in listed:
        folder = folder_of(model.name)
        if folder is None:
            raise MisfitError(
                f"upstream {server} serves {model.name!r}, and no tokenizer is given for it: "
                f"tokenizer must name the folder of its tokenizer.json"
            )
        if folder not in known:
            known[folder] = read_local_model(folder)
        found.append(known[folder])
    return found
