from gateway.bench.notes import notes_of_load
from gateway.bench.options import BenchOptions, read_options
from gateway.bench.prompts import Measure
from gateway.bench.sample import Sample

MEASURED = Measure(1.1, 5, "measured")


def options(**given: object) -> BenchOptions:
    return read_options({"url": "http://h", **given}, {})


def sample(prompt: int | None = 100, output: int | None = 10, **more: object) -> Sample:
    counts = {"prompt_tokens": prompt, "output_tokens": output}
    return Sample(
        number=0,
        due_s=0.0,
        prompt_tokens_wanted=100,
        output_tokens_wanted=10,
        **{**counts, **more},  # type: ignore[arg-type]
    )


def test_a_load_that_is_as_wanted_has_no_notes() -> None:
    assert notes_of_load([sample(), sample(101)], options(), MEASURED) == ()
    assert notes_of_load([], options(), MEASURED) == ()


def test_prompts_of_another_length_are_told() -> None:
    (note,) = notes_of_load([sample(130), sample(150)], options(), MEASURED)
    assert note == "Prompts had 140 tokens on average, where 100 were wanted."


def test_lengths_of_later_turns_and_of_failures_do_not_count() -> None:
    samples = [sample(), sample(900, turn=1), sample(900, error="lost")]
    assert notes_of_load(samples, options(), MEASURED) == ()


def test_a_cache_that_has_more_than_the_load_explains_is_told() -> None:
    (note,) = notes_of_load([sample(cached_tokens=96), sample(cached_tokens=90)], options(), MEASURED)
    assert note.startswith(
        "The server had 93% of the tokens of first prompts in its prefix cache, where shared prefixes make "
        "up 5%: it has had these prompts in an earlier run"
    )


def test_a_cache_that_has_prefixes_and_earlier_turns_is_not_told() -> None:
    with_prefix = options(shared_prefix_tokens="80")
    assert notes_of_load([sample(cached_tokens=85)], with_prefix, MEASURED) == ()
    assert len(notes_of_load([sample(cached_tokens=96)], with_prefix, MEASURED)) == 1
    assert notes_of_load([sample(cached_tokens=None), sample(cached_tokens=15)], options(), MEASURED) == ()
    assert (
        notes_of_load([sample(cached_tokens=0), sample(turn=1, cached_tokens=99)], options(), MEASURED) == ()
    )


def test_short_answers_are_told_unless_they_may_be_short() -> None:
    samples = [sample(), sample(output=9), sample(output=None)]
    (note,) = notes_of_load(samples, options(), MEASURED)
    assert note == "1 answer came out shorter than wanted: the server does not obey ignore_eos."
    assert notes_of_load(samples, options(no_ignore_eos=True), MEASURED) == ()


def test_long_answers_are_told() -> None:
    samples = [sample(), sample(output=11), sample(output=None), sample(output=500)]
    (note,) = notes_of_load(samples, options(no_ignore_eos=True), MEASURED)
    assert note.startswith("2 answers came out longer than asked for, by the server's own count: ")
    assert notes_of_load(samples, options(no_ignore_eos=True, extra_body='{"n": 2}'), MEASURED) == ()


def test_failures_before_and_after_what_is_measured_are_told() -> None:
    samples = [
        sample(is_warm_up=True, error="http_500", detail="no room"),
        sample(is_warm_up=True, error="http_500", detail="no"),
        sample(is_warm_up=True, error="timeout"),
        sample(is_warm_up=True),
        sample(sent_s=1.0, error="lost", detail="is in the report"),
        sample(sent_s=2.0, error="lost", detail="gone"),
        sample(sent_s=3.0, error="interrupted"),
    ]
    assert notes_of_load(samples, options(), MEASURED, steady_until_s=2.0) == (
        "3 of 4 warm-up requests failed: 2 http_500, 1 timeout. The first: no room",
        "1 of 2 requests after the measured time failed: 1 lost. The first: gone",
    )
    assert len(notes_of_load(samples, options(), MEASURED)) == 1


def test_lengths_that_are_only_assumed_are_told() -> None:
    (note,) = notes_of_load([], options(), Measure())
    assert note.startswith(
        "The server tells no usage that grows with a prompt: they have about as many tokens as wanted"
    )
