import pytest

from gateway.bench.phrases import counted, one_line


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests"), (2000, "2,000 requests")]
)
def test_a_noun_has_its_number(count: int, told: str) -> None:
    assert counted(count, "request") == told


def test_a_line_has_nothing_that_a_terminal_obeys() -> None:
    assert one_line(" a\r\n\tb \x1b[31m\u2028c\x00 ") == "a b [31m c"
    assert len(one_line("x" * 100_000)) == 1 << 16
