"""A folder's tokenizer against what a server's own makes of the same texts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models

from backend.catalog import MisfitError
from backend.http_client import HttpResponse
from backend.local_model import LocalModel, read_local_model
from backend.upstream_faults import UpstreamFault
from backend.upstream_ports import ServedModel, UpstreamKind
from backend.upstream_sglang import SglangKind
from backend.upstream_tokenizer import TEXTS, FolderTokenizers, TokenizerCheck
from backend.upstream_vllm import VllmKind
from tests.backend.linked import make_tokenizer
from tests.tokenizers import tokenizer_folder

KEY = "vllm+http://h:1"
MODELS = (ServedModel("m"), ServedModel("adapter"))  # of one folder: the first is asked for
Answer = Callable[[str], tuple[int, bytes]]


class Server:
    """Plays a server's /tokenize."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[str] = []

    async def __call__(
        self, method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()
    ) -> HttpResponse:
        question = msgspec.json.decode(body)
        assert (method, target, question["model"]) == ("POST", "/tokenize", "m")
        assert question["add_special_tokens"] is False
        self.asked.append(question["prompt"])
        status, answer = self._answer(question["prompt"])
        if status != 200 and status not in allowed:
            raise UpstreamFault(f"HTTP {status}")
        return HttpResponse(status, (), answer)


def with_tokenizer(folder: Path) -> Answer:
    """A server that has this one."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: ids_answer(tokenizer.encode(text, add_special_tokens=False).ids)


def ids_answer(ids: Sequence[int]) -> tuple[int, bytes]:
    return 200, msgspec.json.encode({"count": len(ids), "max_model_len": 9, "tokens": ids})


def spelling(folder: Path, merges: Sequence[tuple[str, str]], names: str = "aeht") -> Path:
    """A tokenizer of four letters and what `merges` makes of them, in this order."""
    folder.mkdir()
    vocabulary = {name: number for number, name in enumerate([*names, "th", "he"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


async def check(
    answer: Answer, local: LocalModel, kind: UpstreamKind | None = None, times: int = 1
) -> Server:
    server = Server(answer)
    check = TokenizerCheck(kind or VllmKind(), KEY, FolderTokenizers())
    for _ in range(times):
        await check.check(server, MODELS, [local, local])
    return server


@pytest.mark.parametrize("kind", [VllmKind(), SglangKind()], ids=["vllm", "sglang"])
async def test_servers_own_folder_fits(
    tmp_path: Path, kind: UpstreamKind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = make_tokenizer(tmp_path / "model")
    server = await check(with_tokenizer(folder), read_local_model(folder), kind)
    assert server.asked == [*TEXTS, "</s>"]  # its special tokens make a text of their own
    assert not caplog.records


async def test_folder_of_another_vocabulary_is_a_misfit_that_names_both_and_no_text(tmp_path: Path) -> None:
    served, folder = make_tokenizer(tmp_path / "served"), make_tokenizer(tmp_path / "given", num_words=400)
    with pytest.raises(MisfitError) as caught:
        await check(with_tokenizer(served), read_local_model(folder))
    words = str(caught.value)
    assert KEY in words
    assert f"{folder}:" in words
    assert "of test text 4, token 1 is 500 by the server and 400 by the folder" in words
    assert "</s>" not in words


async def test_same_pieces_under_other_numbers_are_a_misfit(tmp_path: Path) -> None:
    served, folder = spelling(tmp_path / "served", [], "eaht"), spelling(tmp_path / "given", [])
    with pytest.raises(MisfitError, match="another tokenizer"):
        await check(with_tokenizer(served), read_local_model(folder))


async def test_other_splits_of_one_vocabulary_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served, folder = spelling(tmp_path / "served", []), spelling(tmp_path / "given", [("h", "e")])
    await check(with_tokenizer(served), read_local_model(folder), times=3)
    told = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(told)
    assert len(told) == len(set(told)) == 1
    assert (
        "with the same vocabulary: of test text 1, token 1 is 2 by the server and 5 by the folder" in told[0]
    )


@pytest.mark.parametrize("status", [400, 404, 405, 500, 501])
async def test_server_that_does_not_tokenize_is_used_and_that_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.INFO)
    folder = make_tokenizer(tmp_path / "model")
    server = await check(lambda text: (status, b"{}"), read_local_model(folder), times=3)
    assert len(server.asked) == 3
    (record,) = caplog.records
    assert (record.levelname, str(folder) in record.getMessage()) == ("INFO", True)


@pytest.mark.parametrize(
    "body", [b"<html>", b"{}", b'{"tokens":["a"]}', b'{"tokens":null}', b'{"tokens":[1.5]}']
)
async def test_answer_that_is_no_list_of_ids_is_a_value_error(tmp_path: Path, body: bytes) -> None:
    local = read_local_model(make_tokenizer(tmp_path / "model"))
    with pytest.raises(ValueError, match=r"."):
        await check(lambda text: (200, body), local)
    with pytest.raises(UpstreamFault, match="503"):
        await check(lambda text: (503, b""), local)


@pytest.mark.parametrize("ids", [[], [-1], [1 << 40], [7] * 5000], ids=["none", "negative", "huge", "many"])
async def test_ids_that_are_none_of_the_folders_are_a_misfit(tmp_path: Path, ids: list[int]) -> None:
    local = read_local_model(make_tokenizer(tmp_path / "model"))
    with pytest.raises(MisfitError, match="another tokenizer"):
        await check(lambda text: ids_answer(ids), local)


async def test_tokenizer_that_cannot_be_loaded_names_its_folder(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(MisfitError, match=r"tokenizer .*model cannot be used"):
        await check(lambda text: ids_answer([1]), read_local_model(folder))


async def test_tokenizer_is_loaded_once_for_all_servers_and_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a large one holds the process up, and a server that is refused comes back for ever."""
    loaded = []
    real = Tokenizer.from_buffer

    class Counted:
        @staticmethod
        def from_buffer(data: bytes) -> Tokenizer:
            loaded.append(len(data))
            return real(data)

    monkeypatch.setattr("backend.upstream_tokenizer.Tokenizer", Counted)
    local, tokenizers = read_local_model(make_tokenizer(tmp_path / "model")), FolderTokenizers()
    server = Server(lambda text: ids_answer([3]))
    checks = [TokenizerCheck(VllmKind(), KEY, tokenizers) for _ in range(4)]
    for _ in range(3):
        results = await asyncio.gather(
            *(check.check(server, MODELS, [local, local]) for check in checks), return_exceptions=True
        )
        assert all(isinstance(result, MisfitError) for result in results)
    assert len(loaded) == 3  # the texts' ids, how it reads [3], and how it reads its own


@pytest.mark.long
def test_texts_tell_real_vocabularies_apart() -> None:
    names = ("qwen3", "gemma3", "deepseek_v3", "llama3_1", "gptoss")
    spoken = []
    for name in names:
        tokenizer = Tokenizer.from_file(str(tokenizer_folder(name) / "tokenizer.json"))
        spoken.append([tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS])
        assert max(map(len, spoken[-1])) < 200
    for number in range(len(TEXTS)):  # each of them alone
        assert len({tuple(each[number]) for each in spoken}) == len(names)
