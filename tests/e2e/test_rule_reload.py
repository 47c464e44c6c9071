"""Rule files change while requests run: each request has one whole version of them, on its way in and out.

Two versions of a file rewrite the same words, each into a word of its own, in a prompt, in its answer, and at
several places of both. Whatever mixes them would show both.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from tests import stack
from tests.e2e.asking import CHAT, COMPLETE, ask, chat, text_of
from tests.e2e.recording_worker import RecordingWorker, recording_worker
from tests.e2e.resting import LIMIT_S, assert_no_fault, enter_all, ready, wait_for
from tests.stack import Gateway
from tests.wire import Frame, connect

WORDS: Final = ("甲乙", "丙丁", "millstone")
QUESTION: Final = "甲乙 and 丙丁 turn the millstone, number "
STORY: Final = "A long story, please"
SAID: Final = "a millstone, 甲乙, 丙丁. "
STEP_MS: Final = 3.0
NUM_LANES: Final = 6
NUM_EXCHANGES: Final = 6  # of the rules, at least, while the lanes ask


def rules(letter: str) -> str:
    """A rule for each word, all with the same replacement."""
    return "".join(
        f"- id: {letter}{number}\n  match: [{word}]\n  action: redact\n  replacement: '<{letter}>'\n"
        for number, word in enumerate(WORDS)
    )


BROKEN: Final = rules("B") + "- id: last\n  match: [kernel]\n  action: explode\n"
BROKEN_LINE: Final = BROKEN[: BROKEN.index("action: explode")].count("\n") + 1


def letters(text: str) -> set[str]:
    """The versions that have rewritten a text."""
    assert not any(word in text for word in WORDS), text
    return set(re.findall(r"<([A-Z])>", text))


@pytest.fixture(scope="module")
def worker(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingWorker]:
    folder = tmp_path_factory.mktemp("worker")
    script = folder / "script.json"
    script.write_text(json.dumps({STORY: SAID * 1000, "number 0.": SAID, "": SAID * 6}))
    options: dict[str, Any] = {
        "script": script,
        "step_ms": STEP_MS,
        "max_model_len": 1 << 20,
        "prefill_ms_per_1k": 0.0,
    }
    with recording_worker(folder, embedded_model, **options) as worker:
        yield worker


@dataclass(frozen=True, slots=True)
class Ruled:
    """A gateway and its rule file."""

    gateway: Gateway
    path: Path

    def write(self, text: str, in_place: bool = False) -> None:
        """As an editor does, or as a shell does: then the file is empty for a moment."""
        if in_place:
            self.path.write_text(text)
            return
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)

    def metric(self, name: str) -> float:
        return self.gateway.metric(f"headrace_rules_{name}")

    def num_tasks(self) -> float:
        """A request that waits for a need has three: its own, the work's and the watch over its client."""
        return self.gateway.metric("headrace_tasks")

    async def until(self, is_true: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(wait_for, self.gateway, is_true, what)

    async def until_version(self, number: float) -> None:
        await self.until(lambda: self.metric("version") == number, f"at version {number}")

    async def ask(self, number: int, more: str = "") -> str:
        """The whole answer to a numbered question; that to number 0 is short."""
        outcome = await ask(self.gateway.port, chat(f"{QUESTION}{number}.{more}", 200, ignore_eos=False))
        assert outcome.kind == COMPLETE, outcome
        return outcome.text

    async def letters(self) -> set[str]:
        """Of the versions that new requests get, whichever process takes them."""
        answers = await asyncio.gather(*[self.ask(0) for _ in range(12)])
        return set().union(*map(letters, answers))

    async def until_all_say(self, letter: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while await self.letters() != {letter}:
                pass


@pytest.fixture(scope="module")
def started(worker: RecordingWorker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Ruled]]:
    """One gateway looks at its file 20 times a second, one of two processes waits for a signal."""
    folder = tmp_path_factory.mktemp("reload")
    paths = [folder / "looks.yaml", folder / "waits.yaml"]
    flags = [("--rules-reload-s", "0.05"), ("--rules-reload-s", "0", "--processes", "2")]
    with ExitStack() as running:
        for path in paths:
            path.write_text(rules("A"))
        starting = [
            stack.start_gateway(folder, [worker.address], "--rules", str(path), *more, name=path.stem)
            for path, more in zip(paths, flags, strict=True)
        ]
        gateways = enter_all(running, starting)
        yield [Ruled(gateway, path) for gateway, path in zip(gateways, paths, strict=True)]
        for gateway in gateways:
            assert_no_fault(gateway)


@pytest.fixture
async def looking(started: list[Ruled], worker: RecordingWorker) -> Ruled:
    """With version A in force, whatever an earlier test has left."""
    ruled = started[0]
    ruled.write(rules("A"))
    await ruled.until_all_say("A")
    worker.take()
    return ruled


async def test_no_request_sees_half_a_rule_set(
    looking: Ruled, worker: RecordingWorker, embedded_model: Path
) -> None:
    numbers = itertools.count(1)
    versions: dict[int, str] = {}  # question -> the letter of its answer
    num_exchanges = 0
    num_spanning = 0  # requests that an exchange came upon
    is_over = False

    async def lane() -> None:
        nonlocal num_spanning
        while not is_over:
            number, begun = next(numbers), num_exchanges
            (versions[number],) = letters(await looking.ask(number))
            num_spanning += num_exchanges > begun

    def is_enough() -> bool:
        counts = Counter(versions.values())
        return num_exchanges >= NUM_EXCHANGES and num_spanning > 0 and min(counts["A"], counts["B"]) >= 10

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as lanes:
        for _ in range(NUM_LANES):
            lanes.create_task(lane())
        version = looking.metric("version")
        while not is_enough():
            looking.write(rules("BA"[num_exchanges % 2]), in_place=num_exchanges % 3 == 2)
            await looking.until_version(version + num_exchanges + 1)
            num_exchanges += 1
        is_over = True

    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    prompts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in worker.take()]
    on_input = {int(re.findall(r"number (\d+)\.", prompt)[0]): letters(prompt) for prompt in prompts}
    assert on_input == {number: {letter} for number, letter in versions.items()}
    assert looking.metric("failed_reloads_total") == 0


