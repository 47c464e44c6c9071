"""Made-up runs of a load test: samples and what is said of the run."""

from __future__ import annotations

import random
from typing import Any

from gateway.bench.document import Document, document_of
from gateway.bench.figures import FigureOptions
from gateway.bench.run_info import RunInfo
from gateway.bench.sample import Sample


def sample(number: int = 0, *, sent_s: float = 0.0, **fields: Any) -> Sample:
    """One that succeeded, with frames at 1.0, 1.1, 1.3 s after it was sent, which was when it was due."""
    frames_s = fields.pop("frames_s", [sent_s + each for each in (1.0, 1.1, 1.3)])
    defaults = {
        "due_s": sent_s,
        "ended_s": sent_s + 1.5,
        "status": 200,
        "prompt_tokens": 10,
        "output_tokens": len(frames_s),
    }
    return Sample(number, sent_s=sent_s, frames_s=frames_s, **(defaults | fields))


def run(**fields: Any) -> RunInfo:
    defaults: dict[str, Any] = {
        "url": "http://127.0.0.1:8000",
        "endpoint": "/v1/chat/completions",
        "model": "scripted",
        "mode": "closed",
        "rate": None,
        "arrivals": None,
        "concurrency": 2,
        "prompt_lengths": "10",
        "output_lengths": "3",
        "seed": 0,
        "started_at": "2026-01-01T00:00:00Z",
        "duration_s": 0.0,
    }
    return RunInfo(**(defaults | fields))


def random_samples(rng: random.Random, num: int) -> list[Sample]:
    """With everything that a sample may have, and may lack."""
    return [_random_sample(rng, number) for number in range(num)]


def _random_sample(rng: random.Random, number: int) -> Sample:
    due_s = rng.uniform(0, 5)
    sent_s = due_s + rng.choice((0.0, rng.uniform(0, 0.1)))
    frames_s = [sent_s + rng.uniform(0.01, 0.5)]
    for _ in range(rng.choice((0, 0, 1, 5, 30))):
        frames_s.append(frames_s[-1] + rng.choice((0.0, 0.02, rng.expovariate(20))))
    error = rng.choice((None, None, None, "http_429", "error_frame", "truncated", "interrupted"))
    if error == "http_429":
        frames_s = []
    last_s = frames_s[-1] if frames_s else sent_s
    return Sample(
        number,
        due_s,
        is_warm_up=rng.random() < 0.1,
        turn=rng.choice((0, 0, 1)),
        sent_s=sent_s,
        frames_s=frames_s,
        ended_s=None if error == "interrupted" else last_s + rng.uniform(0, 0.01),
        prompt_tokens=rng.choice((None, 0, rng.randint(1, 99))),
        output_tokens=rng.choice((None, len(frames_s), len(frames_s) + 3)),
        cached_tokens=rng.choice((None, 0, 8)),
        error=error,
        detail="" if error is None else "<b>\x1b[31mnot & so</b>",
        timings=rng.choice((None, {"queue_ms": rng.random(), "ttft_ms": 5.0, "cached_tokens": 3.0})),
    )


def document(seed: int = 0, num: int = 60, **fields: Any) -> Document:
    """Of a made-up run with failures, goodput limits, turns and the server's stages."""
    rng = random.Random(seed)
    told = run(steady_from_s=0.5, options={"shared prefix": "4 tokens"}, **fields)
    return document_of(random_samples(rng, num), told, FigureOptions(limits_ms={"ttft": 300, "tbt": 90}))
