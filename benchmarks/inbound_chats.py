"""What the benchmarks of the way in have in common: a model's text side, seeded chats, and the way itself.

Texts are made of the tokenizer's own words, the frequent ones oftener, so that a token has as many characters
as in real text, in every language the tokenizer knows. Not here: what is measured, and what is printed.
"""

from __future__ import annotations

import json
import os
import random
import socket
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any, Final, NamedTuple

from backend.embedded import default_cache_dir
from backend.uploads import Uploads
from benchmarks.processes import embedded_model
from filters.folding import fold
from filters.patterns import Patterns
from filters.rules import Rule, RuleSet
from gateway.openai_schema import parse_chat
from pipeline.inbound import Inbound, InboundOptions, InputRules
from pipeline.model_text import FILES, ModelText
from pipeline.needs import served
from pipeline.seen_texts import SeenTexts
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import TokenStore
from pipeline.values import EngineCall, ModelInfo

MODEL: Final = "prompts"
MAX_MODEL_LEN: Final = 1 << 18
CACHE_BYTES: Final = 256 << 20  # the gateway's default
BUFFER_BYTES: Final = 256 << 20
NUM_RULES: Final = 200
INFO: Final = ModelInfo(MODEL, MAX_MODEL_LEN, block_size=16, default_sampling={}, fingerprint="")
NOW_S: Final = 1.8e9
_FLATTENING: Final = 20  # of Zipf's law, so that the first words are not half of the text
# With so many words a token of English text has 4.4 characters and costs 1.9 us to encode, as one of the
# standard library's docstrings does (4.7 and 1.9); with all 41,000 of Qwen3's it costs 2.6 us.
_MAX_WORDS: Final = 6000
_MIN_WORDS: Final = 1000

Message = Mapping[str, Any]


def load_model() -> ModelText:
    """Qwen3's tokenizer and template if `make setup` has fetched them, else the embedded model's."""
    folder = default_cache_dir(os.environ) / "tokenizers" / "qwen3"
    if not (folder / "tokenizer.json").exists():
        folder = embedded_model()
    return ModelText.from_files(model_files(folder))


def model_files(folder: Path) -> dict[str, bytes]:
    """File name -> bytes, as `ModelText.from_files` takes them."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


class Words:
    """Words of one language, drawn by Zipf's law in the tokenizer's order, which is that of frequency."""

    def __init__(self, words: Sequence[str], stop: str) -> None:
        self.words = words[:_MAX_WORDS]
        self._stop = stop
        self._weights = list(accumulate(1 / (rank + _FLATTENING) for rank in range(len(self.words))))

    def text(self, num_tokens: int, rng: random.Random) -> str:
        """About so many tokens in sentences of about 12."""
        words = rng.choices(self.words, cum_weights=self._weights, k=num_tokens)
        for index in range(rng.randint(4, 12), num_tokens, 12):
            words[index] = self._stop
        return "".join(words).strip()


def words_of(text: ModelText) -> dict[str, Words]:
    """English and simplified Chinese, of a tokenizer's tokens; of chance where it has too few."""
    tokens = text.tokenizer.decode_batch([[token_id] for token_id in range(len(text.vocabulary))])
    rng = random.Random(7)
    latin = [token for token in tokens if token[:1] == " " and token[1:].isascii() and token[1:].isalpha()]
    han = [token for token in tokens if token and all(map(_is_han, token)) and fold(token) == token]
    if len(latin) < _MIN_WORDS:
        latin = [" " + "".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(_MIN_WORDS)]
    if len(han) < _MIN_WORDS:
        han = [chr(rng.randint(0x4E00, 0x8000)) for _ in range(_MIN_WORDS)]
    return {"en": Words(latin, "."), "zh": Words(han, "。")}


def _is_han(character: str) -> bool:
    return "\u4e00" <= character <= "\u9fff"


# -- chats ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A chat's history: a system prompt, then user and assistant in turn, a user's message last."""

    name: str
    num_messages: int  # even
    message_tokens: int
    reasoning_tokens: int = 0  # before each answer; Qwen3's template leaves them out of later prompts


SHAPES: Final = (Shape("1k", 8, 125), Shape("12k", 40, 300), Shape("100k", 250, 400))
ANSWER_TOKENS: Final = 100
QUESTION_TOKENS: Final = 30


def history(words: Words, shape: Shape, rng: random.Random) -> list[Message]:
    """The messages of all turns but the next."""
    messages: list[Message] = [{"role": "system", "content": words.text(shape.message_tokens, rng)}]
    for index in range(shape.num_messages - 1):
        text = words.text(shape.message_tokens, rng)
        messages.append(_answer(words, text, shape, rng) if index % 2 else user(text))
    return messages


def next_turn(words: Words, messages: Sequence[Message], shape: Shape, rng: random.Random) -> list[Message]:
    """One turn more: the answer to the last message, and a new one of the user's."""
    answer = _answer(words, words.text(ANSWER_TOKENS, rng), shape, rng)
    return [*messages, answer, user(words.text(QUESTION_TOKENS, rng))]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(words: Words, text: str, shape: Shape, rng: random.Random) -> Message:
    answer = {"role": "assistant", "content": text}
    if shape.reasoning_tokens:
        answer["reasoning_content"] = words.text(shape.reasoning_tokens, rng)
    return answer


