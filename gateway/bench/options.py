"""What one `headrace bench` is to do: its flags, checked each and together.

Not here: how flags are written (`gateway/bench/flags.py`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gateway.bench.arrivals import CONSTANT, POISSON
from gateway.bench.dataset import Record, read_bytes, read_records
from gateway.bench.document import Document, from_json
from gateway.bench.figures import DEFAULTS, FigureOptions
from gateway.bench.flag_values import Given, flag_name, headers, number, share, whole_number
from gateway.bench.goodput import parse_limits
from gateway.bench.lengths import MAX_TOKENS, parse_lengths
from gateway.bench.page import MAX_RUNS
from gateway.bench.percentiles import name_of
from gateway.bench.plan import Plan
from gateway.bench.target import CHAT, COMPLETIONS, Target, parse_target
from gateway.bench.workload import Shape

# Ten times what one process sends. Faster arrivals could not even be left out as quickly as they come.
_MAX_RATE: Final = 1e5
_USERS: Final = 16
_REQUESTS: Final = 100
_MAX_USERS: Final = 100_000
_MAX_REQUESTS: Final = 100_000_000
_MAX_S: Final = 1e6


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """`json` may be "-" for standard output."""

    figures: FigureOptions = DEFAULTS
    json: str | None = None
    html: str | None = None
    has_samples: bool = False
    name: str = "this run"
    compared: tuple[tuple[str, Document], ...] = ()  # earlier runs by name
    progress: str = "auto"
    max_failures: float = 0.0


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`asks_timings`: None where it depends on whether the server is Headrace."""

    target: Target
    plan: Plan
    shape: Shape
    report: ReportOptions
    model: str | None = None
    records: tuple[Record, ...] = ()
    data: str | None = None
    tokenizer: Path | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    ignores_eos: bool = True
    asks_timings: bool | None = None
    keeps_alive: bool = True
    timeout_s: float = 300.0


def read_options(flags: Mapping[str, Any], environ: Mapping[str, str]) -> BenchOptions:
    """Raises `ValueError` that names the flag, its value and the limit, for the first that is wrong."""
    given = Given(flags)
    target = _target(given, environ)
    shape = _shape(given)
    records = _records(given, shape.turns, target.endpoint == CHAT)
    tokenizer = given.text("tokenizer")
    return BenchOptions(
        target=target,
        plan=_plan(given, sum(len(record.turns) for record in records)),
        shape=shape,
        report=_report(given),
        model=given.text("model"),
        records=records,
        data=given.text("data"),
        tokenizer=None if tokenizer is None else Path(tokenizer).expanduser(),
        extra_body=given.object("extra_body"),
        ignores_eos=not given.flag("no_ignore_eos"),
        asks_timings=flags.get("timings"),
        keeps_alive=not given.flag("no_keep_alive"),
        timeout_s=given.number("timeout_s", 300.0, above=0, most=_MAX_S),
    )


def _target(given: Given, environ: Mapping[str, str]) -> Target:
    own = headers(given.words("header"))
    # A list of keys is the gateway's own form of this variable.
    key = given.text("api_key") or environ.get("HEADRACE_API_KEY", "").split(",")[0]
    if key and b"authorization" not in dict(own):
        if not key.isascii() or not key.isprintable():
            raise ValueError("--api-key has characters that no header can hold; they must be printable ASCII")
        own = ((b"authorization", b"Bearer " + key.encode()), *own)
    endpoint = given.choice("endpoint", CHAT, (CHAT, COMPLETIONS))
    return parse_target(given.text("url") or "", endpoint, own, given.flag("insecure"))


def _plan(given: Given, num_in_file: int) -> Plan:
    rate = given.number("rate", None, above=0, most=_MAX_RATE)
    if rate is not None and given.has("concurrency"):
        raise ValueError(
            "--rate and --concurrency are given; an open loop takes --rate with --max-concurrency"
        )
    for name in ("arrivals", "max_concurrency"):
        if rate is None and given.has(name):
            raise ValueError(f"--{name.replace('_', '-')} is given without --rate")
    num_requests = given.whole("requests", None, 1, _MAX_REQUESTS)
    duration_s = given.number("duration_s", None, above=0, most=_MAX_S)
    if num_requests is None and duration_s is None:
        num_requests = num_in_file or _REQUESTS
    warm_up_requests, warm_up_s = _warm_up(given.text("warm_up"))
    return Plan(
        rate=rate,
        arrivals=given.choice("arrivals", POISSON, (POISSON, CONSTANT)),
        users=given.whole("concurrency", _USERS, 1, _MAX_USERS) if rate is None else None,
        max_concurrency=given.whole("max_concurrency", None, 1, _MAX_USERS),
        num_requests=num_requests,
        duration_s=duration_s,
        ramp_s=given.number("ramp_s", 0.0, most=_MAX_S),
        warm_up_requests=warm_up_requests,
        warm_up_s=warm_up_s,
        turn_gap_s=given.number("turn_gap_s", 0.0, most=_MAX_S),
        seed=given.whole("seed", 0, 0),
    )


