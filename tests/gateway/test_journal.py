"""The journal of a resumable stream: numbers, bounds, and what may be read when."""

from __future__ import annotations

import random

import pytest

from gateway.frames import json_string
from gateway.journal import ENTRY_OVERHEAD_BYTES, MAX_TEMPLATES, Journal, JournalLimits

WIDE = JournalLimits()
END = b"event: done\ndata: [DONE]\n\n"


class Told:
    """A follower: what the journal let it have when it was told."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.lasts: list[int] = []
        journal.followers.add(self)

    def advance(self) -> None:
        self.lasts.append(self.journal.last)


def frame(number: int, num_bytes: int = 0) -> bytes:
    return b'data: {"n":%d}%b\n\n' % (number, b"." * num_bytes)


def filled(num_events: int, limits: JournalLimits = WIDE, num_bytes: int = 0) -> Journal:
    """Event number n holds n."""
    journal = Journal(limits)
    for number in range(1, num_events + 1):
        journal.frame(frame(number, num_bytes))
    return journal


def all_of(journal: Journal, after: int, max_bytes: int) -> list[bytes]:
    """What a reader gets, slice by slice."""
    slices = []
    while True:
        body, number = journal.wire(after, max_bytes)
        if not body:
            assert number == after
            return slices
        assert number > after
        slices.append(body)
        after = number


def check_count(journal: Journal) -> None:
    entries = journal.entries(journal.first - 1)
    assert journal.num_bytes == sum(len(entry) + ENTRY_OVERHEAD_BYTES for entry in entries)
    assert len(entries) == journal.written + 1 - journal.first


def test_an_event_is_its_number_and_its_frame() -> None:
    journal = Journal(WIDE)
    once = journal.template([b'data: {"text":', b"}\n\n"])
    twice = journal.template((b'data: {"a":', b',"b":', b"}\n\n"))
    assert (once, twice) == (1, 2)
    journal.frame(b"data: {}\n\n")
    journal.text(1, b'"hi"')
    journal.text(2, json_string('\n"'))
    journal.end(END)
    assert journal.wire(0, 1 << 16) == (
        b"id: 1\ndata: {}\n\n"
        b'id: 2\ndata: {"text":"hi"}\n\n'
        b'id: 3\ndata: {"a":"\\n\\"","b":"\\n\\""}\n\n'
        b"id: 4\nevent: done\ndata: [DONE]\n\n",
        4,
    )
    assert [len(entry) for entry in journal.entries(0)] == [11, 5, 7, len(END) + 1]
    check_count(journal)


@pytest.mark.parametrize("max_bytes", [1, 21, 22, 42, 43, 100, 1 << 16])
def test_slices_are_whole_events_and_together_everything(max_bytes: int) -> None:
    journal = filled(30)
    whole = [b"id: %d\n%b" % (number, frame(number)) for number in range(1, 31)]
    for after in range(31):
        slices = all_of(journal, after, max_bytes)
        assert b"".join(slices) == b"".join(whole[after:])
        for each in slices:
            assert len(each) - len(b"id: 30\n" + frame(30)) < max_bytes
            assert each.endswith(b"\n\n")
        assert all(len(each) >= max_bytes for each in slices[:-1])


def test_one_slice_has_a_bounded_number_of_events() -> None:
    journal = filled(3000)
    assert [each.count(b"id: ") for each in all_of(journal, 0, 1 << 30)] == [1024, 1024, 952]


def test_nothing_is_read_that_was_not_published() -> None:
    written: list[int] = []
    journal = Journal(WIDE, lambda each: written.append(each.written))
    told = Told(journal)
    for number in (1, 2, 3):
        journal.frame(frame(number))
    journal.end(END)
    assert written == [1, 2, 3, 4]
    assert (journal.last, journal.wire(0, 1 << 16), told.lasts) == (0, (b"", 0), [])
    assert len(journal.entries(0)) == 4
    journal.publish(2)
    assert journal.wire(0, 1 << 16)[1] == journal.last == 2
    assert journal.wire(1, 1 << 16) == (b"id: 2\n" + frame(2), 2)
    assert not journal.is_over
    journal.publish(2)
    journal.publish(1)
    assert told.lasts == [2]
    assert journal.last == 2
    journal.publish(4)
    assert journal.is_over
    assert told.lasts == [2, 4]


def test_without_a_store_events_are_public_at_once() -> None:
    journal = Journal(WIDE)
    told = [Told(journal), Told(journal)]
    journal.frame(frame(1))
    assert not journal.is_over
    journal.end(END)
    assert [each.lasts for each in told] == [[1, 2]] * 2
    assert journal.is_over


def test_followers_may_leave_while_they_are_told() -> None:
    journal = Journal(WIDE)

    class Leaves(Told):
        def advance(self) -> None:
            super().advance()
            self.journal.followers.discard(self)

    followers = [Leaves(journal) for _ in range(5)]
    journal.frame(frame(1))
    journal.frame(frame(2))
    assert [each.lasts for each in followers] == [[1]] * 5


def test_nothing_can_be_written_after_the_end() -> None:
    journal = Journal(WIDE)
    template = journal.template([b"data: ", b"\n\n"])
    assert template is not None
    journal.end(END)
    for write in (
        lambda: journal.text(template, b'""'),
        lambda: journal.frame(frame(2)),
        lambda: journal.end(END),
    ):
        with pytest.raises(AssertionError):
            write()
    assert (journal.written, journal.last) == (1, 1)


def test_the_last_template_works_and_there_is_no_more() -> None:
    journal = Journal(WIDE)
    numbers = [journal.template([b"data: %d" % number, b"\n\n"]) for number in range(MAX_TEMPLATES + 3)]
    assert numbers == [*range(1, MAX_TEMPLATES + 1), None, None, None]
    journal.text(MAX_TEMPLATES, b'"x"')
    assert journal.wire(0, 1) == (b'id: 1\ndata: 254"x"\n\n', 1)


# -- bounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "num_bytes"),
    [(JournalLimits(max_events=64), 0), (JournalLimits(max_bytes=64 * 120), 60), (JournalLimits(1, 1), 5)],
)
def test_the_oldest_events_make_way(limits: JournalLimits, num_bytes: int) -> None:
    journal = Journal(limits)
    moves = 0
    for number in range(1, 500):
        first = journal.first
        journal.frame(frame(number, num_bytes))
        moves += journal.first != first
        check_count(journal)
        assert journal.written - journal.first + 1 <= limits.max_events
        assert journal.num_bytes <= limits.max_bytes or journal.first == journal.written
        assert journal.wire(journal.first - 1, 1)[0] == (
            b"id: %d\n%b" % (journal.first, frame(journal.first, num_bytes))
        )
    assert journal.first > 400
    assert moves < 100 or limits.max_events == 1


def test_a_reader_that_has_all_but_the_newest_event_never_loses_it() -> None:
    """Whatever the bounds."""
    journal = Journal(JournalLimits(max_events=2, max_bytes=10))
    for number in range(1, 20):
        journal.frame(frame(number, number * 10))
        assert journal.wire(number - 1, 1) == (b"id: %d\n%b" % (number, frame(number, number * 10)), number)


def test_what_is_not_public_yet_is_kept_beyond_the_bounds() -> None:
    journal = Journal(JournalLimits(max_events=8), lambda each: None)
    for number in range(1, 31):
        journal.frame(frame(number))
    assert (journal.first, len(journal.entries(0))) == (1, 30)
    journal.publish(20)
    journal.frame(frame(31))
    assert journal.first == 21
    assert len(journal.entries(20)) == 11
    check_count(journal)


# -- copies --------------------------------------------------------------------------------------------------


def random_journal(rng: random.Random, num_events: int) -> Journal:
    journal = Journal(WIDE)
    for number in range(3):
        journal.template([b'data: {"%d":' % number, *[b","] * rng.randrange(2), b"}\n\n"])
    for number in range(1, num_events):
        if rng.random() < 0.7:
            journal.text(rng.randint(1, 3), json_string(rng.choice(("a", "水", "\u2028", "", "x" * 50))))
        else:
            journal.frame(frame(number))
    journal.end(END)
    return journal


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_gives_the_same_bytes_from_wherever_it_begins(seed: int) -> None:
    rng = random.Random(seed)
    journal = random_journal(rng, 30)
    for first in range(1, 31):
        copy = Journal(WIDE)
        copy.templates = list(journal.templates)
        told = Told(copy)
        for number, entry in enumerate(journal.entries(first - 1), first):
            assert not copy.is_over
            copy.restore(number, entry, number == 30)
        assert told.lasts == list(range(first, 31))
        assert (copy.first, copy.last, copy.is_over) == (first, 30, True)
        check_count(copy)
        for after in range(first - 1, 31):
            assert copy.wire(after, 1 << 20) == journal.wire(after, 1 << 20)


@pytest.mark.parametrize("number", [1, 5, 6, 8])
def test_a_copy_has_no_holes(number: int) -> None:
    copy = Journal(WIDE)
    copy.restore(6, b"\0x", False)
    with pytest.raises(AssertionError):
        copy.restore(number, b"\0x", False)


def test_a_copy_is_bounded_too() -> None:
    copy = Journal(JournalLimits(max_events=16))
    for number in range(101, 201):
        copy.restore(number, b"\0" + frame(number), False)
    assert copy.last == 200
    assert 185 <= copy.first <= 187
    check_count(copy)
