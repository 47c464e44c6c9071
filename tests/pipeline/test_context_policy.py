"""What is dropped from chats that are too long, against an oracle that tries everything."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.context_policy import (
    POLICIES,
    Fitted,
    Room,
    droppable,
    fit,
    room_for,
)
from pipeline.errors import ContextTooLong
from pipeline.middle_out import MARKER, MAX_TRIES
from pipeline.values import ChatRequest, Delivery, Dropped, Generation
from tests.pipeline.real_models import model

Message = dict[str, Any]


def request(*messages: Mapping[str, Any]) -> ChatRequest:
    return ChatRequest("m", messages, Generation({}), Delivery())


def message(role: str, content: str = "", **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def call(*ids: str | None) -> Message:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": {}}} for each in ids]
    return message("assistant", tool_calls=calls)


def result(of: str | None, content: str = "") -> Message:
    return message("tool", content, **({} if of is None else {"tool_call_id": of}))


def num_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """A token a character, and three a message."""
    return sum(3 + len(each["content"]) + 5 * len(each.get("tool_calls", ())) for each in messages)


class Counted:
    """Counts as the way in does: as a generator that waits now and then."""

    def __init__(self) -> None:
        self.num_counts = 0

    def __call__(self, candidate: ChatRequest) -> Generator[str, None, int]:
        self.num_counts += 1
        yield "need"
        return num_tokens(candidate.messages)


def run(chat: ChatRequest, policy: str, room: int, counted: Counted | None = None) -> Fitted:
    return ended(fit(chat, policy, num_tokens(chat.messages), Room(room + 7, 7), counted or Counted()))


def ended(steps: Generator[Any, Any, Fitted]) -> Fitted:
    while True:
        try:
            assert next(steps) == "need"
        except StopIteration as end:
            fitted: Fitted = end.value
            return fitted


# -- all policies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chat_that_fits_is_left_alone_and_not_counted(policy: str) -> None:
    chat, counted = request(message("user", "a" * 10)), Counted()
    assert run(chat, policy, 13, counted) == Fitted(chat)
    assert counted.num_counts == 0


def test_an_error_names_both_numbers() -> None:
    with pytest.raises(ContextTooLong, match=r"is 19 tokens.* 13 tokens and 7 were reserved"):
        run(request(message("user", "a" * 10)), "error", 12)


@pytest.mark.parametrize(
    ("max_tokens", "policy", "reserved"),
    [
        (50, "error", 50),
        (50, "drop_oldest", 50),
        (None, "error", 1),
        (None, "drop_oldest", 300),
        (None, "middle_out", 300),
    ],
)
def test_room_is_kept_for_the_answer(max_tokens: int | None, policy: str, reserved: int) -> None:
    room = room_for(Generation({}, max_tokens=max_tokens), policy, 300, 1000)
    assert (room.max_tokens, room.num_tokens) == (reserved, 1000 - reserved)


def test_the_default_for_the_answer_takes_half_of_a_short_context_at_most() -> None:
    assert room_for(Generation({}), "drop_oldest", 2048, 512).num_tokens == 256
    assert room_for(Generation({}), "drop_oldest", 2048, 1).max_tokens == 1


# -- drop_oldest ---------------------------------------------------------------------------------------------


def random_chat(rng: random.Random) -> list[Message]:
    """Turns with single, parallel and late results, odd ids, systems anywhere, users in a row."""
    chat: list[Message] = [message("system", "s" * rng.randint(0, 9))] * rng.choice([0, 1, 1, 2])
    if rng.random() < 0.2:
        chat.append(message("assistant", "hello"))
    late: list[Message] = []
    for turn in range(rng.randint(1, 7)):
        chat.append(message("user", "u" * rng.randint(0, 30)))
        for step in range(rng.choice([0, 0, 1, 2])):
            ids = [rng.choice([f"{turn}-{step}-{number}", "call_0"]) for number in range(rng.randint(1, 3))]
            ids = list(dict.fromkeys(ids))
            chat.append(call(*ids))
            results = [result(each, "r" * rng.randint(0, 20)) for each in ids]
            rng.shuffle(results)
            while results and results[0]["tool_call_id"] != "call_0" and rng.random() < 0.15:
                late.append(results.pop(0))
            chat += results
        if rng.random() < 0.8:
            chat.append(message("assistant", "a" * rng.randint(0, 30)))
        if rng.random() < 0.1:
            chat.append(message("developer", "d" * 5))
        if late and rng.random() < 0.5:
            chat.append(late.pop())
    return chat


def is_whole(chat: Sequence[Message], kept: Sequence[bool]) -> bool:
    """Whether every result is kept or dropped with its call, the latest before it with its id."""
    for index, each in enumerate(chat):
        if each["role"] == "tool":
            caller = max(
                before
                for before in range(index)
                if each["tool_call_id"] in [made["id"] for made in chat[before].get("tool_calls", ())]
            )
            if kept[caller] != kept[index]:
                return False
    return True


def by_trying(chat: Sequence[Message], room: int) -> list[Message] | None:
    """The oracle: the fewest oldest turns whose loss leaves a whole chat that fits."""
    users = [index for index, each in enumerate(chat) if each["role"] == "user"]
    for end in [0, *users]:
        kept = [index >= end or each["role"] in ("system", "developer") for index, each in enumerate(chat)]
        left = [each for each, is_kept in zip(chat, kept, strict=True) if is_kept]
        if is_whole(chat, kept) and num_tokens(left) <= room:
            return left
    return None


def check_dropping(rng: random.Random) -> bool:
    """Whether something was dropped."""
    chat = random_chat(rng)
    total = num_tokens(chat)
    room = rng.randint(0, total + 2)
    expected = by_trying(chat, room)
    if expected is None:
        with pytest.raises(ContextTooLong):
            run(request(*chat), "drop_oldest", room)
        return False
    fitted = run(request(*chat), "drop_oldest", room)
    assert list(fitted.request.messages) == expected
    last_user = max(index for index, each in enumerate(chat) if each["role"] == "user")
    assert expected[-(len(chat) - last_user) :] == chat[last_user:]
    if fitted.dropped is None:
        assert total <= room
        return False
    num_left = num_tokens(expected)
    assert fitted.dropped == Dropped("drop_oldest", len(chat) - len(expected), total - num_left)
    assert fitted.dropped.num_messages > 0
    return True


def test_dropping_is_whole_minimal_and_fits_for_random_chats() -> None:
    rng = random.Random(5)
    assert sum(check_dropping(rng) for _ in range(1500)) > 300


@pytest.mark.long
def test_dropping_is_whole_minimal_and_fits_for_many_random_chats() -> None:
    rng = random.Random(6)
    assert sum(check_dropping(rng) for _ in range(60_000)) > 10_000


def test_more_room_never_drops_more() -> None:
    rng = random.Random(7)
    for _ in range(60):
        chat = request(*random_chat(rng))
        kept = []
        for room in range(0, num_tokens(chat.messages) + 1, 3):
            try:
                kept.append(len(run(chat, "drop_oldest", room).request.messages))
            except ContextTooLong:
                assert not kept
        assert kept == sorted(kept)


def test_a_long_chat_is_counted_few_times() -> None:
    turns = [each for _ in range(2000) for each in (message("user", "u" * 9), message("assistant", "a" * 9))]
    counted = Counted()
    fitted = run(request(*turns), "drop_oldest", 12_000, counted)
    assert num_tokens(fitted.request.messages) == 12_000
    assert counted.num_counts <= 12


def test_roles_still_alternate_for_templates_that_want_it() -> None:
    turns = [message(role, "x" * 5) for _ in range(20) for role in ("user", "assistant")]
    chat = request(message("system", "s"), *turns, message("user", "last"))
    for room in range(12, num_tokens(chat.messages)):
        roles = [each["role"] for each in run(chat, "drop_oldest", room).request.messages]
        assert roles[0] == "system"
        assert roles[1::2] == ["user"] * len(roles[1::2])
        assert roles[2::2] == ["assistant"] * len(roles[2::2])


USER, ANSWER, SYSTEM = message("user"), message("assistant"), message("system")


@pytest.mark.parametrize(
    ("chat", "ends"),
    [
        ([], []),
        ([SYSTEM], []),
        ([USER], []),
        ([SYSTEM, USER, ANSWER], []),
        ([ANSWER], []),  # without a user's turn nothing is known to be old
        ([SYSTEM, ANSWER, USER], [2]),
        ([USER, ANSWER, USER], [2]),
        ([USER, USER, USER], [1, 2]),
        ([USER, call("1"), result("1"), ANSWER, USER], [4]),
        ([USER, call("1"), USER, result("1"), USER], [4]),
        ([USER, call("1"), USER, result("1")], []),
        ([USER, call("1", "2"), result("2"), USER, result("1"), ANSWER, USER], [6]),
        ([USER, call("1"), result("1"), USER, call("1"), result("1"), USER], [3, 6]),
        ([USER, call(None), result(None), USER, ANSWER, USER], [3, 5]),
        ([USER, call("1"), USER, result("unknown"), USER], [4]),
        ([USER, result("1"), USER], [2]),
    ],
)
def test_a_turn_ends_where_a_user_speaks_and_no_call_is_open(chat: list[Message], ends: list[int]) -> None:
    assert droppable(chat) == ends


def test_what_cannot_be_dropped_is_told_with_what_was_left() -> None:
    chat = request(message("system", "s" * 20), message("user", "u" * 50), message("user", "v" * 30))
    with pytest.raises(ContextTooLong, match="56 tokens"):
        run(chat, "drop_oldest", 55)
    assert num_tokens(run(chat, "drop_oldest", 56).request.messages) == 56


# -- middle_out ----------------------------------------------------------------------------------------------


def test_the_longest_text_loses_its_middle_and_all_else_stays() -> None:
    long = "".join(chr(ord("a") + number * 26 // 2000) for number in range(2000))
    chat = request(message("system", "s" * 5000), message("user", long), message("user", "u"))
    fitted = run(chat, "middle_out", 6000)
    system, cut, last = fitted.request.messages
    assert (system, last) == (chat.messages[0], chat.messages[2])
    head, tail = cut["content"].split(MARKER)
    assert long.startswith(head)
    assert long.endswith(tail)
    assert 0 <= len(head) - len(tail) <= 1
    num_left = num_tokens(fitted.request.messages)
    assert 6000 * 255 / 256 <= num_left <= 6000
    num_cut = len(long) - len(head) - len(tail)
    assert fitted.dropped == Dropped("middle_out", 0, num_tokens(chat.messages) - num_left, num_cut)


def test_a_part_of_a_content_is_cut_in_its_place() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b" * 900}]
    chat = replace(request(), messages=({"role": "user", "content": parts},))

    def count(candidate: ChatRequest) -> Generator[str, None, int]:
        yield "need"
        return sum(len(part["text"]) for part in candidate.messages[0]["content"])

    fitted = ended(fit(chat, "middle_out", 901, Room(500, 100), count))
    first, second = fitted.request.messages[0]["content"]
    assert first == parts[0]
    assert second["type"] == "text"
    assert 390 < len(second["text"]) < 400
    assert chat.messages[0]["content"] is parts
    assert len(parts[1]["text"]) == 900


def test_the_systems_text_is_cut_only_where_there_is_no_other() -> None:
    with pytest.raises(ContextTooLong):
        run(request(message("system", "s" * 500), message("user", "u")), "middle_out", 200)
    fitted = run(request(message("system", "s" * 500)), "middle_out", 200)
    assert MARKER in fitted.request.messages[0]["content"]


def test_a_chat_without_text_is_refused() -> None:
    with pytest.raises(ContextTooLong, match="13 tokens"):
        run(request(call("1", "2")), "middle_out", 5)


def test_middle_out_keeps_as_much_as_fits_for_random_chats() -> None:
    rng = random.Random(8)
    for _ in range(300):
        chat = request(*random_chat(rng))
        total, counted = num_tokens(chat.messages), Counted()
        room = rng.randint(0, total)
        longest = max(
            len(each["content"]) for each in chat.messages if each["role"] not in ("system", "developer")
        )
        try:
            fitted = run(chat, "middle_out", room, counted)
        except ContextTooLong:
            assert total - longest + len(MARKER) > room
            continue
        if total > room:
            assert num_tokens(fitted.request.messages) == room
        assert counted.num_counts <= MAX_TRIES


# -- real templates and tokenizers ---------------------------------------------------------------------------


class Real:
    """Counts with a real model's template and tokenizer."""

    def __init__(self, name: str) -> None:
        text = model(name).text
        assert text.chat_template is not None
        self._template = text.chat_template
        self._encode = text.tokenizer.encode_batch_fast
        self.num_counts = 0

    def __call__(self, candidate: ChatRequest) -> Generator[str, None, int]:
        self.num_counts += 1
        yield "need"
        return self.num_tokens(candidate)

    def num_tokens(self, chat: ChatRequest) -> int:
        rendered = self._template.render(chat, 0.0).text
        return len(self._encode([rendered], add_special_tokens=False)[0].ids)

    def fit(self, chat: ChatRequest, policy: str, room: int) -> Fitted:
        return ended(fit(chat, policy, self.num_tokens(chat), Room(room + 7, 7), self))


