"""The gateway's slots: lifecycle and sums."""

from __future__ import annotations

import pytest

from backend import link
from backend.slots import ABORTING, FREE, LIVE, SlotTable
from pipeline.errors import QueueFull
from tests.backend.linked import RecordingSink, make_call


def sums(table: SlotTable) -> tuple[int, int, int, int]:
    return table.num_requests, table.outstanding_tokens, table.num_waiting, table.waiting_tokens


async def test_sums_follow_a_stream_to_its_finish() -> None:
    table = SlotTable()
    slot = table.allocate(make_call([1] * 30, max_tokens=8), RecordingSink())
    assert sums(table) == (1, 38, 1, 30)
    table.first_token(slot)
    table.first_token(slot)
    assert sums(table) == (1, 8, 0, 0)
    table.release(slot, "finish")
    assert sums(table) == (0, 0, 0, 0)


async def test_aborted_slot_counts_no_more_but_stays_taken() -> None:
    table = SlotTable()
    slot = table.allocate(make_call([1] * 30), RecordingSink())
    table.abort(slot)
    assert sums(table) == (0, 0, 0, 0)
    assert slot.state is ABORTING
    other = table.allocate(make_call([1]), RecordingSink())
    assert other.number != slot.number
    table.release(slot, "closed")
    assert table.allocate(make_call([1]), RecordingSink()) is slot


@pytest.mark.parametrize("end", ["finish", "abort", "error"])
async def test_background_slot_is_live_but_no_load(end: str) -> None:
    table = SlotTable()
    slot = table.allocate(make_call([1] * 30, max_tokens=8), RecordingSink(), is_background=True)
    assert sums(table) == (1, 0, 0, 0)
    user = table.allocate(make_call([1] * 5, max_tokens=2), RecordingSink())
    table.first_token(slot)
    assert sums(table) == (2, 7, 1, 5)
    if end == "abort":
        table.abort(slot)
    else:
        table.release(slot, end)
    assert sums(table) == (1, 7, 1, 5)
    table.release(user, "finish")
    assert sums(table) == (0, 0, 0, 0)


async def test_slot_after_a_background_one_counts_again() -> None:
    table = SlotTable()
    slot = table.allocate(make_call([1] * 30, max_tokens=8), RecordingSink(), is_background=True)
    table.release(slot, "finish")
    assert table.allocate(make_call([1] * 30, max_tokens=8), RecordingSink()) is slot
    assert sums(table) == (1, 38, 1, 30)


async def test_generation_is_new_at_each_use() -> None:
    table = SlotTable()
    seen = set()
    for _ in range(10):
        slot = table.allocate(make_call([1]), RecordingSink())
        assert (slot.number, slot.state) == (0, LIVE)
        seen.add(slot.generation)
        assert table.find(0, slot.generation) is slot
        table.release(slot, "finish")
        assert table.find(0, slot.generation) is None
    assert len(seen) == 10


async def test_event_that_a_state_does_not_know_is_a_bug() -> None:
    table = SlotTable()
    slot = table.allocate(make_call([1]), RecordingSink())
    table.release(slot, "finish")
    assert slot.state is FREE
    with pytest.raises(KeyError):
        table.release(slot, "finish")


async def test_slots_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.slots.MAX_SLOTS", 3)
    table = SlotTable()
    for _ in range(3):
        table.allocate(make_call([1]), RecordingSink())
    with pytest.raises(QueueFull, match="all 3 slots"):
        table.allocate(make_call([1]), RecordingSink())
    assert link.MAX_SLOTS == 1 << 16
