import asyncio
import signal
from collections.abc import Iterator

import pytest

from gateway.bench.interrupts import ending, reporting

TOLD = "headrace: the report is being made; interrupt once more to end without it\n"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def plain_handlers() -> Iterator[None]:
    """Python's own, as in a program: loops of other tests may have left theirs."""
    before = [signal.getsignal(each) for each in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for each, handler in zip(SIGNALS, before, strict=True):
        signal.signal(each, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_ends_the_load_the_second_is_told_and_the_third_ends_the_program(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    async def load() -> None:
        with ending(lambda: heard.append("stop")):
            for _ in range(2):
                signal.raise_signal(number)
                await asyncio.sleep(0.01)
            heard.append(capsys.readouterr().err)
            signal.raise_signal(number)
            await asyncio.sleep(60)

    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(load())
    assert heard == ["stop", TOLD]
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_does_not_cost_the_report(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with reporting():
        signal.raise_signal(number)
        assert capsys.readouterr().err == TOLD
        # From now on it is as it was before.
        assert [signal.getsignal(each) for each in SIGNALS] == before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with reporting():
        pass
    assert [signal.getsignal(each) for each in SIGNALS] == before
