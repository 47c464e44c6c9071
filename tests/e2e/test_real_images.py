"""Images on the real engine: a tiny vision model behind a gateway, asked by the `openai` client.

What each limit counts and which addresses are refused is tested in full where it is decided
(`tests/gateway/test_media*.py`); here one of each kind goes the whole way.
"""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests import stack
from tests.gateway.media_files import data_uri, image, png_head, wav
from tests.stack import Gateway, Worker
from tests.vision_model import IMAGE_TOKEN, NUM_IMAGE_TOKENS

pytestmark = pytest.mark.engine

MODEL = "vision"
TEXT_MODEL = "scripted"
LIMIT_S = 90.0
MAX_IMAGES = 3
MAX_BYTES = 400_000
BLOCK_TOKENS = 128  # the engine's block is this or smaller: only whole ones are found again
RED, BLUE = data_uri(image("png", (64, 64), "red")), data_uri(image("jpeg", (80, 40), "blue"), "image/jpeg")
CUT = image("jpeg", (640, 480), "green")[:1500]
LONG = "Say what is in the picture, which of its colours is the warmest, and why. " * 12


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    """A service of this machine that no request may reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture(scope="module")
def gateway(
    vision_worker: Worker,
    embedded_model: Any,
    listener: socket.socket,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gateway]:
    """In front of the vision model and of one that reads only; may fetch from a name of this machine."""
    folder = tmp_path_factory.mktemp("images")
    options = ("--max-images", str(MAX_IMAGES), "--max-media-bytes", str(MAX_BYTES))
    hosts = ("*", f"localhost:{listener.getsockname()[1]}")
    allowed = [part for host in hosts for part in ("--allowed-media-domains", host)]
    with (
        stack.start_scripted(folder, embedded_model) as reader,
        stack.start_gateway(folder, [vision_worker, reader], *options, *allowed) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        yield client


def user(*parts: str) -> dict[str, Any]:
    """A message whose parts are texts and the URLs of images."""
    return {
        "role": "user",
        "content": [
            image_part(part) if "://" in part or part.startswith("data:") else {"type": "text", "text": part}
            for part in parts
        ],
    }


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client: OpenAI, *messages: dict[str, Any], model: str = MODEL, max_tokens: int = 8) -> Any:
    return client.chat.completions.create(
        model=model,
        messages=list(messages),
        temperature=0,
        max_tokens=max_tokens,  # type: ignore[arg-type]
    )


def text_of(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def test_an_image_is_as_many_tokens_as_the_engine_makes_of_it(client: OpenAI) -> None:
    without = ask(client, user("What is this?"), max_tokens=1).usage.prompt_tokens
    for num_images in (1, 2):
        usage = ask(client, user("What is this?", *[RED, BLUE][:num_images]), max_tokens=1).usage
        assert usage.prompt_tokens == without + num_images * NUM_IMAGE_TOKENS
    written = ask(client, user("What is <image>this?"), max_tokens=1).usage.prompt_tokens
    assert written > without  # in a text it is text


def test_a_stream_tells_the_answer_and_its_usage(client: OpenAI) -> None:
    whole = ask(client, user("What is this?", RED))
    *body, last = client.chat.completions.create(
        model=MODEL,
        messages=[user("What is this?", RED)],  # type: ignore[list-item]
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == text_of(whole)
    assert body[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_other_images_give_other_answers_and_equal_ones_the_same(client: OpenAI) -> None:
    files = (image("png", (64, 64), "red"), image("webp", (64, 64), "white"), image("gif", (64, 64), "black"))
    answers = [text_of(ask(client, user("What is this?", data_uri(file)), max_tokens=16)) for file in files]
    assert len(set(answers)) == len(files)
    assert text_of(ask(client, user("What is this?", RED), max_tokens=16)) == answers[0]
    swapped = [text_of(ask(client, user(*pair), max_tokens=16)) for pair in ((RED, BLUE), (BLUE, RED))]
    assert swapped[0] != swapped[1]  # each stands in its own place


def test_the_second_turn_finds_the_image_in_the_cache(client: OpenAI) -> None:
    first = ask(client, user(LONG, RED, LONG))
    assert first.usage.prompt_tokens > 2 * BLOCK_TOKENS
    turns = [user(LONG, RED, LONG), {"role": "assistant", "content": text_of(first)}, user("And now?")]
    second = ask(client, *turns)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - BLOCK_TOKENS
    other = ask(client, user(LONG, BLUE, LONG), *turns[1:])
    num_before = other.usage.prompt_tokens_details.cached_tokens
    assert num_before < second.usage.prompt_tokens_details.cached_tokens  # another image is another prefix


def refusal(client: OpenAI, *messages: dict[str, Any], model: str = MODEL) -> dict[str, Any]:
    """The error of a request that is the client's fault."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, *messages, model=model)
    body: dict[str, Any] = caught.value.body  # type: ignore[assignment]
    assert body["type"] == "invalid_request_error"
    return body


