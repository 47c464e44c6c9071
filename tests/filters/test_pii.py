from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from filters.folding import fold
from filters.pii import (
    DETECTORS,
    LOOK_AHEAD,
    LOOK_BACK,
    MAX_TRIES,
    PII_CLASSES,
    Detector,
    Match,
    find_addresses,
    find_emails,
    find_numbers,
    is_id_cn,
    is_luhn,
)


def found(text: str) -> dict[str, list[str]]:
    """What is found in a text, by class."""
    folded, result = fold(text), {}
    for kind in PII_CLASSES:
        matches, decided = DETECTORS[kind](folded, 0, True)
        assert decided == len(folded)
        texts = [folded[start:end] for start, end, each in matches if each == kind]
        if texts:
            result[kind] = texts
    return result


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("tel 13812345678.", "phone_cn", ["13812345678"]),
        ("手机号１３８１２３４５６７８。", "phone_cn", ["13812345678"]),
        ("138 1234 5678, 138-1234-5678", "phone_cn", ["138 1234 5678", "138-1234-5678"]),
        ("1381234 5678 / 1381-2345-678", "phone_cn", ["1381234 5678", "1381-2345-678"]),
        ("+8613812345678", "phone_cn", ["+8613812345678"]),
        ("+86 138-1234-5678", "phone_cn", ["+86 138-1234-5678"]),
        ("(+86)13812345678", "phone_cn", ["13812345678"]),
        ("008613812345678 8613812345678", "phone_cn", ["008613812345678", "8613812345678"]),
        ("13812345678 13987654321 42", "phone_cn", ["13812345678", "13987654321"]),
        ("QQ13812345678x", "phone_cn", ["13812345678"]),
        ("4111111111111111", "card", ["4111111111111111"]),
        ("4111 1111 1111 1111 exp", "card", ["4111 1111 1111 1111"]),
        ("4111-1111-1111-1111 123", "card", ["4111-1111-1111-1111"]),
        ("3714 496353 98431", "card", ["3714 496353 98431"]),
        ("1381234567890001", "card", ["1381234567890001"]),
        ("11010519491231002X", "id_cn", ["11010519491231002x"]),
        ("身份证：110105 19491231 002x", "id_cn", ["110105 19491231 002x"]),
        ("Bob.Smith+x@mail.Example.co.uk.", "email", ["bob.smith+x@mail.example.co.uk"]),
        ("联系bob＠example．com吧", "email", ["bob@example.com"]),
        ("<a_b@x.com>,c@y.org", "email", ["a_b@x.com", "c@y.org"]),
        ("a@b@c.com", "email", ["b@c.com"]),
        ("10.0.0.1:8080 ip:192.168.001.001.", "ip", ["10.0.0.1", "192.168.001.001"]),
        (
            "[fe80::1] ::1 2001:db8:0:0:8:800:200c:417a",
            "ip",
            ["fe80::1", "::1", "2001:db8:0:0:8:800:200c:417a"],
        ),
        ("::ffff:10.0.0.1", "ip", ["::ffff:10.0.0.1"]),
    ],
)
def test_find_of_each_shape(text: str, kind: str, expected: list[str]) -> None:
    assert found(text) == {kind: expected}


@pytest.mark.parametrize(
    "text",
    [
        "1381234567", "138123456789", "12812345678", "0.13812345678", "13812345678.50", "138 1234 56789",
        "138  1234  5678", "1 3 8 1 2 3 4 5 6 7 8", "1716239022123", "1716239022123456789",
        "4111111111111112", "4111 1111 1111", "41111111111111111111",
        "110105194912310021", "11010519490230002X", "990105194912310021", "110105491231002",
        "bob@localhost", "@b.com", "bob@b.c0", "bob@-b.com", "a" * 65 + "@b.com", "bob@b..com",
        "1.2.3", "1.2.3.4.5", "256.1.1.1", "v1.2.3.4", "1.2.3.4a", "a::b", "1::2", "12:34:56",
        "aa:bb:cc:dd:ee:ff", "std::add", "fe80::1g", "::",
    ],
)  # fmt: skip
def test_find_of_what_only_looks_like_it_finds_nothing(text: str) -> None:
    assert found(text) == {}