def test_a_template_that_wants_alternation_takes_what_is_left() -> None:
    real = Real("gemma3")
    rng = random.Random(9)
    turns = [message(role, "word " * rng.randint(1, 50)) for _ in range(12) for role in ("user", "assistant")]
    chat = request(message("system", "Be brief."), *turns, message("user", "And now?"))
    total = real.num_tokens(chat)
    for room in range(40, total, total // 20):
        fitted = real.fit(chat, "drop_oldest", room)
        num_left = real.num_tokens(fitted.request)
        num_dropped = len(chat.messages) - len(fitted.request.messages)
        assert fitted.dropped == Dropped("drop_oldest", num_dropped, total - num_left)
        one_more = request(chat.messages[0], *chat.messages[num_dropped - 1 :])
        assert num_left <= room < real.num_tokens(one_more)


def test_real_text_is_cut_near_the_limit_in_few_counts() -> None:
    real = Real("qwen3")
    words = [chr(code) for code in range(0x4E00, 0x5E00)]
    text = "The quick brown fox. " * 2000 + "".join(words) * 3 + "{'x': [1, 2]}\n" * 1000
    chat = request(message("system", "Be brief."), message("user", text), message("assistant", "Yes?"))
    total = real.num_tokens(chat)
    for room in (100, 1000, 8000):
        real.num_counts = 0
        fitted = real.fit(chat, "middle_out", room)
        num_left = real.num_tokens(fitted.request)
        assert room - max(1, room // 256) <= num_left <= room
        assert fitted.dropped is not None
        assert fitted.dropped.num_tokens == total - num_left
        assert real.num_counts <= 8
