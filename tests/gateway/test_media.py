"""Images and sounds are loaded once each, held against their limits, and named in every error."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway import data_uris
from gateway.media import MediaLimits, MediaLoader
from pipeline.media_errors import (
    BadMedia,
    MediaError,
    MediaFull,
    MediaNotAllowed,
    MediaTooLarge,
    MediaUnreachable,
)
from pipeline.values import MediaKind, MediaRef
from tests.gateway.media_files import data_uri, image, png_head, wav

PATH = "messages[2].content[1]"


class Pages:
    """Files by their addresses; `gate`, if it is there, holds them back."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.num_open = self.num_at_once = 0
        self.gate: asyncio.Event | None = None
        self.is_closed = False

    async def fetch(self, url: str, path: str, max_bytes: int) -> bytes:
        self.asked.append(url)
        self.num_open += 1
        self.num_at_once = max(self.num_at_once, self.num_open)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if url not in self.files:
                raise MediaUnreachable(path, "could not be fetched: there is nothing.")
            return self.files[url]
        finally:
            self.num_open -= 1

    def check(self, url: str, path: str) -> object:
        if "closed" in url:
            raise MediaNotAllowed(path, "is closed.")
        return None

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
async def make(pages: Pages) -> AsyncIterator[Callable[..., MediaLoader]]:
    loaders = []

    def new(**limits: Any) -> MediaLoader:
        loaders.append(MediaLoader(pages, MediaLimits(**limits)))
        return loaders[-1]

    yield new
    for loader in loaders:
        await loader.close()


def ref(url: str, kind: MediaKind = "image") -> MediaRef:
    return MediaRef(kind, url, PATH)


async def test_data_and_pages_become_media_in_order(make: Callable[..., MediaLoader], pages: Pages) -> None:
    png, jpeg = image(), image("jpeg")
    pages.files["https://a/x"] = jpeg
    refs = [ref(data_uri(png)), ref("https://a/x"), ref(data_uri(wav(), "audio/wav"), "audio")]
    media = await make().load(refs)
    assert [(each.kind, each.format, each.data) for each in media] == [
        ("image", "png", png),
        ("image", "jpeg", jpeg),
        ("audio", "wav", wav()),
    ]
    assert len({each.digest for each in media}) == 3


async def test_equal_ones_are_loaded_once_and_the_others_at_the_same_time(
    make: Callable[..., MediaLoader], pages: Pages
) -> None:
    pages.files = {"https://a/x": image(), "https://a/y": image(color="blue")}
    pages.gate = asyncio.Event()
    loading = asyncio.create_task(make().load([ref(f"https://a/{name}") for name in "xyxxy"]))
    while pages.num_at_once < 2:  # noqa: ASYNC110 - two flags in one
        await asyncio.sleep(0)
    pages.gate.set()
    media = await loading
    assert sorted(pages.asked) == ["https://a/x", "https://a/y"]
    assert [each.data for each in media] == [pages.files[f"https://a/{name}"] for name in "xyxxy"]
    assert media[0] is media[2]


async def test_a_message_that_comes_again_has_its_media_already(
    make: Callable[..., MediaLoader], pages: Pages
) -> None:
    """As in a conversation; a failure is not kept."""
    loader, page, data = make(), ref("https://a/x"), ref(data_uri(image(color="blue")))
    with pytest.raises(MediaUnreachable):
        await loader.load([page, data])
    pages.files["https://a/x"] = image()
    first = await loader.load([page, data])
    second = await loader.load([data, page])
    assert (second[0] is first[1], second[1] is first[0]) == (True, True)
    assert len(pages.asked) == 2  # the failure, and once


