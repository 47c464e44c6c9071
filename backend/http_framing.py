"""How the body of a response is framed on the wire (RFC 9112, section 6). No state.

Not here: taking it out of its frame, which is the parser's, and what then happens (`http_connection.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from backend.http_ports import Headers


class Framing(NamedTuple):
    """`odd_coding`: a transfer coding that nobody here understands, so that the rest is not known."""

    is_chunked: bool
    needs_eof: bool  # the body ends with the connection
    odd_coding: bytes | None


def framing_of(headers: Headers) -> Framing:
    """As the head of a response says, whether it has a body or not. Headers may stand in it several times."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    odd = next((coding for coding in codings if coding.lower() != b"chunked"), None)
    has_length = any(name == b"content-length" for name, _ in headers)
    return Framing(bool(codings), not (codings or has_length), odd)


def is_followed(data: bytes, parts: list[bytes], is_chunked: bool) -> bool:
    """Whether blank lines follow the response that ends in this read: the parser passes over them.

    `parts`: of the body, in this read. Not seen: after a body of line ends alone, and what follows the last
    few bytes of an end that was cut.
    """
    if parts and not is_chunked:
        return not data.endswith(parts[-1])
    return len(data) - len(data.rstrip(b"\r\n")) > len(b"\r\n\r\n")
