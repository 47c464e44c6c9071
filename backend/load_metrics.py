"""What servers tell of their load, by the names of their metrics.

Sources: vLLM `v1/metrics/loggers.py`; SGLang `srt/observability/metrics_collector.py` and, for `/v1/loads`,
`srt/managers/load_snapshot.py`; TGI `router/src/server.rs`; llama.cpp `tools/server` with `--metrics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from backend.lenient import count, share
from backend.upstream_metrics import values
from backend.upstream_ports import EngineStats


@dataclass(frozen=True, slots=True)
class LoadNames:
    """The metrics of one software; empty where it has none of the kind."""

    running: bytes
    waiting: bytes
    kv_usage: tuple[bytes, ...] = ()  # 0 to 1; by the version
    prefix_queries: bytes = b""  # in tokens, as the hits
    prefix_hits: bytes = b""
    preemptions: bytes = b""


SGLANG: Final = LoadNames(
    b"sglang:num_running_reqs",
    b"sglang:num_queue_reqs",
    (b"sglang:token_usage",),
    b"sglang:prompt_tokens_total",
    b"sglang:cached_tokens_total",
    b"sglang:num_retracted_requests_total",
)
VLLM: Final = LoadNames(
    b"vllm:num_requests_running",
    b"vllm:num_requests_waiting",
    (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
    b"vllm:prefix_cache_queries_total",
    b"vllm:prefix_cache_hits_total",
    b"vllm:num_preemptions_total",
)
TGI: Final = LoadNames(b"tgi_batch_current_size", b"tgi_queue_size")
LLAMA_CPP: Final = LoadNames(b"llamacpp:requests_processing", b"llamacpp:requests_deferred")
ALL: Final = (VLLM, SGLANG, TGI, LLAMA_CPP)


def read_load(page: bytes) -> EngineStats:
    """The numbers in a page of metrics, whosever it is. Raises `ValueError`."""
    names = next((names for names in ALL if names.running in page), None)
    return EngineStats() if names is None else read_named(page, names)


def read_named(page: bytes, names: LoadNames) -> EngineStats:
    """The numbers by these names; sums over a server's engines. Raises `ValueError`."""
    usage = [value for name in names.kv_usage for value in values(page, name)]
    return EngineStats(
        running=_sum(page, names.running),
        waiting=_sum(page, names.waiting),
        kv_usage=max(usage, default=0.0),
        prefix_queries=_sum(page, names.prefix_queries),
        prefix_hits=_sum(page, names.prefix_hits),
        preemptions=_sum(page, names.preemptions),
    )


class _Load(msgspec.Struct):
    num_running_reqs: Any = 0
    num_waiting_reqs: Any = 0
    token_usage: Any = 0.0  # 0 to 1


class _Loads(msgspec.Struct):
    loads: list[_Load] = []


def read_loads(body: bytes) -> EngineStats:
    """SGLang's `/v1/loads`, which it has without `--enable-metrics` too. Raises `ValueError`."""
    loads = msgspec.json.decode(body, type=_Loads).loads
    return EngineStats(
        running=sum(count(load.num_running_reqs) or 0 for load in loads),
        waiting=sum(count(load.num_waiting_reqs) or 0 for load in loads),
        kv_usage=max((share(load.token_usage) for load in loads), default=0.0),
    )


def _sum(page: bytes, name: bytes) -> int:
    return int(sum(values(page, name))) if name else 0
