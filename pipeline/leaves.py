"""The untrusted strings of a request: reading, finding and replacing them, wherever they are nested.

Every string that a client sends and that can reach the prompt is a leaf, the keys of objects too. What is
looked for in them is the business of `validation.py` and `input_scan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from pipeline.errors import InvalidRequest
from pipeline.values import ChatRequest, CompletionRequest, Json

Request = TypeVar("Request", bound=ChatRequest | CompletionRequest)

NO_LIMIT: Final = 1 << 62
_CONTAINERS: Final = (dict, list, tuple)  # what JSON is made of; a union of types is slower to ask for


def untrusted(request: ChatRequest | CompletionRequest) -> dict[str, Json]:
    """Field name -> value, of the fields that reach the prompt as text."""
    if isinstance(request, CompletionRequest):
        return {
            prompt_path(request, index): prompt
            for index, prompt in enumerate(request.prompts)
            if isinstance(prompt, str)
        }
    return {
        "messages": request.messages,
        "tools": request.tools,
        "documents": request.documents,
        "chat_template_kwargs": request.chat_template_kwargs,
    }


def replaced(request: Request, fields: Mapping[str, Json]) -> Request:
    """The request with these fields, as `untrusted` names them."""
    if isinstance(request, ChatRequest):
        return replace(request, **fields)
    prompts = [
        fields.get(prompt_path(request, index), prompt) for index, prompt in enumerate(request.prompts)
    ]
    return replace(request, prompts=prompts)


def prompt_path(request: CompletionRequest, index: int) -> str:
    """How an error names a prompt."""
    return "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"


def leaves(value: Json, max_values: int = NO_LIMIT) -> list[str]:
    """All strings within a value, keys too, in no particular order: 0.2 us a message.

    Raises `InvalidRequest` if it has more than `max_values` fields of objects and members of arrays.
    """
    texts: list[str] = []
    stack: list[Json] = [value]
    num_values = 0
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            texts += node
            children: Json = node.values()
        elif isinstance(node, list | tuple):
            children = node
        else:  # only the value itself
            return [node] if isinstance(node, str) else []
        num_values += len(children)
        if num_values > max_values:
            raise InvalidRequest(
                f"The request has {num_values} values in its arrays and objects, or more; "
                f"the limit is {max_values}."
            )
        for child in children:
            if isinstance(child, str):
                texts.append(child)
            elif isinstance(child, _CONTAINERS):
                stack.append(child)
    return texts


def nests_deeper(value: Json, max_depth: int) -> bool:
    """Whether arrays and objects nest deeper than `max_depth` within a value. Without recursion."""
    level = [value]
    for _ in range(max_depth + 1):
        level = [child for node in level for child in _containers(node)]
        if not level:
            return False
    return True


def _containers(node: Json) -> list[Json]:
    """The arrays and objects directly inside a value."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return [child for child in children if isinstance(child, _CONTAINERS)]


def find(fields: Mapping[str, Json], is_wanted: Callable[[str], object]) -> tuple[str, str] | None:
    """Path and text of the first leaf that is wanted, as in (`messages[3].content`, …)."""
    stack = list(reversed([*fields.items()]))
    while stack:
        path, node = stack.pop()
        if isinstance(node, str):
            if is_wanted(node):
                return path, node
        elif isinstance(node, dict):
            for key, child in reversed([*node.items()]):
                stack.append((f"{path}.{key}", child))
                stack.append((f"a key of {path}", key))
        elif isinstance(node, list | tuple):
            stack += [(f"{path}[{index}]", node[index]) for index in reversed(range(len(node)))]
    return None


def mapped(value: Json, change: Callable[[str], str]) -> Json:
    """A copy of a value with each string changed, keys too.

    Raises `InvalidRequest` if that makes two keys of one object the same.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        changed = {change(key): mapped(child, change) for key, child in value.items()}
        if len(changed) < len(value):
            raise InvalidRequest("Two keys of one object are the same without their control characters.")
        return changed
    if isinstance(value, list | tuple):
        return [mapped(child, change) for child in value]
    return value
