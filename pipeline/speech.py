"""Cuts an answer's text where a voice may pause: a text-to-speech model wants whole clauses or sentences.

A piece ends before the first character of the next, so that white space after a mark stays with it, and the
character after that decides. Where, is a matter of the text alone, not of the parts in which it comes.

    line       a line end always ends a piece
    sentence   . ! ? … 。！？ ؟ ۔ । and the like, with the quotes and brackets that close after them
    clause     , ; : — ，、；： ، ؛ and – between spaces; sentences end one, too
    too long   after MAX_PIECE characters: after the last clause, else the last space, else between two
               characters as a reader sees them (UAX #29: marks, joined emoji, flags, conjuncts stay whole)

* A piece says something: without a letter or digit it waits for the next.
* Marks of scripts that write spaces end a piece only before white space (3.14, v1.2, 10:30, addresses), or
  before Chinese and Japanese. The others need none, but no clause ends between two digits.
* A dot ends no sentence before a small letter (UAX #29, SB8), after an initial (J. R.), dotted letters (U.S.,
  e.g.) or a title and the like (Dr.), between a word that takes a number and that (No. 5), nor after a number
  of one or two digits: that begins a list's line, or is a German ordinal (am 3. Mai). A missed end costs some
  delay; an invented one is heard.
* A clause has MIN_CLAUSE characters, Chinese and Japanese ones counted twice, or waits for the next.

Linear in the text. Not here: what the pieces are for.
"""

from __future__ import annotations

import re
from typing import Final, Literal
from unicodedata import category, combining

Unit = Literal["clause", "sentence"]
Speech = Literal["token", Unit]  # what an answer is sent by: as it comes, or in pieces

MIN_CLAUSE: Final = 8
MAX_PIECE: Final = 240

_WIDE_ENDS: Final = "。！？｡؟۔।॥።։"  # need no space after them
_ENDS: Final = "!?‼⁇⁈⁉"
_SPACED_ENDS: Final = f"…{_ENDS}"
_SENTENCE: Final = f".{_SPACED_ENDS}{_WIDE_ENDS}"
_WIDE_CLAUSES: Final = "，、；：､،؛—"
_CLAUSE: Final = f",;:–{_WIDE_CLAUSES}"
_LINE: Final = "\n\r\v\f\x85\u2028\u2029"
_NO_BREAK: Final = "\xa0\u202f"
_JOINER: Final = "\u200d"
_FLAGS: Final = "".join(map(chr, range(0x1F1E6, 0x1F200)))  # two of them are a flag
_CLOSERS: Final = f"\"'”’)]}}）】」』》〉〕］｝»›*_`~{_NO_BREAK}\ufe0e\ufe0f\u20e3"
_GERMAN_CLOSERS: Final = "“‘«‹"  # others open with them
_OPENERS: Final = "\"'“”‘’„‚«»‹›([{*_`~#"


def _one_of(characters: str) -> str:
    return f"[{re.escape(characters)}]"


# A place where a piece may end: marks, what closes after them, white space. Possessive, so that nothing is
# read twice. It is known when the character after it is.
_GAP: Final = rf"(?:(?!{_one_of(_NO_BREAK)})\s\s*+)?+"
_PLACE: Final = re.compile(
    rf"""(?P<sentence>{_one_of(_SENTENCE)}++)
        (?P<closers>(?: {_one_of(_CLOSERS)} | \s[»›](?!\w)  # French has a space before them
            | (?<={_one_of("." + _SPACED_ENDS)}){_one_of(_GERMAN_CLOSERS)} )*+)
        (?P<after>{_GAP})
    | (?P<clause>{_one_of(_CLAUSE)}++) {_one_of(_CLOSERS)}*+ (?P<behind>{_GAP})
    | {_one_of(_LINE)} \s*+""",
    re.VERBOSE,
)
_LINE_END: Final = re.compile(_one_of(_LINE))
_SPACES: Final = re.compile(r"\s++(?=\S)")
_SAID: Final = re.compile(r"[^\W_]")
_WIDE: Final = re.compile("[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")

_DOTTED: Final = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}")
_FEW_DIGITS: Final = re.compile(r"\d{1,2}")
_INITIAL: Final = re.compile(r"(?!I)[^\W\d_\u2e80-\ud7ff\uf900-\uffef]")
_TITLE: Final = re.compile(
    "mr|mrs|ms|mx|dr|prof|rev|hon|gen|col|capt|cpt|lt|sgt|sen|rep|gov|pres|st|mt|messrs|vs|approx|cf|"
    "hr|fr|frl|bzw|ca|vgl|inkl|exkl|zzgl|ggf|evtl|sog|bspw|geb|dipl|ing|mio|mrd|tsd|str|tel|"
    "sra?|sres|srta|mme|mlle|डॉ",
    re.IGNORECASE,
)
_NUMBERED: Final = re.compile(
    "nos?|nr|figs?|vols?|p|pp|ch|sec|art|eq|tab|abb|abs|kap|bd|n[uú]m|"
    "jan|feb|mar|apr|jun|jul|aug|sept?|o[ck]t|nov|de[cz]",
    re.IGNORECASE,
)


