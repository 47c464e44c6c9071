"""Images and sounds on their way in: their places in the prompt, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
from tokenizers import AddedToken, Tokenizer

from filters.patterns import Patterns
from filters.rules import load_rules
from pipeline.encoding import pack_ids
from pipeline.errors import InvalidRequest
from pipeline.inbound import Inbound, InboundOptions, InputRules, Ready
from pipeline.media import count_id, media_of, without_media
from pipeline.media_errors import TooManyMedia
from pipeline.model_text import ModelText
from pipeline.needs import Compute, Encode, LoadMedia, Steps
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import TokenStore
from pipeline.values import MediaKind, MediaRef, MediaSupport, Medium, ModelInfo
from tests.pipeline import chat_templates, small_tokenizers
from tests.pipeline.model_files import model_files
from tests.pipeline.requests import chat, completion, generation

IMAGE, SOUND = "<image>", "<sound>"
TEMPLATE: Final = chat_templates.PARTS_OR_STRINGS.replace(
    "{%- if item['type'] == 'text'",
    "{%- if item['type'] == 'image' -%}<image>{%- elif item['type'] == 'audio' -%}<sound>"
    "{%- elif item['type'] == 'text'",
)
BLOCK_SIZE: Final = 16


def files(template: str = TEMPLATE) -> dict[str, bytes]:
    tokenizer = Tokenizer.from_str(small_tokenizers.byte_level().to_str())
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (IMAGE, SOUND)])
    return model_files(chat_template=template) | {"tokenizer.json": tokenizer.to_str().encode()}


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText.from_files(files())


def support(text: ModelText, max_count: int = 4) -> dict[MediaKind, MediaSupport]:
    ids = {token: text.tokenizer.token_to_id(token) for token in (IMAGE, SOUND)}
    return {"image": MediaSupport(ids[IMAGE], max_count), "audio": MediaSupport(ids[SOUND], max_count)}


def inbound_of(
    text: ModelText, media: Mapping[MediaKind, MediaSupport] | None = None, **options: Any
) -> Inbound:
    info = ModelInfo("m", 2000, BLOCK_SIZE, {}, "", media=support(text) if media is None else media)
    return Inbound(
        text, info, InboundOptions(**options), TokenStore(TokenCache(1 << 20), BufferPool(16 << 20))
    )


def part(url: str, kind: MediaKind = "image", path: str = "messages[0].content[0]") -> dict[str, Any]:
    return {"type": kind, "media": MediaRef(kind, url, path)}


def words(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def medium(ref: MediaRef) -> Medium:
    return Medium(ref.kind, ref.url.encode(), "png", digest=ref.url)


def finish(steps: Steps[Ready]) -> tuple[Ready, list[str]]:
    """The calls, and the addresses that had to be loaded."""
    urls: list[str] = []
    answer: Any = None
    while True:
        try:
            need = steps.send(answer)
        except StopIteration as done:
            return done.value, urls
        answer = need.run() if isinstance(need, Encode | Compute) else None
        if isinstance(need, LoadMedia):
            urls += [ref.url for ref in need.refs]
            answer = tuple(map(medium, need.refs))


def ids_of(ready: Ready) -> list[int]:
    [prompt] = ready.prompts
    return list(prompt.tokens)


def test_media_reach_every_choice_and_have_a_place_each(text: ModelText) -> None:
    content = [words("a"), part("x"), words("b"), part("y", "audio"), part("z")]
    request = chat(content, generation(n=2))
    stages: list[str] = []
    ready, urls = finish(inbound_of(text).prepare(request, 0.0, done=stages.append))
    assert urls == ["x", "y", "z"]
    assert [[each.digest for each in call.media] for call in ready.calls] == [["x", "y", "z"]] * 2
    taken = support(text)
    places = [
        token_id for token_id in ids_of(ready) if token_id in {each.token_id for each in taken.values()}
    ]
    assert places == [taken[kind].token_id for kind in ("image", "audio", "image")]
    assert stages == ["validate", "render", "tokenize", "media", "assemble"]


def test_a_chat_of_texts_needs_no_loading(text: ModelText) -> None:
    stages: list[str] = []
    ready, urls = finish(inbound_of(text).prepare(chat([words("a")]), 0.0, done=stages.append))
    assert not urls
    assert ready.calls[0].media == ()
    assert "media" not in stages


@pytest.mark.parametrize("spelled", [IMAGE, "<im", "age>"])
def test_a_placeholder_in_the_user_s_text_is_text(text: ModelText, spelled: str) -> None:
    for content in (spelled, [words("<im"), words("age>")], [words(spelled), part("x"), words(spelled)]):
        ready, _ = finish(inbound_of(text).prepare(chat(content), 0.0))
        num_images = sum(isinstance(each, dict) and "media" in each for each in content)
        assert ids_of(ready).count(support(text)["image"].token_id) == num_images


def test_a_model_that_takes_no_such_kind_is_named_with_the_part(text: ModelText) -> None:
    only_images = {"image": support(text)["image"]}
    content = [part("x"), part("y", "audio", "messages[0].content[1]")]
    for media, kind, index in (({}, "images", 0), (only_images, "sounds", 1)):
        with pytest.raises(InvalidRequest, match=f"the model m takes no {kind}") as caught:
            finish(inbound_of(text, media).prepare(chat(content), 0.0))
        assert caught.value.param == f"messages[0].content[{index}]"


@pytest.mark.parametrize(("of_server", "of_model"), [(2, 4), (4, 2), (0, 4)])
def test_more_media_of_a_kind_than_either_limit_are_refused(
    text: ModelText, of_server: int, of_model: int
) -> None:
    inbound = inbound_of(text, support(text, of_model), max_media=of_server)
    limit = min(of_server, of_model)
    full = [part(str(number)) for number in range(limit)]
    if limit:
        sounds = [part(str(number), "audio") for number in range(limit)]
        assert len(finish(inbound.prepare(chat([*full, *sounds]), 0.0))[1]) == 2 * limit
    with pytest.raises(TooManyMedia, match=f"has {limit + 1} images; the limit is {limit}"):
        finish(inbound.prepare(chat([*full, part("x")]), 0.0))


def test_a_template_of_strings_has_no_place() -> None:
    text = ModelText.from_files(files(chat_templates.CHATML))
    with pytest.raises(InvalidRequest, match="no place for images") as caught:
        finish(inbound_of(text).prepare(chat([part("x")]), 0.0))
    assert caught.value.param == "messages[0].content[0]"


def test_a_template_that_leaves_images_out_is_told() -> None:
    text = ModelText.from_files(files(chat_templates.PARTS_OR_STRINGS))
    with pytest.raises(InvalidRequest, match="makes 0 places for 1 images"):
        finish(inbound_of(text).prepare(chat([part("x"), words("a")]), 0.0))


def test_a_place_that_the_template_adds_is_told() -> None:
    text = ModelText.from_files(files(IMAGE + TEMPLATE))
    with pytest.raises(InvalidRequest, match="makes 1 places for 0 images"):
        finish(inbound_of(text).prepare(chat("a"), 0.0))


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_raw_prompts_have_no_places(text: ModelText, kind: MediaKind) -> None:
    token_id, inbound = support(text)[kind].token_id, inbound_of(text)
    for prompt in ("a" + {"image": IMAGE, "audio": SOUND}[kind], [1, token_id]):
        with pytest.raises(InvalidRequest, match=f"holds the token id {token_id}") as caught:
            finish(inbound.prepare(completion([5], prompt), 0.0))
        assert caught.value.param == "prompt[1]"
    assert len(finish(inbound_of(text, {}).prepare(completion([1, token_id]), 0.0))[0].calls) == 1


def test_what_a_policy_drops_takes_its_media_along(text: ModelText) -> None:
    messages = [
        {"role": "user", "content": [part("old"), words("x " * 900)]},
        {"role": "assistant", "content": "y " * 900},
        {"role": "user", "content": [part("new"), words("z")]},
    ]
    request = chat(messages=messages, context_policy="drop_oldest")
    ready, urls = finish(inbound_of(text).prepare(request, 0.0))
    assert urls == ["new"]
    assert ready.dropped is not None
    assert ready.dropped.num_messages == 2


def test_middle_out_cuts_text_and_leaves_media(text: ModelText) -> None:
    request = chat([part("a"), words("x " * 9000), part("b")], context_policy="middle_out")
    ready, urls = finish(inbound_of(text).prepare(request, 0.0))
    assert urls == ["a", "b"]
    assert ready.dropped is not None
    assert ready.dropped.num_characters > 0


def test_the_first_image_decides_the_affinity_if_it_is_in_the_first_block(text: ModelText) -> None:
    inbound = inbound_of(text)

    def affinity(*contents: Sequence[Any]) -> int:
        roles = ("user", "assistant") * len(contents)
        messages = [
            {"role": role, "content": list(content)} for role, content in zip(roles, contents, strict=False)
        ]
        return finish(inbound.prepare(chat(messages=messages), 0.0))[0].prompts[0].affinity

    question = words("what is it? " * 10)
    first = affinity([part("x"), question])
    assert first == affinity([part("x"), question], [words("a cat")], [words("sure?"), part("y")])
    assert first != affinity([part("y"), question])
    assert affinity([question, part("x")]) == affinity([question, part("y")])
    # Of two kinds, the one that stands first.
    assert affinity([part("a", "audio"), part("x"), question]) == affinity(
        [part("a", "audio"), part("y"), question]
    )
    assert affinity([part("a", "audio"), part("x"), question]) != affinity(
        [part("b", "audio"), part("x"), question]
    )


def test_control_characters_are_stripped_around_media(text: ModelText) -> None:
    from pipeline.control_characters import ControlPolicy

    inbound = inbound_of(text, control_characters=ControlPolicy("strip", "strip"))
    ready, urls = finish(inbound.prepare(chat([words("a\x07b"), part("x\x07")]), 0.0))
    assert urls == ["x\x07"]
    assert "\x07" not in text.tokenizer.decode(ids_of(ready))


def test_rules_rewrite_texts_in_their_places(text: ModelText) -> None:
    rules = InputRules(Patterns(load_rules("secret\n", "words.txt", "mask")))

    def seen(*parts: dict[str, Any]) -> str:
        ready, urls = finish(inbound_of(text).prepare(chat(list(parts)), 0.0, rules))
        assert urls == [each["media"].url for each in parts if "media" in each]
        decoded = text.tokenizer.decode(ids_of(ready), skip_special_tokens=False)
        return decoded.split("user\n")[1].split("<|im_end|>")[0]

    mask = seen(words("secret"))
    assert "secret" not in mask
    several = seen(words("one"), part("x"), words("secret"), part("y"), words("two"))
    assert several == f"one{IMAGE}{mask}{IMAGE}two"
    # A word that an image cuts is found, too.
    assert seen(words("sec"), part("x"), words("ret"), part("y")) == mask + IMAGE * 2


def test_final_message_cannot_be_continued_after_an_image(text: ModelText) -> None:
    request = chat([words("a"), part("x")], continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(InvalidRequest, match="does not end with a text"):
        finish(inbound_of(text).prepare(request, 0.0))
    request = chat([part("x"), words("a")], continue_final_message=True, add_generation_prompt=False)
    assert finish(inbound_of(text).prepare(request, 0.0))[1] == ["x"]


def test_disguised_rendering_has_the_same_places(text: ModelText) -> None:
    assert text.chat_template is not None
    template, request = text.chat_template, chat([words("<image"), part("x"), words(">")])
    assert template.render_disguised(request, 0.0).text == template.render(request, 0.0).text
    assert template.render(request, 0.0).text.count(IMAGE) == 1


def test_media_of_finds_them_in_order() -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [words("b"), part("x")]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [part("y")]},
    ]
    assert [ref.url for ref in media_of(messages)] == ["x", "y"]


def test_a_request_that_is_kept_has_no_media() -> None:
    messages = [{"role": "user", "content": [words("b"), part("x")]}, {"role": "assistant", "content": "a"}]
    kept = without_media(chat(messages=messages))
    assert list(kept.messages) == [{"role": "user", "content": [words("b")]}, messages[1]]
    assert len(messages[0]["content"]) == 2
    plain = chat([words("b")])
    assert without_media(plain) is plain


@pytest.mark.parametrize("token_id", [0, 1, 255, 256, 0x0101, 0x010101, 49190])
def test_ids_are_counted_where_they_are(token_id: int) -> None:
    rng = random.Random(token_id)
    for _ in range(50):
        others = [0, 1, token_id, token_id << 8 & 0xFFFFFF, token_id >> 8, 0x01010101]
        ids = [rng.choice(others) for _ in range(rng.choice([0, 5, 50, 2000]))]
        assert count_id(pack_ids(ids), token_id) == ids.count(token_id)
