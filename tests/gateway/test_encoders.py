"""Encoding off the loop: together what comes together, once what is equal, and nothing for nobody."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest

from gateway.encoders import MAX_BATCH_CHARS, Encoders, Pairs
from pipeline.encoding import Encoder, pack_ids
from pipeline.errors import QueueFull
from pipeline.needs import Encode
from tests.pipeline import small_tokenizers


def ids_of(text: str) -> bytes:
    return pack_ids(map(ord, text))


class Recording:
    """An encoder that notes its batches; while `hold` is set it does not return."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, ...]] = []
        self.error: Exception | None = None
        self.may_go = threading.Event()
        self.may_go.set()
        self.started = threading.Semaphore(0)
        self.threads: set[int] = set()

    def encode_segments(self, segments: Sequence[str]) -> list[bytes]:
        self.threads.add(threading.get_ident())
        self.batches.append(tuple(segments))
        self.started.release()
        assert self.may_go.wait(20)
        if self.error is not None and any("bad" in segment for segment in segments):
            raise self.error
        return [ids_of(segment) for segment in segments]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        return [b"\0\0\0\0" + ids if add_special_tokens else ids for ids in self.encode_segments(texts)]


Make = Callable[..., Encoders]


@pytest.fixture
async def encoders() -> AsyncIterator[Make]:
    made: list[Encoders] = []

    def make(**options: object) -> Encoders:
        made.append(Encoders(**{"num_threads": 1, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def need(encoder: Recording | Encoder, *texts: str, special: bool | None = None, model: str = "") -> Encode:
    return Encode(encoder, texts, special, model)


async def begun(encoder: Recording) -> None:
    """Wait until a batch has started."""
    assert await asyncio.to_thread(encoder.started.acquire, timeout=20)


def start(*coroutines: object) -> list[asyncio.Task[list[bytes]]]:
    return [asyncio.create_task(each) for each in coroutines]  # type: ignore[arg-type]


async def test_ids_come_in_the_order_of_the_texts(encoders: Make) -> None:
    encoder = Recording()
    assert await encoders().encode(need(encoder, "b", "a", "b")) == [ids_of("b"), ids_of("a"), ids_of("b")]
    assert encoder.batches == [("b", "a")]
    assert encoder.threads != {threading.get_ident()}


async def test_no_texts_need_no_thread(encoders: Make) -> None:
    encoder = Recording()
    assert await encoders().encode(need(encoder)) == []
    assert encoder.batches == []


@pytest.mark.parametrize("special", [None, False, True])
async def test_real_tokenizer_gives_the_ids_of_the_calling_thread(
    encoders: Make, special: bool | None
) -> None:
    rng = random.Random(4)
    encoder = Encoder(small_tokenizers.byte_level())
    texts = [small_tokenizers.text(rng) for _ in range(50)]
    if special is None:
        with pytest.raises(AssertionError):  # no control strings: these are no segments; the error gets here
            await encoders().encode(need(encoder, *texts))
        return
    pool = encoders(num_threads=2)
    answers = await asyncio.gather(*(pool.encode(need(encoder, text, special=special)) for text in texts))
    assert [ids for (ids,) in answers] == [encoder.encode(text, special) for text in texts]


async def test_what_comes_in_one_turn_of_the_loop_is_one_batch(encoders: Make) -> None:
    encoder, pool = Recording(), encoders(num_threads=4)
    await asyncio.gather(*(pool.encode(need(encoder, f"{index}", "shared")) for index in range(5)))
    assert encoder.batches == [("0", "shared", "1", "2", "3", "4")]
    assert (pool.num_batches, pool.num_texts) == (1, 6)


async def test_what_comes_while_all_threads_are_busy_is_one_batch(encoders: Make) -> None:
    encoder, pool = Recording(), encoders()
    encoder.may_go.clear()
    tasks = start(pool.encode(need(encoder, "first")))
    await begun(encoder)
    for index in range(5):
        tasks += start(pool.encode(need(encoder, f"{index}")))
        await asyncio.sleep(0)
    encoder.may_go.set()
    await asyncio.gather(*tasks)
    assert encoder.batches == [("first",), ("0", "1", "2", "3", "4")]


async def test_long_text_does_not_hold_short_ones_in_its_batch(encoders: Make) -> None:
    encoder = Recording()
    long = "x" * (MAX_BATCH_CHARS - 1)
    await encoders().encode(need(encoder, "a", long, "b", "c"))
    assert encoder.batches == [("a", long), ("b", "c")]


async def test_long_texts_leave_a_thread_to_short_ones(encoders: Make) -> None:
    longs, shorts, pool = Recording(), Recording(), encoders(num_threads=3)
    longs.may_go.clear()
    texts = [f"{index}".ljust(MAX_BATCH_CHARS + 1) for index in range(6)]
    waiting = start(*(pool.encode(need(longs, text, "with it")) for text in texts))
    for _ in range(2):
        await begun(longs)
    for text in ("a", "b"):
        assert await asyncio.wait_for(pool.encode(need(shorts, text)), 20) == [ids_of(text)]
    assert len(longs.batches) == 2
    longs.may_go.set()
    assert [ids for ids, _ in await asyncio.gather(*waiting)] == [ids_of(text) for text in texts]


async def test_text_in_flight_is_awaited_not_encoded_again(encoders: Make) -> None:
    encoder, pool = Recording(), encoders()
    encoder.may_go.clear()
    tasks = start(pool.encode(need(encoder, "same", "a")))
    await begun(encoder)
    tasks += start(pool.encode(need(encoder, "same")), pool.encode(need(encoder, "b", "same")))
    await asyncio.sleep(0)
    encoder.may_go.set()
    first, second, third = await asyncio.gather(*tasks)
    assert (first, second) == ([ids_of("same"), ids_of("a")], [ids_of("same")])
    assert third == [ids_of("b"), ids_of("same")]
    assert encoder.batches == [("same", "a"), ("b",)]


async def test_kinds_and_encoders_are_kept_apart(encoders: Make) -> None:
    one, two, pool = Recording(), Recording(), encoders()
    needs = [need(one, "a", special=special) for special in (None, False, True)] + [need(two, "a")]
    answers = await asyncio.gather(*map(pool.encode, needs))
    assert answers == [[ids_of("a")], [ids_of("a")], [b"\0\0\0\0" + ids_of("a")], [ids_of("a")]]
    assert one.batches == [("a",)] * 3
    assert two.batches == [("a",)]


async def test_encoders_take_turns(encoders: Make) -> None:
    one, two, pool = Recording(), Recording(), encoders()
    half = MAX_BATCH_CHARS // 2 + 1
    order: list[str] = []
    one.encode_segments = lambda texts: order.append("one") or [b""] * len(texts)  # type: ignore[method-assign,func-returns-value]
    two.encode_segments = lambda texts: order.append("two") or [b""] * len(texts)  # type: ignore[method-assign,func-returns-value]
    await asyncio.gather(pool.encode(need(one, *(c * half for c in "abc"))), pool.encode(need(two, "x")))
    assert order == ["one", "two", "one", "one"]


async def test_cancelled_request_takes_nothing_from_others(encoders: Make) -> None:
    encoder, pool = Recording(), encoders()
    encoder.may_go.clear()
    first, second = start(pool.encode(need(encoder, "a", "b")), pool.encode(need(encoder, "b", "c")))
    await begun(encoder)
    third, fourth = start(pool.encode(need(encoder, "b", "d")), pool.encode(need(encoder, "d", "e")))
    await asyncio.sleep(0)
    first.cancel()
    third.cancel()
    await asyncio.wait([first, third])
    encoder.may_go.set()
    assert await second == [ids_of("b"), ids_of("c")]
    assert await fourth == [ids_of("d"), ids_of("e")]
    assert first.cancelled()
    assert encoder.batches == [("a", "b", "c"), ("d", "e")]


async def test_work_that_nobody_waits_for_is_not_started(encoders: Make) -> None:
    encoder, pool = Recording(), encoders()
    encoder.may_go.clear()
    (busy,) = start(pool.encode(need(encoder, "busy")))
    await begun(encoder)
    (gone,) = start(pool.encode(need(encoder, "gone" * 100)))
    await asyncio.sleep(0)
    assert pool.num_queue_chars == 400
    gone.cancel()
    await asyncio.wait([gone])
    assert pool.num_queue_chars == 0
    encoder.may_go.set()
    await busy
    assert await pool.encode(need(encoder, "next")) == [ids_of("next")]
    assert encoder.batches == [("busy",), ("next",)]


async def test_error_reaches_those_who_wait_for_the_text_and_nobody_else(encoders: Make) -> None:
    encoder, pool = Recording(), encoders()
    encoder.error = ValueError("broken")
    needs = [need(encoder, "a", "bad"), need(encoder, "bad"), need(encoder, "a", "b")]
    answers = await asyncio.gather(*map(pool.encode, needs), return_exceptions=True)
    assert answers == [encoder.error, encoder.error, [ids_of("a"), ids_of("b")]]
    assert await pool.encode(need(encoder, "a")) == [ids_of("a")]
    assert pool.num_queue_chars == 0


async def test_error_of_a_second_level_reaches_those_who_wait(encoders: Make) -> None:
    class Broken(Far):
        async def get(self, fingerprint: str, segments: Sequence[str]) -> Mapping[str, bytes]:  # type: ignore[override]
            raise RuntimeError("it must not, but it raises")

    encoder, pool = Recording(), encoders(far=Broken())
    with pytest.raises(RuntimeError, match="must not"):
        await pool.encode(need(encoder, "a", model="m"))
    assert await pool.encode(need(encoder, "a")) == [ids_of("a")]


async def test_request_that_failed_in_one_batch_needs_no_more(encoders: Make) -> None:
    encoder, pool = Recording(), encoders()
    encoder.error = ValueError("broken")
    half = MAX_BATCH_CHARS // 2 + 1
    with pytest.raises(ValueError, match="broken"):
        await pool.encode(need(encoder, "bad" + "a" * half, "b" * half, "c" * half))
    assert pool.num_queue_chars == 0
    await pool.encode(need(encoder, "d"))
    assert [batch[0][0] for batch in encoder.batches] in (["b", "d"], ["b", "b", "d"])


async def test_queue_is_bounded_in_characters(encoders: Make) -> None:
    encoder, pool = Recording(), encoders(max_queue_chars=1000)
    encoder.may_go.clear()
    tasks = start(pool.encode(need(encoder, "x" * 5000)))  # alone it may be longer
    await begun(encoder)
    tasks += start(pool.encode(need(encoder, "a" * 900)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=r"900 characters .* 101; the limit is 1000"):
        await pool.encode(need(encoder, "b" * 101))
    tasks += start(pool.encode(need(encoder, "a" * 900, "c" * 100)))  # the first of these waits already
    await asyncio.sleep(0)
    encoder.may_go.set()
    await asyncio.gather(*tasks)
    assert pool.num_queue_chars == 0


async def test_nothing_is_left_of_encoders_that_are_done(encoders: Make) -> None:
    pool = encoders()
    for _ in range(20):
        await pool.encode(need(Recording(), "a"))
    await asyncio.sleep(0)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Recording]


async def test_close_cancels_who_waits(encoders: Make) -> None:
    encoder, pool = Recording(), encoders()
    encoder.may_go.clear()
    tasks = start(pool.encode(need(encoder, "a")))
    await begun(encoder)
    tasks += start(pool.encode(need(encoder, "b")))
    await asyncio.sleep(0)
    pool.close()
    encoder.may_go.set()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert encoder.batches == [("a",)]


@pytest.mark.parametrize("seed", range(3))
async def test_all_get_their_ids_under_random_load(encoders: Make, seed: int) -> None:
    """Equal texts, cancelled requests and failing batches, in any order."""
    rng = random.Random(seed)
    pool = encoders(num_threads=3)

    class Failing(Recording):
        def encode_segments(self, segments: Sequence[str]) -> list[bytes]:
            if any(segment.endswith("!") for segment in segments):
                raise ValueError("one is bad")
            return [ids_of(segment) for segment in segments]

    encoder = Failing()
    num_good = 0

    async def ask() -> None:
        nonlocal num_good
        await asyncio.sleep(rng.random() / 50)
        texts = [f"{rng.randint(0, 30)}" + "!" * (rng.random() < 0.01) for _ in range(rng.randint(1, 4))]
        try:
            async with asyncio.timeout(rng.choice((None, None, 0.0001, 0.001))):
                answer = await pool.encode(need(encoder, *texts))
        except (TimeoutError, ValueError):
            return
        assert answer == [ids_of(text) for text in texts]
        num_good += 1

    await asyncio.gather(*(ask() for _ in range(500)))
    assert num_good > 100  # half of them have no time limit
    assert pool.num_queue_chars == 0


# -- second levels -------------------------------------------------------------------------------------------


class Near:
    """Remembers all that is offered."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}

    def get(self, fingerprint: str, segment: str) -> bytes | None:
        return self.kept.get((fingerprint, segment))

    def offer(self, fingerprint: str, pairs: Pairs) -> None:
        self.kept |= {(fingerprint, segment): ids for segment, ids in pairs}


class Far(Near):
    """The same, but it takes a turn of the loop."""

    async def get(self, fingerprint: str, segments: Sequence[str]) -> Mapping[str, bytes]:  # type: ignore[override]
        await asyncio.sleep(0)
        return {each: self.kept[fingerprint, each] for each in segments if (fingerprint, each) in self.kept}


async def test_segments_come_from_the_second_levels_and_go_there(encoders: Make) -> None:
    encoder, near, far = Recording(), Near(), Far()
    near.kept["m", "near"] = ids_of("N")
    far.kept["m", "far"] = ids_of("F")
    pool = encoders(near=near, far=far)
    assert await pool.encode(need(encoder, "near", model="m")) == [ids_of("N")]
    assert encoder.batches == []
    answer = await pool.encode(need(encoder, "near", "far", "new", model="m"))
    assert answer == [ids_of("N"), ids_of("F"), ids_of("new")]
    assert encoder.batches == [("new",)]
    assert near.kept == {("m", text): ids_of(t) for text, t in (("near", "N"), ("far", "F"), ("new", "new"))}
    assert far.kept == {("m", "far"): ids_of("F"), ("m", "new"): ids_of("new")}


async def test_only_segments_of_a_known_model_use_the_second_levels(encoders: Make) -> None:
    encoder, near, far = Recording(), Near(), Far()
    pool = encoders(near=near, far=far)
    await pool.encode(need(encoder, "raw", special=False, model="m"))
    await pool.encode(need(encoder, "segment"))
    pool.offer("", [("segment", ids_of("segment"))])
    assert not near.kept
    assert not far.kept


async def test_offer_tells_both_levels(encoders: Make) -> None:
    near, far = Near(), Far()
    encoders(near=near, far=far).offer("m", [("a", ids_of("a"))])
    encoders().offer("m", [("a", ids_of("a"))])
    assert near.kept == far.kept == {("m", "a"): ids_of("a")}
