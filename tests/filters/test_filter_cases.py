"""The cases of the specification, chunk by chunk, and more of each kind.

A case is written as there: `|` is a chunk border, in what is fed and in what comes out. What comes out has
one part more, that of the flush; a text that is blocked has none, for nothing comes after.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from filters.rules import Rule, RuleSet
from filters.stream import CompiledRules, StreamFilter
from pipeline.stop_strings import StopMatcher

Case = tuple[list[Rule], str, str]

ZW, SHY, VS16, ZWJ = "\u200b", "\u00ad", "\ufe0f", "\u200d"


def rule(action: str, *keywords: str, to: str = "", **options: object) -> Rule:
    return Rule(f"{action} {keywords[0]}", keywords, action, replacement=to, **options)  # type: ignore[arg-type]


def mask(*keywords: str, **options: object) -> Rule:
    return rule("mask", *keywords, **{"to": "*", **options})  # type: ignore[arg-type]


def redact(to: str, *keywords: str, **options: object) -> Rule:
    return rule("redact", *keywords, to=to, **options)


def block(*keywords: str, **options: object) -> Rule:
    return rule("block", *keywords, **options)


def allow(*keywords: str, **options: object) -> Rule:
    return rule("allow", *keywords, **options)


def word(*keywords: str) -> Rule:
    return mask(*keywords, whole_word=True)


KINDS: dict[str, list[Case]] = {
    "1 a keyword in pieces": [
        ([mask("敏感词")], "这是敏|感|词吗", "这是||***吗|"),
        ([mask("敏感词")], "这|是|敏||感|词", "这|是||||***|"),
        ([mask("敏感词")], "说敏感|词", "说|***|"),
        ([mask("secret")], "my se|cr|et!", "my ||******!|"),
        ([mask("пароль")], "мой пар|оль.", "мой |******.|"),
        ([mask("パスワード")], "私のパス|ワード", "私の|*****|"),
        ([mask("비밀번호")], "내 비밀|번호", "내 |****|"),
        ([mask("كلمة السر")], "ما كلمة| السر؟", "ما |*********؟|"),
        ([mask("🍆🍑")], "a🍆|🍑b", "a|**b|"),
        ([mask("👨👩👧")], f"x👨{ZWJ}|👩{ZWJ}|👧y", "x||*****y|"),
        ([mask("𠮷野家")], "𠮷|野|家", "||***|"),
    ],
    "2 a keyword that breaks off": [
        ([mask("敏感词")], "这是敏|感|觉", "这是||敏感觉|"),
        ([mask("敏感词")], "敏|感", "||敏感"),
        ([mask("敏感词")], "敏感|敏感词", "|敏感***|"),
        ([mask("敏感词")], "这是敏感|", "这是||敏感"),
        ([mask("敏感词")], f"敏{ZW}|觉", f"|敏{ZW}觉|"),
        ([mask("aab")], "aa|ab", "|a***|"),
        ([mask("secret")], "sec|ond se", "|second |se"),
        ([mask("😀😃")], "😀|😀😃😀", "|😀**|😀"),
        ([mask("пароль")], "пар|паром", "|парпаром|"),
        ([mask("abcabd")], "abcab|cabd", "|abc******|"),
    ],
    "3 a block": [
        ([block("敏感词")], "abc敏|感词def", "abc|"),
        ([block("敏感词")], "abc敏感词def", "abc"),
        ([block("敏感词")], "敏|感|词", "||"),
        ([block("敏感词"), mask("abc")], "abc敏|感词|x", "***||"),
        ([block("😀😃")], "ok 😀|😃", "ok |"),
        ([block("ab c")], "ＡＢ| |Ｃ", "||"),
        ([block("cde"), mask("abcd")], "ab|cd|e|f", "|**||"),
        ([block("cde"), redact("[X]", "abcd")], "ab|cd|e", "|[X]|"),
        ([block("cd"), mask("abcdef")], "ab|cd|ef", "|ab|"),
        ([block("bomb", whole_word=True)], "a bomb|er bomb|!", "a |bomber |"),
        ([block("bomb", "abc")], "x abc bomb", "x "),
    ],
    "3 a block that is none": [
        ([block("敏感词", shadow=True)], "abc敏|感词def", "abc敏|感词def|"),
        ([rule("flag", "敏感词")], "敏|感|词", "敏|感|词|"),
        ([block("敏感词")], "abc敏|感", "abc||敏感"),
        ([block("敏感词", direction="both"), rule("flag", "敏感")], "敏感|知", "|敏感知|"),
        ([block("bomb", whole_word=True)], "bomb|er", "|bomber|"),
    ],
    "4 a keyword within a longer one": [
        ([mask("abcd", "bc")], "xabc|e", "x|a**e|"),
        ([mask("abcd", "bc")], "xabc|d", "x|****|"),
        ([mask("abcd"), mask("bc")], "xabc", "x|a**"),
        ([mask("abcdef", "bcde", "cd")], "abcd|x", "|ab**x|"),
        ([mask("abcdef", "bcde", "cd")], "abcde|x", "|a****x|"),
        ([redact("#", "abcd"), mask("bc")], "abc|d", "|#|"),
        ([redact("#", "abcd"), mask("bc")], "abc|e", "|a**e|"),
        ([mask("abcd"), redact("#", "bc")], "abc|d", "|****|"),
        ([mask("abcd"), redact("#", "bc")], "abc|e", "|a#e|"),
        ([mask("中国人民", "国人")], "中国人|心", "|中**心|"),
        ([mask("😀👨👩😀", "👨👩")], f"😀👨{ZWJ}👩|!", "|😀***!|"),
    ],
    "5 keywords that overlap": [
        ([mask("abcd"), mask("cde")], "ab|cd|ef", "|**|***f|"),
        ([mask("abcd"), mask("cde")], "ab|cd", "|**|**"),
        ([mask("abc", "cde", "efg")], "abc|de|fg", "**|**|***|"),
        ([mask("aba")], "abab|a", "**|**|*"),
        ([mask("abc"), redact("#", "cd")], "abc|de", "**|**e|"),
        ([redact("#", "abc"), mask("cde")], "abc|def", "#|f|"),
        ([redact("#", "abc"), redact("##", "cde")], "abc|def", "#|f|"),
        ([mask("敏感词", "词语")], "敏感词|语", "**|**|"),
        ([mask("ab", to="+"), mask("bc", to="-")], "ab|c", "+|++|"),
        ([redact("#", "abc"), mask("cde"), redact("##", "efg")], "abc|de|fgh", "#||h|"),
        ([mask("😀😃"), mask("😃🎉")], "😀😃|🎉", "*|**|"),
    ],
    "6 a keyword that goes on": [
        ([mask("我的"), mask("我的世界")], "我|的世|界|。", "||****|。|"),
        ([mask("我的"), mask("我的世界")], "我的|。", "|**。|"),
        ([mask("我的"), mask("我的世界")], "我的世", "|**世"),
        ([mask("我的", "我的世", "我的世界")], "我的世|人", "|***人|"),
        ([mask("我的"), mask("我的世界", to="#")], "我的|世界|", "|####||"),
        ([mask("我的"), mask("我的世界", to="#")], "我的世|人", "|**世人|"),
        ([mask("ab", "abcab")], "abca|b", "|***|**"),
        ([mask("ab", "abcab")], "abca|bc", "|***|**c"),
        ([mask("ab", "abcab")], "abca|cab", "|**cac|**"),
        ([word("go", "gopher")], "go|pher| go|", "||****** ||**"),
        ([mask("👨👩", "👨👩👧")], f"👨{ZWJ}👩{ZWJ}|x", f"|***{ZWJ}x|"),
    ],
    "7 a replacement that goes on": [
        ([redact("#", "我的"), redact("##", "我的世界")], "我|的世|人", "||#世人|"),
        ([redact("#", "我的"), redact("##", "我的世界")], "我|的世|界", "||##|"),
        ([redact("#", "我的"), redact("##", "我的世界")], "我的世", "|#世"),
        ([redact("#", "我的"), mask("我的世界")], "我的世|界", "|****|"),
        ([redact("#", "我的"), mask("我的世界")], "我的世|人", "|#世人|"),
        ([mask("我的"), redact("#", "我的世界")], "我的世|界。", "|#。|"),
        ([mask("ab"), redact("#", "ab")], "a|b", "|#|"),
        ([redact("#", "ab"), redact("##", "abcd"), redact("###", "abcdef")], "abcde|x", "|##ex|"),
        ([redact("#", "🎉🎉"), redact("##", "🎉🎉😀")], "🎉🎉|🎉😀", "|#|"),
    ],
    "8 whole words": [
        ([word("ass")], "a cl|ass| a|ss|.", "a cl|ass| ||***.|"),
        ([word("ass")], "as|s", "||***"),
        ([word("ass")], "你ass|好", "你|***好|"),
        ([word("ass")], "你ass|ess好", "你|assess好|"),
        ([word("ass")], "ass|1 ass|_", "|ass1 |***_|"),
        ([word("ass")], "_ass|'s", "_|***'s|"),
        ([word("ass")], f"ass{ZW}|es", f"|ass{ZW}es|"),
        ([word("ass")], f"ass{ZW}|.", f"|***{ZW}.|"),
        ([word("ass")], "éass|.", "éass|.|"),
        ([word("ass")], "ＡＳＳ|．", "|***．|"),
        ([word("ass")], "ass|😀", "|***😀|"),
        ([word("ass")], "aß|.", "|**.|"),
        ([word("ass")], "clаss a|ss", "clаss ||***"),  # with a Cyrillic а, which is a letter too
        ([word("big ass")], "big a|ss|y big ass", "||big assy |*******"),
        ([word("我ass")], "x我as|s|好", "x||****好|"),
        ([word("мат")], "мате|матика |мат.", "мате|матика |***.|"),
        ([redact("[X]", "ass", whole_word=True)], "ass ass|.", "[X] |[X].|"),
        ([word("ass"), mask("ss")], "ass|e", "|a**e|"),
        ([word("c++")], "in c+|+11", "in |***11|"),
    ],
    "9 phrases that are fine": [
        ([block("黄片", allow=("三黄片",))], "三|黄|片真|好", "三||黄片真|好|"),
        ([block("黄片", allow=("三黄片",))], "看黄|片", "看|"),
        ([block("黄片", allow=("三黄片",))], f"三{ZW}黄|片", f"三{ZW}|黄片|"),
        ([block("黄片", allow=("黄片子",))], "黄|片|子", "||黄片子|"),
        ([block("黄片", allow=("黄片子",))], "黄|片|真", "||"),
        ([mask("黄片", allow=("三黄片子",))], "三黄片|子", "三|黄片子|"),
        ([mask("黄片", allow=("三黄片子",))], "三黄片|真", "三|**真|"),
        ([mask("黄片", allow=("三黄片",))], "三黄片黄|片", "三黄片|**|"),
        ([mask("黄片", allow=("黄片子",))], "黄|片", "||**"),
        ([mask("ass", allow=("assassin",))], "an ass|assin", "an |assassin|"),
        ([mask("ass", allow=("assassin",))], "an ass|ass", "an ||******"),
        ([mask("ass", allow=("assassin",))], "an assass|y", "an |******y|"),
        ([mask("ab", allow=("abc",)), mask("bc")], "ab|c", "|a**|"),
        ([mask("ab", allow=("abc",)), redact("#", "bc")], "ab|d", "|**d|"),
        ([redact("#", "ab"), mask("bc"), allow("abc")], "ab|c|ab|d", "|abc||#d|"),
        ([block("ab"), allow("xab", "aby")], "xab|ab|y", "xab||aby|"),
        ([mask("cd", allow=("bcde",)), mask("ef")], "bcd|ef", "b|cd**|"),
        ([mask("😀😀", allow=("🎉😀😀",))], "🎉😀|😀😀", "🎉|😀*|*"),
        ([word("ass"), allow("ass hat", whole_word=True)], "ass h|at|s", "||*** hats|"),
        ([word("ass"), allow("ass hat", whole_word=True)], "ass h|at|.", "||ass hat.|"),
    ],
    "10 what folds alike": [
        ([mask("fuck")], "ＦＵ|ｃＫ!", "|****!|"),
        ([mask("敏感")], f"敏{ZW}|感", "|***|"),
        ([mask("发动战争")], "他們發|動戰爭。", "他們|****。|"),
        ([mask("發動")], "发|动髮動", "|****|"),
        ([mask("fuck")], "Ⓕⓤ|ⓒⓚ", "|****|"),
        ([mask("fuck")], "𝐟𝐮|𝐜𝐤 🅵🆄|🅲🅺", "|**** |****|"),
        ([mask("fuck")], f"fu{SHY}|ck", "|*****|"),
        ([mask("❤❤")], f"❤{VS16}|❤{VS16}", f"|**|*{VS16}"),
        ([mask("敏感")], "敏\u202e\U000e0061|感\u202c", "|****\u202c|"),
        ([mask("strasse")], "stra|ße", "|******|"),
        ([mask("office")], "oﬃ|ce", "|****|"),
        ([mask("as")], "a|ß", "|**|"),
        ([mask("sa")], "ß|a", "|**|"),
        ([mask("5kg")], "5|㎏", "|**|"),
        ([mask("الله")], "x|ﷺ", "x|*|"),
        ([mask("café")], "CAF|É cafe\u0301", "|**** cafe\u0301|"),
    ],
    "11 one after the other": [
        ([redact("[X]", "abc")], "abc|abc", "[X]|[X]|"),
        ([redact("[X]", "abc")], "abcabc", "[X][X]|"),
        ([redact("[X]", "aa")], "aa|aa", "[X]||"),
        ([redact("[X]", "abc"), mask("def")], "abc|de|f", "[X]||***|"),
        ([redact("[X]", "abc")], f"abc{ZW}|abc", f"[X]{ZW}|[X]|"),
        ([mask("ab")], "ab|ab|a", "**|**||a"),
        ([redact("#", "ab"), redact("##", "cd")], "abcd|ab", "###|#|"),
        ([redact("[X]", "敏感")], "敏感敏|感", "[X]|[X]|"),
        ([redact("cd", "ab"), mask("cd")], "ab|cd", "cd|**|"),
    ],
}
CASES = [pytest.param(*case, id=f"{kind}: {case[1]}") for kind, cases in KINDS.items() for case in cases]

# With stop strings in front. What comes out ends with the stop, if there is one.
STOPPED: list[tuple[list[Rule], list[str], str, str]] = [
    ([mask("敏感词")], ["感词"], "敏|感|词", "||敏"),
    ([mask("敏感词")], ["感词"], "敏|感|知", "||敏感知|"),
    ([mask("abc")], ["END"], "ab|cE|ND", "|***|"),
    ([mask("abcd")], ["bc"], "ab|cd", "|a"),
    ([redact("#", "ab")], ["X"], "ab|X", "#|"),
    ([mask("ass", whole_word=True)], ["hole"], "ass|hole", "|***"),
    ([block("敏感")], ["感"], "敏|感", "|敏"),
    ([block("黄片", allow=("黄片子",))], ["子"], "黄片|子", "|"),
    ([mask("stop")], ["stop"], "STOP|stop!", "****|"),
    ([mask("abc")], ["c🎉", "🎉"], "ab|c|🎉", "||ab"),
    ([mask("abc")], ["🎉", "c🎉"], "ab|c|🎉", "||***"),
]

# Stop strings alone.
STOPS: list[tuple[list[str], str, str]] = [
    (["STOP"], "ok ST|OP tail", "ok |"),
    (["STOP"], "ok ST", "ok |ST"),
    (["ab"], "a|a|b", "|a|"),
    (["abc", "b"], "a|b", "|a"),
    (["abcd", "bc"], "a|bc", "|a"),
    (["\n\n", "\n"], "x|\n|\ny", "x|"),
    (["停止"], "不停|停止", "不|停"),
    (["👨\u200d👩"], "👨|\u200d|👨\u200d👩", "||👨\u200d"),
    (["stop"], "STOP| ＳＴＯＰ", "STOP| ＳＴＯＰ|"),
]


def opened(rules: Sequence[Rule]) -> StreamFilter:
    stream = CompiledRules(RuleSet(tuple(rules))).stream()
    assert stream is not None
    return stream


def rechunked(text: str) -> Iterator[list[str]]:
    """All two-way splits, one character at a time, and random splits."""
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield list(text)
    rng = random.Random(text)
    for _ in range(3):
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(("rules", "text", "outputs"), CASES)
def test_feed_of_a_case_gives_its_chunks(rules: list[Rule], text: str, outputs: str) -> None:
    stream = opened(rules)
    fed = [stream.feed(chunk) for chunk in text.split("|")]
    last = stream.flush()
    expected = outputs.split("|")
    if len(expected) == len(fed):
        assert (fed, last, stream.blocked, stream.held) == (expected, "", True, 0)
    else:
        assert ([*fed, last], stream.blocked, stream.held) == (expected, False, 0)


@pytest.mark.parametrize(("rules", "text", "outputs"), CASES)
def test_feed_of_a_case_in_other_chunks_gives_the_same(rules: list[Rule], text: str, outputs: str) -> None:
    shared = CompiledRules(RuleSet(tuple(rules)))
    whole, expected = text.replace("|", ""), outputs.replace("|", "")
    outcomes = set()
    for chunks in rechunked(whole):
        stream = shared.stream()
        assert stream is not None
        emitted = ""
        for chunk in chunks:
            emitted += stream.feed(chunk)
            assert expected.startswith(emitted), chunks
        assert emitted + stream.flush() == expected, chunks
        outcomes.add((stream.blocked_by, tuple(stream.hits), stream.peak_held <= len(whole)))
    assert len(outcomes) == 1


@pytest.mark.parametrize(("rules", "stops", "text", "outputs"), STOPPED)
def test_feed_behind_stop_strings_ends_as_if_the_text_did(
    rules: list[Rule], stops: list[str], text: str, outputs: str
) -> None:
    matcher, stream = StopMatcher(stops), opened(rules)
    fed = []
    for chunk in text.split("|"):
        fed.append(stream.feed(matcher.feed(chunk)))
        if matcher.matched is not None:
            fed[-1] += stream.flush()
            break
    else:
        fed.append(stream.feed(matcher.flush()) + stream.flush())
    assert fed == outputs.split("|")


@pytest.mark.parametrize(("stops", "text", "outputs"), STOPS)
def test_stop_matcher_gives_the_chunks_of_a_case(stops: list[str], text: str, outputs: str) -> None:
    matcher = StopMatcher(stops)
    fed = []
    for chunk in text.split("|"):
        fed.append(matcher.feed(chunk))
        if matcher.matched is not None:
            break
    else:
        fed.append(matcher.flush())
    assert fed == outputs.split("|")


def test_feed_of_two_choices_keeps_them_apart() -> None:
    shared = CompiledRules(RuleSet((mask("敏感词"),)))
    first, second = shared.stream(), shared.stream()
    assert first is not None
    assert second is not None
    fed = [first.feed("敏"), second.feed("感词"), first.feed("感词"), second.feed("!")]
    assert fed == ["", "感词", "***", "!"]
    assert (first.flush(), second.flush(), len(first.hits), second.hits) == ("", "", 1, [])
