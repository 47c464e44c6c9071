"""Personal data by its shape: mobile numbers, payment cards, identity numbers, e-mail and IP addresses.

Each detector is a pure function over folded text (full-width and circled digits are digits there):

    find(text, at, is_last) -> (matches, decided)

It looks for what begins at `at` or later. What begins before `decided` is decided; what begins later needs
more text, unless the text `is_last`. The result does not depend on how the text arrives: a match depends on
at most `LOOK_BACK` characters before it and `LOOK_AHEAD` from its start on. A stream holds the text from
`decided` on.

Numbers are taken apart into groups of digits, which are never cut, so no number is found inside a longer
one. Groups joined by single spaces or hyphens count as one number if they are written as such numbers are
(4-4-4-4, 3-4-4, …). Where several readings are valid, the longest wins, whichever of them a rule asks for: 16
digits that pass Luhn's test are a card, never a telephone number and some digits more.

What a stream holds for each class, at the end of what it has read:

* `phone_cn`, `card`, `id_cn`: a number that is under way, with its spaces, hyphens and `+`: at most 33
  characters. Nothing in text without digits.
* `email`: the run of letters, digits and `._%+-` that may be a local part (4 characters in English on
  average, at most 64; none in Chinese); after an `@` also what may be a domain, at most 255 more.
* `ip`: a run of digits, the letters a to f, colons and dots, at most 64 characters; 1 in English on average.

A call stops early after `MAX_TRIES` places where something may begin, so that it takes 1 ms at most: then
`decided` is where to go on, if need be with the same text.

Not here: which rule asks for what (`tracks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import Final, NamedTuple

PII_CLASSES: Final = ("phone_cn", "email", "card", "id_cn", "ip")
LOOK_BACK: Final = 65
LOOK_AHEAD: Final = 320
MAX_TRIES: Final = 64

Match = tuple[int, int, str]  # start, end, class
Detector = Callable[[str, int, bool], tuple[list[Match], int]]

# What a number may look like, S for an optional separator. Mobile: with or without the country code.
_S: Final = "[ -]?"
_PHONE_PREFIX: Final = rf"(?:(?:\+|00)?86{_S})?"
_PHONE_SHAPES: Final = (
    f"1[3-9][0-9]{_S}[0-9]{{4}}{_S}[0-9]{{4}}",
    f"1[3-9][0-9]{{2}}{_S}[0-9]{{4}}{_S}[0-9]{{3}}",
)
_CARD_SHAPES: Final = (
    "[0-9]{13,19}",
    f"[0-9]{{4}}{_S}[0-9]{{4}}{_S}[0-9]{{4}}{_S}[0-9]{{4}}{_S}[0-9]{{1,3}}",
    f"[0-9]{{4}}{_S}[0-9]{{4}}{_S}[0-9]{{4}}{_S}[0-9]{{1,5}}",
    f"[0-9]{{4}}{_S}[0-9]{{6}}{_S}[0-9]{{4,5}}",
    f"[0-9]{{6}}{_S}[0-9]{{7,13}}",
)
_ID_SHAPES: Final = (
    f"[0-9]{{6}}{_S}[0-9]{{8}}{_S}[0-9]{{3}}[0-9x]",
    f"[0-9]{{6}}{_S}[0-9]{{4}}{_S}[0-9]{{4}}{_S}[0-9]{{3}}[0-9x]",
)
_NUMBER_END: Final = r"(?![0-9])(?!\.[0-9])"
_MAX_NUMBER: Final = 32  # the longest shape, and what must not follow it
_NUMBER_CHARS: Final = "0123456789 -.x"

_LONG_NUMBER: Final = re.compile("[0-9][0-9 -]{9,}[0-9x]")
_GROUP: Final = re.compile("[0-9]+")
_CUT: Final = re.compile(r".?[0-9]\Z|[0-9]\.\Z", re.DOTALL)

_DOMAIN_CHARS: Final = "abcdefghijklmnopqrstuvwxyz0123456789.-"
_LOCAL_CHARS: Final = "abcdefghijklmnopqrstuvwxyz0123456789._%+-"
_MAX_LOCAL: Final = 64  # RFC 5321, 4.5.3.1.1
_MAX_DOMAIN: Final = 255
_DOMAIN: Final = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.){1,8}(?:xn--[a-z0-9-]{2,59}|[a-z]{2,24})(?![a-z0-9])"
)

_IP_CHARS: Final = "0123456789abcdef:."
_IP_RUN: Final = re.compile("[0-9a-f:.][0-9a-f:.]{2,}")  # the first apart, or `re` is five times slower
_MAX_IP_RUN: Final = 64
_IPV4: Final = re.compile(r"(?<![0-9a-f])(?<![0-9a-f]\.)[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?!\.?[0-9a-f])")
_LATIN: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")

# Provinces (GB/T 2260) that identity numbers begin with.
_PROVINCES: Final = frozenset(
    map(str, (*range(11, 16), 21, 22, 23, *range(31, 38), *range(41, 47), *range(50, 55), *range(61, 66)))
) | {"71", "81", "82", "83"}
_ID_WEIGHTS: Final = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)  # 2^(17-i) mod 11
_ID_CHECKS: Final = "10x98765432"


def find_numbers(text: str, at: int, is_last: bool) -> tuple[list[Match], int]:
    """`phone_cn`, `card` and `id_cn`."""
    decided = len(text) if is_last else max(at, _open_number(text))
    matches: list[Match] = []
    num_tries = 0
    for run in _LONG_NUMBER.finditer(text, at):
        for group in _GROUP.finditer(text, run.start(), run.end()):
            start = group.start() - (text[group.start() - 1 : group.start()] == "+")
            if start >= decided:
                return matches, max(decided, at)
            if start < at or not _begins_number(text, group):
                continue
            if num_tries == MAX_TRIES:
                return matches, start
            num_tries += 1
            match = _number_at(text, start)
            if match is not None:
                matches.append(match)
                at = match[1]
    return matches, max(decided, at)


def find_emails(text: str, at: int, is_last: bool) -> tuple[list[Match], int]:
    """`email`: ASCII local part and domain. A local part of more than 64 characters is none."""
    decided = len(text) if is_last else max(at, len(text) - len(_local_part(text, len(text))[-_MAX_LOCAL:]))
    matches: list[Match] = []
    num_tries, sign = 0, text.find("@", at)
    while sign >= 0:
        local = _local_part(text, sign)
        domain_end = _domain_end(text, sign + 1)
        if not is_last and domain_end == len(text) and domain_end <= sign + _MAX_DOMAIN:
            return matches, max(at, min(decided, sign - len(local[-_MAX_LOCAL:])))
        if num_tries == MAX_TRIES:
            return matches, max(at, sign - len(local))
        num_tries += 1
        start = max(at, sign - len(local))
        start += len(text[start:sign]) - len(text[start:sign].lstrip("._%+-"))
        domain = _DOMAIN.match(text, sign + 1, domain_end)
        if domain is not None and len(local) <= _MAX_LOCAL and start < sign:
            at = domain.end()
            matches.append((start, at, "email"))
        sign = text.find("@", sign + 1)
    return matches, max(decided, at)


def find_addresses(text: str, at: int, is_last: bool) -> tuple[list[Match], int]:
    """`ip`: IPv4, and IPv6 but for short forms that are code rather than addresses (`1::2`, `a::b`)."""
    decided = len(text) if is_last else max(at, _open_address(text))
    matches: list[Match] = []
    num_tries = 0
    for run in _IP_RUN.finditer(text, at):
        start, end = run.span()
        if start >= decided:
            break
        is_whole = end - start <= _MAX_IP_RUN and not (start and text[start - 1] in _IP_CHARS)
        if is_whole and (run[0].count(".") >= 3 or run[0].count(":") >= 2):
            if num_tries == MAX_TRIES:
                return matches, start
            num_tries += 1
            matches += _addresses_in(text, start, end)
    return matches, decided


def is_luhn(digits: str) -> bool:
    """ISO/IEC 7812-1: from the right every second digit is doubled; the sum of digits is a multiple of 10."""
    total = sum(map(int, digits[-1::-2])) + sum(sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return total % 10 == 0


def is_id_cn(number: str) -> bool:
    """GB 11643: province, birthday, and a check digit by ISO 7064 mod 11-2 over 17 digits."""
    if len(number) != 18 or number[:2] not in _PROVINCES or not _is_date(number[6:14]):
        return False
    total = sum(weight * int(digit) for weight, digit in zip(_ID_WEIGHTS, number, strict=False))
    return _ID_CHECKS[total % 11] == number[17]


def _is_date(text: str) -> bool:
    """YYYYMMDD, a day of a year from 1900 to 2099."""
    year, month, day = int(text[:4]), int(text[4:6]), int(text[6:])
    if not (1900 <= year <= 2099 and 1 <= month <= 12):
        return False
    is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return 1 <= day <= (31, 28 + is_leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1]


def _is_card(digits: str) -> bool:
    """Times in milliseconds and nanoseconds have 13 and 19 digits and begin with 1: those are no cards."""
    return is_luhn(digits) and not (len(digits) in (13, 19) and digits[0] == "1")


def _is_phone(digits: str) -> bool:
    return True  # its shape says it all


# In the order in which they win if equally long.
_NUMBERS: Final = tuple(
    (kind, re.compile(f"(?:{shape}){_NUMBER_END}"), is_valid)
    for kind, shapes, is_valid in (
        ("id_cn", _ID_SHAPES, is_id_cn),
        ("phone_cn", tuple(_PHONE_PREFIX + shape for shape in _PHONE_SHAPES), _is_phone),
        ("card", _CARD_SHAPES, _is_card),
    )
    for shape in shapes
)


def _open_number(text: str) -> int:
    """Where the number begins that the end of the text may belong to; the end of the text if to none."""
    tail = text[-_MAX_NUMBER:]
    number = tail[len(tail.rstrip(_NUMBER_CHARS)) :].lstrip(" -.x")
    start = len(text) - len(number)
    return start - (text[start - 1 : start] == "+")


def _open_address(text: str) -> int:
    """Where the run begins that the end of the text may be an address in; the end of the text if in none."""
    tail = text[-_MAX_IP_RUN - 1 :]
    num_open = len(tail) - len(tail.rstrip(_IP_CHARS))
    return len(text) - (num_open if num_open <= _MAX_IP_RUN else 0)


def _begins_number(text: str, group: re.Match[str]) -> bool:
    """Whether this group of digits is whole and no fraction, and long enough to be the first of a number."""
    start = group.start()
    if _CUT.match(text, max(0, start - 2), start):
        return False
    return group.end() - start > 2 or group[0] == "86"


def _number_at(text: str, start: int) -> Match | None:
    """The longest valid number that begins here."""
    best: Match | None = None
    for kind, shape, is_valid in _NUMBERS:
        found = shape.match(text, start)
        if found is None or (best is not None and found.end() <= best[1]):
            continue
        if is_valid("".join(char for char in found[0] if char not in " -+")):
            best = (start, found.end(), kind)
    return best


def _local_part(text: str, end: int) -> str:
    """The characters before `end` that may be the local part of an address, up to one too many."""
    before = text[max(0, end - _MAX_LOCAL - 1) : end]
    return before[len(before.rstrip(_LOCAL_CHARS)) :]


def _domain_end(text: str, start: int) -> int:
    """Where the characters end that may be the domain of an address."""
    after = text[start : start + _MAX_DOMAIN]
    return start + len(after) - len(after.lstrip(_DOMAIN_CHARS))


def _addresses_in(text: str, start: int, end: int) -> list[Match]:
    """What one whole run of digits, colons and dots contains."""
    while start < end and text[start] in ":." and text[start : start + 2] != "::":
        start += 1
    while start < end and text[end - 1] in ":." and text[end - 2 : end] != "::":
        end -= 1
    if _is_ipv6(text[start:end]):
        return [(start, end, "ip")] if _stands_alone(text, start, end) else []
    return [
        (found.start(), found.end(), "ip")
        for found in _IPV4.finditer(text, start, end)
        if all(int(octet) <= 255 for octet in found[0].split(".")) and _stands_alone(text, *found.span())
    ]


def _is_ipv6(text: str) -> bool:
    if text.count(":") < 2:
        return False
    try:
        IPv6Address(text)
    except ValueError:
        return False
    groups = text.split(":")
    is_plain = text == "::1" or len(groups) == 8 or any(len(group) > 2 for group in groups)
    return is_plain and not text.replace(":", "").isalpha()


def _stands_alone(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return not ((before in _LATIN and text[start] in _LATIN) or (after in _LATIN and text[end - 1] in _LATIN))


DETECTORS: Final[dict[str, Detector]] = {
    "phone_cn": find_numbers,
    "card": find_numbers,
    "id_cn": find_numbers,
    "email": find_emails,
    "ip": find_addresses,
}


class Signs(NamedTuple):
    """When a detector need not look, so that streams ask it seldom.

    `signs`: without one of these there is nothing to find. `run_chars`: what may become part of something if
    a sign comes; the last `max_run` of them, or of a longer run nothing at all. `shortest`: the fewest
    characters of a match.
    """

    signs: str
    run_chars: str
    max_run: int
    keeps_end_of_run: bool
    shortest: int


SIGNS: Final[dict[Detector, Signs]] = {
    find_numbers: Signs("0123456789+", "", 0, False, 11),
    find_emails: Signs("@", _LOCAL_CHARS, _MAX_LOCAL, True, 6),
    find_addresses: Signs("0123456789:", _IP_CHARS, _MAX_IP_RUN, False, 3),
}