async def test_prompt_that_is_being_encoded_keeps_its_version_for_the_answer(
    looking: Ruled, worker: RecordingWorker, embedded_model: Path
) -> None:
    long = "".join(f" {number} wheels" for number in range(100_000))  # takes far longer than to read rules
    version, num_tasks = looking.metric("version"), looking.num_tasks()
    asking = asyncio.create_task(looking.ask(1, f"{long} {QUESTION}"))
    await looking.until(lambda: looking.num_tasks() >= num_tasks + 3, "encoding")
    looking.write(rules("B"))
    looking.gateway.process.signal(signal.SIGHUP)
    await looking.until_version(version + 1)
    assert not worker.num_jobs, "it was too quick"
    assert letters(await asking) == {"A"}
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    assert letters(tokenizer.decode(worker.prompt())) == {"A"}


async def test_running_answer_keeps_the_version_that_it_began_with(looking: Ruled) -> None:
    frames: list[Frame] = []
    is_over = False

    async def listen() -> None:
        async with connect(looking.gateway.port) as wire:
            await wire.post(CHAT, chat(STORY, 20_000, ignore_eos=False))
            while not is_over and (frame := await wire.frame()):
                frames.append(frame)

    story = asyncio.create_task(listen())
    await looking.until(lambda: "<A>" in text_of(frames), "telling")
    looking.write(rules("B"))
    await looking.until_all_say("B")
    length = len(text_of(frames))
    await looking.until(lambda: len(text_of(frames)) > length + 400, "telling on")
    assert not story.done()
    is_over = True
    await story
    assert letters(text_of(frames).rpartition("<")[0]) == {"A"}


async def test_broken_file_leaves_the_old_rules_on_and_says_why(looking: Ruled) -> None:
    version, num_failed = looking.metric("version"), looking.metric("failed_reloads_total")
    looking.write(BROKEN)
    await looking.until(lambda: looking.metric("failed_reloads_total") > num_failed, "refusing the file")
    assert looking.metric("version") == version
    assert await looking.letters() == {"A"}
    log = looking.gateway.log.read_text()
    assert f"version {version:.0f} stays on" in log
    assert f"{looking.path.name}:{BROKEN_LINE}: " in log
    assert "explode" in log

    shown = told(looking)
    assert shown["version"] == version
    assert shown["last_error"].startswith(f"{looking.path.name}:{BROKEN_LINE}")
    assert str(looking.path.parent) not in json.dumps(shown)

    looking.path.unlink()
    await looking.until(lambda: looking.metric("failed_reloads_total") > num_failed + 1, "missing the file")
    assert await looking.letters() == {"A"}
    looking.write(rules("B"))
    await looking.until_all_say("B")
    assert looking.metric("failed_reloads_total") == num_failed + 2, "once for each content"
    assert told(looking)["last_error"] is None


def told(ruled: Ruled) -> dict[str, Any]:
    """What /ready?verbose says of the rules."""
    rules: dict[str, Any] = ready(ruled.gateway)[1]["rules"]
    return rules


async def test_signal_makes_every_process_read_its_files_at_once(started: list[Ruled]) -> None:
    waiting = started[1]
    assert await waiting.letters() == {"A"}
    waiting.write(rules("B"))
    assert await waiting.letters() == {"A"}, "nobody has asked for a look"
    waiting.gateway.process.signal(signal.SIGHUP)
    await waiting.until_all_say("B")
    await waiting.until(lambda: waiting.metric("reloads_total") == 2, "counting both processes")

    waiting.write(BROKEN)
    waiting.gateway.process.signal(signal.SIGHUP)
    await waiting.until(lambda: waiting.metric("failed_reloads_total") == 2, "refusing the file twice")
    await waiting.until_all_say("B")
