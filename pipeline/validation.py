"""Hop 3, first half: is this request small enough, and is its text made of characters that we take?

All of it happens before any rendering or tokenizing. Types and ranges of fields are the schema's business
(`gateway/`), tokens are counted in `assembly.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from pipeline.errors import InvalidRequest
from pipeline.leaves import Request, find, leaves, mapped, replaced, untrusted
from pipeline.values import ChatRequest, CompletionRequest, Json

# Neither tokenizers nor C strings can carry these.
_UNENCODABLE: Final = "\x00\ud800-\udfff"
# C0 but tab and line ends, DEL, C1, bidi embeddings, overrides and isolates, tag characters. U+200D is none
# of them: emoji need it. Flags of England, Scotland and Wales are spelled with tag characters.
_OTHERS: Final = "\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f"


@dataclass(frozen=True, slots=True)
class InputLimits:
    """How large a request may be. Characters and bytes (of UTF-8) count over all of its text."""

    max_characters: int = 4_000_000  # about 1M tokens
    max_bytes: int = 16 << 20  # half of the largest body: the rest is JSON
    max_messages: int = 4096
    max_parts: int = 16_384  # content parts over all messages


@dataclass(frozen=True, slots=True)
class ControlPolicy:
    """What happens to NUL and lone surrogates, which nothing behind us can carry, and to others."""

    unencodable: Literal["reject", "strip"] = "reject"
    others: Literal["reject", "strip", "keep"] = "keep"

    def characters(self, action: str) -> re.Pattern[str] | None:
        """Matches one or more characters that this action is for; None if there are none."""
        classes = (self.unencodable == action) * _UNENCODABLE + (self.others == action) * _OTHERS
        return re.compile(f"[{classes}]+") if classes else None


class Validator:
    """Checks requests against limits and a policy for control characters. Shared by all requests."""

    def __init__(self, limits: InputLimits | None = None, policy: ControlPolicy | None = None) -> None:
        policy = policy or ControlPolicy()
        self._limits = limits or InputLimits()
        self._rejected = policy.characters("reject")
        self._stripped = policy.characters("strip")

    def check(self, request: Request) -> Request:
        """The request, without the characters that are stripped.

        Raises `InvalidRequest` that names the field, the number or code point read, and what is allowed.
        """
        if isinstance(request, ChatRequest):
            self._check_counts(request)
        fields = untrusted(request)
        texts = list(leaves(list(fields.values())))
        self._check_size(texts, _main_field(request))
        if self._rejected is not None and any(map(self._rejected.search, texts)):
            self._refuse_character(fields, self._rejected)
        stripped = self._stripped
        if stripped is None or not any(map(stripped.search, texts)):
            return request
        cleaned = {name: mapped(value, lambda text: stripped.sub("", text)) for name, value in fields.items()}
        return replaced(request, cleaned)

    def _check_counts(self, request: ChatRequest) -> None:
        num_messages, limits = len(request.messages), self._limits
        _check(num_messages, limits.max_messages, "messages", "messages")
        contents = (message.get("content") for message in request.messages)
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        _check(num_parts, limits.max_parts, "content parts", "messages")

    def _check_size(self, texts: list[str], field: str) -> None:
        _check(sum(map(len, texts)), self._limits.max_characters, "characters of text", field)
        _check(sum(map(_num_bytes, texts)), self._limits.max_bytes, "bytes of text", field)

    def _refuse_character(self, fields: dict[str, Json], rejected: re.Pattern[str]) -> None:
        found = find(fields, rejected.search)
        assert found is not None, "a leaf had such a character"
        path, text = found
        match = rejected.search(text)
        assert match is not None
        raise InvalidRequest(
            f"{path} holds the character U+{ord(match[0][0]):04X} at position {match.start()}; "
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