def test_is_luhn_of_known_numbers() -> None:
    good = ["4111111111111111", "371449635398431", "30569309025904", "6011111111111117", "5555555555554444"]
    assert all(map(is_luhn, good))
    assert not any(is_luhn(number[:-1] + str((int(number[-1]) + 1) % 10)) for number in good)


def test_is_id_cn_checks_province_date_and_check_digit() -> None:
    assert is_id_cn("11010519491231002x")
    for wrong in ("110105194912310021", "00010519491231002x", "11010519491331002x", "11010518991231002x"):
        assert not is_id_cn(wrong)


def arriving(detect: Detector, text: str, cuts: list[int]) -> Iterator[Match]:
    """Matches of a text that arrives in pieces, of which only the undecided rest and a look back is kept."""
    decided = 0
    for cut in [*cuts, len(text)]:
        base = max(0, decided - LOOK_BACK)
        while True:
            matches, at = detect(text[base:cut], decided - base, cut == len(text))
            assert all(start >= decided - base for start, _, _ in matches)
            yield from ((start + base, end + base, kind) for start, end, kind in matches)
            decided = base + at
            if decided >= cut or (cut < len(text) and at + LOOK_AHEAD >= cut - base):
                break


@pytest.mark.parametrize("detect", [find_numbers, find_emails, find_addresses])
def test_find_gives_the_same_however_the_text_arrives(detect: Detector) -> None:
    rng = random.Random(1)
    pieces = [
        "13812345678",
        "4111-1111-1111-1111",
        "+86",
        "11010519491231002x",
        "bob",
        "@",
        "b.com",
        ".",
        "10.0.0.1",
    ]
    pieces += [
        "c@d.org",
        "c@d.org ",
        " 1.2.3.4 ",
        "::",
        "fe80",
        ":",
        " ",
        "-",
        "x" * 70,
        "1" * 20,
        "元",
        "a",
        "7",
    ]
    num_found = 0
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 40)))
        whole = detect(text, 0, True)[0]
        num_found += len(whole)
        for num_cuts in (1, 3, len(text)):
            cuts = sorted(rng.choices(range(len(text) + 1), k=num_cuts))
            assert list(arriving(detect, text, cuts)) == whole, (text, cuts)
        assert list(arriving(detect, text, list(range(len(text))))) == whole, text
    assert num_found > 100


@pytest.mark.parametrize(
    ("detect", "text", "num_open"),
    [
        (find_numbers, "in 2024 I saw ", 0),
        (find_numbers, "tel 138 1234", 8),
        (find_numbers, "tel +", 1),
        (find_emails, "an English sentence", 8),
        (find_emails, "to bob@exam", 8),
        (find_emails, "to bob@exam ", 0),
        (find_addresses, "see 10.0.", 5),
        (find_addresses, "see that", 0),
    ],
)
def test_decided_leaves_only_what_may_still_become_a_match(
    detect: Detector, text: str, num_open: int
) -> None:
    assert detect(text, 0, False) == ([], len(text) - num_open)


@pytest.mark.parametrize(
    ("detect", "piece"),
    [(find_numbers, "13812345678,"), (find_emails, "a@b.com,"), (find_addresses, "10.0.0.1,")],
)
def test_find_stops_after_many_tries_and_goes_on_from_there(detect: Detector, piece: str) -> None:
    text = piece * 1_000
    matches, decided = detect(text, 0, True)
    assert (len(matches), decided) == (MAX_TRIES, MAX_TRIES * len(piece))
    assert len(list(arriving(detect, text, []))) == 1_000
