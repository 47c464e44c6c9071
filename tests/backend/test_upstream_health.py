"""What an upstream server says of itself, or does not: each has its reason, is logged once, and heals.

How calls fail is in `test_upstream_server.py`, what each answer means in the tests of the kinds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from backend.catalog import Catalog
from backend.http_client import HttpClient
from backend.replica_life import MAX_LOSSES_TOLD
from backend.upstream_address import parse_upstream
from backend.upstream_kinds import UPSTREAM_KINDS
from backend.upstream_ports import UNKNOWN_MODEL_LEN
from backend.upstream_server import UpstreamServer, UpstreamSettings
from pipeline.values import ModelInfo
from tests.backend.linked import make_tokenizer, until
from tests.components import need
from tests.fake_upstream import Asked, FakeUpstream, Reply, json_reply
from tests.processes import free_port
from tests.tcp_server import listening

CARD = {"id": "m", "max_model_len": 2048}
STALL_S = 0.4


def models(*cards: Any) -> Reply:
    return json_reply({"object": "list", "data": cards})


class Vllm:
    """A healthy server, but for what `bad` says of a path."""

    def __init__(self) -> None:
        self.bad: dict[str, Reply] = {}
        self.models = models(CARD)
        self.num_asked = 0

    def __call__(self, asked: Asked) -> Reply:
        self.num_asked += 1
        if asked.path in self.bad:
            return self.bad[asked.path]
        match asked.path:
            case "/v1/models":
                return self.models
            case "/health":
                return Reply()
            case "/metrics":
                return Reply(body=b"vllm:num_requests_running 1.0\n")
        return json_reply({"detail": "Not Found"}, 404)


class Watched:
    """A server of ours, run beside a played one."""

    def __init__(self, folder: Path, address: str, tls: ssl.SSLContext | None, **settings: Any) -> None:
        async def on_model(info: ModelInfo, files: Mapping[str, bytes]) -> None:
            self.infos.append(info)

        tokenizer = make_tokenizer(folder / "model")
        options: dict[str, Any] = {"heartbeat_s": 0.01, "models_s": 0.02, "min_backoff_s": 0.01}
        options |= {"max_backoff_s": 0.03, "stall_s": 20.0} | settings
        self.infos: list[ModelInfo] = []
        self.http = HttpClient()
        where = parse_upstream(address, tls)
        self.server = UpstreamServer(
            where,
            UPSTREAM_KINDS[where.kind],
            UpstreamSettings(tokenizer_of=lambda model: tokenizer, **options),
            Catalog(on_model),
            self.http,
            random.Random(1),
        )

    @property
    def reason(self) -> str:
        return self.server.status().reason

    async def ready(self) -> None:
        await until(lambda: self.server.state == "ready")


@asynccontextmanager
async def watched(
    folder: Path, address: str, tls: ssl.SSLContext | None = None, **settings: Any
) -> AsyncIterator[Watched]:
    it = Watched(folder, address, tls, **settings)
    running = asyncio.create_task(it.server.run())
    try:
        yield it
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await it.http.close()


@asynccontextmanager
async def playing(
    folder: Path, vllm: Vllm, kind: str = "vllm", **settings: Any
) -> AsyncIterator[tuple[FakeUpstream, Watched]]:
    async with AsyncExitStack() as stack:
        fake = FakeUpstream(vllm)
        await fake.start()
        stack.push_async_callback(fake.stop)
        it = await stack.enter_async_context(watched(folder, f"{kind}+{fake.url}", **settings))
        yield fake, it


def many(num: int) -> Reply:
    return models(*({"id": f"m{number}"} for number in range(num)))


MOVED = Reply(307, headers={"location": "https://elsewhere/v1/models"})
# path, what it answers, state, what the reason says
BAD: list[tuple[str, Reply, str, str]] = [
    ("/health", Reply(is_silent=True), "stalled", "GET /health: .* has not answered in full within 0.4 s"),
    ("/metrics", Reply(is_silent=True), "stalled", "GET /metrics: .* within 0.4 s"),
    ("/v1/models", Reply(pieces=[b'{"da'], hangs=True), "stalled", "GET /v1/models: .* within 0.4 s"),
    ("/metrics", Reply(pieces=[b"#\n"] * 999, gap_s=0.01), "stalled", "GET /metrics: .* within 0.4 s"),
    ("/health", Reply(500), "connecting", "answers GET /health with HTTP 500"),
    ("/health", Reply(503), "connecting", "answers GET /health with HTTP 503"),
    ("/metrics", Reply(500), "connecting", "answers GET /metrics with HTTP 500"),
    ("/v1/models", Reply(404), "connecting", "answers GET /v1/models with HTTP 404"),
    ("/v1/models", Reply(401), "refused", "refuses this gateway's key .HTTP 401.*upstream_api_key"),
    ("/v1/models", MOVED, "connecting", "HTTP 307, which leads to 'https://elsewhere/v1/models'"),
    ("/health", Reply(raw=b"SSH-2.0-OpenSSH_9.2\r\n"), "connecting", "GET /health: .* no HTTP response"),
    ("/health", Reply(raw=b""), "connecting", "GET /health: .* closed the connection before"),
    ("/health", Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-le"), "connecting", "in the middle of its response"),
    ("/v1/models", Reply(body=b"<html>"), "connecting", "answers GET /v1/models with what cannot be read"),
    ("/v1/models", Reply(body=b"[" * 100_000), "connecting", "GET /v1/models with what cannot be read"),
    ("/v1/models", models(), "connecting", "lists no model"),
    *(
        ("/v1/models", models({"id": name}), "connecting", "lists no model")
        for name in (7, None, "", "x" * 257, "a\nb", "a\x7f", "\u202eb")
    ),
    ("/v1/models", many(100_000), "connecting", "lists 100000 models; the limit is 1024"),
    (
        "/v1/models",
        Reply(body=b" " * 10_000_000),
        "connecting",
        "GET /v1/models: .* bytes or more; the limit",
    ),
    (
        "/metrics",
        Reply(body=b"vllm:num_requests_running much"),
        "connecting",
        "GET /metrics with what cannot",
    ),
]


@pytest.mark.parametrize(("path", "reply", "state", "words"), BAD)
async def test_fault_has_its_reason_is_logged_once_and_heals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, reply: Reply, state: str, words: str
) -> None:
    caplog.set_level(logging.INFO)
    vllm = Vllm()
    stall_s = STALL_S if state == "stalled" else 20.0
    async with playing(tmp_path, vllm, stall_s=stall_s) as (fake, it):
        await it.ready()
        assert it.reason == ""
        vllm.bad[path] = reply
        await until(lambda: it.server.state == state and re.search(words, it.reason))
        seen = len(fake.of_path(path))
        await until(lambda: len(fake.of_path(path)) >= seen + 2)
        told = [record for record in caplog.records if re.search(words, record.getMessage())]
        assert [record.levelname for record in told] == ["ERROR" if state == "refused" else "WARNING"]
        assert not told[0].exc_info
        vllm.bad.clear()
        await it.ready()
        assert (it.reason, it.server.misfit) == ("", None)


async def test_fault_that_comes_again_is_told_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vllm = Vllm()
    async with playing(tmp_path, vllm) as (_, it):
        for num_losses in (1, 2, 3):
            await it.ready()
            vllm.bad["/health"] = Reply(500)
            await until(lambda: "HTTP 500" in it.reason)
            assert len([each for each in caplog.records if "HTTP 500" in each.getMessage()]) == num_losses
            vllm.bad.clear()


async def test_server_that_is_bad_from_the_start_is_told_of_once_and_not_as_a_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may still load: its list of models is there before its engine is healthy, or after."""
    caplog.set_level(logging.INFO)
    vllm = Vllm()
    vllm.bad["/health"] = Reply(503)
    async with playing(tmp_path, vllm) as (fake, it):
        await until(lambda: len(fake.of_path("/health")) > 4)
        assert (it.server.has_answered, it.server.num_connects) == (True, 0)
        assert "HTTP 503" in it.reason or it.server.state == "loading"
        (record,) = [record for record in caplog.records if "HTTP 503" in record.getMessage()]
        assert record.levelname == "INFO"


