"""Data URIs are decoded in slices, wherever those are cut, and nothing but base64 is taken."""

from __future__ import annotations

import base64
import io
import random
import wave
from urllib.parse import quote

import pytest

from gateway import data_uris
from gateway.data_uris import DataUri, Decoding


def decoded(text: str) -> bytes:
    decoding = Decoding(DataUri.parse(text))
    while not decoding.is_done:
        decoding.step()
    return decoding.data


def with_spaces(text: str, rng: random.Random) -> str:
    return "".join(each + rng.choice(["", "", " ", "\r\n", "\t"]) for each in text)


def escaped(text: str, rng: random.Random) -> str:
    return "".join(quote(each, safe="") if rng.random() < 0.5 else f"%{ord(each):02x}" for each in text)


@pytest.mark.parametrize("slice_chars", [4, 8, 128])
@pytest.mark.parametrize("seed", range(20))
def test_data_is_the_same_however_it_is_written_and_cut(
    seed: int, slice_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_uris, "SLICE_CHARS", slice_chars)
    monkeypatch.setattr(data_uris, "_SHORT_SLICE_CHARS", 3)
    rng = random.Random(seed)
    data = rng.randbytes(rng.randrange(200))
    plain = base64.b64encode(data).decode()
    for text in (plain, plain.rstrip("="), with_spaces(plain, rng), escaped(plain, rng)):
        assert decoded("data:image/png;base64," + text) == data
        assert decoded("DATA:image/png;charset=x;BASE64," + text) == data


@pytest.mark.parametrize(
    "text",
    [
        "A",
        "AAAAA",
        "AA==AA==",
        "A===",
        "====",
        "AA-_",
        "AA.A",
        "AAA\u00e9",
        "A\x00AA",
        "AA%zzAA",
        "AA==\nAA==",
        "é",
    ],
)
@pytest.mark.parametrize("slice_chars", [4, 1024])
def test_what_is_no_base64_is_refused(text: str, slice_chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_uris, "SLICE_CHARS", slice_chars)
    with pytest.raises(ValueError, match="is no base64"):
        decoded("data:image/png;base64," + text)


@pytest.mark.parametrize(
    "text",
    [
        "data:",
        "data:image/png;base64",
        "data:image/png,abc",
        "data:,abc",
        "data:" + "x" * 2000 + ";base64,AAAA",
    ],
)
def test_other_uris_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no data URI|is not base64"):
        DataUri.parse(text)


def test_the_size_is_known_before_decoding() -> None:
    for num_bytes in range(10):
        text = base64.b64encode(bytes(num_bytes)).decode()
        assert DataUri.parse("data:;base64," + text).num_bytes == num_bytes
        assert DataUri.parse("data:;base64," + text.rstrip("=")).num_bytes == num_bytes
    assert DataUri.parse("data:;base64,AAAA\nAAAA").num_bytes == 0  # not known


@pytest.mark.parametrize(("head", "rate"), [("audio/pcm", 24_000), ("audio/pcm;rate=16000", 16_000)])
def test_samples_become_a_wav_file(head: str, rate: int) -> None:
    samples = random.Random(1).randbytes(1000)
    for data in (samples, samples + b"x"):  # half a sample is left out
        text = base64.b64encode(data).decode()
        with wave.open(io.BytesIO(decoded(f"data:{head};base64,{text}"))) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (rate, 1, 2)
            assert file.readframes(10_000) == samples
    assert decoded(f"data:{head};base64,") == b""


def test_samples_of_hardly_any_rate_are_refused() -> None:
    with pytest.raises(ValueError, match="samples of 7 Hz"):
        DataUri.parse("data:audio/pcm;rate=7;base64,AAAA")
