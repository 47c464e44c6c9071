"""What rules cost in time to the first token (TTFT) and per token (TPOT), on the real engine.

One engine with the embedded model and two gateways in front of it: one without rules, one with 5,000 rules of
one keyword each (whole words, allow phrases), five classes of personal data, and a word of each answer that
the engine is known to give. Both get the same questions in turn, streamed, at temperature 0, each with a salt
of its own, so that nothing is ever in the prefix cache. Times are the client's; `low` and `high` are the 95%
interval of a ratio by the bootstrap.

The ratios are of answers whose first token is no word (code, a quotation mark), for that leaves at once.
Where an answer begins with a word, the word waits for its end: it may be an email address, or the beginning
of a denied word. That is `first_word_visible_later_tokens`, and `first_denied_…` where the word is denied;
`…_held_tokens` is what the filter alone, fed with these tokens, lets go by before.

Verdict: TTFT is the same within noise, 1.01 (0.97 to 1.04; 62.8 and 63.4 ms), and so is TPOT, 1.00 (0.97 to
1.03). A first word comes one token later, a denied one too if the engine says it in one token, as a mask.
The loser is the first word: with rules for email every answer that begins with a Latin letter pays one token.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.answer_times import Answer, listen, num_held
from benchmarks.inbound_chats import model_files
from benchmarks.load import request
from benchmarks.outbound_rules import PII_RULES, Denied
from benchmarks.processes import embedded_model, gateway, scratch, worker
from benchmarks.report import Report, open_report, parser, percentile
from filters.folding import fold
from filters.rules import Rule, RuleSet
from filters.stream import CompiledRules
from pipeline.model_text import ModelText

MODEL: Final = "embedded"
NUM_RULES: Final = 5000
SPARE_RULES: Final = 1000  # in place of those whose words occur in the questions and answers
# The answers begin with code, a quotation mark or a bullet: no word, so nothing has to wait for its end.
OPEN: Final = (
    "Write a Python function that adds two numbers.",
    "Write a Python function that reverses a string.",
    "Quote a famous proverb.",
    "Write a shell script that lists files.",
    "Give me an SQL query for all users.",
    "List three fruits as a markdown list with bullets *.",
    "Write a JavaScript function that sorts a list.",
    "Write a C program that says hello.",
)
WORDS: Final = ("Explain why the sky is blue.", "What is the capital of France?")
FIRST_DENIED: Final = ("Tell me a story about a dog.", "Write a letter to a friend.", "How do I bake bread?")

Said = Mapping[str, Sequence[str]]  # question -> the tokens of the answer's beginning


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked. `num_pairs`: of questions whose first token leaves at once."""

    num_pairs: int
    num_held_pairs: int
    num_tokens: int


QUICK: Final = Size(40, 4, 4)
FULL: Final = Size(64, 12, 12)


# -- what it says, and rules made of that --------------------------------------------------------------------


def rules_of(said: Said, model: ModelText, num_rules: int = NUM_RULES) -> RuleSet:
    """Rules on what is not said, all personal data, and a word of every answer.

    The words of answers are denied on the way out only, for a question must reach the engine as it is.
    """
    texts = [fold(text) for question, pieces in said.items() for text in (question, "".join(pieces))]
    others = [
        rule
        for rule in Denied.of(model, num_rules + SPARE_RULES).rules
        if not any(rule.match[0] in text for text in texts)
    ]
    words = {word: None for question, pieces in said.items() for word in denied_words(question, pieces)}
    spoken = [
        Rule(f"said-{word}", (word,), "mask", "output", whole_word=True, replacement="*") for word in words
    ]
    return RuleSet((*others[:num_rules], *PII_RULES, *spoken))


def denied_words(question: str, pieces: Sequence[str]) -> list[str]:
    """The first word of an answer, or the first longer one that comes after its first token."""
    is_first = question in FIRST_DENIED
    text = "".join(pieces[0 if is_first else 1 :]).lower()
    return re.findall("[a-z]{2,}" if is_first else "[a-z]{4,}", text)[:1]


