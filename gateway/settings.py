"""The settings: every name, type, default, unit and help text, as frozen groups of fields.

Where a value comes from (flags, HEADRACE_* variables, the YAML file) and whether it is good is decided in
`gateway/settings_load.py`; the worker's groups are in `gateway/settings_worker.py`. This module imports
nothing heavy, so that `headrace --help` stays quick.

One name everywhere: the field `queue_limit_s` is the flag `--queue-limit-s`, the variable
`HEADRACE_QUEUE_LIMIT_S` and the YAML key `queue_limit_s`. Settings that are structures are YAML keys only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from gateway.prompt_settings import WarmPrompt
from gateway.settings_access import Access
from gateway.settings_answers import Answers
from gateway.settings_field import ALL, BOTH, EDGE, GATEWAY, About
from gateway.settings_media import Media
from gateway.settings_realtime import Realtime
from gateway.settings_streams import Streams
from gateway.settings_tokens import Tokens
from gateway.settings_upstream import Upstream
from gateway.settings_worker import Engine, Scripted
from pipeline.context_policy import ContextPolicy
from pipeline.prompt_templates import PromptTemplate

ENV_PREFIX: Final = "HEADRACE_"
# Read by the set-up scripts and the tests, not by the program.
OTHER_VARIABLES: Final = ("HEADRACE_PYTHON", "HEADRACE_ENGINE", "HEADRACE_TORCH_INDEX", "HEADRACE_TEST_")
MASK: Final = "********"


@dataclass(frozen=True, slots=True)
class General:
    """Settings of every command."""

    TOPIC: ClassVar = "General"
    COMMANDS: ClassVar = ALL

    config: Annotated[
        Path | None, About("YAML file with settings; flags and variables beat it", is_file=True)
    ] = None
    cache: Annotated[Path, About("folder for the embedded model and fetched model files")] = Path(
        "~/.cache/headrace"
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], About("least severe line that is logged")
    ] = "info"


@dataclass(frozen=True, slots=True)
class Http:
    """The listening side: addresses, TLS, processes, and what a connection may do before a request exists."""

    TOPIC: ClassVar = "Listening"
    COMMANDS: ClassVar = EDGE

    host: Annotated[str, About("address to listen on")] = "127.0.0.1"
    port: Annotated[
        int, About("TCP port to listen on; 0 takes a free one", "port", at_least=0, at_most=65535)
    ] = 8000
    uds: Annotated[Path | None, About("Unix socket to listen on, instead of host and port")] = None
    ssl_certfile: Annotated[Path | None, About("TLS certificate chain (PEM)", is_file=True)] = None
    ssl_keyfile: Annotated[Path | None, About("TLS private key (PEM)", is_file=True)] = None
    processes: Annotated[
        int, About("gateway processes that share the port", "processes", at_least=1, at_most=256)
    ] = 1
    backlog: Annotated[int, About("connections that may wait to be accepted", "connections", at_least=1)] = (
        2048
    )
    max_header_bytes: Annotated[
        int, About("request line and headers; more is 431", "bytes", at_least=1024)
    ] = 64 << 10
    max_body_bytes: Annotated[int, About("request body; more is 413", "bytes", at_least=1024)] = 32 << 20
    header_limit_s: Annotated[float, About("time for a client to send its headers", "s", above=0)] = 20.0
    body_limit_s: Annotated[float, About("time for a client to send its body", "s", above=0)] = 60.0
    # nginx keeps idle upstream connections for 60 s and clients to nginx for 75 s; the side that closes first
    # must be nginx, or a request meets a connection that has just gone.
    keep_alive_s: Annotated[
        float,
        About(
            "idle connection kept open; longer than nginx's 75", "s", above=0, flags=("--timeout-keep-alive",)
        ),
    ] = 90.0
    drain_limit_s: Annotated[
        float,
        About(
            "time for running requests to finish after SIGTERM",
            "s",
            at_least=0,
            flags=("--shutdown-timeout",),
            commands=ALL,
        ),
    ] = 30.0


@dataclass(frozen=True, slots=True)
class Link:
    """The connections between gateways and workers, and their trust."""

    TOPIC: ClassVar = "Link"
    COMMANDS: ClassVar = BOTH

    worker: Annotated[
        tuple[str, ...],
        About(
            "worker to connect to, tcp://HOST:PORT or unix:///PATH; repeat for several",
            commands=frozenset({GATEWAY}),
        ),
    ] = ()
    link_secret: Annotated[str | None, About("secret that gateways and workers share", secret=True)] = field(
        default=None, repr=False
    )
    link_secret_file: Annotated[Path | None, About("file that holds the link's secret", is_file=True)] = None
    link_certfile: Annotated[
        Path | None, About("TLS certificate of this end of the link (PEM)", is_file=True)
    ] = None
    link_keyfile: Annotated[Path | None, About("TLS key of this end of the link (PEM)", is_file=True)] = None
    link_cafile: Annotated[
        Path | None,
        About(
            "TLS authority that the other end must be signed by (PEM); on a gateway it switches TLS on",
            is_file=True,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on requests, in the order in which a request meets them."""

    TOPIC: ClassVar = "Limits"
    COMMANDS: ClassVar = EDGE

    max_messages: Annotated[int, About("messages in one chat", "messages", at_least=1)] = 4096
    max_text_chars: Annotated[int, About("characters of text in one request", "characters", at_least=1)] = (
        4_000_000
    )
    max_text_bytes: Annotated[int, About("bytes of text in one request, in UTF-8", "bytes", at_least=1)] = (
        16 << 20
    )
    max_content_parts: Annotated[
        int, About("content parts in all messages of one chat", "parts", at_least=1)
    ] = 16_384
    max_values: Annotated[
        int,
        About("fields of objects and members of arrays, in what reaches the prompt", "values", at_least=1),
    ] = 131_072
    max_tools: Annotated[int, About("tools of one request", "tools", at_least=1)] = 1024
    max_stop_strings: Annotated[int, About("stop strings of one request", "strings", at_least=1)] = 4
    max_stop_chars: Annotated[int, About("characters of one stop string", "characters", at_least=1)] = 256
    max_n: Annotated[int, About("choices per request", "choices", at_least=1)] = 16
    default_max_tokens: Annotated[
        int,
        About("output tokens when the client gives no limit; reserved in the context", "tokens", at_least=1),
    ] = 2048
    queue_max_requests: Annotated[
        int, About("requests queued per worker; more is 503", "requests", at_least=1)
    ] = 256
    queue_max_tokens: Annotated[
        int, About("prompt tokens queued per worker; more is 503", "tokens", at_least=1)
    ] = 1_000_000
    queue_limit_s: Annotated[float, About("time until the first token", "s", above=0)] = 60.0
    stall_limit_s: Annotated[
        float, About("time without a token, or without a sign of the worker", "s", above=0)
    ] = 30.0
    request_limit_s: Annotated[float, About("time for a whole request", "s", above=0)] = 600.0
    heartbeat_s: Annotated[
        float, About("time between heartbeat comments while no token flows", "s", above=0, at_most=9)
    ] = 5.0
    slow_reader_bytes: Annotated[
        int, About("unsent bytes of a client that does not read", "bytes", at_least=1024)
    ] = 256 << 10
    slow_reader_s: Annotated[float, About("time that such a client is kept", "s", above=0)] = 30.0