async def test_fetched_files_are_kept_within_a_bound_and_only_as_long_as_their_messages(
    make: Callable[..., MediaLoader], pages: Pages
) -> None:
    file = image()
    loader = make(max_held_bytes=2 * 4 * len(file))  # a quarter of it is for these
    pages.files = {f"https://a/{name}": file for name in "wxyz"}
    refs = {name: ref(f"https://a/{name}") for name in "wxyz"}
    for name in "xyz":
        await loader.load([refs[name]])
    assert [bool(refs[name].found) for name in "xyz"] == [True, True, False]
    await loader.load([refs["z"], refs["x"]])
    assert pages.asked[3:] == ["https://a/z"]
    data = ref(data_uri(file))
    await loader.load([data])
    assert data.found, "its message bounds it"
    del refs["x"], data
    await loader.load([refs["w"]])
    assert refs["w"].found


async def test_all_that_are_held_have_a_bound(make: Callable[..., MediaLoader], pages: Pages) -> None:
    file = image()
    loader = make(max_held_bytes=3 * len(file))
    pages.files = {"https://a/x": file}
    held = await loader.load([ref(data_uri(file)), ref("https://a/x")])
    assert loader.num_held_bytes == 2 * len(file)
    more = [ref(data_uri(image(color="blue"))), ref("https://a/x", "image")]
    with pytest.raises(MediaFull, match=f"the limit is {3 * len(file)}") as caught:
        await loader.load(more)
    assert caught.value.status_hint == 503
    del held, caught, more
    gc.collect()  # the failure's traceback held what it had loaded
    assert loader.num_held_bytes == 0
    assert len(await loader.load([ref(data_uri(file)), ref("https://a/x")])) == 2


async def test_the_same_data_as_another_kind_is_another_medium(make: Callable[..., MediaLoader]) -> None:
    url = data_uri(wav(), "audio/wav")
    with pytest.raises(BadMedia, match="is no image"):
        await make().load([ref(url, "audio"), ref(url)])


async def test_what_is_known_to_be_bad_is_told_before_anything_is_loaded(
    make: Callable[..., MediaLoader], pages: Pages
) -> None:
    """A small file is then loaded already; of a large one, its first slice is looked at."""
    loader = make(max_bytes=400_000)
    good, large = ref(data_uri(image())), ref("data:image/png;base64," + "AAAA" * 60_000)
    loader.check([good, large])
    assert (len(good.found), len(large.found)) == (1, 0)
    assert (await loader.load([good]))[0] is good.found[0]
    for bad, problem in (
        (ref("https://closed/x"), "is closed"),
        (ref(data_uri(b"no image")), "is no image"),
        (ref("data:image/png;base64,AA*A" + "AAAA" * 60_000), "is no base64"),
        (ref("data:image/png;base64," + "AAAA" * 140_000), "400000"),
        (ref("data:image/png;base64,"), "is empty"),
    ):
        with pytest.raises(MediaError, match=problem):
            loader.check([good, bad])
        assert not bad.found


async def test_what_a_type_says_counts_for_nothing(make: Callable[..., MediaLoader]) -> None:
    [medium] = await make().load([ref(data_uri(image("webp"), "image/png"))])
    assert medium.format == "webp"
    with pytest.raises(BadMedia, match="is no image"):
        await make().load([ref(data_uri(wav(), "image/png"))])
    with pytest.raises(BadMedia, match="is no sound"):
        await make().load([ref(data_uri(image(), "audio/wav"), "audio")])


@pytest.mark.parametrize(
    ("url", "kind", "problem"),
    [
        ("data:image/png;base64,", "image", "is empty"),
        ("data:image/png;base64,A", "image", "is no base64"),
        ("data:image/png,abc", "image", "is not base64|not base64"),
        (data_uri(b"abc"), "image", "is no image"),
        (data_uri(b"\x89PNG\r\n\x1a\nabc"), "image", "is a broken png image"),
        (data_uri(bytes(8), "audio/pcm"), "image", "samples of a sound"),
        (data_uri(b"", "audio/pcm"), "audio", "is empty"),
    ],
)
async def test_bad_ones_are_named_by_their_part(
    make: Callable[..., MediaLoader], url: str, kind: MediaKind, problem: str
) -> None:
    with pytest.raises(BadMedia, match=problem) as caught:
        await make().load([ref(data_uri(wav()), "audio"), ref(url, kind)])
    assert caught.value.param == PATH
    assert caught.value.message.startswith(f"'{PATH}' ")


