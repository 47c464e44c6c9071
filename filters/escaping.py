"""Escaping: the last stage, for answers that are pasted into HTML or Markdown.

Each character is escaped for itself, whatever stands next to it, so no chunk border can split an entity or
change the result. That costs some backslashes that a look at the neighbours would save (`3\\.14`).

html: `& < > " '` become entities; the result is safe as text and in quoted attributes.

markdown: every ASCII punctuation character that begins or ends something in CommonMark, GitHub's tables,
strikethrough and autolinks, or common extensions (math, attributes, `==marks==`, emoji, mentions) gets a
backslash, which makes it that character and nothing else (CommonMark 0.31, section 2.4). What is left is
layout: line breaks, blank lines, and lines that are indented by four spaces, which show as code. A renderer
that searches the finished text for addresses may still link one; nothing written in the text can stop it.

Not here: whether to escape (settings), and JSON (`json_lexer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

ESCAPES: Final = ("none", "html", "markdown")

_HTML: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}
# Without , ; ? % / and quotes, which begin and end nothing: `&`, `:`, `[` and `(` before them are escaped.
_MARKDOWN: Final = {char: "\\" + char for char in "\\`*_{}[]()<>#+-.!|~=:@&$^"}


def escape_function(name: str) -> Callable[[str], str] | None:
    """The escaping of that name as a function of any piece of text; None for `none`.

    `escape(a) + escape(b) == escape(a + b)`. Raises `ValueError` for a name that is not in `ESCAPES`.
    """
    if name not in ESCAPES:
        raise ValueError(f"the escaping is {name!r}; it may be {', '.join(ESCAPES)}")
    return {"none": None, "html": _escape_by(_HTML), "markdown": _escape_by(_MARKDOWN)}[name]


def _escape_by(escapes: Mapping[str, str]) -> Callable[[str], str]:
    table = str.maketrans(dict(escapes))
    is_plain = frozenset(escapes).isdisjoint

    def escape(text: str) -> str:
        # Most tokens have none of the characters: 0.1 us for a word, `translate` takes twice as long.
        return text if is_plain(text) else text.translate(table)

    return escape
