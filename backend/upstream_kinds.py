"""Which `UpstreamKind` an address names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from backend.openai_kind import OpenAiKind
from backend.upstream_ports import UpstreamKind
from backend.upstream_sglang import SglangKind
from backend.upstream_vllm import VllmKind

UPSTREAM_KINDS: Final[Mapping[str, UpstreamKind]] = {
    "vllm": VllmKind(),
    "openai": OpenAiKind(),
    "sglang": SglangKind(),
}
