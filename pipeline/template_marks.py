"""Marks in a chat template's own literals, so that the rendered text shows which control strings are its own.

`Marker` puts a mark before every control string in those literals of a template that flow into the prompt.
What a template only looks for in its input stays as it is (`'</think>' in content`,
`content.split('</think>')`), so it still behaves. User text has no marks, whatever it spells, and however the
template joins, trims or cuts it.

Some templates put a control string together from literals and a role (`'<|' + message.role + '|>'`). Such a
place becomes a call of `COMPOSE`, which marks the result if the role is one of the known ones.

Not here: what is done with the marks (`rendering.py`), and what a control string is (`controls.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from jinja2 import nodes

from pipeline.controls import ControlStrings

COMPOSE: Final = "_headrace_compose"
KNOWN_ROLES: Final = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "model", "ipython", "observation"}
)
# Arguments of filters and methods that come out again; of all others they only decide something.
_FLOWING_ARGUMENTS: Final[Mapping[str, slice]] = {
    "default": slice(0, 1),
    "d": slice(0, 1),
    "join": slice(0, 1),
    "format": slice(0, None),
    "cycle": slice(0, None),
    "get": slice(1, 2),
    "pop": slice(1, 2),
    "replace": slice(1, 2),
}
_NONE: Final = slice(0, 0)
# Methods that hand on what they are called on.
_PASSING_METHODS: Final = frozenset(
    {"strip", "lstrip", "rstrip", "replace", "format", "join", "get", "removeprefix", "removesuffix"}
)
_SWALLOWING_FUNCTIONS: Final = frozenset({"raise_exception", "strftime_now", "range", COMPOSE})
# Statement fields whose values go on under a name.
_FLOWING_FIELDS: Final = frozenset(
    {("For", "iter"), ("With", "values"), ("Macro", "defaults"), ("CallBlock", "call"), ("ExprStmt", "node")}
)


def literals(template: nodes.Template) -> Iterator[str]:
    """All texts that a template holds."""
    for data in template.find_all(nodes.TemplateData):
        yield data.data
    for constant in template.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


class Marker:
    """Rewrites the syntax tree of one template. `special_names`: variables that hold control strings, by the
    names under which they are given with marks.

    `is_sure`: no value with a mark is compared or taken apart by the template, as far as its tree shows.
    """

    def __init__(self, controls: ControlStrings, mark: str, special_names: Mapping[str, str]) -> None:
        self._controls = controls
        self._mark = mark
        self._special_names = special_names
        self._num_marks = 0
        self._marked_names: set[str] = set()
        self._examined_names: set[str] = set()
        self._macros: dict[str, nodes.Macro] = {}

    @property
    def is_sure(self) -> bool:
        return not self._marked_names & self._examined_names

    def run(self, template: nodes.Template) -> None:
        """Mark the literals of a template, in place."""
        self._macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        for node in template.body:
            self._statement(node)

    def compose(self, before: str, role: object, after: str) -> str:
        """A role between two literals."""
        if isinstance(role, str) and role in KNOWN_ROLES:
            return self._controls.marked(before + role + after, self._mark)
        marked = self._controls.marked
        return marked(before, self._mark) + role + marked(after, self._mark)  # type: ignore[operator]

    # -- statements ----------------------------------------------------------------------------------------

    def _statement(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Output):
            node.nodes = [self._flowing(each) for each in self._composed(node.nodes)]
        elif isinstance(node, nodes.Assign):
            before = self._num_marks
            assert isinstance(node.node, nodes.Expr)
            node.node = self._flowing(node.node)
            if self._num_marks != before:
                self._marked_names |= {name.name for name in _names(node.target)}
        else:
            self._other_statement(node)

    def _other_statement(self, node: nodes.Node) -> None:
        """Bodies are statements; values that flow are those given to names; all else is only looked at."""
        for name, value in list(node.iter_fields()):
            children = value if isinstance(value, list) else [value]
            if name in ("body", "else_", "elif_"):
                for child in children:
                    self._statement(child)
            elif (type(node).__name__, name) in _FLOWING_FIELDS:
                flowing = [
                    self._flowing(child) if isinstance(child, nodes.Expr) else child for child in children
                ]
                setattr(node, name, flowing if isinstance(value, list) else flowing[0])
            else:
                for child in children:
                    if isinstance(child, nodes.Expr):
                        self._looked_at(child)

    # -- expressions ---------------------------------------------------------------------------------------

    def _flowing(self, node: nodes.Expr) -> nodes.Expr:
        """An expression whose value goes into the prompt."""
        if isinstance(node, nodes.TemplateData):
            node.data = self._controls.marked(node.data, self._mark)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            marked = self._controls.marked(node.value, self._mark)
            self._num_marks += marked != node.value
            node.value = marked
        elif isinstance(node, nodes.Name) and node.name in self._special_names:
            self._num_marks += 1
            node.name = self._special_names[node.name]
        elif isinstance(node, nodes.Add | nodes.Concat):
            return self._sum(node)
        else:
            self._parts(node)
        return node

    def _sum(self, node: nodes.Add | nodes.Concat) -> nodes.Expr:
        terms = [self._flowing(term) for term in self._composed(list(_terms(node)))]
        if isinstance(node, nodes.Concat):
            return nodes.Concat(terms, lineno=node.lineno)
        total = terms[0]
        for term in terms[1:]:
            total = nodes.Add(total, term, lineno=node.lineno)
        return total

    def _parts(self, node: nodes.Expr) -> None:
        if isinstance(node, nodes.Call):
            self._call(node)
        elif isinstance(node, nodes.Filter):
            if node.node is not None:
                node.node = self._flowing(node.node)
            self._arguments(node, _FLOWING_ARGUMENTS.get(node.name, _NONE))
        elif isinstance(node, nodes.Getitem):
            if isinstance(node.node, nodes.Dict | nodes.List | nodes.Tuple):
                node.node = self._flowing(node.node)
            self._looked_at(node.arg)
        elif isinstance(node, nodes.CondExpr):
            self._looked_at(node.test)
            node.expr1 = self._flowing(node.expr1)
            node.expr2 = None if node.expr2 is None else self._flowing(node.expr2)
        elif isinstance(node, nodes.Pair):
            node.value = self._flowing(node.value)
        elif isinstance(node, nodes.Compare | nodes.Test):
            self._looked_at(node)
        else:
            self._all_children(node)

    def _all_children(self, node: nodes.Node) -> None:
        """Lists, pairs, `and`, `or`, `%`, `*`: whatever they hold may come out."""
        for name, value in list(node.iter_fields()):
            if isinstance(value, list):
                setattr(node, name, [self._child(child) for child in value])
            elif isinstance(value, nodes.Expr | nodes.Helper):
                setattr(node, name, self._child(value))

    def _child(self, node: object) -> object:
        if isinstance(node, nodes.Expr):
            return self._flowing(node)
        if isinstance(node, nodes.Pair | nodes.Keyword):
            node.value = self._flowing(node.value)
        return node

    def _call(self, node: nodes.Call) -> None:
        callee = node.node
        if isinstance(callee, nodes.Getattr):
            if callee.attr in _PASSING_METHODS or isinstance(callee.node, nodes.Call | nodes.Getitem):
                callee.node = self._flowing(callee.node)
            else:
                self._examined_names |= {name.name for name in _names(callee.node)}
            self._arguments(node, _FLOWING_ARGUMENTS.get(callee.attr, _NONE))
        elif isinstance(callee, nodes.Name) and callee.name not in _SWALLOWING_FUNCTIONS:
            num_before = self._num_marks
            self._arguments(node, slice(0, None))  # a macro, `namespace`, `dict`
            if self._num_marks != num_before and callee.name in self._macros:
                self._marked_names |= {argument.name for argument in self._macros[callee.name].args}

    def _arguments(self, node: nodes.Call | nodes.Filter, flowing: slice) -> None:
        indexes = range(len(node.args))[flowing]
        node.args = [
            self._flowing(argument) if index in indexes else self._seen(argument)
            for index, argument in enumerate(node.args)
        ]
        for keyword in node.kwargs:
            if flowing != _NONE:
                keyword.value = self._flowing(keyword.value)

    def _seen(self, node: nodes.Expr) -> nodes.Expr:
        self._looked_at(node)
        return node

    def _looked_at(self, node: nodes.Expr) -> None:
        """An expression that decides something and does not come out: its literals stay as they are."""
        compares = [node] if isinstance(node, nodes.Compare) else []
        for compare in (*compares, *node.find_all(nodes.Compare)):
            self._examined_names |= {name.name for name in compare.find_all(nodes.Name)}

    # -- roles between literals ----------------------------------------------------------------------------

    def _composed(self, parts: list[nodes.Expr]) -> list[nodes.Expr]:
        """The parts of a text, with literal, role, literal as one call where they make a control string."""
        out: list[nodes.Expr] = []
        index = 0
        while index < len(parts):
            triple = parts[index : index + 3]
            if len(triple) == 3 and self._makes_control(triple):
                before, role, after = triple
                arguments = [nodes.Const(_text(before)), role, nodes.Const(_text(after))]
                out.append(nodes.Call(nodes.Name(COMPOSE, "load"), arguments, [], None, None))
                index += 3
            else:
                out.append(parts[index])
                index += 1
        return out

    def _makes_control(self, triple: list[nodes.Expr]) -> bool:
        before, after = _text(triple[0]), _text(triple[2])
        if before is None or after is None or not _is_role(triple[1]):
            return False
        known = len(self._controls.split(before)) + len(self._controls.split(after)) - 1
        return any(len(self._controls.split(before + role + after)) != known for role in KNOWN_ROLES)


def _names(node: nodes.Node) -> Iterator[nodes.Name | nodes.NSRef]:
    """The variables in an expression or a target."""
    if isinstance(node, nodes.Name | nodes.NSRef):
        yield node
    yield from node.find_all(nodes.Name)
    yield from node.find_all(nodes.NSRef)


def _terms(node: nodes.Expr) -> Iterator[nodes.Expr]:
    """The terms of a sum, from left to right."""
    if isinstance(node, nodes.Add):
        yield from _terms(node.left)
        yield node.right
    elif isinstance(node, nodes.Concat):
        yield from node.nodes
    else:
        yield node


def _text(node: nodes.Expr) -> str | None:
    if isinstance(node, nodes.TemplateData):
        return node.data
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        return node.value
    return None


def _is_role(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return isinstance(node, nodes.Name) and "role" in node.name
