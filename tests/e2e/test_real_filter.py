"""Rules on words that the real engine is known to say: nothing denied leaves, in any field, at any time.

The engine says something first, and the rules are made of its own words. Then every answer is compared with
what the rules must make of the text of its very own ids: streamed, frame by frame as it comes off the socket,
and whole.
"""

from __future__ import annotations

import asyncio
import html
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from gateway.settings import Text
from gateway.settings_answers import Answers
from tests import stack
from tests.e2e.asking import CHAT
from tests.e2e.listening import Listener, Said, assert_without, said_in
from tests.e2e.recording import RecordingGateway, Run, recording_gateway
from tests.e2e.resting import assert_no_fault, audit_lines, logged, wait_for
from tests.e2e.rule_oracle import Filtered, Keyword, filtered, hits_in, places, rules_file
from tests.stack import Gateway, Worker, fetch
from tests.wire import connect

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MODEL: Final = "smollm2-135m-instruct"
SKY: Final = "Explain why the sky is blue."
DOG: Final = "Tell me a story about a dog."
RAIN: Final = "Write a poem about rain."
NUM_TOKENS: Final = 32
WITH_LOGPROBS: Final = {"logprobs": True, "top_logprobs": 3}


# -- what it says, and rules made of that --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """What the engine says to a question at temperature 0, without any rules."""

    tokens: list[str]
    usage: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    def words(self, min_letters: int) -> list[str]:
        return re.findall(rf"\b[a-z]{{{min_letters},}}\b", self.text.lower())


def body(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def known(engine_gateway: Gateway) -> Mapping[str, Known]:
    said = {}
    for question in (SKY, DOG, RAIN):
        async with connect(engine_gateway.port) as wire:
            for num_tokens in (1, NUM_TOKENS):  # after the first all find as much of it in the prefix cache
                await wire.post(CHAT, body(question, logprobs=True, max_tokens=num_tokens))
                document = await wire.json()
        (choice,) = said_in(document)
        said[question] = Known([entry["token"] for entry in choice.logprobs], document["usage"])
        assert said[question].text == choice.content
    return said


def made_of(known: Mapping[str, Known]) -> list[Keyword]:
    """A rule of each kind, no two of which meet in these texts."""
    texts = [each.text.lower() for each in known.values()]
    taken: list[str] = []

    def take(words: Sequence[str]) -> str:
        """The first word that no taken one touches anywhere."""
        for word in words:
            if not any(touch(text, word, other) for other in taken for text in texts):
                taken.append(word)
                return word
        raise AssertionError(f"no word is left of {words}; taken are {taken}")

    sky, dog, rain = (known[question] for question in (SKY, DOG, RAIN))
    straddling = take(list(across_tokens(dog.tokens)))
    phrases = re.findall(r"\b([a-z]{2,}) ([a-z]{4,})\b", dog.text.lower())
    allowed = take([word for _, word in phrases])
    phrase = next(f"{before} {word}" for before, word in phrases if word == allowed)
    part = take([word[:4] for word in sky.words(8) if not re.search(rf"\b{word[:4]}\b", texts[0])])
    elsewhere = texts[0] + texts[1]
    return [
        Keyword("straddles", straddling, "mask"),
        Keyword("allowed", allowed, "mask", allow=(phrase,)),
        Keyword("part", part, "mask", whole_word=True),
        Keyword("masked", take(sky.words(5)), "mask"),
        Keyword("redacted", take(sky.words(5)), "redact", replacement="[X]"),
        Keyword("whole", take(sky.words(5)), "mask", whole_word=True),
        Keyword("flagged", take(sky.words(4)), "flag"),
        Keyword("blocked", take([word for word in rain.words(5)[3:] if word not in elsewhere]), "block"),
    ]


def touch(text: str, one: str, other: str) -> bool:
    spans = [(at, at + len(word)) for word in (one, other) for at in places(text, word)]
    return any(a[0] <= b[1] and b[0] <= a[1] for a, b in itertools.combinations(spans, 2))


def across_tokens(tokens: Sequence[str]) -> Iterator[str]:
    """The ends of words and the beginnings of the next ones, where a token begins with the space between."""
    for left, right in itertools.pairwise(tokens):
        if re.fullmatch(r" ?[a-zA-Z]{3,}", left) and re.fullmatch(r" [a-zA-Z]{3,}", right):
            yield (left[-2:] + right[:3]).lower()


@pytest.fixture(scope="module")
def rules(known: Mapping[str, Known]) -> list[Keyword]:
    return made_of(known)


@pytest.fixture(scope="module")
def path(rules: list[Keyword], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(rules_file(rules))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engine_worker: Worker, path: Path) -> AsyncIterator[RecordingGateway]:
    """It remembers the ids behind every answer."""
    groups = {"text": Text(rules=(str(path),)), "answers": Answers(allow_request_escape=True)}
    async with recording_gateway(engine_worker, path.parent / "cache", **groups) as started:
        yield started


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model / "tokenizer.json"))


