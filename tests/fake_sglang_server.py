"""SGLang's native API as its server speaks it: `/generate` with ids, and what it tells of itself.

Written from SGLang 0.5.23 and 0.4.6 (`srt/managers/tokenizer_manager.py`, `srt/entrypoints/http_server.py`).
It refuses what the real one refuses: unknown sampling parameters, a prompt that is too long.

Run as `python -m tests.fake_sglang_server --port 8123` it serves until it is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
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

MODEL: Final = "fake-model"
DONE: Final = b"data: [DONE]\n\n"
# `sglang.api.v1.SamplingParams`: unknown keys are rejected.
KNOWN: Final = frozenset(
    [
        "max_new_tokens",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "n",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stream_interval",
        "logit_bias",
        "sampling_seed",
        "custom_params",
        "beam_width",
        "watermark",
        "choice",
    ]
)


@dataclass(slots=True)
class Play:
    """What the server generates, and how it tells it.

    `is_incremental`: --incremental-streaming-output. `num_ahead`: ids that a list of all has beyond its
    `completion_tokens`. `has_ids`: false for 0.4 without --skip-tokenizer-init. `steps`: how many ids come
    with each event; the last number repeats. `fault`: "error" (a `ValueError` in the stream), "abort" (with
    `abort_status`), "nan", "lost" (an incremental event is dropped), "cut", "breaks_off", "hangs", each after
    `num_before` events; "silent": not even a head comes.
    """

    ids: Sequence[int] = (11, 12, 13, 2)
    finish: str = "stop"  # by the last id, or "length"
    steps: Sequence[int] = (1,)
    is_incremental: bool = False
    num_ahead: int = 0
    has_ids: bool = True
    has_text: bool = True
    num_cached_tokens: int = 3
    fault: str = ""
    num_before: int = 2
    abort_status: int | None = 503
    status: int = 200
    gap_s: float = 0.0
    max_model_len: int = 4096
    version: str = "0.5.23"
    has_metrics: bool = True
    has_loads: bool = True
    is_old: bool = False  # /get_server_info alone
    priority: tuple[bool, bool] = (False, False)  # enabled; low values first
    tokens: Sequence[int] | None = None  # what its tokenizer makes of any text; None: an older version


def reply(play: Play, asked: Asked) -> Reply:
    """What the server answers."""
    match asked.path.partition("?")[0]:
        case "/generate":
            return _generate(play, asked.body)
        case "/abort_request":
            return Reply()
        case "/tokenize" if play.tokens is not None:
            return json_reply({"tokens": play.tokens, "count": len(play.tokens), "max_model_len": -1})
        case "/v1/models":
            card = {"id": MODEL, "object": "model", "owned_by": "sglang", "root": MODEL, "parent": None}
            adapter = {**card, "id": "adapter", "root": "/adapter", "parent": MODEL, "max_model_len": None}
            cards = [{**card, "max_model_len": play.max_model_len}, adapter]
            return json_reply({"object": "list", "data": cards})
        case "/server_info" if not play.is_old:
            return json_reply(_server_info(play))
        case "/get_server_info":
            return json_reply(_server_info(play))
        case "/get_model_info" | "/model_info":
            return json_reply({"model_path": MODEL, "is_generation": True})
        case "/metrics" if play.has_metrics:
            return Reply(body=METRICS.encode(), content_type="text/plain; version=0.0.4")
        case "/v1/loads" if play.has_loads:
            load = {"dp_rank": 0, "num_running_reqs": 4, "num_waiting_reqs": 1, "token_usage": 0.25}
            loads = [load, {**load, "dp_rank": 1, "token_usage": 0.5}]
            return json_reply({"version": play.version, "loads": loads})
    return json_reply({"detail": "Not Found"}, 404)


METRICS: Final = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="fake-model",tp_rank="0"} 3.0
sglang:num_running_reqs_offline_batch{model_name="fake-model"} 9.0
sglang:num_queue_reqs{model_name="fake-model",tp_rank="0"} 2.0
sglang:token_usage{model_name="fake-model",tp_rank="0"} 0.75
sglang:cache_hit_rate{model_name="fake-model",tp_rank="0"} 0.5
sglang:prompt_tokens_total{is_streaming="True",model_name="fake-model"} 100.0
sglang:prompt_tokens_total{is_streaming="False",model_name="fake-model"} 20.0
sglang:cached_tokens_total{cache_source="device",model_name="fake-model"} 60.0
sglang:num_retracted_requests_total{model_name="fake-model"} 1.0
"""


