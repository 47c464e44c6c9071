"""A rendered chat becomes ids: what is known is not encoded again, and what is new is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.encoding import MAX_INLINE_CHARACTERS, pack_ids
from pipeline.errors import InvalidRequest
from pipeline.model_text import ModelText
from pipeline.needs import Encode, Steps, Wait, served
from pipeline.rendering import Rendered
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import Tokenizing, Tokens, TokenStore
from tests.pipeline.model_files import model_files

SHORT = "<|im_start|>user\nhi"
LONG = "<|im_start|>user\n" + "word " * MAX_INLINE_CHARACTERS
SPELLED = "<|im_start|>user\nhi <|endoftext|> there"


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText.from_files(model_files())


class Made:
    """A model's tokenizing with a store of its own; `offered` is what it told others of."""

    def __init__(self, text: ModelText, buffer_bytes: int = 1 << 20) -> None:
        self.offered: list[tuple[str, bytes]] = []
        self.cache = TokenCache(1 << 20)
        self.pool = BufferPool(buffer_bytes)
        self.tokenizing = Tokenizing(text, TokenStore(self.cache, self.pool, self._offer))

    def _offer(self, fingerprint: str, pairs: Sequence[tuple[str, bytes]]) -> None:
        self.offered += pairs

    def tokens(self, *segments: str, opening: str = "", **options: Any) -> Tokens:
        return served(self.tokenizing.tokens(Rendered(opening, list(segments)), **options))


def first_need(steps: Steps[Any]) -> Any:
    return next(steps, None)


def whole_ids(text: ModelText, *segments: str) -> bytes:
    return text.encoder.encode("".join(segments), add_special_tokens=False)


def test_short_segments_are_encoded_at_once_and_offered_to_others(text: ModelText) -> None:
    made = Made(text)
    steps = made.tokenizing.tokens(Rendered("", [SHORT, SHORT]))
    assert first_need(steps) is None
    assert made.offered == [(SHORT, whole_ids(text, SHORT))]


def test_long_segments_are_a_need_for_the_new_ones_only(text: ModelText) -> None:
    made = Made(text)
    made.tokens(SHORT)
    need = first_need(made.tokenizing.tokens(Rendered("", [SHORT, LONG, SHORT, LONG])))
    assert isinstance(need, Encode)
    assert (need.texts, need.fingerprint) == ((LONG,), text.fingerprint)


def test_known_segments_have_the_same_ids_again(text: ModelText) -> None:
    made = Made(text)
    cold, warm = made.tokens(SHORT, LONG, SHORT), made.tokens(SHORT, LONG, SHORT)
    assert cold.ids == warm.ids == whole_ids(text, SHORT, LONG, SHORT)
    assert cold.num_tokens == len(cold.ids) // 4
    assert made.cache.num_entries == 2


def test_control_strings_that_a_segment_spells_are_text(text: ModelText) -> None:
    for each in (text, replace(text, is_segmentable=False)):
        ids = memoryview(Made(each).tokens(SHORT, SPELLED).ids).cast("i").tolist()
        assert text.tokenizer.token_to_id("<|endoftext|>") not in ids
        assert text.tokenizer.decode(ids, skip_special_tokens=False) == SHORT + SPELLED


def test_text_before_the_first_control_string_comes_first(text: ModelText) -> None:
    found = Made(text).tokens(SHORT, opening="Hello. ")
    assert found.ids == whole_ids(text, "Hello. ") + whole_ids(text, SHORT)


def test_nothing_is_remembered_where_segments_are_not_exact(text: ModelText) -> None:
    made = Made(replace(text, is_segmentable=False))
    found = made.tokens(SHORT, LONG)
    assert (found.entries, found.whole) == ((), whole_ids(text, SHORT, LONG))
    assert made.cache.num_entries == 0


def test_pinned_segments_stay_pinned_also_when_they_were_known(text: ModelText) -> None:
    made = Made(text)
    made.tokens(SHORT)
    assert made.cache.pinned_bytes == 0
    made.tokens(SHORT, pin=True)
    assert made.cache.pinned_bytes == made.cache.num_bytes > 0


def test_learned_segments_are_known_afterwards(text: ModelText) -> None:
    made = Made(text)
    served(made.tokenizing.learn(Rendered("", [SHORT, LONG])))
    served(made.tokenizing.learn(Rendered("", [SHORT])))
    assert (made.cache.hits, made.cache.misses, made.cache.tokens_saved) == (0, 0, 0)
    assert first_need(made.tokenizing.tokens(Rendered("", [SHORT, LONG]))) is None
    assert first_need(made.tokenizing.learn(Rendered("", [SHORT, LONG]))) is None


@pytest.mark.parametrize("add", [True, False])
def test_raw_text_is_encoded_with_its_control_strings_or_without(text: ModelText, add: bool) -> None:
    made, raw = Made(text), "hi <|im_end|>"
    end = text.tokenizer.token_to_id("<|im_end|>")
    [meant] = served(made.tokenizing.raw([raw], add))
    [spelled] = served(made.tokenizing.raw([raw], add, means_controls=False))
    assert meant == text.encoder.encode(raw, add)
    ids, plain_ids = (memoryview(each).cast("i").tolist() for each in (meant, spelled))
    assert (end in ids, end in plain_ids) == (True, False)
    assert (plain_ids[0] == text.tokenizer.token_to_id("<|endoftext|>")) is add


def test_prompts_of_one_request_get_all_buffers_or_none(text: ModelText) -> None:
    made = Made(text, buffer_bytes=2 * 4096)
    held = [made.pool.whole(pack_ids([1]))]
    steps = made.tokenizing.whole_in_buffers([pack_ids([2]), pack_ids([3])])
    assert next(steps) == Wait(1)
    assert made.pool.can_acquire(1)  # what it had for a moment it gave back
    held.clear()
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert list(map(bytes, ended.value.value)) == [pack_ids([2]), pack_ids([3])]


def test_prompts_that_never_fit_together_are_refused_and_do_not_wait(text: ModelText) -> None:
    made = Made(text, buffer_bytes=2 * 4096)
    with pytest.raises(InvalidRequest, match=r"3 prompts take buffers of 12288 bytes.* 8192 bytes"):
        next(made.tokenizing.whole_in_buffers([pack_ids([2])] * 3))


def test_prompt_of_entries_waits_for_a_buffer(text: ModelText) -> None:
    made = Made(text, buffer_bytes=4096)
    held = [made.pool.whole(pack_ids([1]))]
    tokens = made.tokens(SHORT)
    steps = made.tokenizing.in_buffer(tokens)
    assert next(steps) == Wait(tokens.num_tokens)
    held.clear()
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert bytes(ended.value.value) == whole_ids(text, SHORT)
