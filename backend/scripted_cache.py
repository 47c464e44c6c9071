"""A simulated prefix cache: which blocks of a prompt an engine would still have. No tensors, only hashes."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b


class PrefixCache:
    """Least recently used blocks, each known by the hash of itself and all before it."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def admit(self, ids: bytes, salt: str | None) -> int:
        """Tokens of the prompt (int32 bytes) that were cached; all its full blocks are, from now on.

        At least one token is always computed, since its logits are needed: the whole prompt never hits.
        """
        num_tokens = len(ids) // 4
        num_hit, is_hit = 0, True
        block_bytes = 4 * self._block_size
        parent = (salt or "").encode()
        for start in range(0, len(ids) - block_bytes + 1, block_bytes):
            parent = blake2b(parent + ids[start : start + block_bytes], digest_size=16).digest()
            is_hit = is_hit and parent in self._blocks
            if is_hit and num_hit + self._block_size < num_tokens:
                num_hit += self._block_size
            self._keep(parent)
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hit
        return num_hit

    def _keep(self, block: bytes) -> None:
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        if len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
