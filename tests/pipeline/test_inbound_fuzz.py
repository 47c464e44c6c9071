"""The way in under arbitrary input: broken bodies, made-up templates, tokenizers of many kinds.

Whatever the body, the answer is a prompt or a client's error. No control token comes from a client's text.
Not here: exactness on real models (`test_exactness.py`, `test_injection.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from gateway.openai_schema import parse_chat
from pipeline.errors import ClientError
from pipeline.leaves import mapped, replaced, untrusted
from tests.pipeline.conversations import ChatMaker
from tests.pipeline.driving import Driver, parsed
from tests.pipeline.hostile import HostileMaker, HostileTexts
from tests.pipeline.real_models import Model, model
from tests.pipeline.reference import by_model
from tests.pipeline.template_models import CHANGING, NAMES, small_model

Body = dict[str, Any]
BRACKETS = str.maketrans("<>|｜[]＜＞", "‹›¦¦⟦⟧‹›")
DATE = {"date_string": "26 Jul 2024"}  # else one template prints the day of the test


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def hostile_maker(tested: Model, rng: random.Random) -> HostileMaker:
    """Its texts hold no strings that the template parses: those decide where a text goes."""
    parsed_strings = [string for _, string in tested.family.parsed]
    controls = [text for text in tested.reference.controls if text not in parsed_strings]
    return HostileMaker(rng, tested.family, HostileTexts(controls))


def num_controls(tested: Model, ids: list[int]) -> int:
    control_ids = set(tested.reference.controls.values())
    return sum(token_id in control_ids for token_id in ids)


# -- templates of many kinds -------------------------------------------------------------------------------


def reference_ids(tested: Model, body: Body) -> list[int] | None:
    """What the ids must be; None for a chat that the template refuses."""
    try:
        return tested.reference.harmless_ids(by_model(tested.family.prepare, body))
    except (ValueError, TypeError, TemplateError):  # as the template raises them, through Hugging Face
        return None


def check_template(tested: Model, seed: str, num_chats: int, is_text_kept: bool) -> None:
    rng = random.Random(seed)
    driver = Driver(tested.text)
    makers = [HostileMaker(rng, tested.family, HostileTexts(list(tested.reference.controls)))]
    makers.append(ChatMaker(rng, tested.family))  # type: ignore[arg-type]
    num_compared = 0
    for index in range(num_chats):
        body = makers[index % 2].body(max_turns=3)
        body["chat_template_kwargs"] = body.get("chat_template_kwargs", {}) | DATE
        if not is_text_kept:
            body.pop("continue_final_message", None)
        expected = reference_ids(tested, body)
        if expected is None:
            continue
        num_compared += 1
        ids = driver.ids(parsed(body))
        if is_text_kept:
            assert ids == expected, body
        else:
            assert num_controls(tested, ids) == num_controls(tested, expected), body
    assert num_compared > num_chats / 8


@pytest.mark.parametrize("name", NAMES)
def test_template_keeps_its_control_tokens_and_no_text_gets_any(name: str, folder: Path) -> None:
    check_template(small_model(name, folder), name, 30, name not in CHANGING)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_template_keeps_its_control_tokens_in_many_chats(name: str, folder: Path) -> None:
    check_template(small_model(name, folder), f"many {name}", 1000, name not in CHANGING)


# -- bodies of any shape -----------------------------------------------------------------------------------

# Names that templates, Jinja or the renderer itself use for something else.
VARIABLES = (
    *(
        "_headrace_bos_token",
        "_headrace_eos_token",
        "_headrace_compose",
        "namespace",
        "range",
        "dict",
        "loop",
    ),
    *("message", "content", "ns", "tool", "enable_thinking", "self", "caller", "cycler", "joiner", "varargs"),
    *(
        "bos_token",
        "messages",
        "tools",
        "raise_exception",
        "strftime_now",
        "chat_template",
        "tokenize",
        "none",
    ),
    *("true", "system_message", "date_string", "content.x", "a-b", "", "class", "__class__", "__import__"),
)


class BodyBreaker:
    """Makes chat bodies that are nearly right."""

    def __init__(self, rng: random.Random, maker: HostileMaker, texts: HostileTexts) -> None:
        self._rng = rng
        self._maker = maker
        self._texts = texts

    def bytes(self) -> bytes:
        """A body as it comes from the network."""
        rng = self._rng
        body: Any = self._maker.body(max_turns=2)
        if rng.random() < 0.3:
            body["chat_template_kwargs"] = {rng.choice(VARIABLES): self.value() for _ in range(2)}
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            self._break(body)
        data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        kind = rng.random()
        if kind < 0.03:
            return data[: rng.randrange(len(data))]
        if kind < 0.06:
            at = rng.randrange(len(data))
            return data[:at] + rng.randbytes(rng.randint(1, 3)) + data[at + 1 :]
        return data

    def _break(self, body: Any) -> None:
        """Change one place: another value, another key, one more, one less."""
        rng = self._rng
        places = list(_places(body))
        if not places:  # nothing is left to break
            return
        holder, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.6:
            holder[key] = self.value()
        elif kind < 0.75:
            del holder[key]
        elif isinstance(holder, dict):
            holder[rng.choice((self._texts(rng), "role", "content", "type", "text", "name"))] = self.value()
        else:
            holder.insert(rng.randint(0, len(holder)), rng.choice(([], {}, holder[key], self.value())))

    def value(self, depth: int = 0) -> Any:
        """Any JSON value."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.45 or depth > 3:
            odd = (
                "",
                "\x00",
                "\ud800",
                "\udc00a",
                "a" * 300,
                "\ufdd0" * 3,
                "{{ 1 }}",
                "system",
                "assistant",
                "tool",
            )
            return rng.choice(odd) if rng.random() < 0.3 else self._texts(rng)
        if kind < 0.7:
            return rng.choice((None, True, False, 0, -1, 1.5, 10**9, 10**30, 1e308, 2**63, [], {}))
        if kind < 0.72:
            deep: Any = "x"
            for _ in range(rng.choice((20, 70, 300))):
                deep = [deep] if rng.random() < 0.5 else {"k": deep}
            return deep
        if kind < 0.86:
            return [self.value(depth + 1) for _ in range(rng.randint(0, 3))]
        return {self._texts(rng): self.value(depth + 1) for _ in range(rng.randint(0, 3))}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) within a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(pairs):
        yield value, key
        yield from _places(child)


