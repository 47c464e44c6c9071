"""Who gets in and where to: queue bounds, API keys, several models, several workers of one model."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import stack
from tests.e2e.asking import CHAT, COMPLETE, REFUSED, ask, chat
from tests.e2e.resting import (
    assert_no_fault,
    at_rest,
    enter_all,
    logged,
    num_jobs,
    request_lines,
    statuses,
    wait_for,
)
from tests.stack import Gateway, Worker, start_gateway
from tests.wire import connect

KEY, OTHER_KEY = "key-of-alice-1234", "key-of-bob-5678"
AS_ALICE = {"authorization": f"Bearer {KEY}"}
MAX_RUNNING = 2
MAX_QUEUED = 3
MAX_QUEUED_TOKENS = 1000
ENDLESS = 20_000


@dataclass(frozen=True, slots=True)
class Served:
    gateway: Gateway
    worker: Worker

    @property
    def port(self) -> int:
        return self.gateway.port


# -- queue bounds and keys -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bounded(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A worker that runs two requests, and a gateway that lets three of them queue, with keys."""
    folder = tmp_path_factory.mktemp("bounded")
    queue = ("--queue-max-requests", str(MAX_QUEUED), "--queue-max-tokens", str(MAX_QUEUED_TOKENS))
    with (
        stack.start_scripted(folder, embedded_model, "--max-running", str(MAX_RUNNING)) as worker,
        start_gateway(folder, [worker], *queue, "--api-key", KEY, "--api-key", OTHER_KEY) as gateway,
    ):
        yield Served(gateway, worker)


