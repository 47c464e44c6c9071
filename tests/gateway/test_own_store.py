"""The store of one process: which idempotency key stands for which stream."""

from __future__ import annotations

import pytest

from gateway.own_store import OwnStore
from gateway.stream_meta import Pending, StreamMeta
from pipeline.stream_errors import KeyReused


def meta(stream_id: str = "s", digest: str = "d") -> StreamMeta:
    return StreamMeta(stream_id, "token", "owner", None, 0.0, 1.0, digest)


async def test_claim_of_a_free_key_is_taken() -> None:
    store = OwnStore()
    assert await store.claim("k", "s", "d") is None
    assert isinstance(await store.claim("k", "other", "d"), Pending)


async def test_claim_after_the_stream_was_made_gives_the_stream() -> None:
    store = OwnStore()
    await store.claim("k", "s", "d")
    await store.create(meta(), "k")
    assert await store.claim("k", "other", "d") == meta()


@pytest.mark.parametrize("is_made", [False, True])
async def test_claim_with_another_body_is_refused(is_made: bool) -> None:
    store = OwnStore()
    await store.claim("k", "s", "d")
    if is_made:
        await store.create(meta(), "k")
    with pytest.raises(KeyReused):
        await store.claim("k", "other", "e")


async def test_release_frees_the_key_of_its_own_stream_alone() -> None:
    store = OwnStore()
    await store.claim("k", "s", "d")
    await store.release("k", "other")
    assert isinstance(await store.claim("k", "third", "d"), Pending)
    await store.release("k", "s")
    assert await store.claim("k", "third", "e") is None


async def test_delete_frees_the_key() -> None:
    store = OwnStore()
    await store.claim("k", "s", "d")
    await store.create(meta(), "k")
    await store.delete("s")
    await store.delete("s")
    assert await store.claim("k", "other", "e") is None


async def test_nothing_is_read_elsewhere() -> None:
    assert await OwnStore().read_elsewhere(["s"]) == set()
    assert await OwnStore().meta("s") is None
