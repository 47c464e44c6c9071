"""Where text is cut for speech. In the tables, `|` stands where a piece ends."""

from __future__ import annotations

import random
import unicodedata

import pytest

from pipeline.speech import MAX_PIECE, MIN_CLAUSE, SpeechChunker, Unit
from tests.pipeline.splits import random_split, splits

SENTENCES = [
    # English
    "Hello there. |How are you? |Fine! |Thanks",
    "Pi is 3.14, and v1.2.3 is out. |At 10:30 it is 5.",
    "Dr. Smith and Mrs. Jones met Prof. Li. |They talked.",
    "J. R. R. Tolkien lived in the U.K. with T. S. Eliot. |Not so.",
    "It is in the U.S. Senate at 5 p.m. sharp. |Yes.",
    "See e.g. this, i.e. that, etc. and so on. |Done.",
    "Fruit (apples, pears etc.) is good. |Eat.",
    "Look at https://a.example/b?c=d.e!f or mail me@mail.example. |Bye.",
    "Wait... what? |Well... |Next. |Hm… yes. |So… |Then. . . what?",
    'He said: "Stop." |Then (it was late.) |She left.',
    "“Really?” he asked. |‘No!’ |(Why?) |[Because.] |End",
    "**Bold.** |_Thin._ |`code.` |Text",
    "What?! |No!!! |Yes?! |Ok.  |Two spaces.",
    "No. 5 is alive. |No. |I am not. |See fig. 3 and Nov. 5 for more.",
    "So do I. |Then came Ph.D. students.",
    "Founded in 1999. |Then sold.",
    "An e.g.! |Done.",
    "Great! |😊 Next. |1️⃣ One! |❗️ Ends!️ |So",
    # lines, lists, paragraphs
    "First line\n|Second line\n\n|Third\r\n|Fourth \n |Fifth",
    "Steps:\n\n|1. Open it.\n|2. Close it.\n|10. Done",
    "# Title\n|- one\n|- two\n|* three",
    "\n\n Hi.\n\n",
    "It was late.\n|and dark, e.g.\n|here,\n|there…\n|there",
    # a mark on a space is no beginning
    "One two. \u0301Three. |Four",
    # German
    "Am 3. Mai kam Prof. Müller. |Er ging, d. h. er lief, z. B. heim. |Gut.",
    "Das kostet ca. 5 Mio. Euro bzw. 2 Mrd. Dollar. |Teuer!",
    "„Hallo.“ |»Ja!« |‚Nein.‘ |Er schwieg.",
    "Siehe Abb. 3, Nr. 7, Abs. 2. So ist es. |Gut",  # might be an ordinal
    # French: spaces before marks, with or without a break
    "« Vraiment ? » dit-il. |« Oui. » |Elle rit\xa0! |Bon\u202f? |« Ah\xa0!\xa0» |Fin.",
    "Mme. Petit et M. Grand.\xa0Voilà. |Fin",
    # Spanish
    "¿Qué tal? |¡Bien! |El Sr. Gil vive en EE.UU. con la Sra. Paz. |Sí.",
    # Russian
    "А. С. Пушкин жил здесь, т.е. там. |Да.",
    # Chinese
    "他说：“你好！”|然后走了。|价格是3.14元。|真的吗？！|是的……|好吧",
    "今天好.|明天更好!|后天呢?|好。 |Yes.",
    # Japanese
    "「はい。」|そう言った。|今日は、とても良い天気ですね！|（本当です。）|行こう",
    # Korean
    "안녕하세요. |네. |좋아요! |끝",
    # Arabic, Urdu, Hindi, Armenian
    "كيف حالك؟ |أنا بخير، شكرا. |مع السلامة",
    "آپ کیسے ہیں؟ |میں ٹھیک ہوں۔ |شکریہ",
    "नमस्ते। |आप कैसे हैं? |डॉ. शर्मा आए। |ठीक॥ |हाँ",
    "Բարեւ։ |Այո",
    # nothing to say, nothing to cut
    "",
    "...",
    "?! ... — !",
    "*** --- ***\n\n",
    "no marks at all",
]
CLAUSES = [
    "Well, yes, |of course, |my friend. |However, |it rains: |take this; |go. |Now",
    "Yes. |No! |Hm, so",
    "A number like 1,000,000 or 10:30 or a:b is one, |of course.",
    "He was — |so it seems — |there—and not there—|at all. |Pages 10–20, |5 – 6, or so – |rather – |more.",
    "It was late… |and dark, |wasn't it?",
    '"Really?" |he asked, |"or not?"',
    "Er ging; |niemand – |wirklich",
    "Vorwärts– und rückwärts, |so ist es – |weiter",
    "今天天气，|真的很好；|我们去公园：|看花、看树、|好吗？|好",
    "时间是12：30，|价格1，000元。|好",
    "今日は、|とても良い天気ですね！|行こう",
    "أهلا وسهلا، |كيف حالك؛ |أنا بخير",
    "One, two, |three, four, |five, six",
    "e.g. this, |and etc. that",
    "(a, b, c, |d), and so on, |then",
]


