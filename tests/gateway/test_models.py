"""The models that a gateway knows: none yet, unknown, and known for good."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from gateway.models import Models
from pipeline.errors import ContextTooLong, NoWorker, UnknownModel
from pipeline.inbound import InboundOptions
from pipeline.values import ChatRequest, Delivery, Generation
from tests.gateway.serving import INFO
from tests.pipeline.model_files import model_files


@pytest.fixture
def models() -> Iterator[Models]:
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield Models(InboundOptions(), pool)


async def test_without_any_model_a_client_may_try_again(models: Models) -> None:
    with pytest.raises(NoWorker):
        models.get("m")


async def test_unknown_model_is_told_the_known_ones(models: Models) -> None:
    await models.load(INFO, model_files())
    await models.load(replace(INFO, name="other"), model_files())
    assert models.names == ("m", "other")
    with pytest.raises(UnknownModel, match=r"m, other"):
        models.get("M")
    assert models.get("m").info == INFO
    assert models.get("m").text.chat_template is not None


async def test_model_that_comes_back_changed_replaces_the_old(models: Models) -> None:
    await models.load(INFO, model_files())
    before = models.get("m")
    changed = replace(INFO, fingerprint="g", max_model_len=7)
    await models.load(changed, model_files(chat_template=None))
    assert models.get("m").info == changed
    assert models.get("m").text.chat_template is None
    assert before.text.chat_template is not None  # running requests keep theirs


async def test_broken_files_leave_the_model_unknown(models: Models) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        await models.load(INFO, {"tokenizer.json": b"{"})
    assert models.names == ()


async def test_context_follows_the_workers(models: Models) -> None:
    await models.load(INFO, model_files())
    before = models.get("m")
    assert models.within(before, INFO.max_model_len) is before
    shorter = models.within(before, 7)
    assert (shorter.info.max_model_len, shorter.text) == (7, before.text)
    assert models.get("m") is shorter
    request = ChatRequest(
        "m", [{"role": "user", "content": "far too long a text for seven tokens"}], Generation({}), Delivery()
    )
    with pytest.raises(ContextTooLong, match="maximum context length is 7 tokens"):
        shorter.inbound.start(request, 0.0)
