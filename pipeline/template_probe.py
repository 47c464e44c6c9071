"""What only trying shows of a chat template and its tokenizer, when a model is loaded.

Three questions. Can the marks in the template be followed: does it render the same text with them, and is
every control string in it marked? Does it want tool arguments as text? And are the ids of a prompt those of
its segments, one after the other? The last one holds for tokenizers that begin anew after a control token;
added tokens that swallow the space before them break it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pipeline.encoding import Encoder
from pipeline.errors import InvalidRequest
from pipeline.rendering import ChatTemplate
from pipeline.values import ChatRequest, Delivery, Generation

NOW_S: Final = 1.7e9
# Beginnings and ends at which tokenizers are known to differ.
_EDGES: Final = (
    "a",
    " a ",
    "\n",
    "\n\na\n\n",
    "",
    "  ",
    "1",
    "'s",
    "é",
    "e\u0301",
    "\u0301",
    "敏感",
    "😀",
    "\t.",
    "_",
    "\u00a0a\u00a0",
)
_TOOLS: Final = (
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    },
)


def _edge_chats() -> Iterator[ChatRequest]:
    """Chats whose texts begin and end in many ways."""
    for shift, first in enumerate(_EDGES):
        for second in _EDGES[shift % 3 :: 3]:
            user, assistant = {"role": "user", "content": first}, {"role": "assistant", "content": second}
            yield _chat([{"role": "system", "content": second}, user], {"enable_thinking": False})
            yield _chat([user, assistant, user])


def _shapes() -> Iterator[ChatRequest]:
    """One chat of each shape that a template may treat in its own way."""
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    system = {"role": "system", "content": "s"}
    thinking = {**assistant, "reasoning": "r"}
    developer = {"role": "developer", "content": "s"}
    yield _chat([user])
    yield _chat([user], {"enable_thinking": True})
    yield _chat([user], {"enable_thinking": False})
    yield _chat([developer, user])
    yield _chat([system, user, assistant, user, thinking, user])
    yield _chat([user, thinking], add_generation_prompt=False)
    yield _chat([user, thinking], continue_final_message=True, add_generation_prompt=False)
    yield _chat([system, user], tools=_TOOLS)
    yield _chat([system, user, *_tool_turn({}), assistant, user], tools=_TOOLS)
    yield _chat([user, *_tool_turn({"k": [1, "v"]})], tools=_TOOLS)
    yield _chat([user], documents=[{"title": "t", "text": "x"}])


def _tool_turn(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": dict(arguments)}}
    other = {**call, "id": "call00002"}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "call00001", "content": "1"},
        {"role": "tool", "tool_call_id": "call00002", "content": "2"},
    ]


def _chat(
    messages: list[dict[str, Any]], variables: Mapping[str, Any] | None = None, **fields: Any
) -> ChatRequest:
    return ChatRequest(
        "", messages, Generation({}), Delivery(), chat_template_kwargs=dict(variables or {}), **fields
    )


def examine(template: ChatTemplate) -> None:
    """Set what `ChatTemplate` cannot know by itself."""
    template.arguments_as_text = _wants_text(template)
    template.follows_marks = all(_is_followed(template, request) for request in _shapes())


def _wants_text(template: ChatTemplate) -> bool:
    """Whether a chat with tool calls renders only with arguments that are text."""
    request = _chat([{"role": "user", "content": "a"}, *_tool_turn({"k": "v"})], tools=_TOOLS)
    if _plain(template, request) is not None:
        return False
    template.arguments_as_text = True
    return _plain(template, request) is not None


def _is_followed(template: ChatTemplate, request: ChatRequest) -> bool:
    plain = _plain(template, request)
    if plain is None:
        return True  # it refuses such chats, with marks as without
    try:
        rendered = template.render_marked(request, NOW_S)
    except InvalidRequest:
        return False
    texts = [rendered.opening, *(segment[1:] for segment in rendered.segments)]
    return rendered.text == plain and not any(map(template.controls.search, texts))


def _plain(template: ChatTemplate, request: ChatRequest) -> str | None:
    try:
        return template.plain(request, NOW_S)
    except InvalidRequest:
        return None


def is_segmentable(template: ChatTemplate, encoder: Encoder) -> bool:
    """Whether the ids of the segments make the ids of the whole, for every probe that renders."""
    whole, openings, segments, counts = [], [], [], []
    for request in (*_shapes(), *_edge_chats()):
        try:
            rendered = template.render(request, NOW_S)
        except InvalidRequest:
            continue
        whole.append(rendered.text)
        openings.append(rendered.opening)
        segments += rendered.segments
        counts.append(len(rendered.segments))
    ids = iter(encoder.encode_segments(segments))
    for expected, opening, count in zip(encoder.encode_batch(whole, False), openings, counts, strict=True):
        parts = [encoder.encode_opening(opening)] if opening else []
        if expected != b"".join(parts + [next(ids) for _ in range(count)]):
            return False
    return bool(whole)