def _warm_up(text: str | None) -> tuple[int, float]:
    """Requests, or seconds."""
    if text is None:
        return 0, 0.0
    if text.endswith("s"):
        return 0, number("--warm-up", text[:-1], None, _MAX_S)
    return whole_number("--warm-up", text, 0, _MAX_REQUESTS), 0.0


def _shape(given: Given) -> Shape:
    if given.has("data"):
        for name in ("prompt_tokens", "shared_prefix_tokens", "num_prefixes", "tokenizer", "same_prompts"):
            if given.has(name):
                raise ValueError(f"{flag_name(name)} is given with --data, whose prompts are as they are")
    if given.has("num_prefixes") and not given.has("shared_prefix_tokens"):
        raise ValueError("--num-prefixes is given without --shared-prefix-tokens")
    return Shape(
        prompt=given.parsed("prompt_tokens", "512", parse_lengths),
        output=given.parsed("output_tokens", "128", parse_lengths),
        turns=given.whole("turns", 1, 1, 1000),
        prefix_tokens=given.whole("shared_prefix_tokens", 0, 0, MAX_TOKENS),
        num_prefixes=given.whole("num_prefixes", 1, 1, 10_000),
        seed=given.whole("seed", 0, 0),
        salt=None if given.flag("same_prompts") else secrets.token_hex(8),
    )


def _records(given: Given, max_turns: int, is_chat: bool) -> tuple[Record, ...]:
    path = given.text("data")
    if path is None:
        return ()
    try:
        return tuple(read_records(Path(path).expanduser(), max_turns, is_chat))
    except ValueError as error:
        raise ValueError(f"--data: {error}") from error


def _report(given: Given) -> ReportOptions:
    percents = given.parsed("percentiles", "50,90,95,99", _percents)
    limits_ms = _limits(given.words("goodput"))
    options = ReportOptions(
        figures=FigureOptions(percents, limits_ms, given.number("stall_ms", None, above=0)),
        json=given.text("json"),
        html=given.text("html"),
        has_samples=given.flag("samples"),
        name=given.text("name") or "this run",
        compared=tuple(_earlier(name) for name in given.words("compare")),
        progress=given.choice("progress", "auto", ("auto", "on", "off")),
        max_failures=share("--max-failures", given.text("max_failures") or "0"),
    )
    for name, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and not (name == "--json" and path == "-"):
            _check_writable(name, Path(path))
    if options.json and options.html and _is_one_file(options.json, options.html):
        raise ValueError(f"--json and --html are both {options.html!r}; each needs a file of its own")
    for name, other in (("samples", "json"), ("compare", "html")):
        if given.has(name) and not given.has(other):
            raise ValueError(f"--{name} is given without --{other}")
    if len(options.compared) >= MAX_RUNS:
        raise ValueError(f"--compare has {len(options.compared)} files; at most {MAX_RUNS - 1} are shown")
    return options


def _limits(words: Sequence[str]) -> dict[str, float]:
    try:
        return parse_limits(words)
    except ValueError as error:
        raise ValueError(f"--{error}") from error


def _earlier(path: str) -> tuple[str, Document]:
    """A run that `--json` has written."""
    try:
        return Path(path).stem, from_json(read_bytes(Path(path)), path)
    except ValueError as error:
        raise ValueError(f"--compare: {error}") from error


def _percents(text: str) -> tuple[float, ...]:
    percents = {number("a percentile", part.strip(), 0, 100) for part in text.split(",")}
    for percent in percents:
        if float(name_of(percent)[1:]) != percent:
            raise ValueError(
                f"a percentile is {percent!r}, and is told as {name_of(percent)}; use fewer digits"
            )
    return tuple(sorted(percents))


def _is_one_file(path: str, other: str) -> bool:
    """Whether the second would be written over the first: not so for a device as /dev/null."""
    place = os.path.realpath(path)
    return place == os.path.realpath(other) and (os.path.isfile(place) or not os.path.exists(place))


def _check_writable(flag: str, path: Path) -> None:
    """Before the load, not after it."""
    if path.is_dir():
        raise ValueError(f"{flag} is {str(path)!r}; it must be a file, not a folder")
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise ValueError(f"{flag} is {str(path)!r}; {str(place)!r} cannot be written")
