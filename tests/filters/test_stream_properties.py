"""Streams of random rules and texts against brute force. Each property can fail: the last tests break the
filter in memory and want to see it noticed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from filters import held_text, keyword_stream
from filters.combined import CombinedFilter
from filters.held_text import HeldText
from filters.hit import Hit
from filters.json_values import JsonValueFilter
from filters.patterns import FoldedPatterns
from filters.prefilter import Prefilter
from filters.rules import MAX_HOLD_ID, Rule, RuleSet
from filters.scan import scan
from filters.settling import Settling
from filters.spans import Emitter
from filters.stream import CompiledRules, StreamFilter
from tests.filters import whole_text_oracle
from tests.filters.streaming_oracle import Oracle, View, is_word

MASK, REDACTION = "■", "⟦{}⟧"  # in no keyword and no text

# What keywords and texts are made of. A piece counts as often as it stands here.
THEMES: dict[str, tuple[str, ...]] = {
    "two letters": ("a", "b"),
    "words": ("a", "b", " ", "a", "b", "A"),
    "cases": ("a", "A", "1", "Ａ", "１", "b"),
    "chinese": ("敏", "感", "词", "敏感", "\u200b", "\ufe0f"),
    "scripts": ("a", "敏", "感", "ab", " "),
    "emoji": ("😀", "👨\u200d👩\u200d👧", "👨", "👩", "❤\ufe0f", "🏽", "a"),
    "expanding": ("ß", "s", "ss", "ﬃ", "f", "i", "fi", "ﬁ", " ", "a"),
    "long expansion": ("ﷺ", "صلى", "م ", "ص", "الله", " "),
    "traditional": ("战", "戰", "发", "發", "髮", "詞", "词", "a"),
    "full width": ("ＦＵ", "ｃ", "Ｋ", "f", "u", "c", "k", "F", "\u200b"),
    "letters": ("é", "É", "e", "ñ", "Ｂ", "𝐚", "b", "a", ".", " "),
    "symbols": ("a", "b", ".", "*", "!", " "),
}  # fmt: skip
ACTIONS = ("allow", "flag", "mask", "mask", "redact", "redact", "block")


PERSONAL = whole_text_oracle.SAMPLES


@dataclass(frozen=True)
class Case:
    rules: tuple[Rule, ...]
    text: str


def joined(rng: random.Random, pieces: Sequence[str], most: int) -> str:
    return "".join(rng.choices(pieces, k=rng.randint(0, most)))


def random_keyword(rng: random.Random, pieces: Sequence[str], folding: Rule) -> str:
    while True:
        keyword = joined(rng, pieces, 4)
        view = View(keyword, folding)
        is_latin = folding.skip_symbols and all(map(is_word, view.chars))
        if 2 <= view.size <= 40 and not is_latin:
            return keyword


def random_rule(rng: random.Random, pieces: Sequence[str], number: int, options: Sequence[str]) -> Rule:
    action = rng.choice(ACTIONS)
    folding = Rule("", (), "flag", **dict.fromkeys(options, True))  # type: ignore[arg-type]
    keywords = tuple(random_keyword(rng, pieces, folding) for _ in range(rng.randint(1, 3)))
    allow = []
    if action != "allow" and rng.random() < 0.35:
        allow = [joined(rng, pieces, 2) + rng.choice(keywords) + joined(rng, pieces, 2)]
    return replace(
        folding,
        id=f"r{number}",
        match=keywords,
        action=action,
        whole_word=rng.random() < 0.3 and not folding.skip_symbols,
        allow=tuple(allow),
        replacement={"mask": MASK, "redact": REDACTION.format(number)}.get(action, ""),
        shadow=action != "allow" and rng.random() < 0.1,
        fail=rng.choice(("closed", "closed", "open")),
    )


def random_case(rng: random.Random) -> Case:
    """Keyword rules under the default folding, and a text of their pieces and some of their keywords."""
    pieces = THEMES[rng.choice(list(THEMES))]
    rules = tuple(random_rule(rng, pieces, number, ()) for number in range(rng.randint(1, 6)))
    wanted = [text for rule in rules for text in (*rule.match, *rule.allow)]
    parts = [rng.choice(wanted if rng.random() < 0.2 else pieces) for _ in range(rng.randint(0, 10))]
    return Case(rules, "".join(parts)[:24])


def random_mixed_case(rng: random.Random) -> Case:
    """Personal data, the foldings that rules ask for, and keywords, together."""
    rules, text = whole_text_oracle.random_case(rng, 8)
    return Case(rules, text[:48])


def without_blocks(case: Case) -> list[Rule]:
    """The rules, with masks instead of blocks."""
    return [
        replace(rule, action="mask", replacement=MASK) if rule.action == "block" else rule
        for rule in case.rules
    ]


def chunkings(text: str, rng: random.Random) -> Iterator[list[str]]:
    """All two-way splits, one character at a time, and random ones with empty chunks among them."""
    for at in range(len(text)):
        yield [text[:at], text[at:]]
    yield list(text)
    for _ in range(2):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 5)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.fixture(autouse=True)
def _without_prefilter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves scans of whole texts, which have tests of their own, and takes 4 ms to make."""
    monkeypatch.setattr(Prefilter, "is_for", staticmethod(lambda texts: False))


