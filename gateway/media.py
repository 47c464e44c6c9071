"""Loads the images and sounds of a request: decodes or fetches them, and holds them against the limits.

A file's declared type counts for nothing, its bytes tell what it is; raw samples alone are what they are said
to be. Not here: HTTP (`gateway/media_fetch.py`), and how files are read (`gateway/image_files.py`,
`gateway/sound_files.py`).

Base64 of megabytes is decoded on the event loop in slices, one in each of its turns whoever waits: the
decoder holds the GIL, so that a thread would stop the loop just the same, for longer. Hashing lets go of it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol

from gateway.data_uris import DataUri, Decoding
from gateway.sound_files import read_sound
from pipeline.media_errors import BadMedia, MediaFull, MediaTooLarge
from pipeline.values import MediaRef, Medium

_DIGEST_BYTES: Final = 16
_THREADS: Final = 2
# Of all that may be held, fetched files are kept as long as their messages live while this share is not
# reached: a conversation of a thousand short addresses would hold 16 GB.
_KEPT_SHARE: Final = 4


class Fetcher(Protocol):
    """What gets files by their addresses. `gateway.media_fetch.MediaFetcher` is one."""

    async def fetch(self, url: str, path: str, max_bytes: int) -> bytes:
        """Raises an error of `pipeline/media_errors.py`."""

    def check(self, url: str, path: str) -> object:
        """Raises `MediaNotAllowed` for what would not be fetched."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """How large one image or sound may be, and all that are held at the same time."""

    max_bytes: int = 16 << 20
    max_pixels: int = 32 << 20
    max_audio_s: float = 600.0
    max_held_bytes: int = 1 << 30


class MediaLoader:
    """One for a process. Lives on the event loop; only `_looked_at` runs in threads.

    `num_held_bytes`: of all media that it has loaded and that somebody still has, a request that waits for
    its engine or a conversation.
    """

    def __init__(self, fetcher: Fetcher, limits: MediaLimits | None = None) -> None:
        self._fetcher = fetcher
        self._limits = limits or MediaLimits()
        self._turn = asyncio.Lock()
        self.num_held_bytes = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="media")

    async def load(self, refs: Sequence[MediaRef]) -> tuple[Medium, ...]:
        """A medium for each, in order; equal ones are loaded once, all of them at the same time.

        As long as a message lives, as in a conversation, what it names is not loaded again; fetched files,
        only while there are few.

        Raises `MediaError` for the first that fails, and then loads nothing more; `MediaBusy`, `MediaFull`.
        """
        wanted: list[MediaRef] = []
        places = [_place_among(wanted, ref) for ref in refs]
        tasks = [asyncio.create_task(self._load(ref), name="load media") for ref in wanted]
        try:
            loaded = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return tuple(loaded[place] for place in places)

    def check(self, refs: Sequence[MediaRef]) -> None:
        """Raises `MediaError` for what one slice of its data shows to be bad. Small ones are then loaded."""
        for ref in refs:
            if not _is_data(ref):
                self._fetcher.check(ref.url, ref.path)
                continue
            decoding = Decoding(self._data_uri(ref))
            _step(decoding, ref)
            if decoding.is_done:
                ref.found[:] = [self._held(self._looked_at(ref, decoding.data))]

    async def close(self) -> None:
        """Nothing more is loaded."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    async def _load(self, ref: MediaRef) -> Medium:
        if ref.found:
            return ref.found[0]
        medium = await self._loaded(ref)
        if _is_data(ref) or self.num_held_bytes <= self._limits.max_held_bytes // _KEPT_SHARE:
            ref.found[:] = [medium]
        return medium

    async def _loaded(self, ref: MediaRef) -> Medium:
        if _is_data(ref):
            data = await self._decoded(ref)
        else:
            data = await self._fetcher.fetch(ref.url, ref.path, self._limits.max_bytes)
        self._check_room(len(data))
        loop = asyncio.get_running_loop()
        return self._held(await loop.run_in_executor(self._threads, self._looked_at, ref, data))

    def _held(self, medium: Medium) -> Medium:
        """Count it until it is gone."""
        num_bytes = len(medium.data)
        self.num_held_bytes += num_bytes
        weakref.finalize(medium, self._gone, num_bytes).atexit = False
        return medium

    def _gone(self, num_bytes: int) -> None:
        self.num_held_bytes -= num_bytes

    def _check_room(self, num_bytes: int) -> None:
        """Raises `MediaFull`. A data URI is asked for before it is decoded, and again when it is."""
        in_all = self.num_held_bytes + num_bytes
        if in_all > self._limits.max_held_bytes:
            raise MediaFull(in_all, self._limits.max_held_bytes)

    def _data_uri(self, ref: MediaRef) -> DataUri:
        try:
            uri = DataUri.parse(ref.url)
            if uri.is_samples and ref.kind != "audio":
                raise ValueError("is an image, but its data are samples of a sound.")
        except ValueError as problem:
            raise BadMedia(ref.path, str(problem)) from None
        if uri.num_bytes > self._limits.max_bytes:
            raise MediaTooLarge(ref.path, uri.num_bytes, self._limits.max_bytes)
        self._check_room(uri.num_bytes)
        return uri

    async def _decoded(self, ref: MediaRef) -> bytes:
        decoding = Decoding(self._data_uri(ref))
        while not decoding.is_done:
            async with self._turn:
                _step(decoding, ref)
                if not decoding.is_done:
                    await asyncio.sleep(0)
            if decoding.num_bytes > self._limits.max_bytes:
                raise MediaTooLarge(ref.path, decoding.num_bytes, self._limits.max_bytes, is_least=True)
        return decoding.data

    def _looked_at(self, ref: MediaRef, data: bytes) -> Medium:
        if not data:
            raise BadMedia(ref.path, "is empty.")
        try:
            form = self._image(ref, data) if ref.kind == "image" else self._sound(ref, data)
        except ValueError as problem:
            raise BadMedia(ref.path, str(problem)) from None
        return Medium(ref.kind, data, form, blake2b(data, digest_size=_DIGEST_BYTES).hexdigest())

    def _image(self, ref: MediaRef, data: bytes) -> str:
        from gateway.image_files import read_image  # takes 20 ms and 3 MB

        head = read_image(data)
        if head.width * head.height > self._limits.max_pixels:
            raise MediaTooLarge(ref.path, head.width * head.height, self._limits.max_pixels, "pixels")
        return head.format

    def _sound(self, ref: MediaRef, data: bytes) -> str:
        head = read_sound(data)
        if head.length_s is not None and head.length_s > self._limits.max_audio_s:
            raise MediaTooLarge(ref.path, head.length_s, self._limits.max_audio_s, "seconds")
        return head.format


def _is_data(ref: MediaRef) -> bool:
    return ref.url[:5].lower() == "data:"


def _step(decoding: Decoding, ref: MediaRef) -> None:
    try:
        decoding.step()
    except ValueError as problem:
        raise BadMedia(ref.path, str(problem)) from None


def _place_among(wanted: list[MediaRef], ref: MediaRef) -> int:
    """Where the same medium is in the list; it is added if it is nowhere.

    Megabytes are compared only where their lengths are equal, and never hashed: that takes 1 ms/MB.
    """
    for place, known in enumerate(wanted):
        if known.kind == ref.kind and len(known.url) == len(ref.url) and known.url == ref.url:
            return place
    wanted.append(ref)
    return len(wanted) - 1
