from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from filters.combined import CombinedFilter
from filters.hit import Hit
from filters.rule_folding import FOLDINGS, Folding, PieceFolder
from filters.rules import MAX_HOLD_ID, Rule, RuleSet
from filters.scan import scan
from filters.stream import CompiledRules
from tests.filters import oracle, whole_text_oracle

PHONE = Rule("phone", (), "redact", replacement="[PHONE]", pii="phone_cn")
CARD = Rule("card", (), "redact", replacement="[CARD]", pii="card")
MAIL = Rule("mail", (), "redact", replacement="[MAIL]", pii="email")


def mask(*keywords: str, **options: object) -> Rule:
    return Rule("m-" + keywords[0], keywords, "mask", replacement="*", **options)  # type: ignore[arg-type]


def open_stream(*rules: Rule, **options: object) -> CombinedFilter:
    stream = CompiledRules(RuleSet(rules), **options).stream()  # type: ignore[arg-type]
    assert isinstance(stream, CombinedFilter)
    return stream


def fed(stream: CombinedFilter, *chunks: str) -> list[str]:
    return [stream.feed(chunk) for chunk in chunks]


def chunkings(text: str, rng: random.Random) -> Iterator[list[str]]:
    """Whole, one character at a time, all two-way splits, and a few random ones."""
    yield [text]
    yield list(text)
    for i in range(len(text) + 1):
        yield [text[:i], text[i:]]
    for _ in range(3):
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_feed_finds_personal_data_without_letting_a_digit_go_early() -> None:
    stream = open_stream(PHONE, CARD)
    assert fed(stream, "tel 138", "1234", "5678 .") == ["tel ", "", ""]
    assert stream.feed(" ok") == "[PHONE] . ok"
    assert stream.hits == [Hit("phone", "redact", 4, 15)]
    stream = open_stream(PHONE, CARD)
    assert "".join(fed(stream, *"no 4111111111111111!")) == "no [CARD]!"


def test_feed_holds_the_run_that_may_be_an_address() -> None:
    stream = open_stream(MAIL, mask("bob"))
    assert fed(stream, "ask bo", "b", "@b.c", "om.", " ok") == ["ask ", "", "", "", "[MAIL]. "]
    assert stream.hits == [Hit("m-bob", "mask", 4, 7), Hit("mail", "redact", 4, 13)]


@pytest.mark.parametrize(
    ("rule", "chunks", "outputs"),
    [
        (
            mask("傻帽", skip_symbols=True),
            ["你傻@", " @", "帽，", "傻 ", "x"],
            ["你", "", "*****，", "", "傻 x"],
        ),
        (mask("fuck", repeats=True), ["fu", "uck", "k", "!"], ["", "", "", "******!"]),
        (mask("110", digits=True), ["拨一", "壹", "〇。"], ["拨", "", "***。"]),
        (mask("ass", leet=True, whole_word=True), ["a @", "5$", " 455x"], ["a ", "", "*** 455x"]),
    ],
)
def test_feed_of_each_folding_holds_what_may_match(rule: Rule, chunks: list[str], outputs: list[str]) -> None:
    assert fed(open_stream(rule), *chunks) == outputs


def test_feed_of_a_block_waits_for_a_track_that_may_find_one_before_it() -> None:
    rules = [Rule("b", ("5678 x",), "block"), PHONE]
    stream = open_stream(*rules)
    assert (fed(stream, "a 1381234", "5678 ", "x"), stream.blocked_by) == (["a ", "", ""], None)
    assert (stream.feed("!"), stream.blocked_by) == ("[PHONE]", "b")
    assert [hit.rule_id for hit in stream.hits] == ["phone", "b"]
    assert (stream.feed("more"), stream.flush(), stream.released) == ("", "", 9)


