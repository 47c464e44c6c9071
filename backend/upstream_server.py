"""One upstream server as its gateway sees it: learn its models, watch that it lives, send it calls.

The same for all kinds of servers: what they say and how is their kind's and its wires' (`upstream_ports.py`),
one call is `upstream_answer.py`, and coming back after a loss is `replica_life.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from backend.catalog import Catalog, ParserOf, no_parser
from backend.http_ports import HttpCall
from backend.introduction import Introduced, introduced
from backend.local_model import LocalModel
from backend.media_support import Support
from backend.replica import READY, QueueBounds, WorkerStatus
from backend.replica_life import ReplicaLife
from backend.upstream_address import UpstreamAddress
from backend.upstream_answer import UpstreamAnswer
from backend.upstream_doubts import BROKEN_GAP_S, UpstreamDoubts
from backend.upstream_faults import ModelGone, UpstreamFault
from backend.upstream_key import KeylessSink
from backend.upstream_load import Share, UpstreamLoad
from backend.upstream_models import ModelNames, local_models
from backend.upstream_ports import EngineStats, ServedModel, Traits, UpstreamKind
from backend.upstream_probe import Http, UpstreamProbe
from backend.upstream_tokenizer import FolderTokenizers, TokenizerCheck
from pipeline.errors import HeadraceError, QueueFull, WorkerLost, WorkerStalled
from pipeline.ports import Handle, Sink, TextSink
from pipeline.values import EngineCall, ModelInfo, TextCall

logger = logging.getLogger(__name__)

TEXT_FINGERPRINT: Final = "text"  # servers of one name that take text are taken for the same
ANSWER_S: Final = 5.0  # for a server that broke a call to say that it lives


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """How a gateway treats upstream servers."""

    api_key: str | None = field(default=None, repr=False)
    tokenizer_of: Callable[[str], Path | None] = lambda model: None  # a model's folder
    reasoning_parser_of: ParserOf = no_parser  # the gateway's own: these servers do not tell theirs
    bounds: QueueBounds = QueueBounds()  # noqa: RUF009
    stall_s: float = 30.0  # for an answer to a question about the server itself
    heartbeat_s: float = 1.0
    models_s: float = 10.0  # how often it is asked which models it has
    min_backoff_s: float = 0.2
    max_backoff_s: float = 3.0
    tokenizers: FolderTokenizers = field(default_factory=FolderTokenizers, repr=False)


@dataclass(frozen=True, slots=True)
class _Model:
    info: ModelInfo
    local: LocalModel | None  # of a server of token ids

    def read(self) -> dict[str, bytes]:
        return {} if self.local is None else self.local.read()


class UpstreamServer(ReplicaLife):
    """`backend.replica.Replica`. `on_change` is called when it has become ready, or is no longer."""

    def __init__(
        self,
        address: UpstreamAddress,
        kind: UpstreamKind,
        settings: UpstreamSettings,
        catalog: Catalog,
        http: Http,
        rng: random.Random,
        on_change: Callable[[UpstreamServer], None] = lambda server: None,
    ) -> None:
        backoff_s = (settings.min_backoff_s, settings.max_backoff_s)
        super().__init__(str(address), catalog, rng, backoff_s, lambda: on_change(self))
        self.load = UpstreamLoad()
        self.heard_s = -math.inf
        self.media: Support = {}  # their placeholders become many ids, which only the server could tell
        self._address = address
        self._kind = kind
        self._settings = settings
        self._folder_of = None if kind.is_text else settings.tokenizer_of
        self._http = http
        self._probe = UpstreamProbe(http, address, settings.api_key, settings.stall_s)
        self._tokenizer = TokenizerCheck(kind, self.key, settings.tokenizers)
        self._names = ModelNames(f"upstream {address}")
        self._models: dict[str, _Model] | None = None
        self._traits: Traits | None = None
        self._stats = EngineStats()
        self._listed: Sequence[ServedModel] = ()
        self._doubts = UpstreamDoubts()
        prefix = secrets.token_hex(6)
        # All of one length: SGLang takes an id that is to be aborted for the beginning of ids.
        self._ids = (f"{prefix}-{number:012d}" for number in count())

    # -- backend.replica.Replica ---------------------------------------------------------------------------

    @property
    def model_names(self) -> Sequence[str] | None:
        return None if self._models is None else tuple(self._models)

    @property
    def outstanding_tokens(self) -> int:
        return self.load.outstanding_tokens

    @property
    def welcome(self) -> Introduced | None:
        """For warm-ups."""
        return introduced(self.key, [model.info for model in self._models.values()]) if self._models else None

    def serves(self, model: str, fingerprint: str = "") -> bool:
        if self.state is not READY or self._models is None or model not in self._models:
            return False
        if model == self._doubts.passed_over:
            return False
        return fingerprint in ("", self._models[model].info.fingerprint)

    def max_model_len(self, model: str) -> int:
        assert self._models is not None, "it serves nothing"
        return self._models[model].info.max_model_len

    def has_room(self, num_tokens: int) -> bool:
        return self._settings.bounds.admit(self.load, num_tokens)

    def submit(self, call: EngineCall, sink: Sink) -> Handle:
        return self._submit(call, sink, self.load.add(call.num_prompt_tokens, call.max_tokens))

    def submit_text(self, call: TextCall, sink: TextSink) -> Handle:
        return self._submit(call, sink, self.load.add(call.num_prompt_tokens, call.max_tokens))

    def submit_background(self, call: EngineCall, sink: Sink) -> Handle:
        """Give this very server a call that does not count as load. Raises `WorkerLost` when it is not ready.

        Without its priority: a server that does not schedule by it refuses any.
        """
        if self.state is not READY:
            raise WorkerLost(f"worker {self.key} is {self.state}")
        return self._submit(replace(call, priority=0), sink, self.load.add_background())

    def status(self) -> WorkerStatus:
        is_there, load, traits = self.state is READY, self.load, self._traits
        stats = self._stats if is_there else EngineStats()
        return WorkerStatus(
            address=self.key,
            name=self.key,
            state=self.state,
            reason="" if is_there else self.reason,
            models=tuple(self._models or ()),
            scripted=False,
            engine_path=traits.api if traits is not None else "",
            versions=dict(traits.versions) if traits is not None else {},
            max_running=0,
            running=stats.running,
            waiting=stats.waiting,
            kv_usage=stats.kv_usage,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            preemptions=stats.preemptions,
            outstanding_requests=load.num_requests,
            outstanding_tokens=load.outstanding_tokens,
            waiting_requests=load.num_waiting,
            waiting_tokens=load.waiting_tokens,
            dropped_entries=0,
            copied_bytes=0,
            num_connects=self.num_connects,
        )

    # -- calls ---------------------------------------------------------------------------------------------

    def _submit(self, call: EngineCall | TextCall, sink: Sink | TextSink, share: Share) -> Handle:
        assert self._traits is not None, "it serves nothing"
        if self._settings.api_key is not None:
            sink = KeylessSink(sink, self._settings.api_key)
        wire: Any = self._traits.wire  # the kind's: of the calls that its models' `ModelInfo` asks for
        request_id = ""

        def send(answer: UpstreamAnswer) -> HttpCall:
            nonlocal request_id
            request_id = next(self._ids)
            request = self._probe.own(wire.request(call, request_id))
            return self._http.send(self._address.origin, request, answer)

        def give_up() -> None:
            if (notice := wire.abort(request_id)) is not None:
                self._probe.tell(notice)

        try:
            return UpstreamAnswer(
                self, call.model, wire.reader(call, sink), sink.failed, share, send, give_up
            )
        except BaseException:
            share.release()
            raise

    def noted(self, model: str, error: HeadraceError, has_begun: bool) -> None:
        """`upstream_answer.Host`: a sink that submits again when it is told must find another server.

        After a call that was too many, or broke, others are preferred, where there are any, until the server
        has answered.
        """
        if isinstance(error, QueueFull):
            self._doubts.full(model)
            self.heard_s = -math.inf
        elif isinstance(error, ModelGone | UpstreamFault):  # vLLM says 403 of a route that is switched off
            self._doubts.missing(model)
        elif isinstance(error, WorkerLost) and not has_begun:
            self._doubts.broke(model)
            self.heard_s = -math.inf

    def told(self) -> None:
        """`upstream_answer.Host`."""
        self._doubts.told()

    # -- one connection ------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._doubts = UpstreamDoubts()
        listed = self._names.named(await self._probe.told(self._kind.models))
        self._advance("load", "reading its models' files")
        locals_ = await asyncio.to_thread(local_models, self.key, listed, self._folder_of)
        await self._join(listed, locals_, await self._learn_traits(locals_))
        self._stats = await self._probe.told(self._kind.stats)
        self.heard_s = time.monotonic()
        self.has_answered, self.misfit = True, None
        self.num_connects += 1
        self._advance("accept", "")
        logger.info("worker %s is ready (%s)", self.key, self.status().engine_path)
        await self._watch()

    async def _watch(self) -> None:
        """While it is ready. Raises what ends that."""
        next_look_s = time.monotonic() + self._settings.models_s
        while True:
            has_broken = await self._doubts.broken_within(self._settings.heartbeat_s)
            await self._ask_stats(ANSWER_S if has_broken else None)
            self.heard_s = now_s = time.monotonic()
            if (is_in_doubt := self._doubts.of_models(now_s)) or now_s >= next_look_s:
                next_look_s = now_s + self._settings.models_s
                await self._look(is_in_doubt)
            if has_broken:
                await asyncio.sleep(BROKEN_GAP_S)

    async def _look(self, is_in_doubt: bool) -> None:
        """Its models may have changed, and, after a call that went wrong, its routes under the same list."""
        listed = self._names.named(await self._probe.told(self._kind.models))
        if listed != self._listed:
            locals_ = await asyncio.to_thread(local_models, self.key, listed, self._folder_of)
            await self._join(listed, locals_, await self._learn_traits(locals_))
        elif is_in_doubt and self._models is not None:
            self._traits = await self._learn_traits([model.local for model in self._models.values()])

    async def _learn_traits(self, locals_: Sequence[LocalModel | None]) -> Traits:
        if self._kind.is_text and self._traits is not None and self.state is READY:
            return self._traits  # its wire has learned from calls what the server refuses
        sends_defaults = all(local is None or local.default_sampling is not None for local in locals_)
        return await self._probe.told(lambda ask: self._kind.traits(ask, sends_defaults))

    async def _ask_stats(self, limit_s: float | None) -> None:
        try:
            async with asyncio.timeout(limit_s):
                self._stats = await self._probe.told(self._kind.stats)
        except TimeoutError as error:
            raise WorkerStalled(f"upstream {self.key} broke a call, and has not answered since") from error

    async def _join(
        self, listed: Sequence[ServedModel], locals_: Sequence[LocalModel | None], traits: Traits
    ) -> None:
        """Take these models on, in the place of those that it had, which keep their wire until then."""
        await self._probe.told(lambda ask: self._tokenizer.check(ask, listed, locals_))
        models = {
            served.name: _Model(self._info(served, local, traits.block_size), local)
            for served, local in zip(listed, locals_, strict=True)
        }
        for model in models.values():
            await self._catalog.join(self, self.key, [model.info], partial(asyncio.to_thread, model.read))
        self._catalog.leave(self, but=models)
        self._listed, self._models, self._traits = listed, models, traits

    def _info(self, served: ServedModel, local: LocalModel | None, block_size: int) -> ModelInfo:
        return ModelInfo(
            name=served.name,
            max_model_len=served.max_model_len,
            block_size=block_size,
            default_sampling={} if local is None else local.default_sampling or {},
            fingerprint=TEXT_FINGERPRINT if local is None else local.fingerprint,
            created=int(time.time()),
            reasoning_parser=self._settings.reasoning_parser_of(served.name),
            is_text=local is None,
        )

    def _hang_up(self) -> None:
        """Calls under way have their own connections, and find out by themselves."""
