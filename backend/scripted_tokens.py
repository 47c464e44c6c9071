"""What a scripted engine says: made-up ids that depend on seed and prompt alone, or a script's answers."""

from __future__ import annotations

import itertools
import json
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

TAPE_TOKENS: Final = 1 << 16  # a power of two: positions wrap with a mask


class ScriptError(ValueError):
    """A script file that cannot be used; the message names the file and the entry."""


def ordinary_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that a model would say in plain text: no added tokens, none that is a part of a character."""
    added = set(tokenizer.get_added_tokens_decoder())
    ids = sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - added)
    texts = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
    return [token for token, text in zip(ids, texts, strict=True) if text and "\ufffd" not in text]


class TokenTape:
    """An endless, reproducible answer for every prompt: a walk over one shared tape of ids.

    Seed, request seed and prompt choose where the walk starts and how far it steps, so that two prompts share
    no run of ids but by chance. 0.06 us per id, and no memory per stream.
    """

    def __init__(self, ids: Sequence[int], seed: int) -> None:
        if not ids:
            raise ValueError("the tokenizer has no ordinary tokens")
        self.ids = frozenset(ids)
        self._tape = random.Random(seed).choices(ids, k=TAPE_TOKENS)
        self._key = seed.to_bytes(16, "little", signed=True)

    def walk(self, prompt: bytes, request_seed: int | None = None) -> Iterator[int]:
        """The answer to a prompt (int32 little-endian ids)."""
        digest = blake2b(prompt, digest_size=8, key=self._key, salt=_salt(request_seed)).digest()
        start = int.from_bytes(digest[:4], "little")
        stride = int.from_bytes(digest[4:], "little") | 1  # odd: the walk visits the whole tape
        positions = map((TAPE_TOKENS - 1).__and__, itertools.count(start, stride))
        return map(self._tape.__getitem__, positions)


def _salt(request_seed: int | None) -> bytes:
    return b"" if request_seed is None else b"s" + (request_seed & (1 << 64) - 1).to_bytes(8, "little")


class Script:
    """Given answers, as ids. From a file, which is JSON if its name ends in `.json`:

    * JSON list: answers by order of arrival, round and round;
    * JSON object: answers by the first key that the prompt's text contains (the key "" fits every prompt);
      several texts in a list are that key's answers, round and round;
    * any other file: one answer per line, by order.

    An answer is a text, whose control strings (`<tool_call>`) become the tokens that they name, or in JSON
    also a list of ids.
    """

    def __init__(
        self, by_order: Sequence[list[int]], by_text: Mapping[str, Sequence[list[int]]], tokenizer: Tokenizer
    ) -> None:
        self._by_order = itertools.cycle(by_order) if by_order else None
        self._by_text = {key: itertools.cycle(answers) for key, answers in by_text.items()}
        self._tokenizer = tokenizer

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer) -> Script:
        """Raises `OSError` and `ScriptError`."""
        text = path.read_text(encoding="utf-8")
        value: Any
        if path.suffix == ".json":
            try:
                value = json.loads(text)
            except ValueError as error:
                raise ScriptError(f"script {path}: {error}") from error
        else:
            # Not `splitlines`: an answer may hold U+2028.
            value = [line for line in text.split("\n") if line.strip()]
        if isinstance(value, dict):
            by_text = {key: _answers(path, key, entry, tokenizer) for key, entry in value.items()}
            return cls([], by_text, tokenizer)
        if not isinstance(value, list) or not value:
            raise ScriptError(f"script {path}: expected a list of answers, or an object, that is not empty")
        return cls([_answer(path, at, entry, tokenizer) for at, entry in enumerate(value)], {}, tokenizer)

    def answer(self, prompt: bytes) -> list[int] | None:
        """The ids to say, None where the script has nothing for this prompt."""
        if self._by_order is not None:
            return next(self._by_order)
        text = self._tokenizer.decode(array("i", prompt).tolist(), skip_special_tokens=False)
        return next((next(answers) for key, answers in self._by_text.items() if key in text), None)


def _answers(path: Path, key: str, entry: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """The answers of one key: at least one."""
    if isinstance(entry, list) and entry and all(isinstance(each, str) for each in entry):
        return [_answer(path, key, each, tokenizer) for each in entry]
    return [_answer(path, key, entry, tokenizer)]


def _answer(path: Path, at: str | int, entry: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(entry, str):
        ids: list[int] = tokenizer.encode(entry, add_special_tokens=False).ids
        return ids
    limit = tokenizer.get_vocab_size(with_added_tokens=True)
    if isinstance(entry, list) and all(type(token) is int and 0 <= token < limit for token in entry):
        return entry
    raise ScriptError(f"script {path}: answer {at!r} is neither a text nor a list of ids below {limit}")