def opened(rules: CompiledRules) -> StreamFilter | CombinedFilter:
    stream = rules.stream()
    assert stream is not None
    return stream


class Outcome(NamedTuple):
    output: str
    hits: list[Hit]
    blocked: bool
    blocked_by: str | None
    num_leaked: int


def outcome(stream: StreamFilter | CombinedFilter, chunks: Sequence[str]) -> Outcome:
    output = "".join([stream.feed(chunk) for chunk in chunks]) + stream.flush()
    return Outcome(output, stream.hits, stream.blocked, stream.blocked_by, stream.num_leaked)


def is_same(output: str, expected: str, is_tied: bool) -> bool:
    """Whether they are equal. Which of two rules that redact the same is named, is not asked here."""
    if is_tied:
        output, expected = (re.sub("⟦.⟧", "⟦⟧", text) for text in (output, expected))
    return output == expected


def check(case: Case, rng: random.Random) -> None:
    """All properties but those of bounds."""
    judge = Oracle(case.rules)
    compiled = CompiledRules(RuleSet(case.rules))
    check_character_by_character(case, judge, opened(compiled))
    whole = outcome(opened(compiled), [case.text])
    for chunks in chunkings(case.text, rng):
        assert outcome(opened(compiled), chunks) == whole, ("chunks matter", case, chunks)
    check_futures(case, compiled, rng)
    check_clean(case, judge, whole.output)
    check_scan(case, compiled, whole)


def check_futures(case: Case, compiled: CompiledRules, rng: random.Random) -> None:
    """What has left fits every continuation."""
    wanted = [text for rule in case.rules for text in (*rule.match, *rule.allow, *PERSONAL.get(rule.pii, ()))]
    read, sample = case.text[: rng.randint(0, len(case.text))], rng.choice(wanted)
    more = sample[rng.randint(0, len(sample)) :] + rng.choice(("", ",", "a", "1"))
    emitted = opened(compiled).feed(read)
    later = outcome(opened(compiled), [read + more])
    assert later.output.startswith(emitted), ("future", case, read, more)


def check_character_by_character(case: Case, judge: Oracle, stream: StreamFilter | CombinedFilter) -> None:
    """After every character: the hold, and what has left. At the end everything."""
    final, text = judge.conclude(case.text), case.text
    emitted = ""
    for size, char in enumerate(text, 1):
        emitted += stream.feed(char)
        if stream.blocked:
            break
        check_hold(judge, text[:size], stream.held)
        assert stream.released == size - stream.held, ("released", case, text[:size])
        so_far = final.output(text, stream.released)
        assert is_same(emitted, so_far, final.has_tie), ("not a prefix", case, text[:size])
    emitted += stream.flush()
    assert stream.blocked == final.is_blocked, ("verdict", case)
    assert is_same(emitted, final.output(text, len(text)), final.has_tie), ("output", case)
    assert set(stream.hits) == final.hits, ("hits", case)
    assert [hit.end for hit in stream.hits] == sorted([hit.end for hit in stream.hits]), ("order", case)


