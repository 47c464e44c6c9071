"""Stop strings: the earliest end, the shortest hold, the same for every split."""

from __future__ import annotations

import random

import pytest

from pipeline.stop_strings import StopMatcher
from tests.pipeline.splits import random_split, splits


def run(matcher: StopMatcher, pieces: list[str]) -> str:
    """All that comes out of these pieces."""
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            return shown
    return shown + matcher.flush()


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop that completes first, ties in the order of the list."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def shortest_hold(text: str, stops: list[str], num_exempt: int = 0, is_exempt: bool = False) -> int:
    """Characters at the end that some next text would cut off: found by trying all ends of all stops.

    `num_exempt` characters can complete no stop; with `is_exempt` any number of the next ones may not either.
    """
    ends = [stop[size:] for stop in stops for size in range(len(stop))]
    texts = [
        late_reference(text + end, stops, len(text) + more if is_exempt else num_exempt)
        for end in ends
        for more in range(len(end) + 1 if is_exempt else 1)
    ]
    return max(0, *(len(text) - len(each) for each in texts))


def random_case(rng: random.Random) -> tuple[str, list[str]]:
    alphabet = rng.choice(["ab", "abc", "敏感词a"])
    stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
    return "".join(rng.choices(alphabet, k=rng.randint(0, 14))), stops


def test_every_split_gives_the_reference() -> None:
    rng = random.Random(1)
    for _ in range(300):
        text, stops = random_case(rng)
        for include in (False, True):
            expected = reference(text, stops, include)
            for pieces in splits(text, rng):
                matcher = StopMatcher(stops, include)
                assert (run(matcher, pieces), matcher.matched) == expected, (stops, pieces)


@pytest.mark.parametrize("include", [False, True])
def test_hold_is_the_shortest_possible(include: bool) -> None:
    rng = random.Random(2)
    for _ in range(500):
        text, stops = random_case(rng)
        matcher, shown, seen = StopMatcher(stops, include), "", ""
        for piece in random_split(text, rng):
            seen += piece
            shown += matcher.feed(piece)
            if matcher.matched is not None:
                break
            expected = 0 if include else shortest_hold(seen, stops)
            assert len(seen) - len(shown) == expected, (stops, seen)


def test_hold_is_the_shortest_possible_with_min_tokens() -> None:
    rng = random.Random(5)
    for _ in range(500):
        text, stops = random_case(rng)
        min_tokens = rng.randint(1, 3)
        matcher, shown, seen, num_exempt = StopMatcher(stops, min_tokens=min_tokens), "", "", 0
        for number, piece in enumerate(random_split(text, rng), 1):
            seen += piece
            num_exempt = len(seen) if number <= min_tokens else num_exempt
            shown += matcher.feed(piece)
            if matcher.matched is not None:
                break
            expected = shortest_hold(seen, stops, num_exempt, number < min_tokens)
            assert len(seen) - len(shown) == expected, (stops, seen, min_tokens)


def test_text_before_min_tokens_completes_no_stop_but_may_begin_one() -> None:
    rng = random.Random(3)
    for _ in range(500):
        text, stops = random_case(rng)
        min_tokens = rng.randint(0, 4)
        pieces = random_split(text, rng)
        matcher, num_exempt = StopMatcher(stops, min_tokens=min_tokens), len("".join(pieces[:min_tokens]))
        expected = late_reference(text, stops, num_exempt)
        assert run(matcher, pieces) == expected, (stops, pieces, min_tokens)


def late_reference(text: str, stops: list[str], num_exempt: int) -> str:
    """The text up to the stop that is the first to complete after `num_exempt` characters."""
    for end in range(num_exempt + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


def test_exempt_tokens_are_counted_down() -> None:
    matcher = StopMatcher(["STOP"], min_tokens=3)
    assert matcher.num_exempt_tokens == 3
    assert matcher.feed("STOP STO", num_tokens=2) == "STOP "
    assert matcher.num_exempt_tokens == 1
    assert matcher.feed("P", num_tokens=1) == "STOP"
    assert matcher.feed("STOP") == ""
    assert matcher.matched == "STOP"


def test_stop_across_pieces_is_never_shown() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.feed("ok ST"), matcher.feed("OP tail")] == ["ok ", ""]
    assert matcher.matched == "STOP"


