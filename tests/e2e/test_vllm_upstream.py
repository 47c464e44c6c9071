"""A stock vLLM server behind the gateway: it is no worker of ours, and all stages work as if it were.

One server has both of its APIs of token ids. A gateway uses `/inference/v1/generate` where it knows the
model's sampling defaults, and `/v1/completions` where its tokenizer's folder has no generation_config.json.
What can go wrong with one is in `tests/backend/test_upstream_server.py`, with a played server.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from backend.http_client import HttpClient
from backend.upstream_address import parse_upstream
from backend.upstream_probe import UpstreamProbe
from backend.upstream_vllm import VllmKind
from tests import stack
from tests.backend.linked import make_tokenizer
from tests.e2e.asking import CHAT, COMPLETE, FAILED, REFUSED, ask
from tests.e2e.resting import assert_no_fault, request_lines, statuses, wait_for
from tests.processes import Process, answers, free_port, headrace
from tests.stack import Gateway
from tests.wire import connect

pytestmark = pytest.mark.engine

MODEL = "smol"
QUESTION = "Name three rivers."
MASKED = "rainforest"  # a word of the answer, and not of the question
BLOCK_TOKENS = 32
START_S = 240.0  # its three processes take 12 s on two idle cores
APIS = ["generate", "completions"]


class Server:
    """The stock server."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.port = port

    def metric(self, name: str) -> float:
        return stack.metric(self.port, name)


@pytest.fixture(scope="module")
def server(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's own API server with the embedded model."""
    port, folder = free_port(), tmp_path_factory.mktemp("stock_vllm")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(embedded_model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS)]
    command += ["--enable-scale-out", "--enable-prompt-tokens-details"]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"TORCH_COMPILE_DISABLE": "1", **stack.ONE_THREAD}
    with stack.running(Process("stock vLLM", command, folder / "vllm.log", env)) as process:
        process.wait_until(lambda: answers(port, "/health") == 200, START_S, "healthy")
        yield Server(process, port)


@pytest.fixture(scope="module")
def gateways(
    server: Server, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Gateway]]:
    """One for each API. The second one has another upstream that nobody serves."""
    folder = tmp_path_factory.mktemp("upstream_gateways")
    rules, bare = folder / "words.txt", folder / "bare"
    rules.write_text(MASKED + "\n")
    shutil.copytree(
        embedded_model, bare, ignore=shutil.ignore_patterns("*.safetensors", "generation_config.json")
    )
    upstream = ("--upstream", f"vllm+http://127.0.0.1:{server.port}")
    dead = ("--upstream", f"vllm+http://127.0.0.1:{free_port()}")
    with ExitStack() as started:
        generate = stack.start_gateway(
            folder, (), *upstream, "--tokenizer", str(embedded_model), "--rules", str(rules), name="generate"
        )
        completions = stack.start_gateway(
            folder, (), *dead, *upstream, "--tokenizer", str(bare), name="completions"
        )
        yield {"generate": started.enter_context(generate), "completions": started.enter_context(completions)}


def chat(content: str = QUESTION, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, **fields}


async def post(port: int, path: str = CHAT, **body: Any) -> dict[str, Any]:
    async with connect(port) as wire:
        head = await wire.post(path, body)
        document: dict[str, Any] = await wire.json()
        assert head.status == 200, document
        return document


def text_of(document: dict[str, Any]) -> str:
    text: str = document["choices"][0]["message"]["content"]
    return text


async def wait_until_idle(gateway: Gateway, server: Server) -> None:
    def is_idle() -> bool:
        return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0

    await asyncio.to_thread(wait_for, gateway, is_idle, "the engine is idle")


