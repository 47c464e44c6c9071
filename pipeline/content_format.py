"""What a chat template expects a message's content to be: a string, or a list of parts.

OpenAI's API allows both; a template is written for one of them, or tells them apart. As vLLM's "auto" content
format does, this reads the template's syntax tree and looks for a loop over a message's content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jinja2 import nodes


@dataclass(frozen=True, slots=True)
class ContentFormat:
    """`takes_parts`: the template loops over content parts. `takes_strings`: it says itself what to do with a
    string (`content is string`), or knows nothing but strings. `keeps_null`: it asks whether an assistant's
    content is null (`content is none`), where others fail on null and get an empty text."""

    takes_parts: bool
    takes_strings: bool
    keeps_null: bool = False


def detect(template: nodes.Template) -> ContentFormat:
    """The content format of a parsed template."""
    takes_parts = any(True for _ in _loops_over_content(template))
    tests_for_string = any(test.name == "string" for test in template.find_all(nodes.Test))
    return ContentFormat(takes_parts, tests_for_string or not takes_parts, _asks_for_null(template))


def _asks_for_null(template: nodes.Template) -> bool:
    return any(
        test.name == "none" and (_names(test.node) == "content" or _member(test.node, "content") is not None)
        for test in template.find_all(nodes.Test)
    )


def _loops_over_content(template: nodes.Template) -> Iterator[nodes.For]:
    messages = _aliases(template, "messages")
    loops = list(template.find_all(nodes.For))
    message_names = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and _names(loop.iter) in messages
    }

    def is_content(node: nodes.Node | None) -> bool:
        return _member(node, "content") in message_names

    parameters = _parameters_given(template, is_content)
    for loop in loops:
        # A variable set from a message's content has nearly always this name.
        scope = parameters.get(id(loop), {"content"})
        if is_content(loop.iter) or _names(loop.iter) in scope:
            yield loop


def _parameters_given(
    template: nodes.Template, is_given: Callable[[nodes.Node], bool]
) -> dict[int, set[str]]:
    """Loop within a macro (by identity) -> that macro's parameters that some call gives such an argument."""
    calls = list(template.find_all(nodes.Call))
    found = {}
    for macro in template.find_all(nodes.Macro):
        names = [parameter.name for parameter in macro.args]
        given = set()
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given |= {name for name, value in zip(names, call.args, strict=False) if is_given(value)}
                given |= {keyword.key for keyword in call.kwargs if is_given(keyword.value)}
        found.update(dict.fromkeys(map(id, macro.find_all(nodes.For)), given))
    return found


def _aliases(template: nodes.Template, name: str) -> set[str]:
    """The variable and those that are assigned from it, its slices or filtered forms."""
    aliases = {name}
    assignments = list(template.find_all(nodes.Assign))
    for _ in assignments:  # an alias of an alias takes another round
        aliases |= {
            assignment.target.name
            for assignment in assignments
            if isinstance(assignment.target, nodes.Name) and _names(assignment.node) in aliases
        }
    return aliases


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """Without filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _names(node: nodes.Node | None) -> str | None:
    """The variable that a node is, or None."""
    bare = _bare(node)
    return bare.name if isinstance(bare, nodes.Name) else None


def _member(node: nodes.Node | None, key: str) -> str | None:
    """The variable whose member `key` a node is (`message.content`, `message['content']`), or None."""
    bare = _bare(node)
    if isinstance(bare, nodes.Getattr):
        is_key = bare.attr == key
    elif isinstance(bare, nodes.Getitem):
        is_key = isinstance(bare.arg, nodes.Const) and bare.arg.value == key
    else:
        return None
    return _names(bare.node) if is_key else None
