"""API keys: who may ask. Compared in constant time; only a fingerprint of a key is ever logged."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from pipeline.errors import BadKey


class ApiKeys:
    """The accepted keys. Without any, everyone may ask and has no id."""

    def __init__(self, keys: Sequence[str]) -> None:
        digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._ids = {digest: digest.hex()[:8] for digest in digests}

    def check(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The id of the key that the request shows, None if no keys are set. Raises `BadKey`."""
        if not self._ids:
            return None
        scheme, _, shown = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(shown.strip()).digest()
        found = None
        for known, key_id in self._ids.items():
            if hmac.compare_digest(known, digest):
                found = key_id
        if found is None or scheme.lower() != b"bearer":
            raise BadKey
        return found
