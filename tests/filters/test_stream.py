from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from filters.combined import CombinedFilter
from filters.hit import Hit
from filters.rules import MAX_HOLD_ID, Rule, RuleSet
from filters.scan import scan
from filters.stream import CompiledRules, StreamFilter
from tests.filters import oracle

ALL_ACTIONS = ("allow", "flag", "mask", "mask", "redact", "redact", "block")


def mask(*keywords: str, **options: object) -> Rule:
    return Rule("m-" + keywords[0], keywords, "mask", replacement="*", **options)  # type: ignore[arg-type]


def redact(replacement: str, *keywords: str) -> Rule:
    return Rule("r-" + keywords[0], keywords, "redact", replacement=replacement)


def block(*keywords: str, **options: object) -> Rule:
    return Rule("b-" + keywords[0], keywords, "block", **options)  # type: ignore[arg-type]


def compiled(*rules: Rule, **options: object) -> CompiledRules:
    return CompiledRules(RuleSet(rules), **options)  # type: ignore[arg-type]


def open_stream(*rules: Rule, **options: object) -> StreamFilter:
    stream = compiled(*rules, **options).stream()
    assert isinstance(stream, StreamFilter)
    return stream


def chunkings(text: str, rng: random.Random) -> Iterator[list[str]]:
    """Whole, one character at a time, all two-way splits, and a few random ones."""
    yield [text]
    yield list(text)
    for i in range(len(text) + 1):
        yield [text[:i], text[i:]]
    for _ in range(3):
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def run(stream: StreamFilter | CombinedFilter, chunks: Sequence[str]) -> str:
    return "".join([stream.feed(chunk) for chunk in chunks]) + stream.flush()


# The cases of the specification: `|` is a chunk border, the last output is that of the flush.
SPEC_CASES = [
    ([mask("敏感词")], "这是敏|感|词吗", ["这是", "", "***吗", ""]),
    ([mask("敏感词")], "这是敏|感|觉", ["这是", "", "敏感觉", ""]),
    ([mask("abcd"), mask("bc")], "xabc|e", ["x", "a**e", ""]),
    ([mask("abcd"), mask("cde")], "ab|cd|ef", ["", "**", "***f", ""]),
    ([mask("我的"), mask("我的世界")], "我|的世|界|。", ["", "", "****", "。", ""]),
    ([redact("#", "我的"), redact("##", "我的世界")], "我|的世|人", ["", "", "#世人", ""]),
    ([mask("ass", whole_word=True)], "a cl|ass| a|ss|.", ["a cl", "ass", " ", "", "***.", ""]),
    ([mask("ass", whole_word=True)], "as|s", ["", "", "***"]),
    ([block("黄片", allow=("三黄片",))], "三|黄|片真|好", ["三", "", "黄片真", "好", ""]),
    ([mask("fuck")], "ＦＵ|ｃＫ!", ["", "****!", ""]),
    ([mask("敏感")], "敏\u200b|感", ["", "***", ""]),
    ([redact("[X]", "abc")], "abc|abc", ["[X]", "[X]", ""]),
    ([mask("敏感词")], "敏|感", ["", "", "敏感"]),
]
SPEC_BLOCKS = [
    ([block("敏感词")], "abc敏|感词def", ["abc", ""], "b-敏感词"),
    ([block("黄片", allow=("三黄片",))], "看黄|片", ["看", ""], "b-黄片"),
    ([block("黄片", allow=("黄片子",))], "看黄|片|真|好", ["看", "", "", ""], "b-黄片"),
]


@pytest.mark.parametrize(("rules", "text", "outputs"), SPEC_CASES)
def test_feed_of_a_specified_case_gives_its_chunks(rules: list[Rule], text: str, outputs: list[str]) -> None:
    stream = open_stream(*rules)
    assert [stream.feed(chunk) for chunk in text.split("|")] + [stream.flush()] == outputs
    assert not stream.blocked
    for chunks in chunkings(text.replace("|", ""), random.Random(0)):
        assert run(open_stream(*rules), chunks) == "".join(outputs)


