"""Hop 3, first half: is this request small enough, and is its text made of characters that we take?

All of it happens before any rendering or tokenizing. Types and ranges of fields are the schema's business
(`gateway/`), and tokens are counted where they are made (`context_policy.py`, `assembly.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic

from pipeline.control_characters import ControlCharacters, ControlPolicy
from pipeline.errors import InvalidRequest
from pipeline.leaves import Request, find, leaves, mapped, replaced, untrusted
from pipeline.values import ChatRequest, CompletionRequest, Json

_MAX_PATH_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class InputLimits:
    """How large a request may be. Characters and bytes (of UTF-8) count over all of its text."""

    max_characters: int = 4_000_000  # about 1M tokens
    max_bytes: int = 16 << 20  # half of the largest body: the rest is JSON
    max_messages: int = 4096
    max_parts: int = 16_384  # content parts over all messages
    max_values: int = 131_072  # fields of objects and members of arrays; 3 to 25 ms to walk


@dataclass(frozen=True, slots=True)
class Checked(Generic[Request]):
    """A request that may go on, and all of its leaves one after another: what is not in `text`, none has."""

    request: Request
    text: str


class Validator:
    """Checks requests against limits and a policy for control characters. Shared by all requests."""

    def __init__(self, limits: InputLimits | None = None, policy: ControlPolicy | None = None) -> None:
        self._limits = limits or InputLimits()
        self._characters = ControlCharacters(policy or ControlPolicy())

    def check(self, request: Request) -> Checked[Request]:
        """The request, without the characters that are stripped.

        Raises `InvalidRequest` that names the field, the number or code point read, and what is allowed.
        """
        if isinstance(request, ChatRequest):
            self._check_counts(request)
        fields = untrusted(request)
        texts = leaves(list(fields.values()), self._limits.max_values)
        text = "".join(texts)
        self._check_size(text, _main_field(request))
        if not self._characters.suspects(text):
            return Checked(request, text)
        self._refuse_characters(fields)
        cleaned = list(map(self._characters.strip, texts))
        if cleaned == texts:
            return Checked(request, text)
        fields = {name: mapped(value, self._characters.strip) for name, value in fields.items()}
        return Checked(replaced(request, fields), "".join(cleaned))

    def _check_counts(self, request: ChatRequest) -> None:
        num_messages, limits = len(request.messages), self._limits
        _check(num_messages, limits.max_messages, "messages", "messages")
        contents = [message.get("content") for message in request.messages]
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        _check(num_parts, limits.max_parts, "content parts", "messages")

    def _check_size(self, text: str, field: str) -> None:
        _check(len(text), self._limits.max_characters, "characters of text", field)
        if 4 * len(text) > self._limits.max_bytes:  # else it cannot have as many
            _check(_num_bytes(text), self._limits.max_bytes, "bytes of text", field)

    def _refuse_characters(self, fields: dict[str, Json]) -> None:
        """Raises `InvalidRequest` if a leaf holds a character that is rejected."""
        found = find(fields, self._characters.rejected)
        if found is None:
            return
        path, text = found
        path = self._characters.strip(path)[:_MAX_PATH_CHARS]  # the client's own keys are in it
        place = self._characters.rejected(text)
        assert place is not None, "this leaf had such a character"
        position, code_point = place
        raise InvalidRequest(
            f"{path} holds the character U+{code_point:04X} at position {position}; "
            f"this server takes no such control characters.",
            path,
        )


def _check(number: int, limit: int, what: str, field: str) -> None:
    if number > limit:
        raise InvalidRequest(f"The request has {number} {what}; the limit is {limit}.", field)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _main_field(request: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"
