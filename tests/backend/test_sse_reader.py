"""Server-sent events in every cut, against a reader that goes line by line over the whole text."""

from __future__ import annotations

import random
import re

import pytest

from backend.sse_reader import SseReader

STREAMS = {
    "tokens": b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n',
    "crlf": b"data: a\r\n\r\ndata: b\r\ndata: c\r\n\r\n: ping\r\n\r\ndata: d\r\n\r\n",
    "cr": b"data: a\r\rdata: b\rdata: c\r\r",
    "mixed line ends": b"data: a\r\n\ndata: b\n\r\ndata: c\r\r\ndata: d\n\rdata: e\n\n",
    "many blank lines": b"\n\n\ndata: a\n\n\n\n\ndata: b\n\n\n",
    "comments and other fields": b": hi\nevent: x\nid: 7\nretry: 5\ndata: a\n\n:\n\nevent: y\n\ndata:b\n\n",
    "several lines": b"data: a\ndata:  b\ndata\ndata:\n\n",
    "no space, two spaces": b"data:a\n\ndata:  b\n\n",
    "empty": b"data\n\ndata:\n\ndata: \n\n",
    "byte order mark": b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\ndata: c\n\n",
    "only a mark": b"\xef\xbb\xbf\n\ndata: a\n\n",
    "other line separators": "data: a\u2028b\u2029c\x0bd\x0ce\x85f\n\n".encode(),
    "names that look alike": b"datax: a\nDATA: b\n data: c\ndata : d\n\ndata: e\n\n",
    "cut off": b"data: a\n\ndata: b\n",
}


def oracle(stream: bytes) -> list[bytes]:
    """The standard's algorithm, on the whole stream."""
    payloads, data = [], []
    for line in re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))[:-1]:
        if not line:
            if data:
                payloads.append(b"\n".join(data))
            data = []
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
    return payloads


def read(pieces: list[bytes], max_event_bytes: int = 1000) -> list[bytes]:
    reader = SseReader(max_event_bytes)
    return [payload for piece in pieces for payload in reader.feed(piece)]


def test_oracle_reads_what_is_meant() -> None:
    assert oracle(STREAMS["tokens"]) == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    assert oracle(STREAMS["crlf"]) == [b"a", b"b\nc", b"d"]
    assert oracle(STREAMS["several lines"]) == [b"a\n b\n\n"]
    assert oracle(STREAMS["byte order mark"]) == [b"a", b"c"]
    assert oracle(STREAMS["cut off"]) == [b"a"]


@pytest.mark.parametrize("name", STREAMS)
def test_events_are_the_same_in_every_cut(name: str) -> None:
    stream = STREAMS[name]
    expected = oracle(stream)
    assert read([stream]) == expected
    assert read([stream[at : at + 1] for at in range(len(stream))]) == expected
    for at in range(len(stream) + 1):
        assert read([stream[:at], stream[at:]]) == expected, at
        assert read([stream[:at], b"", stream[at:]]) == expected, at


def test_random_streams_in_random_cuts_are_read_as_the_standard_says() -> None:
    chance = random.Random(7)
    words = [b"data: ", b"data:", b"data", b"\n", b"\n\n", b"\r", b"\r\n", b": c", b"x", b"\xef\xbb\xbf"]
    for _ in range(3000):
        stream = b"".join(chance.choices(words, k=chance.randrange(1, 16)))
        cuts = sorted(chance.choices(range(len(stream) + 1), k=chance.randrange(6)))
        pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        assert read(pieces) == oracle(stream), pieces


def test_a_read_of_one_event_is_told_at_once_whatever_came_before() -> None:
    """The quick way may be taken only where an event begins."""
    event = b"data: a\n\n"
    for before in (b"data: b\n", b"data: b\r", b": c", b"\n", b"\r", b"x\n\r", event, event + b"\r"):
        expected = oracle(event + before + event + event)
        assert read([event, before, event, event]) == expected, before
        assert read([event + before, event, event]) == expected, before


def test_an_event_over_the_limit_is_refused_and_so_is_all_after_it() -> None:
    payload = b"x" * 94  # with its field's name 100 bytes
    assert read([b"data: a\n\n", b"data: " + payload + b"\n\n"], 100) == [b"a", payload]
    for *before, last in (
        [b"data: x" + payload + b"\n\n"],
        [b"data: x" + payload],
        [b"data: a\n\n", b"data: x" + payload + b"\n\n"],
        [b"data: x", payload],
        [b": %d\n" % number for number in range(10, 31)],
    ):
        reader = SseReader(100)
        for piece in before:
            reader.feed(piece)
        with pytest.raises(ValueError, match=r"10\d bytes or more, over max_event_bytes, 100"):
            reader.feed(last)
        with pytest.raises(ValueError, match="before"):
            reader.feed(b"data: b\n\n")


def test_many_events_may_be_more_than_the_limit_of_one() -> None:
    assert read([b"data: a\n\n" * 1000], 100) == [b"a"] * 1000


def test_an_event_in_many_reads_is_joined_once() -> None:
    """Else a megabyte that comes byte by byte costs its square."""
    reader = SseReader(1 << 21)
    for _ in range(1 << 18):
        assert reader.feed(b"data\n") == []  # the square is 170 GB
    assert reader.feed(b"\n") == [b"\n" * ((1 << 18) - 1)]
