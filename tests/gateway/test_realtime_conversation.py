"""The order of a conversation's items, its bounds, and what can be done to one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gateway.realtime_conversation import Conversation, Memory
from gateway.realtime_items import Item, answer_item, messages
from pipeline.errors import ClientError
from pipeline.realtime_errors import (
    ConversationsFull,
    ConversationTooLarge,
    DuplicateItem,
    ItemNotFound,
    NothingToHear,
)
from tests.gateway.realtime_values import call, client_error, item, said


def filled(*ids: str) -> Conversation:
    conversation = Conversation()
    for item_id in ids:
        conversation.add(item(said("assistant", f"text of {item_id}", item_id)))
    return conversation


def ids(conversation: Conversation) -> list[str]:
    return [each.id for each in conversation]


def answer(item_id: str, text: str = "", status: str = "in_progress") -> Item:
    return answer_item({**item(said("assistant", text, item_id)).wire(), "status": status})


def test_items_stand_where_they_were_put() -> None:
    conversation = filled("a", "b")
    new = item(said("user", "x", "c"))
    assert conversation.add(new, "root") is None
    assert conversation.add(item(said("user", "x", "d")), "a") == "a"
    assert conversation.add(item(said("user", "x", "e")), "b") == "b"
    assert conversation.add(item(said("user", "x", "f"))) == "e"
    assert ids(conversation) == ["c", "a", "d", "b", "e", "f"]
    assert conversation.last_id == "f"
    assert conversation.get("c") is new
    assert len(conversation) == 6
    assert "d" in conversation
    assert Conversation().last_id is None


@pytest.mark.parametrize(
    ("act", "kind", "code", "param"),
    [
        (lambda it: it.get("z"), ItemNotFound, "item_retrieve_invalid_item_id", "item_id"),
        (lambda it: it.delete("z"), ItemNotFound, "item_delete_invalid_item_id", "item_id"),
        (lambda it: it.truncate("z", 0, 1), ItemNotFound, "item_truncate_invalid_item_id", "item_id"),
        (
            lambda it: it.add(item(said("user", "x")), "z"),
            ItemNotFound,
            "item_create_invalid_previous_item_id",
            "previous_item_id",
        ),
        (
            lambda it: it.add(item(said("user", "x", "a"))),
            DuplicateItem,
            "item_create_duplicate_item_id",
            "item.id",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(
    act: Callable[[Conversation], object], kind: type[ClientError], code: str, param: str
) -> None:
    conversation = filled("a", "b")
    before = list(conversation), conversation.num_bytes
    error = client_error(lambda: act(conversation))
    assert type(error) is kind
    assert (error.code, error.param) == (code, param)
    assert (list(conversation), conversation.num_bytes) == before


def test_the_bounds_name_both_numbers() -> None:
    conversation = Conversation(max_items=2, max_bytes=10)
    conversation.add(item(said("user", "1234")))
    error = client_error(lambda: conversation.add(item(said("user", "1234567", "b"))))
    assert isinstance(error, ConversationTooLarge)
    assert "11 bytes; the limit is 10" in str(error)
    conversation.check_room()
    conversation.add(item(said("user", "12345", "b")))
    for act in (conversation.check_room, lambda: conversation.add(item(said("user", "", "c")))):
        assert "3 items; the limit is 2" in str(client_error(act))
    conversation.delete("b")
    conversation.add(item(said("user", "123456", "b")))
    assert (len(conversation), conversation.num_bytes) == (2, 10)


def test_an_answer_is_always_taken_and_the_next_one_is_not() -> None:
    conversation = Conversation(max_bytes=10)
    assert conversation.add_answer(answer("a"), None) is None
    assert conversation.finish_answer(answer("a", "a long answer", "completed"))
    assert "14 bytes; the limit is 10" in str(client_error(conversation.check_room))
    conversation.truncate("a", 0, 9)
    conversation.check_room()


def test_an_answer_stands_behind_what_it_answers() -> None:
    conversation = filled("a", "b")
    assert conversation.add_answer(answer("r1"), "a") == "a"
    assert conversation.add_answer(answer("r2"), "gone") == "b"
    assert conversation.add_answer(answer("r0"), None) is None
    assert ids(conversation) == ["r0", "a", "r1", "b", "r2"]


def test_an_answer_grows_in_its_place_and_is_in_no_prompt_before() -> None:
    conversation = filled("a")
    conversation.add_answer(answer("r", "half"), "a")
    conversation.add(item(said("user", "next", "b")))
    assert len(messages(conversation)) == 2
    assert conversation.finish_answer(answer("r", "whole", "completed"))
    assert ids(conversation) == ["a", "r", "b"]
    assert messages(conversation)[1] == {"role": "assistant", "content": "whole"}


def test_an_answer_that_was_replaced_while_it_grew_does_not_come_back() -> None:
    """Delete and create, with which a client tells what was heard, may overtake the answer's end."""
    conversation = filled("a")
    conversation.add_answer(answer("r"), "a")
    conversation.delete("r")
    assert not conversation.finish_answer(answer("r", "all of it", "completed"))
    conversation.add(item(said("assistant", "heard", "r")), "a")
    assert not conversation.finish_answer(answer("r", "all of it", "completed"))
    assert conversation.get("r").text == "heard"


