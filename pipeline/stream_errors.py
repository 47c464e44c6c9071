"""Errors of resumable streams: the branches that they add to the tree of `pipeline/errors.py`.

    ClientError
    ├── BadKey
    │   └── BadStreamToken          401
    ├── UnknownStream               404, never was or is forgotten
    ├── BadEventId                  400, an id that this stream never gave
    ├── EventsExpired               410, what comes after that id is no longer kept
    ├── StreamCancelled             499, by its client
    ├── KeyInProgress               409, the first request with this idempotency key is still being prepared
    └── KeyReused                   422, the idempotency key belongs to another body
    Overloaded
    ├── JournalFull                 503, no memory for one more stream
    └── StoreUnavailable            503, the shared store does not answer
    EngineFault
    └── GatewayLost                 502, the process that generated it is gone
    HeadraceError
    ├── NoSharedStore               501, several processes without a store
    └── StreamAbandoned             499, nobody reads

Whatever befalls a reader is told in the stream, as a `failed` event: EventSource shows nothing of any other
status than 200.
"""

from __future__ import annotations

from pipeline.errors import BadKey, ClientError, EngineFault, HeadraceError, Overloaded


class BadStreamToken(BadKey):
    code = "invalid_stream_token"

    def __init__(self) -> None:
        super().__init__(
            "Missing or wrong token of this stream. Send it as 'token' in the query, or as "
            "'Authorization: Bearer TOKEN'."
        )


class UnknownStream(ClientError):
    status_hint = 404
    code = "stream_not_found"

    def __init__(self) -> None:
        super().__init__("There is no such stream: it has expired, was deleted, or never was.")


class BadEventId(ClientError):
    code = "invalid_event_id"
    param = "last_event_id"


class EventsExpired(ClientError):
    """The journal no longer has what the reader needs next."""

    status_hint = 410
    code = "events_expired"
    param = "last_event_id"

    def __init__(self, after: int, first: int) -> None:
        super().__init__(f"The events after {after} are no longer kept; the oldest that is kept is {first}.")


class StreamCancelled(ClientError):
    status_hint = 499
    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("The stream was deleted by its client.")


class KeyInProgress(ClientError):
    status_hint = 409
    code = "idempotency_key_in_progress"
    param = "idempotency-key"

    def __init__(self) -> None:
        super().__init__("A request with this idempotency key is still being prepared. Try again.")


class KeyReused(ClientError):
    status_hint = 422
    code = "idempotency_key_reused"
    param = "idempotency-key"

    def __init__(self) -> None:
        super().__init__("This idempotency key was used with another body.")


class JournalFull(Overloaded):
    code = "journal_full"

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"The journals of all streams have {num_bytes} bytes; the limit is {max_bytes}.")


class StoreUnavailable(Overloaded):
    code = "store_unavailable"

    def __init__(self, message: str = "The store of the streams does not answer.") -> None:
        super().__init__(message)


class GatewayLost(EngineFault):
    code = "gateway_lost"

    def __init__(self) -> None:
        super().__init__("The gateway process that generated this answer is gone.")


class NoSharedStore(HeadraceError):
    status_hint = 501
    code = "no_shared_store"

    def __init__(self) -> None:
        super().__init__(
            "Resumable streams over several gateway processes need a store that they share: "
            "start the gateway with --redis URL or --redis embedded."
        )


class StreamAbandoned(HeadraceError):
    status_hint = 499
    code = "abandoned"

    def __init__(self, grace_s: float) -> None:
        super().__init__(f"Nobody has read this stream for {grace_s:g} s.")
