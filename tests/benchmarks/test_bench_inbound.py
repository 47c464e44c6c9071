"""The benchmark of the way in, made tiny, with a small model: that it measures what it says, not how fast."""

import random
from collections.abc import Iterator

import pytest

from benchmarks.inbound_chats import (
    KernelLink,
    Shape,
    WayIn,
    Words,
    body_of,
    history,
    next_turn,
    rules_of,
    words_of,
)
from benchmarks.inbound_load import (
    Mix,
    report_eviction,
    report_memory,
    report_second_level,
    report_shared_prompt,
    run_mix,
)
from benchmarks.inbound_scan import TEXT_CHARS, report_scan, texts_of
from benchmarks.inbound_turns import STAGES, Pair, report_next_turns
from benchmarks.report import Report
from filters.patterns import Patterns
from pipeline.model_text import ModelText
from tests.pipeline.model_files import model_files

TINY = Shape("12k", num_messages=6, message_tokens=20)


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText.from_files(model_files())


@pytest.fixture(scope="module")
def words(text: ModelText) -> dict[str, Words]:
    return words_of(text)


@pytest.fixture(scope="module")
def patterns(words: dict[str, Words]) -> Patterns:
    return rules_of(20, words)


@pytest.fixture
def link() -> Iterator[KernelLink]:
    link = KernelLink()
    yield link
    link.close()


@pytest.fixture
def report() -> Report:
    return Report("bench_inbound")


def test_both_ways_in_give_the_same_ids(
    text: ModelText, words: dict[str, Words], patterns: Patterns, link: KernelLink
) -> None:
    cached, encoding = WayIn(text, patterns, link), WayIn(text, patterns, link, 0)
    rng = random.Random(1)
    messages = history(words["en"], TINY, rng)
    for _ in range(4):
        body = body_of(messages)
        assert [bytes(call.prompt.ids) for call in cached.calls(body)] == [
            bytes(call.prompt.ids) for call in encoding.calls(body)
        ]
        messages = next_turn(words["en"], messages, TINY, rng)
    assert cached.known.hits
    assert not encoding.known.hits


def test_a_next_turn_encodes_its_new_text_only(
    text: ModelText, words: dict[str, Words], patterns: Patterns, link: KernelLink
) -> None:
    shape = Shape("x", num_messages=30, message_tokens=50)
    turns = Pair(text, patterns, link).turns(words["en"], shape, num_runs=3)
    assert 0 < turns.new_tokens < turns.num_tokens / 5
    assert 4 * turns.new_tokens <= turns.copied_bytes
    assert all(tuple(cost.ends_ns) == STAGES for cost in turns.cached)


def test_next_turns_are_reported(
    report: Report, text: ModelText, words: dict[str, Words], patterns: Patterns, link: KernelLink
) -> None:
    report_next_turns(report, Pair(text, patterns, link), words["en"], 2, shapes=[TINY])
    assert {goal.name for goal in report.goals} == {"next_turn_12k_speedup", "next_turn_12k_ms"}
    assert report.metrics["next_turn_12k_reasoning_scan_us"] > 0


def test_a_shared_prompt_is_found_in_the_cache(
    report: Report, text: ModelText, words: dict[str, Words], patterns: Patterns, link: KernelLink
) -> None:
    report_shared_prompt(report, text, patterns, words["en"], link, num_users=5)
    assert report.metrics["shared_4k_token_hit_rate"] > 0.9
    assert report.metrics["shared_4k_forks_per_user"] > 0


def test_a_cache_of_a_quarter_forgets_one_off_prompts_first(
    text: ModelText, words: dict[str, Words], patterns: Patterns, link: KernelLink
) -> None:
    mix = Mix.seeded(words["en"], 60)
    everything = run_mix(WayIn(text, patterns, link, 1 << 40), mix)
    quarter = run_mix(WayIn(text, patterns, link, everything.used_bytes // 4), mix)
    none = run_mix(WayIn(text, patterns, link, 0), mix)
    assert not everything.evictions
    assert quarter.evictions
    for kind, rate in everything.hit_rates.items():
        assert none.hit_rates[kind] == 0 <= quarter.hit_rates[kind] <= rate
    assert quarter.hit_rates["hot_system"] > quarter.hit_rates["one_off"]


def test_the_rest_is_reported(
    report: Report, text: ModelText, words: dict[str, Words], patterns: Patterns, link: KernelLink
) -> None:
    report_eviction(report, text, patterns, words["en"], link, num_requests=20)
    report_memory(report, text, words, num_segments=5)
    report_second_level(report, text, words["en"], num_runs=2)
    report_scan(report, words, num_runs=1, counts=[200])
    assert report.metrics["cache_bytes_per_token_en"] > 4
    assert report.goals[0].name == "scan_200_rules_1k_zh_us"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_texts_have_the_length_that_they_are_measured_by(words: dict[str, Words], language: str) -> None:
    assert {len(text) for text in texts_of(words[language], random.Random(2))} == {TEXT_CHARS}
