"""The cases of the specification, chunk by chunk, and more of each kind.

A case is written as there: `|` is a chunk border, in what is fed and in what comes out. What comes out has
one part more, that of the flush; a text that is blocked has none, for nothing comes after.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import pytest

from filters.json_values import JsonValueFilter
from filters.rules import Rule, RuleSet
from filters.stream import CompiledRules, StreamFilter
from pipeline.control_dropper import ControlAutomaton, ControlDropper
from pipeline.stop_strings import StopMatcher
from tests.pipeline.test_outbound import byte_ids, outbound

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
    # The mask ends no later than the block does: it counts whether the block stands or not.
    "3 a mask that ends with an undecided block": [
        ([mask("abc"), block("bc", allow=("bcd",))], "abc|x", "*|"),
        ([mask("abc"), block("bc", allow=("bcd",))], "abc|d", "*|**d|"),
        ([mask(" bc"), block("bc", whole_word=True)], "a bc|.", "a*|"),
        ([mask(" bc"), block("bc", whole_word=True)], "a bc|d", "a*|**d|"),
        ([mask("看黄片"), block("黄片", allow=("黄片子",))], "我看黄片|子", "我*|**子|"),
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
    ([mask("abc")], ["🎉", "c🎉"], "ab|c|🎉", "|***|"),
]

# Stop strings alone.
STOPS: list[tuple[list[str], str, str]] = [
    (["STOP"], "ok ST|OP tail", "ok |"),
    (["STOP"], "ok ST", "ok |ST"),
    (["ab"], "a|a|b", "|a|"),
    (["abc", "b"], "a|b", "a|"),  # `b` comes first: no text that follows could cut the `a` off
    (["abcd", "bc"], "a|bc", "a|"),
    (["\n\n", "\n"], "x|\n|\ny", "x|"),
    (["停止"], "不停|停止", "不|停"),
    (["👨\u200d👩"], "👨|\u200d|👨\u200d👩", "||👨\u200d"),
    (["stop"], "STOP| ＳＴＯＰ", "STOP| ＳＴＯＰ|"),
]

PERSONAL = [
    Rule("phone", (), "redact", pii="phone_cn", replacement="[PHONE]"),
    Rule("card", (), "redact", pii="card", replacement="[CARD]"),
    Rule("id", (), "redact", pii="id_cn", replacement="[ID]"),
    Rule("email", (), "redact", pii="email", replacement="[EMAIL]"),
    Rule("ip", (), "redact", pii="ip", replacement="[IP]"),
]
PHONE = PERSONAL[:1]
# Rules, text, output: what leaves at which character is the detector's to say, but no piece of it early.
PERSONAL_CASES: list[tuple[list[Rule], str, str]] = [
    (PERSONAL, "tel 13812345678 .", "tel [PHONE] ."),
    (PERSONAL, "+86 138-1234-5678。", "[PHONE]。"),
    (PERSONAL, "电话１３８１２３４５６７８，谢谢", "电话[PHONE]，谢谢"),
    (PERSONAL, "0086 1381234 5678", "[PHONE]"),
    (PERSONAL, f"138{ZW}1234{ZW}5678.", "[PHONE]."),
    (PERSONAL, "x13812345678y13912345678", "x[PHONE]y[PHONE]"),
    (PERSONAL, "①③⑧12345678!", "[PHONE]!"),
    (PERSONAL, "138123456789 12812345678 1381234567", "138123456789 12812345678 1381234567"),
    (PERSONAL, "13812345678.5 0.13812345678", "13812345678.5 0.13812345678"),
    (PERSONAL, "4111111111111111", "[CARD]"),
    (PERSONAL, "4111 1111 1111 1111!", "[CARD]!"),
    (PERSONAL, "3782 822463 10005, ok", "[CARD], ok"),
    (PERSONAL, "4111-1111-1111-1112", "4111-1111-1111-1112"),
    (PERSONAL, "1381234567812344.", "[CARD]."),
    (PERSONAL, "1381 2345 6781 2344", "[CARD]"),
    (PERSONAL, "1381234567812345.", "1381234567812345."),
    (PHONE, "1381234567812344.", "1381234567812344."),
    (PERSONAL, "110105 19491231 002X", "[ID]"),
    (PERSONAL, "身份证11010519491231002x号", "身份证[ID]号"),
    (PERSONAL, "440524198801010011 310101200002290015", "[ID] [ID]"),
    (PERSONAL, "11010519491231003X", "11010519491231003X"),
    (PERSONAL, "31010120010229001X", "31010120010229001X"),
    (PERSONAL, "to bob@example.com.", "to [EMAIL]."),
    (PERSONAL, "Bob.Smith+x@mail.example.co.uk, ok", "[EMAIL], ok"),
    (PERSONAL, "问ｂｏｂ＠example．com", "问[EMAIL]"),
    (PERSONAL, "bob@example @example.com bob@example.c", "bob@example @example.com bob@example.c"),
    (PERSONAL, "13812345678@163.com", "[EMAIL]"),
    (PERSONAL, "at 192.168.1.1.", "at [IP]."),
    (PERSONAL, "2001:db8::1 up, ::1", "[IP] up, [IP]"),
    (PERSONAL, "256.1.1.1 1.2.3.4.5 a::b", "256.1.1.1 1.2.3.4.5 a::b"),
    (PERSONAL, "mail bob@b.com from 10.0.0.1 or 13812345678", "mail [EMAIL] from [IP] or [PHONE]"),
    ([*PERSONAL, mask("电话"), mask("om 13")], "电话13812345678", "**[PHONE]"),
    ([*PERSONAL, redact("#", "com 敏")], "bob@b.com 敏感", "[EMAIL]感"),
    ([Rule("p", (), "mask", replacement="*", pii="phone_cn")], "tel 138 1234 5678.", "tel *************."),
    ([Rule("p", (), "flag", pii="phone_cn"), mask("123")], "13812345678", "138***45678"),
    ([Rule("p", (), "redact", pii="ip", replacement="#", allow=("at 127.0.0.1",))],
     "at 127.0.0.1, to 127.0.0.1", "at 127.0.0.1, to #"),
]  # fmt: skip


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


@pytest.mark.parametrize(("rules", "text", "output"), PERSONAL_CASES)
def test_feed_of_personal_data_is_the_same_wherever_it_is_cut(
    rules: list[Rule], text: str, output: str
) -> None:
    shared = CompiledRules(RuleSet(tuple(rules)))
    outcomes = set()
    for chunks in rechunked(text):
        stream = shared.stream()
        assert stream is not None
        emitted = ""
        for chunk in chunks:
            emitted += stream.feed(chunk)
            assert output.startswith(emitted), chunks
        assert emitted + stream.flush() == output, chunks
        outcomes.add(tuple(stream.hits))
    assert len(outcomes) == 1


def test_feed_of_a_phone_number_in_pieces_gives_its_chunks() -> None:
    stream = opened(PHONE)
    fed = [stream.feed(chunk) for chunk in ("tel 138", "1234", "5678 .")]
    assert "".join(fed[:2]).rstrip() == "tel"
    assert "".join(fed) + stream.flush() == "tel [PHONE] ."


def test_feed_of_blocked_personal_data_stops_before_it() -> None:
    for chunks in rechunked("tel 13812345678 ok"):
        stream = opened([Rule("p", (), "block", pii="phone_cn")])
        assert "".join([stream.feed(chunk) for chunk in chunks]) + stream.flush() == "tel "
        assert stream.blocked_by == "p"


# Rules, control strings, text, output.
CONTROLLED: list[tuple[list[Rule], list[str], str, str]] = [
    ([mask("abc")], ["<|im_end|>"], "ab<|im_end|>c", "***"),
    ([mask("敏感词")], ["<|im_end|>", "</s>"], "敏<|im_end|>感</s>词", "***"),
    ([mask("abc")], ["<|im_end|>"], "ab<|im_<|im_end|>end|>c", "***"),
    ([redact("#", "ab"), mask("cd")], ["<s>"], "a<s>bc<s>d", "#**"),
    ([mask("ass", whole_word=True)], ["<s>"], "ass<s>y ass<s>.", "assy ***."),
    ([block("黄片", allow=("三黄片",))], ["<s>"], "三<s>黄片", "三黄片"),
    ([mask("a<s")], ["<s>"], "a<s a<s>", "*** a"),
]


@pytest.mark.parametrize(("rules", "controls", "text", "output"), CONTROLLED)
def test_feed_behind_dropped_control_strings_never_sees_them(
    rules: list[Rule], controls: list[str], text: str, output: str
) -> None:
    automaton = ControlAutomaton(controls)
    for chunks in rechunked(text):
        dropper, stream = ControlDropper(automaton), opened(rules)
        emitted = ""
        for chunk in chunks:
            emitted += stream.feed(dropper.feed(chunk))
            assert output.startswith(emitted), chunks
        assert emitted + stream.feed(dropper.flush()) + stream.flush() == output, chunks


def test_feed_behind_a_control_string_in_two_pieces_gives_its_chunks() -> None:
    dropper, stream = ControlDropper(ControlAutomaton(["<|im_end|>"])), opened([mask("abc")])
    assert [stream.feed(dropper.feed(chunk)) for chunk in ("ab<|im", "_end|>c")] == ["", "***"]


# Rules, JSON, output.
IN_JSON: list[tuple[list[Rule], str, str]] = [
    ([mask("敏感")], r'{"q":"\u654f\u611f 词"}', '{"q":"** 词"}'),
    ([mask("敏感")], r'{"敏\u611f": ["\u654F感", {"敏感": "x"}], "y": -1.5e3}',
     '{"**": ["**", {"**": "x"}], "y": -1.5e3}'),
    ([mask("敏感")], '{"a":"敏","b":"感"}', '{"a":"敏","b":"感"}'),
    ([mask("😀😀")], r'{"q":"\ud83d\ude00😀!"}', '{"q":"**!"}'),
    ([mask('a"b')], r'{"q":"a\"b\\"}', r'{"q":"***\\"}'),
    ([mask("a\nb")], r'{"q":"a\nb\tc"}', r'{"q":"***\tc"}'),
    ([redact('"\\', "ab")], '{"q":"xab"}', r'{"q":"x\"\\"}'),
    ([mask("1234")], '{"n":12345, "m": 9}', '{"n":"****5", "m": 9}'),
    ([mask("true")], "[true, false]", '["****", false]'),
    (PHONE, '{"tel":13812345678,"s":"138 1234 5678"}', '{"tel":"[PHONE]","s":"[PHONE]"}'),
    ([mask("ass", whole_word=True)], '{"q":"ass","r":"assy"}', '{"q":"***","r":"assy"}'),
    ([mask("黄片", allow=("三黄片",))], '["三黄片","三","黄片"]', '["三黄片","三","**"]'),
    ([mask("敏感词")], '["敏感", "词"]', '["敏感", "词"]'),
    ([mask("敏感")], rf'["敏{ZW}感", "ＦＵ\u200b"]', f'["***", "ＦＵ{ZW}"]'),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "text", "output"), IN_JSON)
def test_feed_of_json_rewrites_values_and_leaves_json(rules: list[Rule], text: str, output: str) -> None:
    shared = CompiledRules(RuleSet(tuple(rules)))
    json.loads(output)
    for chunks in rechunked(text):
        stream = JsonValueFilter(shared.stream)
        emitted = ""
        for chunk in chunks:
            emitted += stream.feed(chunk)
            assert output.startswith(emitted), chunks
        assert emitted + stream.flush() == output, chunks


def test_feed_of_json_in_two_pieces_gives_its_chunks() -> None:
    stream = JsonValueFilter(CompiledRules(RuleSet((mask("敏感"),))).stream)
    assert [stream.feed(chunk) for chunk in (r'{"q":"\u654f', r'\u611f 词"}')] == ['{"q":"', '** 词"}']


def test_feed_of_json_with_a_block_ends_before_it() -> None:
    for chunks in rechunked(r'{"q":"看\u9ec4片","r":1}'):
        stream = JsonValueFilter(CompiledRules(RuleSet((block("黄片"),))).stream)
        assert "".join([stream.feed(chunk) for chunk in chunks]) + stream.flush() == '{"q":"看'
        assert stream.blocked_by == "block 黄片"


# Rules, text, what leaves when it breaks off, what stays undecided.
BROKEN_OFF: list[tuple[list[Rule], str, str, int]] = [
    ([mask("敏感词")], "敏", "", 1),
    ([mask("敏感词", fail="open")], "敏", "敏", 0),
    ([mask("abc", fail="open"), mask("bcd")], "ab", "a", 1),
    ([mask("abc"), mask("bcd", fail="open")], "ab", "", 2),
    ([block("黄片", allow=("黄片子",))], "看黄片", "", 2),
    ([mask("ass", whole_word=True)], "an ass", "", 3),
    ([Rule("p", (), "redact", replacement="#", pii="phone_cn")], "tel 1381234", "", 7),
    ([mask("敏感词")], "完了", "", 0),
]


@pytest.mark.parametrize(("rules", "text", "left", "held"), BROKEN_OFF)
def test_abandon_lets_nothing_undecided_leave_unless_its_rules_fail_open(
    rules: list[Rule], text: str, left: str, held: int
) -> None:
    stream = opened(rules)
    stream.feed(text)
    assert (stream.abandon(), stream.held) == (left, held)
    assert not stream.hits


@pytest.mark.parametrize(("rules", "text", "outputs"), CASES)
def test_way_out_of_a_case_gives_its_chunks(rules: list[Rule], text: str, outputs: str) -> None:
    """From token ids, one a byte, to events."""
    choice = outbound(*rules)
    fed = ["" if choice.finish else choice.feed(byte_ids(chunk)) for chunk in text.split("|")]
    if choice.finish is None:
        fed.append(choice.feed([], "length"))
    expected = outputs.split("|")
    is_blocked = len(expected) == len(text.split("|"))
    assert (choice.finish == "content_filter") == is_blocked
    assert fed[: len(expected)] == expected
    assert not "".join(fed[len(expected) :])
    in_bytes = outbound(*rules)
    joined = ""
    for token_id in byte_ids(text.replace("|", "")):
        joined += in_bytes.feed([token_id]) if in_bytes.finish is None else ""
        assert outputs.replace("|", "").startswith(joined)
    joined += in_bytes.feed([], "length") if in_bytes.finish is None else ""
    assert joined == outputs.replace("|", "")


@pytest.mark.parametrize(("rules", "stops", "text", "outputs"), STOPPED)
def test_way_out_with_stop_strings_ends_as_if_the_text_did(
    rules: list[Rule], stops: list[str], text: str, outputs: str
) -> None:
    choice = outbound(*rules, stops=stops)
    fed = ["" if choice.finish else choice.feed(byte_ids(chunk)) for chunk in text.split("|")]
    if choice.finish is None:
        fed.append(choice.feed([], "length"))
    assert fed == outputs.split("|")


def test_way_out_of_two_choices_keeps_them_apart() -> None:
    first, second = outbound(mask("敏感词")), outbound(mask("敏感词"))
    fed = [first.feed(byte_ids("敏")), second.feed(byte_ids("感词"))]
    fed += [first.feed(byte_ids("感词")), second.feed(byte_ids("!"))]
    assert fed == ["", "感词", "***", "!"]
