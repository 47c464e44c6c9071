"""The other servers that Headrace is measured beside: where they come from and how each is started.

Every peer gets a virtual environment of its own beside `.venv`, filled once from the package registry with
the version that is pinned here, from ready-made wheels only. No variable of the caller reaches a peer, and it
asks nobody outside this machine for anything. Each is started as its own documentation says, with one
process, and with whatever it can be spared (access log, keys, price lists) switched off. Not here: what is
asked of them (`peer_load.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from benchmarks import scripted_upstream
from benchmarks.peer_processes import ProcessTree
from benchmarks.processes import Measured, embedded_model, free_port, gateway, running, worker
from benchmarks.tiny_model import MAX_MODEL_LEN

ROOT: Final = Path(__file__).resolve().parent.parent
# The requirement, and the name in the table. vllm-router is the Rust router of the vLLM project;
# production-stack's Python router of the same name is another program. The versions are pinned so
# that runs can be compared.
PINS: Final[Mapping[str, tuple[str, str]]] = {
    "litellm": ("litellm[proxy]==1.105.0", "LiteLLM proxy 1.105.0"),
    "vllm-router": ("vllm-router==0.1.17", "vllm-router 0.1.17"),
}
STEP_MS: Final = 50.0
BARE_FRAMES: Final = 240  # 12 s of steps
_PROSE_REPEATS: Final = 300  # longer than any stream
# A thousand streams come at once, which an engine is slow to take in. The other servers have no such limits.
_QUEUE: Final = ("--queue-max-requests", "4096", "--queue-max-tokens", "4000000")
_MAX_SEQS: Final = 1024
_ENGINE_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # one core for the engine, one for what is measured
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A running server. `key` stands in the names of figures, `label` in the table."""

    key: str
    label: str
    trees: tuple[ProcessTree, ...]  # all that counts
    port: int
    model: str
    others: tuple[ProcessTree, ...] = ()  # what feeds it; kept off its core at saturation
    upstream_port: int = 0  # of the scripted upstream behind it: has a clock to set and times to read
    has_timings: bool = False  # tells its engine's part of the time to the first token
    max_tokens_per_s: float = 20_000.0  # what it is offered outside of the saturation run
    open_s: float = 0.003  # for one more stream, at most; no matter where the upstream can end streams
    requests_per_s: float = 50.0
    fields: Mapping[str, Any] = field(default_factory=dict)  # further ones of its requests

    def cpu_s(self) -> float:
        return sum(tree.cpu_s() for tree in self.trees)

    def memory_bytes(self) -> int:
        return sum(tree.memory_bytes() for tree in self.trees)

    def step_ms(self, num_streams: int) -> float:
        return max(STEP_MS, num_streams * 1e3 / self.max_tokens_per_s)


def install(name: str) -> Path:
    """The folder of the peer's programs; its environment is made first where needed.

    Raises `RuntimeError` with what pip said.
    """
    requirement, _ = PINS[name]
    venv = ROOT / f".venv-{name}"
    stamp = venv / ".requirement"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != requirement:
        print(f"installing {requirement} into {venv.name} …", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(venv)])
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        _run([*pip, "install", "--quiet", "--only-binary", ":all:", requirement])
        stamp.write_text(requirement, encoding="utf-8")
    return venv / "bin"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def alone(folder: Path, command: Sequence[str], **variables: str) -> list[str]:
    """The command with these variables and no others; its home is a scratch folder."""
    kept = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8", **variables}
    return ["env", "-i", *(f"{name}={value}" for name, value in kept.items()), *command]


# -- in front of the scripted upstream -----------------------------------------------------------------------


@contextmanager
def upstream(folder: Path) -> Iterator[Measured]:
    port = free_port()
    module = [sys.executable, "-m", scripted_upstream.__name__]
    command = [*module, str(port), str(STEP_MS), str(embedded_model())]
    with running(command, folder / "upstream.log", port) as measured:
        yield measured


