"""What a scan of a whole text must find, written a second time: by brute force, with personal data, per-rule
foldings, and phrases of all rules.

Shares nothing with the code under test but `Rule` and `Hit`. Characters fold by the table here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from ipaddress import ip_address

from filters.hit import Hit
from filters.rules import Rule

FOLDS = {
    **{char: char for char in "abcdefghijklmnopqrstuvwxyz0123456789 .-+:@*_#%战发一二三傻帽感敏$!元"},
    **dict(zip("ABX１２３８＠：", "abx1238@:", strict=True)),
    "戰": "战", "發": "发", "髮": "发", "①": "1", "㏄": "cc", "…": "...", "\u200b": "", "\ufe0f": "",
    "٣": "٣",
}  # fmt: skip
DIGITS = {"一": "1", "二": "2", "三": "3", "٣": "3"}
LEET = dict(zip("0134578629@$!l+", "oieastbgzgasiit", strict=True))


@dataclass(frozen=True)
class Unit:
    """A folded character, or with `repeats` a run of it."""

    char: str
    start: int  # raw
    end: int
    count: int = 1


def units(raw: str, rule: Rule) -> list[Unit]:
    found: list[Unit] = []
    for at, raw_char in enumerate(raw):
        for char in FOLDS[raw_char]:
            if rule.digits:
                char = DIGITS.get(char, char)
            if rule.leet:
                char = LEET.get(char, char)
            if rule.skip_symbols and not char.isalnum():
                continue
            if rule.repeats and found and found[-1].char == char:
                found[-1] = Unit(char, found[-1].start, at + 1, found[-1].count + 1)
            else:
                found.append(Unit(char, at, at + 1))
    return found


@dataclass(frozen=True)
class Match:
    rule: Rule
    is_phrase: bool
    start: int  # among the units
    end: int
    raw_start: int
    raw_end: int


def is_word(unit: Unit) -> bool:
    return unit.char.isalnum() and unit.char < "\u2e80"


def occurrences(raw: str, pattern: str, rule: Rule, is_phrase: bool, whole: bool) -> Iterator[Match]:
    text, wanted = units(raw, rule), units(pattern, rule)
    for start in range(len(text) - len(wanted) + 1):
        end = start + len(wanted)
        pairs = list(zip(text[start:end], wanted, strict=True))
        if not all(have.char == want.char and have.count >= want.count for have, want in pairs):
            continue
        if whole and start and is_word(text[start - 1]) and is_word(text[start]):
            continue
        if whole and end < len(text) and is_word(text[end - 1]) and is_word(text[end]):
            continue
        yield Match(rule, is_phrase, start, end, text[start].start, text[end - 1].end)


def all_matches(raw: str, rules: Sequence[Rule]) -> list[Match]:
    found: set[Match] = set()
    for rule in rules:
        for keyword in rule.match:
            found.update(occurrences(raw, keyword, rule, rule.action == "allow", rule.whole_word))
        for phrase in rule.allow:
            found.update(occurrences(raw, phrase, rule, True, False))
        if rule.pii:
            text = units(raw, rule)
            folded = "".join(unit.char for unit in text)
            for start, end in spans_of(folded, rule.pii):
                found.add(Match(rule, False, start, end, text[start].start, text[end - 1].end))
    return list(found)


def foldings(rule: Rule) -> tuple[bool, ...]:
    return rule.skip_symbols, rule.repeats, rule.digits, rule.leet


def excuses(phrase: Match, match: Match) -> bool:
    if not phrase.is_phrase or not (phrase.rule is match.rule or phrase.rule.action == "allow"):
        return False
    if foldings(phrase.rule) == foldings(match.rule):
        return phrase.start <= match.start and match.end <= phrase.end
    return phrase.raw_start <= match.raw_start and match.raw_end <= phrase.raw_end


def expected(raw: str, rules: Sequence[Rule]) -> tuple[set[Hit], str | None, bool]:
    """Hits (up to the end of the first block), the rewritten text, and whether it is blocked."""
    matches = all_matches(raw, rules)
    stands = [m for m in matches if not m.is_phrase and not any(excuses(p, m) for p in matches)]
    blocks = [m.raw_end for m in stands if m.rule.is_active and m.rule.action == "block"]
    if blocks:
        stands = [m for m in stands if m.raw_end <= min(blocks)]
    hits = {Hit(m.rule.id, m.rule.action, m.raw_start, m.raw_end, m.rule.shadow) for m in stands}
    spans = [(m.raw_start, m.raw_end, m.rule) for m in stands if m.rule.is_active]
    return hits, None if blocks else rewritten(raw, spans), bool(blocks)


def rewritten(raw: str, spans: list[tuple[int, int, Rule]]) -> str:
    spans = sorted(spans, key=lambda span: (span[0], -span[1], span[2].action == "mask"))
    out, at = "", 0
    while spans:
        start, end, rule = spans.pop(0)
        while spans and spans[0][0] < end:
            end = max(end, spans.pop(0)[1])
        out += raw[at:start] + (
            rule.replacement * (end - start) if rule.action == "mask" else rule.replacement
        )
        at = end
    return out + raw[at:]


# Personal data.


def is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


SHAPES = {
    "id_cn": [(18, {6, 14}), (18, {6, 10, 14})],
    "phone_cn": [(11, {3, 7}), (11, {4, 8})],
    "card": [
        *((size, set[int]()) for size in range(13, 20)),
        *((size, {4, 8, 12, 16}) for size in range(17, 20)),
        *((size, {4, 8, 12}) for size in range(13, 18)),
        *((size, {4, 10}) for size in (14, 15)),
        *((size, {6}) for size in range(13, 20)),
    ],
}


def spans_of(text: str, kind: str) -> list[tuple[int, int]]:
    if kind in SHAPES:
        return [(start, end) for start, end, found in numbers(text) if found == kind]
    return list(emails(text) if kind == "email" else addresses(text))


def numbers(text: str) -> Iterator[tuple[int, int, str]]:
    at = 0
    while at < len(text):
        candidates = [
            (end, -rank, kind)
            for end in range(at + 11, min(len(text), at + 32) + 1)
            for rank, kind in enumerate(SHAPES)
            if is_number(text, at, end, kind)
        ]
        if candidates:
            end, _, kind = max(candidates)
            yield at, end, kind
            at = end
        else:
            at += 1


def is_number(text: str, start: int, end: int, kind: str) -> bool:
    number, before, after = text[start:end], text[:start], text[end:]
    first = number.removeprefix("+")
    if not is_digits(first[:1]) or not (is_digits(number[-1]) or number[-1] == "x"):
        return False
    if first == number and before[-1:] == "+":
        return False  # it begins with the sign
    is_fraction = before[-1:] == "." and is_digits(before[-2:-1]) and len(before) > 1
    if first == number and (is_digits(before[-1:]) or is_fraction):
        return False
    if is_digits(after[:1]) or (after[:1] == "." and is_digits(after[1:2])):
        return False
    if kind == "phone_cn":
        for prefix in ("+86", "0086", "86"):
            if number.startswith(prefix):
                rest = number.removeprefix(prefix)
                return is_shape(rest[1:] if rest[:1] in (" ", "-") else rest, kind)
    return is_shape(number, kind)


def is_shape(number: str, kind: str) -> bool:
    digits, cuts = "", set()
    for i, char in enumerate(number):
        if char in " -":
            if not i or number[i - 1] in " -":
                return False
            cuts.add(len(digits))
        else:
            digits += char
    if not any(len(digits) == size and cuts <= allowed for size, allowed in SHAPES[kind]):
        return False
    if kind == "phone_cn":
        return is_digits(digits) and digits[0] == "1" and digits[1] in "3456789"
    if kind == "card":
        return is_digits(digits) and luhn(digits) and not (len(digits) in (13, 19) and digits[0] == "1")
    return is_id(digits)


def luhn(digits: str) -> bool:
    doubled = [
        int(c) if i % 2 == 0 else [0, 2, 4, 6, 8, 1, 3, 5, 7, 9][int(c)] for i, c in enumerate(digits[::-1])
    ]
    return sum(doubled) % 10 == 0


def is_id(digits: str) -> bool:
    if not is_digits(digits[:17]) or digits[:2] not in {"11", "31", "44", "50", "81"}:
        return False
    try:
        born = date(int(digits[6:10]), int(digits[10:12]), int(digits[12:14]))
    except ValueError:
        return False
    values = [10 if char == "x" else int(char) for char in digits]
    return 1900 <= born.year <= 2099 and sum(v * 2**i for i, v in enumerate(reversed(values))) % 11 == 1


LOCAL = set("abcdefghijklmnopqrstuvwxyz0123456789._%+-")


def emails(text: str) -> Iterator[tuple[int, int]]:
    free = 0
    for sign in [i for i, char in enumerate(text) if char == "@"]:
        start = sign
        while start > 0 and text[start - 1] in LOCAL:
            start -= 1
        if sign - start > 64:
            continue
        start = max(start, free)
        while start < sign and text[start] in "._%+-":
            start += 1
        ends = [
            end for end in range(sign + 4, min(len(text), sign + 256) + 1) if is_domain(text[sign + 1 : end])
        ]
        ends = [end for end in ends if end == min(len(text), sign + 256) or text[end] not in ALNUM]
        if start < sign and ends:
            yield start, max(ends)
            free = max(ends)


ALNUM = set("abcdefghijklmnopqrstuvwxyz0123456789")


def is_domain(text: str) -> bool:
    *labels, top = text.split(".")
    for label in labels:
        if not label or set(label) - ALNUM - {"-"} or label[0] == "-" or label[-1] == "-" or len(label) > 63:
            return False
    return 1 <= len(labels) <= 8 and 2 <= len(top) <= 24 and top.isalpha() and top.isascii()


def addresses(text: str) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(text):
        end = at
        while end < len(text) and text[end] in "0123456789abcdef:.":
            end += 1
        if 3 <= end - at <= 64:
            yield from addresses_of_run(text, at, end)
        at = end + 1


def addresses_of_run(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    first, last = start, end
    while first < last and text[first] in ":." and text[first : first + 2] != "::":
        first += 1
    while first < last and text[last - 1] in ":." and text[last - 2 : last] != "::":
        last -= 1
    if is_ip(text[first:last], 6):
        if not glued(text, first, last):
            yield first, last
        return
    for begin in range(start, end):
        for stop in range(begin + 7, min(end, begin + 15) + 1):
            before, after = text[start:begin], text[stop:end]
            cut = before[-1:].isalnum() or (
                before[-1:] == "." and before[-2:-1].isalnum() and len(before) > 1
            )
            cut = cut or after[:1].isalnum() or (after[:1] == "." and after[1:2].isalnum())
            if not cut and is_ip(text[begin:stop], 4) and not glued(text, begin, stop):
                yield begin, stop


def is_ip(text: str, version: int) -> bool:
    if version == 4:
        parts = text.split(".")
        return len(parts) == 4 and all(p.isdigit() and len(p) <= 3 and int(p) <= 255 for p in parts)
    try:
        if text.count(":") < 2 or ip_address(text).version != 6:
            return False
    except ValueError:
        return False
    groups = text.split(":")
    long_enough = text == "::1" or len(groups) == 8 or max(map(len, groups)) >= 3
    return long_enough and any(char.isdigit() for char in text)


def glued(text: str, start: int, end: int) -> bool:
    word = ALNUM | {"_"}
    left = start > 0 and text[start - 1] in word and text[start] in word
    return left or (end < len(text) and text[end] in word and text[end - 1] in word)


# Random cases.

PIECES = {
    "numbers": (
        "138", "1234", "5678", "13812345678", "4111111111111111", "4111", "1111", "86", "+86", "0086", "1",
        "11", "110105", "19491231", "002x", "002X", "1１", "① ", " ", " ", "-", "-", ".", ".5", "+", "元",
        "x", "…", "\u200b", "5555555555554444", "371449635398431", "3714", "496353", "98431",
        "6222021234567890128",
    ),
    "emails": (
        "bob", "a", "@", "@", "＠", ".", ".", "com", "b.com", "co", "-", "_", "+", " ", "元", "1", "%", "…",
        "x" * 40,
    ),
    "addresses": (
        "10", "0", "1", "255", "256", ".", ".", ".", ".", ":", ":", "::", "fe80", "db8", "a", "g", " ", "元",
        "：", "192.168.1.1", "2001:db8::1", "::1", "_", "…",
    ),
    "symbols": ("傻", "帽", "傻帽", "@", " ", "*", "\u200b", "戰", "战", "…", "a", "敏", "感"),
    "runs": ("a", "a", "s", "f", "u", " ", "\u200b", "㏄", "c", "傻", "帽", "A"),
    "digits": ("1", "一", "2", "二", "3", "三", "٣", "①", " ", "感", "a", "0"),
    "leet": ("a", "4", "@", "s", "$", "5", "l", "1", "!", "i", " ", "0", "o", "感"),
}  # fmt: skip
OPTIONS = {"symbols": "skip_symbols", "runs": "repeats", "digits": "digits", "leet": "leet"}
KINDS = {"numbers": ("phone_cn", "card", "id_cn"), "emails": ("email",), "addresses": ("ip",)}


SAMPLES = {
    "phone_cn": ("138 1234 5678", "+8613812345678"),
    "card": ("4111-1111-1111-1111", "5555555555554444"),
    "id_cn": ("11010519491231002X", "110105 19491231 002x"),
    "email": ("bob@b.com", "a.b@a-b.co"),
    "ip": ("192.168.1.1", "fe80::1"),
}  # fmt: skip


def random_case(rng: random.Random, num_pieces: int = 12) -> tuple[tuple[Rule, ...], str]:
    """Rules of two themes, and a text of their pieces and keywords."""
    themes = rng.sample(sorted(PIECES), 2)
    rules = [random_rule(rng, rng.choice(themes), f"r{number}") for number in range(rng.randint(1, 4))]
    samples = [sample for rule in rules for sample in (*rule.match, *SAMPLES.get(rule.pii, ()))]
    pieces = [piece for theme in themes for piece in PIECES[theme]]
    if rng.random() < 0.5:
        # Excuses matches of all rules, under a folding that few of them have.
        phrase = rng.choice(("", *pieces)) + rng.choice(samples) + rng.choice(("", *pieces))
        options = dict.fromkeys(rng.sample(sorted(OPTIONS.values()), rng.randint(0, 2)), True)
        rules.append(Rule("fine", (phrase,), "allow", **options))  # type: ignore[arg-type]
        samples += [phrase]
    if not units("".join(rules[-1].match), rules[-1]) and not rules[-1].pii:
        rules.pop()
    places = range(rng.randint(0, num_pieces))
    return tuple(rules), "".join(rng.choice(samples if rng.random() < 0.3 else pieces) for _ in places)


def random_rule(rng: random.Random, theme: str, rule_id: str) -> Rule:
    action = rng.choice(("allow", "flag", "mask", "redact", "block"))
    if theme in KINDS and action != "allow" and rng.random() < 0.8:
        kind = rng.choice(KINDS[theme])
        allow = tuple(rng.sample(PIECES[theme], 1)) if rng.random() < 0.3 else ()
        allow = tuple(phrase for phrase in allow if units(phrase, Rule("x", (), "flag")))
        return Rule(rule_id, (), action, pii=kind, allow=allow, replacement=replacement_of(action))
    options = {OPTIONS[theme]: True} if theme in OPTIONS and rng.random() < 0.7 else {}
    folding = Rule("x", (), "flag", **options)  # type: ignore[arg-type]
    keywords = [random_keyword(rng, theme, folding) for _ in range(rng.randint(1, 3))]
    allow = ()
    if action != "allow" and rng.random() < 0.3:
        allow = (rng.choice(PIECES[theme]) + rng.choice(keywords) + rng.choice(PIECES[theme]),)
    whole = rng.random() < 0.3 and not options.get("skip_symbols")
    return Rule(
        rule_id,
        tuple(keywords),
        action,
        whole_word=whole,
        allow=allow,
        replacement=replacement_of(action),
        **options,  # type: ignore[arg-type]
    )


def random_keyword(rng: random.Random, theme: str, folding: Rule) -> str:
    while True:
        keyword = "".join(rng.choices(PIECES[theme], k=rng.randint(1, 4)))
        if 2 <= len(units(keyword, folding)) <= 6:
            return keyword


def replacement_of(action: str) -> str:
    return {"mask": "*", "redact": "##"}.get(action, "")
