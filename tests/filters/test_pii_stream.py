from __future__ import annotations

import random

import pytest

from filters.patterns import Patterns
from filters.pii import DETECTORS, PII_CLASSES
from filters.pii_stream import PiiWindow, Tails
from filters.rules import Rule, RuleSet
from filters.settling import Settling
from tests.filters.whole_text_oracle import PIECES

# At most so many characters wait at the end of what was read (`pii.py`).
MOST_HELD = {"phone_cn": 33, "card": 33, "id_cn": 33, "email": 64 + 1 + 255, "ip": 64}
SIGNS = {"phone_cn": "1", "card": "1", "id_cn": "1", "email": "@", "ip": "1"}


def window_of(*kinds: str, action: str = "mask") -> PiiWindow:
    rules = Patterns(RuleSet(tuple(Rule(kind, (), action, replacement="*", pii=kind) for kind in kinds)))
    return PiiWindow(rules, Tails(rules), 0, Settling([0] * 5))


class Reader:
    """Gives a window its pieces as `CombinedFilter` does; returns from where on text is held."""

    def __init__(self, window: PiiWindow) -> None:
        self.window = window
        self.end = 0

    def __call__(self, piece: str, must_read: bool = False) -> int:
        start, self.end = self.end, self.end + len(piece)
        held = -1 if must_read else self.window.pass_over(piece)
        return self.end - held if held >= 0 else self.window.read(piece, [], start, self.end)

    def finish(self) -> None:
        self.window.catch_up(self.end)
        for stream in self.window.streams:
            stream.finish()


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
        read, most, at = Reader(window), 0, 0
        while at < len(text):
            piece = text[at : at + rng.randint(1, 9)]
            at += len(piece)
            held_from = read(piece, must_read=rng.random() < 0.2)
            most = max(most, at - held_from)
            if kind != "email":
                assert at - held_from <= MOST_HELD[kind], (text[:at], held_from)
            if SIGNS[kind] not in text[:at]:
                assert held_from >= DETECTORS[kind](text[:at], 0, False)[1]
        read.finish()
        whole, _ = DETECTORS[kind](text, 0, True)
        assert found(window) == [match for match in whole if match[2] == kind], text
        assert most <= MOST_HELD[kind]


def test_pass_over_holds_what_read_would() -> None:
    rng = random.Random(1)
    for _ in range(60):
        kinds = rng.sample(PII_CLASSES, rng.randint(1, 5))
        quick, slow = (Reader(window_of(*kinds)) for _ in range(2))
        for _ in range(60):
            piece = rng.choice(
                ["bob", " and", "abc", "说", ".", "-", "fa" * 20, "a.b", "x" * 40, ", ", "1", "@"]
            )
            assert quick(piece) == slow(piece, must_read=True), (kinds, piece)


def test_ordinary_text_asks_no_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reader(window_of(*PII_CLASSES))
    monkeypatch.setattr(type(read.window.streams[0]), "look", None)
    for piece in ("The quick brown", " fox. ", "他们在讨论", "一个问题，", "e.g. a", "b-c_d" * 20, " end"):
        read(piece, must_read=len(piece) % 2 == 0)
    read.window.catch_up(read.end)
    assert [stream.run for stream in read.window.streams] == [0, 3, 1]


def test_pass_over_leaves_signs_and_uneven_characters_to_read() -> None:
    window = window_of("email", "phone_cn")
    assert [window.pass_over(piece) for piece in ("a1", "a@", "a\u200b", "…", "")] == [-1] * 5
    assert window.pass_over("Ａ.") == 2
    assert window_of("email").pass_over("a1") == 2


def test_catch_up_after_a_long_time_has_what_detectors_look_back_to() -> None:
    for kind, sample in (("email", "b" * 40 + "@b.com"), ("phone_cn", "13812345678"), ("ip", "10.0.0.1")):
        for piece, num_pieces in (("a", 3), ("b ", 65), ("cd", 131), ("说", 300), ("x" * 100, 5)):
            read = Reader(window_of(kind))
            text = piece * num_pieces + sample
            for _ in range(num_pieces):
                read(piece)
            read(sample)
            read.finish()
            whole, _ = DETECTORS[kind](text, 0, True)
            assert found(read.window) == whole, (kind, piece)
            assert len(read.window._reading.window) <= max(1_000, 2 * len(text))


def test_tails_remember_a_bounded_number_of_short_pieces() -> None:
    rules = Patterns(RuleSet((Rule("p", (), "mask", replacement="*", pii="email"),)))
    tails = Tails(rules)
    for number in range(20_000):
        tails.learn(f"piece {number}")
        tails.learn("long" * 9 + str(number))
    assert 0 < len(tails.known) <= 8_192
    assert all(len(piece) <= 32 for piece in tails.known)


def test_read_holds_runs_that_may_become_something() -> None:
    read = Reader(window_of("email"))
    assert [read(piece) for piece in ("say bo", "b", "说", "a" * 70)] == [4, 4, 8, 14]
    read = Reader(window_of("ip"))
    assert [read(piece) for piece in ("see fa", "de", " g", "a" * 65, "a", " a")] == [4, 4, 10, 75, 76, 77]
    read = Reader(window_of("phone_cn"))
    assert [read(piece) for piece in ("tel ", "+", "86 1", "38", "x说")] == [4, 4, 4, 4, 13]


def test_rules_that_only_report_hold_nothing() -> None:
    read = Reader(window_of("email", "phone_cn", action="flag"))
    assert [read(piece) for piece in ("bob@b.com 138", "12345678 y")] == [13, 23]
    assert found(read.window) == [(0, 9, "email"), (10, 21, "phone_cn")]


def test_found_to_is_as_far_as_no_match_can_end() -> None:
    window = window_of("email", "phone_cn", "ip", action="block")
    window.read("word 138", [], 0, 8)
    assert [stream.found_to for stream in window.streams] == [8, 8, 7]
    window.read("00000000", [], 8, 16)
    assert [stream.found_to for stream in window.streams] == [16, 15, 7]
    window = window_of("email")
    window.read("bob@b.com", [], 0, 9)
    assert [(stream.found_to, stream.blocks_from) for stream in window.streams] == [(5, 9)]


def test_finish_finds_what_there_is_and_the_number_may_go_on() -> None:
    window = window_of("phone_cn", "card")
    (stream,) = window.streams
    window.read("4111 1111 1111", [], 0, 14)
    stream.finish()
    assert (found(window), stream.found_to) == ([], 14)
    window.read(" 1111说", [], 14, 20)
    assert found(window) == [(0, 19, "card")]


@pytest.mark.parametrize("unit", ["1", "1 ", "@", "a@", "a.", ":", "4111 1111 1111 1111 ", "a@b.com,"])
def test_read_of_a_flood_keeps_a_bounded_window(unit: str) -> None:
    read = Reader(window_of(*PII_CLASSES))
    for _ in range(0, 6_000, len(unit)):
        assert read.end + len(unit) - read(unit) <= 320
        assert len(read.window._reading.window) < 1_200
        assert read.window._reading._offsets.num_anchors == 1


def test_read_of_a_piece_with_many_beginnings_decides_all_of_them() -> None:
    read = Reader(window_of("phone_cn", "email"))
    text = "138 " * 70 + "a@" * 90 + "说"
    assert read(text) == len(text)
