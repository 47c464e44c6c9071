"""From a request to its calls, without I/O."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from filters.patterns import Patterns
from filters.rules import load_rules
from pipeline.assembly import GenerationDefaults
from pipeline.encoding import MAX_INLINE_CHARACTERS, pack_ids
from pipeline.errors import ContentBlocked, ContextTooLong, InvalidRequest
from pipeline.inbound import Inbound, InboundOptions, InputRules, Ready
from pipeline.model_text import ModelText
from pipeline.needs import Compute, Encode, Need, Pause, Steps, Wait, served
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import TokenStore
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


def store(cache_bytes: int = 1 << 20, buffer_bytes: int = 16 << 20) -> TokenStore:
    return TokenStore(TokenCache(cache_bytes), BufferPool(buffer_bytes))


def inbound_of(text: ModelText, options: InboundOptions | None = None) -> Inbound:
    return Inbound(text, INFO, options or InboundOptions(), store())


def finish(inbound: Inbound, request: Any, now_s: float = 0.0, rules: InputRules | None = None) -> Ready:
    """Serve the needs as a caller does."""
    return served(inbound.prepare(request, now_s, rules))


def first_need(steps: Steps[Ready]) -> Need | Ready:
    """The first need, or the result if there is none."""
    found: Need | Ready
    try:
        found = next(steps)
    except StopIteration as done:
        found = done.value
    return found


def rules_of(text: str, name: str = "words.txt") -> InputRules:
    return InputRules(Patterns(load_rules(text, name)))


def ids_of(ready: Ready) -> list[bytes]:
    return [bytes(prompt.ids) for prompt in ready.prompts]


def test_chat_is_rendered_and_encoded_as_by_hugging_face(text: ModelText) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizers.byte_level(), chat_template=chat_templates.CHATML
    )
    inbound = inbound_of(text)
    rng = random.Random(5)
    for num_words in (0, 1, 10, 100, 1000):
        messages = [{"role": "user", "content": small_tokenizers.text(rng, num_words)} for _ in range(2)]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids_of(finish(inbound, chat(messages=messages))) == [pack_ids(expected)]


def test_short_text_is_encoded_at_once_and_long_text_is_a_need(text: ModelText) -> None:
    inbound = inbound_of(text)
    short = completion("x" * MAX_INLINE_CHARACTERS)
    long = completion("x" * MAX_INLINE_CHARACTERS, "y")
    assert isinstance(first_need(inbound.prepare(short, 0.0)), Ready)
    need = first_need(inbound.prepare(long, 0.0))
    assert isinstance(need, Encode)
    assert need.texts == long.prompts
    assert len(finish(inbound, long).calls) == 2


def test_needs_of_many_requests_may_be_served_in_any_order(text: ModelText) -> None:
    inbound = inbound_of(text)
    rng = random.Random(6)
    requests = [chat(small_tokenizers.text(rng, 400)) for _ in range(5)]
    steps = [inbound.prepare(request, 0.0) for request in requests]
    waiting = list(zip(requests, steps, map(first_need, steps), strict=True))
    rng.shuffle(waiting)
    for request, each, need in waiting:
        assert isinstance(need, Encode)
        with pytest.raises(StopIteration) as done:
            each.send(need.run())
        assert ids_of(done.value.value) == ids_of(finish(inbound_of(text), request))


def test_chat_of_very_many_messages_is_rendered_elsewhere(text: ModelText) -> None:
    inbound = inbound_of(text)
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant") for _ in range(300)]
    need = first_need(inbound.prepare(chat(messages=messages), 0.0))
    assert isinstance(need, Compute)
    assert len(need.run().segments) == 2 * 600 + 3
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * 600
    few = [{"role": "assistant", "content": "", "tool_calls": calls}]
    assert isinstance(first_need(inbound.prepare(chat(messages=few), 0.0)), Compute)
    assert ids_of(finish(inbound, chat(messages=messages))) == ids_of(
        finish(inbound_of(text), chat(messages=messages))
    )


def test_second_turn_encodes_only_what_is_new(text: ModelText) -> None:
    inbound = inbound_of(text)
    rng = random.Random(7)
    messages = [{"role": "user", "content": small_tokenizers.text(rng, 400)}]
    first = finish(inbound, chat(messages=messages))
    messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    again = first_need(inbound.prepare(chat(messages=messages), 0.0))
    assert isinstance(again, Ready), "the long turn is remembered, the new ones are short"
    assert ids_of(again) == ids_of(finish(inbound_of(text), chat(messages=messages)))
    shared = bytes(first.prompts[0].ids)
    assert bytes(again.prompts[0].ids).startswith(shared[: shared.rindex(pack_ids([2]))])


def test_request_waits_while_every_buffer_is_in_use(text: ModelText) -> None:
    inbound = Inbound(text, INFO, InboundOptions(), store(buffer_bytes=2 * 4 * 1024))
    held = [finish(inbound, completion([index])) for index in range(2)]
    steps = inbound.prepare(completion([7]), 0.0)
    assert isinstance(first_need(steps), Wait)
    assert isinstance(next(steps), Wait), "nothing has been given back yet"
    del held[0]
    with pytest.raises(StopIteration) as done:
        next(steps)
    assert ids_of(done.value.value) == [pack_ids([7])]


def test_request_of_several_prompts_keeps_no_buffer_while_it_waits(text: ModelText) -> None:
    inbound = Inbound(text, INFO, InboundOptions(), store(buffer_bytes=2 * 4 * 1024))
    held = finish(inbound, completion([1]))
    steps = inbound.prepare(completion([7], [8]), 0.0)
    assert isinstance(first_need(steps), Wait)
    other = finish(inbound, completion([2]))
    assert isinstance(next(steps), Wait)
    del held, other
    with pytest.raises(StopIteration) as done:
        next(steps)
    assert ids_of(done.value.value) == [pack_ids([7]), pack_ids([8])]


def test_prompts_of_texts_and_ids_keep_their_order(text: ModelText) -> None:
    inbound = inbound_of(text)
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
    ready = finish(inbound_of(text), completion("the price", add_special_tokens=add))
    assert ids_of(ready) == [
        pack_ids(small_tokenizers.byte_level().encode("the price", add_special_tokens=add).ids)
    ]


def test_options_reach_their_stages(text: ModelText) -> None:
    options = InboundOptions(
        limits=InputLimits(max_messages=1),
        defaults=GenerationDefaults(max_tokens=3, sampling={"temperature": 0.5}),
    )
    inbound = inbound_of(text, options)
    ready = finish(inbound, chat("敏感"), rules=rules_of("- {id: a, match: 敏感, action: mask}", "r.yaml"))
    assert ids_of(ready) == ids_of(finish(inbound, chat("**")))
    assert [hit.rule_id for hit in ready.hits] == ["a"]
    assert (ready.calls[0].max_tokens, ready.calls[0].sampling) == (3, {"temperature": 0.5})
    with pytest.raises(InvalidRequest, match="2 messages"):
        finish(inbound, chat(messages=[{"role": "user", "content": "a"}] * 2))


@pytest.mark.parametrize("parts", [["看黄片"], ["看黄", "片"]])
def test_blocked_text_stops_before_rendering(text: ModelText, parts: list[str]) -> None:
    request = chat([{"type": "text", "text": part} for part in parts])
    with pytest.raises(ContentBlocked):
        finish(inbound_of(text), request, rules=rules_of("黄片"))


def test_time_reaches_the_template() -> None:
    text = ModelText.from_files(model_files(chat_template="{{ strftime_now('%Y') }}"))
    inbound = inbound_of(text)
    by_year = [finish(inbound, chat("hi"), now_s) for now_s in (86_400.0 * 180, 1.7e9)]
    expected = [
        small_tokenizers.byte_level().encode(year, add_special_tokens=False).ids for year in ("1970", "2023")
    ]
    assert [ids_of(ready)[0] for ready in by_year] == [pack_ids(ids) for ids in expected]


def test_chat_without_template_is_refused() -> None:
    text = ModelText.from_files(model_files(chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        finish(inbound_of(text), chat("hi"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("wrong", [-1, NUM_IDS, 2**31, 2**70])
def test_ids_beyond_the_vocabulary_are_refused(text: ModelText, wrong: int) -> None:
    inbound = inbound_of(text)
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
    ready = finish(inbound_of(text), completion([0, NUM_IDS - 1], range(NUM_IDS)))
    assert ids_of(ready) == [pack_ids([0, NUM_IDS - 1]), pack_ids(range(NUM_IDS))]


def test_end_of_each_stage_is_told(text: ModelText) -> None:
    stages = ["validate", "scan", "render", "tokenize", "assemble"]
    for content, rules, expected in (
        ("short", rules_of("黄片"), stages),
        ("long " * 200, rules_of("黄片"), stages),
        ("short", None, [stage for stage in stages if stage != "scan"]),
    ):
        told: list[str] = []
        served(inbound_of(text).prepare(chat(content), 0.0, rules, told.append))
        assert told == expected


def test_prompt_longer_than_the_context_is_refused(text: ModelText) -> None:
    inbound = inbound_of(text)
    for request, param in ((chat("敏 " * 20_000), "messages"), (completion([5] * 20_000), "prompt")):
        with pytest.raises(ContextTooLong) as caught:
            finish(inbound, request)
        assert caught.value.param == param


def test_prompts_are_never_said_to_have_less_than_a_token_where_the_answer_leaves_them_no_room(
    text: ModelText,
) -> None:
    for content in ("short", "敏 " * 20_000):
        with pytest.raises(ContextTooLong, match=r"prompt has (at least )?[1-9]\d* tokens and 99999"):
            finish(inbound_of(text), chat(content, generation(max_tokens=99_999)))


@pytest.mark.parametrize("action", ["block", "mask", "redact", "flag"])
def test_rules_see_the_text_of_prompts_that_are_ids(action: str) -> None:
    """Ids cannot be rewritten, so whatever would have to be is blocked."""
    text = ModelText.from_files(model_files())
    rules = rules_of(f"- {{id: r, match: 黄片, action: {action}}}", "rules.yaml")
    inbound = inbound_of(text)
    ids = text.tokenizer.encode("看黄片吗", add_special_tokens=False).ids
    clean = text.tokenizer.encode("看看", add_special_tokens=False).ids
    finish(inbound, completion(clean), rules=rules)
    if action == "flag":
        ready = finish(inbound, completion(clean, ids), rules=rules)
        assert [hit.rule_id for hit in ready.hits] == ["r"]
    else:
        with pytest.raises(ContentBlocked) as blocked:
            finish(inbound, completion(clean, ids), rules=rules)
        assert (blocked.value.rule_id, blocked.value.param) == ("r", "prompt[1]")


def test_long_prompts_of_ids_are_read_in_steps_without_missing_what_stands_over_their_borders() -> None:
    text = ModelText.from_files(model_files())
    rules = rules_of("- {id: r, match: 黄片, action: flag}", "rules.yaml")
    filler = text.tokenizer.encode("a", add_special_tokens=False).ids
    ids = text.tokenizer.encode("黄片", add_special_tokens=False).ids
    assert len(filler) == 1 < len(ids)
    for num_before in range(2048 - len(ids), 2049):
        prompt = filler * num_before + ids + filler * 5000
        steps = inbound_of(text).prepare(completion(prompt, filler), 0.0, rules)
        needs = []
        while not isinstance(found := first_need(steps), Ready):
            needs.append(found)
        assert [(hit.start, hit.end) for hit in found.hits] == [(num_before, num_before + 2)]
        assert sum(isinstance(need, Pause) for need in needs) >= 4 + 1, "of both prompts"


def test_control_strings_of_raw_prompts_mean_what_they_spell_unless_told_otherwise(text: ModelText) -> None:
    control = small_tokenizers.byte_level().token_to_id("<|im_end|>")
    request = completion("a<|im_end|>b", add_special_tokens=False)
    plain = inbound_of(text, InboundOptions(raw_control_strings=False))
    assert pack_ids([control]) in ids_of(finish(inbound_of(text), request))[0]
    assert pack_ids([control]) not in ids_of(finish(plain, request))[0]
    whole = "".join(text.vocabulary.token_text(i) for i in array("i", ids_of(finish(plain, request))[0]))
    assert whole == "a<|im_end|>b"


@pytest.mark.parametrize("policy", ["error", "drop_oldest"])
def test_context_policy_decides_about_long_chats(text: ModelText, policy: str) -> None:
    inbound = inbound_of(text, InboundOptions(context_policy=policy))
    messages = [
        {"role": role, "content": "敏 " * 3_000} for role in ("user", "assistant") for _ in range(5)
    ] + [{"role": "user", "content": "a"}]
    request = chat(messages=messages)
    if policy == "error":
        with pytest.raises(ContextTooLong):
            finish(inbound, request)
        return
    ready = finish(inbound, request)
    assert ready.dropped is not None
    assert ready.dropped.num_messages > 0
    assert ready.prompts[0].num_tokens <= INFO.max_model_len
