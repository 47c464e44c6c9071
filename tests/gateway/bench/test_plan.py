from gateway.bench.plan import Plan, Quota


def begun(plan: Plan, dues_s: list[float], num_turns: int = 1) -> list[bool | None]:
    quota = Quota(plan)
    return [quota.begin(due_s, num_turns) for due_s in dues_s]


def test_so_many_requests_are_measured_after_the_warm_up() -> None:
    plan = Plan(users=1, num_requests=3, warm_up_requests=2)
    assert begun(plan, [0.0] * 7) == [True, True, False, False, False, None, None]


def test_requests_are_counted_in_whole_conversations() -> None:
    plan = Plan(users=1, num_requests=5, warm_up_requests=1)
    assert begun(plan, [0.0] * 5, num_turns=3) == [True, False, False, None, None]


def test_a_warm_up_in_seconds_takes_nothing_from_the_requests() -> None:
    plan = Plan(rate=1.0, num_requests=2, warm_up_s=10.0)
    assert begun(plan, [0.0, 5.0, 9.9, 10.0, 10.1, 10.2]) == [True, True, True, False, False, None]


def test_the_duration_begins_with_what_is_measured() -> None:
    plan = Plan(rate=1.0, duration_s=5.0, warm_up_requests=2)
    assert begun(plan, [0.0, 7.0, 8.0, 12.9, 13.0]) == [True, True, False, False, None]
    plan = Plan(rate=1.0, duration_s=5.0, warm_up_s=3.0)
    assert begun(plan, [0.0, 3.0, 7.9, 8.0]) == [True, False, False, None]


def test_whichever_limit_comes_first_ends_the_load() -> None:
    plan = Plan(rate=1.0, num_requests=2, duration_s=5.0)
    assert begun(plan, [0.0, 1.0, 2.0]) == [False, False, None]
    assert begun(plan, [0.0, 5.0]) == [False, None]