def body_of(messages: Sequence[Message]) -> bytes:
    """A client's body. Parsed anew for each request, so that no string's hash is known beforehand."""
    return json.dumps({"model": MODEL, "messages": messages, "temperature": 0.7}).encode()


# -- rules ---------------------------------------------------------------------------------------------------


def rules_of(num_rules: int, words: Mapping[str, Words], text: str = "", seed: int = 1) -> Patterns:
    """Rules of one keyword each, half Chinese, of what the texts are made of, but none that is in `text`:

    their beginnings occur all the time.
    """
    rng = random.Random(seed)
    text = fold(text)
    keywords: dict[str, None] = {}
    pieces = [word.strip() for word in words["en"].words]
    characters = "".join(words["zh"].words)
    while len(keywords) < num_rules:
        if len(keywords) % 2:
            keyword = "".join(rng.choices(pieces, k=2))
        else:
            keyword = "".join(rng.choices(characters, k=rng.randint(2, 4)))
        keyword = fold(keyword)
        if len(keyword) > 1 and keyword not in text:
            keywords[keyword] = None
    rules = [Rule(f"rule-{number}", (keyword,), "flag") for number, keyword in enumerate(keywords)]
    return Patterns(RuleSet(tuple(rules)))


# -- the way in ----------------------------------------------------------------------------------------------


class Clocks(NamedTuple):
    """Nanoseconds: wall, CPU of the calling thread, CPU of the process."""

    wall: int
    thread: int
    process: int

    @classmethod
    def now(cls) -> Clocks:
        return cls(perf_counter_ns(), thread_time_ns(), process_time_ns())

    def since(self, start: Clocks) -> Clocks:
        return Clocks(self.wall - start.wall, self.thread - start.thread, self.process - start.process)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request. `process_ns` is CPU time, of all threads."""

    wall_ns: int
    process_ns: int
    num_tokens: int
    ends_ns: Mapping[str, int]  # stage -> wall time at its end

    def stages_us(self) -> Iterator[tuple[str, float]]:
        """What each stage took."""
        before_ns = 0
        for stage, end_ns in self.ends_ns.items():
            yield stage, (end_ns - before_ns) / 1e3
            before_ns = end_ns


class KernelLink:
    """A link as far as the kernel: what is written is read here too, while the clocks stand still."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._sink = bytearray(1 << 20)
        self._num_unread = 0
        self._generation = 0
        self.uploads = Uploads()
        self.reading = Clocks(0, 0, 0)  # spent with the other end's work

    def read(self) -> None:
        """All that was written."""
        start = Clocks.now()
        while self._num_unread:
            self._num_unread -= self._theirs.recv_into(self._sink)
        spent = Clocks.now().since(start)
        self.reading = Clocks(*map(sum, zip(self.reading, spent, strict=True)))

    def send(self, call: EngineCall) -> None:
        """All frames of a call, as `backend.dispatch` makes them. A piece fits into the socket's buffer."""
        self._generation += 1
        parts = self.uploads.start(0, self._generation, call) or self.uploads.take_piece()
        while parts is not None:
            if self._num_unread:
                self.read()
            num_sent = self._ours.sendmsg(parts)
            assert num_sent == sum(map(len, parts)), "the kernel took less than a piece"
            self._num_unread += num_sent
            parts = self.uploads.take_piece()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class WayIn:
    """One gateway's way in, with stores of its own. `max_cache_bytes` 0: everything is encoded."""

    def __init__(
        self, text: ModelText, patterns: Patterns, link: KernelLink, max_cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.cache = TokenCache(max_cache_bytes)
        self.pool = BufferPool(BUFFER_BYTES)
        self.inbound = Inbound(text, INFO, InboundOptions(), TokenStore(self.cache, self.pool))
        self.rules = InputRules(patterns, SeenTexts(patterns))
        self.known = self.cache.of(text.fingerprint)
        self._link = link

    def calls(self, body: bytes) -> list[EngineCall]:
        """What a body comes to; the views in it hold their buffer."""
        return served(self.inbound.prepare(parse_chat(body), NOW_S, self.rules)).calls

    def send(self, body: bytes) -> Cost:
        """From the parsed body to the last byte in the kernel. The prompt's view is released at the end."""
        request, link = parse_chat(body), self._link
        link.read()
        ends_ns: dict[str, int] = {}

        def done(stage: str) -> None:
            ends_ns[stage] = perf_counter_ns() - start.wall

        reading, start = link.reading, Clocks.now()
        ready = served(self.inbound.prepare(request, NOW_S, self.rules, done))
        for call in ready.calls:
            link.send(call)
        spent = Clocks.now().since(start).since(link.reading.since(reading))
        ends_ns["link"] = spent.wall
        return Cost(spent.wall, spent.process, ready.prompts[0].num_tokens, ends_ns)