def test_feed_excuses_by_phrases_of_other_foldings() -> None:
    fine = Rule("fine", ("傻 帽子店",), "allow", skip_symbols=True)
    assert fed(open_stream(mask("傻帽"), fine), "傻帽", "子-店") == ["", "傻帽子-店"]
    assert fed(open_stream(mask("傻帽"), fine), "傻帽", "子人") == ["", "**子人"]
    mail = Rule("mail", (), "redact", pii="email", replacement="#", allow=("help@a.com",))
    assert fed(open_stream(mail), "help@a.com", ", me@a.com,") == ["", "help@a.com, #,"]


def test_stream_of_flags_holds_and_changes_nothing() -> None:
    stream = open_stream(
        Rule("p", (), "flag", pii="email"), Rule("s", ("傻帽",), "block", shadow=True, repeats=True)
    )
    assert fed(stream, *"傻傻帽 a@b.com ") == list("傻傻帽 a@b.com ")
    assert stream.hits == [Hit("s", "block", 0, 3, shadow=True), Hit("p", "flag", 4, 11)]
    assert (stream.is_active, stream.peak_held) == (False, 0)


def test_bound_blocks_at_the_same_character_for_every_chunking() -> None:
    text = "x" + "aaaaaaaa" + "sy"
    for chunks in chunkings(text, random.Random(0)):
        stream = open_stream(mask("as", repeats=True), max_hold_chars=5)
        assert ("".join(fed(stream, *chunks)), stream.blocked_by, stream.held) == ("x", MAX_HOLD_ID, 0)
        assert stream.hits == [Hit(MAX_HOLD_ID, "block", 1, 7)]
        assert stream.peak_held <= 5


def test_bound_that_releases_counts_a_leak_and_goes_on_matching() -> None:
    for chunks in chunkings("x" + "a" * 8 + "sy", random.Random(0)):
        stream = open_stream(mask("as", repeats=True), max_hold_chars=5, on_max_hold="release")
        assert "".join(fed(stream, *chunks)) == "xaaaaaa***y"
        assert (stream.num_leaked, stream.hits) == (6, [Hit("m-as", "mask", 1, 10)])
    stream = open_stream(PHONE, max_hold_chars=40, on_max_hold="release")
    assert "".join(fed(stream, "tel 13812345678" + "\u200b" * 60, "!")) == "tel [PHONE]" + "\u200b" * 60 + "!"


def test_expire_blocks_or_decides_as_at_the_end() -> None:
    stream = open_stream(PHONE)
    assert (stream.feed("tel 138"), stream.expire(), stream.blocked_by) == ("tel ", "", MAX_HOLD_ID)
    stream = open_stream(PHONE, mask("ab", repeats=True), on_max_hold="release")
    assert (stream.feed("tel 13812345678"), stream.expire(), stream.num_leaked) == ("tel ", "[PHONE]", 11)
    assert (stream.feed(" aab"), stream.expire(), stream.feed("b.")) == (" ", "***", "b.")
    assert (stream.expire(), stream.flush()) == ("", "")
    with pytest.raises(RuntimeError, match="flushed"):
        stream.feed("x")


def test_abandon_lets_go_what_only_rules_that_fail_open_hold() -> None:
    mail = Rule("mail", (), "redact", pii="email", replacement="#", fail="open")
    stream = open_stream(mail, mask("傻帽子", skip_symbols=True), mask("bob", fail="open"))
    assert (stream.feed("说 bo"), stream.abandon(), stream.held) == ("说 ", "bo", 0)
    stream = open_stream(mail, mask("ybobx", repeats=True))
    assert (stream.feed("a.yybo"), stream.held) == ("", 6)
    assert (stream.abandon(), stream.held, stream.released) == ("a.", 4, 2)
    assert stream.abandon() == ""


def test_word_after_a_pause_is_found() -> None:
    stream = open_stream(MAIL, mask("ass", whole_word=True))
    assert (stream.feed("an ab"), stream.pause()) == ("an ", "ab")
    assert fed(stream, "c", "d", " ass", ",") == ["", "", "cd ", "***,"]
    assert stream.released == 12
    stream = open_stream(MAIL, mask("ass", whole_word=True))
    assert (stream.feed("x ass"), stream.pause(), stream.feed("\u200b"), stream.feed(". ")) == (
        "x ",
        "***",
        "",
        "\u200b. ",
    )
    assert [(hit.start, hit.end) for hit in stream.hits] == [(2, 5)]


