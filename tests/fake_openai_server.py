"""OpenAI-compatible servers as they speak, in dialects: vllm, sglang, trtllm, tgi, llamacpp, ollama, openai.

Written from their sources (`backend/openai_chunk.py` and `backend/tool_call_order.py` name them); each chunk
has the fields that the server sends, nulls included. `Play` says what is answered, and what goes wrong.

Run as `python -m tests.fake_openai_server --dialect tgi --port 8123` it serves until it is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from tests.fake_upstream import (
    Asked,
    FakeUpstream,
    Reply,
    event,
    json_reply,
    serve_forever,
    serving,
    stream_reply,
)

DIALECTS: Final = ("openai", "vllm", "sglang", "trtllm", "tgi", "llamacpp", "ollama")
MODEL: Final = "fake-model"
DONE: Final = b"data: [DONE]\n\n"
Call = tuple[str, Sequence[str]]  # a name, and its arguments in pieces


@dataclass(slots=True)
class Play:
    """What the server says, and which fault it has.

    `fault`: "error" (an error event after `num_before` events), "no_done", "no_usage", "cut" (the body ends
    tidily after `num_before` events), "breaks_off" (the connection closes there), "hangs" (nothing follows).
    `status`: of a refusal, with the dialect's own body.
    """

    dialect: str = "openai"
    content: Sequence[str] = ("Hel", "lo", "!")
    reasoning: Sequence[str] = ()
    calls: Sequence[Call] = ()
    finish: str = "stop"
    stop: str | None = None  # the stop string that ended it
    num_prompt_tokens: int = 7
    num_cached_tokens: int = 4
    fault: str = ""
    num_before: int = 2
    status: int = 200
    gap_s: float = 0.0
    ignores_stream: bool = False
    refuses_stream_options: bool = False
    continuous_usage: bool = False
    has_metrics: bool = True
    is_healthy: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.content) + len(self.reasoning) + sum(1 + len(pieces) for _, pieces in self.calls)


def reply(play: Play, asked: Asked) -> Reply:
    """What the server answers."""
    if asked.path.endswith("/v1/models"):
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": play.dialect, "max_model_len": 4096}
        return json_reply({"object": "list", "data": [card]})
    if asked.path.endswith(("/health", "/metrics", "/v1/loads?include=core")):
        return _state(play, asked.path)
    if asked.path.endswith("/v1/embeddings"):
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}]
        usage = {"prompt_tokens": 2, "total_tokens": 2}
        return json_reply({"object": "list", "data": data, "model": MODEL, "usage": usage})
    if not asked.path.endswith(("/v1/chat/completions", "/v1/completions")):
        return json_reply({"detail": "Not Found"}, 404)
    if play.status != 200:
        return json_reply(refusal(play, "the server does not want this"), play.status)
    if play.refuses_stream_options and "stream_options" in asked.body:
        return json_reply(refusal(play, "stream_options: Extra inputs are not permitted"), 400)
    if play.ignores_stream or not asked.body.get("stream"):
        return json_reply(whole(play, asked.body, asked.path.endswith("/chat/completions")))
    return stream_reply(
        events(play, asked.body, asked.path.endswith("/chat/completions")),
        gap_s=play.gap_s,
        breaks_off=play.fault == "breaks_off",
        hangs=play.fault == "hangs",
    )


METRICS: Final = {
    "vllm": 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n',
    "sglang": 'sglang:num_running_reqs{tp_rank="0"} 2.0\nsglang:num_queue_reqs{tp_rank="0"} 1.0\n',
    "tgi": "tgi_batch_current_size 2\ntgi_queue_size 1\n",
    "llamacpp": "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n",
    "trtllm": "[]",  # the last iterations, as JSON
}


def _state(play: Play, path: str) -> Reply:
    """What it tells of itself. Ollama and OpenAI have none of it."""
    if path.endswith("/metrics") and play.dialect in METRICS:
        status_without = 501 if play.dialect == "llamacpp" else 404
        return Reply(200 if play.has_metrics else status_without, METRICS[play.dialect].encode())
    if play.dialect == "sglang" and "/v1/loads" in path:
        return json_reply({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]})
    if path.endswith("/health") and play.dialect not in ("openai", "ollama"):
        return Reply(200 if play.is_healthy else 503)
    return json_reply({"error": "not found"}, 404)


def events(play: Play, body: Any, is_chat: bool = True) -> list[bytes]:
    """All events of a stream, as bytes, with the play's fault."""
    wants_usage = bool((body.get("stream_options") or {}).get("include_usage")) and play.fault != "no_usage"
    chunks = list(_chat(play) if is_chat else _completion(play, wants_usage))
    if wants_usage and play.continuous_usage:
        for number, chunk in enumerate(chunks):
            chunk["usage"] = {**_usage(play), "completion_tokens": min(number, play.num_tokens)}
    if wants_usage:
        chunks.append(_usage_chunk(play, chunks[-1]))
    if play.dialect == "llamacpp":
        chunks[-1]["timings"] = {
            "cache_n": play.num_cached_tokens,
            "prompt_n": play.num_prompt_tokens - play.num_cached_tokens,
            "predicted_n": play.num_tokens,
        }
    end = b" \n\n" if play.dialect == "trtllm" else b"\n\n"
    all_events = [event(chunk)[:-2] + end for chunk in chunks] + [DONE]
    if play.fault in ("cut", "breaks_off", "hangs"):
        return all_events[: play.num_before]
    if play.fault == "error":
        error = event(refusal(play, "the engine died"))
        if play.dialect == "ollama":  # its error becomes a message without text (`middleware/openai.go`)
            return [*all_events[: play.num_before], event(_chunk(play, {"content": ""}))]
        ends = [] if play.dialect == "llamacpp" else [DONE]
        return [*all_events[: play.num_before], error, *ends]
    return all_events[:-1] if play.fault == "no_done" else all_events


