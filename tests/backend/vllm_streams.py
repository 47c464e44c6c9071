"""What vLLM 0.32 has written, byte for byte, in answer to requests for token ids (ids of its own are cut)."""

from __future__ import annotations

from typing import Any

import msgspec

COMPLETION = (
    b'data: {"id":"cmpl-8c","object":"text_completion","created":1796023390,"model":"smol","choices":[{'
    b'"index":0,"text":" are","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":[1,9690],"token_ids":[359]}]}\n\n'
    b'data: {"id":"cmpl-8c","object":"text_completion","created":1796023390,"model":"smol","choices":[{'
    b'"index":0,"text":" \xc3\xa9\xe2\x80\xa8","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":[354,7]}]}\n\n'
    b": keep-alive\n\n"
    b'data: {"id":"cmpl-8c","object":"text_completion","created":1796023390,"model":"smol","choices":[{'
    b'"index":0,"text":" AI","logprobs":null,"finish_reason":"stop","stop_reason":5646,'
    b'"prompt_token_ids":null,"token_ids":[5646]}]}\n\n'
    b'data: {"id":"cmpl-8c","object":"text_completion","created":1796023390,"model":"smol","choices":[],'
    b'"usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}},'
    b'"system_fingerprint":"vllm-0.32.0-ecf3607f"}\n\n'
    b"data: [DONE]\n\n"
)
COMPLETION_LOGPROBS = (
    b'data: {"id":"cmpl-96","object":"text_completion","created":1796023390,"model":"smol","choices":[{'
    b'"index":0,"text":",","logprobs":{"text_offset":[0],"token_logprobs":[-9.0],"tokens":["token_id:28"],"top_logprobs":['
    b'{"token_id:28":-9.0,"token_id:359":-0.5,"token_id:2316":-0.75}]},"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":[1,9690],"token_ids":[28]}]}\n\n'
    b'data: {"id":"cmpl-96","object":"text_completion","created":1796023390,"model":"smol","choices":[{'
    b'"index":0,"text":" a","logprobs":{"text_offset":[11],"token_logprobs":[-1.5],"tokens":["token_id:96"],'
    b'"top_logprobs":[{"token_id:96":-1.5,"token_id:260":-1.0}]},"finish_reason":"length","stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":[96]}]}\n\n'
    b'data: {"id":"cmpl-96","object":"text_completion","created":1796023390,"model":"smol","choices":[],'
    b'"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)
GENERATED = (
    b'data: {"request_id":"generate-tokens-bf","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":null,"stop_reason":null,"token_ids":[359],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":null,"logprobs":null}]}\n\n'
    b'data: {"request_id":"generate-tokens-bf","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":null,"stop_reason":null,"token_ids":[354,7],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":null,"logprobs":null}]}\n\n'
    b'data: {"request_id":"generate-tokens-bf","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":"stop","stop_reason":5646,"token_ids":[5646],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":[{"version":"default","start":0,"end":3}],"logprobs":null}]}\n\n'
    b'data: {"request_id":"generate-tokens-bf","usage":{"prompt_tokens":4,"total_tokens":7,'
    b'"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}},"output_mode":"tokens","choices":[]}\n\n'
    b"data: [DONE]\n\n"
)
# Of 2 logprobs that a client asked for, 3 are asked of the server: it cuts its list to that number.
GENERATED_LOGPROBS = (
    b'data: {"request_id":"generate-tokens-aa","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":null,"stop_reason":null,"token_ids":[28],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":null,"logprobs":{"content":[{"token_id":28,"logprob":-9.0,"rank":85,"top_logprobs":['
    b'{"token_id":28,"logprob":-9.0,"rank":85},{"token_id":359,"logprob":-0.5,"rank":1},{"token_id":2316,'
    b'"logprob":-0.75,"rank":2}]}]}}]}\n\n'
    b'data: {"request_id":"generate-tokens-aa","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":"length","stop_reason":null,"token_ids":[96],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":null,"logprobs":{"content":[{"token_id":96,"logprob":-1.5,"rank":2,"top_logprobs":['
    b'{"token_id":96,"logprob":-1.5,"rank":2},{"token_id":260,"logprob":-1.0,"rank":1},{"token_id":5,'
    b'"logprob":-4.0,"rank":3}]}]}}]}\n\n'
    b"data: [DONE]\n\n"
)
BAD_ID = (
    b'data: {"error": {"message": "Token id 999999 is out of vocabulary", "type": "BadRequestError", '
    b'"param": null, "code": 400}}\n\n'
    b"data: [DONE]\n\n"
)
ENGINE_ERROR = (
    b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, '
    b'"code": 500}}\n\n'
    b"data: [DONE]\n\n"
)
TEMPERATURE = (
    b'{"error":{"message":"temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",'
    b'"type":"BadRequestError","param":"temperature","code":400}}'
)
METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smol"} 3.0
vllm:num_requests_running{engine="1",model_name="smol"} 2.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
vllm:num_requests_waiting{engine="0",model_name="smol"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="smol"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="smol"} 0.5
vllm:prefix_cache_queries_total{engine="0",model_name="smol"} 1.7960233e+06
vllm:prefix_cache_queries_created{engine="0",model_name="smol"} 1.7960233883068402e+09
vllm:prefix_cache_hits_total{engine="0",model_name="smol"} 17.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="smol"} 5.0
vllm:num_preemptions_total{engine="0",model_name="smol"} 1.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto"} 1.0
"""


def completion_event(
    ids: list[int], finish: str | None = None, prompt: list[int] | None = None, stop: int | None = None
) -> bytes:
    """One event of `/v1/completions`."""
    choice = {
        "index": 0,
        "text": "x" * len(ids),
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": stop,
        "prompt_token_ids": prompt,
        "token_ids": ids,
    }
    return _event({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]})


def generate_event(ids: list[int], finish: str | None = None, stop: int | None = None) -> bytes:
    """One event of `/inference/v1/generate`."""
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": stop,
        "token_ids": ids,
        "routed_experts": None,
        "logprobs": None,
    }
    return _event({"request_id": "generate-tokens-1", "usage": None, "choices": [choice]})


def usage_event(cached_tokens: int | None) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": 4, "total_tokens": 7, "completion_tokens": 3}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return _event({"id": "cmpl-1", "choices": [], "usage": usage})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