@pytest.mark.parametrize(("rules", "text", "outputs", "rule_id"), SPEC_BLOCKS)
def test_feed_of_a_blocked_case_stops_before_the_match(
    rules: list[Rule], text: str, outputs: list[str], rule_id: str
) -> None:
    stream = open_stream(*rules)
    assert [stream.feed(chunk) for chunk in text.split("|")] == outputs
    assert (stream.blocked, stream.blocked_by, stream.held) == (True, rule_id, 0)
    assert (stream.feed("more"), stream.flush(), stream.expire()) == ("", "", "")
    for chunks in chunkings(text.replace("|", ""), random.Random(0)):
        stream = open_stream(*rules)
        assert run(stream, chunks) == "".join(outputs)
        assert stream.released == len("".join(outputs))


def test_streams_of_one_set_of_rules_do_not_share_state() -> None:
    rules = compiled(mask("敏感词"))
    first, second = rules.stream(), rules.stream()
    assert first is not None
    assert second is not None
    fed = [first.feed("敏"), second.feed("感词"), first.feed("感词"), second.feed("!")]
    assert fed == ["", "感词", "***", "!"]


def test_feed_of_flagged_and_shadowed_words_reports_without_holding_or_changing() -> None:
    stream = open_stream(Rule("f", ("敏感词",), "flag"), Rule("s", ("感词",), "block", shadow=True))
    assert [stream.feed(char) for char in "敏感词吗"] == list("敏感词吗")
    assert stream.hits == [Hit("f", "flag", 0, 3), Hit("s", "block", 1, 3, shadow=True)]
    assert (stream.peak_held, stream.blocked) == (0, False)


def test_feed_of_an_expanding_character_covers_all_of_it() -> None:
    stream = open_stream(mask("kg"), mask("gx"))
    assert run(stream, ["5㎏", "x!"]) == "5**!"
    assert stream.hits == [Hit("m-kg", "mask", 1, 2), Hit("m-gx", "mask", 1, 3)]


def test_feed_of_an_allow_rule_excuses_matches_of_every_rule() -> None:
    rules = [block("ass"), mask("sin"), Rule("fine", ("assassin",), "allow", whole_word=True)]
    assert run(open_stream(*rules), ["an ass", "assin."]) == "an assassin."
    stream = open_stream(*rules)
    assert run(stream, ["an assass", "ins."]) == "an "
    assert stream.blocked_by == "b-ass"


def test_feed_of_overlapping_mask_and_redact_rewrites_as_the_first_says() -> None:
    assert run(open_stream(mask("abc"), redact("#", "cd")), ["abc", "de"]) == "****e"
    assert run(open_stream(mask("bcd"), redact("#", "abc")), ["abc", "de"]) == "#e"
    assert run(open_stream(mask("abc"), redact("#", "abc")), ["abc", "de"]) == "#de"


def test_feed_after_flush_is_refused() -> None:
    stream = open_stream(mask("abc"))
    stream.flush()
    with pytest.raises(RuntimeError, match="flushed"):
        stream.feed("x")
    with pytest.raises(RuntimeError, match="flushed"):
        stream.flush()


def test_stream_without_rules_is_none() -> None:
    assert CompiledRules(RuleSet()).stream() is None


def test_feed_of_endless_zero_width_characters_is_blocked_at_the_bound() -> None:
    stream = open_stream(mask("敏感"))
    assert stream.feed("x敏" + "\u200b" * 255) == "x"
    assert (stream.held, stream.blocked) == (256, False)
    assert stream.feed("\u200b") == ""
    assert stream.blocked_by == MAX_HOLD_ID
    assert stream.hits == [Hit(MAX_HOLD_ID, "block", 1, 258)]
    assert stream.peak_held == 256


def test_feed_past_a_releasing_bound_counts_a_leak_and_goes_on_matching() -> None:
    stream = open_stream(mask("abcd"), max_hold_chars=3, on_max_hold="release")
    assert [stream.feed(char) for char in "ab\u200b"] == ["", "", ""]
    assert stream.feed("\u200b") == "ab\u200b\u200b"
    assert stream.num_leaked == 4
    assert stream.feed("cd.") == "**."
    assert stream.hits == [Hit("m-abcd", "mask", 0, 6)]
    assert stream.feed("abcd.") == "****."


