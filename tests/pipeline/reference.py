"""What a prompt's ids must be, found without any code of `pipeline/`: by Hugging Face's own tokenizer class.

    Reference.ids(chat)          `apply_chat_template` itself, for texts without control strings
    Reference.harmless_ids(chat)  the same where every control string that a client wrote is ordinary text

The second one knows no segments. A dangerous string of the client becomes one private character, which no
template trims; the strings that a template looks for in a message become the same characters in a copy of the
template. So every control string in what is rendered is the template's. These get private names, the client's
strings come back, and a tokenizer whose control tokens have those private names encodes the whole: with all
that its tokens do to their neighbours, and with the client's strings as the text that they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

Json = Any
# Roles that a template may make a control string of, as Phi-3's does: `'<|' + message['role'] + '|>'`.
KNOWN_ROLES: Final = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "model", "ipython", "observation"}
)
_NAME_START: Final = 0x10A000  # private characters of plane 16: for a control token's other name …
_MASK_START: Final = 0x100000  # … and for a client's dangerous strings. No chat may hold any of these.
_PRIVATE: Final = re.compile(f"[{chr(_MASK_START)}-{chr(_NAME_START + 0xFFF)}]")
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as Hugging Face takes it: messages, and the arguments of `apply_chat_template`."""

    messages: Sequence[Mapping[str, Json]]
    tools: Sequence[Mapping[str, Json]] | None = None
    documents: Sequence[Mapping[str, Json]] | None = None
    kwargs: Mapping[str, Json] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Reference:
    """One model's reference. `parsed`: template code that looks for a control string -> that string.

    `template` and `special_tokens` are read from the model's files unless given.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        template: str | None,
        special_tokens: Mapping[str, str],
        parsed: Mapping[str, str] | None = None,
    ) -> None:
        self._file = tokenizer_file
        self.template = template
        self._special_tokens = special_tokens
        self._parsed = parsed or {}
        added = _config(tokenizer_file)["added_tokens"]
        self.controls = {
            token["content"]: token["id"]
            for token in added
            if token["special"] or (token["content"].strip() and token["content"] in (template or ""))
        }
        longest_first = sorted(self.controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def from_folder(cls, folder: Path, parsed: Mapping[str, str] | None = None) -> Reference:
        """The reference of a model's folder."""
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
        named = {name: config.get(name) for name in _NAMED}
        texts = {
            name: value["content"] if isinstance(value, dict) else value for name, value in named.items()
        }
        file = folder / "chat_template.jinja"
        template = file.read_text() if file.exists() else config.get("chat_template")
        special_tokens = {name: text for name, text in texts.items() if text is not None}
        return cls(folder / "tokenizer.json", template, special_tokens, parsed)

    @cached_property
    def hugging_face(self) -> Any:
        """The reference tokenizer. AutoTokenizer would be another one for DeepSeek's folder."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_file=str(self._file),
            chat_template=self.template,
            **self._special_tokens,
        )

    def ids(self, chat: Chat) -> list[int]:
        """The ids of a chat, straight from Hugging Face."""
        ids: list[int] = self.hugging_face.apply_chat_template(
            list(chat.messages), return_dict=False, **_arguments(chat), **chat.kwargs
        )
        return ids

    def raw_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a raw prompt."""
        ids: list[int] = self.hugging_face(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def harmless_ids(self, chat: Chat) -> list[int]:
        """The ids of a chat with control strings in its leaves, all of them plain text."""
        rendered, mask = self._masked(chat)
        return self._renamed_ids(
            mask.lifted(self._control.sub(lambda match: self._names[match[0]], rendered))
        )

    def harmless_ids_in_runs(self, chat: Chat) -> list[int]:
        """The same by definition: control tokens as such, each run of text between them by a tokenizer
        without them. Only for tokenizers that begin anew after a control token."""
        rendered, mask = self._masked(chat)
        tokenizer, real = self._renamed
        ids: list[int] = []
        for piece in re.split(f"({self._control.pattern})", rendered):
            if piece in self.controls:
                ids.append(self.controls[piece])
            else:
                run = tokenizer.encode(mask.lifted(piece), add_special_tokens=False).ids
                ids += [real.get(id_, id_) for id_ in run]
        return ids

    def _masked(self, chat: Chat) -> tuple[str, _Mask]:
        """The rendered chat in which all control strings are the template's, and what lifts the mask."""
        assert not _PRIVATE.search(json.dumps([chat.messages, chat.tools, chat.kwargs], ensure_ascii=False))
        mask = _Mask(self._control, *self._halves)
        template = self.template or ""
        for code, control in self._parsed.items():
            assert code in template, f"the template no longer has {code}"
            template = template.replace(code, code.replace(control, mask.character(control)))
        masked = mask.chat(chat)
        rendered: str = self.hugging_face.apply_chat_template(
            masked.messages, chat_template=template, tokenize=False, **_arguments(masked), **masked.kwargs
        )
        return rendered, mask

    @cached_property
    def _halves(self) -> tuple[frozenset[str], frozenset[str]]:
        """All proper beginnings of control strings, and all proper ends."""
        cuts = [(text, at) for text in self.controls for at in range(1, len(text))]
        return frozenset(text[:at] for text, at in cuts), frozenset(text[at:] for text, at in cuts)

    @cached_property
    def _names(self) -> dict[str, str]:
        """Control string -> its private name."""
        return {control: chr(_NAME_START + index) for index, control in enumerate(self.controls)}

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer whose control tokens have their private names, and its ids -> the real ids."""
        config = _config(self._file)
        real = {}
        for token in config["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
            real[token["content"]] = token["id"]
        tokenizer = Tokenizer.from_str(json.dumps(config))
        ids = [(tokenizer.token_to_id(content), id_) for content, id_ in real.items()]
        return tokenizer, {new: id_ for new, id_ in ids if new is not None and new != id_}

    def _renamed_ids(self, text: str) -> list[int]:
        tokenizer, real = self._renamed
        return [real.get(id_, id_) for id_ in tokenizer.encode(text, add_special_tokens=False).ids]


def _config(tokenizer_file: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(tokenizer_file.read_bytes())
    return config


def _arguments(chat: Chat) -> dict[str, Any]:
    return {
        "tools": chat.tools,
        "documents": chat.documents,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
    }


class _Mask:
    """Dangerous strings -> one private character each, and back."""

    def __init__(self, control: re.Pattern[str], heads: frozenset[str], tails: frozenset[str]) -> None:
        self._control = control
        self._heads = heads
        self._tails = tails
        self._longest = max(map(len, heads), default=0)
        self._characters: dict[str, str] = {}

    def character(self, text: str) -> str:
        """The private character of a dangerous string."""
        return self._characters.setdefault(text, chr(_MASK_START + len(self._characters)))

    def chat(self, chat: Chat) -> Chat:
        """The chat with all its leaves masked; a role that no template knows as a whole."""
        return Chat(
            [self._value(message) for message in chat.messages],
            self._value(chat.tools),
            self._value(chat.documents),
            self._value(chat.kwargs, is_names=True),
            chat.add_generation_prompt,
            chat.continue_final_message,
        )

    def lifted(self, text: str) -> str:
        """The text with the strings back."""
        table = {ord(character): text for text, character in self._characters.items()}
        return text.translate(table)

    def _value(self, value: Json, is_names: bool = False) -> Json:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {
                key if is_names else self._text(key): self._field(key, child) for key, child in value.items()
            }
        return [self._value(child) for child in value] if isinstance(value, list | tuple) else value

    def _field(self, key: str, value: Json) -> Json:
        if key == "role" and isinstance(value, str):
            return value if value in KNOWN_ROLES else self.character(value)
        return self._value(value)

    def _text(self, text: str) -> str:
        """Whole control strings, and those parts of one with which the text begins or ends."""
        pieces = self._control.split(text)
        pieces[0] = self._head_masked(pieces[0])
        pieces[-1] = self._tail_masked(pieces[-1])
        masked = [self.character(control) for control in self._control.findall(text)]
        return "".join(part for pair in zip(pieces, [*masked, ""], strict=True) for part in pair)

    def _head_masked(self, text: str) -> str:
        for length in range(min(len(text), self._longest), 0, -1):
            if text[:length] in self._tails:
                return self.character(text[:length]) + text[length:]
        return text

    def _tail_masked(self, text: str) -> str:
        for length in range(min(len(text), self._longest), 0, -1):
            if text[-length:] in self._heads:
                return text[:-length] + self.character(text[-length:])
        return text


def by_model(prepare: Callable[[Mapping[str, Json]], Mapping[str, Json]], body: Mapping[str, Json]) -> Chat:
    """An OpenAI-shaped body as a chat; `prepare` makes of a message what this model's template takes."""
    return Chat(
        [prepare(message) for message in body["messages"]],
        body.get("tools"),
        body.get("documents"),
        body.get("chat_template_kwargs") or {},
        body.get("add_generation_prompt", True) and not body.get("continue_final_message", False),
        body.get("continue_final_message", False),
    )
