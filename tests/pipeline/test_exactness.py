"""Every prompt's ids are those of Hugging Face's own tokenizer class, whatever the token cache holds.

Chats are seeded, in OpenAI's shape, and go through the request schema. Here: chats without control strings,
or with such that a template parses itself. Not here: control strings as an attack (`test_injection.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from filters.folding import fold
from filters.rules import Rule, RuleSet
from filters.stream import CompiledRules
from pipeline.errors import InvalidRequest
from pipeline.model_text import ModelText
from pipeline.prompt_templates import PromptTemplate, TemplateMessage
from tests.pipeline.conversations import ChatMaker, text
from tests.pipeline.driving import Driver, parsed
from tests.pipeline.real_models import Model, every_model, model
from tests.pipeline.reference import Chat, Reference, by_model
from tests.pipeline.requests import completion
from tests.pipeline.splits import random_split
from tests.tokenizers import files_of, tokenizer_folder

Body = dict[str, Any]


def expected_ids(model: Model, body: Body) -> list[int] | None:
    """What Hugging Face gives; None where it cannot say how the final message goes on."""
    chat: Chat = by_model(model.family.prepare, body)
    try:
        return model.reference.ids(chat)
    except ValueError:
        assert chat.continue_final_message
        return None


def bodies(model: Model, seed: str, num_chats: int) -> Iterator[tuple[Body, list[int]]]:
    """Chats and their ids."""
    maker = ChatMaker(random.Random(seed), model.family)
    while num_chats:
        body = maker.body()
        ids = expected_ids(model, body)
        if ids is not None:
            num_chats -= 1
            yield body, ids


def check_all_states(name: str, seed: str, num_chats: int) -> None:
    """Without a cache, cold, warm, and with a cache in which little fits."""
    tested = model(name)
    assert tested.text.is_segmentable, "else nothing of this tests the cache"
    off, on, tiny = (Driver(tested.text, max_bytes) for max_bytes in (0, 64 << 20, 60_000))
    for body, ids in bodies(tested, seed, num_chats):
        for driver in (off, on, on, tiny):
            assert driver.ids(parsed(body)) == ids, body
    assert off.cache.num_entries == 0
    assert tiny.cache.evictions > 0 or num_chats < 50
    assert sum(driver.cache.hits for driver in (on, tiny)) > num_chats


@every_model
def test_ids_are_hugging_faces_in_every_state_of_the_cache(name: str) -> None:
    check_all_states(name, f"states {name}", 60)


@pytest.mark.long
@pytest.mark.timeout(600)
@every_model
def test_ids_are_hugging_faces_for_thousands_of_chats(name: str) -> None:
    check_all_states(name, f"many {name}", 3000)


def check_growing(name: str, seed: str, num_chats: int) -> None:
    """Each turn of a chat finds what the last one left, and the cache loses some of it at random."""
    tested = model(name)
    rng = random.Random(seed)
    maker = ChatMaker(rng, tested.family)
    for _ in range(num_chats):
        driver = Driver(tested.text, rng.choice((64 << 20, 30_000)))
        for body in maker.growing(rng.randint(2, 7)):
            ids = expected_ids(tested, body)
            assert driver.ids(parsed(body)) == ids, body


@every_model
def test_ids_of_a_growing_chat_are_hugging_faces_at_each_turn(name: str) -> None:
    check_growing(name, f"growing {name}", 12)


@pytest.mark.long
@pytest.mark.timeout(600)
@every_model
def test_ids_of_many_growing_chats_are_hugging_faces(name: str) -> None:
    check_growing(name, f"many growing {name}", 300)


def check_threads(name: str, seed: str, num_chats: int) -> None:
    """All in flight at once; many begin alike."""
    tested = model(name)
    rng = random.Random(seed)
    maker = ChatMaker(rng, tested.family)
    chats = [body for _ in range(num_chats) for body in maker.growing(2)]
    rng.shuffle(chats)
    expected = [expected_ids(tested, body) for body in chats]
    driver = Driver(tested.text, 1 << 20)
    for start in range(0, len(chats), 40):
        together = [parsed(body) for body in chats[start : start + 40]]
        assert driver.ids_together(together, rng) == expected[start : start + 40]


@every_model
def test_ids_are_hugging_faces_when_threads_encode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.tokenizing.MAX_INLINE_CHARACTERS", 0)  # nothing is encoded at once
    check_threads(name, f"threads {name}", 15)


@pytest.mark.long
@pytest.mark.timeout(600)
@every_model
def test_ids_of_many_chats_are_hugging_faces_when_threads_encode(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.tokenizing.MAX_INLINE_CHARACTERS", 40)
    check_threads(name, f"many threads {name}", 600)


def check_templated(name: str, seed: str, num_chats: int) -> None:
    """A request that names a prompt template, against the chat that one would write out."""
    tested = model(name)
    rng = random.Random(seed)
    maker = ChatMaker(rng, tested.family)
    for _ in range(num_chats):
        static, values = [text(rng) for _ in range(4)], {"a": text(rng), "b": text(rng)}
        pattern = "{b}".join(_escaped(part) for part in static[:2]) + "{a}{b}"
        templates = {
            "t": PromptTemplate("t", (TemplateMessage("system", pattern), TemplateMessage("user", "{a}")))
        }
        system = values["b"].join(static[:2]) + values["a"] + values["b"]
        written = [{"role": "system", "content": system}, {"role": "user", "content": values["a"]}]
        others = [{"role": "assistant", "content": text(rng)}, maker.user()]
        ids = expected_ids(tested, {"messages": [*written, *others]})
        driver = Driver(tested.text, templates=templates)
        body = {"model": "m", "messages": others, "template": {"name": "t", "variables": values}}
        for _ in range(2):
            assert driver.ids(parsed(body)) == ids, body


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


@every_model
def test_ids_of_a_templated_request_are_those_of_the_written_chat(name: str) -> None:
    check_templated(name, f"templated {name}", 25)


@pytest.mark.long
@every_model
def test_ids_of_many_templated_requests_are_those_of_the_written_chats(name: str) -> None:
    check_templated(name, f"many templated {name}", 1500)


@every_model
def test_chat_goes_on_exactly_after_answers_cut_at_any_token(name: str) -> None:
    """What the client saw of an answer that was cut in mid-word, or in mid-character, is what counts."""
    tested = model(name)
    rng = random.Random(f"cut {name}")
    maker, tokenizer = ChatMaker(rng, tested.family), tested.text.tokenizer
    for _ in range(10):
        driver, messages = Driver(tested.text), maker.system()
        for _ in range(4):
            messages.append(maker.user())
            body: Body = {"model": "m", "messages": messages}
            # Cut in its thought, an answer begins with a <think> that no template takes out: text, then.
            expected = tested.reference.harmless_ids(by_model(tested.family.prepare, body))
            assert driver.ids(parsed(body)) == expected
            answer = maker.assistant()
            generated = tokenizer.encode(answer["content"], add_special_tokens=False).ids
            seen = tokenizer.decode(generated[: rng.randint(0, len(generated))], skip_special_tokens=False)
            messages.append(answer | {"content": seen})


@every_model
def test_chat_goes_on_exactly_after_filtered_answers(name: str) -> None:
    """A filter masked words of the answers, reasoning and tool results: what was seen is what counts.

    The cache knows the unfiltered chat: nothing of it may come back.
    """
    tested = model(name)
    rng = random.Random(f"filtered {name}")
    maker, num_changed = ChatMaker(rng, tested.family), 0
    for _ in range(15):
        body = maker.body(max_turns=4)
        body.pop("continue_final_message", None)
        driver = Driver(tested.text)
        driver.ids(parsed(body))
        words = [word for message in body["messages"] for word in str(message.get("content")).split()]
        rules = CompiledRules(RuleSet((Rule("r", tuple(_keywords(words, rng)), "mask", replacement="*"),)))
        messages = [_filtered(message, rules, rng) for message in body["messages"]]
        seen = body | {"messages": messages}
        num_changed += messages != body["messages"]
        # What is left of `<think>…</think>` may be a lone <think>, which no template takes out: text, then.
        expected = tested.reference.harmless_ids(by_model(tested.family.prepare, seen))
        assert driver.ids(parsed(seen)) == expected, seen
    assert num_changed > 5


def _keywords(words: list[str], rng: random.Random) -> list[str]:
    """Some of the words, cut to what a rule takes."""
    found = [word[:6] for word in rng.sample(words, min(5, len(words)))]
    return [word for word in found if len(fold(word)) > 1] or ["never"]


def _filtered(message: dict[str, Any], rules: CompiledRules, rng: random.Random) -> dict[str, Any]:
    """A message whose texts a stream has passed through a filter."""

    def passed(text: str) -> str:
        stream = rules.stream()
        assert stream is not None
        return "".join([*map(stream.feed, random_split(text, rng)), stream.flush()])

    texts = {
        key: passed(message[key]) for key in ("content", "reasoning") if isinstance(message.get(key), str)
    }
    return message | texts


@every_model
def test_long_texts_are_exact_too(name: str) -> None:
    tested = model(name)
    rng = random.Random(name)
    driver = Driver(tested.text)
    for num_texts in (20, 100, 400):
        content = " ".join(text(rng, 60) for _ in range(num_texts))
        body: Body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        for _ in range(2):
            assert driver.ids(parsed(body)) == expected_ids(tested, body)


def test_final_answer_that_thinks_inline_can_be_continued() -> None:
    tested = model("qwen3")
    content = "<think>\nhm\n</think>\n\nThe answer"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
    body: Body = {"model": "m", "messages": messages, "continue_final_message": True}
    assert Driver(tested.text).ids(parsed(body)) == expected_ids(tested, body)


def test_tool_arguments_are_the_clients_text_where_a_template_joins_them() -> None:
    tested = model("deepseek_v3")
    function = {"name": "f", "arguments": '{"b":1,  "a": 1.0}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    body: Body = {"model": "m", "messages": messages}
    ids = Driver(tested.text).ids(parsed(body))
    assert ids == expected_ids(tested, body)
    assert function["arguments"] in tested.text.tokenizer.decode(ids)


def test_alternation_that_a_template_demands_is_a_client_error_with_its_message() -> None:
    tested = model("gemma3")
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    with pytest.raises(InvalidRequest, match="Conversation roles must alternate"):
        Driver(tested.text).ids(parsed(body))


@pytest.fixture(scope="module")
def gptoss() -> tuple[ModelText, Reference]:
    folder = tokenizer_folder("gptoss")
    return ModelText.from_files(files_of(folder)), Reference.from_folder(folder)


def test_raw_prompts_of_a_model_without_template_are_hugging_faces(
    gptoss: tuple[ModelText, Reference],
) -> None:
    model_text, reference = gptoss
    rng = random.Random(9)
    driver = Driver(model_text)
    for _ in range(150):
        prompt = text(rng) + rng.choice(["", "", *reference.controls]) + text(rng)
        add_special_tokens = rng.random() < 0.5
        expected = reference.raw_ids(prompt, add_special_tokens)
        if expected:
            request = completion(prompt, add_special_tokens=add_special_tokens)
            assert driver.ids(request) == expected, prompt


def test_chat_with_a_model_without_template_is_a_client_error(gptoss: tuple[ModelText, Reference]) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        Driver(gptoss[0]).ids(parsed({"model": "m", "messages": [{"role": "user", "content": "a"}]}))
