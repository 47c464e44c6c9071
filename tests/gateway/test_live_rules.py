"""Rules that are exchanged while requests run."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from filters.rules import RuleError
from filters.scan import scan
from gateway import live_rules
from gateway.live_rules import LiveRules
from gateway.metrics import Metrics
from gateway.rule_files import MAX_BYTES
from gateway.rules_version import RuleOptions, RulesVersion
from pipeline.input_scan import scan_request
from tests.pipeline.requests import completion


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The rules freeze what they make; the other tests' garbage must not stay with it."""
    yield
    gc.unfreeze()


def write(path: Path, text: str) -> None:
    """As a careful writer does; the time of the change is a new one even on a coarse clock."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.rename(path)


def damage(path: Path, content: str | bytes | None) -> None:
    """In place; None: it is gone."""
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def append(path: Path, text: str) -> None:
    with path.open("a") as out:
        out.write(text)


def live(path: Path | list[Path], metrics: Metrics | None = None, **options: Any) -> LiveRules:
    paths = [path] if isinstance(path, Path) else path
    reload_s = options.pop("reload_s", 0.01)
    return LiveRules(list(map(str, paths)), "mask", RuleOptions(**options), metrics or Metrics(), reload_s)


async def settle(rules: LiveRules) -> None:
    """Two looks in a row: what has changed and stays so is taken by the second."""
    await rules.look()
    await rules.look()


def masked(version: RulesVersion, text: str) -> str:
    """A text as the rules for output leave it."""
    stream = version.output_for("content").stream()
    return text if stream is None else stream.feed(text) + stream.flush()


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    write(path, "badword\n")
    return path


async def test_changed_file_is_taken_and_old_version_still_works(file: Path) -> None:
    metrics = Metrics()
    rules = live(file, metrics)
    old = rules.current
    stream = old.output_for("content").stream()
    assert stream is not None
    assert stream.feed("a badw") == "a "
    write(file, "worse\nworst\n")
    await settle(rules)
    new = rules.current
    assert (old.number, new.number) == (1, 2)
    assert new.fingerprint != old.fingerprint
    assert new.num_keywords == 2
    assert stream.feed("ord and worse") == "******* and worse"
    assert masked(new, "badword worse") == "badword *****"
    assert new.input is not None
    assert scan("badword worst", new.input).text == "badword *****"
    assert new.seen is not None
    assert new.seen.rules is new.input
    assert value(metrics, "headrace_rules_version") == 2
    assert value(metrics, "headrace_rules_reloads_total") == 1
    assert value(metrics, "headrace_rules_failed_reloads_total") == 0


async def test_unchanged_file_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = live(file)
    reads: list[str] = []
    monkeypatch.setattr(live_rules, "read_regular", lambda path: reads.append(path) or "badword\n")
    for _ in range(3):
        await rules.look()
    assert reads == []
    os.utime(file, ns=(1, 1))
    for _ in range(4):
        await rules.look()
    assert reads == [str(file)]
    assert rules.current.number == 1  # the content is the same


@pytest.mark.parametrize(
    ("content", "problem", "place"),
    [
        ("fine\nx\n", "words.txt:2: the keyword 'x' folds to a single character", "words.txt:2: see the log"),
        (b"\xff\n", "words.txt:1: not UTF-8", "words.txt:1: see the log"),
        (None, "No such file", "words.txt: FileNotFoundError"),
    ],
)
async def test_broken_file_leaves_the_old_rules_on_and_says_why_once(
    file: Path, content: str | bytes | None, problem: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    rules = live(file, metrics)
    old = rules.current
    damage(file, content)
    for _ in range(5):
        await rules.look()
    assert rules.current is old
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert problem in warnings[0].getMessage()
    assert rules.status()["last_error"] == place
    assert str(file.parent) not in repr(rules.status())
    assert value(metrics, "headrace_rules_failed_reloads_total") == 1
    write(file, "badword\n")  # as it was
    await settle(rules)
    assert rules.current is old
    assert rules.status()["last_error"] is None
    write(file, "worse\n")
    await settle(rules)
    assert rules.current.number == 2


def to_pipe(path: Path) -> None:
    os.mkfifo(path)


def to_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def to_huge(path: Path) -> None:
    with path.open("wb") as out:
        out.truncate(MAX_BYTES + 1)


def to_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [to_pipe, to_endless, to_huge, Path.mkdir, to_link_to_itself])
async def test_what_is_no_file_leaves_the_old_rules_on_and_the_next_file_is_taken(
    file: Path, make: Callable[[Path], None]
) -> None:
    rules = live(file)
    damage(file, None)
    make(file)
    await settle(rules)
    assert isinstance(rules.last_error, OSError)
    assert rules.current.number == 1
    if make is Path.mkdir:
        os.rmdir(file)
    write(file, "other")
    await settle(rules)
    assert (rules.last_error, rules.current.number) == (None, 2)


async def test_fault_of_ours_leaves_the_old_rules_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = live(file)

    def failing(*args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(live_rules, "compile_rules", failing)
    write(file, "worse\n")
    await settle(rules)
    assert rules.current.number == 1
    assert rules.status()["last_error"] == "rules: ZeroDivisionError"
    monkeypatch.undo()
    write(file, "worst\n")
    await settle(rules)
    assert masked(rules.current, "worst") == "*****"


async def test_file_that_is_still_written_is_not_taken(file: Path) -> None:
    rules = live(file)
    content = "worse\nworst\n"
    damage(file, "")
    for char in content:
        append(file, char)
        assert await rules.look()
        assert rules.current.number == 1
    await rules.look()
    assert rules.current.number == 2
    assert rules.current.num_keywords == 2


async def test_file_that_changes_while_it_is_read_is_not_taken(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = live(file)

    def slowly(path: str) -> str:
        text = Path(path).read_text()
        write(file, text + "more\n")
        return text

    monkeypatch.setattr(live_rules, "read_regular", slowly)
    write(file, "worse\n")
    for _ in range(3):
        await rules.look()
    assert not await rules.look(is_forced=True)
    assert rules.current.number == 1
    assert rules.last_error is None
    monkeypatch.undo()
    assert await rules.look(is_forced=True)
    assert rules.current.num_keywords == 2  # worse, more


async def test_no_rules_at_all_and_rules_that_become_empty(file: Path) -> None:
    empty = live([])
    assert empty.current.input is None
    assert empty.current.seen is None
    assert empty.current.output_for("content").stream() is None
    rules = live(file)
    write(file, "# nothing\n")
    await settle(rules)
    assert (rules.current.number, rules.current.num_rules) == (2, 0)
    assert rules.current.input is None
    assert masked(rules.current, "badword") == "badword"


async def test_directions_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    write(path, "- {id: i, match: inward, action: mask, direction: input}\n")
    rules = live(path, max_seen_bytes=0)
    assert rules.current.output_for("content").stream() is None
    assert rules.current.seen is None
    write(path, "- {id: o, match: outward, action: mask, direction: output}\n")
    await settle(rules)
    assert rules.current.input is None
    assert masked(rules.current, "inward outward") == "inward *******"


def test_broken_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("x\n")
    with pytest.raises(RuleError):
        live(tmp_path / "words.txt")
    with pytest.raises(FileNotFoundError):
        live(tmp_path / "none.txt")


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it watches another thread's files
            await asyncio.sleep(0.002)


async def test_watching_takes_changes_by_itself(file: Path) -> None:
    rules = live(file)
    async with rules.watching():
        write(file, "worse\n")
        await until(lambda: rules.current.number == 2)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "watch rule files"]


async def test_sighup_takes_changes_without_polling(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    rules = live(file, reload_s=0)
    async with rules.watching():
        write(file, "worse\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: rules.current.number == 2)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_request_to_reload_a_file_that_is_being_written_is_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_rules, "RETRY_S", 0.01)
    read_text, num_reads = live_rules.read_regular, 0

    def at_first_slowly(path: str) -> str:
        nonlocal num_reads
        num_reads += 1
        text = read_text(path)
        if num_reads == 1:
            write(file, text + "more\n")
        return text

    rules = live(file, reload_s=0)
    monkeypatch.setattr(live_rules, "read_regular", at_first_slowly)
    async with rules.watching():
        write(file, "worse\n")
        rules.request_reload()
        await until(lambda: rules.current.number == 2)
    assert rules.current.num_keywords == 2


async def test_memory_of_a_version_is_freed_after_its_last_stream(file: Path) -> None:
    rules = live(file)
    stream = rules.current.output_for("content").stream()
    nodes = rules.current.output_for("content").walk.nodes
    assert stream is not None
    write(file, "worse\n")
    await settle(rules)
    assert all(nodes)
    assert stream.feed("badword.") + stream.flush() == "*******."
    del stream
    await until(lambda: not any(nodes))
    assert masked(rules.current, "worse") == "*****"


async def test_scanned_texts_are_counted(file: Path) -> None:
    metrics = Metrics()
    rules = live(file, metrics)
    version = rules.current
    assert version.input is not None
    for _ in range(3):
        next(scan_request(completion("hello"), version.input, "", version.seen), None)
    rules.publish()
    rules.publish()
    assert value(metrics, "headrace_scanned_texts_total", seen="new") == 1
    assert value(metrics, "headrace_scanned_texts_total", seen="known") == 2
    next(scan_request(completion("hello"), version.input, "", version.seen), None)
    write(file, "worse\n")
    await settle(rules)
    assert value(metrics, "headrace_scanned_texts_total", seen="known") == 3
    assert value(metrics, "headrace_seen_text_bytes") > 0


WORDS = ("alpha", "omega")  # each version masks one of them, in both directions
TEXT = " ".join(WORDS)
EXPECTED = {"alpha": "***** omega", "omega": "alpha *****"}


async def one_request(rules: LiveRules, rng: random.Random) -> str:
    """A request, with pauses wherever the real ones have them; the word that its version masks."""
    version = rules.current
    assert version.input is not None
    text = f"{TEXT}|{rng.random()}" + "x" * 60_000  # a new one each time, or it would not pause
    steps = scan_request(completion(text), version.input, "", version.seen)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            prompt = end.value[0].prompts[0]
            break
        await asyncio.sleep(0.002)
    stream, answer = version.output_for("content").stream(), ""
    assert stream is not None
    for char in TEXT:
        answer += stream.feed(char)
        await asyncio.sleep(0.001 * rng.randrange(2))
    answer += stream.flush()
    assert prompt.split("|")[0] == answer
    (word,) = [word for word, expected in EXPECTED.items() if expected == answer]
    return word


async def test_no_request_sees_half_a_set_while_rules_flip(tmp_path: Path) -> None:
    """Each takes one version, for its prompt, its answer and all pauses in between."""
    path, stop = tmp_path / "rules.yaml", False
    seen: dict[str, int] = dict.fromkeys(WORDS, 0)

    def write_version(word: str) -> None:
        directions = "".join(
            f"- {{id: {d}, match: {word}, action: mask, direction: {d}}}\n" for d in ("input", "output")
        )
        filler = "".join(f"- {{id: f{i}, match: filler{i}, action: mask}}\n" for i in range(200))
        write(path, directions + filler)

    async def requests(seed: int) -> None:
        rng = random.Random(seed)
        while not stop:
            seen[await one_request(rules, rng)] += 1

    def read_in_a_thread() -> int:
        num_read = 0
        while not stop:
            version = rules.current
            assert version.input is not None
            assert scan(TEXT, version.input).text == masked(version, TEXT)
            num_read += 1
        return num_read

    write_version("alpha")
    rules = live(path, reload_s=0.002)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        async with rules.watching():
            tasks = [asyncio.create_task(requests(seed)) for seed in range(12)]
            threads = [loop.run_in_executor(pool, read_in_a_thread) for _ in range(2)]
            for number in range(2, 12):
                write_version(WORDS[number % 2 == 0])
                await until(lambda number=number: rules.current.number == number)
            stop = True
            await asyncio.gather(*tasks)
            assert all(await asyncio.gather(*threads))
    assert all(seen.values())