def bomb(side: int) -> bytes:
    """A whole PNG of black pixels, a bit each: 50,000 x 50,000 are 312 MB in 310 KB."""
    num_bytes, piece = side * (1 + (side + 7) // 8), 1 << 20
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    once = packer.compress(bytes(piece)) + packer.flush(zlib.Z_FULL_FLUSH)
    body = once * (num_bytes // piece) + packer.compress(bytes(num_bytes % piece)) + packer.flush()
    data = b"\x78\xda" + body + struct.pack(">HH", num_bytes % 65521, 1)  # the sum over zeros is their count
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(each)) + name + each + struct.pack(">I", zlib.crc32(name + each))
        for name, each in ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    )


def test_every_limit_is_told_with_both_numbers(client: OpenAI) -> None:
    path = "messages[0].content[1]"
    error = refusal(client, user("What?", *[RED] * (MAX_IMAGES + 1)))
    assert (error["code"], str(MAX_IMAGES + 1) in error["message"]) == ("too_many_media", True)
    large = refusal(client, user("What?", data_uri(bytes(MAX_BYTES + 1))))
    assert (large["code"], large["param"]) == ("media_too_large", path)
    assert f"{MAX_BYTES + 1} bytes" in large["message"]
    packed = bomb(50_000)
    assert len(packed) < MAX_BYTES
    pixels = refusal(client, user("What?", data_uri(packed)))
    assert (pixels["code"], pixels["param"]) == ("media_too_large", path)
    assert "2500000000 pixels" in pixels["message"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (data_uri(b"no image"), "no image"),
        (data_uri(b""), "empty"),
        ("data:image/png;base64,@@@@", "base64"),
        (data_uri(image()[:20]), "broken png"),
        (data_uri(wav()), "no image"),
        (data_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "no image"),
        ("data:image/svg+xml,<svg/>", "not base64"),
    ],
)
def test_a_broken_image_is_the_clients_error(client: OpenAI, url: str, problem: str) -> None:
    error = refusal(client, user("What?", url))
    assert error["param"] == "messages[0].content[1]"
    assert problem in error["message"]


@pytest.mark.parametrize("file", [png_head(64, 64), CUT], ids=["no pixels", "cut"])
def test_an_image_that_breaks_in_the_engine_is_the_clients_error(client: OpenAI, file: bytes) -> None:
    refusal(client, user("What?", data_uri(file)))
    assert text_of(ask(client, user("What is this?", RED)))  # and nothing else broke


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:{}/", "http://localhost:{}/", "http://LOCALHOST.:{}/", "http://2130706433:{}/"),
        *("http://[::ffff:127.0.0.1]:{}/", "http://0x7f.1:{}/", "http://user@localhost:{}/", "http://0:{}/"),
        *("http://169.254.169.254/latest/meta-data/", "https://[fd00:ec2::254]/", "http://10.0.0.1/"),
        *("http://localhost/", "http://1.1.1.1:22/", "http://nobody.invalid:8080/"),
    ],
)
def test_no_address_of_the_inner_network_is_asked(client: OpenAI, listener: socket.socket, url: str) -> None:
    error = refusal(client, user("What?", url.format(listener.getsockname()[1])))
    assert (error["code"], error["param"]) == ("media_not_allowed", "messages[0].content[1]")
    assert "127.0.0.1" not in error["message"]
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_by_default_nothing_is_fetched(
    vision_worker: Worker, listener: socket.socket, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        stack.start_gateway(tmp_path_factory.mktemp("off"), [vision_worker]) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client,
    ):
        error = refusal(client, user("What?", f"http://localhost:{listener.getsockname()[1]}/"))
        assert error["code"] == "media_not_allowed"
        assert "fetches none" in error["message"]


def test_a_place_without_an_image_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"only taken by /v1/chat/completions"):
        client.completions.create(model=MODEL, prompt=f"What is {IMAGE_TOKEN}?", max_tokens=1)


def test_a_model_that_cannot_see_says_so(client: OpenAI) -> None:
    error = refusal(client, user("What?", RED), model=TEXT_MODEL)
    assert "takes no images" in error["message"]
    assert error["param"] == "messages[0].content[1]"


def test_a_model_that_cannot_hear_says_so(client: OpenAI) -> None:
    sound = {
        "type": "input_audio",
        "input_audio": {"data": data_uri(wav()).partition(",")[2], "format": "wav"},
    }
    error = refusal(client, {"role": "user", "content": [sound]})
    assert "takes no sounds" in error["message"]
