"""The untrusted strings of a request: reading, finding and replacing them, wherever they are nested.

Every string that a client sends and that can reach the prompt is a leaf, the keys of objects too. What is
looked for in them is the business of `validation.py` and `input_scan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from pipeline.values import ChatRequest, CompletionRequest, Json

Request = TypeVar("Request", bound=ChatRequest | CompletionRequest)


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


def leaves(value: Json) -> Iterator[str]:
    """All strings within a value, keys too, in no particular order."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, Mapping):
            stack += node.keys()
            stack += node.values()
        elif isinstance(node, list | tuple):
            stack += node


def find(fields: Mapping[str, Json], is_wanted: Callable[[str], object]) -> tuple[str, str] | None:
    """Path and text of the first leaf that is wanted, as in (`messages[3].content`, …)."""
    stack = list(reversed([*fields.items()]))
    while stack:
        path, node = stack.pop()
        if isinstance(node, str):
            if is_wanted(node):
                return path, node
        elif isinstance(node, Mapping):
            for key, child in reversed([*node.items()]):
                stack.append((f"{path}.{key}", child))
                stack.append((f"a key of {path}", key))
        elif isinstance(node, list | tuple):
            stack += [(f"{path}[{index}]", node[index]) for index in reversed(range(len(node)))]
    return None


def mapped(value: Json, change: Callable[[str], str]) -> Json:
    """A copy of a value with each string changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): mapped(child, change) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(child, change) for child in value]
    return value