def _server_info(play: Play) -> Any:
    enabled, low_first = play.priority
    return {
        "model_path": MODEL,
        "page_size": 64,
        "context_length": None,
        "api_key": "secret",
        "enable_priority_scheduling": enabled,
        "schedule_low_priority_values_first": low_first,
        "incremental_streaming_output": play.is_incremental,
        "max_req_input_len": play.max_model_len - 6,
        "internal_states": [{"last_gen_throughput": 1.0}],
        "version": play.version,
    }


def _generate(play: Play, body: Any) -> Reply:
    unknown = sorted(set(body["sampling_params"]) - KNOWN)
    if unknown:
        return json_reply({"error": f"unknown field `{unknown[0]}`, expected one of …"}, 400)
    if play.status != 200:
        return json_reply({"error": {"message": "the server does not want this"}}, play.status)
    if play.fault == "silent":
        return Reply(is_silent=True)
    return stream_reply(
        events(play, body),
        gap_s=play.gap_s,
        breaks_off=play.fault == "breaks_off",
        hangs=play.fault == "hangs",
    )


def events(play: Play, body: Any) -> list[bytes]:
    """All events of a stream, as bytes, with the play's fault."""
    num_input = len(body["input_ids"])
    if num_input >= play.max_model_len:
        words = f"The input ({num_input} tokens) is longer than the model's context length."
        return [event({"error": {"message": words, "type": "invalid_request_error", "code": 400}}), DONE]
    told = [event(each) for each in _answers(play, body)]
    match play.fault:
        case "error":
            return [*told[: play.num_before], event({"error": {"message": "something broke"}}), DONE]
        case "lost":
            return [*told[: play.num_before], *told[play.num_before + 1 :], DONE]
        case "abort" | "nan":
            reason = {"type": "abort", "message": "The request queue is full.", "err_type": None}
            reason["status_code"] = play.abort_status  # type: ignore[assignment]
            if play.fault == "nan":
                reason = {"type": "stop", "matched": "NaN happened"}
            last = {"output_ids": [0], "meta_info": {"finish_reason": reason, "completion_tokens": 1}}
            return [*told[: play.num_before], event(last), DONE]
        case "cut" | "breaks_off" | "hangs":
            return told[: play.num_before]
    return [*told, DONE]


def _answers(play: Play, body: Any) -> list[dict[str, Any]]:
    ids, at = list(play.ids), 0
    answers: list[dict[str, Any]] = []
    steps = iter(play.steps)
    step = next(steps)
    while at < len(ids) or not answers:
        start, at = at, min(at + step, len(ids))
        step = next(steps, step)
        answers.append(_answer(play, body, start, at))
    return answers


def _answer(play: Play, body: Any, start: int, end: int) -> dict[str, Any]:
    ids = list(play.ids)
    is_last = end >= len(ids)
    reason: dict[str, Any] | None = None
    if is_last:
        reason = {"type": "length", "length": len(ids)}
        if play.finish == "stop":
            reason = {"type": "stop", "matched": ids[-1]}
    begin = start if play.is_incremental else 0
    shown = end if play.is_incremental else min(end + play.num_ahead, len(ids))
    meta: dict[str, Any] = {
        "id": body["rid"],
        "finish_reason": reason,
        "prompt_tokens": len(body["input_ids"]),
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": end,
        "cached_tokens": play.num_cached_tokens,
        "queue_time": 0.25,
        "forward_entry_time": 1000.5,
        "prefill_finished_time": 1000.625,
    }
    if body.get("return_logprob"):
        num_top = body.get("top_logprobs_num", 0)
        span = range(begin, shown)
        meta["input_token_logprobs"] = [[None, body["input_ids"][0], None]]
        meta["output_token_logprobs"] = [[-0.5 - at, ids[at], None] for at in span]
        if num_top:
            meta["output_top_logprobs"] = [
                [[-0.25 - place, ids[at] + 1 - place, None] for place in range(num_top)] for at in span
            ]
    answer: dict[str, Any] = {"meta_info": meta}
    if play.has_text:
        answer["text"] = " ".join(map(str, ids[begin:shown]))
    if play.has_ids:
        answer["output_ids"] = ids[begin:shown]
    return answer


def playing(play: Play) -> AbstractAsyncContextManager[FakeUpstream]:
    """A server that plays it; `play` may be changed between requests."""
    return serving(lambda asked: reply(play, asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--play", type=json.loads, default={}, help="fields of Play, as a JSON object")
    options = parser.parse_args()
    play = Play(**options.play)
    asyncio.run(serve_forever(lambda asked: reply(play, asked), options.port))


if __name__ == "__main__":
    main()
