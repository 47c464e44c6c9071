"""The states of warm prompts on one worker: every transition, pauses, and what live requests prove."""

from __future__ import annotations

from array import array

import pytest

from gateway.warm_table import (
    EVICTED,
    FAILED,
    LIFECYCLE,
    MAX_ATTEMPTS,
    MAX_DOUBLINGS,
    MAX_PAUSE_S,
    PENDING,
    RECONNECT,
    SHORT,
    START,
    STATES,
    WARM,
    WARMING,
    WarmKey,
    WarmRow,
    WarmTable,
)

BLOCK, CONTEXT, INTERVAL_S = 4, 100, 10.0
SYSTEM = list(range(1, 9))  # two blocks
EVENTS = ("begin", "done", "retry", "give_up", "skip", "evict", "lose")


def packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def table_of(*salts: str | None, interval_s: float = INTERVAL_S) -> WarmTable:
    keys = [WarmKey(number, 0, "m", salt, "1 message") for number, salt in enumerate(salts)]
    return WarmTable(keys, BLOCK, CONTEXT, interval_s)


def warm_up(table: WarmTable, row: WarmRow, ids: list[int], now_s: float = 0.0, cached: int = 0) -> None:
    """Everything that happens to a row that is due, until it is warm."""
    if row.ids is None:
        assert table.learn(row, packed(ids))
    assert table.next(now_s) is row
    table.start(row)
    table.done(row, cached, now_s)


def warm_table(*prompts: list[int], interval_s: float = INTERVAL_S) -> WarmTable:
    """Warm since 0 s, without salts."""
    table = table_of(*[None] * len(prompts), interval_s=interval_s)
    table.begin(START, 0.0)
    for row, ids in zip(table.rows, prompts, strict=True):
        warm_up(table, row, ids)
    return table


def observe(table: WarmTable, ids: list[int], cached: int, now_s: float, salt: str | None = None) -> bool:
    return table.observe(memoryview(packed(ids)), salt, cached, now_s, now_s)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_event_leads_where_the_table_says_or_is_a_bug(state: str, event: str) -> None:
    table = table_of(None)
    (row,) = table.rows
    row.state = state
    table.counts.clear()
    table.counts[state] = 1
    if event in LIFECYCLE[state]:
        table._advance(row, event)
        assert row.state in STATES
        assert {state: count for state, count in table.counts.items() if count} == {row.state: 1}
    else:
        with pytest.raises(KeyError):
            table._advance(row, event)


def test_rows_are_warmed_in_their_order_and_only_once() -> None:
    table = table_of(None, "a", None)
    assert table.next(0.0) is None
    table.begin(START, 5.0)
    assert table.next(4.9) is None
    assert table.due_in_s(4.0) == 1.0
    for number in range(3):
        row = table.next(5.0)
        assert row is table.rows[number]
        assert table.due_in_s(5.0) == 0.0
        warm_up(table, row, [*SYSTEM, number], now_s=5.0)
        assert (row.state, row.reason, row.num_warmups, row.warmed_s) == (WARM, START, 1, 5.0)
    assert table.next(99.0) is None
    assert table.due_in_s(99.0) is None
    assert (table.num_untried, table.counts[WARM]) == (0, 3)


@pytest.mark.parametrize(("num_tokens", "warmed"), [(4, 4), (7, 4), (8, 8), (9, 8)])
def test_whole_blocks_are_sent_and_one_id_more(num_tokens: int, warmed: int) -> None:
    table = table_of(None)
    table.begin(START, 0.0)
    (row,) = table.rows
    ids = list(range(50, 50 + num_tokens))
    assert table.learn(row, packed(ids))
    sent = array("i", table.start(row)).tolist()
    assert sent[:-1] == ids[:warmed]
    assert len(sent) == warmed + 1
    assert (row.num_tokens, row.warmed_tokens, row.state) == (num_tokens, warmed, WARMING)


def test_prompt_without_a_whole_block_is_short_for_ever() -> None:
    table = table_of(None)
    table.begin(START, 0.0)
    (row,) = table.rows
    assert not table.learn(row, packed([1, 2, 3]))
    assert (row.state, table.num_untried) == (SHORT, 0)
    assert "3 tokens" in row.error
    table.lose()
    table.begin(RECONNECT, 1.0)
    assert (row.state, table.num_untried, table.next(9.0)) == (SHORT, 0, None)
    assert row.error