def test_feed_counts_raw_characters_of_a_keyword_that_has_begun() -> None:
    stream = open_stream(PHONE, mask("敏感词"))
    assert fed(stream, "说敏\u200b", "感", "词", "敏\u200b", "感", "人") == [
        "说",
        "",
        "****",
        "",
        "",
        "敏\u200b感人",
    ]


def test_feed_of_ordinary_tokens_reads_nothing_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_stream(MAIL, PHONE, mask("bob", "敏感词", "lazy dogs"))
    monkeypatch.setattr(CombinedFilter, "_read_exactly", None)
    tokens = ["The", " quick", " brown", "-ish", " fox", ", the", " lazy", " dog", "。我们", "敏", "感", "的"]
    assert "".join(fed(stream, *tokens)) == "".join(tokens)
    assert (stream.held, stream.peak_held) == (0, len(" lazy dog"))


def check_long(seed: int, num_cases: int) -> None:
    """Ordinary text for a long time, token by token, and now and then something to find."""
    rng = random.Random(seed)
    rules = [PHONE, CARD, MAIL, mask("bob", allow=("bob@b.com",)), mask("lazy dog", whole_word=True)]
    plain = [
        "The",
        " quick",
        "ing",
        ".",
        "-",
        " lazy",
        " dogs",
        "我们",
        "敏感",
        "，",
        "Ａ",
        "é",
        "…",
        " a",
        "x" * 40,
    ]
    found = ["bob", "bob@b.com", "13812345678", "4111 1111 1111 1111", " lazy dog", "1", "@", "\u200b", "86 "]
    for _ in range(num_cases):
        rules_set = RuleSet(tuple(rng.sample(rules, rng.randint(1, len(rules)))))
        tokens = [rng.choice(found if rng.random() < 0.01 else plain) for _ in range(1_500)]
        compiled = CompiledRules(rules_set)
        expected = scan("".join(tokens), compiled)
        stream = compiled.stream()
        assert stream is not None
        assert "".join(map(stream.feed, tokens)) + stream.flush() == expected.text
        assert tuple(stream.hits) == expected.hits


def test_feed_of_long_ordinary_text_equals_the_scan() -> None:
    check_long(seed=3, num_cases=12)


class Expected:
    """What a stream must give, made of what `scan` finds."""

    def __init__(self, text: str, rules: RuleSet, compiled: CompiledRules) -> None:
        result = scan(text, compiled)
        self.hits, self.blocked_by = result.hits, result.blocked_by
        self.output = result.text if result.text is not None else self._before_block(text, rules)

    def _before_block(self, text: str, rules: RuleSet) -> str:
        by_id = {rule.id: rule for rule in rules.rules}
        matches = [(hit.start, hit.end, by_id[hit.rule_id]) for hit in self.hits]
        last_end = max(hit.end for hit in self.hits)
        cut = min(start for start, end, rule in matches if rule.blocks and end == last_end)
        return oracle.rewrite(text, [match for match in matches if match[2].rewrites], cut)


def check_equals_scan(seed: int, num_cases: int, num_pieces: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_cases):
        rules = RuleSet(())
        while not len(rules):
            drawn, text = whole_text_oracle.random_case(rng, num_pieces)
            rules = RuleSet(drawn)
        check_chunkings(rules, text, rng)


def check_chunkings(rules: RuleSet, text: str, rng: random.Random) -> None:
    compiled = CompiledRules(rules)
    expected = Expected(text, rules, compiled)
    for chunks in chunkings(text, rng):
        stream = compiled.stream()
        if stream is None:
            return
        context = (rules.rules, chunks)
        emitted = ""
        for chunk in chunks:
            emitted += stream.feed(chunk)
            assert expected.output.startswith(emitted), context
        emitted += "" if stream.blocked else stream.flush()
        assert (emitted, tuple(stream.hits), stream.blocked_by) == (
            expected.output,
            expected.hits,
            expected.blocked_by,
        ), context


