"""Whatever a client sends: 4xx that names what is wrong, or a closed connection where it is not HTTP. Never a
5xx, never a hang, and nothing is left of it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import stack
from tests.e2e.asking import CHAT, COMPLETE, MODEL, ask, chat
from tests.e2e.resting import assert_no_fault, at_rest, resident_bytes, wait_until_held
from tests.gateway import bodies
from tests.stack import Gateway, Worker
from tests.wire import LIMIT_S, Head, Wire, connect

COMPLETIONS = "/v1/completions"
ROUTES = (CHAT, COMPLETIONS)
MAX_BODY_BYTES = 4 << 20
MAX_HEADER_BYTES = 64 << 10
DEFAULT_MAX_TOKENS = 8
HELLO = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True, slots=True)
class Served:
    gateway: Gateway
    worker: Worker

    @property
    def port(self) -> int:
        return self.gateway.port


@pytest.fixture(scope="module")
def served(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway that takes bodies of 4 MiB; the whole module's bad input must leave nothing in it."""
    folder = tmp_path_factory.mktemp("bad_input")
    options = (
        *("--max-body-bytes", str(MAX_BODY_BYTES), "--default-max-tokens", str(DEFAULT_MAX_TOKENS)),
        *("--header-limit-s", "1", "--max-text-chars", "600000"),
        *("--format-policy", "flag"),  # the scripted engine knows no grammars
    )
    with (
        stack.start_scripted(folder, embedded_model, "--prefill-ms-per-1k", "0") as worker,
        stack.start_gateway(folder, [worker], *options) as gateway,
    ):
        served = Served(gateway, worker)
        before = at_rest(gateway, [worker])
        yield served
        wait_until_held(gateway, [worker], before)
        assert asyncio.run(ask(served.port, chat("After all that", 5))).kind == COMPLETE
        assert_no_fault(gateway)


