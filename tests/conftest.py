"""Fixtures for all tests, and which tests run.

Tests marked `long` run only when asked for: `-m long` runs them alone, `--long` runs them with the others.
Fixtures that start processes leave nothing running; a failing test shows the ends of their logs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from backend.embedded import default_cache_dir, ensure_embedded_model
from backend.embedded_fetch import EmbeddedModelError
from backend.progress import StreamProgress
from tests import stack
from tests.components import missing, need
from tests.stack import Gateway, Worker
from tests.vision_model import make_vision_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the soaks and the full counts")


# Fixtures that a session has once, or that take both cores: their tests run in one process, one by one.
_ENGINE_FIXTURES = frozenset({"engine_worker", "engine_gateway", "vision_worker"})
_VLLM_FIXTURES = frozenset({"_vllm", "vllm", "vllm_requests"})  # vLLM's import: 9 s, once in that process
# Hugging Face's tokenizers of six models, and ours beside them: 20 s, once in that process.
_MODEL_MODULES = frozenset({"test_context_policy", "test_exactness", "test_inbound_fuzz", "test_injection"})


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --long or a -m that speaks of it, `long` tests are deselected.

    Side by side (`-n 3 --dist loadgroup`) a module stays in one process, and so does all that has an engine
    or vLLM itself, and what loads the same large tokenizers.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    if config.getoption("--long") or "long" in config.getoption("-m"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("engine") or (_ENGINE_FIXTURES | _VLLM_FIXTURES) & set(item.fixturenames):
        return "engine"
    return "models" if item.path.stem in _MODEL_MODULES else item.path.stem


def pytest_unconfigure() -> None:
    """Keep pytest's closing line the last one: at the end triton's bindings list what they leaked."""
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failing test shows what the processes in its hands have logged last."""
    report = yield
    if report.failed:
        for log in _logs(getattr(item, "funcargs", {})):
            report.sections.append((f"end of {log.name}", log.read_text(errors="replace")[-4000:]))
    return report


def _logs(fixtures: Mapping[str, Any]) -> list[Path]:
    folder = fixtures.get("tmp_path")
    logs = sorted(folder.glob("*.log")) if folder else []
    return logs + [each.process.log for each in fixtures.values() if isinstance(each, Worker | Gateway)]


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The embedded model's folder; the first run on a machine fetches and converts it."""
    need("vllm")
    try:
        return ensure_embedded_model(default_cache_dir(os.environ), StreamProgress())
    except EmbeddedModelError as error:
        missing(f"embedded model: {error}")


@pytest.fixture(scope="session")
def engine_worker(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One real vLLM worker with the embedded model for all tests of the session. Nobody may end it.

    A step takes 512 tokens of prompts at most: a prompt of several steps need not be long.
    """
    options = ("--", "--max-num-batched-tokens", str(stack.STEP_TOKENS))
    with stack.start_engine(tmp_path_factory.mktemp("engine"), embedded_model, *options) as worker:
        yield worker


@pytest.fixture(scope="session")
def engine_gateway(engine_worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway with default settings in front of `engine_worker`. Nobody may end it."""
    with stack.start_gateway(tmp_path_factory.mktemp("engine_gateway"), [engine_worker]) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def vision_model(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that takes images, see `tests/vision_model.py`."""
    return make_vision_model(tmp_path_factory.mktemp("vision") / "vision", embedded_model)


@pytest.fixture(scope="session")
def vision_worker(vision_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One real vLLM worker with the tiny vision model for all tests of the session. Nobody may end it."""
    folder = tmp_path_factory.mktemp("vision_worker")
    with stack.start_engine(folder, vision_model, name="vision") as worker:
        yield worker


@pytest.fixture
def scripted_worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts scripted workers: `scripted_worker("--step-ms", "20", "--script", str(path))`.

    They have the embedded model's tokenizer unless `tokenizer` names another model folder.
    """
    with ExitStack() as started:

        def start(*args: str, tokenizer: Path | None = None, **options: Any) -> Worker:
            options.setdefault("name", f"scripted{_count(tmp_path, 'scripted')}")
            tokenizer = tokenizer or request.getfixturevalue("embedded_model")
            return started.enter_context(stack.start_scripted(tmp_path, tokenizer, *args, **options))

        yield start


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways: `gateway([worker], "--api-key", "secret")`. Use it after the workers' fixture."""
    with ExitStack() as started:

        def start(workers: Any = (), *args: str, **options: Any) -> Gateway:
            options.setdefault("name", f"gateway{_count(tmp_path, 'gateway')}")
            return started.enter_context(stack.start_gateway(tmp_path, workers, *args, **options))

        yield start


def _count(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"{name}*.log")))
