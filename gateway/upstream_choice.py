"""Which upstream server gets a request that is passed on as it is (`gateway/passthrough.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backend.replica import READY, Replica
from backend.upstream_address import UpstreamAddress
from gateway.passthrough import UpstreamTarget


class UpstreamChoice:
    """Among those that are ready, the one with the least to do.

    `replicas`: workers among them are no upstreams. `api_key`: what the servers are shown.
    """

    def __init__(
        self, addresses: Sequence[UpstreamAddress], api_key: str | None, replicas: Sequence[Replica]
    ) -> None:
        headers = () if api_key is None else ((b"authorization", b"Bearer " + api_key.encode()),)
        self._targets: Mapping[str, UpstreamTarget] = {
            str(address): UpstreamTarget(address.origin, address.prefix, headers, str(address))
            for address in addresses
        }
        self._replicas = [replica for replica in replicas if replica.key in self._targets]

    def __call__(self, model: str | None) -> UpstreamTarget | None:
        """`gateway.passthrough.Choose`."""
        ready = [
            replica
            for replica in self._replicas
            if replica.state is READY and (model is None or replica.serves(model))
        ]
        if not ready:
            return None
        return self._targets[min(ready, key=lambda replica: replica.outstanding_tokens).key]
