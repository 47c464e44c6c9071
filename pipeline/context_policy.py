"""What happens to a chat that is too long for the model: it is refused, or loses its oldest turns, or the
middle of its longest text.

Only which messages and which characters stay is decided here, and how a text is cut in
`pipeline/middle_out.py`. Rendering and counting tokens is the caller's: `count` is a generator, for it may
need work done elsewhere. Raw completions are never shortened.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from pipeline.errors import ContextTooLong
from pipeline.middle_out import MARKER, Search, cut_middle, longest_text
from pipeline.values import ChatRequest, Dropped, Generation, Json

ContextPolicy = Literal["error", "drop_oldest", "middle_out"]
POLICIES: Final[tuple[str, ...]] = get_args(ContextPolicy)
SYSTEM_ROLES: Final = frozenset(("system", "developer"))

Messages = Sequence[Mapping[str, Json]]
Count = Callable[[ChatRequest], Generator[Any, Any, int]]


@dataclass(frozen=True, slots=True)
class Room:
    """The model's context, and the part of it that is reserved for the answer. In tokens."""

    max_model_len: int
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """For the prompt."""
        return self.max_model_len - self.max_tokens

    def refusal(self, num_prompt_tokens: int) -> ContextTooLong:
        return ContextTooLong(num_prompt_tokens, self.max_tokens, self.max_model_len)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A request that fits. `dropped` None: nothing had to be dropped."""

    request: ChatRequest
    dropped: Dropped | None = None


def room_for(generation: Generation, policy: str, default_max_tokens: int, max_model_len: int) -> Room:
    """The room of a prompt whose request may name its `max_tokens`.

    Without it the default is reserved, but not more than half of the context; under `error` a single token,
    for there the answer gets what the prompt leaves.
    """
    if generation.max_tokens is not None:
        return Room(max_model_len, generation.max_tokens)
    if policy == "error":
        return Room(max_model_len, 1)
    return Room(max_model_len, max(1, min(default_max_tokens, max_model_len // 2)))


def fit(
    request: ChatRequest, policy: str, num_tokens: int, room: Room, count: Count
) -> Generator[Any, Any, Fitted]:
    """The request, shortened as the policy says if its `num_tokens` do not fit.

    `count(request)` renders and encodes, and returns the number of the prompt's tokens. Raises
    `ContextTooLong` with the least that was reached if it does not fit even so.
    """
    if num_tokens <= room.num_tokens:
        return Fitted(request)
    if policy == "drop_oldest":
        return (yield from _drop_oldest(request, num_tokens, room, count))
    if policy == "middle_out":
        return (yield from _middle_out(request, num_tokens, room, count))
    raise room.refusal(num_tokens)


def _drop_oldest(
    request: ChatRequest, num_tokens: int, room: Room, count: Count
) -> Generator[Any, Any, Fitted]:
    """As few of the oldest turns as needed, by halving: fewer turns never make more tokens."""
    ends = droppable(request.messages)
    if not ends:
        raise room.refusal(num_tokens)
    too_few, enough = 0, len(ends)  # turns
    fitting = _without(request, ends[-1])
    num_left = yield from count(fitting)
    if num_left > room.num_tokens:
        raise room.refusal(num_left)
    while enough - too_few > 1:
        num_turns = (too_few + enough) // 2
        candidate = _without(request, ends[num_turns - 1])
        num_candidate = yield from count(candidate)
        if num_candidate <= room.num_tokens:
            enough, fitting, num_left = num_turns, candidate, num_candidate
        else:
            too_few = num_turns
    num_messages = len(request.messages) - len(fitting.messages)
    return Fitted(fitting, Dropped("drop_oldest", num_messages, num_tokens - num_left))


def droppable(messages: Messages) -> list[int]:
    """Where the turns that may be dropped end, oldest first, as indices of messages.

    A turn is a user's message with all up to the next one; what precedes the first one is a turn too, unless
    it is the system's alone. The last user's turn may not be dropped. No call is separated from its result,
    wherever that stands.
    """
    starts = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if starts and all(message.get("role") in SYSTEM_ROLES for message in messages[: starts[0]]):
        del starts[0]
    last_results = _last_results(messages)
    ends = []
    begin = open_until = 0
    for end in starts:
        open_until = max(open_until, *last_results[begin:end])
        begin = end
        if open_until < end:
            ends.append(end)
    return ends


def _last_results(messages: Messages) -> list[int]:
    """For each message the last one with a result of a tool call of it; its own index if there is none."""
    last_results = list(range(len(messages)))
    callers: dict[Json, int] = {}  # id of a call -> its message; the later one, for models use an id twice
    last_caller: int | None = None
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls:
            last_caller = index
            callers |= {call.get("id"): index for call in calls}
        elif message.get("role") == "tool" and last_caller is not None:
            last_results[callers.get(message.get("tool_call_id"), last_caller)] = index
    return last_results


def _without(request: ChatRequest, end: int) -> ChatRequest:
    """The request without the messages before `end`, but with the system's among them."""
    kept = [message for message in request.messages[:end] if message.get("role") in SYSTEM_ROLES]
    return replace(request, messages=(*kept, *request.messages[end:]))


def _middle_out(
    request: ChatRequest, num_tokens: int, room: Room, count: Count
) -> Generator[Any, Any, Fitted]:
    """The longest text without its middle, all else as it is; no turn is dropped."""
    longest = longest_text(request.messages, SYSTEM_ROLES)
    if longest is None:
        raise room.refusal(num_tokens)
    search = Search(len(longest.text), num_tokens, room.num_tokens)
    best: Fitted | None = None
    while (num_kept := search.guess()) is not None:
        text = cut_middle(longest.text, num_kept)
        candidate = replace(request, messages=longest.replaced(request.messages, text))
        num_left = yield from count(candidate)
        if search.learn(num_kept, num_left):
            num_cut = len(longest.text) - (len(text) - len(MARKER))
            best = Fitted(candidate, Dropped("middle_out", 0, num_tokens - num_left, num_cut))
    if best is None:
        raise room.refusal(search.least)
    return best