async def test_an_empty_page_is_named(make: Callable[..., MediaLoader], pages: Pages) -> None:
    pages.files["https://a/x"] = b""
    with pytest.raises(BadMedia, match="is empty"):
        await make().load([ref("https://a/x")])


@pytest.mark.parametrize("spaced", [False, True])
async def test_more_bytes_than_the_limit(
    make: Callable[..., MediaLoader], spaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_uris, "SLICE_CHARS", 64)
    data = image()
    url = data_uri(data)
    head, text = url.split(",")
    url = f"{head},\n{text}" if spaced else url
    assert (await make(max_bytes=len(data)).load([ref(url)]))[0].data == data
    with pytest.raises(MediaTooLarge, match=f"; the limit is {len(data) - 1}"):
        await make(max_bytes=len(data) - 1).load([ref(url)])


async def test_nothing_is_decoded_of_what_is_known_to_be_too_large(
    make: Callable[..., MediaLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_uris, "a2b_base64", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(MediaTooLarge, match="has 3000 bytes; the limit is 2999"):
        await make(max_bytes=2999).load([ref(data_uri(bytes(3000)))])


async def test_more_pixels_than_the_limit(make: Callable[..., MediaLoader]) -> None:
    assert await make(max_pixels=48).load([ref(data_uri(image(size=(8, 6))))])
    with pytest.raises(MediaTooLarge, match="has 48 pixels; the limit is 47"):
        await make(max_pixels=47).load([ref(data_uri(image(size=(8, 6))))])
    with pytest.raises(MediaTooLarge, match="has 10000000000 pixels"):
        await make().load([ref(data_uri(png_head(100_000, 100_000)))])


async def test_a_longer_sound_than_the_limit(make: Callable[..., MediaLoader]) -> None:
    url = data_uri(bytes(48_000), "audio/pcm")  # 1 s
    assert (await make(max_audio_s=1.0).load([ref(url, "audio")]))[0].format == "wav"
    with pytest.raises(MediaTooLarge, match=r"has 1\.0 seconds; the limit is 0\.9"):
        await make(max_audio_s=0.9).load([ref(url, "audio")])


async def test_the_first_failure_ends_what_is_still_fetched(
    make: Callable[..., MediaLoader], pages: Pages
) -> None:
    pages.gate = asyncio.Event()
    with pytest.raises(MediaError):
        await make().load([ref("https://a/x"), ref(data_uri(b"x"))])
    assert pages.num_open == 0


async def test_a_request_that_goes_away_leaves_nothing_behind(
    make: Callable[..., MediaLoader], pages: Pages
) -> None:
    pages.gate = asyncio.Event()
    loading = asyncio.create_task(make().load([ref("https://a/x"), ref("https://a/y")]))
    while pages.num_open < 2:  # noqa: ASYNC110 - two flags in one
        await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert pages.num_open == 0


async def test_a_turn_of_the_loop_decodes_one_slice_however_many_wait(
    make: Callable[..., MediaLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, turns_of_steps = 0, []
    step = data_uris.Decoding.step

    def counted(self: data_uris.Decoding) -> None:
        turns_of_steps.append(turn)
        step(self)

    monkeypatch.setattr(data_uris, "SLICE_CHARS", 16)
    monkeypatch.setattr(data_uris.Decoding, "step", counted)
    loader, url = make(), data_uri(image())
    loading = asyncio.gather(*(loader.load([ref(url)]) for _ in range(3)))
    while not loading.done():
        turn += 1
        await asyncio.sleep(0)
    assert [len(media) for media in await loading] == [1, 1, 1]
    assert len(turns_of_steps) > 3
    assert len(set(turns_of_steps)) == len(turns_of_steps)


async def test_closing_closes_the_fetcher(pages: Pages) -> None:
    await MediaLoader(pages).close()
    assert pages.is_closed