def check_hold(judge: Oracle, read: str, held: int) -> None:
    least = judge.num_held(read)
    if judge.has_pii:
        assert least <= held <= judge.num_held_at_most(read), ("hold", judge.rules, read)
    elif judge.has_runs_of_phrases:
        assert least <= held <= judge.num_held(read, runs_end=True), ("hold", judge.rules, read)
    else:
        assert held == least, ("hold", judge.rules, read)


def check_clean(case: Case, judge: Oracle, output: str) -> None:
    """No keyword is left outside of phrases: looked for in the parts of the output that are not rewritten."""
    if judge.has_pii or not all(rule.replacement in ("", MASK) for rule in case.rules):
        return
    text = case.text[: len(output)]  # masks are as long as what they stand for
    changed = [char for char, left in zip(text, output, strict=True) if left not in (char, MASK)]
    assert not changed, ("changed", case)
    for match in judge.conclude(case.text).counted:
        if match.rule.is_active and match.raw_end <= len(output):
            assert set(output[match.raw_start : match.raw_end]) == {MASK}, ("left over", case)


def check_scan(case: Case, compiled: CompiledRules, whole: Outcome) -> None:
    result = scan(case.text, compiled)
    assert result.blocked == whole.blocked, ("scan", case)
    assert list(result.hits) == whole.hits, ("scan", case)
    assert result.text is None or whole.output == result.text, ("scan", case)


def check_abandon(case: Case, rng: random.Random) -> None:
    """What breaks off leaves as far as the rules that fail closed let it; nothing is decided for that."""
    rules = without_blocks(case)
    judge = Oracle(rules)
    closed = Oracle([rule for rule in rules if rule.fail == "closed" or rule.action == "allow"])
    compiled = CompiledRules(RuleSet(tuple(rules)))
    for size in {rng.randint(0, len(case.text)), len(case.text)}:
        stream, text = opened(compiled), case.text[:size]
        output = stream.feed(text) + stream.abandon()
        expected = judge.break_off(text)
        assert stream.held == closed.num_held(text), ("held", rules, text)
        assert is_same(output, expected.output(text, size - stream.held), expected.has_tie), (rules, text)
        assert set(stream.hits) == expected.hits, ("hits", rules, text)


def random_checks(seed: int, num_cases: int, make: Callable[[random.Random], Case]) -> None:
    rng = random.Random(seed)
    for _ in range(num_cases):
        case = make(rng)
        check(case, rng)
        if not any(rule.pii or rule.repeats for rule in case.rules):
            check_abandon(case, rng)


def check_bounds(case: Case, rng: random.Random) -> None:
    """No more is held than allowed; a bound that is never reached changes nothing; nor do chunks."""
    bound, policy = rng.randint(1, 6), rng.choice(("block", "release"))
    judge, free = Oracle(case.rules), outcome(opened(CompiledRules(RuleSet(case.rules))), [case.text])
    compiled = CompiledRules(RuleSet(case.rules), bound, policy)
    whole = outcome(opened(compiled), [case.text])
    for chunks in chunkings(case.text, rng):
        stream = opened(compiled)
        assert outcome(stream, chunks) == whole, ("chunks matter", case, bound, chunks)
        assert stream.peak_held <= bound, ("bound", case, bound, chunks)
    over = first_over(case.text, CompiledRules(RuleSet(case.rules)), judge, bound)
    if over is None:
        assert whole == free, ("bound", case, bound)
    elif policy == "block":
        start = over - judge.num_held(case.text[:over])
        assert whole.blocked_by == MAX_HOLD_ID, ("bound", case, bound)
        assert whole.hits[-1] == Hit(MAX_HOLD_ID, "block", start, over), ("bound", case, bound)
        end = judge.conclude(case.text[:over])
        assert is_same(whole.output, end.output(case.text, start), end.has_tie), ("bound", case, bound)
    else:
        assert whole.blocked_by != MAX_HOLD_ID, ("bound", case, bound)