def test_prompt_that_fills_the_context_is_given_up() -> None:
    table = table_of(None, None)
    table.begin(START, 0.0)
    assert not table.learn(table.rows[0], packed([1] * (CONTEXT - 1)))
    assert table.rows[0].state is FAILED
    assert str(CONTEXT) in table.rows[0].error
    assert table.learn(table.rows[1], packed([1] * (CONTEXT - 2)))
    assert len(table.start(table.rows[1])) // 4 + 1 <= CONTEXT


def test_failures_are_tried_again_with_longer_pauses_and_then_given_up() -> None:
    table = table_of(None)
    table.begin(START, 0.0)
    (row,) = table.rows
    table.learn(row, packed(SYSTEM))
    now_s, pauses_s = 0.0, []
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert table.next(now_s) is row
        table.start(row)
        table.failed(row, "busy", True, now_s)
        assert (row.num_attempts, row.error, table.num_untried) == (attempt, "busy", 0)
        if attempt < MAX_ATTEMPTS:
            assert row.state is PENDING
            pause_s = table.due_in_s(now_s)
            assert pause_s is not None
            pauses_s.append(pause_s)
            now_s += pause_s
    assert row.state is FAILED
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[1] == 2 * pauses_s[0]
    assert pauses_s[-1] == MAX_PAUSE_S
    assert table.next(1e9) is None


def test_success_forgets_the_failures_before() -> None:
    table = table_of(None)
    table.begin(START, 0.0)
    (row,) = table.rows
    table.learn(row, packed(SYSTEM))
    table.start(row)
    table.failed(row, "busy", True, 0.0)
    warm_up(table, row, SYSTEM, now_s=50.0)
    assert (row.state, row.num_attempts, row.error) == (WARM, 0, "")


def test_what_cannot_succeed_is_not_tried_again() -> None:
    table = table_of(None)
    table.begin(START, 0.0)
    (row,) = table.rows
    table.learn(row, packed(SYSTEM))
    table.start(row)
    table.failed(row, "rejected", False, 0.0)
    assert (row.state, row.error, table.num_untried) == (FAILED, "rejected", 0)


@pytest.mark.parametrize("state", [PENDING, WARMING, WARM, FAILED])
def test_worker_that_comes_back_is_warmed_anew_from_every_state(state: str) -> None:
    table = table_of(None)
    table.begin(START, 0.0)
    (row,) = table.rows
    table.learn(row, packed(SYSTEM))
    if state is not PENDING:
        table.start(row)
    if state is WARM:
        table.done(row, 3, 0.0)
    if state is FAILED:
        table.failed(row, "rejected", False, 0.0)
    assert row.state is state
    table.lose()
    assert (row.state, row.warmed_s, row.cached_tokens, row.error) == (PENDING, None, None, "")
    assert (table.num_untried, table.next(1e9), table.due_in_s(0.0)) == (1, None, None)
    assert not observe(table, [*SYSTEM, 99], 0, 1.0)
    table.begin(RECONNECT, 7.0)
    warm_up(table, row, SYSTEM, now_s=7.0)
    assert (row.state, row.reason, row.num_warmups) == (WARM, RECONNECT, 2 if state is WARM else 1)


# -- evictions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [0, 4, 5, 7])
def test_use_that_finds_too_little_makes_a_prompt_due(cached: int) -> None:
    table = warm_table(SYSTEM)
    (row,) = table.rows
    assert observe(table, [*SYSTEM, 99], cached, 20.0)
    assert (row.state, row.reason, row.cached_tokens) == (PENDING, EVICTED, cached)
    assert table.next(20.0) is row
    assert not observe(table, [*SYSTEM, 99], cached, 21.0)


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        ([*SYSTEM, 99], 8),  # all of it was there
        (SYSTEM, 4),  # the last token is always computed, so this is all of it too
        (SYSTEM[:5], 4),  # shorter than the warm prompt, and all of its blocks were there
        ([*SYSTEM[:6], 99, 99, 99], 4),  # parts from it within the second block
        ([99, *SYSTEM], 0),
        ([], 0),
        ([1], 0),
    ],
)
def test_use_that_finds_what_it_can_changes_nothing(prompt: list[int], cached: int) -> None:
    table = warm_table(SYSTEM)
    assert not observe(table, prompt, cached, 20.0)
    assert table.rows[0].state is WARM
    assert table.next(1e9) is None


def test_use_under_another_salt_says_nothing() -> None:
    table = table_of("a", None)
    table.begin(START, 0.0)
    for row in table.rows:
        warm_up(table, row, SYSTEM)
    assert not observe(table, [*SYSTEM, 99], 0, 20.0, salt="b")
    assert observe(table, [*SYSTEM, 99], 0, 20.0, salt="a")
    assert [row.state for row in table.rows] == [PENDING, WARM]


