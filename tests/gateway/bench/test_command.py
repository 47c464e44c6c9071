"""The command as people run it: a process of its own, against a fake server and against a real gateway."""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gateway.bench.command import exit_code, main_bench
from gateway.bench.sample import Sample
from tests import stack
from tests.gateway.bench.fake_server import Asked, answer_well, plain, serving, until
from tests.processes import ROOT
from tests.stack import Gateway
from tests.tokenizers import tokenizer_folder

TWO_PROMPTS = Path(__file__).with_name("two_prompts.jsonl")
STEP_MS = 10.0


async def start(*flags: str) -> asyncio.subprocess.Process:
    """`headrace bench FLAGS`, with its output in pipes."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gateway", "bench", *flags),
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ran(*flags: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    process = await start(*flags)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a scripted worker whose steps take `STEP_MS`."""
    folder = tmp_path_factory.mktemp("bench")
    step = ("--step-ms", str(STEP_MS))
    with (
        stack.start_scripted(folder, tokenizer_folder("llama3_1"), *step) as worker,
        stack.start_gateway(folder, [worker]) as started,
    ):
        yield started


async def test_a_load_on_a_gateway_is_told_exactly(gateway: Gateway, tmp_path: Path) -> None:
    page, file = tmp_path / "page.html", tmp_path / "run.json"
    code, out, err = await ran(
        gateway.url,
        *("--concurrency", "6", "--requests", "30", "--warm-up", "6", "--seed", "3"),
        *("--prompt-tokens", "uniform:40:90", "--output-tokens", "24"),
        *("--tokenizer", str(tokenizer_folder("llama3_1"))),
        *("--goodput", "ttft:60000", "tbt:60000"),
        *("--json", str(file), "--samples", "--html", str(page)),
    )
    assert (code, err) == (0, "")
    document: dict[str, Any] = json.loads(file.read_bytes())
    figures, samples = document["figures"], document["samples"]
    assert (figures["num_requests"], figures["num_ok"], figures["num_outside"]) == (30, 30, 6)
    assert figures["output_tokens"] == 30 * 24
    assert figures["goodput"]["share"] == 1.0
    assert figures["frames_per_token"] >= 0.5  # a busy machine may join frames
    assert {sample["output_tokens"] for sample in samples} == {24}
    # The gateway counts the tokens that were wanted, template and all.
    assert [sample["prompt_tokens"] for sample in samples] == [
        sample["prompt_tokens_wanted"] for sample in samples
    ]
    assert document["run"]["versions"]["server"].startswith("headrace ")
    assert gateway.url in out
    assert "30 ok, 0 failed" in out
    assert page.read_text().startswith("<!doctype html>")
    # The client sees what the server says of the same requests: no clock of this test is asked, and a busy
    # machine may join steps.
    off_ms = [
        (each["frames_s"][-1] - each["frames_s"][0]) * 1e3 / 23 - each["timings"]["tpot_ms"]
        for each in samples
    ]
    assert abs(median(off_ms)) < STEP_MS / 2
    for each in samples:
        assert (each["ended_s"] - each["sent_s"]) * 1e3 >= 0.95 * each["timings"]["total_ms"]


async def test_chats_with_shared_prefixes_find_them_in_the_cache(gateway: Gateway) -> None:
    code, out, err = await ran(
        gateway.url,
        *("--rate", "60", "--requests", "24", "--turns", "3", "--output-tokens", "4"),
        *("--shared-prefix-tokens", "128", "--prompt-tokens", "20", "--json", "-"),
    )
    assert code == 0
    figures = json.loads(out)["figures"]
    assert (figures["num_ok"], [turn["num_ok"] for turn in figures["turns"]]) == (24, [8, 8, 8])
    assert figures["turns"][2]["cached_share"] > 0.5
    assert "24 ok, 0 failed" in err  # the table gives way to the JSON


async def test_a_completions_load_works_too(gateway: Gateway) -> None:
    code, out, _ = await ran(
        f"{gateway.url}/v1",
        *("--endpoint", "completions", "--requests", "5", "--output-tokens", "3", "--json", "-"),
    )
    assert code == 0
    assert json.loads(out)["figures"]["output_tokens"] == 15
    assert json.loads(out)["run"]["endpoint"] == "/v1/completions"


async def test_failures_over_the_limit_exit_1_and_are_told() -> None:
    async def answer(asked: Asked) -> None:
        if len(server.asked) % 2:
            await answer_well(asked)
        else:
            await asked.send(plain(503, b'{"error": {"message": "no room"}}'))

    async with serving(answer) as server:
        for limit, expected in (("0.4", 1), ("50%", 0)):
            server.asked.clear()
            code, out, err = await ran(
                server.url,
                *("--data", str(TWO_PROMPTS), "--requests", "8", "--concurrency", "1"),
                *("--output-tokens", "2", "--max-failures", limit),
            )
            assert (code, err) == (expected, "")
            assert "http_503" in out
            assert "no room" in out


@pytest.mark.parametrize("signals", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_ends_the_load_with_a_report(signals: signal.Signals) -> None:
    async def answer(asked: Asked) -> None:
        if len(server.asked) > 5:
            await asyncio.sleep(60)
        await answer_well(asked)

    async with serving(answer) as server:
        process = await start(server.url, "--concurrency", "2", "--duration-s", "1000", "--json", "-")
        await until(lambda: len(server.asked) == 7)
        process.send_signal(signals)
        out, err = await process.communicate()
    document = json.loads(out)
    assert process.returncode == 130
    assert document["run"]["ended_early"] is True
    assert (document["figures"]["num_ok"], document["figures"]["num_interrupted"]) == (3, 2)
    assert "Traceback" not in err.decode()


async def test_a_server_that_is_not_there_exits_1() -> None:
    async with serving(answer_well) as server:
        pass
    code, out, err = await ran(server.url)
    assert (code, out) == (1, "")
    assert err.startswith(f"headrace: {server.url} does not answer GET /v1/models: ")


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full --progress on"])
async def test_a_closed_or_full_stream_costs_no_report(streams: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    async with serving(answer_well) as server:
        command = f'"{sys.executable}" -m gateway bench {server.url} --requests 2 --json "{file}" {streams}'
        process = await asyncio.create_subprocess_shell(
            command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await process.communicate()
    assert process.returncode == 0
    assert json.loads(file.read_bytes())["figures"]["num_ok"] == 2


async def test_a_report_that_cannot_be_written_exits_1(tmp_path: Path) -> None:
    async with serving(answer_well) as server:
        code, out, err = await ran(server.url, "--requests", "2", "--html", "/dev/full")
    assert (code, err) == (1, "headrace: --html /dev/full could not be made: No space left on device\n")
    assert "2 ok, 0 failed" in out


def test_a_bad_flag_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_bench({"url": "http://h", "rate": "0"}) == 2
    assert capsys.readouterr().err.startswith("headrace: --rate is '0'; it must be a number above 0")


@pytest.mark.parametrize(
    ("errors", "max_failures", "code"),
    [
        ([None, None], 0.0, 0),
        ([None, "lost"], 0.0, 1),
        ([None, "lost"], 0.5, 0),
        ([None, None, "lost"], 0.33, 1),
        ([None, "interrupted"], 0.0, 0),
        (["lost"], 1.0, 1),  # there is nothing to tell
        (["interrupted"], 0.0, 1),
        ([], 0.0, 1),
    ],
)
def test_the_exit_code_is_of_all_requests_that_ended(
    errors: list[str | None], max_failures: float, code: int
) -> None:
    samples = [Sample(number=0, due_s=0.0, error=error) for error in errors]
    assert exit_code(samples, max_failures) == code
