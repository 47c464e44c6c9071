"""The models that a gateway knows: none yet, unknown, and known for good."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.encoders import Encoders
from gateway.models import Models
from gateway.needs import NeedServer
from gateway.prompt_settings import WarmPrompt
from pipeline.errors import ContextTooLong, NoWorker, UnknownModel
from pipeline.inbound import InboundOptions
from pipeline.needs import served
from pipeline.prompt_templates import PromptTemplate, TemplateMessage
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import TokenStore
from pipeline.values import ChatRequest, Delivery, Generation, TemplateUse
from tests.gateway.serving import INFO
from tests.pipeline.model_files import model_files

SHOP = PromptTemplate(
    "shop",
    (
        TemplateMessage("system", "You sell lamps for {shop}."),
        TemplateMessage("user", "The product is a lamp of brass. {question}"),
    ),
)


@pytest.fixture
async def encoders() -> AsyncIterator[Encoders]:
    made = Encoders(num_threads=1)
    yield made
    made.close()


def models_of(encoders: Encoders, *templates: PromptTemplate, chat_template: str | None = None) -> Models:
    store = TokenStore(TokenCache(1 << 20), BufferPool(1 << 20))
    options = InboundOptions(templates={template.name: template for template in templates})
    needs = NeedServer(encoders, store.pool, wait_limit_s=5.0)
    return Models(options, store, needs, encoders.executor, chat_template)


@pytest.fixture
async def models(encoders: Encoders) -> Models:
    return models_of(encoders)


async def test_without_any_model_a_client_may_try_again(models: Models) -> None:
    with pytest.raises(NoWorker):
        models.get("m")


async def test_unknown_model_is_told_the_known_ones(models: Models) -> None:
    await models.load(INFO, model_files())
    await models.load(replace(INFO, name="other"), model_files())
    assert models.names == ("m", "other")
    with pytest.raises(UnknownModel, match=r"m, other"):
        models.get("M")
    assert models.get("m").info == INFO
    assert models.get("m").text.chat_template is not None


async def test_model_that_comes_back_changed_replaces_the_old(models: Models) -> None:
    await models.load(INFO, model_files())
    before = models.get("m")
    changed = replace(INFO, fingerprint="g", max_model_len=7)
    await models.load(changed, model_files(chat_template=None))
    assert models.get("m").info == changed
    assert models.get("m").text.chat_template is None
    assert before.text.chat_template is not None  # running requests keep theirs


async def test_broken_files_leave_the_model_unknown(models: Models) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        await models.load(INFO, {"tokenizer.json": b"{"})
    assert models.names == ()


async def test_context_follows_the_workers(models: Models) -> None:
    await models.load(INFO, model_files())
    before = models.get("m")
    assert models.within(before, INFO.max_model_len, {}) is before
    shorter = models.within(before, 7, {})
    assert (shorter.info.max_model_len, shorter.text) == (7, before.text)
    assert models.get("m") is shorter
    request = ChatRequest(
        "m", [{"role": "user", "content": "far too long a text for seven tokens"}], Generation({}), Delivery()
    )
    with pytest.raises(ContextTooLong, match="maximum context length is 7 tokens"):
        served(shorter.inbound.prepare(request, 0.0))


async def test_own_chat_template_is_used_for_every_model(encoders: Encoders) -> None:
    models = models_of(encoders, chat_template="<|im_start|>own")
    await models.load(INFO, model_files())
    template = models.get("m").text.chat_template
    assert template is not None
    assert template.source == "<|im_start|>own"


async def test_static_parts_of_prompt_templates_are_known_before_any_request(encoders: Encoders) -> None:
    models = models_of(encoders, SHOP)
    await models.load(INFO, model_files())
    model = models.get("m")
    use = TemplateUse("shop", {"shop": "A", "question": "What is it?"})
    request = ChatRequest("m", [], Generation({}), Delivery(), template=use)
    before = models._store.cache.stats()
    served(model.inbound.prepare(request, 0.0))
    after = models._store.cache.stats()
    assert after["misses"] - before["misses"] == 2, "both segments have a slot"
    assert after["hits"] - before["hits"] == 3, "the ends of both messages, and the answer's beginning"


async def test_segments_of_a_model_that_was_replaced_are_forgotten_once_nobody_serves_it(
    encoders: Encoders,
) -> None:
    models = models_of(encoders, SHOP)
    other = replace(INFO, name="other")
    await models.load(INFO, model_files())
    await models.load(other, model_files())
    cache, changed = models._store.cache, model_files(added_tokens_decoder={})
    num_entries = cache.num_entries
    await models.load(replace(INFO, fingerprint="g"), changed)
    assert cache.num_entries == 2 * num_entries
    await models.load(replace(other, fingerprint="g"), changed)
    assert cache.num_entries == num_entries > 0


async def test_template_that_does_not_suit_a_model_is_told_and_harms_nothing(
    encoders: Encoders, caplog: pytest.LogCaptureFixture
) -> None:
    models = models_of(encoders, SHOP, chat_template="{{ raise_exception('no system message') }}")
    await models.load(INFO, model_files())
    assert "template 'shop' does not suit the model m" in caplog.text
    assert models.names == ("m",)


@pytest.mark.parametrize(
    "warm",
    [
        WarmPrompt(messages=({"role": "system", "content": "You sell lamps."},)),
        WarmPrompt(messages=({"role": "user", "content": "A document."},)),
        WarmPrompt(template=TemplateUse("shop", {"shop": "A"})),
        WarmPrompt(template=TemplateUse("shop", {"shop": "A", "question": "q"})),
    ],
)
async def test_warm_ids_are_the_beginning_of_every_prompt_that_begins_so(
    encoders: Encoders, warm: WarmPrompt
) -> None:
    models = models_of(encoders, SHOP)
    await models.load(INFO, model_files())
    ids = await models.prefix_ids("m", warm)
    assert len(ids) >= 4 * 8
    inbound = models.get("m").inbound
    lengths = []
    for text in ("x", "k", "Is it blue?", "灯", "\n"):
        if warm.template is not None:
            use = TemplateUse("shop", {"question": text, **warm.template.variables})
            messages = [{"role": "assistant", "content": text}] * ("question" in warm.template.variables)
            request = ChatRequest("m", messages, Generation({}), Delivery(), template=use)
        else:
            role = "assistant" if warm.messages[-1]["role"] == "user" else "user"
            messages = [*warm.messages, {"role": role, "content": text}]
            request = ChatRequest("m", messages, Generation({}), Delivery())
        prompt = bytes(served(inbound.prepare(request, 0.0)).prompts[0].ids)
        lengths.append(
            next((at for at, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(ids))
        )
    # A text may join the end of the beginning into one token; most do not.
    assert sorted(lengths)[2] == len(ids)
    assert min(lengths) >= len(ids) - 8