def test_use_that_was_looked_up_before_the_warm_up_ended_says_nothing() -> None:
    table = warm_table(SYSTEM)
    table.rows[0].warmed_s = 20.0
    assert not table.observe(memoryview(packed([*SYSTEM, 99])), None, 0, 19.9, 25.0)
    assert table.observe(memoryview(packed([*SYSTEM, 99])), None, 0, 20.1, 25.0)


def test_loss_of_a_common_beginning_is_a_loss_of_all_that_share_it() -> None:
    longer, other = [*SYSTEM, 21, 22, 23, 24], [*SYSTEM, 31, 32, 33, 34]
    table = warm_table(SYSTEM, longer, other, [9, 9, 9, 9])
    assert observe(table, [*longer, 99], 4, 20.0)
    assert [row.state for row in table.rows] == [PENDING, PENDING, PENDING, WARM]
    # The request itself has computed the first two again.
    assert [row.is_check for row in table.rows] == [True, True, False, False]


def test_loss_of_an_own_part_is_no_loss_of_the_others() -> None:
    longer, other = [*SYSTEM, 21, 22, 23, 24], [*SYSTEM, 31, 32, 33, 34]
    table = warm_table(SYSTEM, longer, other)
    assert observe(table, [*longer, 99], 8, 20.0)
    assert [row.state for row in table.rows] == [WARM, PENDING, WARM]


def test_warm_ups_keep_their_distance_and_more_when_nobody_profits() -> None:
    table = warm_table(SYSTEM)
    (row,) = table.rows
    now_s, pauses_s = 0.0, []
    for _ in range(MAX_DOUBLINGS + 3):
        assert observe(table, [*SYSTEM, 99], 0, now_s + 0.5)
        pause_s = table.due_in_s(now_s)
        assert pause_s is not None
        pauses_s.append(pause_s)
        now_s += pause_s
        warm_up(table, row, SYSTEM, now_s, cached=8)
    assert pauses_s[:3] == [INTERVAL_S, 2 * INTERVAL_S, 4 * INTERVAL_S]
    assert pauses_s[-1] == INTERVAL_S * 2**MAX_DOUBLINGS
    observe(table, [*SYSTEM, 99], 8, now_s + 1)  # somebody profits
    assert observe(table, [*SYSTEM, 99], 0, now_s + 2)
    assert table.due_in_s(now_s) == INTERVAL_S


def test_engine_that_keeps_nothing_is_not_warmed_for_ever() -> None:
    table = warm_table(SYSTEM)
    (row,) = table.rows
    assert observe(table, [*SYSTEM, 99], 0, 20.0)
    warm_up(table, row, SYSTEM, 20.0, cached=0)
    assert (row.state, row.expected_tokens) == (WARM, 0)
    assert not observe(table, [*SYSTEM, 99], 0, 1000.0)
    # It does keep something after all: from now on its loss counts.
    assert not observe(table, [*SYSTEM, 99], 8, 1001.0)
    assert row.expected_tokens == 8
    assert observe(table, [*SYSTEM, 99], 0, 2000.0)


def test_warm_up_of_what_the_request_did_not_restore_proves_nothing() -> None:
    other = [*SYSTEM, 31, 32, 33, 34]
    table = warm_table(other)
    (row,) = table.rows
    assert observe(table, [*SYSTEM, 99], 0, 20.0)
    warm_up(table, row, other, 20.0, cached=8)
    assert (row.expected_tokens, row.best_tokens) == (12, 8)


def test_shown_rows_are_bounded_and_troubles_come_first() -> None:
    table = table_of("secret", None, None)
    table.begin(START, 0.0)
    warm_up(table, table.rows[0], SYSTEM, 2.0)
    table.give_up(table.rows[2], "no template")
    shown = table.shown(5.0, 2)
    assert [(row["prompt"], row["state"]) for row in shown] == [(2, FAILED), (1, PENDING)]
    whole = table.shown(5.0, 3)
    assert [row["prompt"] for row in whole] == [0, 1, 2]
    assert "secret" not in str(whole)
    assert (whole[0]["salt"], whole[1]["salt"]) == (0, None)
    assert (whole[0]["warmed_age_s"], whole[0]["warmed_tokens"], whole[0]["tokens"]) == (3.0, 8, 8)
    assert (whole[2]["error"], whole[1]["warmed_age_s"]) == ("no template", None)
