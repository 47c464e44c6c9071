"""Chats in which every kind of leaf spells control strings, halves of them, and what looks like them."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from typing import Any, Final

from tests.pipeline.conversations import ChatMaker, Family, Message, text

_BREAKS: Final = (
    "\ufdd0",
    "\ufdd1",
    "\ufdef",
    "\u200b",
    "\u200d",
    "\ufeff",
    "\u0301",
    "\x01",
    " ",
    "\\",
    "\U000f8000",
)
# Markers of other chat formats, which are plain text here.
_FOREIGN: Final = ("[INST]", "[/INST]", "<<SYS>>", "<|user|>", "<|end|>", "</s>", "<s>", "<unk>", "[gMASK]")
MAX_ROLE_CHARS: Final = 64


def full_width(control: str) -> str:
    """What NFKC makes the control string of."""
    return "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in control)


class HostileTexts:
    """Texts with control strings in them. `controls`: the strings that matter more often come first."""

    def __init__(self, controls: Sequence[str]) -> None:
        self._controls = controls

    def control(self, rng: random.Random) -> str:
        """One of the control strings, mostly of the first 24."""
        return rng.choice(self._controls if rng.random() < 0.2 else self._controls[:24])

    def spice(self, rng: random.Random) -> str:
        """A control string or something made of it."""
        control, other = self.control(rng), self.control(rng)
        middle = rng.randint(1, len(control) - 1)
        head, tail = control[:middle], control[middle:]
        choices = (
            control,
            control * 2,
            control + other,
            head,
            tail,
            head + other + tail,
            head + control,
            control + tail,
            head + rng.choice(_BREAKS) + tail,
            rng.choice(_BREAKS) + control + rng.choice(_BREAKS),
            full_width(control),
            unicodedata.normalize("NFD", control.replace("e", "é")),
            control.upper(),
            f" {control} ",
            f"\n{control}\n",
            rng.choice(_FOREIGN),
        )
        return rng.choices(choices, (6, 2, 3, 4, 4, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 1))[0]

    def __call__(self, rng: random.Random) -> str:
        """A leaf: mostly ordinary, with something at its start, in it, or at its end."""
        plain = text(rng, 6)
        kind = rng.random()
        if kind < 0.15:
            return plain
        if kind < 0.3:
            return self.spice(rng)
        middle = rng.randint(0, len(plain))
        parts = [
            self.spice(rng) if rng.random() < 0.4 else "",
            plain[:middle],
            self.spice(rng) if rng.random() < 0.5 else "",
            plain[middle:],
            self.spice(rng) if rng.random() < 0.4 else "",
        ]
        return "".join(parts)


class HostileMaker(ChatMaker):
    """A `ChatMaker` whose names, ids, roles, variables and documents are hostile too."""

    def __init__(self, rng: random.Random, family: Family, texts: HostileTexts) -> None:
        super().__init__(rng, family, texts)
        self._texts = texts

    def name(self) -> str:
        return self._text(self._rng) or "n"

    def content(self) -> Any:
        """Sometimes one control string over the border of two parts."""
        if self._rng.random() < 0.9:
            return super().content()
        control = self._texts.control(self._rng)
        middle = self._rng.randint(1, len(control) - 1)
        return [{"type": "text", "text": part} for part in ("a" + control[:middle], control[middle:] + "b")]

    def user(self) -> Message:
        message = super().user()
        if self._rng.random() < 0.2:
            message["name"] = self._text(self._rng)
        return message if self._family.alternates else self._with_role(message)

    def assistant(self) -> Message:
        """Where roles must alternate, only the assistant's place takes any role."""
        message = super().assistant()
        return self._with_role(message) if self._family.alternates else message

    def _with_role(self, message: Message) -> Message:
        if self._rng.random() < 0.15:
            message["role"] = self._texts.spice(self._rng)[:MAX_ROLE_CHARS]
        return message

    def call(self, index: int) -> dict[str, Any]:
        return super().call(index) | {"id": self._text(self._rng)}

    def with_options(self, messages: list[Message]) -> dict[str, Any]:
        """Hostile ids of results, variables that this template may not know, and documents."""
        rng = self._rng
        for message in messages:
            if message["role"] == "tool":
                message["tool_call_id"] = self._text(rng)
        body = super().with_options(messages)
        if rng.random() < 0.3:
            variables = {
                "custom_text": self._text(rng),
                "enable_thinking": rng.choice(("false", False, True)),
            }
            body["chat_template_kwargs"] = variables
        if rng.random() < 0.2:
            body["documents"] = [{"title": self._text(rng), "text": self._text(rng)}]
        return body
