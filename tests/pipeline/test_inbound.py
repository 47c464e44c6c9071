"""From a request to its calls, without I/O."""

from __future__ import annotations

import random
from typing import Any

import pytest

from filters.patterns import Patterns
from filters.rules import load_rules
from pipeline.assembly import GenerationDefaults
from pipeline.encoding import MAX_INLINE_CHARACTERS, pack_ids
from pipeline.errors import ContentBlocked, ContextTooLong, InvalidRequest
from pipeline.inbound import Encode, Inbound, InboundOptions, Ready
from pipeline.model_text import ModelText
from pipeline.validation import InputLimits
from pipeline.values import ModelInfo
from tests.pipeline import chat_templates, small_tokenizers
from tests.pipeline.model_files import model_files
from tests.pipeline.requests import chat, completion, generation

NUM_IDS = small_tokenizers.byte_level().get_vocab_size()
INFO = ModelInfo("m", max_model_len=20_000, block_size=16, default_sampling={}, fingerprint="")


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText.from_files(model_files())


def finish(inbound: Inbound, request: Any, now_s: float = 0.0) -> Ready:
    """Serve the needs as a caller does."""
    step = inbound.start(request, now_s)
    if isinstance(step, Encode):
        step = inbound.resume(step, step.run())
    return step


def ids_of(ready: Ready) -> list[bytes]:
    return [bytes(prompt.ids) for prompt in ready.prompts]


def test_chat_is_rendered_and_encoded_as_by_hugging_face(text: ModelText) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizers.byte_level(), chat_template=chat_templates.CHATML
    )
    inbound = Inbound(text, INFO, InboundOptions())
    rng = random.Random(5)
    for num_words in (0, 1, 10, 100, 1000):
        messages = [{"role": "user", "content": small_tokenizers.text(rng, num_words)} for _ in range(2)]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids_of(finish(inbound, chat(messages=messages))) == [pack_ids(expected)]


def test_short_text_is_encoded_at_once_and_long_text_is_a_need(text: ModelText) -> None:
    inbound = Inbound(text, INFO, InboundOptions())
    short = completion("x" * MAX_INLINE_CHARACTERS)
    long = completion("x" * MAX_INLINE_CHARACTERS, "y")
    assert isinstance(inbound.start(short, 0.0), Ready)
    need = inbound.start(long, 0.0)
    assert isinstance(need, Encode)
    assert need.texts == long.prompts
    assert len(inbound.resume(need, need.run()).calls) == 2


def test_needs_of_many_requests_may_be_served_in_any_order(text: ModelText) -> None:
    inbound = Inbound(text, INFO, InboundOptions())
    rng = random.Random(6)
    requests = [completion(small_tokenizers.text(rng, 400)) for _ in range(5)]
    needs = [inbound.start(request, 0.0) for request in requests]
    served = list(enumerate(needs))
    rng.shuffle(served)
    for index, need in served:
        assert isinstance(need, Encode)
        assert ids_of(inbound.resume(need, need.run())) == ids_of(finish(inbound, requests[index]))


def test_prompts_of_texts_and_ids_keep_their_order(text: ModelText) -> None:
    inbound = Inbound(text, INFO, InboundOptions())
    request = completion("the", [5, 6], "price", [7], gen=generation(n=2), add_special_tokens=False)
    ready = finish(inbound, request)
    encode = small_tokenizers.byte_level().encode
    expected = [
        encode("the", add_special_tokens=False).ids,
        [5, 6],
        encode("price", add_special_tokens=False).ids,
        [7],
    ]
    assert ids_of(ready) == [pack_ids(ids) for ids in expected]
    assert len(ready.calls) == 8


@pytest.mark.parametrize("add", [True, False])
def test_raw_prompt_gets_special_tokens_as_asked(text: ModelText, add: bool) -> None:
    ready = finish(Inbound(text, INFO, InboundOptions()), completion("the price", add_special_tokens=add))
    assert ids_of(ready) == [
        pack_ids(small_tokenizers.byte_level().encode("the price", add_special_tokens=add).ids)
    ]


def test_options_reach_their_stages(text: ModelText) -> None:
    options = InboundOptions(
        limits=InputLimits(max_messages=1),
        defaults=GenerationDefaults(max_tokens=3, sampling={"temperature": 0.5}),
        rules=Patterns(load_rules("- {id: a, match: 敏感, action: mask}", "r.yaml")),
    )
    inbound = Inbound(text, INFO, options)
    ready = finish(inbound, chat("敏感"))
    assert ids_of(ready) == ids_of(finish(inbound, chat("**")))
    assert [hit.rule_id for hit in ready.hits] == ["a"]
    assert (ready.calls[0].max_tokens, ready.calls[0].sampling) == (3, {"temperature": 0.5})
    with pytest.raises(InvalidRequest, match="2 messages"):
        inbound.start(chat(messages=[{"role": "user", "content": "a"}] * 2), 0.0)


