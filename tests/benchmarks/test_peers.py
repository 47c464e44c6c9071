"""The benchmark of peers: its upstream, its clock of processes, its client and its table."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_peers, scripted_upstream
from benchmarks.load import StreamClient, StreamResult
from benchmarks.peer_load import Plan, added_ms, chat, per_request_ms, probe, saturate, stream_window
from benchmarks.peer_processes import ENGINE_CORE, ProcessTree
from benchmarks.peer_table import Row, replace_between_markers, table
from benchmarks.peers import PINS, Peer, alone, litellm_config, versions
from benchmarks.report import Report
from benchmarks.scripted_upstream import WORDS, Connection, Upstream
from benchmarks.tiny_model import words
from tests.tcp_server import ProtocolServer, started

IDS = list(range(100, 100 + len(WORDS)))


class Wire(asyncio.Transport):
    """What a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: Any) -> None:
        self.data += data


def connected(upstream: Upstream) -> tuple[Connection, Wire]:
    connection, wire = Connection(upstream), Wire()
    connection.connection_made(wire)
    return connection, wire


def request(target: str, fields: dict[str, Any] | None = None) -> bytes:
    body = json.dumps(fields).encode() if fields is not None else b""
    return b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (target.encode(), len(body)) + body


def chunks(data: bytes) -> list[Any]:
    """The events of a stream's body, which must be whole; [DONE] is a string."""
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    events, sizes = b"", []
    while body:
        size, _, body = body.partition(b"\r\n")
        sizes.append(int(size, 16))
        events, rest = events + body[: sizes[-1]], body[sizes[-1] :]
        assert rest[:2] == b"\r\n"
        body = rest[2:]
    assert sizes[-1] == 0
    payloads = [event.removeprefix(b"data: ") for event in events.split(b"\n\n") if event]
    return [payload.decode() if payload == b"[DONE]" else json.loads(payload) for payload in payloads]


def run_out(upstream: Upstream) -> None:
    while upstream.streams:
        for stream in list(upstream.streams):
            stream.step()


NUM_TOKENS = len(WORDS) + 3
CHAT = {"messages": [{"role": "user", "content": "probe-7 hello"}], "max_tokens": NUM_TOKENS}


# -- the scripted upstream -----------------------------------------------------------------------------------


def test_a_chat_has_vllms_frames_and_as_many_tokens_as_asked() -> None:
    upstream = Upstream(0.05, IDS)
    connection, wire = connected(upstream)
    connection.data_received(request("/v1/chat/completions", CHAT))
    run_out(upstream)
    role, *tokens, usage, done = chunks(wire.data)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"]["content"] for chunk in tokens] == [*WORDS, *WORDS[:3]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None] * (NUM_TOKENS - 1) + [
        "length"
    ]
    assert {chunk["object"] for chunk in tokens} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (role, *tokens, usage)}) == 1
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], NUM_TOKENS, "[DONE]")