async def refused(wire: Wire, head: Head) -> Mapping[str, Any]:
    """The error of a refusal."""
    body = await wire.body()
    assert 400 <= head.status < 500, (head.status, body)
    error: Mapping[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 1000
    return error


# -- bodies ------------------------------------------------------------------------------------------------

NOT_JSON: Mapping[str, bytes] = {
    "empty": b"",
    "blank": b" \n ",
    "cut off": b'{"model": "m", "messages": [',
    "two values": b"{} {}",
    "single quotes": b"{'model': 'm'}",
    "invalid UTF-8": b'{"model": "\xff\xfe"}',
    "overlong UTF-8": b'{"model": "\xc0\x80"}',
    "UTF-16": '{"model": "m"}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "NUL": b'{"model": "m\x00"}',
    "lone surrogate": b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "half a pair": b'{"model": "m", "prompt": "\\udc00\\ud800"}',
    "NaN": b'{"model": "m", "messages": [], "temperature": NaN}',
    "nested arrays": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "an integer of 100,000 digits": b'{"seed": ' + b"9" * 100_000 + b"}",
    "a key twice": b'{"model": "m", "model": "n"}',
    "an array": b"[]",
    "null": b"null",
    "a string": b'"hello"',
    "garbage": bytes(range(256)) * 4,
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
async def test_body_that_is_no_request_is_400(served: Served, path: str, content: bytes) -> None:
    async with connect(served.port) as wire:
        head = await wire.post(path, content, {"content-type": "application/json"})
        error = await refused(wire, head)
        assert head.status == 400
        assert error["type"] == "invalid_request_error"
        assert (await wire.request("GET", "/health")).status == 200  # the connection goes on


BAD_FIELDS: Mapping[str, Any] = {
    # field that must be named: its value
    "model": 7,
    "messages": "hi",
    "messages[0].role": [{"role": 1, "content": "hi"}],
    "messages[0].content": [{"role": "user", "content": 7}],
    "temperature": -1,
    "top_p": 0,
    "top_k": -2,
    "min_p": 2,
    "max_tokens": 0,
    "max_completion_tokens": 2**40,
    "n": 10_000,
    "seed": 2**70,
    "presence_penalty": 1e300,
    "frequency_penalty": -3,
    "repetition_penalty": 0,
    "min_tokens": -1,
    "stop": {"a": 1},
    "stop[0]": [""],
    "stop_token_ids": "1",
    "logit_bias": {"x": 1},
    "top_logprobs": 1000,
    "stream": "yes",
    "stream_options": "usage",
    "tools": [],
    "tool_choice": 5,
    "response_format": "json",
    "cache_salt": "a/b",
    "priority": "high",
    "chat_template_kwargs.messages": {"messages": []},
    "documents": "none",
    "reasoning_effort": "extreme",
}


@pytest.mark.parametrize("field", BAD_FIELDS)
async def test_bad_field_is_named(served: Served, field: str) -> None:
    name = field.partition("[")[0].partition(".")[0]
    async with connect(served.port) as wire:
        head = await wire.post(CHAT, chat() | {name: BAD_FIELDS[field]})
        error = await refused(wire, head)
    assert head.status == 400
    assert str(error["param"]).startswith(field), error
    assert field in error["message"]


async def test_negative_and_huge_parameters_of_every_kind_are_400(served: Served) -> None:
    numbers = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "seed", "min_tokens", "priority")
    async with connect(served.port) as wire:
        for name in (*numbers, "presence_penalty", "frequency_penalty", "repetition_penalty", "top_logprobs"):
            for text in ("-1e308", "1e308", str(-(2**70)), str(2**70), "1e999", "-0.5e-999", '"1"', "[1]"):
                content = json.dumps(chat(max_tokens=1, stream=False) | {name: 77}).replace("77", text)
                head = await wire.post(CHAT, content.encode())
                body = await wire.body()
                tiny = text == "-0.5e-999"  # is 0, which most of them take
                assert 400 <= head.status < 500 or (tiny and head.status == 200), (name, text, body)
                assert head.status == 200 or name in body.decode()


async def test_unknown_model_is_404_and_names_those_that_exist(served: Served) -> None:
    async with connect(served.port) as wire:
        head = await wire.post(CHAT, chat(model="gpt-9"))
        error = await refused(wire, head)
    assert (head.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert MODEL in error["message"]


async def test_prompt_over_the_context_is_400_with_both_numbers(served: Served) -> None:
    async with connect(served.port) as wire:
        head = await wire.post(CHAT, chat("word " * 50_000))
        error = await refused(wire, head)
    assert (head.status, error["code"]) == (400, "context_length_exceeded")
    assert "32768" in error["message"]


async def test_text_of_2_mb_is_400_and_named(served: Served) -> None:
    async with connect(served.port) as wire:
        head = await wire.post(CHAT, bodies.encode(chat("敏感" * 333_334)))  # 3 bytes a character
        error = await refused(wire, head)
        assert (head.status, error["param"]) == (400, "messages")
        assert "600000" in error["message"]


async def test_nul_and_lone_surrogates_in_text_are_400_and_named(served: Served) -> None:
    async with connect(served.port) as wire:
        head = await wire.post(CHAT, chat("a\0b"))
        assert "messages" in str((await refused(wire, head))["param"])
        head = await wire.post(CHAT, chat("a\ud800b"))
        assert "surrogate" in (await refused(wire, head))["message"]
        head = await wire.post(COMPLETIONS, {"model": MODEL, "prompt": "\0"})
        assert "prompt" in str((await refused(wire, head))["param"])


async def test_nesting_inside_a_field_is_400_and_named(served: Served) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    async with connect(served.port) as wire:
        for name in ("chat_template_kwargs", "response_format", "tools"):
            value = {
                "chat_template_kwargs": {"a": deep},
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"a": deep}},
                },
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}],
            }[name]
            head = await wire.post(CHAT, chat() | {name: value, "tool_choice": None})
            assert str((await refused(wire, head))["param"]).startswith(name)


