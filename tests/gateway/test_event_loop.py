"""The event loop and the garbage collector of a process."""

import asyncio
import gc
import sys
from collections.abc import Iterator

import pytest

from gateway.event_loop import loop_factory, settle_memory


@pytest.fixture
def collector() -> Iterator[None]:
    """As it was, after the test."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collector")
def test_what_is_there_is_not_walked_again() -> None:
    gc.unfreeze()
    num_containers = len(gc.get_objects())
    settle_memory()
    assert gc.get_freeze_count() > num_containers / 2
    assert gc.get_threshold()[0] > 10_000


def test_the_loop_is_asyncios_where_uvloop_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop_factory().__module__.startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory() is asyncio.new_event_loop