def refusal(play: Play, words: str) -> Any:
    """An error in the dialect's form."""
    code = play.status if play.status != 200 else 500
    if play.dialect == "tgi":
        return {"error": words, "error_type": "overloaded" if code == 429 else "generation"}
    if play.dialect == "llamacpp":
        return {"error": {"code": code, "message": words, "type": "server_error"}}
    if play.dialect == "sglang" and play.status != 200:
        return {"object": "error", "message": words, "type": "BadRequestError", "param": None, "code": code}
    if play.dialect == "ollama":
        return {"error": {"message": words, "type": "api_error", "param": None, "code": None}}
    return {"error": {"message": words, "type": "InternalServerError", "param": None, "code": code}}


def whole(play: Play, body: Any, is_chat: bool) -> Any:
    """An answer that is no stream."""
    finish = "tool_calls" if play.calls and play.finish == "stop" else play.finish
    usage = _usage(play)
    if not is_chat:
        choice = {"index": 0, "text": "".join(play.content), "finish_reason": finish, "logprobs": None}
        return {"id": "c", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage}
    message: dict[str, Any] = {"role": "assistant", "content": "".join(play.content) or None}
    if play.reasoning:
        message["reasoning_content"] = "".join(play.reasoning)
    if play.calls:
        message["tool_calls"] = [
            {"id": f"call-{n}", "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
            for n, (name, pieces) in enumerate(play.calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}


def _chat(play: Play) -> Iterator[dict[str, Any]]:
    """The chunks of a chat, each with the fields that the dialect sends."""
    finish = "tool_calls" if play.calls and play.finish == "stop" else play.finish
    deltas = list(_deltas(play))
    if play.dialect != "tgi":
        yield _chunk(play, _role(play))
    merges = play.dialect in ("tgi", "trtllm")  # the finish comes with the last piece of text
    for number, delta in enumerate(deltas):
        is_last = merges and number == len(deltas) - 1
        yield _chunk(play, delta, finish if is_last else None)
    if not merges or not deltas:
        yield _chunk(play, _last(play), finish)


def _role(play: Play) -> dict[str, Any]:
    if play.dialect == "llamacpp":
        return {"role": "assistant", "content": None}
    if play.dialect == "sglang":
        return {"reasoning_content": None, "role": "assistant", "content": ""}
    return {"role": "assistant"} if play.dialect == "trtllm" else {"role": "assistant", "content": ""}


def _last(play: Play) -> dict[str, Any]:
    return {"reasoning_content": None} if play.dialect == "sglang" else {}


def _deltas(play: Play) -> Iterator[dict[str, Any]]:
    key = "reasoning" if play.dialect in ("vllm", "ollama") else "reasoning_content"
    for text in play.reasoning:
        yield {key: text, **({"content": ""} if play.dialect in ("trtllm", "ollama") else {})}
    for text in play.content:
        delta: dict[str, Any] = {"content": text}
        if play.dialect == "tgi":
            delta = {"role": "assistant", "content": text}
        elif play.dialect == "sglang":
            delta = {"reasoning_content": None, "content": text}
        elif play.dialect == "trtllm":
            delta = {"content": text, "reasoning_content": ""}
        yield delta
    for number, call in enumerate(play.calls):
        yield from _call_deltas(play, number, *call)


def _call_deltas(play: Play, number: int, name: str, pieces: Sequence[str]) -> Iterator[dict[str, Any]]:
    head = {"index": number, "id": f"call-{number}", "type": "function"}
    if play.dialect == "ollama":  # whole, and in older versions all with index 0
        whole_call = {"name": name, "arguments": "".join(pieces)}
        yield {"content": "", "tool_calls": [{**head, "index": 0, "function": whole_call}]}
        return
    if play.dialect == "tgi":  # index 0 and one id; the opening brace comes with the name
        same = {"index": 0, "id": "chatcmpl-0", "type": "function"}
        joined = "".join(pieces)
        for at, text in enumerate([joined[:1], joined[1:]]):
            function: dict[str, Any] = {"name": None if at else name, "arguments": text}
            yield {"role": "assistant", "tool_calls": [{**same, "function": function}]}
        return
    rest: dict[str, Any] = {"content": None, "reasoning_content": None} if play.dialect == "sglang" else {}
    nulls = play.dialect == "sglang"
    first: dict[str, Any] = {"name": name} if play.dialect == "vllm" else {"name": name, "arguments": ""}
    yield {**rest, "tool_calls": [{**head, "function": first}]}
    for text in pieces:
        more: dict[str, Any] = {"index": number, "function": {"arguments": text}}
        if nulls:
            more = {**head, "id": None, "function": {"name": None, "arguments": text}}
        yield {**rest, "tool_calls": [more]}


def _completion(play: Play, wants_usage: bool) -> Iterator[dict[str, Any]]:
    texts = [*play.content, ""]
    for number, text in enumerate(texts):
        is_last = number == len(texts) - 1
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None}
        choice["finish_reason"] = _finish_word(play, play.finish) if is_last else None
        chunk = {
            "id": "cmpl-0",
            "object": "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
        }
        if play.dialect == "ollama" and wants_usage:
            chunk["usage"] = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        yield chunk


def _finish_word(play: Play, finish: str) -> str:
    """TGI tells the end-of-sequence token apart in completions, and stop strings everywhere."""
    if play.dialect == "tgi" and finish == "stop":
        return "stop_sequence" if play.stop is not None else "eos_token"
    return finish


def _chunk(play: Play, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    if play.dialect == "tgi" and finish == "stop" and play.stop is not None:
        choice["finish_reason"] = "stop_sequence"
    if finish and play.dialect in ("vllm", "trtllm"):
        choice["stop_reason"] = play.stop
    if play.dialect == "sglang":
        choice["matched_stop"] = (151645 if play.stop is None else play.stop) if finish == "stop" else None
    if play.dialect in ("llamacpp", "ollama"):
        del choice["logprobs"]
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "system_fingerprint": "fp",
        "choices": [choice],
    }


def _usage(play: Play) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": play.num_prompt_tokens,
        "completion_tokens": play.num_tokens,
        "total_tokens": play.num_prompt_tokens + play.num_tokens,
    }
    if play.dialect in ("openai", "vllm", "sglang", "trtllm"):
        usage["prompt_tokens_details"] = {"cached_tokens": play.num_cached_tokens}
    if play.dialect == "sglang":
        usage["reasoning_tokens"] = len(play.reasoning)
    elif play.dialect == "openai":
        usage["completion_tokens_details"] = {"reasoning_tokens": len(play.reasoning)}
    return usage


def _usage_chunk(play: Play, last: dict[str, Any]) -> dict[str, Any]:
    return {**last, "choices": [], "usage": _usage(play)}


def playing(play: Play) -> AbstractAsyncContextManager[FakeUpstream]:
    """A server that plays it; `play` may be changed between requests."""
    return serving(lambda asked: reply(play, asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dialect", choices=DIALECTS, default="openai")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--play", type=json.loads, default={}, help="fields of Play, as a JSON object")
    options = parser.parse_args()
    play = Play(dialect=options.dialect, **options.play)
    asyncio.run(serve_forever(lambda asked: reply(play, asked), options.port))


if __name__ == "__main__":
    main()
