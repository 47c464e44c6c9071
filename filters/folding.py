"""The default folding: which characters count as the same when keywords are matched.

One table, made from one function of one character, serves keywords and text alike, so the two cannot drift
apart. A character folds to nothing (it is skipped for matching), to one character, or to several (`㎏` to
`kg`, `ß` to `ss`). Offsets are never folded: whoever folds a text keeps the raw offset of each folded
character.

What folds: case (Unicode case folding), full and half width, everything else that NFKC unifies in a single
character (mathematical, circled, superscript letters, ligatures), negative circled and squared letters, which
NFKC leaves alone, traditional Chinese to simplified (`chinese.py`). What is skipped: zero-width characters,
joiners, bidi controls, tags, variation selectors, fillers.

Not here: sequences of several characters (`e` + U+0301 stays two characters, unlike `é`), and the foldings
that a rule asks for (`rule_folding.py`: interleaved symbols, repeats, digits, leet).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from unicodedata import normalize

from filters.chinese import SIMPLIFIED, TRADITIONAL

# Unicode's Default_Ignorable_Code_Point (DerivedCoreProperties.txt), and the interlinear annotation marks
# U+FFF9 to U+FFFB, which renderers hide as well.
_IGNORABLE_RANGES = (
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFFB),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)
# Every character that folds to something else lies in these blocks, or in `TRADITIONAL`; a test walks the
# whole of Unicode. Leaving out the large blocks (unified ideographs, Hangul syllables, private use) makes the
# table in 40 ms instead of 400.
_FOLDING_RANGES = (
    (0x0000, 0x33FF),
    (0xA000, 0xABFF),
    (0xF900, 0xFFFF),
    (0x10000, 0x1FFFF),
    (0x2F800, 0x2FA1F),
    (0xE0000, 0xE0FFF),
)

_IGNORABLE = frozenset(chr(code) for first, last in _IGNORABLE_RANGES for code in range(first, last + 1))
_SIMPLIFIED_OF = dict(zip(TRADITIONAL, SIMPLIFIED, strict=True))
_NEGATIVE_LETTER_BLOCKS = (0x1F150, 0x1F170)  # negative circled A to Z, negative squared A to Z

# Scripts written without spaces between words: a neighbour from here never continues a Latin word.
_UNSPACED_RANGES = (
    (0x2E80, 0x9FFF),  # radicals, kana, bopomofo, Hangul letters, ideographs
    (0xAC00, 0xD7FF),  # Hangul syllables
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0xA960, 0xA97F),
    (0xF900, 0xFAFF),
    (0x1AFF0, 0x1B16F),
    (0x20000, 0x3FFFF),
)


def fold_char(char: str) -> str:
    """What one character folds to: zero, one or several characters, each of which folds to itself."""
    if char in _IGNORABLE:
        return ""
    for first in _NEGATIVE_LETTER_BLOCKS:
        if first <= ord(char) < first + 26:
            return chr(ord("a") + ord(char) - first)
    folded = normalize("NFKC", normalize("NFKC", char).casefold())
    folded = _SIMPLIFIED_OF.get(folded, folded)
    return folded if folded == char else "".join(map(fold_char, folded))


@cache
def fold_table() -> dict[str, str]:
    """`fold_char` of every character that it changes. Made on first use, shared: not to be written to."""
    chars = (chr(code) for first, last in _FOLDING_RANGES for code in range(first, last + 1))
    table = {char: folded for char in chars if (folded := fold_char(char)) != char}
    return table | {char: fold_char(char) for char in TRADITIONAL}


def fold(text: str) -> str:
    """A text folded character by character."""
    return text.lower() if text.isascii() else fold_and_tell(text)[0]


def fold_and_tell(text: str) -> tuple[str, bool]:
    """A text folded, and whether each of its characters folded to exactly one (`uneven` tells which did not).

    Microseconds for 1,000 characters: Chinese 12, Chinese in traditional characters 60, English below 1. The
    losers were a look-up for each character (80), and a `str.replace` for each distinct character that folds
    (10 and 140), found by `set(text)` (37 more).
    """
    if text.isascii():
        return text.lower(), True
    folded, changed = replace_found(may_fold(), text, fold_table())
    return folded, _uneven().isdisjoint(changed)


def replace_found(pattern: re.Pattern[str], text: str, table: dict[str, str]) -> tuple[str, list[str]]:
    """`text` with every character that `char_class` finds replaced as the table says; and those found."""
    parts = pattern.split(text)
    found = parts[1::2]
    if not found:
        return text, found
    parts[1::2] = map(table.get, found, found)
    return "".join(parts), found


def uneven(text: str) -> Iterator[tuple[int, int]]:
    """(offset, number of folded characters) of each character that does not fold to exactly one."""
    table, uneven_chars = fold_table(), _uneven()
    for found in _may_be_uneven().finditer(text):
        if found[0] in uneven_chars:
            yield found.start(), len(table[found[0]])


def char_class(chars: Iterable[str], more: str = "") -> re.Pattern[str]:
    """A regular expression for these characters and more: `more`, and all beyond U+FFFF if one of them is.

    Python's matcher looks up a class of characters below U+10000 in a table, 5 ns for each character of a
    text, and goes through a list of ranges (120 ns) for others.
    """
    chars = set(chars)
    codes = sorted(ord(char) for char in chars if char <= "\uffff")
    starts = [code for i, code in enumerate(codes) if not i or codes[i - 1] != code - 1]
    ends = [code for i, code in enumerate(codes) if i + 1 == len(codes) or codes[i + 1] != code + 1]
    ranges = [f"\\u{start:04x}-\\u{end:04x}" for start, end in zip(starts, ends, strict=True)]
    if any(char > "\uffff" for char in chars):
        ranges.append("\\U00010000-\\U0010ffff")
    return re.compile(f"([{''.join(ranges)}{more}])")


@cache
def may_fold() -> re.Pattern[str]:
    """Finds the characters that fold to something else, and some beyond U+FFFF that do not."""
    return char_class(fold_table())


@cache
def _uneven() -> frozenset[str]:
    return frozenset(char for char, folded in fold_table().items() if len(folded) != 1)


@cache
def _may_be_uneven() -> re.Pattern[str]:
    return char_class(_uneven())


@cache
def variants(char: str) -> tuple[str, ...]:
    """The common characters that fold to this folded one: upper case, full width, traditional."""
    forms = [char, char.upper()]
    forms += [chr(ord(form) + 0xFEE0) for form in forms if len(form) == 1 and "!" <= form <= "~"]
    forms += _traditional_of().get(char, ())
    return tuple(
        form for form in dict.fromkeys(forms) if form != char and len(form) == 1 and fold_char(form) == char
    )


@cache
def _traditional_of() -> dict[str, list[str]]:
    forms: dict[str, list[str]] = {}
    for traditional, simplified in _SIMPLIFIED_OF.items():
        forms.setdefault(simplified, []).append(traditional)
    return forms


def is_word_char(char: str) -> bool:
    """Whether this folded character continues a word of a script that puts spaces between words.

    Letters and digits do; the underscore does not (in Markdown it is emphasis), and neither do CJK and other
    unspaced scripts.
    """
    if "\u2e80" <= char <= "\u9fff":  # the quick answer for most Chinese and Japanese text
        return False
    if char < "\u0e00" or not char.isalnum():
        return char.isalnum()
    code = ord(char)
    return not any(first <= code <= last for first, last in _UNSPACED_RANGES)
