"""Merging for slow readers loses nothing, keeps order, and grows by streams only."""

from __future__ import annotations

import random

from backend import link
from backend.link import Delta, Extra, Step
from backend.outbox import Outbox


def test_nothing_is_lost_or_reordered_for_random_steps_and_takes() -> None:
    rng = random.Random(1)
    for _ in range(200):
        outbox = Outbox()
        sent: dict[int, list[int]] = {slot: [] for slot in range(5)}
        received: dict[int, list[int]] = {slot: [] for slot in range(5)}

        def drain(outbox: Outbox = outbox, received: dict[int, list[int]] = received) -> None:
            for delta in outbox.take(rng.choice((1, 3, 50))):
                received[delta.slot] += delta.ids

        for _ in range(50):
            slots = rng.sample(range(5), rng.randint(1, 5))
            deltas = [
                Delta(slot, 1, [rng.randrange(100) for _ in range(rng.randint(1, 4))]) for slot in slots
            ]
            for delta in deltas:
                sent[delta.slot] += delta.ids
            outbox.add(deltas)
            if rng.random() < 0.5:
                drain()
        while outbox:
            drain()
        assert received == sent


def test_finish_stop_first_token_and_logprobs_merge_into_one_entry() -> None:
    outbox = Outbox()
    outbox.add([Delta(1, 9, [5], extra=Extra(64, 1.0, 2.0, True, [([5], [-0.5], 1)]))])
    outbox.add([Delta(1, 9, [6], extra=Extra(logprobs=[([6], [-0.25], 1)]))])
    outbox.add([Delta(1, 9, [], finish="stop", stop=6)])
    (delta,) = outbox.take(1000)
    logprobs = [([5], [-0.5], 1), ([6], [-0.25], 1)]
    assert delta == Delta(1, 9, [5, 6], "stop", 6, Extra(64, 1.0, 2.0, True, logprobs))


def test_long_entry_is_cut_with_its_facts_in_the_right_part() -> None:
    outbox = Outbox()
    logprobs = [([token], [-float(token)], 1) for token in range(10)]
    outbox.add([Delta(1, 9, list(range(10)), "length", None, Extra(64, 1.0, 2.0, True, logprobs))])
    parts = []
    while outbox:
        parts += outbox.take(12)  # an id with one logprob weighs 4
    assert [part.ids for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [part.finish for part in parts] == [None, None, None, "length"]
    extras = [part.extra for part in parts if part.extra is not None]
    assert [extra.is_first for extra in extras] == [True, False, False, False]
    assert [entry for extra in extras for entry in extra.logprobs or ()] == logprobs


def test_lists_of_the_engine_are_not_changed() -> None:
    ids, extra = [5], Extra(logprobs=[([5], [-0.5], 1)])
    outbox = Outbox()
    outbox.add([Delta(1, 9, ids, extra=extra)])
    outbox.add([Delta(1, 9, [6], extra=Extra(logprobs=[([6], [-0.25], 1)]))])
    assert ids == [5]
    assert extra == Extra(logprobs=[([5], [-0.5], 1)])


def test_dropped_slot_is_gone_and_others_stay() -> None:
    outbox = Outbox()
    outbox.add([Delta(1, 9, [5]), Delta(2, 10, [6])])
    outbox.drop(1)
    outbox.drop(7)
    assert outbox.take(100) == [Delta(2, 10, [6])]


def test_frames_of_a_full_take_stay_below_the_frame_limit() -> None:
    outbox = Outbox()
    ids = [200_000] * 20_000
    logprobs = [([200_000] * 21, [-1.5] * 21, 100_000)] * 20_000
    outbox.add([Delta(1, 9, ids, extra=Extra(logprobs=logprobs)), Delta(2, 10, ids)])
    num_ids = 0
    while outbox:
        deltas = outbox.take(32 << 10)
        num_ids += sum(len(delta.ids) for delta in deltas)
        assert len(link.encode(Step(deltas))) < link.MAX_FRAME_BYTES // 4
    assert num_ids == 40_000