async def test_body_over_the_limit_is_413_before_it_has_come(served: Served) -> None:
    async with connect(served.port) as wire:
        await wire.send(
            (
                f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\n"
                f"host: a\r\ncontent-length: {1 << 40}\r\n\r\n"
            ).encode()
        )
        head = await wire.head()
        error = await refused(wire, head)
    assert (head.status, error["code"]) == (413, "body_too_large")
    assert str(MAX_BODY_BYTES) in error["message"]


async def test_chunked_body_over_the_limit_is_413_and_costs_no_memory(served: Served) -> None:
    before = resident_bytes(served.gateway.pid)
    async with connect(served.port) as wire:
        await wire.send(
            (
                f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\n"
                f"host: a\r\ntransfer-encoding: chunked\r\n\r\n"
            ).encode()
        )
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        try:
            for _ in range(1600):  # 100 MiB
                await wire.send(piece)
        except ConnectionError:
            return  # it has stopped to listen: the answer may be lost with the connection
        assert (await wire.head()).status == 413
    assert resident_bytes(served.gateway.pid) - before < 32 << 20


async def test_wrong_content_type_is_400_and_named(served: Served) -> None:
    async with connect(served.port) as wire:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            head = await wire.post(CHAT, json.dumps(chat()).encode(), {"content-type": kind})
            assert (await refused(wire, head))["param"] == "content-type"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
async def test_wrong_method_is_405(served: Served, method: str) -> None:
    async with connect(served.port) as wire:
        head = await wire.request(method, CHAT)
        assert head.status == 405
        assert head["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["/v2/chat", "/v1/chat/completions/", "/v1/models/none", "/%00", "/..%2f", "//"]
)
async def test_unknown_path_is_404_as_json(served: Served, path: str) -> None:
    async with connect(served.port) as wire:
        for method in ("GET", "POST"):
            head = await wire.request(method, path)
            assert head.status in (404, 405)
            await refused(wire, head)


# -- HTTP --------------------------------------------------------------------------------------------------

BODY = json.dumps(chat(max_tokens=2, stream=False)).encode()
POST = f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\nhost: localhost\r\n".encode()

BROKEN_HTTP: Mapping[str, bytes] = {
    "no HTTP": b"hello\r\n\r\n",
    "binary": bytes(range(256)),
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + bytes(190),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": f"POST {CHAT}\r\n\r\n".encode(),
    "an unknown version": f"POST {CHAT} HTTP/7.5\r\n\r\n".encode(),
    "a method that is none": b"FROBNICATE / HTTP/1.1\r\n\r\n",
    "a space in the path": b"GET /a b HTTP/1.1\r\n\r\n",
    "a header without colon": POST + b"nonsense\r\n\r\n",
    "a header name with a space": POST + b"bad name: x\r\n\r\n",
    "NUL in a header": POST + b"x-a: b\0c\r\n\r\n",
    "a content length that is no number": POST + b"content-length: ten\r\n\r\n",
    "a negative content length": POST + b"content-length: -1\r\n\r\n",
    "two content lengths": POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "both framings": POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk size that is none": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "a chunk longer than its size": POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}}}}\r\n0\r\n\r\n",
    "a chunk size without end": POST + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 100 + b"\r\n",
    "an unknown transfer coding": POST + b"transfer-encoding: gzip\r\n\r\n{}",
}


@pytest.mark.parametrize("sent", BROKEN_HTTP.values(), ids=BROKEN_HTTP)
async def test_broken_http_gets_400_or_a_closed_connection(served: Served, sent: bytes) -> None:
    assert await is_turned_away(served.port, sent)


