"""Many streams of every kind at once, with clients that go away: nothing out of order, nothing kept.

Every frame is looked at as it comes: its place, the text so far, and that no denied word stands in it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests import stack
from tests.components import need
from tests.e2e.asking import CHAT
from tests.e2e.listening import Listener, assert_without, said_in
from tests.e2e.output_kinds import DENIED, RULES, Kind, kinds
from tests.e2e.resting import (
    assert_no_fault,
    at_rest,
    kept_bytes,
    request_lines,
    resident_bytes,
    wait_for,
    wait_until_held,
)
from tests.stack import Gateway, Worker
from tests.tokenizers import tokenizer_folder
from tests.wire import Wire, connect

SOAK_S: Final = 600.0
WARM_S: Final = 300.0  # of them: a process with vLLM in it grows for 4 minutes, then by 1 MB in 5
NUM_STREAMS: Final = 200
STEP_MS: Final = 100  # 2,000 tokens a second: less than half a core of the gateway
# 1 KiB for each answer after that. What an answer holds is 50: were it left to the garbage collector, whose
# full runs are rare, the process would grow by 34 MB.
MAX_GROWTH_BYTES: Final = 16 << 20
NUM_QUICK_STREAMS: Final = 30
NUM_QUICK_ANSWERS: Final = 240
NUM_SALTS: Final = 300  # different prompts of a kind


@dataclass(slots=True)
class Soak:
    """A gateway, its worker, and what clients did to them."""

    gateway: Gateway
    worker: Worker
    kinds: Sequence[Kind]
    num_left: int = 0  # answers that a client did not wait for
    finishes: dict[tuple[int, bool], int] = field(default_factory=dict)  # by kind and whether it was streamed

    @property
    def num_whole(self) -> int:
        """Answers that were read to their end."""
        return sum(self.finishes.values())

    async def run(self, num_lanes: int, seed: int, is_over: Callable[[], bool]) -> None:
        """So many clients at a time."""
        async with asyncio.TaskGroup() as lanes:
            for number in range(num_lanes):
                lanes.create_task(self.lane(random.Random(seed + number), is_over))

    async def lane(self, rng: random.Random, is_over: Callable[[], bool]) -> None:
        """One client after the other, until it is over."""
        await asyncio.sleep(rng.random() * 0.5)
        while not is_over():
            kind = rng.choice(self.kinds)
            request, is_stream = kind.body(rng.randrange(NUM_SALTS)), rng.random() < 0.85
            async with connect(self.gateway.port) as wire:
                await (self._streamed if is_stream else self._whole)(wire, kind, request, rng)

    async def _streamed(self, wire: Wire, kind: Kind, request: dict[str, Any], rng: random.Random) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        num_frames = rng.randrange(40) if rng.random() < 0.2 else -1  # then the client goes
        listener = Listener(kind.num_choices)
        assert (await wire.post(CHAT, request | options)).status == 200
        while frame := await wire.frame():
            listener.take(frame)
            if not frame.is_comment and not frame.is_done:
                assert_without(DENIED, frame.raw, frame.data)
            for said in listener.choices:
                kind.assert_on_its_way(said)
            if listener.num_frames == num_frames:
                self._leave(wire, rng)
                return
        assert listener.error is None, listener.error
        assert listener.is_done
        assert listener.usage is not None
        for said in listener.choices:
            kind.assert_all(said)
            assert_without(DENIED, b"", [said.content, "".join(entry["token"] for entry in said.logprobs)])
        self._count(kind, True)

    async def _whole(self, wire: Wire, kind: Kind, request: dict[str, Any], rng: random.Random) -> None:
        asking = asyncio.create_task(wire.post(CHAT, request))
        if rng.random() < 0.2:
            await asyncio.wait([asking], timeout=rng.random())
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                self._leave(wire, rng)
                return
        assert (await asking).status == 200
        raw = await wire.body()
        document = json.loads(raw)
        assert_without(DENIED, raw, document)
        for said in said_in(document):
            kind.assert_all(said)
        self._count(kind, False)

    def _leave(self, wire: Wire, rng: random.Random) -> None:
        self.num_left += 1
        if rng.random() < 0.5:
            wire.reset()

    def _count(self, kind: Kind, is_stream: bool) -> None:
        key = (kind.number, is_stream)
        self.finishes[key] = self.finishes.get(key, 0) + 1

    def assert_at_rest(self, before: dict[str, float]) -> None:
        """All is given back, nothing failed, and the log has no text."""
        wait_until_held(self.gateway, [self.worker], before)
        assert_no_fault(self.gateway)

        def ends() -> list[str]:
            return [line["ended"] for line in request_lines(self.gateway)]

        wait_for(
            self.gateway, lambda: ends().count("complete") >= self.num_whole, "logging what was complete"
        )
        assert set(ends()) <= {"complete", "client_closed"}
        log = self.gateway.log.read_text().lower()
        assert not any(word in log for word in DENIED)


@contextmanager
def soaked(
    folder: Path, tokenizer: Path, step_ms: int, made: Sequence[Kind], *flags: str, reasoning: str = ""
) -> Iterator[Soak]:
    script, rules, audit = folder / "script.json", folder / "rules.yaml", folder / "audit.jsonl"
    script.write_text(json.dumps({kind.question: kind.says for kind in made if kind.says is not None}))
    rules.write_text(json.dumps(RULES))
    options = ["--script", str(script), "--step-ms", str(step_ms)]
    options += ["--reasoning-parser", reasoning] if reasoning else []
    more = ["--rules", str(rules), "--allow-request-escape", "--audit-log", str(audit), *flags]
    limit_s = stack.PARSERS_START_S
    with (
        stack.start_scripted(folder, tokenizer, *options) as worker,
        stack.start_gateway(folder, [worker], *more, limit_s=limit_s) as gateway,
    ):
        yield Soak(gateway, worker, made)


async def test_many_streams_of_every_kind_at_once(embedded_model: Path, tmp_path: Path) -> None:
    made = kinds(has_parsers=False)
    with soaked(tmp_path, embedded_model, 4, made) as soak:
        before = at_rest(soak.gateway, [soak.worker])
        await soak.run(NUM_QUICK_STREAMS, 0, lambda: soak.num_whole >= NUM_QUICK_ANSWERS)
        soak.assert_at_rest(before)
        assert {number for number, _ in soak.finishes} == {kind.number for kind in made}
        assert soak.num_left > 5


@pytest.mark.long
@pytest.mark.timeout(SOAK_S + 300)
async def test_two_hundred_streams_for_ten_minutes_leave_memory_flat(tmp_path: Path) -> None:
    need("vllm")
    made = kinds(has_parsers=True)
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    folder = tokenizer_folder("qwen3")
    with soaked(tmp_path, folder, STEP_MS, made, *flags, reasoning="qwen3") as soak:
        before = at_rest(soak.gateway, [soak.worker])
        pids = (soak.gateway.pid, soak.worker.process.pid)
        memory: list[int] = []

        async def run(seconds: float, seed: int) -> None:
            end_s = asyncio.get_running_loop().time() + seconds

            def is_over() -> bool:
                return asyncio.get_running_loop().time() > end_s

            await soak.run(NUM_STREAMS, seed, is_over)
            await asyncio.to_thread(wait_until_held, soak.gateway, [soak.worker], before)
            memory.extend(resident_bytes(pid) for pid in pids)
            memory[-2] -= kept_bytes(soak.gateway)

        await run(WARM_S, 1000)
        await run(SOAK_S - WARM_S, 2000)
        grown = [late - early for early, late in zip(memory[:2], memory[2:], strict=True)]
        assert max(grown) < MAX_GROWTH_BYTES, grown
        soak.assert_at_rest(before)
        assert set(soak.finishes) == {(kind.number, way) for kind in made for way in (True, False)}
        assert soak.num_left > 100
