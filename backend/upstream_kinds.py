"""Which `UpstreamKind` an address names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from backend.upstream_ports import UpstreamKind
from backend.upstream_vllm import VllmKind

UPSTREAM_KINDS: Final[Mapping[str, UpstreamKind]] = {"vllm": VllmKind()}