# -- one answer against its own ids --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judge:
    """What must become of one choice, whose engine made these ids. `raw`: its text up to a stop string."""

    run: Run
    tokenizer: Tokenizer
    rules: Sequence[Keyword]
    stop: str | None = None
    includes_stop: bool = False

    @property
    def raw(self) -> str:
        raw: str = self.tokenizer.decode(self.run.shown_ids)
        if self.stop is None:
            return raw
        at = raw.index(self.stop)
        return raw[: at + len(self.stop) * self.includes_stop]

    @property
    def expected(self) -> Filtered:
        return filtered(self.raw, self.rules)

    def tokens(self) -> Iterator[tuple[str, int, int]]:
        """Text, start and end of each token that is whole characters."""
        waiting: list[int] = []
        at = 0
        for token_id in self.run.shown_ids:
            waiting.append(token_id)
            text = self.tokenizer.decode(waiting)
            if "\ufffd" not in text:
                yield text, at, at + len(text)
                at, waiting = at + len(text), []

    def follow(self, so_far: Said) -> None:
        """No character leaves that may not, and no logprobs before their text."""
        expected = self.expected
        assert expected.text.startswith(so_far.content)
        settled = expected.raw_ends[len(so_far.content)]
        clean = [(start, end) for _, start, end in self.tokens() if expected.is_clean(start, end)]
        for _, end in clean[: len(so_far.logprobs)]:
            assert end <= settled, "logprobs of what has not left"

    def assert_logprobs(self, said: Said) -> None:
        """Of exactly the tokens that left as they are; no alternative completes a denied word."""
        expected, raw = self.expected, self.raw
        clean = [token for token in self.tokens() if expected.is_clean(*token[1:])]
        assert [entry["token"] for entry in said.logprobs] == [text for text, _, _ in clean]
        denied = [rule for rule in self.rules if rule.is_active and not rule.whole_word and not rule.allow]
        for entry, (text, start, _) in zip(said.logprobs, clean, strict=True):
            assert bytes(entry["bytes"]).decode() == text
            for other in entry["top_logprobs"]:
                found = hits_in(raw[:start] + other["token"], denied)
                assert not any(hit.end > start for hit in found), other["token"]

    def assert_said(self, said: Said) -> None:
        """All of it, when it has ended."""
        expected = self.expected
        assert said.content == expected.text
        assert said.end is not None
        is_stopped = self.stop is not None or self.run.finish == "stop"
        finish = "content_filter" if expected.is_blocked else "stop" if is_stopped else "length"
        assert said.finish == finish
        assert said.end["stop_reason"] == (None if expected.is_blocked else self.stop)
        assert ("content_filter_results" in said.end) == expected.is_blocked


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer of some choices, its judges and its usage."""

    choices: list[Said]
    judges: list[Judge]
    usage: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asking:
    """Asks, and judges whatever comes."""

    gateway: RecordingGateway
    tokenizer: Tokenizer
    rules: Sequence[Keyword]

    @property
    def never_said(self) -> list[str]:
        """Words that leave under no condition."""
        return [rule.word for rule in self.rules if rule.is_active and not rule.whole_word and not rule.allow]

    async def ask(self, request: dict[str, Any], *, stream: bool, **stop: Any) -> Asked:
        self.gateway.take_runs()
        answer = await (self._streamed if stream else self._whole)(request, stop)
        for said, judge in zip(answer.choices, answer.judges, strict=True):
            judge.assert_said(said)
            if "logprobs" in request:
                judge.assert_logprobs(said)
            else:
                assert said.logprobs == []
        assert answer.usage["completion_tokens"] == sum(len(judge.run.ids) for judge in answer.judges)
        return answer

    async def both(self, request: dict[str, Any], **stop: Any) -> Asked:
        """Streamed and whole, which are equal if the engine repeats itself. The streamed one."""
        streamed, whole = [await self.ask(request, stream=stream, **stop) for stream in (True, False)]
        assert [said.texts for said in streamed.choices] == [said.texts for said in whole.choices]
        assert streamed.usage["completion_tokens"] == whole.usage["completion_tokens"] or any(
            judge.stop or judge.expected.is_blocked for judge in streamed.judges
        ), "what the engine made after its end, in between, is counted too"
        return streamed

    async def _streamed(self, request: dict[str, Any], stop: dict[str, Any]) -> Asked:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        listener = Listener(request.get("n", 1))
        async with connect(self.gateway.port) as wire:
            assert (await wire.post(CHAT, request | options)).status == 200
            frames = await wire.frames()
        judges = self._judges(stop)
        for frame in frames:
            listener.take(frame)
            if not frame.is_comment and not frame.is_done:
                assert_without(self.never_said, frame.raw, frame.data)
            for said, judge in zip(listener.choices, judges, strict=True):
                judge.follow(said)
        assert listener.is_done
        assert listener.usage is not None
        spelled = ["".join(entry["token"] for entry in said.logprobs) for said in listener.choices]
        assert_without(self.never_said, b"", spelled)
        return Asked(listener.choices, judges, listener.usage)

    async def _whole(self, request: dict[str, Any], stop: dict[str, Any]) -> Asked:
        async with connect(self.gateway.port) as wire:
            assert (await wire.post(CHAT, request)).status == 200
            raw = await wire.body()
        document = json.loads(raw)
        assert_without(self.never_said, raw, document)
        return Asked(said_in(document), self._judges(stop), document["usage"])

    def _judges(self, stop: dict[str, Any]) -> list[Judge]:
        return [Judge(run, self.tokenizer, self.rules, **stop) for run in self.gateway.take_runs()]


@pytest.fixture(scope="module")
def asking(gateway: RecordingGateway, tokenizer: Tokenizer, rules: list[Keyword]) -> Asking:
    return Asking(gateway, tokenizer, rules)


# -- the tests -----------------------------------------------------------------------------------------------


def hit_ids(asked: Asked) -> set[str]:
    return {hit.rule.id for judge in asked.judges for hit in judge.expected.hits}


@pytest.mark.parametrize("logprobs", [{}, WITH_LOGPROBS], ids=["text", "logprobs"])
@pytest.mark.parametrize("question", [SKY, DOG])
async def test_streamed_and_whole_answers_are_what_the_rules_make_of_their_ids(
    asking: Asking, known: Mapping[str, Known], question: str, logprobs: dict[str, Any]
) -> None:
    asked = await asking.both(body(question, **logprobs))
    expected = {"masked", "redacted", "whole", "flagged"} if question == SKY else {"straddles"}
    assert expected <= hit_ids(asked)
    assert asked.judges[0].raw == known[question].text
    counts = {name: asked.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counts == {name: known[question].usage[name] for name in counts}, "other than without rules"


@pytest.mark.parametrize("stream", [True, False])
async def test_each_of_two_choices_has_filters_of_its_own(asking: Asking, stream: bool) -> None:
    sampled = {"n": 2, "temperature": 0.8, "seed": 7}
    asked = await asking.ask(body(SKY, **sampled, **WITH_LOGPROBS), stream=stream)
    first, second = (judge.raw for judge in asked.judges)
    assert first != second
    assert hit_ids(asked)


@pytest.mark.parametrize("stop_at", [1, -1], ids=["within the word", "at its last letter"])
async def test_a_stop_string_ends_the_text_before_a_filter_looks_at_its_tail(
    asking: Asking, known: Mapping[str, Known], rules: list[Keyword], stop_at: int
) -> None:
    """The beginning of a denied word that a stop string cuts is no denied word."""
    (masked,) = [rule.word for rule in rules if rule.id == "masked"]
    text = known[SKY].text
    at = text.lower().index(masked)
    stop = text[at + stop_at % len(masked) : at + len(masked) + 2]
    if text.index(stop) != at + stop_at % len(masked):
        pytest.skip("these letters come earlier")
    request = body(SKY, stop=["never said", stop], **WITH_LOGPROBS)
    asked = await asking.both(request, stop=stop)
    assert asked.choices[0].content.lower().endswith(masked[: stop_at % len(masked)])

    request["include_stop_str_in_output"] = True
    asked = await asking.both(request, stop=stop, includes_stop=True)
    assert asked.choices[0].content.endswith("*" * len(masked) + stop[-2:])


@pytest.mark.parametrize("logprobs", [{}, WITH_LOGPROBS], ids=["text", "logprobs"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_blocked_answer_ends_in_the_engine_too(
    asking: Asking, engine_worker: Worker, stream: bool, logprobs: dict[str, Any]
) -> None:
    request = body(RAIN, max_tokens=1500, ignore_eos=True, **logprobs)
    asked = await asking.ask(request, stream=stream)
    assert asked.choices[0].finish == "content_filter"
    assert hit_ids(asked) == {"blocked"}
    assert 0 < asked.usage["completion_tokens"] < 200
    await until_idle(engine_worker)


async def test_a_block_of_one_choice_leaves_the_other_alone(asking: Asking, engine_worker: Worker) -> None:
    request = body(RAIN, n=2, max_tokens=40, temperature=0.7, seed=11)
    asked = await asking.ask(request, stream=True)
    assert len(asked.choices) == 2
    await until_idle(engine_worker)


@pytest.mark.parametrize("stream", [True, False])
async def test_raw_completions_have_the_same_rules(asking: Asking, stream: bool) -> None:
    (chat,) = (await asking.ask(body(SKY, max_tokens=1), stream=False)).judges
    prompt = asking.tokenizer.decode(chat.run.prompt_ids, skip_special_tokens=False)
    request: dict[str, Any] = {"model": MODEL, "prompt": prompt, "add_special_tokens": False}
    request |= {"temperature": 0, "max_tokens": NUM_TOKENS, "logprobs": 3, "stream": stream}
    async with connect(asking.gateway.port) as wire:
        assert (await wire.post("/v1/completions", request)).status == 200
        frames = await wire.frames() if stream else []
        documents = [each.data for each in frames[:-1] if not each.is_comment] or [await wire.json()]
    (run,) = asking.gateway.take_runs()
    judge = Judge(run, asking.tokenizer, asking.rules)
    assert_without(asking.never_said, b"", documents)
    text, tokens, tops = "", list[str](), list[dict[str, float]]()
    for document in documents:
        (choice,) = document["choices"]
        text += choice["text"]
        if choice["logprobs"] is not None:
            tokens += choice["logprobs"]["tokens"]
            tops += choice["logprobs"]["top_logprobs"]
        entries = [{"token": token, "bytes": list(token.encode()), "top_logprobs": []} for token in tokens]
        judge.follow(Said(text, logprobs=entries))
    assert text == judge.expected.text != judge.raw
    for entry, top in zip(entries, tops, strict=True):
        entry["top_logprobs"] = [{"token": token} for token in top]
    judge.assert_logprobs(Said(text, logprobs=entries))


async def test_markup_is_escaped_where_a_request_says_so(asking: Asking) -> None:
    gateway = asking.gateway
    gateway.take_runs()
    for stream in (True, False):
        answer = await gateway.ask(CHAT, body(SKY, output={"escape": "html"}, max_tokens=16), stream=stream)
        judge = Judge(answer.run, asking.tokenizer, asking.rules)
        assert answer.text == escaped(judge.expected.text)
        assert answer.text != judge.expected.text, "nothing to escape"


def escaped(text: str) -> str:
    return html.escape(text).replace("&#x27;", "&#39;")


async def until_idle(worker: Worker) -> None:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "headrace_link_jobs")
    async with asyncio.timeout(30):
        while any(map(worker.metric, names)):  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.02)


# -- a gateway of its own process ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving(engine_worker: Worker, path: Path) -> Iterator[Gateway]:
    """With the same rules, and markup made harmless in all answers."""
    flags = ("--rules", str(path), "--output-escape", "html")
    with stack.start_gateway(path.parent, [engine_worker], *flags) as gateway:
        yield gateway
        assert_no_fault(gateway)


async def test_every_hit_is_told_and_counted_and_no_text_is(
    serving: Gateway, engine_worker: Worker, known: Mapping[str, Known], rules: list[Keyword]
) -> None:
    counted: dict[tuple[str, str], int] = {}
    for number, question in enumerate((SKY, DOG, RAIN)):
        request_id = f"audited-{number}"
        async with connect(serving.port) as wire:
            await wire.post(CHAT, body(question, stream=True, **WITH_LOGPROBS), {"x-request-id": request_id})
            listener = Listener().take_all(await wire.frames())
        expected = filtered(known[question].text, rules)
        assert listener.said.content == escaped(expected.text), "by setting, and behind the rules"
        assert logged(serving, request_id)["rule_hits"] == len(expected.hits) > 0
        lines = [line for line in audit_lines(serving) if line["id"] == request_id]
        told = [(line["rule"], line["action"], line["start"], line["end"]) for line in lines]
        hits = [(hit.rule.id, hit.rule.action, hit.start, hit.end) for hit in expected.hits]
        assert sorted(told) == sorted(hits)
        for line in lines:
            where = {name: line[name] for name in ("direction", "channel", "choice", "shadow", "model")}
            assert where == {
                "direction": "output",
                "channel": "content",
                "choice": 0,
                "shadow": False,
                "model": MODEL,
            }
        for hit in expected.hits:
            key = (hit.rule.id, hit.rule.action)
            counted[key] = counted.get(key, 0) + 1

    exposition = fetch(serving.port, "/metrics")
    for (rule, action), count in counted.items():
        labels = f'action="{action}",channel="content",direction="output",rule="{rule}"'
        assert f"headrace_rule_hits_total{{{labels}}} {count:.1f}" in exposition
    log = serving.log.read_text()
    for each in known.values():
        pieces = (each.text[at : at + 12] for at in range(len(each.text) - 11))
        assert not any(piece in log for piece in pieces)
    assert not any(re.search(rf"\b{re.escape(rule.word)}\b", log) for rule in rules)
    wait_for(serving, lambda: not engine_worker.metric("headrace_link_jobs"), "idle")
