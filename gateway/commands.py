"""What commands with settings have in common: load them, or say what is wrong and return the exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from filters.rules import RuleError
from gateway.cli import BAD_USAGE, FAILED
from gateway.listen import ListenError
from gateway.settings import Settings
from gateway.settings_load import SettingsError, load

RULE_PROBLEMS: Final = (RuleError, OSError)


def with_settings(flags: Mapping[str, Any], run: Callable[[Settings], int]) -> int:
    """The exit code of `run`. Bad settings and a taken address are told in plain lines, not a traceback."""
    try:
        return run(load(flags).settings)
    except SettingsError as error:
        for problem in error.problems:
            say(problem)
        return BAD_USAGE
    except ListenError as error:
        say(str(error))
        return FAILED


def say(text: str) -> None:
    """A line for the person at the terminal."""
    print(f"headrace: {text}", file=sys.stderr, flush=True)


def set_up_logging(level: str) -> None:
    """Log lines go to standard error; of uvicorn's only warnings."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form, stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