@dataclass(frozen=True, slots=True)
class Text:
    """What happens to text on its way in and out."""

    TOPIC: ClassVar = "Text"
    COMMANDS: ClassVar = EDGE

    rules: Annotated[tuple[str, ...], About("rule file (YAML) or plain word list; repeat for several")] = ()
    rules_action: Annotated[
        Literal["flag", "mask", "block"], About("what a plain word list does to its words")
    ] = "mask"
    hold_policy: Annotated[Literal["block", "release"], About("what happens to held text at a bound")] = (
        "block"
    )
    max_hold_chars: Annotated[
        int, About("raw characters that a filter may hold", "characters", at_least=1)
    ] = 256
    max_hold_s: Annotated[
        float, About("time that a filter may hold text while tokens come", "s", above=0)
    ] = 2.0
    rules_reload_s: Annotated[
        float, About("time between two looks at the rule files for changes; 0 never looks", "s", at_least=0)
    ] = 2.0
    max_seen_text_bytes: Annotated[
        int,
        About(
            "memory for texts that were scanned, so that they are not scanned again; 0 is none",
            "bytes",
            at_least=0,
        ),
    ] = 64 << 20
    control_characters: Annotated[
        Literal["reject", "strip", "keep"],
        About("what happens to control characters in a prompt, but tab and line ends"),
    ] = "keep"
    unencodable_characters: Annotated[
        Literal["reject", "strip"],
        About("what happens to NUL and half surrogate pairs, which no tokenizer can be trusted to carry"),
    ] = "reject"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that the gateway knows before they come, and what it does with those that are too long."""

    TOPIC: ClassVar = "Prompts"
    COMMANDS: ClassVar = EDGE

    templates: Annotated[
        tuple[PromptTemplate, ...],
        About("named prompt templates with slots; only in the configuration file", file_only=True),
    ] = ()
    warm: Annotated[
        tuple[WarmPrompt, ...],
        About(
            "prompts that workers keep in their prefix cache; only in the configuration file", file_only=True
        ),
    ] = ()
    warm_before_ready: Annotated[
        bool, About("/ready waits until the first workers have tried every warm prompt")
    ] = False
    warm_ready_limit_s: Annotated[
        float, About("longest that /ready waits for warm prompts", "s", above=0)
    ] = 60.0
    rewarm_interval_s: Annotated[
        float,
        About("least time between two warm-ups of a prompt on a worker that has evicted it", "s", above=0),
    ] = 10.0
    chat_template: Annotated[
        Path | None, About("chat template (Jinja) instead of the model's own", is_file=True)
    ] = None
    raw_control_strings: Annotated[
        Literal["control", "text"],
        About("what control strings in prompts of /v1/completions are; in chats they are always text"),
    ] = "control"
    token_cache_bytes: Annotated[
        int, About("memory for the token ids of prompts' segments; 0 is none", "bytes", at_least=0)
    ] = 256 << 20
    remember_answers: Annotated[
        bool, About("tokenize the answers of chats that go on when they end, ahead of the next turn")
    ] = True
    token_buffer_bytes: Annotated[
        int,
        About(
            "memory for prompts on their way; requests wait when it is used up", "bytes", at_least=16 << 20
        ),
    ] = 256 << 20
    encode_queue_chars: Annotated[
        int, About("characters that wait to be tokenized; more is 503", "characters", at_least=1)
    ] = 16_000_000
    context_policy: Annotated[
        ContextPolicy,
        About("what happens to a chat that is too long; a request can say otherwise"),
    ] = "error"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a process. `Settings()` is the defaults."""

    general: General = General()
    http: Http = Http()
    access: Access = field(default_factory=Access)
    link: Link = Link()
    upstream: Upstream = field(default_factory=Upstream)
    limits: Limits = Limits()
    text: Text = Text()
    prompts: Prompts = Prompts()
    answers: Answers = field(default_factory=Answers)
    tokens: Tokens = field(default_factory=Tokens)
    streams: Streams = field(default_factory=Streams)
    realtime: Realtime = field(default_factory=Realtime)
    media: Media = field(default_factory=Media)
    engine: Engine = field(default_factory=Engine)
    scripted: Scripted = field(default_factory=Scripted)
