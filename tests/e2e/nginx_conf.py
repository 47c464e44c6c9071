"""nginx's configuration language, as far as tests of our own files need it: blocks, words, sizes, times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(r"""\s+|\#[^\n]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[{};]|[^\s{};]+""")
_BYTES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True)
class Directive:
    """A name and its arguments, quotes removed; with a block, what is in it."""

    name: str
    args: tuple[str, ...]
    block: tuple[Directive, ...] = ()

    def all(self, name: str) -> list[Directive]:
        """Those of this name in the block itself."""
        return [each for each in self.block if each.name == name]

    def value(self, name: str) -> str:
        """The arguments of the only one of this name in the block itself. Raises `ValueError`."""
        (found,) = self.all(name)
        return " ".join(found.args)

    def everywhere(self) -> Iterator[Directive]:
        """Itself and all that is in it."""
        yield self
        for each in self.block:
            yield from each.everywhere()


def parse(text: str) -> Directive:
    """The file as the block of a directive without a name."""
    tokens = [token for token in _TOKEN.findall(text) if not token[0].isspace() and token[0] != "#"]
    block, rest = _block(tokens)
    assert not rest, f"unexpected {rest[:3]}"
    return Directive("", (), tuple(block))


def num_bytes(size: str) -> int:
    number, unit = _split(size)
    return int(number) * _BYTES[unit]


def num_seconds(time: str) -> float:
    number, unit = _split(time)
    return int(number) * _SECONDS[unit]


def _block(tokens: list[str]) -> tuple[list[Directive], list[str]]:
    """The directives up to the end of the block, and what follows."""
    found: list[Directive] = []
    words: list[str] = []
    while tokens and (token := tokens[0]) != "}":
        tokens = tokens[1:]
        if token == "{":
            inner, tokens = _block(tokens)
            assert tokens, "a block without an end"
            tokens = tokens[1:]
            found.append(Directive(words[0], tuple(words[1:]), tuple(inner)))
            words = []
        elif token == ";":
            found.append(Directive(words[0], tuple(words[1:])))
            words = []
        else:
            words.append(token[1:-1] if token[0] in "\"'" else token)
    assert not words, f"{words} without an end"
    return found, tokens


def _split(value: str) -> tuple[str, str]:
    match = re.fullmatch(r"(\d+)([a-z]*)", value.lower())
    assert match, value
    return match[1], match[2]