def first_over(text: str, rules: CompiledRules, judge: Oracle, bound: int) -> int | None:
    """After how many characters more is to be held than allowed, if the stream without a bound lives on."""
    stream = opened(rules)
    for size in range(1, len(text) + 1):
        stream.feed(text[size - 1])
        if stream.blocked:
            return None
        if judge.num_held(text[:size]) > bound:
            return size
    return None


def random_bounds(seed: int, num_cases: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_cases):
        check_bounds(random_case(rng), rng)


def check_hold_by_trying(seed: int, num_cases: int, make: Callable[[random.Random], Case]) -> None:
    rng = random.Random(seed)
    for _ in range(num_cases):
        case = make(rng)
        if any(rule.pii for rule in case.rules):
            continue
        text = case.text[: rng.randint(1, len(case.text) + 1)]
        judge = Oracle(case.rules)
        if not judge.conclude(text).is_blocked:
            assert len(judge.outputs_by_trying(text)) == 1, (case, text)
        # A block that may come has a say in what counts before it, and no character has a fate of its own.
        masked = Oracle(without_blocks(case))
        assert masked.num_held(text) == masked.held_by_trying(text), (case, text)


def test_stream_of_keywords_equals_brute_force() -> None:
    random_checks(1, 700, random_case)


def test_stream_of_everything_equals_brute_force() -> None:
    random_checks(2, 300, random_mixed_case)


def test_stream_with_a_bound_holds_no_more() -> None:
    random_bounds(3, 250)


def test_hold_is_what_trying_all_continuations_gives() -> None:
    check_hold_by_trying(4, 80, random_case)
    check_hold_by_trying(5, 60, random_mixed_case)


def random_value(rng: random.Random, pieces: Sequence[str], depth: int) -> object:
    """A JSON value of lists, objects with one key, strings and null."""
    kind = rng.random()
    if depth and kind < 0.3:
        return [random_value(rng, pieces, depth - 1) for _ in range(rng.randint(0, 3))]
    if depth and kind < 0.6:
        return {joined(rng, pieces, 3): random_value(rng, pieces, depth - 1)}
    return None if kind > 0.95 else joined(rng, pieces, 5)


def rewritten_value(judge: Oracle, value: object) -> object:
    if isinstance(value, str):
        return judge.conclude(value).output(value, len(value))
    if isinstance(value, list):
        return [rewritten_value(judge, each) for each in value]
    if isinstance(value, dict):
        return {rewritten_value(judge, key): rewritten_value(judge, each) for key, each in value.items()}
    return value


def check_json(rng: random.Random) -> None:
    """Every string of a JSON text is a text of its own, whatever escapes it is written with."""
    rules, theme = without_blocks(random_case(rng)), rng.choice(list(THEMES))
    rules.append(Rule("own", (random_keyword(rng, THEMES[theme], rules[0]),), "mask", replacement=MASK))
    judge, compiled = Oracle(rules), CompiledRules(RuleSet(tuple(rules)))
    value = random_value(rng, (*THEMES[theme], '"', "\\", "\n"), 2)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
    expected = rewritten_value(judge, value)
    outputs = set()
    for chunks in ([text], *chunkings(text, rng)):
        stream = JsonValueFilter(compiled.stream)
        output = "".join([stream.feed(chunk) for chunk in chunks]) + stream.flush()
        outputs.add(output)
    assert len(outputs) == 1, ("chunks matter", rules, text)
    if not any(judge.conclude(each).has_tie for each in strings_of(value)):
        assert json.loads(output) == expected, ("output", rules, text)


def strings_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value if isinstance(value, (list, dict)) else ():
        yield from strings_of(each)
    for each in value.values() if isinstance(value, dict) else ():
        yield from strings_of(each)


