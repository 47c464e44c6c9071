"""The items of one Realtime conversation, in order and within bounds. Who tells a client of what happens to
them: `gateway/realtime.py`. What an item is: `gateway/realtime_items.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.realtime_items import ROOT, Item, heard
from pipeline.realtime_errors import (
    ConversationsFull,
    ConversationTooLarge,
    DuplicateItem,
    ItemNotFound,
    NothingToHear,
)


class Memory:
    """What the items of all conversations of a process hold, in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class Conversation:
    """The items of one conversation, in order. What was refused has changed nothing.

    Bounded in items and in bytes of their texts and data, and in the bytes of all conversations. A response's
    own items are always taken: there is room for a response (`check_room`) as long as the bounds are not
    reached.
    """

    def __init__(
        self, max_items: int = 1000, max_bytes: int = 32 << 20, memory: Memory | None = None
    ) -> None:
        self._memory = memory or Memory(max_bytes)
        self.max_items = max_items
        self._max_bytes = max_bytes
        self._order: list[str] = []
        self._items: dict[str, Item] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Item]:
        return map(self._items.__getitem__, self._order)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._items

    @property
    def last_id(self) -> str | None:
        """The id of the last item."""
        return self._order[-1] if self._order else None

    def get(self, item_id: str, action: str = "retrieve", param: str = "item_id") -> Item:
        """Raises `ItemNotFound`, which says what was to be done with it."""
        item = self._items.get(item_id)
        if item is None:
            raise ItemNotFound(item_id, action, param)
        return item

    def add(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Put an item after another: the last (None), none (`root`) or the named one.

        The answer: the id of the item before it. Raises `ItemNotFound`, `DuplicateItem` or
        `ConversationTooLarge`, `ConversationsFull`.
        """
        if item.id in self._items:
            raise DuplicateItem(item.id)
        index = self._index_after(previous_item_id)
        self._check_room(item.num_bytes)
        return self._insert(item, index)

    def check_room(self) -> None:
        """Raises `ConversationTooLarge` or `ConversationsFull` if no item could be added."""
        self._check_room(1)

    def close(self) -> None:
        """Nothing is said any more. What still comes is counted nowhere."""
        self._grow(-self.num_bytes)
        self._memory = Memory(self._max_bytes)

    def check_size(self, items: Sequence[Item]) -> None:
        """Raises `ConversationTooLarge` if a conversation of these items would be."""
        self._check(len(items), sum(item.num_bytes for item in items))

    def add_answer(self, item: Item, previous_item_id: str | None) -> str | None:
        """Put a response's item, which is still written, after another: the front, if that is None.

        At the end if that item is gone. The answer: the id of the item before it.
        """
        if previous_item_id is None:
            return self._insert(item, 0)
        known = previous_item_id in self._items
        return self._insert(item, self._index_after(previous_item_id if known else None))

    def finish_answer(self, item: Item) -> bool:
        """Put a response's item, as it has become, in the place of what `add_answer` was given.

        False: that was deleted in the meantime, and this is dropped; its id may be another item's by now.
        """
        old = self._items.get(item.id)
        if old is None or old.status != "in_progress":
            return False
        self._replace(item)
        return True

    def delete(self, item_id: str) -> Item:
        """Raises `ItemNotFound`."""
        item = self.get(item_id, "delete")
        self._order.remove(item_id)
        del self._items[item_id]
        self._grow(-item.num_bytes)
        return item

    def truncate(
        self, item_id: str, content_index: int, text_end: int | None, audio_end_ms: int | None = None
    ) -> Item:
        """Cut a message of the assistant to the characters of one part that were heard; later parts go.

        Characters are code points. Raises `ItemNotFound`, or `NothingToHear` for what cannot be cut so.
        """
        item = self.get(item_id, "truncate")
        _check_cut(item, content_index, text_end, audio_end_ms)
        assert text_end is not None, "or it was refused"
        rest = heard(item, content_index, text_end)
        self._replace(rest)
        return rest

    def _replace(self, item: Item) -> None:
        self._grow(item.num_bytes - self._items[item.id].num_bytes)
        self._items[item.id] = item

    def _insert(self, item: Item, index: int) -> str | None:
        self._order.insert(index, item.id)
        self._items[item.id] = item
        self._grow(item.num_bytes)
        return self._order[index - 1] if index else None

    def _index_after(self, previous_item_id: str | None) -> int:
        if previous_item_id is None:
            return len(self._order)
        if previous_item_id == ROOT:
            return 0
        if previous_item_id not in self._items:
            raise ItemNotFound(previous_item_id, "create", "previous_item_id")
        return self._order.index(previous_item_id) + 1

    def _grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._memory.num_bytes += num_bytes

    def _check_room(self, num_bytes: int) -> None:
        self._check(len(self._order) + 1, self.num_bytes + num_bytes)
        in_all = self._memory.num_bytes + num_bytes
        if in_all > self._memory.max_bytes:
            raise ConversationsFull(in_all, self._memory.max_bytes)

    def _check(self, num_items: int, num_bytes: int) -> None:
        if num_items > self.max_items:
            raise ConversationTooLarge(num_items, self.max_items, "items")
        if num_bytes > self._max_bytes:
            raise ConversationTooLarge(num_bytes, self._max_bytes, "bytes")


def _check_cut(item: Item, content_index: int, text_end: int | None, audio_end_ms: int | None) -> None:
    """Raises `NothingToHear` unless this part of the item has so much text."""
    if item.role != "assistant" or item.status == "in_progress":
        what = f"a message of {item.role}" if item.role else f"a {item.kind}"
        state = "still written" if item.status == "in_progress" else what
        raise NothingToHear(
            f"Only a finished message of the assistant can be truncated; this is {state}.", "item_id"
        )
    if text_end is None:
        given = "" if audio_end_ms is None else f", got {audio_end_ms} ms"
        raise NothingToHear(
            f"The item has no audio to cut at 'audio_end_ms'{given}; give 'text_end', the number of "
            f"characters that were heard.",
            "audio_end_ms",
        )
    if content_index >= len(item.content):
        raise NothingToHear(
            f"'content_index' must be less than the item's {len(item.content)} content parts, "
            f"got {content_index}.",
            "content_index",
        )
    num_chars = len(item.content[content_index].text)
    if text_end > num_chars:
        raise NothingToHear(
            f"'text_end' must be at most the {num_chars} characters of the part's text, got {text_end}.",
            "text_end",
        )