@pytest.mark.parametrize("parts", [["看黄片"], ["看黄", "片"]])
def test_blocked_text_stops_before_rendering(text: ModelText, parts: list[str]) -> None:
    rules = Patterns(load_rules("黄片", "words.txt"))
    inbound = Inbound(text, INFO, InboundOptions(rules=rules))
    with pytest.raises(ContentBlocked):
        inbound.start(chat([{"type": "text", "text": part} for part in parts]), 0.0)


def test_time_reaches_the_template() -> None:
    text = ModelText.from_files(model_files(chat_template="{{ strftime_now('%Y') }}"))
    inbound = Inbound(text, INFO, InboundOptions())
    by_year = [finish(inbound, chat("hi"), now_s) for now_s in (86_400.0 * 180, 1.7e9)]
    expected = [
        small_tokenizers.byte_level().encode(year, add_special_tokens=False).ids for year in ("1970", "2023")
    ]
    assert [ids_of(ready)[0] for ready in by_year] == [pack_ids(ids) for ids in expected]


def test_chat_without_template_is_refused() -> None:
    text = ModelText.from_files(model_files(chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        Inbound(text, INFO, InboundOptions()).start(chat("hi"), 0.0)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("wrong", [-1, NUM_IDS, 2**31, 2**70])
def test_ids_beyond_the_vocabulary_are_refused(text: ModelText, wrong: int) -> None:
    inbound = Inbound(text, INFO, InboundOptions())
    cases: list[tuple[Any, str]] = [
        (completion([1, wrong, 2]), "prompt"),
        (completion("a", [wrong]), "prompt[1]"),
        (chat("a", gen=generation(sampling={"logit_bias": {wrong: 1.0}})), "logit_bias"),
        (chat("a", gen=generation(sampling={"logit_bias": {str(wrong): 1.0}})), "logit_bias"),
        (chat("a", gen=generation(sampling={"allowed_token_ids": [1, wrong]})), "allowed_token_ids"),
    ]
    for request, param in cases:
        with pytest.raises(
            InvalidRequest, match=f"{wrong}; this model's ids go from 0 to {NUM_IDS - 1}"
        ) as caught:
            finish(inbound, request)
        assert caught.value.param == param


def test_ids_within_the_vocabulary_pass(text: ModelText) -> None:
    ready = finish(Inbound(text, INFO, InboundOptions()), completion([0, NUM_IDS - 1], range(NUM_IDS)))
    assert ids_of(ready) == [pack_ids([0, NUM_IDS - 1]), pack_ids(range(NUM_IDS))]


def test_end_of_each_stage_is_told(text: ModelText) -> None:
    rules = Patterns(load_rules("黄片", "words.txt"))
    stages = ["validate", "scan", "render", "tokenize", "assemble"]
    for content, options, expected in (
        ("short", InboundOptions(rules=rules), stages),
        ("long " * 200, InboundOptions(rules=rules), stages),
        ("short", InboundOptions(), [stage for stage in stages if stage != "scan"]),
    ):
        told: list[str] = []
        inbound = Inbound(text, INFO, options)
        step = inbound.start(chat(content), 0.0, told.append)
        if isinstance(step, Encode):
            inbound.resume(step, step.run(), told.append)
        assert told == expected


def test_prompt_longer_than_the_context_is_refused(text: ModelText) -> None:
    inbound = Inbound(text, INFO, InboundOptions())
    for request, param in ((chat("敏 " * 20_000), "messages"), (completion([5] * 20_000), "prompt")):
        with pytest.raises(ContextTooLong) as caught:
            finish(inbound, request)
        assert caught.value.param == param


@pytest.mark.parametrize("action", ["block", "mask", "redact", "flag"])
def test_rules_see_the_text_of_prompts_that_are_ids(action: str) -> None:
    """Ids cannot be rewritten, so whatever would have to be is blocked."""
    text = ModelText.from_files(model_files())
    rules = Patterns(load_rules(f"- {{id: r, match: 黄片, action: {action}}}", "rules.yaml"))
    inbound = Inbound(text, INFO, InboundOptions(rules=rules))
    ids = text.tokenizer.encode("看黄片吗", add_special_tokens=False).ids
    clean = text.tokenizer.encode("看看", add_special_tokens=False).ids
    assert isinstance(inbound.start(completion(clean), 0.0), Ready)
    if action == "flag":
        ready = inbound.start(completion(clean, ids), 0.0)
        assert isinstance(ready, Ready)
        assert [hit.rule_id for hit in ready.hits] == ["r"]
    else:
        with pytest.raises(ContentBlocked) as blocked:
            inbound.start(completion(clean, ids), 0.0)
        assert (blocked.value.rule_id, blocked.value.param) == ("r", "prompt[1]")
