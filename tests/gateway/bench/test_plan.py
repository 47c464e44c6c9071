from gateway.bench.plan import Part, Plan, Quota


def begun(plan: Plan, dues_s: list[float], num_turns: int = 1) -> list[bool | None]:
    """Whether each is warm-up; None for one that must not begin."""
    quota = Quota(plan)
    parts = [quota.begin(due_s, num_turns) for due_s in dues_s]
    return [None if part is None else part.is_warm_up for part in parts]


def test_so_many_requests_are_measured_after_the_warm_up() -> None:
    plan = Plan(users=1, num_requests=3, warm_up_requests=2)
    assert begun(plan, [0.0] * 7) == [True, True, False, False, False, None, None]


def test_the_last_conversation_is_cut_to_the_requests_that_are_left() -> None:
    quota = Quota(Plan(users=1, num_requests=5, warm_up_requests=4))
    parts = [quota.begin(0.0, 3) for _ in range(5)]
    assert parts == [Part(True, 3), Part(True, 1), Part(False, 3), Part(False, 2), None]


def test_turns_that_are_not_asked_are_left_to_others() -> None:
    quota = Quota(Plan(users=1, num_requests=4))
    part = quota.begin(0.0, 4)
    assert part == Part(False, 4)
    assert not quota.has_more
    quota.give_back(part, 3)
    assert quota.has_more
    assert quota.begin(9.0, 4) == Part(False, 3)
    assert quota.begin(9.0, 4) is None


def test_turns_of_the_warm_up_are_left_to_others_until_it_is_over() -> None:
    quota = Quota(Plan(users=1, num_requests=4, warm_up_requests=3))
    part = quota.begin(0.0, 3)
    assert part == Part(True, 3)
    assert quota.has_begun_warm_up
    quota.give_back(part, 2)
    assert not quota.has_begun_warm_up
    assert quota.begin(0.0, 3) == Part(True, 2)
    assert quota.begin(0.0, 3) == Part(False, 3)
    quota.give_back(part, 2)
    assert quota.begin(0.0, 3) == Part(False, 1)


def test_a_warm_up_in_seconds_takes_nothing_from_the_requests() -> None:
    plan = Plan(rate=1.0, num_requests=2, warm_up_s=10.0)
    assert begun(plan, [0.0, 5.0, 9.9, 10.0, 10.1, 10.2]) == [True, True, True, False, False, None]
    assert not Quota(plan).has_begun_warm_up


def test_the_duration_begins_with_what_is_measured() -> None:
    plan = Plan(rate=1.0, duration_s=5.0, warm_up_requests=2)
    assert begun(plan, [0.0, 7.0, 8.0, 12.9, 13.0]) == [True, True, False, False, None]
    plan = Plan(rate=1.0, duration_s=5.0, warm_up_s=3.0)
    assert begun(plan, [0.0, 3.0, 7.9, 8.0]) == [True, False, False, None]


def test_the_duration_ends_a_load_whatever_is_left() -> None:
    quota = Quota(Plan(rate=1.0, duration_s=5.0, warm_up_s=3.0))
    assert not quota.is_over(99.0)
    quota.begin(4.0, 1)
    assert (quota.is_over(8.9), quota.is_over(9.0)) == (False, True)


def test_whichever_limit_comes_first_ends_the_load() -> None:
    plan = Plan(rate=1.0, num_requests=2, duration_s=5.0)
    assert begun(plan, [0.0, 1.0, 2.0]) == [False, False, None]
    assert begun(plan, [0.0, 5.0]) == [False, None]
