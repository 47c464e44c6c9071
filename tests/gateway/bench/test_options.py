import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.bench import dataset
from gateway.bench.options import BenchOptions, read_options
from gateway.cli import build_parser

URL = "http://h:8000"


def options(*flags: str, **environ: str) -> BenchOptions:
    given = vars(build_parser().parse_args(["bench", URL, *flags]))
    return read_options(given, environ)


def test_without_flags_it_is_a_closed_loop_of_100_requests() -> None:
    made = options()
    assert (made.plan.users, made.plan.num_requests, made.plan.duration_s) == (16, 100, None)
    assert (made.shape.prompt.text, made.shape.output.text, made.shape.turns) == ("512", "128", 1)
    assert (made.ignores_eos, made.asks_timings, made.keeps_alive, made.timeout_s) == (True, None, True, 300)
    assert made.target.headers == ()
    assert made.report.figures.percents == (50, 90, 95, 99)


def test_a_rate_makes_an_open_loop_without_a_count_where_there_is_a_duration() -> None:
    plan = options("--rate", "2.5", "--duration-s", "30", "--max-concurrency", "9", "--warm-up", "5s").plan
    assert (plan.rate, plan.users, plan.max_concurrency) == (2.5, None, 9)
    assert (plan.num_requests, plan.duration_s, plan.warm_up_s, plan.warm_up_requests) == (None, 30, 5, 0)
    assert options("--warm-up", "7").plan.warm_up_requests == 7


def test_the_key_comes_from_the_flag_or_the_first_of_the_variable() -> None:
    def authorization(*flags: str, **environ: str) -> bytes | None:
        return dict(options(*flags, **environ).target.headers).get(b"authorization")

    assert authorization("--api-key", "k", HEADRACE_API_KEY="v") == b"Bearer k"
    assert authorization(HEADRACE_API_KEY="v,w") == b"Bearer v"
    assert authorization(HEADRACE_API_KEY="") is None
    assert authorization("--header", "Authorization: Basic x", HEADRACE_API_KEY="v") == b"Basic x"


def test_each_run_has_a_salt_of_its_own_unless_prompts_are_to_be_the_same() -> None:
    assert len({options().shape.salt for _ in range(3)} - {None}) == 3
    assert options("--same-prompts").shape.salt is None


def test_headers_and_fields_of_the_body_are_kept() -> None:
    made = options("--header", "X-A: b:c", "--header", "x-d:e", "--extra-body", '{"top_k": 1}')
    assert made.target.headers == ((b"x-a", b"b:c"), (b"x-d", b"e"))
    assert made.extra_body == {"top_k": 1}


def test_a_file_gives_its_own_number_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert options("--data", str(file)).plan.num_requests == 2
    assert options("--data", str(file), "--requests", "9").plan.num_requests == 9
    assert options("--data", str(file), "--duration-s", "9").plan.num_requests is None
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    file.write_text(json.dumps({"messages": [user, answer, user]}) + "\n" + json.dumps({"messages": [user]}))
    assert options("--data", str(file), "--turns", "5").plan.num_requests == 3


@pytest.mark.parametrize(("text", "share"), [("0.05", 0.05), ("5%", 0.05), ("100%", 1.0), ("0", 0.0)])
def test_the_share_of_failures_may_be_in_percent(text: str, share: float) -> None:
    assert options("--max-failures", text).report.max_failures == pytest.approx(share)