@pytest.mark.parametrize("api", APIS)
async def test_greedy_answer_is_the_servers_own(
    gateways: dict[str, Gateway], server: Server, api: str
) -> None:
    gateway, question = gateways[api], "What is the capital of France?"
    status = statuses(gateway)[-1]
    assert (status["engine_path"], status["models"]) == (api, [MODEL])
    assert status["versions"]["vllm"]
    own = await post(server.port, **chat(question))
    ours = await post(gateway.port, **chat(question))
    assert text_of(ours) == text_of(own)
    (choice,), (own_choice,) = ours["choices"], own["choices"]
    assert choice["finish_reason"] == own_choice["finish_reason"] == "stop"  # by its end-of-sequence token
    for count in ("prompt_tokens", "completion_tokens"):
        assert ours["usage"][count] == own["usage"][count]
    streamed = await ask(gateway.port, chat(question, stream=True))
    assert (streamed.kind, streamed.text) == (COMPLETE, text_of(own))


@pytest.mark.parametrize("api", APIS)
async def test_prompts_ids_are_the_servers_own(
    gateways: dict[str, Gateway], server: Server, api: str
) -> None:
    """The engine finds every whole block of them in its cache when the server itself asks the same."""
    content = f"Tell {api} of water. " * 20
    await post(gateways[api].port, **chat(content, max_tokens=1))
    own = await post(server.port, **chat(content, max_tokens=1))
    blocks = (own["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS
    assert blocks >= 3
    assert own["usage"]["prompt_tokens_details"]["cached_tokens"] == blocks * BLOCK_TOKENS
    ours = await post(gateways[api].port, **chat(content, max_tokens=1))
    assert ours["usage"]["prompt_tokens_details"]["cached_tokens"] == blocks * BLOCK_TOKENS


@pytest.mark.parametrize("api", APIS)
async def test_logprobs_are_the_servers_own(gateways: dict[str, Gateway], server: Server, api: str) -> None:
    wanted = chat(logprobs=True, top_logprobs=3, max_tokens=4)
    own = (await post(server.port, **wanted))["choices"][0]["logprobs"]["content"]
    ours = (await post(gateways[api].port, **wanted))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in ours] == [entry["token"] for entry in own]
    for mine, theirs in zip(ours, own, strict=True):
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=0.05)
        assert [each["token"] for each in mine["top_logprobs"]] == [
            each["token"] for each in theirs["top_logprobs"]
        ]