def pieces(unit: Unit, parts: list[str]) -> list[str]:
    """All pieces of a text that comes in these parts."""
    chunker = SpeechChunker(unit)
    cut = [piece for part in parts for piece in chunker.feed(part)]
    rest = chunker.flush()
    assert all(cut), "a piece is never empty"
    return [*cut, rest] if rest else cut


def marked(unit: Unit, text: str) -> str:
    return "|".join(pieces(unit, [text]))


@pytest.mark.parametrize("expected", SENTENCES)
def test_sentences_end_where_they_should(expected: str) -> None:
    assert marked("sentence", expected.replace("|", "")) == expected


@pytest.mark.parametrize("expected", CLAUSES)
def test_clauses_end_where_they_should(expected: str) -> None:
    assert marked("clause", expected.replace("|", "")) == expected


@pytest.mark.parametrize("expected", SENTENCES)
def test_sentences_end_clauses_too(expected: str) -> None:
    text = expected.replace("|", "")
    sentences, clauses = pieces("sentence", [text]), pieces("clause", [text])
    ends, at = set(), 0
    for piece in clauses:
        at += len(piece)
        ends.add(at)
    at = 0
    for piece in sentences:
        at += len(piece)
        assert at in ends


@pytest.mark.parametrize("unit", ["sentence", "clause"])
@pytest.mark.parametrize("marks", [*SENTENCES, *CLAUSES])
def test_pieces_do_not_depend_on_the_parts(unit: Unit, marks: str) -> None:
    text = marks.replace("|", "")
    whole = pieces(unit, [text])
    assert "".join(whole) == text
    for parts in splits(text, random.Random(3)):
        assert pieces(unit, parts) == whole


# All that decides anything, in a soup: marks, spaces, closers, joiners, wide and small and large letters.
SOUP = [
    *"aB1.!?…,;:—–。！？，、\"'”“»«)( \t\n\r\xa0\u202f\u0301\u200d\ufe0f",
    *["Dr", "e.g", "12", "好", "😀", "🇩🇪", "👍🏽", "क्ष", "  ", "...", "word " * 30, "x" * 100, "好" * 130],
]


def soup(rng: random.Random) -> str:
    return "".join(rng.choices(SOUP, k=rng.randrange(60)))


def check_soup(rng: random.Random, num: int) -> None:
    for _ in range(num):
        text = soup(rng)
        for unit in ("sentence", "clause"):
            whole = pieces(unit, [text])
            assert "".join(whole) == text
            assert max(map(len, whole), default=0) <= MAX_PIECE
            assert pieces(unit, list(text)) == whole
            assert pieces(unit, random_split(text, rng)) == whole
            assert pieces(unit, random_split(text, rng)) == whole


def test_any_text_is_cut_alike_however_it_comes() -> None:
    check_soup(random.Random(11), 120)


@pytest.mark.long
def test_very_many_texts_are_cut_alike_however_they_come() -> None:
    check_soup(random.Random(12), 5_000)


def test_piece_ends_as_soon_as_the_next_begins() -> None:
    chunker = SpeechChunker("sentence")
    assert chunker.feed("Hello.") == []  # 'Hello.com'?
    assert chunker.feed(" ") == []  # 'Hello. and'?
    assert chunker.feed("W") == ["Hello. "]
    assert chunker.feed("orld!") == []
    assert chunker.flush() == "World!"
    chunker = SpeechChunker("clause")
    assert chunker.feed("今天天气，") == []  # '，”'?
    assert chunker.feed("真") == ["今天天气，"]