@contextmanager
def litellm(folder: Path, behind: Measured) -> Iterator[Peer]:
    config, port = folder / "litellm.json", free_port()
    config.write_text(json.dumps(litellm_config(behind.port)), encoding="utf-8")
    command = [str(install("litellm") / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
    variables = {
        "AIOHTTP_CONNECTOR_LIMIT": "4096",  # to the upstream; else 500 streams at a time
        "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": "4096",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no price list from outside
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # no key to check
    }
    started = alone(folder, [*command, "--port", str(port)], **variables)
    with running(started, folder / "litellm.log", port, "/health/liveliness") as measured:
        yield _in_front("litellm", measured, behind, max_tokens_per_s=800.0, requests_per_s=8.0)


def litellm_config(upstream_port: int) -> dict[str, Any]:
    """YAML is a superset of JSON."""
    server = {
        "model": f"hosted_vllm/{scripted_upstream.MODEL}",
        "api_base": f"http://127.0.0.1:{upstream_port}/v1",
        "api_key": "none",
    }
    return {"model_list": [{"model_name": scripted_upstream.MODEL, "litellm_params": server}]}


@contextmanager
def vllm_router(folder: Path, behind: Measured) -> Iterator[Peer]:
    port = free_port()
    command = [str(install("vllm-router") / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{behind.port}", "--log-level", "warning"]
    started = alone(folder, [*command, "--prometheus-port", str(free_port())])
    with running(started, folder / "vllm-router.log", port) as measured:
        yield _in_front("vllm-router", measured, behind)


def _in_front(key: str, measured: Measured, behind: Measured, **limits: float) -> Peer:
    return Peer(
        key,
        PINS[key][1],
        (ProcessTree(measured.pid),),
        measured.port,
        scripted_upstream.MODEL,
        others=(ProcessTree(behind.pid),),
        upstream_port=behind.port,
        **limits,  # type: ignore[arg-type]
    )


@contextmanager
def headrace_upstream(folder: Path, behind: Measured, kind: str, rules: Path) -> Iterator[Peer]:
    """Headrace in front of the same upstream as the others; `kind` is `vllm` or `openai`."""
    args = ["--upstream", f"{kind}+http://127.0.0.1:{behind.port}", "--rules", str(rules), *_QUEUE]
    if kind != "openai":
        args += ["--tokenizer", str(embedded_model())]
    with gateway(folder, [], *args, name=f"headrace-{kind}") as measured:
        yield Peer(
            f"headrace-{kind}",
            f"Headrace {own_version()}, `{kind}+http://`",
            (ProcessTree(measured.pid),),
            measured.port,
            scripted_upstream.MODEL,
            others=(ProcessTree(behind.pid),),
            upstream_port=behind.port,
        )


# -- with engines of their own -------------------------------------------------------------------------------


@contextmanager
def headrace_scripted(folder: Path, rules: Path, step_ms: float = STEP_MS) -> Iterator[Peer]:
    """Headrace with everything on, and its own scripted worker, which says what the upstream says."""
    name = f"scripted-{step_ms:g}"
    script = folder / f"{name}.json"
    script.write_text(json.dumps([scripted_upstream.PROSE * _PROSE_REPEATS]))
    scripted = ["--scripted", "--tokenizer", str(embedded_model()), "--step-ms", str(step_ms)]
    scripted += ["--script", str(script)]
    with (
        worker(folder, *scripted, name=f"{name}-worker") as (linked, address),
        gateway(folder, [address], "--rules", str(rules), *_QUEUE, name=f"{name}-gateway") as ours,
    ):
        yield Peer(
            "headrace",
            f"Headrace {own_version()}",
            (ProcessTree(ours.pid),),
            ours.port,
            "scripted",
            others=(ProcessTree(linked.pid),),
            has_timings=True,
        )


@contextmanager
def bare_asgi(folder: Path) -> Iterator[Peer]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.bare_asgi", str(port), str(BARE_FRAMES), str(STEP_MS)]
    with running(command, folder / "bare.log", port) as measured:
        label = f"bare ASGI app, uvicorn {version('uvicorn')}"
        yield Peer("bare-asgi", label, (ProcessTree(measured.pid),), port, "scripted")


@contextmanager
def vllm_server(folder: Path, model: Path) -> Iterator[Peer]:
    """vLLM's own API server, stock, without its access log."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-num-seqs", str(_MAX_SEQS), "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--enforce-eager", "--block-size", "32", "--disable-uvicorn-access-log"]
    started = alone(folder, command, **_ENGINE_ENVIRONMENT)
    with running(started, folder / "vllm.log", port) as measured:
        label = f"vLLM {_vllm_version()} API server"
        yield Peer(
            "vllm-server", label, (ProcessTree(measured.pid),), port, "tiny", open_s=0.01, fields=_FIXED
        )


@contextmanager
def headrace_engine(folder: Path, model: Path, rules: Path) -> Iterator[Peer]:
    """`headrace worker` and `headrace gateway` with the same model; both count, the engine core does not."""
    variables = [f"{name}={value}" for name, value in _ENGINE_ENVIRONMENT.items()]
    address, port = f"unix://{folder}/tiny.sock", free_port()
    command = [sys.executable, "-m", "gateway", "worker", "--listen", address, "--metrics-port", str(port)]
    command += ["--model", str(model), "--served-model-name", "tiny", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--", "--max-num-seqs", str(_MAX_SEQS)]
    with (
        running(["env", *variables, *command], folder / "tiny-worker.log", port) as linked,
        gateway(folder, [address], "--rules", str(rules), *_QUEUE, name="tiny-gateway") as ours,
    ):
        trees = (ProcessTree(ours.pid), ProcessTree(linked.pid))
        yield Peer(
            "headrace-engine",
            f"Headrace {own_version()}",
            trees,
            ours.port,
            "tiny",
            open_s=0.01,
            fields=_FIXED,
        )


_FIXED: Final = {"ignore_eos": True, "temperature": 0}


def versions() -> dict[str, str]:
    """Of the peers that have no package in this environment."""
    return dict(requirement.split("==") for requirement, _ in PINS.values())


def own_version() -> str:
    return version("headrace")


def _vllm_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed: `make setup`")
