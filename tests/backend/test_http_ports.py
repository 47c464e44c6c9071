"""What a server is told it is called."""

import ssl

import pytest

from backend.http_ports import Origin


@pytest.mark.parametrize(
    ("host", "port", "is_tls", "expected"),
    [
        ("gpu1", 8000, False, b"gpu1:8000"),
        ("gpu1", 80, False, b"gpu1"),
        ("gpu1", 443, False, b"gpu1:443"),
        ("gpu1", 443, True, b"gpu1"),
        ("::1", 8000, False, b"[::1]:8000"),
        ("fe80::1", 443, True, b"[fe80::1]"),
    ],
)
def test_the_host_header_has_brackets_and_a_port_where_they_belong(
    host: str, port: int, is_tls: bool, expected: bytes
) -> None:
    tls = ssl.create_default_context() if is_tls else None
    assert Origin(host, port, tls).host_header == expected
