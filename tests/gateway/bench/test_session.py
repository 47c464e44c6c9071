import asyncio
import gc
import io
import json
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.bench import session
from gateway.bench.options import BenchOptions, read_options
from gateway.bench.server_probe import BenchError
from gateway.bench.session import run_session
from tests.gateway.bench.fake_server import (
    HEAD,
    LAST,
    Asked,
    Server,
    answer_well,
    chunk,
    plain,
    serving,
    until,
    whole,
)
from tests.tokenizers import tokenizer_folder

NUM_PROBES = 2


def options(server: Server, **given: Any) -> BenchOptions:
    return read_options({"url": server.url, "progress": "off"} | given, {})


def bodies(server: Server) -> list[Any]:
    return [asked.body for asked in server.asked[NUM_PROBES:]]


async def test_a_run_measures_what_was_asked_for_and_says_what_it_was() -> None:
    async with serving(answer_well) as server:
        given = {"prompt_tokens": "uniform:20:60", "output_tokens": "uniform:2:9"}
        outcome = await run_session(
            options(server, concurrency="3", requests="20", warm_up="4", seed="7", **given)
        )
    samples, run = outcome.samples, outcome.run
    assert [sample.number for sample in samples] == list(range(24))
    assert [sample.is_warm_up for sample in samples] == [number < 4 for number in range(24)]
    # The server counts a token for each word and 4 more: lengths are exact as it counts them.
    assert all(sample.prompt_tokens == sample.prompt_tokens_wanted for sample in samples)
    assert all(
        sample.output_tokens == sample.output_tokens_wanted == len(sample.frames_s) for sample in samples
    )
    assert len({sample.prompt_tokens for sample in samples}) > 5
    assert (run.url, run.endpoint, run.model) == (server.url, "/v1/chat/completions", "tiny")
    assert (run.mode, run.rate, run.arrivals, run.concurrency, run.seed) == ("closed", None, None, 3, 7)
    assert (run.prompt_lengths, run.output_lengths) == ("uniform:20:60", "uniform:2:9")
    assert run.options == {"warm-up": "4 requests", "tokens per word": "1.000 (measured), 4 added"}
    assert run.versions.keys() == {"headrace", "python"}
    assert platform.release() in run.machine
    assert run.client.cpu_share > 0
    assert not run.ended_early
    assert run.steady_from_s == samples[4].sent_s or run.steady_from_s in [
        each.sent_s for each in samples[4:]
    ]
    assert run.duration_s >= max(sample.ended_s or 0 for sample in samples) - samples[0].due_s


async def test_the_same_seed_sends_the_same_requests_only_where_they_are_to_be_the_same() -> None:
    async def sent(**given: Any) -> list[Any]:
        async with serving(answer_well) as server:
            await run_session(options(server, concurrency="1", requests="4", turns="2", **given))
            return bodies(server)

    again = {"same_prompts": True, "prompt_tokens": "uniform:30:90"}
    assert await sent(seed="1", **again) == await sent(seed="1", **again) != await sent(seed="2", **again)
    # Else a second run would measure the server's prefix cache.
    one, other = [await sent(seed="1", prompt_tokens="uniform:30:90") for _ in range(2)]
    for old, new in zip(one, other, strict=True):
        (was, *_), (now, *_) = old["messages"], new["messages"]
        assert was["content"].split()[:3] != now["content"].split()[:3]
        assert len(was["content"].split()) == len(now["content"].split())
        assert old["max_tokens"] == new["max_tokens"]


async def test_an_open_loop_says_what_it_was() -> None:
    async with serving(answer_well) as server:
        given = {"rate": "500", "arrivals": "constant", "max_concurrency": "9", "shared_prefix_tokens": "30"}
        run = (await run_session(options(server, requests="5", ramp_s="0.01", **given))).run
    assert (run.mode, run.rate, run.arrivals, run.concurrency) == ("open", 500, "constant", 9)
    assert run.options["shared prefix"] == "30 tokens, 1 different"
    assert run.options["ramp"] == "0.01 s"


async def test_a_server_without_usage_gets_prompts_of_about_the_length() -> None:
    async def answer(asked: Asked) -> None:
        writer, asked.writer = asked.writer, _Without(asked.writer)  # type: ignore[assignment]
        await answer_well(asked)
        asked.writer = writer

    async with serving(answer) as server:
        outcome = await run_session(options(server, concurrency="1", requests="2", prompt_tokens="105"))
    assert [sample.prompt_tokens for sample in outcome.samples] == [None, None]
    assert len(server.asked) == 3  # with one probe instead of two
    assert outcome.run.client.notes[-1].startswith("The server tells no usage that grows with a prompt: ")
    assert len(server.asked[-1].body["messages"][0]["content"].split()) == 100


