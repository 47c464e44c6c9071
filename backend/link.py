"""The link's wire format: frames and the handshake's arithmetic. No sockets, no clock.

What cuts a byte stream into frames is `backend.framing`.

A frame is `length: uint32 LE | kind: uint8 | payload`, the payload one msgpack array (msgspec `array_like`)
whose length does not count the five header bytes. One connection per gateway process and worker, multiplexed
by slot.

    worker  -> CHALLENGE{nonce, version}
    gateway -> HELLO{version, mac(secret, nonce), nonce, name}
    worker  -> WELCOME{mac(secret, gateway's nonce), model, files, …}
    gateway -> MEDIA* PIECE* SUBMIT | ABORT | FETCH
    worker  -> STEP | CLOSED | ERROR | STATS | FILE

A slot number belongs to the gateway. It is free again only after the worker's last frame for it: a delta
with a finish, an ERROR, or CLOSED answering an ABORT. Every entry carries the slot's generation, so that a
token can never reach the stream that uses the slot next.

Durations, never clocks: monotonic clocks of two processes cannot be compared.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, Any, Final

import msgspec

VERSION: Final = (0, 3)  # major, minor; a peer one minor version older or newer is fine
HEADER: Final = struct.Struct("<IB")
HEADER_BYTES: Final = HEADER.size
# Prompts and media travel in pieces; the largest frames: a file piece, a step of logprobs, a JSON schema.
MAX_FRAME_BYTES: Final = 8 << 20
PIECE_BYTES: Final = 64 << 10  # an abort waits behind one piece at most: 64 KiB is 0.05 ms at 10 Gbit/s
MAX_SLOTS: Final = 1 << 16  # per connection; bounds what a peer can make the other side remember

CHALLENGE: Final = 1
HELLO: Final = 2
WELCOME: Final = 3
SUBMIT: Final = 4
PIECE: Final = 5
ABORT: Final = 6
FETCH: Final = 7
STEP: Final = 8
CLOSED: Final = 9
ERROR: Final = 10
STATS: Final = 11
FILE: Final = 12
MEDIA: Final = 13


class LinkError(Exception):
    """The peer broke the protocol, or is not to be trusted. The connection ends."""


Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
Generation = Annotated[int, msgspec.Meta(ge=0)]  # a negative one is nobody's, see `backend.slots`


class Frame(msgspec.Struct, array_like=True):
    """Base of every frame; subclasses set their kind in `KINDS`."""


class Challenge(Frame):
    nonce: bytes
    version: tuple[int, int]


class Hello(Frame):
    version: tuple[int, int]
    mac: bytes
    nonce: bytes
    name: str


class FileInfo(msgspec.Struct, array_like=True):
    """A model file that the gateway may need: tokenizer, its configuration, config.json, templates."""

    name: str
    sha256: str
    num_bytes: int


class MediaInfo(msgspec.Struct, array_like=True):
    """How the model takes one kind of media; `pipeline.values.MediaSupport`."""

    token_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    max_count: Annotated[int, msgspec.Meta(ge=0)]


class Welcome(Frame):
    """All that a gateway must know of a worker."""

    mac: bytes
    worker: str  # the worker's own name, unique per start
    model_names: list[str]
    max_model_len: int
    block_size: int  # KV cache block in tokens; prefixes shorter than one never hit
    default_sampling: dict[str, Any]  # the generation_config, as vLLM's get_diff_sampling_param() has it
    fingerprint: str  # of everything that determines the ids: tokenizer and template files
    files: list[FileInfo]
    versions: dict[str, str]
    scripted: bool = False
    reasoning_parser: str | None = None
    max_running: int = 0
    engine_path: str = ""  # "steps", "generate" or "scripted"
    media: dict[str, MediaInfo] = {}  # since 0.3: by kind; no other media may be sent


class MediaHead(msgspec.Struct, array_like=True):
    """One image or sound of a prompt; its bytes came before, in MEDIA frames."""

    kind: str  # image, audio
    format: str  # png, wav, …
    digest: str
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Submit(Frame):
    """Start one choice. `ids` is the (rest of the) prompt, int32 little-endian, after this slot's PIECEs."""

    slot: Slot
    generation: Generation
    ids: bytes
    sampling: dict[str, Any]  # vLLM SamplingParams fields, complete, with max_tokens
    priority: int = 0
    cache_salt: str | None = None
    reasoning_ended: bool | None = None  # since 0.2: an older worker passes over this, and finds out itself
    reasoning_parser_kwargs: dict[str, Any] | None = None
    media: list[MediaHead] | None = None  # since 0.3: one for each placeholder, in their order by kind


class Piece(Frame):
    """A part of a long prompt, before its SUBMIT. `ids` stays the last field: see `piece_head`."""

    slot: Slot
    generation: Generation
    ids: bytes


class Media(Frame):
    """A part of a prompt's media, all files one after the other, before its SUBMIT. `data` stays last."""

    slot: Slot
    generation: Generation
    data: bytes


