"""Which media workers take, alone and together."""

from __future__ import annotations

import pytest

from backend import link
from backend.link import MediaInfo, Welcome
from backend.media_support import announced, joined, lack, support_of
from pipeline.values import MediaSupport

IMAGES = MediaSupport(7, 2)
SOUNDS = MediaSupport(8, 1)


def welcome(**fields: object) -> Welcome:
    return Welcome(b"", "w", ["m"], 4096, 16, {}, "f", [], {}, **fields)  # type: ignore[arg-type]


def test_what_is_announced_is_what_the_gateway_learns_and_kinds_it_does_not_know_are_passed_over() -> None:
    media = announced({"image": IMAGES, "audio": SOUNDS}) | {"smell": MediaInfo(9, 1)}
    assert support_of(welcome(media=media)) == {"image": IMAGES, "audio": SOUNDS}
    assert support_of(welcome()) == {}


@pytest.mark.parametrize("odd", [MediaInfo(-1, 1), MediaInfo(1 << 31, 1), MediaInfo(7, -1)])
def test_numbers_that_no_worker_has_are_refused(odd: MediaInfo) -> None:
    frame = link.encode(welcome(media={"image": odd}))
    with pytest.raises(link.LinkError, match="bad payload"):
        link.decode(link.WELCOME, bytes(frame[link.HEADER_BYTES :]))


def test_workers_together_take_what_the_best_one_takes() -> None:
    assert joined([{}, {"image": IMAGES}, {"image": MediaSupport(7, 9), "audio": SOUNDS}]) == {
        "image": MediaSupport(7, 9),
        "audio": SOUNDS,
    }
    assert joined([]) == {}


def test_kind_with_two_placeholders_is_taken_by_none() -> None:
    assert joined([{"image": IMAGES, "audio": SOUNDS}, {"image": MediaSupport(6, 2)}]) == {"audio": SOUNDS}


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        ([], None),
        (["image", "audio", "image"], None),
        (["image"] * 3, "3 media of kind 'image' in one prompt; the limit is 2"),
        (["image", "video"], "the model takes no media of kind 'video'"),
    ],
)
def test_lack_names_kind_and_numbers(kinds: list[str], problem: str | None) -> None:
    assert lack({"image": IMAGES, "audio": SOUNDS}, kinds) == problem
