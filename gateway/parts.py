"""What the parts of the app are given, from the settings. Nothing is connected here (`gateway/app.py`)."""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from backend.address import parse_address
from backend.catalog import Catalog, OnModel
from backend.http_client import HttpClient, HttpLimits
from backend.output_parsers import load_output_parsers
from backend.pool import ClientLimits, PoolSettings, WorkerPool
from backend.remote_worker import RemoteWorker
from backend.replica import QueueBounds, Replica
from backend.upstream_address import UpstreamAddress, parse_upstream
from backend.upstream_kinds import UPSTREAM_KINDS
from backend.upstream_server import UpstreamServer, UpstreamSettings
from gateway.answer import AnswerLimits
from gateway.edge import EdgeParts
from gateway.flow import BodyLimits
from gateway.journal import JournalLimits
from gateway.keys import ApiKeys
from gateway.link_tls import client_tls
from gateway.live_rules import LiveRules
from gateway.media import MediaLimits, MediaLoader
from gateway.media_fetch import MediaFetcher
from gateway.metrics import Metrics
from gateway.openai_schema import RequestLimits
from gateway.own_store import OwnStore
from gateway.passthrough import Passthrough
from gateway.rules_version import RuleOptions
from gateway.settings import Settings
from gateway.settings_answers import Answers, parser_for
from gateway.settings_upstream import tokenizer_folder
from gateway.streams import StreamLimits, Streams
from gateway.turns import Turns
from gateway.upstream_choice import UpstreamChoice
from gateway.warmup import WarmLimits
from gateway.way_out import OutputOptions, WayOut
from pipeline.assembly import GenerationDefaults
from pipeline.control_characters import ControlPolicy
from pipeline.inbound import InboundOptions
from pipeline.ports import OutputParsers
from pipeline.validation import InputLimits
from pipeline.values import ModelInfo


def request_limits(settings: Settings) -> RequestLimits:
    """What a body may ask for."""
    limits = settings.limits
    return RequestLimits(
        max_n=limits.max_n,
        max_choices=min(RequestLimits().max_choices, limits.queue_max_requests),
        max_stop_strings=limits.max_stop_strings,
        max_stop_chars=limits.max_stop_chars,
        max_tools=limits.max_tools,
        drop_lone_surrogates=settings.text.unencodable_characters == "strip",
        allow_escape=settings.answers.allow_request_escape,
    )


def inbound_options(settings: Settings) -> InboundOptions:
    """The way in of every model."""
    limits, text, prompts = settings.limits, settings.text, settings.prompts
    return InboundOptions(
        limits=InputLimits(
            max_characters=limits.max_text_chars,
            max_bytes=limits.max_text_bytes,
            max_messages=limits.max_messages,
            max_parts=limits.max_content_parts,
            max_values=limits.max_values,
        ),
        control_characters=ControlPolicy(text.unencodable_characters, text.control_characters),
        defaults=GenerationDefaults(max_tokens=limits.default_max_tokens),
        templates={template.name: template for template in prompts.templates},
        context_policy=prompts.context_policy,
        raw_control_strings=prompts.raw_control_strings == "control",
        max_media=settings.media.max_images,
        upstream_fields=frozenset(settings.upstream.upstream_fields),
    )


def media_loader(settings: Settings) -> MediaLoader:
    """What gets images and sounds. Without allowed domains nothing is fetched, nor the client imported."""
    media = settings.media
    fetcher = MediaFetcher(
        media.allowed_media_domains, media.media_limit_s, media.media_redirects, media.media_fetches
    )
    limits = MediaLimits(
        media.max_media_bytes, media.max_image_pixels, media.max_audio_s, media.media_held_bytes
    )
    return MediaLoader(fetcher, limits)


def load_parsers(answers: Answers, info: ModelInfo, files: Mapping[str, bytes]) -> OutputParsers | None:
    """vLLM's parsers for a model, if any are configured: then vLLM is imported, 5 s in a thread."""
    tools = parser_for(answers.tool_call_parser, info.name)
    reasoning = parser_for(answers.reasoning_parser, info.name)
    return load_output_parsers(tools, reasoning, files, info.name) if tools or reasoning else None


def live_rules(settings: Settings, metrics: Metrics) -> LiveRules:
    """The content rules. Raises what is wrong with their files."""
    text = settings.text
    options = RuleOptions(text.max_hold_chars, text.hold_policy, text.max_seen_text_bytes)
    return LiveRules(text.rules, text.rules_action, options, metrics, text.rules_reload_s)


def way_out(answers: Answers) -> WayOut:
    """The way out of every answer."""
    return WayOut(OutputOptions(answers.output_escape, answers.format_policy == "error"))


def warm_limits(settings: Settings) -> WarmLimits:
    """When warm prompts are warmed."""
    prompts = settings.prompts
    return WarmLimits(prompts.rewarm_interval_s, prompts.warm_before_ready, prompts.warm_ready_limit_s)