def test_a_cut_says_what_is_left() -> None:
    conversation = filled("a", "b")
    assert conversation.truncate("a", 0, 4).wire()["content"] == [{"type": "output_text", "text": "text"}]
    assert conversation.num_bytes == 4 + len("text of b")
    assert conversation.truncate("a", 0, 4).text == "text"
    assert conversation.truncate("a", 0, 0, audio_end_ms=300).text == ""
    assert messages(conversation) == ({"role": "assistant", "content": "text of b"},)
    assert ids(conversation) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "param", "said_of_it"),
    [
        (("a", 0, 5), "text_end", "at most the 4 characters of the part's text, got 5"),
        (("a", 1, 0), "content_index", "less than the item's 1 content parts, got 1"),
        (("empty", 0, 0), "content_index", "the item's 0 content parts"),
        (("a", 0, None, 1500), "audio_end_ms", "no audio to cut at 'audio_end_ms', got 1500 ms"),
        (("a", 0, None), "audio_end_ms", "give 'text_end'"),
        (("u", 0, 1), "item_id", "this is a message of user"),
        (("f", 0, 1), "item_id", "this is a function_call"),
        (("r", 0, 1), "item_id", "this is still written"),
    ],
)
def test_what_was_not_said_cannot_have_been_heard(
    arguments: tuple[Any, ...], param: str, said_of_it: str
) -> None:
    conversation = Conversation()
    conversation.add(item(said("assistant", "aé🙂b", "a")))
    conversation.add(item({"type": "message", "role": "assistant", "content": [], "id": "empty"}))
    conversation.add(item(said("user", "hello", "u")))
    conversation.add(item(call("f", "{}", "c", "f")))
    conversation.add_answer(answer("r", "so far"), "f")
    before = list(conversation)
    error = client_error(lambda: conversation.truncate(*arguments))
    assert isinstance(error, NothingToHear)
    assert error.param == param
    assert said_of_it in str(error)
    assert list(conversation) == before


Plain = list[tuple[str, str]]  # id and text of each item
MAX_ITEMS, MAX_BYTES = 12, 400


def inserted(plain: Plain, item_id: str, text: str, previous: str | None) -> Plain | None:
    """What adding gives; None: it is refused."""
    known = [each for each, _ in plain]
    if item_id in known or previous not in (None, "root", *known):
        return None
    at = len(plain) if previous is None else 0 if previous == "root" else known.index(previous) + 1
    changed = [*plain[:at], (item_id, text), *plain[at:]]
    too_much = len(changed) > MAX_ITEMS or num_bytes(changed) > MAX_BYTES
    return None if too_much else changed


def cut_to(plain: Plain, item_id: str, end: int) -> Plain | None:
    if not any(each == item_id and end <= len(text) for each, text in plain):
        return None
    return [(each, text[:end] if each == item_id else text) for each, text in plain]


def without(plain: Plain, item_id: str) -> Plain | None:
    rest = [each for each in plain if each[0] != item_id]
    return rest if len(rest) < len(plain) else None


def num_bytes(plain: Plain) -> int:
    return sum(len(text.encode()) for _, text in plain)


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_changes_is_that_of_a_plain_list(seed: int) -> None:
    chance = random.Random(seed)
    conversation, plain = Conversation(MAX_ITEMS, MAX_BYTES), Plain()
    num_done: Counter[str] = Counter()
    for _ in range(400):
        names = [f"i{number}" for number in range(16)]
        act, target, other = chance.choice(("add", "add", "delete", "cut")), *chance.sample(names, 2)
        text, end = chance.choice("aé🙂") * chance.randrange(30), chance.randrange(30)
        previous = chance.choice((None, "root", other))
        wanted: Plain | None
        do: Callable[[], object]
        if act == "add":
            wanted = inserted(plain, target, text, previous)
            do = partial(conversation.add, item(said("assistant", text, target)), previous)
        elif act == "cut":
            wanted = cut_to(plain, target, end)
            do = partial(conversation.truncate, target, 0, end)
        else:
            wanted = without(plain, target)
            do = partial(conversation.delete, target)
        if wanted is None:
            client_error(do)
        else:
            do()
            plain = wanted
            num_done[act] += 1
        assert [(each.id, each.text) for each in conversation] == plain
        assert conversation.num_bytes == num_bytes(plain)
        assert [each["content"] for each in messages(conversation)] == [text for _, text in plain if text]
    assert min(num_done.values()) > 10
    assert len(num_done) == 3


def test_conversations_share_a_memory() -> None:
    """What one gives back, another may take; an answer is always taken."""
    memory = Memory(100)
    first, second = Conversation(memory=memory), Conversation(memory=memory)
    first.add(item(said("user", "x" * 60, "a")))
    second.add(item(said("user", "x" * 30, "b")))
    with pytest.raises(ConversationsFull, match="would have 101 bytes; the limit is 100"):
        second.add(item(said("user", "x" * 11, "c")))
    assert second.add_answer(answer("d"), "b") == "b"
    second.finish_answer(answer("d", "y" * 20, "completed"))
    assert memory.num_bytes == 110
    with pytest.raises(ConversationsFull):
        first.check_room()
    first.delete("a")
    assert memory.num_bytes == 50
    second.truncate("d", 0, 5)
    assert memory.num_bytes == 35
    second.close()
    assert memory.num_bytes == 0
    second.add_answer(answer("e", "late"), "b")
    assert memory.num_bytes == 0