@asynccontextmanager
async def busy(served: Served, queued: list[str]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """The engine runs what it can, and these prompts wait; ends with nothing left."""
    async with AsyncExitStack() as clients:
        for number in range(MAX_RUNNING):
            wire = await clients.enter_async_context(connect(served.port))
            assert (await wire.post(CHAT, chat(f"Block {number}", ENDLESS), AS_ALICE)).status == 200
        tasks = [asyncio.create_task(ask(served.port, chat(text), AS_ALICE)) for text in queued]
        await queueing(served, len(queued))
        yield tasks
    for outcome in await asyncio.gather(*tasks):
        assert outcome.kind == COMPLETE  # those that waited had their turn
    at_rest(served.gateway, [served.worker])


async def queueing(served: Served, count: int) -> None:
    """Wait until so many are without a first token."""
    await asyncio.to_thread(
        wait_for, served.gateway, lambda: num_jobs(served.worker, waiting=True) == count, f"queueing {count}"
    )


async def assert_queue_full(served: Served, body: dict[str, Any], request_id: str = "full") -> None:
    async with connect(served.port) as wire:
        head = await wire.post(CHAT, body, AS_ALICE | {"x-request-id": request_id})
        error = (await wire.json())["error"]
    assert (head.status, error["code"], error["type"]) == (503, "queue_full", "overloaded_error")
    assert int(head["retry-after"]) >= 1
    assert int(head["retry-after-ms"]) > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_full_queue_is_503_before_any_work(bounded: Served, stream: bool) -> None:
    async with busy(bounded, [f"Wait {number}" for number in range(MAX_QUEUED)]):
        await assert_queue_full(bounded, chat(stream=stream), f"full-{stream}")
        line = logged(bounded.gateway, f"full-{stream}")
        assert (line["status"], line["ended"], line["prompt_tokens"]) == (503, "queue_full", 0)
        assert line["parse_ms"] is not None
        assert "tokenize_ms" not in line
        assert num_jobs(bounded.worker) == MAX_RUNNING + MAX_QUEUED
    assert_no_fault(bounded.gateway)


async def test_queue_bound_in_tokens_is_503_for_long_prompts_alone(bounded: Served) -> None:
    async with busy(bounded, ["Wait. " + "word " * (MAX_QUEUED_TOKENS * 8 // 10)]):
        await assert_queue_full(bounded, chat("Me too. " + "word " * (MAX_QUEUED_TOKENS // 2)))
        short = asyncio.create_task(ask(bounded.port, chat("A short one"), AS_ALICE))
        await asyncio.to_thread(
            wait_for,
            bounded.gateway,
            lambda: num_jobs(bounded.worker, waiting=True) == 2,
            "queueing the short one",
        )
    assert (await short).kind == COMPLETE


async def test_choices_that_do_not_all_fit_leave_none_behind(bounded: Served) -> None:
    """The first ones of `n` are in the queue already when it turns out to be full."""
    async with busy(bounded, ["Wait"]):
        await assert_queue_full(bounded, chat(n=8))
        wait_for(
            bounded.gateway, lambda: num_jobs(bounded.worker) == MAX_RUNNING + 1, "rid of the first choices"
        )


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY} {OTHER_KEY}"},
        {"authorization": "Bearer "},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models")]
)
async def test_missing_or_wrong_key_is_401(
    bounded: Served, method: str, path: str, headers: dict[str, str]
) -> None:
    async with connect(bounded.port) as wire:
        head = await wire.request(method, path, chat() if method == "POST" else None, headers)
        error = (await wire.json())["error"]
    assert (head.status, error["code"]) == (401, "invalid_api_key")
    assert head["www-authenticate"].startswith("Bearer")
    assert KEY not in str(error)


async def test_key_is_checked_before_the_body_is_read(bounded: Served) -> None:
    async with connect(bounded.port) as wire:
        await wire.send(
            (
                f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\n"
                f"host: a\r\ncontent-length: 1000\r\n\r\n"
            ).encode()
        )
        assert (await wire.head()).status == 401


async def test_each_key_is_taken_and_logged_by_its_id_alone(bounded: Served) -> None:
    ids = []
    for name, key in (("by-alice", KEY), ("by-bob", OTHER_KEY)):
        headers = {"authorization": f"Bearer {key}", "x-request-id": name}
        assert (await ask(bounded.port, chat(max_tokens=2), headers)).kind == COMPLETE
        ids.append(logged(bounded.gateway, name)["key"])
    assert len(set(ids)) == 2
    text = bounded.gateway.log.read_text()
    assert KEY not in text
    assert OTHER_KEY not in text


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/docs", "/"])
async def test_what_operators_and_newcomers_need_has_no_key(bounded: Served, path: str) -> None:
    async with connect(bounded.port) as wire:
        assert (await wire.request("GET", path)).status == 200
        await wire.body()


# -- several workers, several models -------------------------------------------------------------------------


class Farm:
    """A gateway with two workers of `twin`, one of `single`, and an address where a stranger may come."""

    def __init__(self, folder: Path, model: Path, running: ExitStack) -> None:
        self._folder = folder
        self._model = model
        self.running = running
        *self.twins, self.single = enter_all(
            running,
            [
                self.worker("twin0", "twin"),
                self.worker("twin1", "twin"),
                self.worker("single", "single", "--seed", "7"),
            ],
        )
        workers: list[Worker | str] = [*self.twins, self.single, f"unix://{folder}/stranger.sock"]
        self.gateway = running.enter_context(start_gateway(folder, workers))
        wait_for(self.gateway, lambda: self.states()[:3] == ["ready"] * 3, "linked to three workers")

    def worker(
        self, name: str, served: str, *options: str, tokenizer: Path | None = None
    ) -> AbstractContextManager[Worker]:
        """A worker that is yet to be started."""
        options = ("--served-model-name", served, "--prefill-ms-per-1k", "0", *options)
        return stack.start_scripted(self._folder, tokenizer or self._model, *options, name=name)

    def states(self) -> list[str]:
        return [status["state"] for status in statuses(self.gateway)]

    def name_of(self, worker: Worker) -> str:
        """What the worker calls itself."""
        found = {status["address"]: status["name"] for status in statuses(self.gateway)}
        return str(found[worker.address])


@pytest.fixture(scope="module")
def farm(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    with ExitStack() as running:
        yield Farm(tmp_path_factory.mktemp("farm"), embedded_model, running)


async def ask_teacher(farm: Farm, number: int, turn: int) -> tuple[str, int]:
    """A question under one of several system prompts: which worker answered, and its cached tokens."""
    system = f"{number}: you are a patient teacher. " + "Explain every step in plain words. " * 10
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {turn}"}]
    body, name = chat(max_tokens=2, model="twin", messages=messages), f"prefix-{number}-{turn}"
    assert (await ask(farm.gateway.port, body, {"x-request-id": name})).kind == COMPLETE
    line = logged(farm.gateway, name)
    return line["worker"], line["cached_tokens"]


async def test_models_are_listed_and_served_by_their_own_workers(farm: Farm) -> None:
    async with connect(farm.gateway.port) as wire:
        await wire.request("GET", "/v1/models")
        assert sorted(model["id"] for model in (await wire.json())["data"]) == ["single", "twin"]
    texts = {}
    for model, names in (
        ("twin", {farm.name_of(twin) for twin in farm.twins}),
        ("single", {farm.name_of(farm.single)}),
    ):
        outcome = await ask(farm.gateway.port, chat(model=model), {"x-request-id": model})
        assert outcome.kind == COMPLETE
        texts[model] = outcome.text
        line = logged(farm.gateway, model)
        assert line["model"] == model
        assert line["worker"] in names
    assert texts["twin"] != texts["single"]  # another seed: another worker has spoken


async def test_same_prefix_goes_to_the_same_worker_and_others_to_both(farm: Farm) -> None:
    workers = set()
    for number in range(12):
        answers = [await ask_teacher(farm, number, turn) for turn in range(3)]
        used = {worker for worker, _ in answers}
        assert len(used) == 1, answers
        assert min(cached for _, cached in answers[1:]) > 60, answers
        workers |= used
    assert workers == {farm.name_of(twin) for twin in farm.twins}


async def test_one_prefix_of_many_at_once_spills_over_to_the_other_worker(farm: Farm) -> None:
    body, names = chat("All the same prefix", 500, model="twin"), [f"spill-{each}" for each in range(40)]
    outcomes = await asyncio.gather(*(ask(farm.gateway.port, body, {"x-request-id": name}) for name in names))
    assert {outcome.kind for outcome in outcomes} == {COMPLETE}
    assert len({outcome.text for outcome in outcomes}) == 1
    used = [logged(farm.gateway, name)["worker"] for name in names]
    counts = [used.count(farm.name_of(twin)) for twin in farm.twins]
    assert min(counts) >= 10, counts


async def test_worker_of_a_known_name_with_another_template_is_refused_by_name(
    farm: Farm, embedded_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(embedded_model, other, ignore=shutil.ignore_patterns("*.safetensors"))
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "{# changed #}")
    stranger = farm.running.enter_context(farm.worker("stranger", "twin", tokenizer=other))
    wait_for(farm.gateway, lambda: farm.states()[3] == "refused", "refusing the stranger")
    reason = statuses(farm.gateway)[3]["reason"]
    named = re.match(r"worker (\S+) serves 'twin' with fingerprint", reason)
    assert named, reason
    assert f"{named[1]} serves twin" in stranger.process.log_text()  # it calls itself so
    assert all(farm.name_of(twin) in reason for twin in farm.twins)
    assert "tokenizers or templates differ" in reason
    assert reason in farm.gateway.log.read_text()
    outcomes = await asyncio.gather(*(ask(farm.gateway.port, chat(model="twin")) for _ in range(10)))
    assert {outcome.kind for outcome in outcomes} == {COMPLETE}
    assert named[1] not in {line["worker"] for line in request_lines(farm.gateway)}


async def test_model_whose_worker_has_gone_is_503_and_the_others_go_on(farm: Farm) -> None:
    farm.single.process.kill()
    wait_for(farm.gateway, lambda: farm.states()[2] != "ready", "without the single worker")
    outcome = await ask(farm.gateway.port, chat(model="single"))
    assert (outcome.kind, outcome.status, outcome.code) == (REFUSED, 503, "no_worker")
    assert (await ask(farm.gateway.port, chat(model="twin"))).kind == COMPLETE
    assert_no_fault(farm.gateway)
