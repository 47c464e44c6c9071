"""Whether a text begins with a list of Python calls, as the models of `pythonic` parsers write their tool
calls.

vLLM asks a regular expression first, which takes 0.7 s for one call with 15,000 characters of arguments and
is broken off after 1 s where the call is cut short. Python's own grammar says the same in a millisecond.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Final

_NAME: Final = re.compile(r"[a-zA-Z]\w*")
_BEGIN: Final = re.compile(r"\[[a-zA-Z]")


class PythonCalls:
    """Stands in for the compiled expression: `match` is all that is asked of it."""

    def match(self, text: str, timeout: float | None = None) -> bool | None:
        """True for `[name(key=…), …]`, else None. No blank may stand before the first key."""
        if not _BEGIN.match(text):
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in strings that Python will refuse some day
                first = ast.parse(text).body[0]
        except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):
            return None  # the caller would fail at the same place
        calls = first.value if isinstance(first, ast.Expr) else None
        return True if isinstance(calls, ast.List) and _are_calls(calls.elts, text) else None


def _are_calls(nodes: list[ast.expr], text: str) -> bool:
    """What the expression looks at: all up to the first key. The caller sees to the rest."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return False
        if not _NAME.fullmatch(node.func.id):
            return False
        line, begin = node.func.end_lineno or 0, (node.func.end_col_offset or 0) + 1
        if node.args or node.keywords:
            rest = text.split("\n")[line - 1].encode()[begin:].decode()
            return re.match(r"[a-zA-Z]\w*=", rest) is not None
        if (node.end_lineno, node.end_col_offset) != (line, begin + 1):
            return False
    return bool(nodes)
