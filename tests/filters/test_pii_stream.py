from __future__ import annotations

import random

import pytest

from filters.patterns import Patterns
from filters.pii import DETECTORS, PII_CLASSES
from filters.pii_stream import PiiWindow
from filters.rules import Rule, RuleSet
from filters.settling import Settling
from tests.filters.whole_text_oracle import PIECES

# At most so many characters wait at the end of what was read (`pii.py`).
MOST_HELD = {"phone_cn": 33, "card": 33, "id_cn": 33, "email": 64 + 1 + 255, "ip": 64}
SIGNS = {"phone_cn": "1", "card": "1", "id_cn": "1", "email": "@", "ip": "1"}


def window_of(*kinds: str, action: str = "mask") -> PiiWindow:
    rules = [Rule(kind, (), action, replacement="*", pii=kind) for kind in kinds]
    return PiiWindow(Patterns(RuleSet(tuple(rules))), 0, Settling([0] * 5))


def found(window: PiiWindow) -> list[tuple[int, int, str]]:
    return [(match.start, match.end, match.rule.id) for match in window.streams[0]._settling.open]


def random_text(rng: random.Random, num_pieces: int) -> str:
    pieces = [*PIECES["numbers"], *PIECES["emails"], *PIECES["addresses"], "word", " and ", "说", "a" * 70]
    text = "".join(rng.choice(pieces) for _ in range(num_pieces))
    return "".join(char for char in text.lower() if char not in "\u200b①…" and char < "\uff00")


@pytest.mark.parametrize("kind", PII_CLASSES)
def test_read_decides_what_the_detector_decides(kind: str) -> None:
    """Signs save detectors their work, and change nothing that is found."""
    rng = random.Random(len(kind))
    for _ in range(50):
        text = random_text(rng, rng.choice((4, 12, 40, 400)))
        window = window_of(kind)
        most = at = 0
        while at < len(text):
            piece = text[at : at + rng.randint(1, 9)]
            at += len(piece)
            held_from = window.read(piece, [], len(piece))
            most = max(most, at - held_from)
            if kind != "email":
                assert at - held_from <= MOST_HELD[kind], (text[:at], held_from)
            if SIGNS[kind] not in text[:at]:
                assert held_from >= DETECTORS[kind](text[:at], 0, False)[1]
        for stream in window.streams:
            stream.finish()
        whole, _ = DETECTORS[kind](text, 0, True)
        assert found(window) == [match for match in whole if match[2] == kind], text
        assert most <= MOST_HELD[kind]


def test_read_of_ordinary_text_asks_no_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    window = window_of(*PII_CLASSES)
    monkeypatch.setattr(type(window.streams[0]), "look", None)
    for piece in ("The quick brown", " fox. ", "他们在讨论", "一个问题，", "e.g. a", "b-c_d" * 20, " end"):
        window.read(piece, [], len(piece))
    assert [stream.run for stream in window.streams] == [0, 3, 1]


def test_read_holds_runs_that_may_become_something() -> None:
    window = window_of("email")
    assert [window.read(piece, [], len(piece)) for piece in ("say bo", "b", "说", "a" * 70)] == [4, 4, 8, 14]
    window = window_of("ip")
    assert [window.read(piece, [], len(piece)) for piece in ("see fa", "de", " g", "a" * 65)] == [
        4,
        4,
        10,
        75,
    ]
    window = window_of("phone_cn")
    pieces = ("tel ", "+", "86 1", "38", "x说")
    assert [window.read(piece, [], len(piece)) for piece in pieces] == [4, 4, 4, 4, 13]


def test_rules_that_only_report_hold_nothing() -> None:
    window = window_of("email", "phone_cn", action="flag")
    assert window.read("bob@b.com 138", [], 13) == 13
    assert window.read("12345678 y", [], 10) == 23
    assert found(window) == [(0, 9, "email"), (10, 21, "phone_cn")]


def test_found_to_is_as_far_as_no_match_can_end() -> None:
    window = window_of("email", "phone_cn", "ip", action="block")
    window.read("word 138", [], 8)
    assert [stream.found_to for stream in window.streams] == [8, 8, 7]
    window.read("00000000", [], 8)
    assert [stream.found_to for stream in window.streams] == [16, 15, 7]
    window = window_of("email")
    window.read("bob@b.com", [], 9)
    assert [(stream.found_to, stream.blocks_from) for stream in window.streams] == [(5, 9)]


def test_finish_finds_what_there_is_and_the_number_may_go_on() -> None:
    window = window_of("phone_cn", "card")
    (stream,) = window.streams
    window.read("4111 1111 1111", [], 14)
    stream.finish()
    assert (found(window), stream.found_to) == ([], 14)
    window.read(" 1111说", [], 6)
    assert found(window) == [(0, 19, "card")]


@pytest.mark.parametrize("unit", ["1", "1 ", "@", "a@", "a.", ":", "4111 1111 1111 1111 ", "a@b.com,"])
def test_read_of_a_flood_keeps_a_bounded_window(unit: str) -> None:
    window = window_of(*PII_CLASSES)
    for at in range(0, 6_000, len(unit)):
        held_from = window.read(unit, [], len(unit))
        assert at + len(unit) - held_from <= 320
        assert len(window._reading.window) < 1_200
        assert window._reading._offsets.num_anchors == 1


def test_read_of_a_piece_with_many_beginnings_decides_all_of_them() -> None:
    window = window_of("phone_cn", "email")
    text = "138 " * 70 + "a@" * 90 + "说"
    assert window.read(text, [], len(text)) == len(text)
