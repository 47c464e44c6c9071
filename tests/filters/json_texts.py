"""Random JSON texts, written in every way that JSON allows, and texts that are almost JSON."""

from __future__ import annotations

import random
from typing import Any

CHARS = ["a", "b", "敏", "感", "词", "😀", '"', "\\", "/", "\n", "\x01", " ", "\ud83d", "\ude00", "é", "1"]
_SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\n": "\\n"}


def random_value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind < 3:
        return "".join(rng.choices(CHARS, k=rng.randint(0, 5)))
    if kind == 3:
        return rng.choice([0, -1, 12, 138, 10**20, 0.5, -1.25e-7, 1e22])
    if kind < 6:
        return rng.choice([True, False, None])
    if kind == 6:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    keys = ("".join(rng.choices(CHARS, k=rng.randint(0, 3))) for _ in range(rng.randint(0, 3)))
    return {key: random_value(rng, depth - 1) for key in keys}


def written(value: Any, rng: random.Random) -> str:
    """The value as JSON, with random escapes and whitespace."""
    if isinstance(value, str):
        return '"' + "".join(_char(char, rng) for char in value) + '"'
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return _within("[", [written(item, rng) for item in value], "]", rng)
    members = [
        written(key, rng) + _space(rng) + ":" + _space(rng) + written(item, rng)
        for key, item in value.items()
    ]
    return _within("{", members, "}", rng)


def _within(opening: str, parts: list[str], closing: str, rng: random.Random) -> str:
    return opening + _space(rng) + (_space(rng) + "," + _space(rng)).join(parts) + _space(rng) + closing


def _space(rng: random.Random) -> str:
    return rng.choice(["", "", "", " ", "\n", " \t\r"])


def _char(char: str, rng: random.Random) -> str:
    if char in _SHORT and rng.random() < 0.5:
        return _SHORT[char]
    if char in '"\\\n\x01\ud83d\ude00' or rng.random() < 0.3:
        units = char.encode("utf-16-be", "surrogatepass")
        code = [f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2)]
        return "".join(part.upper().replace("\\U", "\\u") if rng.random() < 0.3 else part for part in code)
    return char


def broken(text: str, rng: random.Random) -> str:
    """The text with a few characters changed, added or gone."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(text))
        text = text[:at] + rng.choice([*'{}[],:" \\u1e+-.0n\x02敏', ""]) + text[at + rng.randint(0, 1) :]
    return text