def warm_turns() -> Turns:
    """The processes of one gateway share the folder of their metrics."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return Turns(Path(folder) if folder else None)


def http_client(settings: Settings) -> HttpClient:
    """For upstream servers."""
    return HttpClient(HttpLimits(connect_s=settings.upstream.upstream_connect_s))


def worker_pool(
    settings: Settings,
    upstreams: Sequence[UpstreamAddress],
    on_model: OnModel,
    http: HttpClient,
    on_change: Callable[[RemoteWorker | UpstreamServer], None],
) -> WorkerPool:
    """The workers that the gateway is linked to, and the upstream servers, which take token ids or text.

    `on_change` hears of those that take token ids. Raises what is wrong with addresses or TLS files.
    """
    limits = settings.limits
    pool = PoolSettings(
        cache_dir=settings.general.cache.expanduser(),
        secret=settings.link.link_secret.encode() if settings.link.link_secret else None,
        tls=client_tls(settings.link),
        gateway=f"gateway-{os.getpid()}",
        limits=ClientLimits(stall_s=limits.stall_limit_s),
        max_waiting_requests=limits.queue_max_requests,
        max_waiting_tokens=limits.queue_max_tokens,
        reasoning_parser_of=partial(parser_for, settings.answers.reasoning_parser),
    )
    catalog, rng = Catalog(on_model, pool.reasoning_parser_of), random.Random()
    replicas: list[Replica] = [
        RemoteWorker(parse_address(worker), pool, catalog, rng, on_change) for worker in settings.link.worker
    ]
    replicas += _upstream_servers(settings, upstreams, pool, catalog, http, rng, on_change)
    return WorkerPool(replicas, catalog)


def _upstream_servers(
    settings: Settings,
    upstreams: Sequence[UpstreamAddress],
    pool: PoolSettings,
    catalog: Catalog,
    http: HttpClient,
    rng: random.Random,
    on_change: Callable[[UpstreamServer], None],
) -> Iterator[UpstreamServer]:
    given = settings.upstream
    upstream = UpstreamSettings(
        api_key=given.upstream_api_key,
        tokenizer_of=partial(tokenizer_folder, given.tokenizer),
        reasoning_parser_of=pool.reasoning_parser_of,
        bounds=QueueBounds(pool.max_waiting_requests, pool.max_waiting_tokens),
        stall_s=settings.limits.stall_limit_s,
    )
    for address in upstreams:
        kind = UPSTREAM_KINDS[address.kind]
        told = (lambda server: None) if kind.is_text else on_change
        yield UpstreamServer(address, kind, upstream, catalog, http, rng, told)


def upstream_addresses(settings: Settings) -> list[UpstreamAddress]:
    """Raises what is wrong with the addresses, or with the file of the authority."""
    cafile = settings.upstream.upstream_cafile
    tls = None if cafile is None else ssl.create_default_context(cafile=cafile)
    return [parse_upstream(text, tls) for text in settings.upstream.upstream]


def passthrough(
    settings: Settings,
    upstreams: Sequence[UpstreamAddress],
    edge: EdgeParts,
    keys: ApiKeys,
    http: HttpClient,
    replicas: Sequence[Replica],
    rules: LiveRules,
) -> Passthrough | None:
    """What passes other routes on; None where there is no upstream, or it is switched off."""
    given = settings.upstream
    if not upstreams or not given.passthrough:
        return None
    choose = UpstreamChoice(upstreams, given.upstream_api_key, replicas, settings.limits.queue_max_requests)
    body = BodyLimits(settings.http.max_body_bytes, settings.http.body_limit_s)
    limit_s = settings.limits.request_limit_s
    return Passthrough(
        edge, keys, body, http, choose, lambda: rules.current.num_rules > 0, limit_s, silence_limit_s=limit_s
    )


def streams(settings: Settings, metrics: Metrics) -> Streams:
    """The resumable streams, and where they are kept. Raises `ValueError` for an address that is none."""
    own, lifetime_s = settings.streams, settings.limits.request_limit_s + settings.streams.stream_keep_s
    limits = StreamLimits(
        journal=JournalLimits(own.stream_max_events, own.stream_max_bytes),
        max_bytes=own.stream_journal_bytes,
        grace_s=own.stream_grace_s,
        keep_s=own.stream_keep_s,
        lifetime_s=lifetime_s,
    )
    if own.redis is None:
        return Streams(limits, OwnStore(), is_shared=settings.http.processes > 1)
    from gateway.stream_store import StreamStore  # takes 0.2 s and 8 MB

    store = StreamStore(
        own.redis,
        keep_s=own.stream_keep_s,
        grace_s=own.stream_grace_s,
        lifetime_s=lifetime_s,
        limit_s=own.store_limit_s,
        metrics=metrics,
    )
    return Streams(limits, store)


def answer_limits(settings: Settings) -> AnswerLimits:
    """When answers are cut short."""
    limits = settings.limits
    return AnswerLimits(
        queue_s=limits.queue_limit_s,
        stall_s=limits.stall_limit_s,
        request_s=limits.request_limit_s,
        hold_s=settings.text.max_hold_s,
        slow_reader_s=limits.slow_reader_s,
        heartbeat_s=limits.heartbeat_s,
    )
