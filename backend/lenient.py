"""How far what a server says may be off before its answer is refused: counts, reasons, events that are none.

What is not understood is passed over where no text is lost with it: an answer is worth more than its counts.
Not here: errors in a server's own words (`upstream_errors.py`), and what an event means (the readers).
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

MAX_COUNT: Final = (1 << 53) - 1  # whole numbers that every reader of JSON, and a metric, holds exactly
MAX_STOP_CHARS: Final = 256
MAX_REASON_CHARS: Final = 64  # of a finish reason: a word, never a text


def count(value: Any) -> int | None:
    """A count as a server has written it; None for what can be none. 3.0 is 3: some have no integers."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def share(value: Any) -> float:
    """A share of the whole, 0 to 1; 0 for what can be none."""
    return float(value) if type(value) in (int, float) and 0 <= value <= 1 else 0.0


def milliseconds(seconds: Any) -> float | None:
    """A duration, not negative; None for what can be none."""
    if type(seconds) not in (int, float) or not math.isfinite(seconds) or seconds > MAX_COUNT:
        return None
    return max(0.0, float(seconds) * 1e3)


def is_first(index: Any) -> bool:
    """Whether a choice is the one that was asked for. Some number it by a string, or not at all."""
    return index in (None, 0, "0")


def stop_of(value: Any) -> int | str | None:
    """What ended a choice: a stop token's id, or a stop string."""
    if isinstance(value, str):
        return value if len(value) <= MAX_STOP_CHARS else None
    return value if type(value) is int and abs(value) <= MAX_COUNT else None


def checked_reason(word: str) -> str:
    """A finish reason that may be one. Raises `ValueError`, without the word."""
    if len(word) > MAX_REASON_CHARS or not word.isprintable():
        raise ValueError(f"a finish reason of {len(word)} characters; the limit is {MAX_REASON_CHARS}")
    return word


def holds_nothing(payload: bytes) -> bool:
    """Whether an event that cannot be read had nothing to say: it is empty, or a word as `ping`.

    Not so where it may be the rest of a chunk or of an error, or a page of HTML.
    """
    return payload.lstrip()[:1] not in (b"{", b"<") and b'"choices"' not in payload


def repaired(payload: bytes) -> bytes:
    """JSON that a strict reader refuses, written again: slow, so only for what was refused.

    Halves of surrogate pairs and bytes that are no UTF-8 become U+FFFD, what is no number or too large for
    one becomes null, control characters are escaped. Raises `ValueError`.
    """
    try:
        found = json.loads(
            payload.decode("utf-8", "replace"),
            strict=False,
            parse_constant=lambda name: None,
            parse_float=_finite,
        )
        text = json.dumps(found, ensure_ascii=False)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None
