"""Control strings: what gives a prompt its structure, and what no user's text may ever become.

A control string is every special token, and every added token that the chat template writes as structure
(`<think>` of Qwen3, the role tokens of DeepSeek-V3: neither is special). Ordinary added tokens (the blank
lines of Gemma, `<table>`) are text like any other. Not here: finding them in a template (`template_marks.py`)
and encoding (`encoding.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from tokenizers import Tokenizer

# Shorter added tokens that a template happens to contain, and words, are text.
_MIN_CHARACTERS: Final = 3


class ControlStrings:
    """The control strings of one model: their ids, and how they are found in a text."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids
        self.id_set = frozenset(ids.values())
        # Proper halves: where one text ends with the first and the next begins with the rest, both make one.
        self.beginnings = tuple({text[:end] for text in ids for end in range(1, len(text))})
        self.ends = tuple({text[start:] for text in ids for start in range(1, len(text))})
        self._heads = tuple(ids)
        self._pattern = re.compile(_alternatives(ids)) if ids else None

    def __len__(self) -> int:
        return len(self.ids)

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The first control string from `start` on; of several that begin there the longest."""
        return self._pattern.search(text, start) if self._pattern is not None else None

    def match(self, text: str) -> re.Match[str] | None:
        """The control string that a text begins with."""
        return self._pattern.match(text) if self._pattern is not None else None

    def begins(self, text: str) -> bool:
        """Whether a text begins with a control string: a third of the time of `match`."""
        return text.startswith(self._heads)

    def marked(self, text: str, mark: str) -> str:
        """The text with a mark before each control string."""
        return self._pattern.sub(lambda found: mark + found[0], text) if self._pattern is not None else text

    def split(self, text: str) -> list[str]:
        """The text cut before each control string; the first piece begins with none and may be empty."""
        if self._pattern is None:
            return [text]
        starts = [0, *(found.start() for found in self._pattern.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(starts)]


def control_strings(tokenizer: Tokenizer, template_literals: Iterable[str]) -> ControlStrings:
    """The control strings of a tokenizer whose template contains these literals."""
    literals = list(template_literals)
    ids: dict[str, int] = {}
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        text = token.content
        if token.special or (_is_markup(text) and any(text in literal for literal in literals)):
            ids[text] = token_id
    ids.pop("", None)
    return ControlStrings(ids)


def _is_markup(text: str) -> bool:
    return len(text) >= _MIN_CHARACTERS and not text.isspace() and not text.isalnum()


def _alternatives(texts: Iterable[str]) -> str:
    """A pattern for any of the texts, the longest first.

    What they begin with stands before the alternatives, so that `re` can skip through a text to the next such
    character: 20 times as quick on English text.
    """
    ordered = sorted(texts, key=len, reverse=True)
    heads = sorted({text[0] for text in ordered})
    head = re.escape(heads[0]) if len(heads) == 1 else "[" + "".join(map(re.escape, heads)) + "]"
    if len(heads) == 1:
        return head + "(?:" + "|".join(re.escape(text[1:]) for text in ordered) + ")"
    return f"(?={head})(?:" + "|".join(map(re.escape, ordered)) + ")"
