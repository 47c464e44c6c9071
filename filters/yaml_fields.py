"""One YAML mapping read field by field, so that everything wrong with it is told with its line.

Not here: which fields there are, and what their values mean (`rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn

import yaml

# libyaml reads 5,000 rules in 0.2 s, PyYAML itself in 2; PyYAML may be built without it.
_QUICK_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Refuse = Callable[[int, str], NoReturn]  # line, problem


def composed(text: str, refuse: Refuse) -> yaml.Node | None:
    """The root node of a YAML text; None if there is nothing in it."""
    try:
        return _compose(text, _QUICK_LOADER)
    except yaml.YAMLError:
        pass  # the other loader says better what is wrong
    try:
        return _compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        refuse(_line_of(error, text), f"not valid YAML: {_problem_of(error)}")


def _compose(text: str, loader: Any) -> yaml.Node | None:
    root: yaml.Node | None = yaml.compose(text, Loader=loader)
    return root


class Fields:
    """The fields of a mapping. Scalars are taken as they are written: `110` and `no` are texts."""

    def __init__(self, node: yaml.Node, known: Collection[str], refuse: Refuse) -> None:
        """Refuses what is no mapping, an unknown field, and a field that is given twice."""
        self._node = node
        self._values: dict[str, yaml.Node] = {}
        self._refuse = refuse
        if not isinstance(node, yaml.MappingNode):
            self.refuse("", "a rule is a mapping of fields, as in `- id: …`")
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value not in known:
                refuse(line, f"unknown field {key.value!r}; known fields: {', '.join(known)}")
            if key.value in self._values:
                refuse(line, f"the field {key.value!r} is given twice")
            self._values[key.value] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def line_of(self, name: str) -> int:
        """The line of the field's value; that of the mapping if the field is missing."""
        return int(self._values.get(name, self._node).start_mark.line) + 1

    def refuse(self, name: str, problem: str) -> NoReturn:
        self._refuse(self.line_of(name), problem)

    def text(self, name: str) -> str:
        return self._scalar(name, self._values[name])

    def word(self, name: str, allowed: Collection[str], default: str | None) -> str:
        """One of the allowed words. Without a default the field must be there."""
        if name not in self:
            if default is None:
                self.refuse(name, f"a rule needs {name}: one of {', '.join(allowed)}")
            return default
        word = self.text(name)
        if word not in allowed:
            self.refuse(name, f"{name} is {word!r}; it must be one of {', '.join(allowed)}")
        return word

    def flag(self, name: str) -> bool:
        """True or false; false if it is not there."""
        if name not in self:
            return False
        node: Any = self._values[name]
        if not node.tag.endswith(":bool"):
            self.refuse(name, f"{name} must be true or false")
        return str(node.value).lower() in ("true", "yes", "on")

    def texts(self, name: str, problem_of: Callable[[str], str | None]) -> tuple[str, ...]:
        """One text or a list of them, each checked, without what comes twice."""
        node = self._values[name]
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not nodes:
            self.refuse(name, f"{name} is an empty list")
        texts: dict[str, None] = {}
        for item in nodes:
            text = self._scalar(name, item)
            if problem := problem_of(text):
                self._refuse(item.start_mark.line + 1, problem)
            texts[text] = None
        return tuple(texts)

    def _scalar(self, name: str, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag.endswith(":null"):
            self._refuse(node.start_mark.line + 1, f"{name} must be text")
        return str(node.value)


def _line_of(error: yaml.YAMLError, text: str) -> int:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return int(error.problem_mark.line) + 1
    return text.count("\n", 0, getattr(error, "position", 0)) + 1


def _problem_of(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
