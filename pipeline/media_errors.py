"""Errors of images and sounds in a request: the branches that they add to the tree of `pipeline/errors.py`.

    ClientError
    └── MediaError                  400, names the content part
        ├── TooManyMedia            more than the server or the model takes; names both numbers
        ├── MediaTooLarge           bytes, pixels or seconds; names both numbers
        ├── BadMedia                not what its part says, or in no format that is taken
        ├── MediaNotAllowed         an address that this server does not fetch from
        └── MediaUnreachable        an address that gave no file
            └── MediaTimeout
    Overloaded
    ├── MediaBusy                   503, too many are being fetched
    └── MediaFull                   503, bytes of all that are held

All but the last two are 400: what an address gives is the client's choice, and clients send again by
themselves what ended in any other way. No message holds a URL, a numeric address or a part of the data.
"""

from __future__ import annotations

from pipeline.errors import ClientError, Overloaded
from pipeline.values import MediaKind

PLURALS: dict[MediaKind, str] = {"image": "images", "audio": "sounds"}


class MediaError(ClientError):
    """`path` names the content part, as `messages[0].content[1]`."""

    code = "invalid_media"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"'{path}' {problem}")
        self.param = path


class TooManyMedia(MediaError):
    code = "too_many_media"

    def __init__(self, kind: MediaKind, num_media: int, max_count: int, param: str = "messages") -> None:
        super().__init__(param, f"has {num_media} {PLURALS[kind]}; the limit is {max_count}.")


class MediaTooLarge(MediaError):
    """`unit`: bytes, pixels or seconds. `is_least`: not read to its end."""

    code = "media_too_large"

    def __init__(
        self, path: str, number: float, max_number: float, unit: str = "bytes", is_least: bool = False
    ) -> None:
        or_more = " or more" if is_least else ""
        super().__init__(path, f"has {_plain(number)} {unit}{or_more}; the limit is {_plain(max_number)}.")


class BadMedia(MediaError):
    """`problem` goes on after the part's name: `is no base64`."""


class MediaNotAllowed(MediaError):
    """`problem` goes on after the part's name: `is at an address that is not public.`"""

    code = "media_not_allowed"


class MediaUnreachable(MediaError):
    """`problem` goes on after the part's name. The code is OpenAI's, which has none for sounds."""

    code = "invalid_image_url"


class MediaTimeout(MediaUnreachable):
    def __init__(self, path: str, limit_s: float) -> None:
        super().__init__(path, f"could not be fetched within {limit_s:g} s.")


class MediaBusy(Overloaded):
    code = "media_busy"

    def __init__(self, num_fetches: int) -> None:
        super().__init__(f"{num_fetches} images or sounds are being fetched, and none ended in time.")


class MediaFull(Overloaded):
    code = "media_full"

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"The images and sounds of all requests would have {num_bytes} bytes; the limit is {max_bytes}."
        )


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.1f}"
