"""Notices to upstream servers: that a call is given up, where a closed connection is not enough.

And questions: what an error says of them. Their answers are in `test_upstream_health.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from backend import upstream_probe
from backend.catalog import Catalog
from backend.http_client import HttpClient
from backend.http_ports import HttpRequest
from backend.upstream_address import parse_upstream
from backend.upstream_completions import CompletionsWire
from backend.upstream_faults import UpstreamFault
from backend.upstream_generate import GenerateWire
from backend.upstream_openai import OpenAiWire
from backend.upstream_ports import Ask
from backend.upstream_probe import MAX_NOTICES, UpstreamProbe
from backend.upstream_server import UpstreamServer, UpstreamSettings
from backend.upstream_sglang import SglangKind
from pipeline.ports import Handle
from pipeline.values import ModelInfo
from tests.backend.linked import RecordingSink, make_call, make_tokenizer, until
from tests.fake_sglang_server import MODEL, Play, playing
from tests.fake_upstream import FakeUpstream, Reply, serving
from tests.processes import free_port

NOTICE = HttpRequest("POST", "/abort_request", (), b'{"rid":"x"}')


@dataclass
class Connected:
    """A server of ours that is ready, and the fake one behind it."""

    fake: FakeUpstream
    server: UpstreamServer

    def submit(self, max_tokens: int = 8) -> tuple[Handle, RecordingSink]:
        sink = RecordingSink()
        return self.server.submit(make_call([5, 6], max_tokens, MODEL), sink), sink

    @property
    def rids(self) -> list[str]:
        return [asked.body["rid"] for asked in self.fake.of_path("/generate")]

    @property
    def aborted(self) -> list[str]:
        return [asked.body["rid"] for asked in self.fake.of_path("/abort_request")]

    async def heartbeats(self, num: int = 3) -> None:
        """Whatever was sent before them has come."""
        before = len(self.fake.of_path("/metrics"))
        await until(lambda: len(self.fake.of_path("/metrics")) >= before + num)


@asynccontextmanager
async def connected(folder: Path, play: Play, api_key: str | None = None) -> AsyncIterator[Connected]:
    async def on_model(info: ModelInfo, files: Mapping[str, bytes]) -> None: ...

    tokenizer = make_tokenizer(folder / "model")
    settings = UpstreamSettings(api_key, lambda model: tokenizer, heartbeat_s=0.01)
    http = HttpClient()
    async with playing(play) as fake:
        address = parse_upstream(f"sglang+http://127.0.0.1:{fake.port}")
        server = UpstreamServer(address, SglangKind(), settings, Catalog(on_model), http, random.Random(1))
        running = asyncio.create_task(server.run())
        try:
            await until(lambda: server.state == "ready")
            yield Connected(fake, server)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await http.close()


@pytest.mark.parametrize("fault", ["silent", "hangs"], ids=["before the head", "in the stream"])
async def test_server_that_acts_late_on_a_closed_connection_is_told_of_an_abort(
    tmp_path: Path, fault: str
) -> None:
    async with connected(tmp_path, Play(fault=fault), api_key="k-1") as it:
        handle, sink = it.submit()
        await until(lambda: it.rids and (fault == "silent" or sink.ids))
        handle.abort()
        handle.abort()
        await until(lambda: it.aborted)
        await it.heartbeats()
        assert it.aborted == it.rids
        assert it.fake.of_path("/abort_request")[0].headers["authorization"] == "Bearer k-1"
        assert (it.fake.num_left, sink.ended.done()) == (1, False)
        assert it.server.status().outstanding_requests == 0


async def test_answer_that_is_none_of_the_api_is_given_up_and_told(tmp_path: Path) -> None:
    async with connected(tmp_path, Play(fault="lost", is_incremental=True)) as it:
        _, sink = it.submit()
        await asyncio.wait_for(sink.ended, 20)
        await until(lambda: it.aborted)
        assert it.aborted == it.rids


@pytest.mark.parametrize("fault", ["", "breaks_off", "error"])
async def test_nothing_is_told_of_a_call_that_is_over(tmp_path: Path, fault: str) -> None:
    async with connected(tmp_path, Play(fault=fault)) as it:
        handle, sink = it.submit()
        await asyncio.wait_for(sink.ended, 20)
        handle.abort()
        await it.heartbeats()
        assert (len(it.rids), it.aborted) == (1, [])


async def test_no_id_is_the_beginning_of_another(tmp_path: Path) -> None:
    """SGLang aborts all requests whose ids begin with the one that it is given."""
    async with connected(tmp_path, Play()) as it:
        for _ in range(12):
            it.submit()
        await until(lambda: len(it.rids) == 12)
        assert not [
            (one, other) for one in it.rids for other in it.rids if one != other and other.startswith(one)
        ]


@pytest.mark.parametrize("wire", [CompletionsWire(), GenerateWire(), OpenAiWire()])
def test_servers_that_see_a_closed_connection_are_told_nothing(
    wire: CompletionsWire | GenerateWire | OpenAiWire,
) -> None:
    assert wire.abort("id-1") is None


async def test_what_cannot_be_read_names_its_own_question_and_not_a_later_one() -> None:
    http = HttpClient()
    async with serving(lambda asked: Reply(body=b"?")) as fake:
        probe = UpstreamProbe(http, parse_upstream(f"sglang+{fake.url}"), None, 20.0)
        told: dict[str, str] = {}
        has_asked = {path: asyncio.Event() for path in ("/first", "/second")}

        async def read(path: str, ask: Ask) -> None:
            await ask("GET", path)
            has_asked[path].set()
            for event in has_asked.values():  # both have been asked, whichever came first
                await event.wait()
            raise ValueError("no answer")

        async def tell(path: str) -> None:
            with pytest.raises(UpstreamFault) as caught:
                await probe.told(partial(read, path))
            told[path] = str(caught.value)

        await asyncio.gather(*map(tell, has_asked))
    await http.close()
    assert told == {
        path: f"upstream sglang+{fake.url} answers GET {path} with what cannot be read: no answer"
        for path in has_asked
    }


async def test_notice_to_a_server_that_is_down_makes_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    http = HttpClient()
    probe = UpstreamProbe(http, parse_upstream(f"sglang+http://127.0.0.1:{free_port()}"), None, 1.0)
    for _ in range(3 * MAX_NOTICES):
        probe.tell(NOTICE)
    await until(lambda: not probe.num_notices)
    await http.close()
    probe.tell(NOTICE)  # after the end
    await until(lambda: not probe.num_notices)
    assert not caplog.records


async def test_notices_that_nobody_answers_are_bounded_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_probe, "NOTICE_S", 0.3)
    http = HttpClient()
    async with serving(lambda asked: Reply(is_silent=True)) as fake:
        probe = UpstreamProbe(http, parse_upstream(f"sglang+{fake.url}/prefix"), None, 1.0)
        for _ in range(MAX_NOTICES + 9):
            probe.tell(NOTICE)
        assert probe.num_notices == MAX_NOTICES
        await until(lambda: not probe.num_notices)
        await until(lambda: not http.num_connections)
        assert {asked.path for asked in fake.asked} <= {"/prefix/abort_request"}
        assert len(fake.asked) <= MAX_NOTICES
        fake._answer = lambda asked: Reply()
        probe.tell(NOTICE)  # there is room again
        assert probe.num_notices == 1
        await until(lambda: not probe.num_notices)
        await asyncio.sleep(2 * upstream_probe.NOTICE_S)  # one that was answered is not given up as well
        assert probe.num_notices == 0
    await http.close()
