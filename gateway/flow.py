"""The twelve steps of a generation request, on one screen. Everything else hangs off this.

     1 parse    2 admit    3 validate+scan    4 render    5 tokenize    6 assemble    7 route    8 engine
     9 detokenize    10 channels    11 filter    12 deliver

Steps 1 to 8 run here, once. Steps 9 to 12 run once per token, in `TokenChoice.tokens` of
`gateway/token_choice.py`, or, where a server gives text, in `TextChoice.text` of `gateway/text_choice.py`;
the engine calls them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway.accept import stream_form
from gateway.answer import COMPLETE, Answer, AnswerLimits, ObservePrompt
from gateway.audit import Audit
from gateway.client import Asker, Client
from gateway.exchange import Exchange, require_json
from gateway.frames import ChatShape, CompletionShape, Shape
from gateway.json_writer import JsonWriter
from gateway.keys import ApiKeys
from gateway.live_rules import LiveRules
from gateway.metrics import Metrics
from gateway.models import AnyModel, Models, TextModel
from gateway.needs import NeedServer
from gateway.next_turns import NextTurns
from gateway.openai_schema import RequestLimits, body_fields, parse_chat, parse_completion
from gateway.rules_version import RulesVersion
from gateway.text_writers import NDJSON, PlainTextWriter
from gateway.watch import OpenRequests
from gateway.way_out import WayOut
from gateway.writers import SSE, SseWriter, Writer
from pipeline.errors import Draining, HeadraceError, Overloaded
from pipeline.events import CONTENT
from pipeline.inbound import InputRules, Ready
from pipeline.media import media_of, without_media
from pipeline.needs import Steps
from pipeline.ports import Engine
from pipeline.text_inbound import TextReady
from pipeline.values import ChatRequest, CompletionRequest, Json, MediaRef

Request = ChatRequest | CompletionRequest
AnyReady = Ready | TextReady
Fields = Callable[[], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Route:
    """What differs between the generation routes."""

    parse: Callable[[bytes], Request]
    shape: Callable[[str, int, str], Shape]
    fields: Callable[[bytes], Mapping[str, Json]]  # of a body that `parse` takes, for servers that take text


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request that is ready for the engine, and what is needed of it until its answer has ended."""

    model: AnyModel
    request: Request
    rules: RulesVersion


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How large a request body may be, and how long it may take to arrive."""

    max_bytes: int = 32 << 20
    limit_s: float = 60.0


class Flow:
    """Answers generation requests. One per process, built by `gateway/app.py`."""

    def __init__(
        self,
        engine: Engine,
        models: Models,
        keys: ApiKeys,
        rules: LiveRules,
        needs: NeedServer,
        metrics: Metrics,
        limits: AnswerLimits,
        body: BodyLimits,
        next_turns: NextTurns,
        audit: Audit,
        way_out: WayOut,
        observe_prompt: ObservePrompt = lambda worker, ids, cache_salt, first, now_s: None,
        check_media: Callable[[Sequence[MediaRef]], None] = lambda refs: None,
    ) -> None:
        self._check_media = check_media
        self._engine = engine
        self._models = models
        self._keys = keys
        self._rules = rules
        self._needs = needs
        self._metrics = metrics
        self._limits = limits
        self._body = body
        self._observe_prompt = observe_prompt
        self._next_turns = next_turns
        self._audit = audit
        self._way_out = way_out
        self.open = OpenRequests(metrics)
        self.is_draining = False
        self.in_progress: set[Client] = set()  # also those that still send their body or are being encoded

    async def generate(self, exchange: Exchange, route: Route) -> None:
        """The life of a request. Raises `HeadraceError` for whatever fails before the engine has it."""
        prompt, ready = await self.prepare(exchange, route, await self.read(exchange))
        writer = self._writer(exchange, route, prompt, len(ready.calls))
        answer = self.start(exchange, writer, prompt, ready)
        del ready  # with its buffers: only choices that may be submitted again still hold them
        await self.finish(exchange, answer, prompt)

    async def read(self, exchange: Exchange) -> bytes:
        """The body of a request with a good key, the first lines of every generation route."""
        exchange.record.key_id = self._keys.check(exchange.headers)
        require_json(exchange.headers)
        body = await exchange.read_body(self._body.max_bytes, self._body.limit_s)
        exchange.record.begin()
        return body

    async def prepare(self, exchange: Exchange, route: Route, body: bytes) -> tuple[Prompt, AnyReady]:
        """Steps 1 to 6: what the engine will be asked, and all that its answer will need to know."""
        request = route.parse(body)  # 1
        exchange.record.done("parse")
        return await self.prepare_request(exchange, request, partial(route.fields, body))

    def check(self, request: ChatRequest) -> None:
        """What can be said of a request's texts and media before it is made. Raises `ClientError`."""
        model = self._models.get(request.model)
        with contextlib.suppress(Overloaded):  # as its workers are now, if there are any
            model = self._as_now(model)
        model.inbound.check(request)
        self._check_media(media_of(request.messages))

    async def prepare_request(
        self, asker: Asker, request: Request, fields: Fields | None = None
    ) -> tuple[Prompt, AnyReady]:
        """Steps 2 to 6, of a request that came in whatever form. `fields`: its body, where it has one."""
        record = asker.record
        model = self._admit(request.model)  # 2
        self._way_out.check(model, request)
        record.model, record.stream = request.model, request.delivery.stream
        rules = self._rules.current  # one version for the whole request
        steps = self._steps(model, request, fields, rules, record.done)
        ready = await self._ready(asker, steps)  # 3 to 6
        kept = without_media(request) if isinstance(request, ChatRequest) else request
        return Prompt(model, kept, rules), ready

    def start(self, client: Client, writer: Writer, prompt: Prompt, ready: AnyReady) -> Answer:
        """Steps 7 and 8. Raises what the engine raises, with nothing left running. 9 to 12 run per token."""
        answer = self._answer(client, writer)
        plan = self._way_out.plan(prompt.model, prompt.request, prompt.rules)
        if isinstance(ready, TextReady):
            answer.start_text(ready.calls, plan.open_text)
        else:
            answer.start(self._way_out.calls(prompt.model, prompt.request, ready.calls), plan.open)
        return answer

    async def finish(self, client: Client, answer: Answer, prompt: Prompt) -> None:
        """Until the response is complete or the client has gone."""
        self.open.add(client, answer)
        try:
            await client.finished()
        finally:
            self.open.remove(client)
            if not answer.is_ended:  # cancelled: the server stops
                answer.client_gone("the server has ended the connection")
        if client.record.ended == COMPLETE:
            text = answer.writer.whole_text()
            self._next_turns.learn(prompt.model, prompt.request, text, _on_input(prompt.rules))

    def cut(self, error: HeadraceError) -> None:
        """End everything that is in progress with a named error."""
        self.open.fail_all(error)
        for client in list(self.in_progress):
            client.refuse(error)

    def _admit(self, name: str) -> AnyModel:
        """Before any tokenizing: is there a model, a worker, and room in its queue?"""
        if self.is_draining:
            raise Draining
        self._engine.check_room(name)  # first: it tells a model that is not there from one that still loads
        model = self._models.get(name)
        return self._as_now(model)

    def _as_now(self, model: AnyModel) -> AnyModel:
        if isinstance(model, TextModel):
            return model
        name = model.info.name
        return self._models.within(model, self._engine.max_model_len(name), self._engine.media(name))

    def _steps(
        self,
        model: AnyModel,
        request: Request,
        fields: Fields | None,
        rules: RulesVersion,
        done: Callable[[str], None],
    ) -> Steps[AnyReady]:
        if isinstance(model, TextModel):
            source = None if fields is None else fields()
            return model.inbound.prepare(request, source, _on_input(rules), done)
        return model.inbound.prepare(request, time.time(), _on_input(rules), done)

    async def _ready(self, asker: Asker, steps: Steps[AnyReady]) -> AnyReady:
        """Steps 3 to 6. What cannot be done at once is served while others run."""
        record = asker.record
        ready = await self._needs.serve(steps, asker.unless_gone)
        if isinstance(ready, Ready):
            record.prompt_tokens = sum(prompt.num_tokens for prompt in ready.prompts)
            record.dropped = ready.dropped
        for hit in ready.hits:
            self._audit.hit(record, "input", CONTENT, hit)
        return ready

    def keeps_text(self, prompt: Prompt) -> bool:
        """Whether the writer is to keep the answer's text, for the next turn."""
        return self._next_turns.wants(prompt.model, prompt.request)

    def _writer(self, exchange: Exchange, route: Route, prompt: Prompt, num_choices: int) -> Writer:
        record, outlet, delivery = exchange.record, exchange.outlet, prompt.request.delivery
        shape = route.shape(record.request_id, int(time.time()), prompt.request.model)
        texts = prompt.model.vocabulary
        if not delivery.stream:
            return JsonWriter(outlet, shape, texts, record, num_choices)
        form = stream_form(exchange.headers, prompt.request, exchange.http_version)
        keeps_text = self.keeps_text(prompt)
        if form == "text":
            return PlainTextWriter(outlet, record, exchange.close, keeps_text)
        framing = NDJSON if form == "ndjson" else SSE
        return SseWriter(outlet, shape, texts, record, delivery, num_choices, framing, keeps_text)

    def _answer(self, client: Client, writer: Writer) -> Answer:
        answer = Answer(
            self._engine,
            writer,
            client.outlet,
            client.record,
            self._metrics,
            self._audit,
            self.limits_of(client),
            self._observe_prompt,
        )
        client.on_gone = answer.client_gone
        return answer

    def limits_of(self, client: Client) -> AnswerLimits:
        """A client that tells its read timeout gets heartbeats twice as often as that."""
        timeout_s = client.read_timeout_s
        if timeout_s is None or timeout_s / 2 >= self._limits.heartbeat_s:
            return self._limits
        return replace(self._limits, heartbeat_s=timeout_s / 2)


def _on_input(rules: RulesVersion) -> InputRules | None:
    return None if rules.input is None else InputRules(rules.input, rules.seen)


def generation_routes(limits: RequestLimits, reasoning_content: bool = False) -> dict[str, Route]:
    """Path -> route. `reasoning_content`: reasoning has its older name, too."""
    chat, fields = partial(ChatShape, reasoning_content=reasoning_content), partial(body_fields, limits)
    return {
        "/v1/chat/completions": Route(lambda body: parse_chat(body, limits), chat, fields),
        "/v1/completions": Route(lambda body: parse_completion(body, limits), CompletionShape, fields),
    }


def stream_route(limits: RequestLimits, reasoning_content: bool = False) -> Route:
    """How a resumable stream is asked for: a chat that streams whatever its body says."""
    return Route(
        lambda body: parse_chat(body, limits, always_streams=True),
        partial(ChatShape, reasoning_content=reasoning_content),
        partial(body_fields, limits),
    )