def check_bounded(seed: int, num_cases: int) -> None:
    """With a small bound every chunking gives the same, and never holds more."""
    rng = random.Random(seed)
    for _ in range(num_cases):
        drawn, text = whole_text_oracle.random_case(rng, 5)
        bound, policy = rng.randint(1, 6), rng.choice(["block", "release"])
        compiled = CompiledRules(RuleSet(drawn), bound, policy)  # type: ignore[arg-type]
        outcomes = set()
        for chunks in chunkings(text, rng):
            stream = compiled.stream()
            if stream is None:
                break
            output = "".join(map(stream.feed, chunks))
            output += "" if stream.blocked else stream.flush()
            assert stream.peak_held <= bound, (drawn, chunks)
            outcomes.add((output, stream.blocked_by, stream.num_leaked, tuple(stream.hits)))
        assert len(outcomes) <= 1, (drawn, text, bound, policy, outcomes)


def test_feed_of_random_rules_equals_the_scan() -> None:
    check_equals_scan(seed=1, num_cases=300, num_pieces=8)


def test_feed_of_random_rules_with_a_small_bound_is_the_same_for_all_chunkings() -> None:
    check_bounded(seed=2, num_cases=300)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 104))
def test_feed_of_many_random_rules_equals_the_scan(seed: int) -> None:
    check_equals_scan(seed, num_cases=1_500, num_pieces=12)
    check_equals_scan(seed, num_cases=20, num_pieces=120)
    check_bounded(seed, num_cases=1_000)
    check_long(seed, num_cases=300)


FLOODS: Sequence[tuple[str, Rule]] = [
    ("敏" + "\u200b" * 3_000, mask("敏感", repeats=True)),
    ("a" * 3_000, mask("as", repeats=True)),
    ("傻" + "@!" * 1_500, mask("傻帽", skip_symbols=True)),
    ("㎏" * 1_500, mask("gx", digits=True)),
    ("1" * 3_000, PHONE),
    ("@" * 3_000, MAIL),
    (("1" + "\u200b" * 30) * 100, CARD),
    ("好的" * 1_500, mask("傻帽", digits=True, allow=("傻帽好的",))),
]


@pytest.mark.parametrize(("text", "rule"), FLOODS, ids=lambda value: str(value)[:4])
def test_feed_of_a_flood_remembers_a_bounded_number_of_things(text: str, rule: Rule) -> None:
    stream = open_stream(rule, Rule("fine", ("好的",), "allow"), on_max_hold="release")
    for char in text:
        stream.feed(char)
        settling = stream._settling
        assert len(settling.open) + len(settling.phrases) + len(settling.unwritten) < 10
        assert stream.held <= 256
        for _, streams, _ in stream._folders:
            assert all(len(each._origins) <= 1_100 for each in streams)
        if stream._pii is not None:
            assert len(stream._pii._reading.window) < 1_000
            assert stream._pii._reading._offsets.num_anchors < 1_000
        assert stream._steps.offsets.num_anchors < 1_000


@pytest.mark.parametrize("names", [(), *((name,) for name in FOLDINGS), ("repeats", "digits", "leet")])
def test_piece_folder_reads_as_the_folding(names: tuple[str, ...]) -> None:
    folding = Folding(**dict.fromkeys(names, True))
    folder, rng = PieceFolder(folding), random.Random(0)
    chars = "aZ1 @!|l$戰战一٣①㏄ß\u200b，😀👍\U000e0061ＡéÉ-_\n"
    for _ in range(400):
        piece = "".join(rng.choices(chars, k=rng.randint(0, 5)))
        assert folder.read(piece) == folding.read(piece), piece
