import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import MASK, Settings
from gateway.settings_load import SettingsError, load, plain, restore
from gateway.settings_table import Setting, table, values, with_values
from gateway.settings_text import written

SECRET = "s3cret-and-never-shown"


@pytest.fixture(autouse=True)
def _no_inherited_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    """Writes a configuration file; its path."""

    def write(text: str) -> str:
        path = tmp_path / "headrace.yaml"
        path.write_text(text)
        return str(path)

    return write


def problems(flags: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(flags)
    return caught.value.problems


def value_of(flags: dict[str, Any], name: str) -> Any:
    return values(load(flags).settings)[name]


def test_without_anything_given_the_defaults_hold() -> None:
    loaded = load()
    defaults = with_values(Settings(), cache=Settings().general.cache.expanduser())
    assert loaded.settings == defaults
    assert set(loaded.sources.values()) == {"default"}


def test_a_flag_beats_a_variable_which_beats_the_file_which_beats_the_default(
    monkeypatch: pytest.MonkeyPatch, config: Callable[[str], str]
) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "2")
    monkeypatch.setenv("HEADRACE_MAX_N", "2")
    path = config("port: 3\nmax_n: 3\nmax_messages: 3\n")
    loaded = load({"config": path, "port": "1"})
    settings, sources = loaded.settings, loaded.sources
    assert (settings.http.port, sources["port"]) == (1, "flag --port")
    assert (settings.limits.max_n, sources["max_n"]) == (2, "variable HEADRACE_MAX_N")
    assert (settings.limits.max_messages, sources["max_messages"]) == (3, f"{path}: max_messages")
    assert (settings.limits.queue_limit_s, sources["queue_limit_s"]) == (60.0, "default")


def test_the_file_can_be_named_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, config: Callable[[str], str]
) -> None:
    monkeypatch.setenv("HEADRACE_CONFIG", config("port: 3\n"))
    assert load().settings.http.port == 3


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_UDS", "")
    monkeypatch.setenv("HEADRACE_PORT", "")
    assert load().settings.http == Settings().http


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("65536", 65536),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("64k", 65536),
        ("1MiB", 1 << 20),
        ("2G", 2 << 30),
    ],
)
def test_sizes_may_have_units(text: str, num_bytes: int) -> None:
    assert value_of({"max_body_bytes": text}, "max_body_bytes") == num_bytes


@pytest.mark.parametrize("text", ["", "64 KiBs", "KiB", "-1", "1.5M", "9" * 40, "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    assert problems({"max_body_bytes": text})[0].startswith("max_body_bytes (flag --max-body-bytes): ")


def test_lists_come_repeated_or_with_commas_or_as_yaml_lists(
    monkeypatch: pytest.MonkeyPatch, config: Callable[[str], str]
) -> None:
    both = ("tcp://a:1", "unix:///b")
    assert value_of({"worker": list(both)}, "worker") == both
    assert value_of({"config": config("worker: [tcp://a:1, unix:///b]")}, "worker") == both
    monkeypatch.setenv("HEADRACE_WORKER", "tcp://a:1, unix:///b")
    assert value_of({}, "worker") == both


def test_engine_arguments_in_a_variable_are_split_as_a_shell_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "HEADRACE_ENGINE_ARGS", '--quantization fp8 --speculative-config \'{"method": "ngram"}\''
    )
    expected = ("--quantization", "fp8", "--speculative-config", '{"method": "ngram"}')
    assert value_of({}, "engine_args") == expected


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("port", "80a", "a whole number from 0 to 65535"),
        ("port", "65536", "a whole number from 0 to 65535"),
        ("port", "80.5", "a whole number from 0 to 65535"),
        ("queue_limit_s", "0", "a number over 0, in s"),
        ("queue_limit_s", "nan", "a number over 0, in s"),
        ("queue_limit_s", "inf", "a number over 0, in s"),
        ("heartbeat_s", "11", "a number over 0 and at most 9, in s"),
        ("max_n", "0", "a whole number of at least 1, in choices"),
        ("log_level", "loud", "one of debug, info, warning, error"),
        ("scripted", "maybe", "true or false"),
        ("uds", "", "a path"),
        ("host", "", "a text"),
        ("api_key", [""], "one or more texts"),
    ],
)
def test_a_bad_value_names_setting_source_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    (problem,) = problems({name: value})
    assert problem.startswith(f"{name} (flag --{name.replace('_', '-')}): ")
    assert problem.endswith(f"; it must be {allowed}")
    assert isinstance(value, list) or repr(value) in problem


