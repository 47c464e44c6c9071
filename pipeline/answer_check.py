"""Whether an answer is the JSON that was asked for: the grammar as it passes, the schema at the end.

Not here: the grammar and schemas as such (`filters/json_check.py`), and what is done about a problem.
"""

from __future__ import annotations

from filters.json_check import JsonCheck
from filters.json_schema import Schema, check_schema


class AnswerCheck:
    """One answer. `pipeline.channel_text.TextCheck`. `schema` None: any object is fine."""

    def __init__(self, schema: Schema | None) -> None:
        self._json = JsonCheck(is_object=schema is None)
        self._schema = schema
        self._parts: list[str] = []

    @property
    def problem(self) -> str | None:
        """What is wrong with the text so far."""
        return self._json.problem

    def feed(self, text: str) -> int | None:
        """How many of these characters are fine if something is wrong, else None."""
        if self._schema is not None:
            self._parts.append(text)
        return self._json.feed(text)

    def finish(self) -> str | None:
        """The answer is complete: what is wrong with it as a whole."""
        if self._json.problem is None:
            self._json.flush()
        if self._json.problem is not None or self._schema is None:
            return self._json.problem
        return check_schema("".join(self._parts), self._schema)
