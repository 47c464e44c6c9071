"""Control strings dropped: none leaves, the least is held, and the chunks don't matter."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pipeline.control_dropper import MAX_HELD_CHARS, ControlAutomaton, ControlDropper
from pipeline.controls import ControlStrings
from tests.pipeline.splits import random_split, splits

IM = ("<|im_end|>", "<|im_start|>", "</s>")


def dropper(*controls: str) -> ControlDropper:
    return ControlDropper(ControlAutomaton(controls))


def run(dropper: ControlDropper, pieces: Sequence[str]) -> str:
    return "".join([dropper.feed(piece) for piece in pieces]) + dropper.flush()


def reference(text: str, controls: Sequence[str]) -> list[tuple[int, str]]:
    """What is left, with its offsets: after each character a control string that ends there goes."""
    left: list[tuple[int, str]] = []
    for item in enumerate(text):
        left.append(item)
        end = "".join(char for _, char in left)
        ending = [control for control in controls if end.endswith(control)]
        if ending:
            del left[-len(min(ending, key=len)) :]
    return left


def joined(left: list[tuple[int, str]]) -> str:
    return "".join(char for _, char in left)


def shortest_hold(left: str, controls: Sequence[str]) -> int:
    """Characters at the end of the text that some continuation takes away: all continuations are tried."""
    alphabet = sorted(set("".join(controls)))
    shortest = len(left)
    seen, waiting = {left}, [left]
    while waiting:
        text = waiting.pop()
        for char in alphabet:
            after = joined(reference(text + char, controls))
            shortest = min(shortest, len(after))
            if after not in seen and len(after) <= len(left) + 2:
                seen.add(after)
                waiting.append(after)
    return len(left) - shortest


def random_case(rng: random.Random, size: int = 14) -> tuple[str, list[str]]:
    alphabet = rng.choice(["ab", "abc", "<|>x"])
    controls = ["".join(rng.choices(alphabet, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 4))]
    pieces = [*controls, *alphabet, *(control[:-1] for control in controls)]
    return "".join(rng.choices(pieces, k=rng.randint(0, size // 2)))[:size], controls


def test_control_string_is_dropped_across_chunks() -> None:
    drop = dropper(*IM)
    assert [drop.feed(piece) for piece in ("ab<", "|im", "_end|>c")] == ["ab", "", "c"]
    assert drop.flush() == ""


def test_half_a_control_string_leaves_when_it_cannot_become_one() -> None:
    drop = dropper(*IM)
    assert [drop.feed(piece) for piece in ("a <|im_", "x", " b</")] == ["a ", "<|im_x", " b"]
    assert drop.held == 2
    assert drop.flush() == "</"
    assert drop.held == 0


def test_control_string_that_a_removal_makes_is_dropped_too() -> None:
    assert run(dropper(*IM), ["<|im_<|im_e", "nd|>end|>x"]) == "x"


def test_text_before_a_half_is_held_with_it() -> None:
    drop = dropper(*IM)
    assert drop.feed("a<|im_</s") == "a"
    assert drop.held == 8
    assert drop.feed(">end|>b") == "b"


def test_quick_path_returns_the_chunk_itself() -> None:
    text = "no control string"
    assert dropper(*IM).feed(text) is text


def test_no_control_strings_let_everything_through() -> None:
    assert run(dropper("", ""), ["<|im_end|>", "x"]) == "<|im_end|>x"


def test_automaton_takes_the_control_strings_of_a_model() -> None:
    automaton = ControlAutomaton(ControlStrings({"<s>": 1, "</s>": 2}))
    assert run(ControlDropper(automaton), ["<s>a</s>b"]) == "ab"


def test_feed_after_the_end_is_refused() -> None:
    drop = dropper(*IM)
    drop.flush()
    with pytest.raises(RuntimeError, match="has been flushed"):
        drop.feed("x")


def check_case(text: str, controls: list[str], rng: random.Random) -> None:
    left = reference(text, controls)
    expected = joined(left)
    assert not any(control in expected for control in controls)
    for pieces in splits(text, rng):
        drop = dropper(*controls)
        assert run(drop, pieces) == expected, (controls, pieces)


def test_every_split_gives_the_reference() -> None:
    rng = random.Random(1)
    for _ in range(600):
        check_case(*random_case(rng), rng)


@pytest.mark.long
def test_every_split_of_many_texts_gives_the_reference() -> None:
    rng = random.Random(11)
    for _ in range(20_000):
        check_case(*random_case(rng, 30), rng)


@pytest.mark.parametrize("num_cases", [60, pytest.param(500, marks=pytest.mark.long)])
def test_hold_is_the_shortest_possible(num_cases: int) -> None:
    rng = random.Random(2)
    for _ in range(num_cases):
        text, controls = random_case(rng, 8)
        drop, shown, seen = dropper(*controls), "", ""
        for piece in random_split(text, rng):
            seen += piece
            shown += drop.feed(piece)
            left = reference(seen, controls)
            held = shortest_hold(joined(left), controls)
            assert (shown, drop.held) == (joined(left)[: len(left) - held], held), (controls, seen)


def test_hold_is_bounded_and_nothing_leaves_even_then() -> None:
    half, rest = "<|im_", "end|>"
    text = half * 100 + rest * 100 + "x" + "</s>"
    rng = random.Random(3)
    for pieces in ([text], list(text), *(random_split(text, rng) for _ in range(10))):
        drop, shown = dropper(*IM), ""
        for piece in pieces:
            shown += drop.feed(piece)
            assert drop.held <= MAX_HELD_CHARS
        shown += drop.flush()
        assert shown == run(dropper(*IM), [text])
        assert not any(control in shown for control in IM)
        assert shown.startswith(half * 40)
        assert shown.endswith("x")


def test_text_that_had_to_leave_is_not_completed() -> None:
    """All that was held is gone again, and the next would complete what has left."""
    text = "<im/" * 100 + ">" * 100 + "x"
    for pieces in ([text], list(text), [text[:400], text[400:464], text[464:]]):
        assert run(dropper("<im/>"), pieces) == "<im/" * (100 - MAX_HELD_CHARS // 4) + "x"


def test_bounded_hold_never_lets_a_control_string_out() -> None:
    rng = random.Random(4)
    for _ in range(20):
        pieces = rng.choices(
            ["<|im_", "<|im_s", "end|>", "tart|>", "</", "s>", "<"], [9, 9, 5, 5, 3, 3, 2], k=400
        )
        text = "".join(pieces)
        whole = run(dropper(*IM), [text])
        assert not any(control in whole for control in IM)
        assert run(dropper(*IM), pieces) == whole
        assert run(dropper(*IM), list(text)) == whole