@pytest.mark.parametrize(
    ("text", "shown"), [("port: yes", "True"), ("port: [1]", "[1]"), ("host: 8000", "8000")]
)
def test_a_value_of_another_yaml_type_is_refused(config: Callable[[str], str], text: str, shown: str) -> None:
    path, name = config(text), text.partition(":")[0]
    (problem,) = problems({"config": path})
    assert problem.startswith(f"{name} ({path}: {name}): {shown} is not allowed")


def test_a_default_that_is_null_may_be_given_as_null(config: Callable[[str], str]) -> None:
    assert value_of({"config": config("uds: null\nmax_model_len: null")}, "max_model_len") is None


def test_all_problems_are_told_at_once(monkeypatch: pytest.MonkeyPatch, config: Callable[[str], str]) -> None:
    monkeypatch.setenv("HEADRACE_PROT", "1")
    monkeypatch.setenv("HEADRACE_MAX_N", "x")
    found = "\n".join(problems({"config": config("wrkr: 1\nmax_messages: 0\n"), "port": "x"}))
    for each in ("HEADRACE_PROT", "variable HEADRACE_MAX_N", "'wrkr'", "max_messages (", "flag --port"):
        assert each in found


def test_an_unknown_variable_is_refused_with_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PROT", "1")
    assert problems({}) == ("unknown variable HEADRACE_PROT; did you mean HEADRACE_PORT?",)


def test_variables_of_the_set_up_and_the_tests_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_PYTHON", "HEADRACE_ENGINE", "HEADRACE_TORCH_INDEX", "HEADRACE_TEST_ALL"):
        monkeypatch.setenv(name, "x")
    load()


def test_an_unknown_key_in_the_file_is_refused_with_what_was_meant(config: Callable[[str], str]) -> None:
    path = config("queue_limit: 3\nconfig: other.yaml\n7: 8\n")
    assert problems({"config": path}) == (
        f"{path}: unknown setting 'queue_limit'; did you mean queue_limit_s?",
        f"{path}: unknown setting 'config'",
        f"{path}: unknown setting 7",
    )


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "a: [", "\x00"])
def test_a_file_of_another_shape_is_refused(config: Callable[[str], str], text: str) -> None:
    assert problems({"config": config(text)})[0].startswith("config: ")


def test_an_empty_file_is_fine_and_a_missing_one_is_not(config: Callable[[str], str]) -> None:
    load({"config": config("")})
    assert any("No such file" in each for each in problems({"config": "/no/such/file"}))


def test_files_must_exist() -> None:
    for name in ("ssl_certfile", "link_secret_file", "script"):
        assert any("there is no such file" in each for each in problems({name: "/no/such/file"}))
    assert problems({"rules": ["/no/such/file"]}) == (
        "rules: '/no/such/file' is not allowed (there is no such file)",
    )


def test_a_path_may_begin_at_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load().settings.general.cache == tmp_path / ".cache/headrace"
    assert value_of({"cache": "~/other"}, "cache") == tmp_path / "other"


