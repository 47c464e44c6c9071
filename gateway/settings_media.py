"""Settings of images and sounds in requests: how large they may be, and where they may be fetched from.

How all settings hang together: `gateway/settings.py`. What these do: `gateway/media.py` and
`gateway/media_fetch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from gateway.settings_field import ALL, EDGE, About


@dataclass(frozen=True, slots=True)
class Media:
    """Images and sounds, for models that take them."""

    TOPIC: ClassVar = "Images and sounds"
    COMMANDS: ClassVar = EDGE

    allowed_media_domains: Annotated[
        tuple[str, ...],
        About(
            "host that images and sounds may be fetched from, as images.example.com, or *.example.com for "
            "all below it, at ports 80 and 443, or with another port after it; repeat for several; `*` is "
            "every one with a public address, and none given is none: only data URIs are taken"
        ),
    ] = ()
    max_images: Annotated[
        int, About("images in one request, and as many sounds", "images", at_least=0, at_most=4096)
    ] = 16
    max_media_bytes: Annotated[int, About("one image or sound, as a file", "bytes", at_least=1024)] = 16 << 20
    max_image_pixels: Annotated[
        int, About("width times height of one image", "pixels", at_least=1, commands=ALL)
    ] = 32 << 20
    max_audio_s: Annotated[float, About("length of one sound, where its file tells", "s", above=0)] = 600.0
    media_held_bytes: Annotated[
        int,
        About("images and sounds of all requests and conversations of one process", "bytes", at_least=1024),
    ] = 1 << 30
    media_limit_s: Annotated[float, About("time to fetch one image or sound", "s", above=0)] = 10.0
    media_redirects: Annotated[
        int, About("redirects that are followed", "redirects", at_least=0, at_most=20)
    ] = 3
    media_fetches: Annotated[
        int, About("images and sounds that are fetched at the same time", "fetches", at_least=1)
    ] = 32


def check_media(media: Media) -> Iterator[str]:
    """One line for each problem."""
    if not media.allowed_media_domains:
        return
    from gateway.media_urls import AllowedHosts  # takes 30 ms

    for domain in media.allowed_media_domains:
        try:
            AllowedHosts([domain])
        except ValueError as error:
            yield f"allowed_media_domains: {error}"