def random_json(seed: int, num_cases: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_cases):
        check_json(rng)


def test_stream_of_json_equals_brute_force_of_each_string() -> None:
    random_json(8, 80)


def check_long(seed: int, num_cases: int) -> None:
    """Streams forget what is behind them; what they find is what a scan finds."""
    rng = random.Random(seed)
    for _ in range(num_cases):
        rules, text = whole_text_oracle.random_case(rng, 400)
        rules = tuple(replace(rule, action=rule.action.replace("block", "flag")) for rule in rules)
        compiled = CompiledRules(RuleSet(rules), max_hold_chars=10_000)
        expected = scan(text, compiled)
        for size in (1, 7, 300, len(text) + 1):
            stream = opened(compiled)
            chunks = [text[at : at + size] for at in range(0, len(text), size)]
            output = "".join([stream.feed(chunk) for chunk in chunks]) + stream.flush()
            assert output == expected.text, ("output", rules, text, size)
            assert len(stream.hits) == expected.num_hits, ("hits", rules, text, size)
            assert tuple(stream.hits[: len(expected.hits)]) == expected.hits, ("hits", rules, text, size)


def test_stream_of_long_texts_equals_the_scan() -> None:
    check_long(7, 12)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [11, 12])
def test_stream_of_very_many_random_rules_equals_brute_force(seed: int) -> None:
    random_checks(seed, 16_000, random_case)
    random_checks(seed, 4_500, random_mixed_case)
    random_bounds(seed, 9_000)
    check_hold_by_trying(seed, 300, random_case)
    check_hold_by_trying(seed, 300, random_mixed_case)
    random_json(seed, 500)
    check_long(seed, 50)


# Does it notice? Each of these breaks the filter in memory.


def hold_one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    make_ready = FoldedPatterns.make_ready

    def make_shallow(self: FoldedPatterns) -> None:
        make_ready(self)
        self.automaton.live = [max(depth - 1, 0) for depth in self.automaton.live]

    monkeypatch.setattr(FoldedPatterns, "make_ready", make_shallow)


def forget_phrases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settling, "_is_excused", lambda *_: False)


def forget_phrases_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settling, "_may_be_excused", lambda *_: False)


def merge_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Merging(Emitter):
        def add(self, start: int, end: int, rule: Rule, rank: tuple[int, ...] = ()) -> None:
            ends = self.__dict__.setdefault("ends", set())
            super().add(start - (start in ends), end, rule, rank)
            ends.add(end)

    monkeypatch.setattr(held_text, "Emitter", Merging)


def end_words_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyword_stream, "is_word_char", lambda char: False)


def decide_at_the_end_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = StreamFilter.feed

    def decide_and_feed(self: StreamFilter, text: str) -> str:
        if self.held:
            self._catch_up()
            self._finish()
        return feed(self, text)

    monkeypatch.setattr(StreamFilter, "feed", decide_and_feed)


def block_late(monkeypatch: pytest.MonkeyPatch) -> None:
    block = HeldText._block
    monkeypatch.setattr(HeldText, "_block", lambda self, rule_id, start: block(self, rule_id, start + 1))


MUTATIONS = [
    (hold_one_less, {"hold"}),
    (forget_phrases, {"hits"}),
    (forget_phrases_under_way, {"hold"}),
    (merge_neighbours, {"chunks matter"}),
    (end_words_anywhere, {"hits"}),
    (decide_at_the_end_of_chunks, {"not a prefix"}),
    (block_late, {"output"}),
]


def complaints(num_cases: int) -> set[str]:
    """The properties that do not hold."""
    rng = random.Random(6)
    found = set()
    for _ in range(num_cases):
        try:
            check(random_case(rng), rng)
        except AssertionError as error:
            found.add(str(error).split("'")[1])
    return found


@pytest.mark.parametrize(("mutate", "expected"), MUTATIONS)
def test_oracle_notices_a_broken_filter(
    mutate: Callable[[pytest.MonkeyPatch], None], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    found = complaints(60)
    assert expected <= found, found
