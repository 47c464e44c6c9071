"""Errors of Realtime conversations: the branches that they add to the tree of `pipeline/errors.py`.

    ClientError
    ├── ResponseCancelled           499, by its client
    ├── ActiveResponse              409, one response at a time
    ├── NoActiveResponse            400, nothing to cancel
    ├── ItemNotFound                404, this conversation has no such item
    ├── DuplicateItem               409, an item id that is taken
    ├── NothingToHear               400, a truncation that this item does not have
    ├── ConversationTooLarge        413, items or bytes of one conversation
    ├── IdleConversation            408, nobody says anything
    └── LivedTooLong                408, the longest life of a connection
    Overloaded
    ├── TooManyConversations        503, of this process
    ├── ConversationsFull           503, bytes of all of them
    └── TooManyResponses            503, of one conversation, at the same time

An error of a client event is told in an `error` event, and the conversation goes on; `IdleConversation` and
`LivedTooLong` end it, and `TooManyConversations` lets none begin.
A response that fails tells it in its `response.done`. Item ids are the client's own: no log holds them.
"""

from __future__ import annotations

from pipeline.errors import ClientError, Overloaded


class ResponseCancelled(ClientError):
    """The client has cancelled the response."""

    status_hint = 499
    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("The response was cancelled by its client.")


class ActiveResponse(ClientError):
    status_hint = 409
    code = "conversation_already_has_active_response"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"The conversation already has an active response ({response_id}). "
            f"Wait until it is done, or cancel it."
        )


class NoActiveResponse(ClientError):
    code = "response_cancel_not_active"

    def __init__(self, response_id: str | None = None) -> None:
        which = "response" if response_id is None else f"response {response_id[:100]!r}"
        super().__init__(f"Nothing was cancelled: there is no active {which}.")
        if response_id is not None:
            self.param = "response_id"


class ItemNotFound(ClientError):
    """`action`: what was to be done with the item, a word of the client event's name."""

    status_hint = 404

    def __init__(self, item_id: str, action: str, param: str = "item_id") -> None:
        super().__init__(f"The conversation has no item {item_id[:100]!r}.")
        self.code = f"item_{action}_invalid_{param.rpartition('.')[2]}"
        self.param = param


class DuplicateItem(ClientError):
    status_hint = 409
    code = "item_create_duplicate_item_id"
    param = "item.id"

    def __init__(self, item_id: str) -> None:
        super().__init__(f"The conversation already has an item {item_id[:100]!r}.")


class NothingToHear(ClientError):
    """A truncation of audio that an item does not have, or of text past its end."""

    code = "item_truncate_invalid"

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ConversationTooLarge(ClientError):
    """`unit`: what is counted."""

    status_hint = 413
    code = "conversation_too_large"

    def __init__(self, number: int, max_number: int, unit: str) -> None:
        super().__init__(f"The conversation would have {number} {unit}; the limit is {max_number}.")


class IdleConversation(ClientError):
    status_hint = 408
    code = "session_idle"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"Nothing has happened in this conversation for {limit_s:g} s.")


class LivedTooLong(ClientError):
    status_hint = 408
    code = "session_expired"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The session has reached its longest life of {limit_s:g} s.")


class TooManyConversations(Overloaded):
    code = "too_many_conversations"

    def __init__(self, number: int, max_number: int) -> None:
        super().__init__(f"Conversations of this process: {number}; the limit is {max_number}.")


class ConversationsFull(Overloaded):
    code = "conversations_full"

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"The conversations of this process would have {num_bytes} bytes; the limit is {max_bytes}."
        )


class TooManyResponses(Overloaded):
    code = "too_many_responses"

    def __init__(self, number: int, max_number: int) -> None:
        super().__init__(f"This conversation has {number} active responses; the limit is {max_number}.")