async def is_turned_away(port: int, sent: bytes) -> bool:
    """Whether only 4xx came for these bytes until the connection was closed."""
    answer = await send_and_read_to_the_end(port, sent)
    statuses = [int(line.split(b" ")[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return all(400 <= status < 500 for status in statuses)


async def send_and_read_to_the_end(port: int, sent: bytes) -> bytes:
    """All that comes until the gateway closes; its own time limit for a head is 1 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(sent)
        async with asyncio.timeout(LIMIT_S):
            await writer.drain()
            while piece := await reader.read(1 << 16):
                answer += piece
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nx-long: " + b"x" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(10_000)) + b"\r\n",
        b"GET /" + b"a" * (MAX_HEADER_BYTES + 1) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx-endless: " + b"x" * (10 * MAX_HEADER_BYTES),
    ],
    ids=["one long", "many", "a long path", "endless"],
)
async def test_huge_headers_are_431_and_closed(served: Served, head: bytes) -> None:
    async with connect(served.port) as wire:
        try:
            await wire.send(head)
            answer = await wire.head()
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # closed while we still sent
        assert answer.status == 431
        assert str(MAX_HEADER_BYTES) in (await refused(wire, answer))["message"]
        assert await wire.closed_by_peer()


async def test_unfinished_head_or_body_ends_at_its_limit(served: Served) -> None:
    """The first after 2 s with 408; what follows an early answer is cut as well."""
    answer = await send_and_read_to_the_end(served.port, POST)
    assert answer.startswith(b"HTTP/1.1 408 ")
    answer = await send_and_read_to_the_end(
        served.port, b"GET /health HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"
    )
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_body_shorter_than_its_content_length_is_a_lost_client(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(POST + b"content-length: 100\r\n\r\n{}")
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
    writer.close()


async def test_body_longer_than_its_content_length_is_a_bad_next_request(served: Served) -> None:
    sent = POST + b"content-length: %d\r\n\r\n%s}}}}\r\n\r\n" % (len(BODY), BODY)
    answer = await send_and_read_to_the_end(served.port, sent)
    statuses = [line.split(b" ")[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert statuses in ([b"200", b"400"], [b"400"], [])  # the bad one may close before the good one is ready


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0_gets_its_answer_and_the_end_of_the_connection(served: Served, stream: bool) -> None:
    content = json.dumps(chat(max_tokens=2, stream=stream)).encode()
    request = b"POST %s HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        CHAT.encode(),
        len(content),
        content,
    )
    head, _, body = (await send_and_read_to_the_end(served.port, request)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()  # a 1.0 client does not know it
    if stream:
        assert body.startswith(b"data: {")
        assert body.endswith(b"}\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"]


async def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    bodies_sent = [chat(f"Pipelined {number}", 3, stream=False) for number in range(5)]
    async with connect(served.port) as wire:
        sent = b""
        for body in bodies_sent:
            content = json.dumps(body).encode()
            sent += POST + b"content-length: %d\r\n\r\n" % len(content) + content
        await wire.send(sent)
        texts = []
        for _ in bodies_sent:
            assert (await wire.head()).status == 200
            texts.append((await wire.json())["choices"][0]["message"]["content"])
    assert texts == [(await ask(served.port, body)).text for body in bodies_sent]


async def test_expect_100_continue_is_answered_before_the_body(served: Served) -> None:
    async with connect(served.port) as wire:
        await wire.send(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert (await wire.head()).status == 100
        await wire.send(BODY)
        assert (await wire.head()).status == 200
        assert (await wire.json())["choices"]


async def test_expect_100_continue_of_a_body_over_the_limit_is_413_at_once(served: Served) -> None:
    async with connect(served.port) as wire:
        await wire.send(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1))
        assert (await wire.head()).status == 413


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate"])
async def test_compressed_body_is_400(served: Served, coding: str) -> None:
    async with connect(served.port) as wire:
        head = await wire.post(CHAT, b"\x1f\x8b\x08\x00" * 10, {"content-encoding": coding})
        await refused(wire, head)


async def test_odd_request_ids_are_not_echoed(served: Served) -> None:
    async with connect(served.port) as wire:
        for given in ("a b", "x" * 1000, "<script>", "ü".encode().decode("latin-1")):
            head = await wire.post(CHAT, chat(max_tokens=1, stream=False), {"x-request-id": given})
            await wire.body()
            assert head["x-request-id"] != given


# -- fuzz --------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None, True, 0, -1, 1, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 1e-320,
    "", "x", "auto", "none", "\0", "敏感词", "\u2028", "x" * 5000, [], [[]], [None], [1, "a"], {}, {"": {}},
    {"type": "text"}, {"type": "image_url"}, [[[[[[[[1]]]]]]]],
]  # fmt: skip
NAMES = sorted({*bodies.FIELDS, *BAD_FIELDS, "logprobs", "echo", "suffix", "best_of", "user", "metadata"})
BYTES = (b"", b'"', b"{", b"]", b"\\", b"\xff", b"\\ud800", b"1e9999", b",", b"\0", b"9" * 50)


def fuzzed(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body: good, or with junk in the place of values, or with bytes changed."""
    path = rng.choice(ROUTES)
    body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.choice([1, 2, 3]), **bodies.random_fields(rng)}
    body |= {"messages": HELLO} if path == CHAT else {"prompt": rng.choice(["hi", [1, 2], ["a", "b"]])}
    body["stream"] = rng.random() < 0.3
    for _ in range(rng.choice([0, 0, 1, 2])):
        body[rng.choice(NAMES)] = rng.choice(JUNK)
    if rng.random() < 0.2:
        body["messages"] = [{"role": rng.choice(["user", "tool", 1]), "content": rng.choice(JUNK)}]
    content = bytearray(bodies.encode(body))
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(4)] = rng.choice(BYTES)
    return path, bytes(content)


async def fuzz_schema(served: Served, rng: random.Random, count: int) -> Counter[int]:
    """Fuzzed bodies on one connection; how often each status came."""
    statuses: Counter[int] = Counter()
    async with connect(served.port) as wire:
        for _ in range(count):
            path, content = fuzzed(rng)
            head = await wire.post(path, content)
            body = await wire.body()
            assert head.status == 200 or 400 <= head.status < 500, (path, content, body)
            assert head.status != 200 or b'"error"' not in body, (path, content, body)
            statuses[head.status] += 1
    return statuses


async def fuzz_http(served: Served, rng: random.Random, count: int) -> None:
    """Requests with bytes changed anywhere, and plain noise, each on a connection of its own that the client
    half closes.
    """
    for _ in range(count):
        whole = bytearray(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(whole))
            whole[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        sent = bytes(whole) if rng.random() < 0.8 else rng.randbytes(rng.randrange(1, 2000))
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            writer.write(sent)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), LIMIT_S)
            assert not answer.startswith(b"HTTP/1.1 5"), (sent, answer)
        except ConnectionError:
            pass
        finally:
            writer.close()


async def fuzz(served: Served, num_clients: int, count: int, seed: int) -> Counter[int]:
    rngs = [random.Random(seed + number) for number in range(num_clients)]
    found = await asyncio.gather(*(fuzz_schema(served, rng, count) for rng in rngs))
    await asyncio.gather(*(fuzz_http(served, rng, count // 2) for rng in rngs))
    return sum(found, Counter())


async def test_fuzzed_requests_get_200_or_4xx(served: Served) -> None:
    statuses = await fuzz(served, num_clients=8, count=50, seed=1)
    assert statuses[200] > 20  # the seed exercises both ways
    assert statuses[400] > 100


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_many_fuzzed_requests_get_200_or_4xx_and_memory_stays_flat(served: Served) -> None:
    await fuzz(served, num_clients=8, count=250, seed=1000)
    before = resident_bytes(served.gateway.pid)
    await fuzz(served, num_clients=8, count=2500, seed=2000)
    assert resident_bytes(served.gateway.pid) - before < 16 << 20