def test_feed_of_a_keyword_longer_than_the_bound_is_the_same_for_all_chunkings() -> None:
    for chunks in chunkings("xabcdef.", random.Random(0)):
        stream = open_stream(mask("abcdef"), max_hold_chars=4)
        assert run(stream, chunks) == "x"
        assert stream.hits == [Hit(MAX_HOLD_ID, "block", 1, 6)]


def test_expire_blocks_or_releases_as_configured() -> None:
    stream = open_stream(mask("abcd"))
    assert (stream.feed("xab"), stream.expire(), stream.blocked_by) == ("x", "", MAX_HOLD_ID)
    stream = open_stream(mask("abcd"), on_max_hold="release")
    assert (stream.feed("xab"), stream.expire(), stream.num_leaked, stream.held) == ("x", "ab", 2, 0)
    assert (stream.feed("c"), stream.feed("d."), stream.flush()) == ("", "**.", "")


def test_expire_of_a_finished_word_rewrites_it_once() -> None:
    stream = open_stream(mask("ass", whole_word=True), on_max_hold="release")
    assert (stream.feed("ass"), stream.expire(), stream.feed("."), stream.feed("ass.")) == (
        "",
        "***",
        ".",
        "***.",
    )
    assert [hit.start for hit in stream.hits] == [0, 4]


def test_expire_with_nothing_held_does_nothing() -> None:
    stream = open_stream(mask("abcd"))
    assert (stream.feed("x"), stream.expire(), stream.blocked) == ("x", "", False)


@pytest.mark.parametrize("options", [{"max_hold_chars": 0}, {"on_max_hold": "ignore"}])
def test_compiled_rules_with_a_bad_bound_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        compiled(mask("abc"), **options)


def test_feed_of_a_block_waits_for_what_may_end_before_it() -> None:
    rules = [block("cd", allow=("cdefg",)), block("ef"), mask("bcdef")]
    stream = open_stream(*rules)
    assert (stream.feed("abcdef"), stream.blocked) == ("a", False)
    assert (stream.feed("g"), stream.blocked_by) == ("***", "b-ef")
    assert stream.hits == [Hit("m-bcdef", "mask", 1, 6), Hit("b-ef", "block", 4, 6)]
    stream = open_stream(*rules)
    assert (stream.feed("abcdef") + stream.feed("x"), stream.blocked_by) == ("ab", "b-cd")
    assert stream.hits == [Hit("b-cd", "block", 2, 4)]


def test_feed_of_a_block_counts_the_word_that_ends_with_it() -> None:
    rules = [block("ss"), Rule("f", ("ass",), "flag", whole_word=True)]
    stream = open_stream(*rules)
    assert (stream.feed("an ass"), stream.held, stream.blocked) == ("an a", 2, False)
    assert (stream.feed("!"), stream.blocked) == ("", True)
    assert stream.hits == [Hit("f", "flag", 3, 6), Hit("b-ss", "block", 4, 6)]
    stream = open_stream(*rules)
    assert (stream.feed("an assx"), stream.hits) == ("an a", [Hit("b-ss", "block", 4, 6)])


def test_feed_rewrites_equal_spans_as_the_first_keyword_says() -> None:
    rules = [
        Rule("a", ("bc",), "redact", replacement="[A]", allow=("bcd",)),
        Rule("b", ("bc",), "redact", replacement="[B]"),
    ]
    for chunks in chunkings("abcx", random.Random(0)):
        assert run(open_stream(*rules), chunks) == "a[A]x"


def test_abandon_lets_go_what_only_rules_that_fail_open_hold() -> None:
    stream = open_stream(mask("abcde", fail="open"), mask("cdx"))
    assert (stream.feed("zabcd"), stream.held) == ("z", 4)
    assert (stream.abandon(), stream.held, stream.released) == ("ab", 2, 3)
    assert (stream.abandon(), stream.hits) == ("", [])
    with pytest.raises(RuntimeError, match="flushed"):
        stream.feed("x")


def test_abandon_without_rules_that_fail_open_lets_nothing_go() -> None:
    stream = open_stream(mask("abcd"))
    assert (stream.feed("zabc"), stream.abandon(), stream.held) == ("z", "", 3)


