"""Single values of flags, read and checked: a `ValueError` names the flag, the value and the limit.

Not here: which flags there are (`gateway/bench/flags.py`), what they mean together
(`gateway/bench/options.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
# They say how a request and its answer are written, of which there is one way here.
RESERVED: Final = frozenset(
    ("host", "content-length", "content-type", "transfer-encoding", "connection", "keep-alive", "te")
) | frozenset(("trailer", "upgrade", "expect", "accept", "accept-encoding"))


class Given:
    """The command line's texts by name. A flag that was not given has its default, unchecked."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def has(self, name: str) -> bool:
        return self._given.get(name) is not None

    def text(self, name: str) -> str | None:
        """Not empty, and text: an argument may be any bytes."""
        value = self._given.get(name)
        if value == "":
            raise ValueError(f"{flag_name(name)} is empty; it must have a value, or be left out")
        if value is not None and not _is_utf8(str(value)):
            raise ValueError(f"{flag_name(name)} is {value!r}; it must be UTF-8")
        return None if value is None else str(value)

    def flag(self, name: str) -> bool:
        return bool(self._given.get(name))

    def words(self, name: str) -> Sequence[str]:
        words = tuple(self._given.get(name) or ())
        if not all(map(_is_utf8, words)):
            raise ValueError(f"{flag_name(name)} has bytes that are not UTF-8")
        return words

    def whole(self, name: str, default: T, least: int, most: int = 1 << 30) -> int | T:
        text = self.text(name)
        if text is None:
            return default
        return whole_number(flag_name(name), text, least, most)

    def number(self, name: str, default: T, above: float | None = None, most: float = 1e9) -> float | T:
        """At least 0, or over `above`."""
        text = self.text(name)
        if text is None:
            return default
        return number(flag_name(name), text, above, most)

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        text = self.text(name)
        if text is not None and text not in choices:
            raise ValueError(f"{flag_name(name)} is {text!r}; it must be one of {', '.join(choices)}")
        return default if text is None else text

    def parsed(self, name: str, default: str, parse: Callable[[str], T]) -> T:
        """What `parse` makes of the text; what it raises is told with the flag's name."""
        text = self.text(name)
        try:
            return parse(default if text is None else text)
        except ValueError as error:
            raise ValueError(f"{flag_name(name)}: {error}") from error

    def object(self, name: str) -> dict[str, Any]:
        text = self.text(name)
        if text is None:
            return {}
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{flag_name(name)} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{flag_name(name)} is {text[:60]!r}; it must be a JSON object")
        return value


def flag_name(name: str) -> str:
    return "URL" if name == "url" else "--" + name.replace("_", "-")


def _is_utf8(text: str) -> bool:
    """Python reads bytes that are not as halves of surrogate pairs, which no request can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole_number(flag: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ValueError(f"{flag} is {text!r}; it must be a whole number from {least} to {most}")
    return value


def number(flag: str, text: str, above: float | None, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    is_enough = value >= 0 if above is None else value > above
    if not (is_enough and value <= most):
        bound = "at least 0" if above is None else f"above {above:g}"
        raise ValueError(f"{flag} is {text!r}; it must be a number {bound} and at most {most:g}")
    return value


def share(flag: str, text: str) -> float:
    """0.01 or 1%."""
    value = number(flag, text.removesuffix("%"), None, 100.0 if text.endswith("%") else 1.0)
    return value / 100 if text.endswith("%") else value


def headers(words: Sequence[str]) -> tuple[tuple[bytes, bytes], ...]:
    """`NAME:VALUE` each, names in lower case. A value is a secret perhaps, and is not told."""
    pairs = []
    for number, word in enumerate(words, 1):
        name, colon, value = word.partition(":")
        name, value = name.strip().lower(), value.strip()
        is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if not colon or not is_name or not value.isascii() or not value.isprintable():
            raise ValueError(
                f"--header {number} is not NAME:VALUE; it must have a colon and printable ASCII characters"
            )
        if name in RESERVED:
            raise ValueError(f"--header {number} is {name!r}, which the load test writes itself")
        pairs.append((name.encode(), value.encode()))
    return tuple(pairs)