def test_beginning_of_a_stop_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.feed("ok ST"), matcher.flush()] == ["ok ", "ST"]
    assert matcher.matched is None


def test_of_two_that_complete_together_the_first_in_the_list_wins() -> None:
    for stops, shown in ((["感词", "敏感词"], "x敏"), (["敏感词", "感词"], "x")):
        matcher = StopMatcher(stops)
        assert run(matcher, ["x敏", "感词y"]) == shown
        assert matcher.matched == stops[0]


def test_of_overlapping_stops_the_one_that_completes_first_wins() -> None:
    for stops, matched, shown in (
        (["abcd", "bc"], "bc", "xa"),
        (["bcd", "abc"], "abc", "x"),
        (["c", "abc"], "c", "xab"),
        (["abc", "c"], "abc", "x"),
    ):
        for pieces in (["xabcd"], ["xa", "b", "cd"], [*"xabcd"]):
            matcher = StopMatcher(stops)
            assert (run(matcher, pieces), matcher.matched) == (shown, matched)


def test_beginning_of_a_denied_word_before_a_stop_leaves_alone() -> None:
    """The filter after this sees text that ends there: its hold on the first character ends with the text."""
    matcher = StopMatcher(["感词"])
    assert [matcher.feed("敏"), matcher.feed("感"), matcher.feed("词")] == ["敏", "", ""]
    assert matcher.matched == "感词"


def test_stop_that_another_always_forestalls_holds_nothing() -> None:
    assert StopMatcher(["baac", "aa"]).feed("xb") == "xb"
    assert StopMatcher(["c", "abc"]).feed("xab") == "xab"
    late = StopMatcher(["baac", "aa"], min_tokens=2)
    assert [late.feed("b"), late.feed("aa"), late.feed("c")] == ["", "", ""]
    assert late.matched == "baac"


def test_stop_that_stays_in_the_text_is_never_held() -> None:
    matcher = StopMatcher(["STOP"], include=True)
    assert [matcher.feed("ok ST"), matcher.feed("O"), matcher.feed("P tail")] == ["ok ST", "O", "P"]
    assert matcher.matched == "STOP"


def test_matcher_for_another_choice_begins_anew() -> None:
    first = StopMatcher(["STOP", "TO"], min_tokens=1)
    first.feed("STO")
    first.feed("P")
    assert first.matched == "STOP"
    second = first.fresh()
    assert (second.num_exempt_tokens, second.matched) == (1, None)
    assert [second.feed("STO"), second.feed("x"), second.feed("aTOb")] == ["", "STOx", "a"]
    assert first.matched == "STOP"


def test_match_is_exact_and_unfolded() -> None:
    for text in ("stop", "ＳＴＯＰ", "ST\u200bOP", "S T O P"):
        assert run(StopMatcher(["STOP"]), [text]) == text


def test_matcher_refuses_more_after_its_end() -> None:
    matched, flushed = StopMatcher(["a"]), StopMatcher(["a"])
    matched.feed("xa")
    flushed.flush()
    for matcher in (matched, flushed):
        with pytest.raises(RuntimeError, match="ended"):
            matcher.feed("x")


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_no_or_empty_stop_is_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        StopMatcher(stops)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from importing vLLM
def test_result_is_vllms_for_token_by_token_text() -> None:
    from vllm.v1.engine.detokenizer import check_stop_strings

    rng = random.Random(4)
    for _ in range(2000):
        text, stops = random_case(rng)
        pieces = [piece for piece in random_split(text, rng) if piece]
        for include in (False, True):
            output, found = "", None
            for piece in pieces:
                output += piece
                found = check_stop_strings(output, len(piece), stops, include)
                if found is not None:
                    output = output if found[1] == -1 else output[: found[1]]
                    break
            matcher = StopMatcher(stops, include)
            assert run(matcher, pieces) == output, (stops, pieces)
            assert matcher.matched == (found[0] if found else None)
