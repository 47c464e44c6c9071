"""The foldings that a rule asks for, on top of the default one. Off by default: each catches innocents too.

* `skip_symbols`: everything that is neither letter nor digit is skipped: 傻@帽, 傻 帽.
* `repeats`: a character that stands several times in a row counts once, and a keyword needs at least as many
  as it is written with: `fuck` finds `fuuuck`, `ass` finds `asss` but not `as`.
* `digits`: digits in other styles: 一二三, 壹贰叁, ٣, ❸.
* `leet`: `4` and `@` for a, `3` for e, `1`, `!`, `|` and l for i, `0` for o, `5` and `$` for s, and more.

Keywords and texts go through the same function.

Not here: the default folding (`folding.py`), and offsets (`reading.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Final
from unicodedata import digit

from filters.folding import char_class, fold_and_tell, fold_table, may_fold, replace_found, uneven

FOLDINGS: Final = ("skip_symbols", "repeats", "digits", "leet")

_NUMERALS: Final = dict(
    zip("〇零一二三四五六七八九壹贰叁肆伍陆柒捌玖弌弍弎", "00123456789123456789123", strict=True)
)
# l and i are one letter, for 1 stands for both.
_LEET: Final = dict(zip("4@8(©3€69!1|lℓ£05$72+¥", "aabcceegg" + "iiiiii" + "osstzty", strict=True))
_LAST_DIGIT: Final = 0x1FBF9  # segmented digit nine; no later character is a digit

Uneven = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Folding:
    """What is folded besides the default."""

    skip_symbols: bool = False
    repeats: bool = False
    digits: bool = False
    leet: bool = False

    def fold(self, text: str) -> str:
        """A keyword as it is looked for."""
        folded = self.read(text)[0]
        return "".join(char for char, _ in groupby(folded)) if self.repeats else folded

    def repeats_of(self, text: str) -> tuple[int, ...]:
        """How often each character of `fold(text)` stood in a row; empty if that does not matter."""
        if not self.repeats:
            return ()
        counts = tuple(len(list(group)) for _, group in groupby(self.read(text)[0]))
        return counts if max(counts, default=1) > 1 else ()

    def read(self, text: str) -> tuple[str, Uneven]:
        """A text folded, repeats left in; and (offset, number of folded characters) where that is not 1."""
        if not (self.skip_symbols or self.digits or self.leet):
            folded, is_even = fold_and_tell(text)
            return folded, [] if is_even else list(uneven(text))
        pattern = _may_change(self)
        table = {char: self._fold_char(char) for char in set(pattern.findall(text))}
        folded, _ = replace_found(pattern, text, table)
        if all(len(table[char]) == 1 for char in table):
            return folded, []
        places = ((place.start(), len(table[place[0]])) for place in pattern.finditer(text))
        return folded, [(start, size) for start, size in places if size != 1]

    def _fold_char(self, char: str) -> str:
        folded = fold_table().get(char, char)
        if self.digits:
            folded = "".join([_digits().get(each, each) for each in folded])
        if self.leet:
            folded = "".join([_LEET.get(each, each) for each in folded])
        if self.skip_symbols:
            folded = "".join([each for each in folded if each.isalnum()])
        return folded


DEFAULT: Final = Folding()


class PieceFolder:
    """`Folding.read` for the pieces of a stream, which are short: 0.2 us a token instead of 0.5 to 4."""

    def __init__(self, folding: Folding) -> None:
        self._folding = folding
        self._is_default = not (folding.skip_symbols or folding.digits or folding.leet)
        self._changing = may_fold() if self._is_default else _may_change(folding)
        folds = {char: folding._fold_char(char) for char in map(chr, range(128))}
        self._ascii = str.maketrans(folds)
        self._dropped = frozenset(char for char, folded in folds.items() if not folded)

    def read(self, piece: str) -> tuple[str, Uneven]:
        """As `Folding.read`."""
        if not piece.isascii():
            if self._changing.search(piece) is None:
                return piece, []
            return self._folding.read(piece)
        if self._is_default:
            return piece.lower(), []
        folded = piece.translate(self._ascii)
        if len(folded) == len(piece):
            return folded, []
        return folded, [(offset, 0) for offset, char in enumerate(piece) if char in self._dropped]


@cache
def _digits() -> dict[str, str]:
    """Folded characters that are a digit in another style."""
    found = {}
    for code in range(0x80, _LAST_DIGIT + 1):
        value = digit(chr(code), None)
        if value is not None:
            found[chr(code)] = str(value)
    return found | _NUMERALS


@cache
def _may_change(folding: Folding) -> re.Pattern[str]:
    chars = set(fold_table())
    if folding.digits:
        chars |= _digits().keys()
    if folding.leet:
        chars |= _LEET.keys()
    return char_class(chars, r"\W_" if folding.skip_symbols else "")
