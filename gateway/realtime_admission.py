"""Who may have a conversation: the page it comes from, and its key. Before the WebSocket is accepted.

CORS does not bind WebSockets: any page may open one, and the browser sends what it has for our site along
(RFC 6455, 10.2). So the `Origin` is checked here. A browser's script cannot set headers, but it can offer
subprotocols: one of them carries its key, as OpenAI's clients do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

from gateway.keys import ApiKeys
from gateway.settings_access import ANY, split_entries
from pipeline.errors import BadKey, ClientError, InvalidRequest

SUBPROTOCOL: Final = "realtime"
KEY_PREFIX: Final = "openai-insecure-api-key."
_SCHEMES: Final = (b"http://", b"https://")
_MAX_FIELDS: Final = 32


class OriginRefused(ClientError):
    """A page of another site that is not allowed."""

    status_hint = 403
    code = "origin_not_allowed"

    def __init__(self, origin: bytes) -> None:
        super().__init__(f"Pages of {origin[:100].decode('latin-1')!r} may not call this server.")


@dataclass(frozen=True, slots=True)
class Admitted:
    """What is known of a client that may come in. Nothing here holds its key."""

    query: Mapping[str, str]
    key_id: str | None
    subprotocol: str | None  # to be answered


class Admission:
    """The checks of one process. `allowed_origins` as in the settings."""

    def __init__(self, keys: ApiKeys, allowed_origins: Sequence[str] = ()) -> None:
        self._keys = keys
        self._origins = frozenset(entry.encode() for entry in split_entries(allowed_origins))

    def admit(self, scope: Mapping[str, Any]) -> Admitted:
        """Reads the scope of a WebSocket. Raises `OriginRefused`, `BadKey` or `InvalidRequest`."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        offered: Sequence[str] = scope.get("subprotocols", ())
        self._check_origin(headers)
        key_id = self._key_id(headers, offered)
        return Admitted(
            query=_query(scope.get("query_string", b"")),
            key_id=key_id,
            subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None,
        )

    def _key_id(self, headers: Mapping[bytes, bytes], offered: Sequence[str]) -> str | None:
        try:
            return self._keys.check(_with_key(headers, offered))
        except BadKey as error:
            raise BadKey(
                f"{error} A browser offers the subprotocols '{SUBPROTOCOL}' and '{KEY_PREFIX}KEY'."
            ) from None

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        origin = headers.get(b"origin")
        if origin is None or origin in self._origins or ANY.encode() in self._origins:
            return
        if not _is_own(origin, headers.get(b"host", b"")):
            raise OriginRefused(origin)


def _is_own(origin: bytes, host: bytes) -> bool:
    """Whether a page comes from the host that it calls. Its scheme says nothing: TLS may end before us."""
    return bool(host) and any(origin.lower() == scheme + host.lower() for scheme in _SCHEMES)


def _with_key(headers: Mapping[bytes, bytes], offered: Sequence[str]) -> Mapping[bytes, bytes]:
    """The headers as if a key among the subprotocols had come as one. A real one counts more."""
    key = next((each[len(KEY_PREFIX) :] for each in offered if each.startswith(KEY_PREFIX)), None)
    if key is None or b"authorization" in headers:
        return headers
    return {**headers, b"authorization": b"Bearer " + key.encode()}


def _query(query_string: bytes) -> Mapping[str, str]:
    """The fields of the query; of a field that is repeated, the first."""
    try:
        fields = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"The query has more than {_MAX_FIELDS} fields.") from None
    return dict(reversed(fields))