def test_streams_can_be_ended_early_and_count_what_they_said() -> None:
    upstream = Upstream(0.05, IDS)
    connection, wire = connected(upstream)
    connection.data_received(request("/v1/chat/completions", CHAT))
    connection.step()
    connected(upstream)[0].data_received(request("/end"))
    run_out(upstream)
    _, first, last, usage, _ = chunks(wire.data)
    assert (first["choices"][0]["finish_reason"], last["choices"][0]["finish_reason"]) == (None, "length")
    assert usage["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(("wants_ids", "expected"), [(True, [100]), (False, None)])
def test_a_completion_gives_token_ids_where_they_are_wanted(wants_ids: bool, expected: Any) -> None:
    upstream = Upstream(0.05, IDS)
    connection, wire = connected(upstream)
    fields = {"prompt": [1, 2, 3], "max_tokens": 1, "return_token_ids": wants_ids}
    connection.data_received(request("/v1/completions", fields))
    run_out(upstream)
    token, usage, _ = chunks(wire.data)
    assert (token["choices"][0]["text"], token["choices"][0]["token_ids"]) == (WORDS[0], expected)
    assert (token["object"], usage["usage"]["prompt_tokens"]) == ("text_completion", 3)


def test_a_request_may_come_in_any_two_parts() -> None:
    data = request("/v1/chat/completions", CHAT | {"max_tokens": 1})
    for cut in range(1, len(data)):
        upstream = Upstream(0.05, IDS)
        connection, wire = connected(upstream)
        connection.data_received(data[:cut])
        assert not upstream.streams
        connection.data_received(data[cut:])
        run_out(upstream)
        assert chunks(wire.data)[-1] == "[DONE]"


def test_a_connection_serves_one_request_after_the_other_and_forgets_those_that_left() -> None:
    upstream = Upstream(0.05, IDS)
    connection, wire = connected(upstream)
    for _ in range(2):
        wire.data = b""
        connection.data_received(request("/v1/chat/completions", CHAT))
        run_out(upstream)
        assert chunks(wire.data)[-1] == "[DONE]"
    connection.data_received(request("/v1/chat/completions", CHAT))
    connection.connection_lost(None)
    assert not upstream.streams


def test_a_probes_times_are_told_once() -> None:
    upstream = Upstream(0.05, IDS)
    connection, _ = connected(upstream)
    connection.data_received(request("/v1/chat/completions", CHAT))
    assert not upstream.times  # the first token has not left
    run_out(upstream)
    assert list(upstream.times) == ["probe-7"]
    arrived_s, sent_s = upstream.times["probe-7"]
    assert arrived_s <= sent_s
    asker, told = connected(upstream)
    asker.data_received(b"GET /times HTTP/1.1\r\n\r\n")
    assert json.loads(told.data.partition(b"\r\n\r\n")[2]) == {"probe-7": [arrived_s, sent_s]}
    assert not upstream.times


def test_the_pace_can_be_set_and_an_unknown_route_is_404() -> None:
    upstream = Upstream(0.05, IDS)
    connection, wire = connected(upstream)
    connection.data_received(request("/pace?step_ms=12.5"))
    assert upstream.step_s == 0.0125
    connection.data_received(request("/v1/embeddings", {}))
    assert b"HTTP/1.1 404" in wire.data


# -- the load, against that upstream as if it were a peer ----------------------------------------------------


@asynccontextmanager
async def served(**fields: Any) -> AsyncIterator[Peer]:
    """The upstream itself in the place of a peer in front of it."""
    upstream = Upstream(0.01, IDS)
    async with started(ProtocolServer(lambda: Connection(upstream))) as server:
        clock, port = asyncio.create_task(upstream.run()), server.port
        trees = (ProcessTree(os.getpid()),)
        peer = Peer("peer", "Peer 1", trees, port, "scripted", upstream_port=port, **fields)
        try:
            yield peer
        finally:
            clock.cancel()
            await asyncio.gather(clock, return_exceptions=True)


async def test_a_window_counts_frames_and_what_they_cost() -> None:
    async with served() as peer:
        window = await stream_window(peer, 3, Plan(0.05, 0.3, 2), step_ms=20)
    assert window.frames_per_token == 1.0
    assert window.us_per_token > 0
    assert window.tokens_per_s * window.us_per_token / 1e6 == pytest.approx(window.num_cores)
    assert window.memory_bytes > 0
    assert len(window.ttfts_ms) == 2
    assert all(gap > -20 for gap in window.gaps_over_ms)


async def test_a_peer_that_is_slow_gets_longer_steps() -> None:
    async with served(max_tokens_per_s=100.0) as peer:
        assert (peer.step_ms(1), peer.step_ms(50)) == (50.0, 500.0)


async def test_requests_end_before_their_cost_is_told() -> None:
    async with served(requests_per_s=1000.0) as peer:
        cost_ms, share = await per_request_ms(peer, 3)
    assert cost_ms > 0
    assert share == 1.0


async def test_probes_that_do_not_reach_the_upstream_as_text_give_no_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as peer:
        assert len(await probe(peer, 2)) == 2
        monkeypatch.setattr(scripted_upstream, "_PROBE", scripted_upstream.re.compile(rb"never"))
        assert await probe(peer, 2) == []


async def test_saturation_adds_streams_until_no_more_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([(100.0, 0.5), (101.0, 0.6), (130.0, 0.99), (131.0, 1.0), (120.0, 1.0), (500.0, 1.0)])
    seen = []

    async def load(peer: Peer, clients: list[StreamClient]) -> Any:
        from benchmarks.peer_load import SATURATED, Saturation

        rate, cores = next(rates)
        seen.append(len(clients))
        return Saturation(len(clients), rate, cores, cores >= SATURATED)

    monkeypatch.setattr("benchmarks.peer_load._load", load)
    monkeypatch.setattr("benchmarks.peer_load.pin", lambda tree, cores: None)
    async with served() as peer:
        found = await saturate(peer, 4, 20.0, 60.0)
    assert seen == [4, 5, 6, 7, 8]
    assert (found.num_streams, found.tokens_per_s, found.is_full) == (6, 130.0, True)
    assert found.tokens_per_s_and_core == pytest.approx(130 / 0.99)


def test_a_request_asks_for_timings_only_where_they_exist() -> None:
    plain = Peer("p", "P", (), 1, "m", fields={"ignore_eos": True})
    head, _, body = chat(plain, "hi", 5).partition(b"\r\n\r\n")
    fields = json.loads(body)
    assert b"content-length: %d" % len(body) in head
    assert fields["stream_options"] == {"include_usage": True}
    assert (fields["max_tokens"], fields["ignore_eos"], fields["model"]) == (5, True, "m")
    told = Peer("p", "P", (), 1, "m", has_timings=True)
    assert b'"include_timings": true' in chat(told, "hi", 5)


def test_what_the_engine_needed_is_taken_off() -> None:
    timings = {"queue_ms": 2.0, "prefill_ms": 3.0}
    assert added_ms(StreamResult(started_s=1.0, first_s=1.01, timings=timings)) == pytest.approx(5.0)
    with pytest.raises(RuntimeError, match="a request failed: 500"):
        added_ms(StreamResult(status=500))


# -- processes -----------------------------------------------------------------------------------------------

BURN = "import time\nwhile time.process_time() < 0.05: pass\nprint(flush=True)\ntime.sleep(60)"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", {BURN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
try:
    sys.stdin.read()
finally:
    child.kill()
    child.wait()
"""


@contextmanager
def parent() -> Iterator[tuple[int, int]]:
    """A process whose child has used 50 ms of CPU; the ids of both."""
    command = [sys.executable, "-S", "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process.pid, child
        process.stdin.close()


def test_children_count_and_an_engine_core_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with parent() as (pid, child):
        tree, alone_ = ProcessTree(pid), ProcessTree(child)
        assert tree.pids() == [pid, child]
        assert tree.cpu_s() > alone_.cpu_s() >= 0.05
        assert tree.memory_bytes() > alone_.memory_bytes() > 0
        title = Path(f"/proc/{child}/cmdline").read_bytes()
        assert not title.startswith(ENGINE_CORE.encode())
        monkeypatch.setattr("benchmarks.peer_processes.ENGINE_CORE", title.decode())
        assert alone_.pids() == []
    assert (tree.pids(), tree.cpu_s(), tree.memory_bytes()) == ([], 0, 0)


def test_a_peer_sees_no_variable_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    command = alone(tmp_path, ["env"], LITELLM_LOCAL_MODEL_COST_MAP="True")
    seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "LITELLM_LOCAL_MODEL_COST_MAP=True\n" in seen
    assert f"HOME={tmp_path}\n" in seen
    assert "SOME_API_KEY" not in seen


def test_every_peer_has_one_exact_version() -> None:
    assert all("==" in requirement for requirement, _ in PINS.values())
    assert all(label.endswith(requirement.split("==")[1]) for requirement, label in PINS.values())
    assert set(versions()) == {"litellm[proxy]", "vllm-router"}
    assert "127.0.0.1:81/v1" in json.dumps(litellm_config(81))


def test_the_tiny_model_speaks_whole_words_only() -> None:
    vocabulary = {"<|im_end|>": 0, "Ġthe": 1, "the": 2, "Ġ": 3, "ĠÃ": 4, "Ġx1": 5, "ĠB": 6}
    assert words(vocabulary) == [1, 6]


# -- the table -----------------------------------------------------------------------------------------------

ROW = Row("Peer 1", {100: 12.34, 1000: 5.0}, 1.25, 1.0, "50,000 *", (1.0, 2.26), {100: 7.0}, 40.2, {100: 9.6})


def test_a_row_has_a_cell_for_each_column_and_a_dash_for_what_is_missing() -> None:
    head, rule, row, empty = table([ROW, Row("P")], (100, 400, 1000), "TTFT", "gap").split("\n")
    assert head.startswith("| 100 / 400 / 1,000 streams |")
    assert (
        row
        == "| Peer 1 | 12.3 / – / 5.0 | 1.2 | 1.000 | 50,000 * | 1.0 / 2.3 | 7 / – / – | 40 | 10 / – / – |"
    )
    assert empty == "| P |" + " – |" * 8
    assert len({line.count("|") for line in (head, rule, row, empty)}) == 1


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- peers -->\nold\n<!-- /peers -->\nb\n", encoding="utf-8")
    assert replace_between_markers(readme, "new")
    assert readme.read_text(encoding="utf-8") == "a\n<!-- peers -->\nnew\n<!-- /peers -->\nb\n"
    readme.write_text("a\n<!-- peers -->\nold\n", encoding="utf-8")
    assert not replace_between_markers(readme, "new")
    assert readme.read_text(encoding="utf-8") == "a\n<!-- peers -->\nold\n"


def test_goals_compare_runs_in_pairs_and_medians_where_runs_are_missing() -> None:
    rows = {
        "headrace": Row("Headrace", {100: 10.0, 400: 20.0}, frames_per_token=0.99),
        "litellm": Row("LiteLLM", {100: 400.0, 400: 400.0}, frames_per_token=1.0),
    }
    costs = {"headrace": [10.0, 10, 20, 20], "vllm-router": [10.0, 20, 20, 40], "litellm": [400.0, 400, 400]}
    report = Report("test", _quiet=True)
    bench_peers._gateway_goals(report, rows, costs | {"bare-asgi": [5.0, 5, 10, 10]})
    goals = {goal.name: goal for goal in report.goals}
    assert goals["gateway_vs_vllm_router"].value == 0.75  # of 1, 0.5, 1 and 0.5
    assert goals["gateway_vs_bare_asgi"].value == 2.0
    assert goals["litellm_vs_gateway"].value == 30.0  # of 40 and 20
    assert [goal.ok for goal in report.goals] == [True, False, True, True]