def written(folder: Path, rules: RuleSet) -> Path:
    """A rules file: YAML reads JSON."""
    path = folder / "rules.yaml"
    entries = [
        {name: value for name, value in asdict(rule).items() if value and name not in ("channels", "fail")}
        for rule in rules.rules
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


# -- with and without them, in turn --------------------------------------------------------------------------


class Pairs:
    """The same questions to a gateway without rules and to one with rules."""

    def __init__(self, plain_port: int, ruled_port: int, num_tokens: int) -> None:
        self._ports = (plain_port, ruled_port)
        self._num_tokens = num_tokens
        self._num_asked = 0

    async def ask(self, question: str, side: int) -> Answer:
        """Nothing of it is in the prefix cache: the salt is new. `side`: 0 without rules, 1 with rules."""
        self._num_asked += 1
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": self._num_tokens}
        fields["messages"] = [{"role": "user", "content": question}]
        fields |= {"model": MODEL, "cache_salt": f"{self._ports[1]}-{self._num_asked}"}
        answer = await listen(self._ports[side], request(fields))
        if answer.num_cached_tokens:
            raise RuntimeError(f"{answer.num_cached_tokens} tokens of {question!r} came from the cache")
        return answer

    async def run(self, questions: Sequence[str], num_pairs: int) -> list[tuple[Answer, Answer]]:
        """Pairs without and with rules. Who is first changes from pair to pair."""
        pairs = []
        for number in range(num_pairs):
            question = questions[number % len(questions)]
            order = (0, 1) if number // len(questions) % 2 == 0 else (1, 0)
            answers = {side: await self.ask(question, side) for side in order}
            pairs.append((answers[0], answers[1]))
        return pairs


async def said_by(pairs: Pairs) -> dict[str, list[str]]:
    """What the engine says to each question, by token."""
    return {
        question: list((await pairs.ask(question, 0)).pieces) for question in (*OPEN, *WORDS, *FIRST_DENIED)
    }


def ratio_of_medians(plain: Sequence[float], ruled: Sequence[float]) -> float:
    return statistics.median(ruled) / statistics.median(plain)


def interval(plain: Sequence[float], ruled: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """Where 95% of the ratios of medians are when pairs are drawn again: the bootstrap."""
    rng = random.Random(seed)
    pairs = list(zip(plain, ruled, strict=True))
    ratios = []
    for _ in range(1000):
        drawn = rng.choices(pairs, k=len(pairs))
        ratios.append(ratio_of_medians(*zip(*drawn, strict=True)))
    return percentile(ratios, 0.025), percentile(ratios, 0.975)


def report_ratio(report: Report, name: str, plain: Sequence[float], ruled: Sequence[float]) -> float:
    report.add(f"{name}_none_ms", plain, "ms")
    report.add(f"{name}_rules_ms", ruled, "ms")
    low, high = interval(plain, ruled)
    report.add(f"{name}_rules_vs_none_low", low, "x")
    report.add(f"{name}_rules_vs_none_high", high, "x")
    return report.add(f"{name}_rules_vs_none", ratio_of_medians(plain, ruled), "x")


def report_open(report: Report, pairs: Sequence[tuple[Answer, Answer]]) -> None:
    """Answers whose first token leaves at once."""
    if all(plain.pieces == ruled.pieces for plain, ruled in pairs):
        raise RuntimeError("no rule has changed any answer")
    ttft, visible, tpot = (
        [[getattr(answer, name) for answer in side] for side in zip(*pairs, strict=True)]
        for name in ("ttft_ms", "visible_ms", "tpot_ms")
    )
    report.goal("ttft_rules_vs_none", report_ratio(report, "ttft", *ttft), 1.05, "x")
    report.add("visible_rules_vs_none", ratio_of_medians(*visible), "x")
    report_ratio(report, "tpot", *tpot)


def report_held(report: Report, name: str, pairs: Sequence[tuple[Answer, Answer]]) -> None:
    """How much later the first visible text comes, in tokens at this answer's own pace without rules."""
    later = [(ruled.visible_ms - plain.visible_ms) / plain.tpot_ms for plain, ruled in pairs]
    report.add(f"{name}_visible_later_tokens", later, "tokens")


async def measure(report: Report, pairs: Pairs, size: Size, rules: CompiledRules, said: Said) -> None:
    held = {question: num_held(rules, pieces) for question, pieces in said.items()}
    questions = [question for question in OPEN if not held[question]]
    report.add("open_questions", len(questions))
    for question in questions:  # warm-up
        await pairs.ask(question, 1)
    report_open(report, await pairs.run(questions, size.num_pairs))
    for name, some in (("first_word", WORDS), ("first_denied", FIRST_DENIED)):
        report.add(f"{name}_held_tokens", [held[question] for question in some], "tokens")
        report_held(report, name, await pairs.run(some, size.num_held_pairs))


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_rules_ttft", arguments)
    size = QUICK if arguments.quick else FULL
    files = embedded_model()
    model = ("--model", str(files), "--served-model-name", MODEL)
    with (
        scratch() as folder,
        worker(folder, *model) as (_, address),
        gateway(folder, [address], name="plain") as plain,
    ):
        said = uvloop.run(said_by(Pairs(plain.port, 0, size.num_tokens)))
        rules = rules_of(said, ModelText.from_files(model_files(files)))
        report.add("rules", len(rules))
        path = written(folder, rules)
        with gateway(folder, [address], "--rules", str(path), name="ruled") as ruled:
            pairs = Pairs(plain.port, ruled.port, size.num_tokens)
            uvloop.run(measure(report, pairs, size, CompiledRules(rules), said))
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