def test_the_link_secret_comes_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    assert load({"link_secret_file": str(path)}).settings.link.link_secret == SECRET
    both = problems({"link_secret_file": str(path), "link_secret": "other"})
    assert both == ("link_secret and link_secret_file are both given; only one is allowed",)
    path.write_text(" \n")
    assert problems({"link_secret_file": str(path)}) == (f"link_secret_file: {path} is empty",)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"worker": ["http://a:1"]}, "worker: bad address 'http://a:1'"),
        ({"worker": ["tcp://a:1", "tcp://a:1"]}, "worker: an address is given twice"),
        ({"listen": "tcp://a"}, "listen: bad address 'tcp://a'"),
        ({"listen": "tcp://0.0.0.0:7400"}, "listen: tcp://0.0.0.0:7400 can be reached from other machines"),
        ({"scripted": True}, "tokenizer: 0 are given"),
        ({"scripted": True, "tokenizer": "/t", "model": "m"}, "scripted and model are both given"),
        ({"ssl_certfile": __file__}, "ssl_certfile and ssl_keyfile belong together"),
        ({"link_keyfile": __file__}, "link_certfile and link_keyfile belong together"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: dict[str, Any], expected: str) -> None:
    assert any(problem.startswith(expected) for problem in problems(flags))


def test_a_worker_may_listen_beyond_loopback_with_a_secret_or_a_certificate() -> None:
    load({"listen": "tcp://0.0.0.0:7400", "link_secret": SECRET})
    tls = {"link_certfile": __file__, "link_keyfile": __file__}
    load({"listen": "tcp://0.0.0.0:7400", "link_cafile": __file__, **tls})
    assert "link_cafile" in "".join(problems({"listen": "tcp://0.0.0.0:7400", **tls}))
    load({"listen": "unix:///tmp/x"})


def test_secrets_never_show(config: Callable[[str], str]) -> None:
    settings = load({"api_key": [SECRET, SECRET], "link_secret": SECRET}).settings
    assert SECRET not in repr(settings)
    given = values(settings)
    shown = [written(row, given[row.name]) for row in table()]
    assert f"{MASK}, {MASK}" in shown
    assert SECRET not in "".join(shown)
    errors = "\n".join(problems({"config": config(f"api_key: [{{a: {SECRET}}}]\nlink_secret: [{SECRET}]\n")}))
    assert SECRET not in errors
    assert errors.count(MASK) == 2


def test_settings_travel_to_a_child_as_json(
    monkeypatch: pytest.MonkeyPatch, config: Callable[[str], str]
) -> None:
    path = config("max_body_bytes: 64 MiB\nworker: [tcp://a:1]\nrules_action: block\n")
    settings = load(
        {"config": path, "api_key": ["a,b"], "uds": "/x/y", "engine_args": ["--a", "b c"]}
    ).settings
    monkeypatch.setenv("HEADRACE_PORT", "9")  # the parent has decided already
    restored = restore(json.loads(json.dumps(plain(settings))))
    assert restored == with_values(settings, config=None)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().settings.http.port = 1  # type: ignore[misc]


def test_names_are_unique_across_groups() -> None:
    names = [row.name for row in table()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", table(), ids=lambda row: row.name)
def test_every_default_is_allowed_and_travels(row: Setting) -> None:
    if row.default is not None and row.default != ():
        default = list(row.default) if row.is_list else row.default
        flags = {row.name: default if isinstance(default, bool | list) else str(default)}
        assert isinstance(value_of(flags, row.name), type(row.default))


def test_a_gateways_certificate_without_an_authority_is_refused() -> None:
    flags = {"worker": ["tcp://a:1"], "link_certfile": __file__, "link_keyfile": __file__}
    assert "link_certfile: a gateway needs link_cafile too" in "".join(problems(flags))
    load({**flags, "link_cafile": __file__})


def test_a_model_folder_must_be_there(tmp_path: Path) -> None:
    load({"model": str(tmp_path)})
    load({"model": "org/name"})  # for vLLM to find
    assert "there is no such folder" in "".join(problems({"model": str(tmp_path / "absent")}))
