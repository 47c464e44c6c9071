"""What is known of a resumable stream besides its events, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StreamMeta:
    """`token` opens this stream alone. Times are seconds since 1970."""

    id: str  # 128 random bits in hex
    token: str = field(repr=False)
    owner: str  # the process that generates it
    key_id: str | None  # of the API key that started it
    created_s: float
    expires_s: float  # nobody knows it any more after this
    body_digest: str  # of the request, for its idempotency key


class Pending:
    """What stands for a stream whose request is still being prepared."""


PENDING = Pending()