def test_abandon_rewrites_what_is_certain_and_leaves_open_matches_alone() -> None:
    stream = open_stream(block("ab", allow=("abcde",), fail="open"), mask("abc"), mask("yz"))
    assert (stream.feed("yzabc"), stream.held) == ("**", 3)
    assert (stream.abandon(), stream.held, stream.blocked) == ("***", 0, False)
    stream = open_stream(mask("ab", allow=("abcde",), fail="open"), mask("ass", whole_word=True, fail="open"))
    assert (stream.feed("ab"), stream.abandon(), stream.hits) == ("", "ab", [])
    stream = open_stream(mask("ass", whole_word=True, fail="open"))
    assert (stream.feed("ass"), stream.abandon()) == ("", "ass")


def test_completes_tells_what_an_alternative_would_complete() -> None:
    rules = compiled(mask("敏感词"), Rule("f", ("敏感",), "flag"), mask("ass", whole_word=True))
    assert rules.completes("他说敏感", "词")
    assert rules.completes("他说敏", "感词吗")
    assert not rules.completes("他说敏", "感")  # only reported
    assert not rules.completes("敏感词", "吗")  # it was there before
    assert rules.completes("an a", "ss")
    assert not rules.completes("a cla", "ss")
    assert compiled(Rule("p", (), "redact", pii="phone_cn")).completes("tel 138", "12345678")


def test_feed_of_traditional_characters_matches_simplified_keywords() -> None:
    for chunks in chunkings("他們發動戰爭。", random.Random(0)):
        assert run(open_stream(mask("发动战争")), chunks) == "他們****。"
    assert run(open_stream(mask("發動")), ["发", "动髮動"]) == "****"


def check_against_oracle(rules: RuleSet, text: str, rng: random.Random) -> None:
    expected = oracle.expect(text, rules.rules)
    shared = CompiledRules(rules)
    for chunks in chunkings(text, rng):
        stream = shared.stream()
        assert stream is not None
        context = (rules.rules, chunks)
        emitted, read = "", ""
        for chunk in chunks:
            emitted += stream.feed(chunk)
            read += chunk
            assert expected.output.startswith(emitted), context
            if not stream.blocked:
                assert stream.held == oracle.num_held(read, rules.rules), context
                assert stream.released + stream.held == len(read), context
        emitted += stream.flush()
        assert emitted == expected.output, context
        assert tuple(stream.hits) == scan(text, shared).hits, context
        assert set(stream.hits) == expected.hits, context
        assert len(stream.hits) == len(set(stream.hits)) or set(text) & oracle.EXPANDING, context
        assert stream.blocked == expected.blocked, context


def check_bounded(rules: RuleSet, text: str, rng: random.Random) -> None:
    """With a small bound every chunking still gives the same, and never holds more."""
    bound = rng.randint(1, 4)
    shared = CompiledRules(rules, bound, rng.choice(["block", "release"]))
    outcomes = set()
    for chunks in chunkings(text, rng):
        stream = shared.stream()
        assert stream is not None
        output = run(stream, chunks)
        assert stream.peak_held <= bound, (rules.rules, chunks)
        outcomes.add((output, stream.blocked_by, stream.num_leaked, tuple(stream.hits)))
    assert len(outcomes) == 1, (rules.rules, text, outcomes)


def check_clean(rules: RuleSet, text: str) -> None:
    """Nothing that is to be rewritten or blocked is left in the output."""
    shared = CompiledRules(rules)
    stream = shared.stream()
    assert stream is not None
    output = run(stream, [text])
    left = [m for m in oracle.final_matches(oracle.Text(output), rules.rules) if m.rule.is_active]
    assert not left, (rules.rules, text, output)


def random_checks(seed: int, num_cases: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_cases):
        rules, text = oracle.random_case(rng, ALL_ACTIONS)
        check_against_oracle(rules, text, rng)
        check_bounded(rules, text, rng)
        rules, text = oracle.random_case(rng, ("mask", "redact", "block"))
        plain = RuleSet(tuple(Rule(r.id, r.match, r.action, replacement=r.replacement) for r in rules.rules))
        check_clean(plain, text)


def test_feed_of_random_rules_equals_brute_force() -> None:
    random_checks(seed=1, num_cases=120)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 104))
def test_feed_of_many_random_rules_equals_brute_force(seed: int) -> None:
    random_checks(seed, num_cases=5_000)
