"""Which model a conversation is with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from gateway.realtime_edge import model_of
from pipeline.errors import HeadraceError, InvalidRequest, NoWorker, QueueFull, UnknownModel
from pipeline.ports import Engine
from pipeline.values import ModelInfo


class FakeEngine:
    """An engine with some models, of which one may have no room."""

    def __init__(self, names: Sequence[str], problem: HeadraceError | None = None) -> None:
        self._names = names
        self._problem = problem

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo(name, 8, 1, {}, "") for name in self._names]

    def check_room(self, model: str) -> None:
        if self._problem is not None:
            raise self._problem
        if model not in self._names:
            raise UnknownModel(model)


def engine(*names: str, problem: HeadraceError | None = None) -> Engine:
    return cast(Engine, FakeEngine(names, problem))


def test_the_model_that_is_named() -> None:
    assert model_of("b", engine("a", "b")) == "b"


def test_the_only_model_need_not_be_named() -> None:
    assert model_of(None, engine("a")) == "a"


def test_a_choice_of_models_must_be_made() -> None:
    with pytest.raises(InvalidRequest, match="a, b") as caught:
        model_of(None, engine("b", "a"))
    assert caught.value.param == "model"


def test_no_worker_is_told_before_any_conversation() -> None:
    with pytest.raises(NoWorker):
        model_of(None, engine())
    with pytest.raises(NoWorker):
        model_of("a", engine("a", problem=NoWorker("gone")))


def test_an_unknown_model() -> None:
    with pytest.raises(UnknownModel, match="'c'"):
        model_of("c", engine("a"))


def test_a_full_queue_does_not_keep_a_conversation_out() -> None:
    assert model_of("a", engine("a", problem=QueueFull("full"))) == "a"
