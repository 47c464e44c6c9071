"""Images on the real engine, with the tiny vision model, through the link and on both token paths; sounds."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from backend.address import parse_address
from backend.link_client import LinkClient, open_link
from backend.ports import Job
from backend.progress import StreamProgress
from backend.vllm_config import VllmOptions
from backend.vllm_engine import VllmEngine
from pipeline.errors import EngineRejected
from pipeline.values import EngineCall, Medium
from tests.audio_model import RATE, TOKENS_PER_S, make_audio_model
from tests.backend.linked import RecordingSink, make_call, until
from tests.backend.test_wav import wav
from tests.backend.vllm_parts import Heard, import_vllm, pack
from tests.stack import Worker
from tests.vision_model import MAX_MODEL_LEN, NUM_IMAGE_TOKENS

pytestmark = pytest.mark.engine

BLOCK = 32  # of the KV cache
TEXT = list(range(100, 180))
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def picture(color: tuple[int, int, int], size: tuple[int, int] = (64, 64), form: str = "PNG") -> Medium:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, form)
    data = file.getvalue()
    return Medium("image", data, form.lower(), hashlib.sha256(data).hexdigest())


RED = picture((255, 0, 0))
BLUE = picture((0, 0, 255), (30, 80), "JPEG")


@asynccontextmanager
async def vision_link(worker: Worker) -> AsyncIterator[LinkClient]:
    client = await open_link(parse_address(worker.address))
    try:
        await client.welcomed()
        yield client
    finally:
        client.close()


def image_call(client: LinkClient, parts: Sequence[int | Medium], **sampling: Any) -> EngineCall:
    """A prompt of ids and images in this order."""
    image_id = client.media["image"].token_id
    prompt = [part if isinstance(part, int) else image_id for part in parts]
    call = make_call(prompt, model="vision", **GREEDY | sampling)
    return replace(call, media=tuple(part for part in parts if isinstance(part, Medium)))


async def ask(client: LinkClient, parts: Sequence[int | Medium], **sampling: Any) -> Any:
    """Ids, prompt tokens and cached tokens; or the error."""
    sink = RecordingSink()
    client.submit(image_call(client, parts, **sampling), sink)
    end = await asyncio.wait_for(sink.ended, 60)
    if end != "length":
        return end
    assert sink.first is not None
    return sink.ids, sink.first.prompt_tokens, sink.first.cached_tokens


async def test_images_through_the_link(vision_worker: Worker) -> None:
    async with vision_link(vision_worker) as client:
        assert set(client.media) == {"image"}
        red, num_tokens, cached = await ask(client, [RED, *TEXT])
        assert (num_tokens, cached) == (NUM_IMAGE_TOKENS + len(TEXT), 0)
        assert (await ask(client, [BLUE, *TEXT]))[0] != red
        again, _, cached = await ask(client, [RED, *TEXT])
        assert (again, cached) == (red, 2 * BLOCK)
        # The next turn: what it shares with the last one is cached, the image included.
        _, num_tokens, cached = await ask(client, [RED, *TEXT, *red, 7, BLUE, 8])
        assert (num_tokens, cached) == (2 * NUM_IMAGE_TOKENS + len(TEXT) + 10, 2 * BLOCK)
        mixed, _, _ = await ask(client, [RED, BLUE, *TEXT])
        assert (await ask(client, [BLUE, RED, *TEXT]))[0] != mixed
        text, num_tokens, _ = await ask(client, TEXT)
        assert num_tokens is None
        assert text not in (red, mixed)


async def test_bad_images_are_refused_and_the_engine_goes_on(vision_worker: Worker) -> None:
    async with vision_link(vision_worker) as client:
        before = await ask(client, [RED, *TEXT])
        torn = replace(RED, data=RED.data[:80])
        bomb = picture((1, 2, 3), (8000, 5000))
        cases: list[tuple[list[int | Medium], str]] = [
            ([torn, *TEXT], "image number 1: it cannot be decoded: image file is truncated"),
            ([RED, replace(RED, data=b"no image"), *TEXT], "image number 2: it is no PNG, JPEG, WebP or GIF"),
            ([replace(RED, data=b""), *TEXT], "image number 1: it is no PNG"),
            ([bomb, *TEXT], "8000 x 5000 pixels; the limit is 33554432"),
            ([RED, client.media["image"].token_id], "2 placeholders of kind image, and 1 media"),
            ([client.media["image"].token_id, *TEXT], "1 placeholders of kind image, and 0 media"),
            (
                [RED] * 300,
                f"2100 tokens with its media; an answer needs it to have at most {MAX_MODEL_LEN - 1}",
            ),
        ]
        for parts, problem in cases:
            error = await ask(client, parts)
            assert isinstance(error, EngineRejected)
            assert problem in str(error)
        assert (await ask(client, [RED, *TEXT]))[0] == before[0]
        assert client.stats.engine_alive


async def test_aborted_images_free_the_engine_at_any_moment(vision_worker: Worker) -> None:
    async with vision_link(vision_worker) as client:
        for num_turns in (0, 1, 3, 30, 300):
            sink = RecordingSink()
            fresh = picture((num_turns % 256, 99, 9), (900, 700))
            call = image_call(client, [fresh, *TEXT * 20], max_tokens=400)
            handle = client.submit(call, sink)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            handle.abort()
            await until(lambda: not list(client.slots.occupied()))
            assert not sink.ended.done()
        await until(lambda: not vision_worker.metric("headrace_link_jobs"))
        assert vision_worker.metric("vllm:num_requests_running") == 0


# -- both paths --------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_both_paths_give_the_same_and_send_again_what_the_engine_has_lost(
    vision_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import_vllm()
    heard = Heard()
    engine = VllmEngine(VllmOptions(str(vision_model), ("vision",)), StreamProgress(StringIO()))

    async def answer(key: str, *media: Medium, text: list[int] = TEXT, **options: Any) -> Any:
        image_id = engine.info.media["image"].token_id
        key = f"{engine.info.engine_path} {key}"
        engine.submit(key, Job(pack([image_id] * len(media) + text), GREEDY, media=media, **options))
        end = await heard.end(key)
        if end[0] == "failed":
            return end[2:]
        extra = heard.outputs[key][0].extra
        assert extra is not None
        return heard.ids(key), extra.prompt_tokens

    async def answers(number: int) -> list[Any]:
        lost = picture((number, 200, 0))
        # As if the engine had evicted it: vLLM's front end believes that it was sent.
        assert engine._media is not None
        job = Job(pack([engine.info.media["image"].token_id]), {}, media=(lost,))
        assert await engine._media.prompt(job) is not None
        caplog.clear()
        with caplog.at_level(logging.INFO, "backend"):
            resent = await answer("lost", lost)
        assert "has lost" in caplog.text
        return [
            resent[1],
            await answer("red", RED),
            await answer("both", BLUE, RED),
            await answer("salted", RED, cache_salt="a"),
            await answer("torn", replace(RED, data=RED.data[:80])),
            await answer("long", RED, text=TEXT * 26),
            await answer("text"),
        ]

    try:
        await engine.start(heard.events)
        steps = await answers(1)
        from backend.vllm_generate import GeneratePath

        assert engine._path is not None
        await engine._path.close()
        await engine._use(GeneratePath)
        generated = await answers(2)
    finally:
        await engine.stop()
    assert steps == generated
    assert steps[0] == len(TEXT) + NUM_IMAGE_TOKENS
    assert steps[1][0] != steps[2][0]
    assert steps[1] == steps[3]
    assert [kind for kind, _ in steps[4:6]] == ["rejected", "rejected"]
    assert steps[6][1] is None


@pytest.mark.long
async def test_sounds_of_a_model_that_hears(embedded_model: Path, tmp_path: Path) -> None:
    import_vllm()
    folder = make_audio_model(tmp_path / "audio", embedded_model)
    arguments = ("--load-format", "dummy", "--limit-mm-per-prompt.audio", "4")
    heard = Heard()
    engine = VllmEngine(VllmOptions(str(folder), ("audio",), arguments), StreamProgress(StringIO()))

    def tone(period: int, seconds: float, rate: int = RATE) -> Medium:
        half = period // 2
        wave = (struct.pack("<h", 9000) * half + struct.pack("<h", -9000) * half) * int(
            seconds * rate / period
        )
        return Medium("audio", wav(wave, rate=rate), "wav", "")

    async def ask(*media: Medium) -> Any:
        """Prompt tokens and cached ones, or why it is refused."""
        audio_id = engine.info.media["audio"].token_id
        key = object()
        engine.submit(key, Job(pack([audio_id] * len(media) + TEXT), GREEDY, media=media))
        end = await heard.end(key)
        if end[0] == "failed":
            return end[3]
        extra = heard.outputs[key][0].extra
        return extra and (extra.prompt_tokens, extra.cached_tokens)

    try:
        await engine.start(heard.events)
        assert {kind: each.max_count for kind, each in engine.info.media.items()} == {"audio": 4}
        assert await ask(tone(40, 1.0)) == (len(TEXT) + TOKENS_PER_S, 0)
        assert await ask(tone(20, 1.0)) == (len(TEXT) + TOKENS_PER_S, 0)
        assert await ask(tone(40, 1.0)) == (len(TEXT) + TOKENS_PER_S, 3 * BLOCK)
        assert await ask(tone(40, 2.0), tone(80, 1.0)) == (len(TEXT) + 3 * TOKENS_PER_S, 0)
        assert "cut off" in await ask(replace(tone(40, 1.0), data=tone(40, 1.0).data[:999]))
        assert "too short" in await ask(tone(4, 0.001))
        if find_spec("av") is None and find_spec("soundfile") is None:
            assert "no library that reads mp3" in await ask(Medium("audio", b"ID3" + bytes(99), "mp3", ""))
        assert await ask(tone(40, 1.0)) == (len(TEXT) + TOKENS_PER_S, 3 * BLOCK)
    finally:
        await engine.stop()