def test_what_follows_a_flush_is_another_text() -> None:
    chunker = SpeechChunker("clause")
    assert chunker.feed("Some words, and then") == ["Some words, "]
    assert chunker.flush() == "and then"
    assert chunker.flush() == ""
    assert chunker.feed("Yes. X") == ["Yes. "]
    assert chunker.flush() == "X"


def test_short_clause_waits_for_the_next() -> None:
    short = "a" * (MIN_CLAUSE - 2)
    assert pieces("clause", [f"{short}, b"]) == [f"{short}, b"]
    assert pieces("clause", [f"{short}a, b"]) == [f"{short}a, ", "b"]


# -- text without marks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["sentence", "clause"])
def test_long_text_is_cut_after_a_word(unit: Unit) -> None:
    text = "words and " * 100
    cut = pieces(unit, [text])
    assert "".join(cut) == text
    assert all(piece.endswith(" ") and MAX_PIECE - 8 < len(piece) <= MAX_PIECE for piece in cut[:-1])


def test_long_sentence_is_cut_after_its_last_clause() -> None:
    text = "some words of it, " * 5 + "and more of them " * 20
    first, second, *_ = pieces("sentence", [text])
    assert first == "some words of it, " * 5
    assert second.startswith("and more")


def test_mark_at_the_very_end_of_the_longest_piece_counts_if_the_next_character_is_its_last() -> None:
    for num, first in ((MAX_PIECE - 2, MAX_PIECE), (MAX_PIECE - 1, MAX_PIECE)):
        text = "x" * num + ". Next"
        assert len(pieces("sentence", [text])[0]) == first
        assert pieces("sentence", list(text)) == pieces("sentence", [text])


@pytest.mark.parametrize(
    "character",
    [
        "e\u0301\u0323",
        "👩‍👩‍👧‍👦",
        "👍🏽",
        "🇩🇪",
        "🏴‍☠️",
        "1\ufe0f\u20e3",
        "क्षि",
        "נִ",
        "ก็",
    ],
)  # fmt: skip
@pytest.mark.parametrize("offset", range(8))
def test_long_text_is_never_cut_within_a_character(character: str, offset: int) -> None:
    """Without spaces: only the middle of the text is left."""
    text = "x" * offset + character * 200
    cut = pieces("clause", [text])
    assert "".join(cut) == text
    assert len(cut) > 1
    assert all(len(piece) <= MAX_PIECE for piece in cut)
    for piece in cut[1:]:
        assert piece.startswith(character)
    assert pieces("clause", list(text)) == cut


def test_halves_of_surrogates_stay_together() -> None:
    text = "\ud83d\ude00" * 200
    assert all(len(piece) % 2 == 0 for piece in pieces("clause", [text]))


def test_endless_character_is_cut_all_the_same() -> None:
    text = "e" + "\u0301" * 1000
    cut = pieces("clause", [text])
    assert "".join(cut) == text
    assert max(map(len, cut)) == MAX_PIECE


@pytest.mark.parametrize("unit", ["sentence", "clause"])
@pytest.mark.parametrize(
    "text", ["a", ".", "a.", "x. ", "\u0301", " ", "\n", "«", "'", "–", "1,", "。", "a \n", '"', "A. "]
)
def test_what_waits_is_bounded(unit: Unit, text: str) -> None:
    """No text makes it hold more than one piece, nor look at more than that again."""
    chunker = SpeechChunker(unit)
    for character in text * 2000:
        chunker.feed(character)
        assert len(chunker._text) <= MAX_PIECE + 1
        assert 0 <= chunker._from <= len(chunker._text)


def test_cuts_have_no_control_over_what_is_said() -> None:
    """Every character is in one piece, once, also the odd ones."""
    text = "".join(chr(code) for code in range(0x20, 0x3100) if unicodedata.category(chr(code)) != "Cn")
    for unit in ("sentence", "clause"):
        assert "".join(pieces(unit, [text])) == text
