"""Files into what vLLM takes, without an engine. With the real one: `test_vision_engine.py`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import struct
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from backend.ports import Job
from backend.vllm_media import MediaReader, _identity, check_image, decode_audio, decode_image
from backend.vllm_request import BadJobError
from pipeline.image_blocks import MAX_BLOCKS
from pipeline.values import MediaKind, MediaSupport, Medium
from tests.backend.test_wav import wav
from tests.backend.vllm_parts import import_vllm, pack

IMAGE, SOUND = 90, 91


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    import_vllm()


def picture(mode: str = "RGB", size: tuple[int, int] = (9, 7), form: str = "PNG", **options: Any) -> bytes:
    from PIL import Image

    file, rng = io.BytesIO(), random.Random(mode + form)
    channels = len(Image.new(mode, (1, 1)).getbands())
    Image.frombytes(mode, size, rng.randbytes(size[0] * size[1] * channels)).save(file, form, **options)
    return file.getvalue()


class Renderer:
    """Makes each placeholder three tokens, and keeps what it was given."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.num_at_once = self.most_at_once = 0
        self.error: Exception | None = None

    async def process_for_engine_async(self, prompt: Any, arrival_s: float) -> Any:
        self.prompts.append(prompt)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(0)
        self.num_at_once -= 1
        if self.error is not None:
            raise self.error
        ids = [part for each in prompt["prompt_token_ids"] for part in [each] * (1 + 2 * (each == IMAGE))]
        return {"type": "multimodal", "prompt_token_ids": ids}


def make_reader(max_image_pixels: int = 1000, max_model_len: int = 50) -> tuple[MediaReader, Renderer]:
    renderer = Renderer()
    reader = MediaReader(
        SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len), renderer=renderer),
        max_image_pixels,
    )
    assert reader.support == {}  # a text model's
    reader.support = {"image": MediaSupport(IMAGE, 20), "audio": MediaSupport(SOUND, 1)}
    return reader, renderer


def job(ids: list[int], *files: bytes, salt: str | None = None, kind: MediaKind = "image") -> Job:
    media = tuple(Medium(kind, memoryview(file), "png", "") for file in files)  # type: ignore[arg-type]
    return Job(pack(ids), {}, cache_salt=salt, media=media)


# -- a job -------------------------------------------------------------------------------------------------


async def test_prompt_has_images_sounds_and_names_of_their_content() -> None:
    reader, renderer = make_reader()
    one, other = picture(), picture("L")
    sound = Medium("audio", wav(bytes(8)), "wav", "")
    plain = job([1, IMAGE, SOUND, IMAGE], one, other)
    found = await reader.prompt(Job(plain.ids, {}, media=(plain.media[0], sound, plain.media[1])))
    assert found["prompt_token_ids"] == [1, IMAGE, IMAGE, IMAGE, SOUND, IMAGE, IMAGE, IMAGE]
    (given,) = renderer.prompts
    assert [image.size for image in given["multi_modal_data"]["image"]] == [(9, 7)] * 2
    ((samples, rate),) = given["multi_modal_data"]["audio"]
    assert (samples.tolist(), rate) == ([0.0] * 4, 8000)
    assert "cache_salt" not in given
    names = given["multi_modal_uuids"]
    assert len({*names["image"], *names["audio"]}) == 3


async def test_names_are_the_same_for_equal_files_of_one_salt_and_kind() -> None:
    reader, renderer = make_reader()
    file = picture()
    for each, salt in ((file, None), (file, None), (file, "a"), (file, "b"), (picture("L"), None)):
        await reader.prompt(job([IMAGE], each, salt=salt))
    first, again, *others = (each["multi_modal_uuids"]["image"][0] for each in renderer.prompts)
    assert renderer.prompts[2]["cache_salt"] == "a"
    others.append(_identity(Medium("audio", file, "wav", ""), None))
    assert first == again == _identity(Medium("image", file, "png", ""), None)
    assert len({first, *others}) == 5


@pytest.mark.parametrize(
    ("ids", "num_images", "problem"),
    [
        ([IMAGE], 0, "1 placeholders of kind image, and 0 media"),
        ([1], 1, "0 placeholders of kind image, and 1 media"),
        ([IMAGE, IMAGE], 1, "2 placeholders of kind image, and 1 media"),
        ([SOUND], 0, "1 placeholders of kind audio, and 0 media"),
        ([IMAGE] * 21, 21, "21 media of kind 'image' in one prompt; the limit is 20"),
    ],
)
def test_placeholders_without_media_and_media_without_placeholders_are_refused(
    ids: list[int], num_images: int, problem: str
) -> None:
    reader, _ = make_reader()
    with pytest.raises(BadJobError, match=problem):
        reader.check(job(ids, *[picture()] * num_images))


def test_text_for_a_text_model_may_hold_any_id() -> None:
    reader, _ = make_reader()
    reader.support = {}
    reader.check(job([IMAGE, SOUND]))
    with pytest.raises(BadJobError, match="takes no media of kind 'image'"):
        reader.check(job([IMAGE], picture()))


