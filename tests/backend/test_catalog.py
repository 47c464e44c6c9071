"""Who may serve a name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from backend.catalog import Catalog, FingerprintError, ReasoningParserError
from backend.introduction import model_infos
from backend.link import Welcome
from pipeline.values import ModelInfo


def make_welcome(
    worker: str,
    names: list[str],
    fingerprint: str = "f" * 64,
    max_model_len: int = 4096,
    reasoning_parser: str | None = None,
) -> Welcome:
    return Welcome(
        b"",
        worker,
        names,
        max_model_len,
        16,
        {"top_p": 0.9},
        fingerprint,
        [],
        {},
        reasoning_parser=reasoning_parser,
    )


class Told:
    """Counts what `on_model` is told."""

    def __init__(self, **parsers: str) -> None:
        self.infos: list[ModelInfo] = []
        self.catalog = Catalog(self.on_model, parsers.get)

    async def on_model(self, info: ModelInfo, files: Mapping[str, bytes]) -> None:
        await asyncio.sleep(0.01)
        self.infos.append(info)

    async def join(self, worker: str, welcome: Welcome) -> None:
        async def read_files() -> Mapping[str, bytes]:
            return {"tokenizer.json": b"{}"}

        await self.catalog.join(worker, welcome.worker, model_infos(welcome), read_files)


async def test_model_is_told_once_for_workers_that_join_together() -> None:
    told = Told()
    await asyncio.gather(*(told.join(name, make_welcome(name, ["m"])) for name in ("a", "b", "c")))
    assert [info.name for info in told.infos] == ["m"]
    assert told.infos[0].default_sampling == {"top_p": 0.9}
    assert told.catalog.names() == ("m",)


async def test_second_fingerprint_of_a_name_is_refused_and_both_sides_are_named() -> None:
    told = Told()
    await told.join("a", make_welcome("worker-a", ["m"]))
    with pytest.raises(
        FingerprintError, match=r"worker-b serves 'm' with fingerprint eeee.* worker-a with ffff"
    ):
        await told.join("b", make_welcome("worker-b", ["m"], "e" * 64))
    assert len(told.infos) == 1


async def test_two_fingerprints_that_come_together_admit_one() -> None:
    told = Told()
    results = await asyncio.gather(
        told.join("a", make_welcome("a", ["m"])),
        told.join("b", make_welcome("b", ["m"], "e" * 64)),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == ["FingerprintError", "NoneType"]


async def test_name_may_come_back_as_another_model_when_its_last_worker_has_left() -> None:
    told = Told()
    await told.join("a", make_welcome("a", ["m"]))
    told.catalog.leave("a")
    await told.join("b", make_welcome("b", ["m"], "e" * 64))
    assert [info.fingerprint[0] for info in told.infos] == ["f", "e"]
    info = told.catalog.info("m")
    assert info is not None
    assert info.fingerprint == "e" * 64


async def test_name_that_a_worker_gives_up_may_become_another_model_while_it_serves_others() -> None:
    told = Told()
    await told.join("a", make_welcome("a", ["m", "adapter"]))
    told.catalog.leave("a", but={"m"})
    await told.join("b", make_welcome("b", ["adapter"], "e" * 64))
    with pytest.raises(FingerprintError):
        await told.join("b", make_welcome("b", ["m"], "e" * 64))


async def test_same_model_that_comes_back_is_not_told_again() -> None:
    told = Told()
    for _ in range(2):
        await told.join("a", make_welcome("a", ["m"]))
        told.catalog.leave("a")
    assert len(told.infos) == 1
    await told.join("a", make_welcome("a", ["m"], max_model_len=8192))
    assert [info.max_model_len for info in told.infos] == [4096, 8192]


async def test_each_served_name_is_a_model() -> None:
    told = Told()
    await told.join("a", make_welcome("a", ["m", "alias"]))
    assert [info.name for info in told.infos] == ["m", "alias"]


async def test_model_that_cannot_be_loaded_is_tried_again_by_the_next_worker() -> None:
    async def fails(info: ModelInfo, files: Mapping[str, bytes]) -> None:
        raise RuntimeError("bad tokenizer")

    async def read_files() -> Mapping[str, bytes]:
        return {}

    catalog = Catalog(fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="bad tokenizer"):
            await catalog.join("a", "a", model_infos(make_welcome("a", ["m"])), read_files)
    assert catalog.names() == ()


async def test_reasoning_parser_of_the_engine_is_the_models() -> None:
    told = Told(m="qwen3")
    await told.join("a", make_welcome("a", ["m"], reasoning_parser="qwen3"))
    await told.join("b", make_welcome("b", ["plain"], reasoning_parser=""))
    assert [info.reasoning_parser for info in told.infos] == ["qwen3", None]


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("qwen3", None, ["no reasoning parser", "'qwen3'", "the worker with --reasoning-parser qwen3"]),
        (None, "qwen3", ["no reasoning parser", "'qwen3'", "the gateway with --reasoning-parser qwen3"]),
        ("olmo3", "qwen3", ["'olmo3'", "'qwen3'", "--reasoning-parser qwen3 (or m=qwen3)"]),
    ],
)
async def test_worker_with_another_reasoning_parser_is_refused_and_told_what_to_set(
    ours: str | None, theirs: str | None, words: list[str]
) -> None:
    told = Told(**({} if ours is None else {"m": ours}))
    with pytest.raises(ReasoningParserError, match="worker worker-a serves 'm'") as caught:
        await told.join("a", make_welcome("worker-a", ["m"], reasoning_parser=theirs))
    assert all(word in str(caught.value) for word in words), caught.value
    assert told.infos == []


async def test_worker_that_misfits_under_one_of_its_names_joins_under_none() -> None:
    told = Told(m="qwen3")
    with pytest.raises(ReasoningParserError, match="'alias'"):
        await told.join("a", make_welcome("a", ["m", "alias"], reasoning_parser="qwen3"))
    assert told.catalog.names() == ()
