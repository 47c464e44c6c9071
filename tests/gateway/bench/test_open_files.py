import re
import resource

import pytest

from gateway.bench.open_files import SPARE, make_room
from gateway.bench.plan import Plan

INFINITY = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Of a process that is not this one: `now` is (soft, hard)."""
    made = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: made["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: made.update(now=new))
    return made


def test_the_limit_is_raised_as_far_as_the_load_needs_it(limits: dict[str, tuple[int, int]]) -> None:
    for users in (1, 1024 - SPARE):
        make_room(Plan(users=users, num_requests=1))
        assert limits["now"] == (1024, 4096)
    make_room(Plan(users=1024 - SPARE + 1, num_requests=1))
    assert limits["now"] == (1025, 4096)
    make_room(Plan(rate=1.0, max_concurrency=2000, num_requests=1))
    assert limits["now"] == (2000 + SPARE, 4096)


@pytest.mark.parametrize(("hard", "soft"), [(4096, 4096), (INFINITY, 1 << 20)])
def test_an_open_loop_without_a_cap_takes_what_there_is(
    limits: dict[str, tuple[int, int]], hard: int, soft: int
) -> None:
    limits["now"] = (1024, hard)
    make_room(Plan(rate=1.0, num_requests=1))
    assert limits["now"] == (soft, hard)


def test_no_limit_is_left_alone(limits: dict[str, tuple[int, int]]) -> None:
    limits["now"] = (INFINITY, INFINITY)
    make_room(Plan(users=100_000, num_requests=1))
    assert limits["now"] == (INFINITY, INFINITY)


@pytest.mark.parametrize(
    ("plan", "flag"),
    [
        (Plan(users=5000, num_requests=1), "--concurrency"),
        (Plan(rate=1.0, max_concurrency=5000, num_requests=1), "--max-concurrency"),
    ],
)
def test_a_load_for_which_there_is_no_room_is_refused(
    limits: dict[str, tuple[int, int]], plan: Plan, flag: str
) -> None:
    told = (
        f"{flag} is 5000, and this process may have 4096 files open (ulimit -n), of which {SPARE} are for "
        f"other things; it must be at most {4096 - SPARE}"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        make_room(plan)


def test_a_limit_that_cannot_be_raised_is_the_one_that_is_told(
    limits: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(ValueError, match="may have 1024 files open"):
        make_room(Plan(users=2000, num_requests=1))
    make_room(Plan(rate=1.0, num_requests=1))