def check_bodies(tested: Model, seed: str, num_bodies: int) -> None:
    """A prompt or a client's error; as many control tokens as the same request without brackets has."""
    rng = random.Random(seed)
    maker = hostile_maker(tested, rng)
    parsed_strings = [string for _, string in tested.family.parsed]
    texts = HostileTexts([text for text in tested.reference.controls if text not in parsed_strings])
    breaker, driver = BodyBreaker(rng, maker, texts), Driver(tested.text)
    num_prompts, statuses = 0, set()
    for _ in range(num_bodies):
        data = breaker.bytes()
        try:
            request = parse_chat(data)
            ids = driver.ids(request)
        except ClientError as error:
            statuses.add(error.status_hint)
            continue
        num_prompts += 1
        if any(string in data.decode("utf-8", "replace") for string in parsed_strings):
            continue
        fields = {
            name: mapped(each, lambda text: text.translate(BRACKETS))
            for name, each in untrusted(request).items()
        }
        twin_ids = driver.ids(replaced(request, fields))
        assert num_controls(tested, ids) == num_controls(tested, twin_ids), data
    assert num_prompts > num_bodies / 8
    assert statuses <= {400, 413, 422}


SMALL = ("tools", "chatml folded", "phi", "mistral", "llama", "glm", "gathered", "joined", "two literals")


@pytest.mark.parametrize("name", SMALL)
def test_any_body_makes_a_prompt_or_a_client_error(name: str, folder: Path) -> None:
    check_bodies(small_model(name, folder), name, 150)


@pytest.mark.parametrize("name", ["qwen3", "embedded"])
def test_any_body_for_a_real_model_makes_a_prompt_or_a_client_error(name: str) -> None:
    check_bodies(model(name), name, 350)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALL)
def test_thousands_of_bodies_make_prompts_or_client_errors(name: str, folder: Path) -> None:
    check_bodies(small_model(name, folder), f"many {name}", 3000)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek_v3", "llama3_1", "embedded"])
def test_thousands_of_bodies_for_real_models_make_prompts_or_client_errors(name: str) -> None:
    check_bodies(model(name), f"many {name}", 4000)
