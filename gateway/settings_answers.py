"""Settings of answers: what reads their channels, how their text leaves, and what is told of rule hits.

How all settings hang together: `gateway/settings.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from gateway.settings_field import ALL, EDGE, About


@dataclass(frozen=True, slots=True)
class Answers:
    """Everything between the engine's text and the client that is not a rule."""

    TOPIC: ClassVar = "Answers"
    COMMANDS: ClassVar = EDGE

    tool_call_parser: Annotated[
        tuple[str, ...],
        About(
            "vLLM's parser of the model's tool calls, by its name there; vLLM must be installed beside the "
            "gateway; MODEL=NAME for one of several models, repeat for more"
        ),
    ] = ()
    reasoning_parser: Annotated[
        tuple[str, ...],
        About(
            "vLLM's parser of the model's reasoning, given like tool_call_parser; the workers of the model "
            "must have the same one",
            commands=ALL,
        ),
    ] = ()
    reasoning_content: Annotated[
        bool, About("send reasoning under its older name, reasoning_content, too")
    ] = False
    output_escape: Annotated[
        Literal["none", "html", "markdown"], About("markup in answers that is made harmless")
    ] = "none"
    allow_request_escape: Annotated[bool, About("requests may choose their own escape")] = False
    format_policy: Annotated[
        Literal["error", "flag"],
        About(
            "what happens to an answer that breaks its response_format: it ends with an error, or is marked"
        ),
    ] = "error"
    audit_log: Annotated[
        str,
        About(
            "where a line for each rule hit goes: `log` is standard output, with the request log; `off`; "
            "or a file to append to"
        ),
    ] = "log"


def parser_for(entries: Sequence[str], model: str) -> str | None:
    """The parser of a model: its own entry, else the one without a model's name."""
    return next((name for own, name in map(_split, entries) if own == model), None) or next(
        (name for own, name in map(_split, entries) if not own), None
    )


def check_parsers(setting: str, entries: Sequence[str]) -> Iterator[str]:
    """One line for each problem."""
    seen: set[str] = set()
    for entry in entries:
        model, name = _split(entry)
        if not name or entry.startswith("="):
            yield f"{setting}: {entry!r} is not allowed; it must be NAME or MODEL=NAME"
        elif model in seen:
            yield f"{setting}: there are two for {model or 'every model'}"
        seen.add(model)


def _split(entry: str) -> tuple[str, str]:
    """Model and name; the model is empty where the entry is for all."""
    model, _, name = entry.rpartition("=")
    return model, name
