"""How responses are framed. What a connection makes of it, in every cut, is in `test_http_connection.py`."""

from __future__ import annotations

import pytest

from backend.http_framing import framing_of, is_followed

CODING = b"transfer-encoding"
LENGTH = (b"content-length", b"5")
TYPE = (b"content-type", b"a/b")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ((), (False, True, None)),
        ((TYPE,), (False, True, None)),
        ((TYPE, LENGTH), (False, False, None)),
        (((CODING, b"Chunked"),), (True, False, None)),
        (((CODING, b"chunked"), LENGTH), (True, False, None)),
        (((CODING, b"gzip"),), (True, False, b"gzip")),
        (((CODING, b"gzip, chunked"),), (True, False, b"gzip, chunked")),
        (((CODING, b"gzip"), (CODING, b"chunked")), (True, False, b"gzip")),
        (((CODING, b"chunked"), (CODING, b"gzip")), (True, False, b"gzip")),
    ],
)
def test_the_frame_is_as_the_head_says(
    headers: tuple[tuple[bytes, bytes], ...], expected: tuple[bool, bool, bytes | None]
) -> None:
    assert framing_of(headers) == expected


@pytest.mark.parametrize(
    ("data", "parts", "is_chunked", "expected"),
    [
        (b"hello", [b"hello"], False, False),
        (b"hello\r\n", [b"hello"], False, True),
        (b"hi\r\n", [b"hi\r\n"], False, False),
        (b"length: 0\r\n\r\n", [], False, False),
        (b"length: 0\r\n\r\n\r\n", [], False, True),
        (b"2\r\nhi\r\n0\r\n\r\n", [b"hi"], True, False),
        (b"2\r\nhi\r\n0\r\n\r\n\n", [b"hi"], True, True),
    ],
)
def test_blank_lines_behind_a_response_are_seen(
    data: bytes, parts: list[bytes], is_chunked: bool, expected: bool
) -> None:
    assert is_followed(data, parts, is_chunked) is expected