class SpeechChunker:
    """Text in, pieces out. All pieces joined are the text."""

    __slots__ = ("_from", "_text", "_unit")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._text = ""  # from the beginning of the piece
        self._from = 0  # what comes before decides nothing

    def feed(self, text: str) -> list[str]:
        """The pieces that end with this text."""
        self._text += text
        pieces: list[str] = []
        start = 0
        while (cut := self._cut(start)) is not None:
            pieces.append(self._text[start:cut])
            start = self._from = cut
        if start:
            self._text = self._text[start:]
            self._from -= start
        return pieces

    def flush(self) -> str:
        """The text ends: its last piece. What is fed after it is another text."""
        rest, self._text, self._from = self._text, "", 0
        return rest

    def _cut(self, start: int) -> int | None:
        """Where the piece that begins at `start` ends; None if that is not known yet."""
        text, last = self._text, start + MAX_PIECE
        known = min(len(text), last + 1)
        is_clause = self._unit == "clause"
        for place in _PLACE.finditer(text, self._from, known):
            if place.end() == known:
                self._from = place.start()
                break
            self._from = place.end()
            if _ends_sentence(text, start, place) or (is_clause and _ends_clause(text, start, place)):
                return self._from
        else:
            self._from = known
        return _forced_cut(text, start, last) if known > last else None


def _ends_sentence(text: str, start: int, place: re.Match[str]) -> bool:
    """Whether the piece that begins at `start` ends with this place as a sentence or a line does."""
    if not _says_something(text, start, place):
        return False
    marks, gap, next_one = place["sentence"], place["after"], text[place.end()]
    if marks is None:
        return place["clause"] is None or _LINE_END.search(place["behind"]) is not None
    if _LINE_END.search(gap):
        return True
    if next_one in _SENTENCE:  # dots with spaces between them
        return False
    if not set(marks).isdisjoint(_WIDE_ENDS):
        return True
    before = text[start : place.start()]
    if not gap and not (_WIDE.match(next_one) and (marks != "." or _WIDE.match(before[-1]))):
        return False
    if not set(marks).isdisjoint(_ENDS):
        return not (next_one.islower() and place["closers"])  # "Why?" he said
    if next_one.islower():
        return False
    return marks != "." or not _keeps_dot(before, next_one)


def _ends_clause(text: str, start: int, place: re.Match[str]) -> bool:
    """Whether a clause that begins at `start` ends with this place."""
    if not _says_something(text, start, place):
        return False
    before, next_one = text[start : place.start()], text[place.end()]
    marks, gap = place["clause"], place["behind"]
    if marks is None:  # such as end no sentence here
        if place["sentence"] == "." or not place["after"] or next_one in _SENTENCE:
            return False
    elif marks[-1] in _WIDE_CLAUSES or marks == "–":
        if before.rstrip()[-1].isdigit() and next_one.isdigit():
            return False
        if marks == "–" and not (gap and before[-1].isspace()):
            return False
    elif not gap:
        return False
    piece = text[start : place.end()][: 2 * MIN_CLAUSE].strip()
    return len(piece) + len(_WIDE.findall(piece)) >= MIN_CLAUSE


def _says_something(text: str, start: int, place: re.Match[str]) -> bool:
    """Whether something was said before this place, and no character goes on after it."""
    return _SAID.search(text, start, place.start()) is not None and not _extends(text[place.end()])


def _keeps_dot(before: str, next_one: str) -> bool:
    """Whether the dot after this text belongs to its last word and ends no sentence."""
    if before[-1].isspace():
        return False
    word = before.split()[-1].lstrip(_OPENERS)
    if next_one.isdigit() and _NUMBERED.fullmatch(word):
        return True
    return any(kept.fullmatch(word) for kept in (_TITLE, _DOTTED, _FEW_DIGITS, _INITIAL))


def _forced_cut(text: str, start: int, last: int) -> int:
    """The end, at `last` at most, of a piece that has no better one."""
    for pattern, ends in ((_PLACE, _ends_clause), (_SPACES, _says_something)):
        cuts = [
            place.end()
            for place in pattern.finditer(text, start, last + 1)
            if place.end() <= last and ends(text, start, place)
        ]
        if cuts:
            return cuts[-1]
    for at in range(last, start, -1):
        if not _is_within(text, start, at):
            return at
    return last


def _is_within(text: str, start: int, at: int) -> bool:
    """Whether a character as a reader sees it goes on at this place."""
    before, after = text[at - 1], text[at]
    if _extends(after) or before == _JOINER or combining(before) == 9:  # 9: a virama joins what follows
        return True
    if not (_is_flag(before) and _is_flag(after)):
        return False
    flags = text[start:at]
    return (len(flags) - len(flags.rstrip(_FLAGS))) % 2 == 1


def _extends(character: str) -> bool:
    """Whether it belongs to the character before it: marks, joiners, skin tones, halves of surrogates."""
    if character.isascii():
        return False
    return (
        category(character) in ("Mn", "Mc", "Me", "Cf")
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or "\udc00" <= character <= "\udfff"
    )


def _is_flag(character: str) -> bool:
    return character in _FLAGS