class Abort(Frame):
    slots: list[tuple[Slot, Generation]]  # (slot, generation)


class Fetch(Frame):
    sha256: str


class Extra(msgspec.Struct, array_like=True, gc=False):
    """The rare parts of a delta: what comes with the first token, and logprobs."""

    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    is_first: bool = False
    # per id: ([token ids: the sampled one, then the top k], [their logprobs], rank of the sampled one)
    logprobs: list[tuple[list[int], list[float], int]] | None = None
    prompt_tokens: int | None = None  # since 0.3: with the first token of a prompt with media, which grew


class Delta(msgspec.Struct, array_like=True, gc=False):
    """New ids of one slot. With `finish` it is the worker's last word on this slot and generation.

    `gc=False` here and in `Extra`: thousands of them live for one step each and none can be part of a cycle.
    """

    slot: Slot
    generation: Generation
    ids: list[int]
    finish: str | None = None  # stop, length, abort, error, repetition
    stop: int | str | None = None
    extra: Extra | None = None


class Step(Frame):
    """What one engine step made for this connection."""

    deltas: list[Delta]


class Closed(Frame):
    """These slots are free: aborted in the engine, no frame for them follows."""

    slots: list[tuple[Slot, Generation]]


class Error(Frame):
    """One slot failed; it is free.

    `kind` is `busy` (try again), `rejected` (the engine refused it) or `engine` (it died).
    """

    slot: Slot
    generation: Generation
    kind: str
    message: str


class Stats(Frame):
    """About once a second, also when idle: the link's heartbeat.

    Before WELCOME it says that the engine still loads.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0 to 1
    prefix_queries: int = 0  # tokens, cumulative
    prefix_hits: int = 0
    preemptions: int = 0
    engine_alive: bool = True
    accepting: bool = True  # False: the worker drains, and answers each SUBMIT with a `busy` ERROR


class FilePiece(Frame):
    sha256: str
    offset: int
    data: bytes
    last: bool


KINDS: Final[dict[type[Frame], int]] = {
    Challenge: CHALLENGE,
    Hello: HELLO,
    Welcome: WELCOME,
    Submit: SUBMIT,
    Piece: PIECE,
    Abort: ABORT,
    Fetch: FETCH,
    Step: STEP,
    Closed: CLOSED,
    Error: ERROR,
    Stats: STATS,
    FilePiece: FILE,
    Media: MEDIA,
}
_encode_into = msgspec.msgpack.Encoder().encode_into
_BIN_32: Final = struct.Struct(">BI")  # msgpack's header of a `bin 32`: 0xC6, length
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(frame) for frame, kind in KINDS.items()}


def encode(frame: Frame) -> bytearray:
    """A frame as bytes, header included."""
    buffer = bytearray(HEADER_BYTES)
    _encode_into(frame, buffer, HEADER_BYTES)
    HEADER.pack_into(buffer, 0, len(buffer) - HEADER_BYTES, KINDS[type(frame)])
    return buffer


def piece_head(slot: int, generation: int, num_bytes: int) -> bytes:
    """A PIECE frame up to its ids: `num_bytes` of them follow as they are, from wherever they lie."""
    return _head(Piece(slot, generation, b""), num_bytes)


def media_head(slot: int, generation: int, num_bytes: int) -> bytes:
    """A MEDIA frame up to its data, as `piece_head`."""
    return _head(Media(slot, generation, b""), num_bytes)


def _head(frame: Piece | Media, num_bytes: int) -> bytes:
    head = encode(frame)
    head[-2:] = _BIN_32.pack(0xC6, num_bytes)  # in place of the header of no bytes
    HEADER.pack_into(head, 0, len(head) - HEADER_BYTES + num_bytes, KINDS[type(frame)])
    return bytes(head)


def decode(kind: int, payload: bytes | memoryview) -> Any:
    """The frame of this kind. Raises `LinkError` for an unknown kind or a payload of another shape."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise LinkError(f"unknown frame kind {kind}")
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise LinkError(f"bad payload of frame kind {kind}: {error}") from error


def proof(secret: bytes, nonce: bytes, role: bytes) -> bytes:
    """HMAC-SHA256 over the peer's nonce. `role` keeps one side's proof from being replayed as the other's."""
    return hmac.new(secret, role + b"\0" + nonce, hashlib.sha256).digest()


def check_proof(secret: bytes, nonce: bytes, role: bytes, mac: bytes) -> None:
    """Raises `LinkError` unless `mac` proves knowledge of the secret. Constant time."""
    if not hmac.compare_digest(proof(secret, nonce, role), mac):
        raise LinkError("the shared secrets of gateway and worker differ")


def check_version(peer: tuple[int, int]) -> None:
    """Raises `LinkError` unless the peer is at most one minor version older or newer."""
    if peer[0] != VERSION[0] or abs(peer[1] - VERSION[1]) > 1:
        raise LinkError(f"link version {peer[0]}.{peer[1]} does not work with {VERSION[0]}.{VERSION[1]}")
