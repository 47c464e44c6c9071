"""The real pages in front of an API that does what the question says. For tests of the pages alone."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from backend.address import stop_listening
from gateway.docs_page import page_routes

KEY = "sk-test"
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 4,
    "total_tokens": 24,
    "prompt_tokens_details": {"cached_tokens": 16},
}

# Two tool calls in pieces.
CALLS = (
    {"index": 0, "id": "a", "type": "function", "function": {"name": "<b>find</b>", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"q":'}},
    {"index": 0, "function": {"arguments": '"<b>x</b>"}'}},
    {"index": 1, "id": "b", "type": "function", "function": {"name": "stop", "arguments": ""}},
)


@dataclass
class PageServer:
    """Answers by the last question.

    error 400, break, frame error, forever, html, think, call, bad format; else a short text.
    """

    url: str = ""
    needs_key: bool = False
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "tiny"}, {"id": "other"}])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_closed_early: int = 0

    async def list_models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"object": "list", "data": self.models})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        if refusal := self._refusal(request):
            return refusal
        if question == "error 400":
            return _error(400, "'temperature' must be at most 2.0, got 3.")
        return StreamingResponse(self._frames(question), media_type="text/event-stream")

    def _refusal(self, request: Request) -> Response | None:
        if not self.needs_key or request.headers.get("authorization") == f"Bearer {KEY}":
            return None
        return _error(401, "Missing or wrong API key.")

    async def _frames(self, question: str) -> AsyncIterator[bytes]:
        yield b": ping\n\n"
        yield _chunk({"role": "assistant", "content": ""})
        if question == "think":
            yield _chunk({"reasoning": "First, the facts."})
        if question == "call":
            for call in CALLS:
                yield _chunk({"tool_calls": [call]})
        text = (
            "<b>bold</b> <script>document.title='broken'</script>"
            if question == "html"
            else "流水 runs\u2028on."
        )
        for piece in (text[:5], text[5:], ""):
            await asyncio.sleep(0.02)
            yield _chunk({"content": piece})
        try:
            while question == "forever":
                await asyncio.sleep(0.02)
                yield _chunk({"content": " on"})
        except asyncio.CancelledError:
            self.num_closed_early += 1
            raise
        if question == "frame error":
            error = {
                "message": "The worker was lost.",
                "type": "engine_error",
                "param": None,
                "code": "worker_lost",
            }
            yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
        if question in ("break", "frame error"):
            return
        if question == "bad format":
            yield _chunk({}, "stop", format_results={"valid": False, "problem": "<b>no JSON</b>"})
        else:
            yield _chunk({}, "stop")
        yield b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\r\n\r\n"
        yield b"data: [DONE]\n\n"


def _chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "param": None, "code": None}}, status)


@asynccontextmanager
async def page_server() -> AsyncIterator[PageServer]:
    """Serves on a free port of this machine, in this event loop."""
    server = PageServer()
    routes = [
        *page_routes("1.2.3"),
        Route("/v1/models", server.list_models),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve([listening]))
        try:
            yield server
        finally:
            for each in running.servers:
                await stop_listening(each)
            running.should_exit = True
            await task
