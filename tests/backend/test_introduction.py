"""What a server tells of itself. What linked workers tell is in `test_catalog.py`."""

from __future__ import annotations

from backend.introduction import Introduced, introduced
from pipeline.values import ModelInfo


def test_the_models_of_one_server_are_introduced_with_the_shortest_context() -> None:
    infos = [ModelInfo("a", 4096, 16, {}, "f1"), ModelInfo("b", 2048, 32, {}, "f2")]
    assert introduced("vllm+http://h:1", infos) == Introduced("vllm+http://h:1", ["a", "b"], 2048, 16, "f1")
