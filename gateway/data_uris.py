"""Data URIs (RFC 2397): what they say of themselves, and their base64, decoded slice by slice. No I/O.

Base64 is taken as RFC 4648 has it, with the freedom that browsers and mail allow: white space anywhere,
padding left out, `%` escapes. All else in it is an error.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from dataclasses import dataclass
from io import BytesIO
from typing import Final
from urllib.parse import unquote

from gateway.media_parts import PCM_RATE, PCM_TYPE
from gateway.sound_files import wav_head

SLICE_CHARS: Final = 128 << 10  # 0.4 ms; a multiple of 4
_SHORT_SLICE_CHARS: Final = 8 << 10  # of escapes, 0.1 us each
_MAX_HEAD_CHARS: Final = 1000
_SAMPLE_CHARS: Final = 1000  # in which white space would show: lines have 76
_SPACE: Final = re.compile(r"[ \t\r\n\f]+")
_OUTSIDE: Final = re.compile(r"[% \t\r\n\f]")
_RATE: Final = re.compile(r"rate=([0-9]{1,6})")
_MIN_RATE: Final = 1000


@dataclass(frozen=True, slots=True)
class DataUri:
    """One that can be decoded. `start`: where its data begins. `rate`: in Hz, of raw samples."""

    text: str
    start: int
    rate: int | None = None

    @classmethod
    def parse(cls, text: str) -> DataUri:
        """Raises `ValueError`, whose text goes on after the name of what is in it."""
        comma = text.find(",", 0, _MAX_HEAD_CHARS)
        if comma < 0:
            raise ValueError("is no data URI: no comma ends its head.")
        media_type, *parameters = [part.strip().lower() for part in text[len("data:") : comma].split(";")]
        if not parameters or parameters[-1] != "base64":
            raise ValueError("is a data URI that is not base64: write data:TYPE;base64,…")
        if media_type != PCM_TYPE:
            return cls(text, comma + 1)
        rates = [int(found[1]) for each in parameters if (found := _RATE.fullmatch(each))]
        rate = rates[0] if rates else PCM_RATE
        if rate < _MIN_RATE:
            raise ValueError(f"has samples of {rate} Hz; the least is {_MIN_RATE}.")
        return cls(text, comma + 1, rate)

    @property
    def is_samples(self) -> bool:
        """Raw samples, which become a WAV file."""
        return self.rate is not None

    @property
    def num_bytes(self) -> int:
        """Of the data, as far as that is known without decoding; 0 if it is not, for there are escapes."""
        if _OUTSIDE.search(self.text, self.start, self.start + _SAMPLE_CHARS):
            return 0
        padding = self.text.count("=", -2) if self.text.endswith("=") else 0
        return (len(self.text) - self.start - padding) * 3 // 4


class Decoding:
    """The data of one URI on its way. `step()` until `is_done`; then `data`."""

    def __init__(self, uri: DataUri) -> None:
        self._uri = uri
        self._place = uri.start
        self._slice_chars = SLICE_CHARS
        self._rest = ""  # characters that wait for others
        self._has_padding = False
        self._out = BytesIO()
        self._num_head = 0 if uri.rate is None else self._out.write(wav_head(0, uri.rate))
        self.is_done = False

    @property
    def num_bytes(self) -> int:
        """Of the data, so far."""
        return self._out.tell() - self._num_head

    @property
    def data(self) -> bytes:
        """The file, not copied."""
        assert self.is_done
        return self._out.getvalue()

    def step(self) -> None:
        """Decode one slice. Raises `ValueError`, whose text goes on after the name of what is in it."""
        end = self._place + self._slice_chars
        piece, is_last = self._rest + self._uri.text[self._place : end], end >= len(self._uri.text)
        try:
            self._decode(*_groups(piece, is_last), is_last)
        except ValueError:
            if not _OUTSIDE.search(piece):
                raise ValueError("is no base64.") from None
            if self._slice_chars > _SHORT_SLICE_CHARS:  # unescaping is slow
                self._slice_chars = _SHORT_SLICE_CHARS
                return
            self._decode_cleaned(piece, is_last)
        self._place = end

    def _decode_cleaned(self, piece: str, is_last: bool) -> None:
        cut = piece.find("%", max(0, len(piece) - 2)) if not is_last else -1  # half an escape
        piece, half = (piece, "") if cut < 0 else (piece[:cut], piece[cut:])
        groups, rest = _groups(_SPACE.sub("", unquote(piece)), is_last)
        try:
            self._decode(groups, rest + half, is_last)
        except ValueError:
            raise ValueError("is no base64.") from None

    def _decode(self, groups: str, rest: str, is_last: bool) -> None:
        """Whole groups of four characters. Raises whatever is wrong with them, with nothing done."""
        data = a2b_base64(groups, strict_mode=True)
        if groups and self._has_padding:
            raise ValueError("padding is at the end")
        self._out.write(data)
        self._rest, self._has_padding = rest, self._has_padding or groups.endswith("=")
        if is_last:
            self._end()

    def _end(self) -> None:
        self.is_done = True
        rate, num_bytes = self._uri.rate, self.num_bytes
        if rate is not None and num_bytes:
            self._out.seek(0)
            self._out.write(wav_head(num_bytes - num_bytes % 2, rate))  # half a sample is none
        elif rate is not None:
            self._out.truncate(0)


def _groups(text: str, is_last: bool) -> tuple[str, str]:
    """Groups of four characters, and what is left for the next slice. The last one gets its padding."""
    num_over = len(text) % 4
    if is_last:
        return text + "=" * (-num_over % 4), ""
    return text[: len(text) - num_over], text[len(text) - num_over :]