def test_timings_can_be_asked_for_or_not() -> None:
    assert options("--timings").asks_timings is True
    assert options("--no-timings").asks_timings is False


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--rate 0", "--rate is '0'; it must be a number above 0 and at most 100000"),
        ("--rate 100001", "--rate is '100001'; it must be a number above 0 and at most 100000"),
        ("--rate nan", "--rate is 'nan'; it must be a number above 0"),
        ("--rate 1 --concurrency 2", "--rate and --concurrency are given"),
        ("--arrivals constant", "--arrivals is given without --rate"),
        ("--max-concurrency 3", "--max-concurrency is given without --rate"),
        ("--rate 1 --arrivals often", "--arrivals is 'often'; it must be one of poisson, constant"),
        ("--concurrency 0", "--concurrency is '0'; it must be a whole number from 1 to 100000"),
        ("--concurrency 1.5", "--concurrency is '1.5'"),
        ("--requests none", "--requests is 'none'; it must be a whole number from 1"),
        ("--duration-s -1", "--duration-s is '-1'; it must be a number above 0"),
        ("--warm-up xs", "--warm-up is 'x'; it must be a number at least 0"),
        ("--warm-up -1", "--warm-up is '-1'; it must be a whole number from 0"),
        ("--seed -1", "--seed is '-1'"),
        ("--timeout-s 0", "--timeout-s is '0'; it must be a number above 0"),
        ("--prompt-tokens uniform:5:4", "--prompt-tokens: HIGH is 4; it must be a whole number from 5"),
        ("--output-tokens 0", "--output-tokens: the length is 0"),
        ("--turns 0", "--turns is '0'; it must be a whole number from 1 to 1000"),
        ("--num-prefixes 2", "--num-prefixes is given without --shared-prefix-tokens"),
        ("--endpoint embeddings", "--endpoint is 'embeddings'; it must be one of chat, completions"),
        ("--header novalue", "--header 1 is not NAME:VALUE"),
        ("--header a:b --header a\tb:c", "--header 2 is not NAME:VALUE"),
        ("--extra-body [1]", "--extra-body is '[1]'; it must be a JSON object"),
        ("--extra-body {", "--extra-body is not JSON"),
        ("--api-key \u20ac", "--api-key has characters that no header can hold"),
        ("--goodput ttft", "--goodput 'ttft': '' is not a number of milliseconds"),
        ("--goodput fast:1", "--goodput 'fast:1': 'fast' is not one of ttft, "),
        ("--goodput ttft:1 --goodput ttft:2", "--goodput 'ttft:2': ttft is given twice"),
        ("--percentiles 50,99.99999", "--percentiles: a percentile is 99.99999, and is told as p100"),
        ("--header Host:h", "--header 1 is 'host', which the load test writes itself"),
        ("--header a:b --header content-Type:b", "--header 2 is 'content-type', which the load test writes"),
        ("--extra-body " + "[" * 20_000, "--extra-body is not JSON: maximum recursion depth"),
        ("--model \udcff", "--model is '\\udcff'; it must be UTF-8"),
        ("--html x.html --compare \udcff", "--compare has bytes that are not UTF-8"),
        (
            "--percentiles 50,101",
            "--percentiles: a percentile is '101'; it must be a number above 0 and at most 100",
        ),
        ("--stall-ms x", "--stall-ms is 'x'"),
        ("--max-failures 2", "--max-failures is '2'; it must be a number at least 0 and at most 1"),
        ("--max-failures 101%", "--max-failures is '101'"),
        ("--progress maybe", "--progress is 'maybe'; it must be one of auto, on, off"),
        ("--samples", "--samples is given without --json"),
        (
            "--json /no/such/place/x.json",
            "--json is '/no/such/place/x.json'; '/no/such/place' cannot be written",
        ),
        ("--html /", "--html is '/'; it must be a file, not a folder"),
        (
            "--json /tmp/./x --html /tmp/x",
            "--json and --html are both '/tmp/x'; each needs a file of its own",
        ),
        ("--json - --html -", "--json and --html are both '-'"),
        ("--html x.html --compare /no/such", "--compare: /no/such cannot be read: No such file or directory"),
        ("--data /no/such", "--data: /no/such cannot be read"),
        ("--data x --prompt-tokens 5", "--prompt-tokens is given with --data"),
        ("--data x --same-prompts", "--same-prompts is given with --data"),
    ],
)
def test_a_bad_flag_is_told_with_its_value_and_limit(flags: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        options(*flags.split(" "))


@pytest.mark.parametrize(
    "name",
    ["model", "api-key", "json", "html", "name", "data", "tokenizer", "rate", "goodput", "seed", "progress"],
)
def test_an_empty_value_is_told_with_its_flag(name: str) -> None:
    with pytest.raises(ValueError, match=f"^--{name} (is empty; it must have a value, or be left out|'': )"):
        options(f"--{name}", "")
    with pytest.raises(ValueError, match=r"^URL is empty; it must"):
        read_options({"url": ""}, {})


@pytest.mark.parametrize(
    "flags",
    [
        "--goodput ttft:1 e2e:2 http://h:8000",
        "http://h:8000 --goodput ttft:1 e2e:2",
        "--goodput ttft:1 --goodput e2e:2 http://h:8000",
        "--goodput ttft:1 e2e:2 http://h:8000 --rate 1",
        "--rate 1 --goodput ttft:1 --timings --goodput e2e:2 http://h:8000",
    ],
)
def test_the_address_may_come_after_a_list_of_words(flags: str) -> None:
    made = read_options(vars(build_parser().parse_args(["bench", *flags.split()])), {})
    assert made.target.url == URL
    assert made.report.figures.limits_ms == {"ttft": 1, "e2e": 2}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--goodput http://h", "argument --goodput: expected at least one argument"),
        ("--goodput ttft:1", "the following arguments are required: URL"),
        ("--rate 1", "the following arguments are required: URL"),
    ],
)
def test_a_word_that_is_missing_is_told(flags: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", *flags.split()])
    assert told in capsys.readouterr().err


def test_a_second_address_is_no_word() -> None:
    with pytest.raises(ValueError, match="--goodput 'http://i': 'http' is not one of"):
        options("--goodput", "ttft:1", "http://i")


def test_a_key_or_a_header_is_never_in_a_message() -> None:
    for flags in (("--api-key", "s3cret\u20ac"), ("--header", "a: s3cret\u20ac")):
        with pytest.raises(ValueError, match="--") as caught:
            options(*flags)
        assert "s3cret" not in str(caught.value)


def test_what_is_no_report_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"--compare: .*x\.json is not the JSON of a load test"):
        options("--compare", str(file), "--html", str(tmp_path / "y.html"))
    monkeypatch.setattr(dataset, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match=r"--compare: /dev/zero has 11 bytes or more; at most 10 are read"):
        options("--compare", "/dev/zero", "--html", str(tmp_path / "y.html"))


def test_a_device_may_take_both_reports() -> None:
    report = options("--json", "/dev/null", "--html", "/dev/null").report
    assert report.json == report.html == "/dev/null"


def test_an_address_of_another_kind_is_refused() -> None:
    given: dict[str, Any] = {"url": "h:8000"}
    with pytest.raises(ValueError, match="URL is 'h:8000'; it must be http://HOST:PORT"):
        read_options(given, {})