async def test_reasons_that_are_never_the_same_are_told_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name with several addresses, or numbers in a message."""
    vllm = Vllm()
    async with playing(tmp_path, vllm) as (fake, it):
        await it.ready()

        def answer(asked: Asked) -> Reply:
            return Reply(500 + len(fake.of_path("/health"))) if asked.path == "/health" else vllm(asked)

        fake._answer = answer
        fake.asked.clear()
        await until(lambda: len(fake.of_path("/health")) > MAX_LOSSES_TOLD + 5)
        told = [record for record in caplog.records if "GET /health with HTTP 5" in record.getMessage()]
        assert len(told) == MAX_LOSSES_TOLD


async def test_model_that_cannot_be_used_is_told_once_with_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    vllm, num_tries = Vllm(), 0

    async def on_model(info: ModelInfo, files: Mapping[str, bytes]) -> None:
        nonlocal num_tries
        num_tries += 1
        raise KeyError("nonsense")

    async with playing(tmp_path, vllm) as (_, it):
        it.server._catalog._on_model = on_model
        await until(lambda: num_tries > 3)
        assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]
        assert len([record for record in caplog.records if "KeyError" in record.getMessage()]) == 1


def is_served(it: Watched, card: dict[str, Any]) -> bool:
    name = card["id"]
    return it.server.serves(name) and it.server.max_model_len(name) == card["max_model_len"]


# -- what it serves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True], ids=["reloaded", "restarted"])
async def test_server_with_another_model_or_context_on_its_port_serves_that(
    tmp_path: Path, restarts: bool
) -> None:
    vllm = Vllm()
    async with playing(tmp_path, vllm) as (fake, it):
        await it.ready()
        for cards in ([{"id": "m", "max_model_len": 64}], [{"id": "other", "max_model_len": 96}], [CARD]):
            if restarts:
                await fake.stop()
                await until(lambda: it.server.state == "connecting")
            vllm.models = models(*cards)
            if restarts:
                await fake.start(fake.port)
            await until(partial(is_served, it, cards[0]))
            assert it.server.status().models == (cards[0]["id"],)
            assert {name for name in ("m", "other") if it.server.serves(name)} == {cards[0]["id"]}
        assert it.server.num_connects == (4 if restarts else 1)


async def test_name_that_is_listed_twice_is_served_once_and_odd_contexts_are_unknown(tmp_path: Path) -> None:
    vllm = Vllm()
    vllm.models = models(
        CARD,
        {"id": "none", "max_model_len": None},
        {"id": "m", "max_model_len": 5},
        {"id": "less", "max_model_len": -1},
        {"id": "huge", "max_model_len": 1 << 60},
        {"id": "large", "max_model_len": 1 << 40},
        {"id": "word", "max_model_len": "4096", "parent": 7},
    )
    async with playing(tmp_path, vllm) as (_, it):
        await it.ready()
        assert it.server.status().models == ("m", "none", "less", "huge", "large", "word")
        lengths = [it.server.max_model_len(name) for name in it.server.status().models]
        assert lengths == [2048, *[UNKNOWN_MODEL_LEN] * 5]


async def test_names_that_no_model_can_have_are_left_out_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = Vllm()
    names = ("", "x" * 257, "a\x00b", "a\u2028b", 7, None)
    vllm.models = models(CARD, *({"id": name} for name in names), {"id": "x" * 256})
    async with playing(tmp_path, vllm) as (fake, it):
        await it.ready()
        await until(lambda: len(fake.of_path("/v1/models")) > 4)
        assert it.server.status().models == ("m", "x" * 256)
        told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
        assert len(told) == 1
        assert "lists 4 names" in told[0], "those that are no strings are one"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-5", "1e308", "1e400"])
async def test_numbers_that_can_be_none_keep_no_server_away(tmp_path: Path, value: str) -> None:
    vllm = Vllm()
    lines = [
        f'vllm:num_requests_{name}{{engine="{n}"}} {value}' for name in ("running", "waiting") for n in "01"
    ]
    lines += [f"vllm:kv_cache_usage_perc {value}", "vllm:num_preemptions_total 3"]
    vllm.bad["/metrics"] = Reply(body="\n".join(lines).encode())
    async with playing(tmp_path, vllm) as (_, it):
        await it.ready()
        status = it.server.status()
        assert (status.running, status.waiting, status.kv_usage, status.preemptions) == (0, 0, 0.0, 3)


# -- where it is ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `localhost`, self-signed, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "cert.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-x509", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = [need("openssl"), "req", *kind, *names, "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


@pytest.mark.parametrize(
    ("host", "is_trusted", "words"),
    [
        ("localhost", True, ""),
        ("localhost", False, "certificate verify failed: self-signed certificate"),
        ("127.0.0.1", True, "certificate verify failed: IP address mismatch"),
    ],
)
async def test_certificate_that_does_not_do_is_the_reason(
    tmp_path: Path,
    certificate: Path,
    caplog: pytest.LogCaptureFixture,
    host: str,
    is_trusted: bool,
    words: str,
) -> None:
    caplog.set_level(logging.INFO)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    hellos: list[Any] = []  # one for each try, whether or not its handshake succeeds
    tls.sni_callback = lambda *hello: hellos.append(hello)
    vllm = Vllm()
    fake = FakeUpstream(vllm)
    await fake.start(tls=tls)
    ours = ssl.create_default_context(cafile=str(certificate) if is_trusted else None)
    async with watched(tmp_path, f"vllm+https://{host}:{fake.port}", ours) as it:
        if not words:
            await it.ready()
        else:
            await until(lambda: words in it.reason)
            tried = len(hellos)
            await until(lambda: len(hellos) > tried + 2)
            assert (it.server.state, vllm.num_asked) == ("connecting", 0)
            assert len([record for record in caplog.records if words in record.getMessage()]) == 1
    await fake.stop()


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
async def test_address_of_nobody_and_of_the_other_scheme_are_told(tmp_path: Path, kind: str) -> None:
    async with watched(tmp_path, f"{kind}+http://127.0.0.1:{free_port()}") as it:
        await until(lambda: "GET /v1/models: no connection to 127.0.0.1" in it.reason)

    async def as_uvicorn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    async with (
        listening(as_uvicorn) as plain,
        watched(tmp_path, f"{kind}+https://localhost:{plain.port}") as it,
    ):
        await until(lambda: "wrong version number" in it.reason)
