"""Conversations from a file: JSON lines with `messages` or `prompt`, or ShareGPT's `conversations`.

Not here: made-up prompts (`gateway/bench/prompts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.bench.conversation import Message

MAX_FILE_BYTES: Final = 1 << 30
_KEYS: Final = ("messages", "prompt", "conversations")
_LENGTH_KEYS: Final = ("max_tokens", "output_tokens")
_SPEAKERS: Final = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


class Record(msgspec.Struct, frozen=True):
    """One entry: for each turn what the user adds. `output_tokens`: of each answer, None where not said."""

    turns: tuple[tuple[Message, ...], ...]
    output_tokens: int | None = None


def read_records(path: Path, max_turns: int, is_chat: bool) -> list[Record]:
    """The entries of a file: a JSON array, or a JSON object on each line.

    `messages` are sent as they are where `max_turns` is 1 (less answers at their end), and else as a
    conversation whose answers the server gives anew; so are ShareGPT's, from their first question. Raises
    `ValueError` that names the line (or the number of the item) and the field.
    """
    records = [_record(entry, where, max_turns, is_chat) for where, entry in _entries(path)]
    if not records:
        raise ValueError(f"{path} has no entries; at least 1 is needed")
    return records


def read_bytes(path: Path) -> bytes:
    """A file's bytes. Raises `ValueError` for more than `MAX_FILE_BYTES`, also of a device without end."""
    try:
        size = path.stat().st_size
        if size <= MAX_FILE_BYTES:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            size = len(data)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size} bytes or more; at most {MAX_FILE_BYTES} are read")
    return data


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each entry with the words for where it stands."""
    data = read_bytes(path).removeprefix(b"\xef\xbb\xbf")  # Windows' editors write one
    if data.lstrip()[:1] == b"[":
        items = _decode(data, str(path))
        yield from ((f"{path}: item {number}", item) for number, item in enumerate(items, 1))
        return
    # Only LF ends a line: U+2028 and its like are text.
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield f"{path}:{number}", _decode(line, f"{path}:{number}")


def _decode(data: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON that can be read: {error}") from error


def _record(entry: Any, where: str, max_turns: int, is_chat: bool) -> Record:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: {_shown(entry)} is not an object")
    keys = [key for key in _KEYS if key in entry]
    if len(keys) != 1:
        raise ValueError(f"{where}: has {' and '.join(keys) or 'none'} of {', '.join(_KEYS)}; it must have 1")
    if keys == ["prompt"]:
        turns = [_prompt(entry["prompt"], where)]
    else:
        if not is_chat:
            raise ValueError(f"{where}: {keys[0]} needs --endpoint chat; --endpoint completions takes prompt")
        read = _messages if keys == ["messages"] else _conversations
        turns = _turns(list(read(entry[keys[0]], where)), where, max_turns, is_whole=keys == ["messages"])
    return Record(tuple(turns), _output_tokens(entry, where))


def _prompt(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: prompt is {_shown(value)}; it must be a text that is not empty")
    return ({"role": "user", "content": value},)


def _messages(value: Any, where: str) -> Iterator[Message]:
    for number, message in enumerate(_list(value, "messages", where)):
        name = f"{where}: messages[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{name} is {_shown(message)}; it must be an object with role and content")
        if not isinstance(message.get("content"), str | list) and message["role"] != "assistant":
            raise ValueError(
                f"{name}.content is {_shown(message.get('content'))}; it must be a text or a list"
            )
        yield message


def _conversations(value: Any, where: str) -> Iterator[Message]:
    for number, said in enumerate(_list(value, "conversations", where)):
        name = f"{where}: conversations[{number}]"
        if not isinstance(said, dict) or not isinstance(said.get("value"), str):
            raise ValueError(f"{name} is {_shown(said)}; it must be an object with from and value")
        yield {"role": _SPEAKERS.get(str(said.get("from")), "system"), "content": said["value"]}


def _turns(
    messages: Sequence[Message], where: str, max_turns: int, is_whole: bool
) -> list[tuple[Message, ...]]:
    """`is_whole`: a single turn keeps the answers between its questions."""
    if max_turns == 1 and is_whole:
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        turns = [tuple(messages)] if messages else []
    else:
        turns = []
        pending: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                pending.append(message)
            if message["role"] == "user":
                turns.append(tuple(pending))
                pending = []
    if not turns:
        raise ValueError(f"{where}: has no message of a user; at least 1 is needed")
    return turns[:max_turns]


def _output_tokens(entry: dict[str, Any], where: str) -> int | None:
    for key in _LENGTH_KEYS:
        value = entry.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{where}: {key} is {_shown(value)}; it must be a whole number of at least 1")
        return value
    return None


def _list(value: Any, name: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {name} is {_shown(value)}; it must be a list that is not empty")
    return value


def _shown(value: Any) -> str:
    """The value read, short: a file's texts are not for the terminal."""
    written = msgspec.json.encode(value).decode()
    return written if len(written) <= 40 else f"{written[:37]}..."
