"""What is asked in a load test: an endless row of conversations, of the same lengths for the same seed.

Not here: when they are asked (`gateway/bench/run.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from random import Random

from gateway.bench.conversation import Conversation, Message, Turn
from gateway.bench.dataset import Record
from gateway.bench.lengths import Lengths
from gateway.bench.prompts import Measure, Texts


@dataclass(frozen=True, slots=True)
class Shape:
    """How made-up conversations look. `prefix_tokens` come before a conversation's own prompt.

    `salt`: what the words of prompts begin with, beside the seed; None: the seed alone.
    """

    prompt: Lengths
    output: Lengths
    turns: int = 1
    prefix_tokens: int = 0
    num_prefixes: int = 1
    seed: int = 0
    salt: str | None = None


def made_up(shape: Shape, texts: Texts, measure: Measure) -> Iterator[Conversation]:
    """Conversations of random words, without end.

    Lengths depend on the seed and a conversation's number alone, words on the texts' salt too. The first
    turn's prompt, with what the chat template adds, is as long as was drawn, and the shared prefix comes on
    top; a later turn is that much longer.
    """
    prefixes = _prefixes(shape, texts, measure)
    for number in count():
        random = Random(f"{shape.seed} {number}")
        opening = prefixes[random.randrange(len(prefixes))] if prefixes else ()
        turns = tuple(
            _turn(random, shape, texts, measure, opening if at == 0 else (), at) for at in range(shape.turns)
        )
        yield Conversation(turns)


def _turn(
    random: Random, shape: Shape, texts: Texts, measure: Measure, opening: Sequence[Message], at: int
) -> Turn:
    wanted = shape.prompt.draw(random)
    words = measure.num_words(wanted - (measure.overhead if at == 0 else 0))
    question = {"role": "user", "content": texts.draw(random, words)}
    prefix_tokens = shape.prefix_tokens if opening else 0
    return Turn((*opening, question), wanted + prefix_tokens, shape.output.draw(random))


def _prefixes(shape: Shape, texts: Texts, measure: Measure) -> list[tuple[Message, ...]]:
    if not shape.prefix_tokens:
        return []
    random = Random(f"prefixes {shape.seed}")
    words = measure.num_words(shape.prefix_tokens)
    return [({"role": "system", "content": texts.draw(random, words)},) for _ in range(shape.num_prefixes)]


def from_records(records: Sequence[Record], output: Lengths, seed: int) -> Iterator[Conversation]:
    """The conversations of a file, in order, again and again. `output` is for those that say no length."""
    for number, record in enumerate(cycle(records)):
        random = Random(f"{seed} {number}")
        turns = tuple(
            Turn(messages, 0, record.output_tokens or output.draw(random)) for messages in record.turns
        )
        yield Conversation(turns)