async def test_refusals_name_the_medium() -> None:
    reader, renderer = make_reader()
    with pytest.raises(BadJobError, match="image number 2: it is no PNG"):
        await reader.prompt(job([IMAGE] * 2, picture(), b"no image"))
    with pytest.raises(BadJobError, match="image number 9: it has 9 x 111 pixels; the limit is 8"):
        await reader.prompt(job([IMAGE] * 9, *[picture(size=(9, 111))] * 9))  # together
    with pytest.raises(BadJobError, match="54 tokens with its media; an answer needs it to have at most 49"):
        await reader.prompt(job([IMAGE] * 18, *[picture()] * 18))
    renderer.error = ModuleNotFoundError("No package metadata was found for vllm")
    with pytest.raises(BadJobError, match="needs a library for these media that this worker lacks"):
        await reader.prompt(job([IMAGE], picture()))
    renderer.error = RuntimeError("no such size")
    with pytest.raises(BadJobError, match="processor refuses the media: no such size"):
        await reader.prompt(job([IMAGE], picture()))


async def test_few_jobs_hold_decoded_images_at_once_and_unwanted_ones_are_not_decoded() -> None:
    reader, renderer = make_reader()
    jobs = [job([IMAGE], picture()) for _ in range(10)]
    found = await asyncio.gather(
        *(reader.prompt(each, lambda wanted=index % 2: wanted) for index, each in enumerate(jobs))
    )
    assert [each is not None for each in found] == [False, True] * 5
    assert len(renderer.prompts) == 5
    assert renderer.most_at_once <= 2


# -- images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "form"), [("RGB", "JPEG"), ("RGBA", "WEBP"), ("P", "GIF"), ("LA", "PNG")])
def test_image_of_any_mode_becomes_rgb(mode: str, form: str) -> None:
    file = picture(mode, form=form)
    assert check_image(file, 63) == 63
    image = decode_image(file, {})
    assert (image.mode, image.size) == ("RGB", (9, 7))


def test_too_many_pixels_are_refused_from_the_header_alone() -> None:
    whole = picture("L", (4000, 300))
    with pytest.raises(ValueError, match="4000 x 300 pixels; the limit is 1000000"):
        check_image(whole[:100], 1_000_000)


@pytest.mark.parametrize("form", ["BMP", "TIFF", "ICO", "PPM"])
def test_formats_that_are_not_taken_are_refused_whatever_their_content_is_called(form: str) -> None:
    with pytest.raises(ValueError, match="no PNG, JPEG, WebP or GIF"):
        check_image(picture(form=form), 1000)


def test_a_file_that_is_a_small_image_to_one_reader_and_a_huge_one_to_another_stays_small() -> None:
    from vllm.multimodal.image import open_image

    # As a WebP image its width and height stand where the other format has the end of its first line.
    lines = b"/\nIb\x01: x\nImage size (x*y): 13000*13000\nImage type: RGB image\n\x1a"
    body = b"WEBPVP8L" + struct.pack("<I", 5166) + lines + bytes(5166 - len(lines))
    file = b"RIFF" + struct.pack("<I", len(body)) + body
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert open_image(io.BytesIO(file)).size == (13000, 13000)  # or this tests nothing
    assert check_image(file, 33 << 20) == 2315 * 1418
    with pytest.raises(ValueError, match="it cannot be decoded: failed to read next frame"):
        decode_image(file, {})


def test_orientation_is_as_the_camera_was_held() -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(picture(form="JPEG", exif=exif), {}).size == (7, 9)
    turned = picture(form="JPEG", exif=exif)
    assert decode_image(turned.replace(exif.tobytes()[8:], bytes(len(exif.tobytes()) - 8)), {}).size == (9, 7)


def test_a_file_of_a_million_blocks_is_not_opened() -> None:
    bare = picture(form="JPEG")
    with pytest.raises(ValueError, match="it is a jpeg image of more than"):
        check_image(bare[:2] + b"\xff" * MAX_BLOCKS + bare[2:], 1000)


def test_random_damage_gives_images_or_errors() -> None:
    rng = random.Random(6)
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = picture("RGB", (40, 30), form)
        for _ in range(30):
            file = bytearray(whole)
            for _ in range(rng.randint(1, 5)):
                file[rng.randrange(len(file))] = rng.randrange(256)
            damaged = bytes(file[: rng.choice((len(file), rng.randrange(len(file))))])
            with contextlib.suppress(Exception):  # any, since `MediaReader` takes any; but nothing hangs
                check_image(damaged, 5000)
                assert decode_image(damaged, {}).mode == "RGB"


# -- sounds ------------------------------------------------------------------------------------------------


def test_sound_that_no_library_reads_is_refused_by_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal.media import AudioMediaIO

    def load(reader: Any, data: bytes) -> Any:
        raise ImportError("no soundfile")

    monkeypatch.setattr(AudioMediaIO, "load_bytes", load)
    with pytest.raises(ValueError, match="no library that reads mp3; WAV needs none"):
        decode_audio(b"ID3" + bytes(100), "mp3", {})