class _Without:
    """A writer that leaves usage out."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        self._writer.write(re.sub(rb'"usage": ', b'"x_use": ', data))

    async def drain(self) -> None:
        await self._writer.drain()


async def test_timings_are_asked_of_headrace_alone() -> None:
    for version, told, asks in (
        ({"version": "1.2", "workers": {}}, "headrace 1.2", True),
        ({"version": "0.11"}, "0.11", False),
    ):
        async with serving(answer_well) as server:
            server.pages["/version"] = json.dumps(version).encode()
            run = (await run_session(options(server, concurrency="1", requests="1"))).run
        assert run.versions["server"] == told
        assert {"include_timings" in body["stream_options"] for body in bodies(server)} == {asks}


async def test_a_file_is_sent_in_order_and_repeated(tmp_path: Path) -> None:
    file = tmp_path / "my-data.jsonl"
    file.write_text('{"prompt": "first", "output_tokens": 3}\n{"prompt": "second"}\n')
    async with serving(answer_well) as server:
        given = {"data": str(file), "output_tokens": "5"}
        outcome = await run_session(options(server, concurrency="1", requests="3", **given))
    sent = [
        (body["messages"][0]["content"], body["max_tokens"])
        for body in (asked.body for asked in server.asked[1:])
    ]
    assert sent == [("first", 3), ("second", 5), ("first", 3)]
    assert outcome.run.prompt_lengths == "of my-data.jsonl"
    told = "The file has 2 requests, sent more than once: a prefix cache may know them."
    assert outcome.run.client.notes[-1] == told


async def test_a_load_does_not_begin_if_the_first_request_fails() -> None:
    async with serving(lambda asked: asked.send(plain(401, b'{"error": {"message": "bad key"}}'))) as server:
        with pytest.raises(BenchError, match=r"the first request to http.* failed, .*: http_401: bad key"):
            await run_session(options(server))
    assert len(server.asked) == 1


@pytest.mark.parametrize("tokenizer", [None, "llama3_1"])
async def test_lengths_are_exact_with_a_shared_prefix_too(tokenizer: str | None) -> None:
    """This server's template adds 4 tokens to a user's message, and 9 to a system prompt."""

    async def answer(asked: Asked) -> None:
        messages = asked.body["messages"]
        words = sum(len(message["content"].split()) for message in messages)
        extra = 4 + 9 * sum(message["role"] == "system" for message in messages)
        await asked.send(HEAD, *map(chunk, whole(["x"], words + extra)), LAST)

    given = {} if tokenizer is None else {"tokenizer": str(tokenizer_folder(tokenizer))}
    async with serving(answer) as server:
        outcome = await run_session(
            options(server, requests="4", shared_prefix_tokens="30", prompt_tokens="40", **given)
        )
    assert [sample.prompt_tokens for sample in outcome.samples] == [70] * 4


async def test_failures_of_the_warm_up_are_told() -> None:
    async def answer(asked: Asked) -> None:
        is_early = NUM_PROBES < len(server.asked) <= NUM_PROBES + 2
        await (asked.send(plain(500, b'{"error": "no"}')) if is_early else answer_well(asked))

    async with serving(answer) as server:
        outcome = await run_session(options(server, concurrency="1", requests="3", warm_up="5"))
    told = "2 of 5 warm-up requests failed: 2 http_500. The first: no"
    assert told in outcome.run.client.notes


async def test_a_silent_server_is_told_to_be_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer(asked: Asked) -> None:
        await until(lambda: bool(said) or not told)
        await answer_well(asked)

    said: list[str] = []
    monkeypatch.setattr(session, "say", said.append)
    monkeypatch.setattr(session, "PATIENCE_S", 0.0)
    for progress, told in (("on", True), ("auto", False), ("off", False)):
        said.clear()
        async with serving(answer) as server:
            given = options(server, requests="1", progress=progress, timeout_s="60")
            await run_session(given)
        expected = f"waiting for the first answer of {server.url}, at most 60 s (--timeout-s)"
        assert said == ([expected] if told else [])


async def test_a_terminal_that_takes_nothing_costs_the_progress_and_not_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    async with serving(answer_well) as server:
        given = options(server, requests="2", concurrency="1", progress="on")
        monkeypatch.setattr(sys, "stderr", Full())
        outcome = await run_session(given)
        monkeypatch.undo()
    gc.collect()
    assert [sample.error for sample in outcome.samples] == [None, None]
    assert unheard == []


async def test_what_a_server_tells_of_itself_may_not_take_longer_than_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = {"url": f"http://127.0.0.1:{silent.getsockname()[1]}", "timeout_s": "0.05"}
        with pytest.raises(BenchError, match=r"has not answered in full within 0\.05 s"):
            await run_session(read_options(given, {}))


async def test_a_server_that_lists_nonsense_is_told() -> None:
    async with serving(answer_well) as server:
        for page in (b"[" * 20_000, b'"\xff"', b"{"):
            server.pages["/v1/models"] = page
            with pytest.raises(BenchError, match=r"GET /v1/models with what is not JSON: .*; give --model"):
                await run_session(options(server))
        server.pages["/v1/models"] = b"[" * 500 + b"]" * 500
        with pytest.raises(BenchError, match="lists no model; give --model"):
            await run_session(options(server))
        server.pages["/version"] = b"[" * 20_000
        assert (await run_session(options(server, model="m", requests="1"))).run.versions.keys() == {
            *("headrace", "python")
        }


async def test_a_load_needs_a_model_and_a_server() -> None:
    async with serving(answer_well) as server:
        server.pages["/v1/models"] = b'{"data": []}'
        with pytest.raises(BenchError, match="lists no model; give --model"):
            await run_session(options(server))
        server.pages.clear()
        with pytest.raises(BenchError, match="GET /v1/models answered 404: Not Found; give --model"):
            await run_session(options(server))
        assert (await run_session(options(server, model="m", requests="1"))).run.model == "m"
    with pytest.raises(BenchError, match="does not answer GET /v1/models"):
        await run_session(options(server))
