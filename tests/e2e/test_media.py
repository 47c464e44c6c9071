"""Images and sounds all the way to a scripted engine, which makes seven tokens of each, by its bytes.

The real engine sees images in `test_real_images.py`.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from tokenizers import AddedToken, Tokenizer

from tests import stack
from tests.e2e.realtime import talking
from tests.e2e.resting import logged
from tests.gateway.media_files import data_uri, image, png_head, wav
from tests.stack import Gateway

NUM_MEDIA_TOKENS = 7
MAX_IMAGES, MAX_BYTES, MAX_PIXELS, MAX_AUDIO_S = 3, 10_000, 5000, 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'audio' %}<sound>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RED, BLUE = image(color="red"), image(color="blue")


def seeing_tokenizer(folder: Path, embedded_model: Path) -> Path:
    """The embedded model's tokenizer with two placeholders and a template that writes them."""
    model = folder / "seeing"
    model.mkdir()
    for path in embedded_model.iterdir():
        if path.name.endswith(".json"):
            shutil.copy(path, model)
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<image>", "<sound>")])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@pytest.fixture(scope="module")
def gateway(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Before a model that sees and hears (`seeing`) and one that reads only (`reading`)."""
    folder = tmp_path_factory.mktemp("media")
    seeing = seeing_tokenizer(folder, embedded_model)
    kinds = ("--scripted-media", "image=<image>", "--scripted-media", "audio=<sound>")
    limits = {
        "--max-images": MAX_IMAGES,
        "--max-media-bytes": MAX_BYTES,
        "--max-image-pixels": MAX_PIXELS,
        "--max-audio-s": MAX_AUDIO_S,
    }
    flags = [part for name, value in limits.items() for part in (name, str(value))]
    with ExitStack() as started:
        workers = [
            started.enter_context(
                stack.start_scripted(folder, model, "--served-model-name", name, *options, name=name)
            )
            for name, model, options in (("seeing", seeing, kinds), ("reading", embedded_model, ()))
        ]
        yield started.enter_context(stack.start_gateway(folder, workers, *flags))


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=30.0, max_retries=0) as client:
        yield client


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data), "detail": "high"}}


def sound_part(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


def ask(client: OpenAI, *parts: Any, model: str = "seeing", **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(parts)}]
    return client.chat.completions.create(model=model, messages=messages, max_tokens=12, **fields)


def text(answer: Any) -> str:
    content: str = answer.choices[0].message.content
    return content


QUESTION = {"type": "text", "text": "What is this?"}


def test_the_same_image_gives_the_same_answer_and_another_another(client: OpenAI) -> None:
    first, again = (ask(client, image_part(RED), QUESTION) for _ in range(2))
    other, none = ask(client, image_part(BLUE), QUESTION), ask(client, QUESTION)
    assert text(first) == text(again)
    assert len({text(first), text(other), text(none)}) == 3
    for answer in (first, again, other):
        assert answer.usage.prompt_tokens == none.usage.prompt_tokens + NUM_MEDIA_TOKENS


def test_a_stream_and_several_choices_count_the_prompt_once(client: OpenAI) -> None:
    whole = ask(client, image_part(RED), QUESTION, n=2)
    single = ask(client, image_part(RED), QUESTION)
    assert whole.usage.prompt_tokens == single.usage.prompt_tokens
    options = {"include_usage": True}
    chunks = list(ask(client, image_part(RED), QUESTION, stream=True, stream_options=options))
    assert chunks[-1].usage.prompt_tokens == single.usage.prompt_tokens
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == text(single)


def test_every_form_of_a_part_is_the_same_image(client: OpenAI) -> None:
    url = data_uri(RED)
    forms = [
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url, "detail": "low"},
        {"type": "image_url", "image_url": {"url": data_uri(RED, "application/octet-stream")}},
    ]
    assert {text(ask(client, form, QUESTION)) for form in forms} == {
        text(ask(client, image_part(RED), QUESTION))
    }


def test_images_stand_where_the_parts_do(client: OpenAI) -> None:
    red, blue = image_part(RED), image_part(BLUE)
    orders = [(red, QUESTION, blue), (blue, QUESTION, red), (red, blue, QUESTION)]
    answers = [ask(client, *parts) for parts in orders]
    assert len(set(map(text, answers))) == 3
    assert len({answer.usage.prompt_tokens for answer in answers}) == 1


def test_sounds_are_heard(client: OpenAI) -> None:
    samples = b"\1\2" * 500
    heard = [ask(client, sound_part(wav()), QUESTION), ask(client, sound_part(samples, "pcm16"), QUESTION)]
    assert text(heard[0]) != text(heard[1])
    url = data_uri(wav(), "audio/wav")
    for form in ({"url": url}, url):
        assert text(ask(client, {"type": "audio_url", "audio_url": form}, QUESTION)) == text(heard[0])


def test_an_image_of_an_earlier_turn_stays(client: OpenAI) -> None:
    def later(data: bytes) -> Any:
        messages: Any = [
            {"role": "user", "content": [image_part(data), QUESTION]},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": "Which colour?"},
        ]
        return client.chat.completions.create(model="seeing", messages=messages, max_tokens=12)

    assert text(later(RED)) == text(later(RED)) != text(later(BLUE))


PATH = "messages[0].content[1]"
REFUSED: list[tuple[str, list[Any], str | None, str]] = [
    ("many", [image_part(RED)] * (MAX_IMAGES + 1), "too_many_media", "has 4 images; the limit is 3"),
    ("bytes", [image_part(bytes(MAX_BYTES + 2))], "media_too_large", "10002 bytes; the limit is 10000"),
    ("pixels", [image_part(image(size=(100, 51)))], "media_too_large", "5100 pixels; the limit is 5000"),
    ("bomb", [image_part(png_head(60_000, 60_000))], "media_too_large", "3600000000 pixels"),
    (
        "length",
        [sound_part(wav(0.5, 1000)), sound_part(wav(2.5, 1000))],
        "media_too_large",
        "2.5 seconds; the limit is 2.0",
    ),
    ("format", [image_part(b"BM" + bytes(60))], "invalid_media", "no image in one of the formats"),
    ("broken", [image_part(RED[:20])], "invalid_media", "is a broken png image"),
    (
        "base64",
        [{"type": "image_url", "image_url": "data:image/png;base64,@@@@"}],
        "invalid_media",
        "no base64",
    ),
    (
        "url",
        [{"type": "image_url", "image_url": "https://example.com/a.png"}],
        "media_not_allowed",
        "fetches none",
    ),
    (
        "scheme",
        [{"type": "image_url", "image_url": "file:///etc/passwd"}],
        None,
        "must begin with data:, https:",
    ),
    ("video", [{"type": "video_url", "video_url": {"url": "data:,"}}], "unsupported_field", "does not take"),
]


@pytest.mark.parametrize(
    ("parts", "code", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_is_not_taken_is_a_bad_request(
    client: OpenAI, parts: list[Any], code: str | None, message: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, QUESTION, *parts)
    error = caught.value
    assert error.code == code
    assert message in error.message
    assert error.param is not None
    assert error.param.startswith("messages")
    assert text(ask(client, image_part(RED), QUESTION))


def test_a_model_that_reads_only_says_so(client: OpenAI) -> None:
    for part, kind in ((image_part(RED), "images"), (sound_part(wav()), "sounds")):
        with pytest.raises(BadRequestError, match=f"the model reading takes no {kind}") as caught:
            ask(client, QUESTION, part, model="reading")
        assert caught.value.param == PATH


def test_raw_prompts_take_no_placeholders(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="the place of one of the model's images") as caught:
        client.completions.create(model="seeing", prompt="a <image> b", max_tokens=4)
    assert caught.value.param == "prompt"


def test_a_placeholder_that_a_user_writes_is_text(client: OpenAI) -> None:
    answer = ask(client, {"type": "text", "text": "<image>"}, image_part(RED))
    assert answer.usage.prompt_tokens > ask(client, image_part(RED)).usage.prompt_tokens


async def test_a_conversation_shows_an_image_once_and_asks_twice(gateway: Gateway, client: OpenAI) -> None:
    """As a chat with the same messages answers; what is sent back of an item is without its data."""
    item = {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": data_uri(RED)},
            {"type": "input_text", "text": QUESTION["text"]},
        ],
    }
    async with talking(gateway.port, "seeing") as talk:
        shown = await talk.add(item)
        assert "image_url" not in shown["content"][0]
        assert (await talk.retrieve(shown["id"]))["content"][0]["image_url"] == data_uri(RED)
        first = await talk.respond(max_output_tokens=12)
        second = await talk.ask("And now?", max_output_tokens=12)
        await talk.send("conversation.item.create", item=item | {"content": item["content"][:1] * 4})
        assert (await talk.error())["code"] == "too_many_media"
        for url, code in (
            ("http://example.com/a.png", "media_not_allowed"),
            (data_uri(b"AAA"), "invalid_media"),
            (data_uri(png_head(100, 100)), "media_too_large"),
        ):
            content = [{"type": "input_image", "image_url": url}]
            await talk.send("conversation.item.create", item=item | {"content": content}, event_id="bad")
            error = await talk.error()
            assert (error["code"], error["event_id"]) == (code, "bad")
    messages: list[Any] = [{"role": "user", "content": [image_part(RED), QUESTION]}]
    for said, follow_up in ((first, "And now?"), (second, "")):
        answer = client.chat.completions.create(model="seeing", messages=messages, max_tokens=12)
        assert said.text == text(answer)
        usage = said.response["usage"]
        assert usage["input_tokens"] == answer.usage.prompt_tokens  # type: ignore[union-attr]
        assert usage["input_token_details"]["image_tokens"] == NUM_MEDIA_TOKENS
        messages += [{"role": "assistant", "content": said.text}, {"role": "user", "content": follow_up}]


async def test_a_model_that_reads_only_refuses_an_item_when_it_comes(gateway: Gateway) -> None:
    content = [{"type": "input_image", "image_url": data_uri(RED)}]
    async with talking(gateway.port, "reading") as talk:
        await talk.send(
            "conversation.item.create", item={"type": "message", "role": "user", "content": content}
        )
        assert "the model reading takes no images" in (await talk.error())["message"]
        assert (await talk.ask("Hello.", max_output_tokens=4)).text


async def test_a_conversation_hears(gateway: Gateway, client: OpenAI) -> None:
    """Samples as OpenAI's clients send them: 16 bits, 24 kHz, without a file around them."""
    samples = wav(0.1, 24_000)
    part = {"type": "input_audio", "audio": base64.b64encode(samples[44:]).decode()}
    async with talking(gateway.port, "seeing") as talk:
        await talk.add({"type": "message", "role": "user", "content": [part]})
        said = await talk.respond(max_output_tokens=12)
    assert said.text == text(ask(client, sound_part(samples)))
    assert said.response["usage"]["input_token_details"]["audio_tokens"] == NUM_MEDIA_TOKENS


def test_no_log_line_holds_data_of_a_request(gateway: Gateway, client: OpenAI) -> None:
    answer = ask(client, image_part(RED), QUESTION)
    with pytest.raises(BadRequestError):
        ask(client, image_part(RED[:-40]), image_part(b"secret" * 5))
    line = logged(gateway, answer.id.removeprefix("chatcmpl-"))
    assert data_uri(RED)[30:60] not in gateway.log.read_text()
    assert line["prompt_tokens"] == answer.usage.prompt_tokens
    assert "media_ms" in line
