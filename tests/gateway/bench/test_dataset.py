import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.bench import dataset
from gateway.bench.dataset import Record, read_records

CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a\u2028b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]
SHARE_GPT = [
    {"from": "human", "value": "a"},
    {"from": "gpt", "value": "b"},
    {"from": "human", "value": "c"},
    {"from": "gpt", "value": "d"},
]


def records(tmp_path: Path, *lines: Any, max_turns: int = 1, is_chat: bool = True) -> list[Record]:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    return read_records(file, max_turns, is_chat)


def contents(record: Record) -> list[list[str]]:
    return [[message["content"] for message in turn] for turn in record.turns]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    for text in ('{"prompt": "a"}', '[{"prompt": "a"}]'):
        file.write_text(text, encoding="utf-8-sig")
        assert contents(*read_records(file, 1, True)) == [["a"]]


def test_a_prompt_is_a_users_message(tmp_path: Path) -> None:
    (record,) = records(tmp_path, {"prompt": "hello", "output_tokens": 5, "id": 1})
    assert record == Record((({"role": "user", "content": "hello"},),), 5)


def test_messages_are_sent_whole_in_one_turn_less_the_answer_at_the_end(tmp_path: Path) -> None:
    (record,) = records(tmp_path, {"messages": CHAT, "max_tokens": 7})
    assert record == Record((tuple(CHAT[:4]),), 7)


def test_messages_become_turns_without_their_answers(tmp_path: Path) -> None:
    (record,) = records(tmp_path, {"messages": CHAT}, max_turns=5)
    assert contents(record) == [["s", "a\u2028b"], ["d"]]
    assert record.output_tokens is None
    assert contents(records(tmp_path, {"messages": CHAT * 3}, max_turns=2)[0]) == [["s", "a\u2028b"], ["d"]]


def test_contents_may_be_lists_of_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "x"}]
    (record,) = records(tmp_path, {"messages": [{"role": "user", "content": parts}]})
    assert record.turns[0][0]["content"] == parts


def test_sharegpt_gives_its_first_question_or_its_turns(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    file.write_text(json.dumps([{"id": "x", "conversations": SHARE_GPT}, {"conversations": SHARE_GPT[1:]}]))
    assert [contents(each) for each in read_records(file, 1, True)] == [[["a"]], [["c"]]]
    assert [contents(each) for each in read_records(file, 4, True)] == [[["a"], ["c"]], [["c"]]]


def test_empty_lines_are_none_and_count(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('\n{"prompt": "a"}\r\n\n{"prompt": 5}\n')
    with pytest.raises(ValueError, match=re.escape(f"{file}:4: prompt is 5")):
        read_records(file, 1, True)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ([1], "item 1: 1 is not an object"),
        ({}, ":1: has none of messages, prompt, conversations; it must have 1"),
        ({"prompt": "a", "messages": CHAT}, ":1: has messages and prompt of"),
        ({"prompt": ""}, ':1: prompt is ""; it must be a text that is not empty'),
        ({"messages": []}, ":1: messages is []; it must be a list that is not empty"),
        ({"messages": "x" * 99}, f':1: messages is "{"x" * 36}...; it must be a list'),
        ({"messages": [{"content": "a"}]}, ':1: messages[0] is {"content":"a"}; it must be an object with'),
        ({"messages": [CHAT[0], {"role": "user", "content": 5}]}, ":1: messages[1].content is 5; it must be"),
        ({"messages": CHAT[:1]}, None),
        ({"messages": [CHAT[2]]}, ":1: has no message of a user; at least 1 is needed"),
        ({"conversations": [{"from": "human"}]}, ':1: conversations[0] is {"from":"human"}'),
        ({"conversations": SHARE_GPT[1:2]}, ":1: has no message of a user"),
        ({"prompt": "a", "max_tokens": 0}, ":1: max_tokens is 0; it must be a whole number of at least 1"),
        ({"prompt": "a", "output_tokens": True}, ":1: output_tokens is true"),
        ({"prompt": "a", "output_tokens": 1.5}, ":1: output_tokens is 1.5"),
    ],
)
def test_a_bad_entry_is_told_with_its_line_and_field(tmp_path: Path, line: Any, told: str | None) -> None:
    if told is None:
        assert records(tmp_path, line)
        return
    with pytest.raises(ValueError, match=re.escape(told)):
        records(tmp_path, line)


def test_messages_need_the_chat_endpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=":2: messages needs --endpoint chat"):
        records(tmp_path, {"prompt": "a"}, {"messages": CHAT}, is_chat=False)


def test_a_file_that_is_not_json_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    for data, told in (
        (b'{"prompt": "a"}\n{', ":2: not JSON"),
        (b'{"a": "\xff"}', ":1: not JSON"),
        (b"[", ": not JSON"),
        (b"[" * 20_000, ": not JSON that can be read: maximum recursion depth"),
    ):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=re.escape(f"{file}{told}")):
            read_records(file, 1, True)


def test_a_file_that_is_missing_empty_or_too_large_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"no\.jsonl cannot be read: No such file"):
        read_records(tmp_path / "no.jsonl", 1, True)
    with pytest.raises(ValueError, match=r"data\.jsonl has no entries; at least 1 is needed"):
        records(tmp_path)
    monkeypatch.setattr(dataset, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match=r"data\.jsonl has 17 bytes or more; at most 10 are read"):
        records(tmp_path, {"prompt": "abc"})
    with pytest.raises(ValueError, match=r"zero has 11 bytes or more; at most 10 are read"):
        read_records(Path("/dev/zero"), 1, True)
