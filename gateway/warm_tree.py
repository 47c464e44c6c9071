"""Which warm prompts a live prompt begins with, and which lost blocks with it: a radix tree over KV blocks.

Ids are int32 little-endian bytes, lengths whole blocks. What follows from a match is `gateway/warm_table.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from pipeline.encoding import BYTES_PER_ID

Row = TypeVar("Row")


class _Node(Generic[Row]):
    """The ids from its parent's end to its own, and the rows whose ids end here, by salt."""

    __slots__ = ("children", "edge", "end", "rows")

    def __init__(self, edge: bytes, end: int) -> None:
        self.edge = edge
        self.end = end  # bytes from the root
        self.children: dict[bytes, _Node[Row]] = {}  # by their first block
        self.rows: dict[str | None, list[Row]] = {}

    def below(self, salt: str | None) -> Iterator[Row]:
        """Rows of this node and of all under it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield from node.rows.get(salt, ())
            waiting += node.children.values()


class WarmTree(Generic[Row]):
    """Rows by salt and ids. A walk costs a few slices and comparisons, however many rows there are."""

    __slots__ = ("_block_bytes", "_root")

    def __init__(self, block_tokens: int) -> None:
        self._block_bytes = BYTES_PER_ID * block_tokens
        self._root: _Node[Row] = _Node(b"", 0)

    def insert(self, ids: bytes, salt: str | None, row: Row) -> None:
        """Add a row whose ids are one or more whole blocks."""
        assert ids, "a prompt without a whole block cannot be found"
        assert len(ids) % self._block_bytes == 0, f"{len(ids)} bytes are no whole blocks"
        node = self._root
        while node.end < len(ids):
            node = self._descend(node, ids)
        node.rows.setdefault(salt, []).append(row)

    def _descend(self, node: _Node[Row], ids: bytes) -> _Node[Row]:
        """The child on the way of `ids`: there already, cut off an edge, or new."""
        at = node.end
        head = ids[at : at + self._block_bytes]
        child = node.children.get(head)
        if child is None:
            child = node.children[head] = _Node(ids[at:], len(ids))
            return child
        num_shared = self._num_shared(child.edge, ids[at:])
        if num_shared == len(child.edge):
            return child
        upper: _Node[Row] = _Node(child.edge[:num_shared], at + num_shared)
        child.edge = child.edge[num_shared:]
        upper.children[child.edge[: self._block_bytes]] = child
        node.children[head] = upper
        return upper

    def _num_shared(self, one: bytes, other: bytes) -> int:
        """Bytes of whole blocks with which both begin."""
        at, step = 0, self._block_bytes
        while at < len(one) and one[at : at + step] == other[at : at + step]:
            at += step
        return at

    def match(
        self, ids: memoryview, salt: str | None, cached_tokens: int
    ) -> tuple[list[Row], Iterator[Row] | None]:
        """Rows that a live prompt begins with, shortest first, and rows that its misses show to be damaged.

        The engine had `cached_tokens` of the prompt, so the block after them was lost: damaged are all rows
        that share that block with the prompt, whether or not the rest of them does. An engine always
        computes the last token, so a block that only this token completes is no loss.
        """
        step, num_bytes = self._block_bytes, ids.nbytes
        lost = (BYTES_PER_ID * cached_tokens // step + 1) * step  # where the lost block ends
        if lost > (num_bytes - BYTES_PER_ID) // step * step:
            lost = num_bytes + 1
        node, used, damaged = self._root, list[Row](), None
        while True:
            at = node.end
            child = node.children.get(bytes(ids[at : at + step]))
            if child is None:
                return used, damaged
            # `startswith` takes a view and is one memcmp; comparing views goes item by item.
            if at < lost <= min(child.end, num_bytes) and child.edge.startswith(ids[at:lost]):
                damaged = child.below(salt)
            if child.end > num_bytes or not child.edge.startswith(ids[at : child.end]):
                return used, damaged
            node = child
            used += node.rows.get(salt, ())
