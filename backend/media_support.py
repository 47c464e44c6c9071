"""Which images and sounds workers take: what their WELCOMEs say, and whether a call's media fit. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias, get_args

from backend.link import MediaInfo, Welcome
from pipeline.values import MediaKind, MediaSupport

Support: TypeAlias = Mapping[MediaKind, MediaSupport]

KINDS: Final[tuple[MediaKind, ...]] = get_args(MediaKind)


def announced(support: Support) -> dict[str, MediaInfo]:
    """For a WELCOME."""
    return {kind: MediaInfo(each.token_id, each.max_count) for kind, each in support.items()}


def support_of(welcome: Welcome) -> dict[MediaKind, MediaSupport]:
    """What a worker takes, of the kinds that this version knows; nothing before link 0.3."""
    found = {kind: welcome.media[kind] for kind in KINDS if kind in welcome.media}
    return {kind: MediaSupport(each.token_id, each.max_count) for kind, each in found.items()}


def joined(supports: Iterable[Support]) -> dict[MediaKind, MediaSupport]:
    """What workers of one model take together: a call goes to one that takes all of its media.

    So a model has what its best worker has, and workers of two versions can serve it side by side. A kind
    whose placeholder differs between them is left out: a prompt is made for one of them.
    """
    whole: dict[MediaKind, MediaSupport] = {}
    torn: set[MediaKind] = set()
    for support in supports:
        for kind, each in support.items():
            known = whole.setdefault(kind, each)
            if known.token_id != each.token_id:
                torn.add(kind)
            elif known.max_count < each.max_count:
                whole[kind] = each
    return {kind: each for kind, each in whole.items() if kind not in torn}


def lack(support: Support, kinds: Sequence[str]) -> str | None:
    """Why media of these kinds, in one prompt, are not taken; None if they are."""
    for kind in dict.fromkeys(kinds):
        each = next((each for name, each in support.items() if name == kind), None)
        if each is None:
            return f"the model takes no media of kind {kind[:20]!r}"
        if kinds.count(kind) > each.max_count:
            return f"{kinds.count(kind)} media of kind {kind!r} in one prompt; the limit is {each.max_count}"
    return None
