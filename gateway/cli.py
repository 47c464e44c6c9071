"""The `headrace` command: its subcommands and their flags, made from the table of settings.

Exit codes: 0 done, 1 failed while running, 2 wrong usage or settings, 130 interrupted. Nothing heavy is
imported before the command that needs it has been chosen.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gateway.bench import flags as bench_flags
from gateway.settings import Settings
from gateway.settings_field import ALL
from gateway.settings_table import Setting, table
from gateway.settings_text import by_topic, written

OK: Final = 0
FAILED: Final = 1
BAD_USAGE: Final = 2
INTERRUPTED: Final = 130

_USAGE_NOTE: Final = "Each setting is also a variable (HEADRACE_PORT) and a key of the --config file (port)."
_ENGINE_NOTE: Final = "Everything after -- goes to vLLM: headrace worker --model PATH -- --max-num-seqs 64"

# name: (what it does, the module that runs it)
_COMMANDS: Final = {
    "serve": ("everything on this machine: a gateway, and a worker with a model", "gateway.run_serve"),
    "worker": ("an engine that gateways connect to", "gateway.run_worker"),
    "gateway": ("the gateway in front of workers", "gateway.run_gateway"),
    "check-config": ("print the effective settings and where they come from", "gateway.check_command"),
    "chat": ("talk to a running gateway from this shell", "gateway.chat_command"),
    "bench": ("load test a server with OpenAI's API, this gateway or another", "gateway.bench.command"),
    "rules": ("check a rule file", "gateway.check_command"),
    "version": ("print the versions", "gateway.check_command"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    own, engine_args = _split_engine_args(arguments)
    given = vars(parser.parse_args(own))
    command = given.pop("command")
    if engine_args is not None:
        if "engine_args" not in {row.name for row in rows_of(command)}:
            parser.error(f"`headrace {command}` takes nothing after --")
        given["engine_args"] = engine_args
    try:  # importing takes a while, in which Ctrl-C is as likely
        module = importlib.import_module(_COMMANDS[command][1])
        run = getattr(module, "main_" + command.replace("-", "_"))
        return int(run(given))
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. It leaves out what was not given, and checks no value: the settings do."""
    about = "A streaming gateway in front of vLLM."
    parser = argparse.ArgumentParser(prog="headrace", description=about, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    parsers = {name: _add_command(commands, name, text) for name, (text, _) in _COMMANDS.items()}
    for name, each in parsers.items():
        add_flags(each, rows_of(name))
    _add_chat(parsers["chat"])
    bench_flags.add_flags(parsers["bench"])
    rules = parsers["rules"].add_subparsers(dest="action", required=True, metavar="ACTION")
    check = rules.add_parser("check", help="compile a rule file, say what is wrong, print its size")
    check.add_argument("file", metavar="FILE")
    return parser


def _add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_epilog(name),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def rows_of(command: str) -> tuple[Setting, ...]:
    """The settings that a command takes."""
    commands = ALL if command == "check-config" else {command}
    return tuple(row for row in table() if row.commands & commands)


def add_flags(parser: argparse.ArgumentParser, rows: Iterable[Setting]) -> None:
    """A flag for each setting, under its topic."""
    for topic, members in by_topic(rows).items():
        group = parser.add_argument_group(topic)
        for row in members:
            # engine_args are what follows `--`.
            if row.name != "engine_args" and not row.about.file_only:
                group.add_argument(row.flag, *row.about.flags, dest=row.name, help=_help(row), **_action(row))


def _action(row: Setting) -> dict[str, Any]:
    if row.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    metavar = "{" + ",".join(row.choices) + "}" if row.choices else _metavar(row)
    return {"action": "append" if row.is_list else "store", "metavar": metavar}


def _metavar(row: Setting) -> str:
    words = {"bytes": "BYTES", "s": "SECONDS", "ms": "MS", "port": "PORT"}
    if row.about.unit:
        return words.get(row.about.unit, "N")
    return "FILE" if row.about.is_file else row.name.rsplit("_", 1)[-1].upper()


def _help(row: Setting) -> str:
    default = written(row, row.default)
    return (row.about.help + (f" [{default}]" if default else "")).replace("%", "%%")


def _epilog(command: str) -> str | None:
    rows = rows_of(command)
    notes = [_USAGE_NOTE] if rows else []
    notes += [_ENGINE_NOTE] if "engine_args" in {row.name for row in rows} else []
    return "\n".join(notes) or None


def _add_chat(parser: argparse.ArgumentParser) -> None:
    http = Settings().http
    parser.add_argument("question", nargs="?", metavar="QUESTION", help="ask this, print the answer, and end")
    parser.add_argument(
        "--url", metavar="URL", help=f"the gateway's address [http://{http.host}:{http.port}]"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the model to talk to [the first that the gateway has]"
    )
    parser.add_argument("--api-key", metavar="KEY", help="key to send; HEADRACE_API_KEY does the same")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="longest answer, in tokens")


def _split_engine_args(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]
