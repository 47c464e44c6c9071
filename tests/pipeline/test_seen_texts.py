"""What is remembered of scans, and for how long."""

from __future__ import annotations

import random

from filters.patterns import Patterns
from filters.rules import load_rules
from filters.scan import ScanResult, scan
from pipeline.seen_texts import SeenTexts

RULES = Patterns(load_rules("badword\nworse", "words.txt", "mask"))
BLOCKS = Patterns(load_rules("badword", "words.txt", "block"))


def remember(seen: SeenTexts, *texts: str) -> None:
    for text in texts:
        seen.add(text, scan(text, RULES))


def known(seen: SeenTexts, *texts: str) -> list[str]:
    unknown = seen.look_up(texts, {})
    return [text for text in texts if text not in unknown]


def test_clean_texts_are_known_and_others_come_with_their_result() -> None:
    seen = SeenTexts(RULES)
    remember(seen, "fine", "a badword")
    found: dict[str, ScanResult] = {}
    assert seen.look_up(["new", "fine", "a badword"], found) == ["new"]
    assert found == {"a badword": scan("a badword", RULES)}
    assert (seen.hits, seen.misses, len(seen)) == (2, 1, 2)


def test_equal_text_of_another_object_is_known() -> None:
    seen = SeenTexts(RULES)
    remember(seen, "敏感" * 100)
    assert known(seen, "".join(["敏感"] * 100)) == ["敏感" * 100]
    assert not known(seen, "敏感" * 99)


def test_blocked_text_is_not_kept() -> None:
    seen = SeenTexts(BLOCKS)
    seen.add("badword", scan("badword", BLOCKS))
    assert len(seen) == 0


def test_memory_is_bounded_whatever_comes() -> None:
    rng = random.Random(1)
    for max_bytes in (0, 100, 5000, 50_000):
        seen, most = SeenTexts(RULES, max_bytes), 0
        for _ in range(2000):
            text = rng.choice(["x", "badword ", "敏", "😀"]) * int(rng.paretovariate(0.7)) + str(rng.random())
            if rng.random() < 0.3:
                text = str(rng.randrange(50))
            if not known(seen, text[:5000]):
                remember(seen, text[:5000])
            most = max(most, seen.num_bytes)
            assert seen.num_bytes <= max_bytes
        assert (most > max_bytes // 2) == (max_bytes >= 5000)


def test_bytes_are_those_of_the_entries() -> None:
    seen = SeenTexts(RULES, 4000)
    for number in range(200):
        remember(seen, f"text {number}")
        known(seen, f"text {number // 2}")
    size = "text 100".__sizeof__() + 112
    assert seen.num_bytes % len(seen) <= len(seen)
    assert abs(seen.num_bytes - len(seen) * size) <= 2 * len(seen)


def test_text_in_use_outlives_one_that_is_not() -> None:
    seen = SeenTexts(RULES, 10_000)
    remember(seen, "system prompt", "unused")
    for number in range(1000):
        remember(seen, f"other {number}")
        assert known(seen, "system prompt")
    assert not known(seen, "unused")


def test_one_large_text_does_not_push_out_the_others() -> None:
    seen = SeenTexts(RULES, 10_000)
    remember(seen, "a", "b", "x" * 2000)
    assert known(seen, "a", "b", "x" * 2000) == ["a", "b"]
    remember(seen, "badword" * 100)  # small, but not with its hits
    assert known(seen, "a", "b", "badword" * 100) == ["a", "b"]


def test_same_text_twice_is_one_entry() -> None:
    seen = SeenTexts(RULES)
    remember(seen, "same")
    num_bytes = seen.num_bytes
    remember(seen, "same")
    assert (len(seen), seen.num_bytes) == (1, num_bytes)