@pytest.mark.parametrize("api", APIS)
async def test_log_has_what_the_server_tells_and_no_zeros_for_the_rest(
    gateways: dict[str, Gateway], api: str
) -> None:
    gateway, question = gateways[api], f"One word of {api}, please."
    document = await post(gateway.port, **chat(question, max_tokens=1))  # all is told with the one token

    def is_logged() -> bool:
        return any(line["output_tokens"] == 1 for line in request_lines(gateway)[-1:])

    await asyncio.to_thread(wait_for, gateway, is_logged, "logged")
    line = request_lines(gateway)[-1]
    assert not {"queue_ms", "prefill_ms"} & set(line)
    assert line["cached_tokens"] == document["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert line["cached_tokens"] is not None
    assert line["ttft_ms"] > 0
    assert gateway.metric("headrace_queue_seconds_count") == 0


async def test_filter_masks_what_the_server_says(gateways: dict[str, Gateway], server: Server) -> None:
    own = text_of(await post(server.port, **chat(max_tokens=40)))
    assert MASKED in own
    document = await post(gateways["generate"].port, **chat(max_tokens=40))
    assert text_of(document) == own.replace(MASKED, "*" * len(MASKED))


@pytest.mark.parametrize("api", APIS)
async def test_stop_string_ends_the_answer_and_frees_the_engine(
    gateways: dict[str, Gateway], server: Server, api: str
) -> None:
    own = text_of(await post(server.port, **chat()))
    stop = own.split()[3]
    document = await post(gateways[api].port, **chat(stop=[stop], max_tokens=1500, ignore_eos=True))
    assert text_of(document) == own.partition(stop)[0]
    assert document["choices"][0]["stop_reason"] == stop
    await wait_until_idle(gateways[api], server)


async def test_sampling_fields_reach_the_engine(gateways: dict[str, Gateway]) -> None:
    for gateway in gateways.values():
        wanted = chat(response_format={"type": "json_object"}, max_tokens=60)
        document = await post(gateway.port, **wanted)
        if document["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(text_of(document)), dict)
        assert text_of(document).lstrip().startswith("{")
        async with connect(gateway.port) as wire:
            head = await wire.post(CHAT, chat(structured_outputs={"regex": "["}))
            error = (await wire.json())["error"]
        assert (head.status, error["code"]) == (400, "engine_rejected")
        assert "regex" in error["message"]
        assert "regex" not in gateway.process.log_text()


@pytest.mark.parametrize("api", APIS)
async def test_client_that_leaves_frees_the_engine(
    gateways: dict[str, Gateway], server: Server, api: str
) -> None:
    gateway = gateways[api]
    async with connect(gateway.port) as wire:
        await wire.post(CHAT, chat(stream=True, max_tokens=1900, ignore_eos=True))
        while (frame := await wire.frame()) is None or not frame.data:
            pass
        assert server.metric("vllm:num_requests_running") == 1
        await asyncio.to_thread(wait_for, gateway, lambda: statuses(gateway)[-1]["running"] == 1, "counted")
        assert statuses(gateway)[-1]["outstanding_requests"] == 1
    await wait_until_idle(gateway, server)
    await asyncio.to_thread(wait_for, gateway, lambda: statuses(gateway)[-1]["running"] == 0, "counted")
    assert statuses(gateway)[-1]["outstanding_tokens"] == 0
    assert request_lines(gateway)[-1]["ended"] == "client_closed"


async def test_tokenizer_of_another_model_ends_the_start(
    gateways: dict[str, Gateway], server: Server, embedded_model: Path, tmp_path: Path
) -> None:
    upstream = f"vllm+http://127.0.0.1:{server.port}"
    http = HttpClient()
    probe = UpstreamProbe(http, parse_upstream(upstream), None, 30.0)
    assert await VllmKind().token_ids(probe, MODEL, "rivers")
    await http.close()
    for gateway in gateways.values():  # it was asked there, too, and nothing was found
        assert "backend.upstream_tokenizer" not in gateway.process.log_text()
    other = make_tokenizer(tmp_path / "other")
    command = headrace("gateway", "--port", str(free_port()), "--upstream", upstream)
    done = await asyncio.to_thread(
        subprocess.run, [*command, "--tokenizer", str(other)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode not in (0, None)
    told = done.stdout + done.stderr
    assert f"{upstream} has another tokenizer for '{MODEL}' than the folder {other}" in told


async def test_server_that_nobody_runs_is_told_and_not_used(gateways: dict[str, Gateway]) -> None:
    gateway = gateways["completions"]
    dead, alive = statuses(gateway)
    assert (dead["state"], alive["state"]) == ("connecting", "ready")
    assert dead["reason"]
    outcomes = await asyncio.gather(*(ask(gateway.port, chat(f"{n}?", stream=True)) for n in range(8)))
    assert {outcome.kind for outcome in outcomes} == {COMPLETE}
    assert gateway.metric("headrace_worker_ready") == 1


async def test_server_that_is_killed_is_named_in_the_error(
    gateways: dict[str, Gateway], server: Server
) -> None:
    """The last test here: nobody has the server after it."""
    begun = {api: asyncio.Event() for api in gateways}

    async def run(api: str) -> Any:
        def note(frame: Any) -> None:
            begun[api].set()

        endless = chat(stream=True, max_tokens=1900, ignore_eos=True)
        return await ask(gateways[api].port, endless, on_frame=note)

    running = {api: asyncio.create_task(run(api)) for api in gateways}
    for event in begun.values():
        await asyncio.wait_for(event.wait(), 60)
    server.process.kill()
    for api, gateway in gateways.items():
        outcome = await running[api]
        assert (outcome.kind, outcome.code) == (FAILED, "worker_lost")
        await asyncio.to_thread(
            wait_for, gateway, lambda g=gateway: answers(g.port, "/ready") == 503, "not ready"
        )
        refused = await ask(gateway.port, chat(stream=True))
        assert (refused.kind, refused.status, refused.code) == (REFUSED, 503, "no_worker")
        assert_no_fault(gateway)
