"""The prompt's ids in one buffer."""

from __future__ import annotations

import pytest

from pipeline.encoding import pack_ids
from pipeline.token_buffer import TokenBuffer


def test_pieces_follow_each_other() -> None:
    buffer = TokenBuffer()
    buffer.append(pack_ids([1, 2]))
    buffer.append(b"")
    buffer.append(memoryview(pack_ids([3])))
    assert buffer.num_tokens == 3
    assert bytes(buffer.view()) == pack_ids([1, 2, 3])


def test_view_is_read_only_and_shared() -> None:
    buffer = TokenBuffer()
    buffer.append(pack_ids([7]))
    assert buffer.view().readonly
    assert buffer.view() == buffer.view()


def test_append_after_view_is_refused() -> None:
    buffer = TokenBuffer()
    buffer.view()
    with pytest.raises(RuntimeError, match="final"):
        buffer.append(pack_ids([1]))


def test_piece_that_ends_within_an_id_is_refused() -> None:
    buffer = TokenBuffer()
    with pytest.raises(ValueError, match="5 bytes"):
        buffer.append(b"\0\0\0\0\1")
    assert buffer.num_tokens == 0
