"""The benchmark of rules on the real engine: what needs no engine of it."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.answer_times import Answer, num_held, pieces_of
from benchmarks.bench_rules_ttft import FIRST_DENIED, OPEN, WORDS, interval, rules_of, written
from benchmarks.load import StreamResult
from benchmarks.outbound_rules import Denied
from filters.patterns import Patterns
from filters.rules import PII_REPLACEMENT, Rule, RuleSet, load_rules
from filters.scan import scan
from filters.stream import CompiledRules
from pipeline.model_text import ModelText
from tests.pipeline.model_files import model_files

SAID = {
    OPEN[0]: ["```", "python", "\n", "def", " add"],
    OPEN[2]: ['"', "The", " best", " way"],
    WORDS[0]: ["Light", " is", " scattered"],
    FIRST_DENIED[0]: ["There", " was", " a"],
}


@pytest.fixture(scope="module")
def rules() -> RuleSet:
    return rules_of(SAID, ModelText.from_files(model_files()), num_rules=100)


def denied_in(text: str, rules: RuleSet, direction: str) -> list[str]:
    return [hit.rule_id for hit in scan(text, Patterns(rules.for_direction(direction))).hits]


def test_each_answer_has_a_denied_word_and_no_question_has(rules: RuleSet) -> None:
    found = [denied_in("".join(pieces), rules, "output") for pieces in SAID.values()]
    assert found == [["said-python"], ["said-best"], ["said-scattered"], ["said-there"]]
    assert not any(denied_in(question, rules, "input") for question in SAID)
    assert len(rules) == 100 + len(PII_REPLACEMENT) + 4


def test_what_is_said_is_denied_by_no_other_rule() -> None:
    model = ModelText.from_files(model_files())
    words = [rule.match[0] for rule in Denied.of(model, 100).rules[:4]]
    rules = rules_of({OPEN[0]: ["#!/", "bash", *words]}, model, num_rules=100)
    keywords = {keyword for rule in rules.rules for keyword in rule.match}
    assert len(keywords) == 101
    assert not keywords & set(words)


def test_the_rules_file_has_the_same_rules(rules: RuleSet, tmp_path: Path) -> None:
    path = written(tmp_path, rules)
    assert load_rules(path.read_text(encoding="utf-8"), str(path)) == rules


def test_what_a_filter_holds_is_counted_in_tokens() -> None:
    rules = CompiledRules(RuleSet((Rule("said", ("there was",), "mask", whole_word=True, replacement="*"),)))
    assert num_held(rules, ["```", "there"]) == 0
    assert num_held(rules, ["There", " will", " be"]) == 1
    assert num_held(rules, ["There", " was", " a"]) == 2
    assert num_held(rules, ["\n", "there"]) == 2
    assert num_held(CompiledRules(RuleSet()), ["there"]) == 0


# -- times ---------------------------------------------------------------------------------------------------


def frame(content: str | None) -> bytes:
    choices = [{"delta": {} if content is None else {"content": content}}]
    return b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n"


FRAMES = (b"HTTP/1.1 200 OK\r\n\r\n", frame(""), frame("\n"), frame('"The'), frame(None), b"data: [DONE]\n\n")


def test_a_piece_has_the_time_of_its_last_byte_at_every_split() -> None:
    body = b"".join(FRAMES)
    ends = [len(b"".join(FRAMES[:number])) for number in (3, 4)]
    for at in range(len(body) + 1):
        pieces = pieces_of([(1.0, body[:at]), (2.0, body[at:])])
        assert [text for _, text in pieces] == ["\n", '"The']
        # The last byte of a frame is its second newline; its text is whole at the first.
        assert [at_s for at_s, _ in pieces] == [1.0 if end - 1 <= at else 2.0 for end in ends]


def result(num_tokens: int = 3) -> StreamResult:
    return StreamResult(
        started_s=1.0, ended_s=2.0, num_tokens=num_tokens, is_done=True, timings={"cached_tokens": 0}
    )


def test_times_are_of_the_first_piece_the_first_visible_one_and_the_steps_after() -> None:
    answer = Answer.of(result(), [(1.0 + number / 8, data) for number, data in enumerate(FRAMES)])
    assert answer == Answer(("\n", '"The'), 0, 250.0, 375.0, 375.0)


@pytest.mark.parametrize("frames", [FRAMES[:3], FRAMES[:2]])
def test_an_answer_with_nothing_to_see_is_no_measurement(frames: tuple[bytes, ...]) -> None:
    with pytest.raises(RuntimeError, match="failed"):
        Answer.of(result(), [(1.0, data) for data in frames])


def test_the_interval_holds_the_ratio_and_is_narrow_where_pairs_agree() -> None:
    rng = random.Random(2)
    plain = [80 + rng.random() for _ in range(40)]
    low, high = interval(plain, [1.1 * each for each in plain])
    assert 1.09 < low <= 1.1 <= high < 1.11
    low, high = interval(plain, [80 + 40 * rng.random() for _ in plain])
    assert high - low > 0.05
