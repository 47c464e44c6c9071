"""Which tokenizer belongs to which model."""

from pathlib import Path

import pytest

from gateway.settings_upstream import Upstream, check_tokenizers, check_upstreams, tokenizer_folder


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ((), None),
        (("/t",), "/t"),
        (("m=/t",), "/t"),
        (("other=/t",), None),
        (("/any", "m=/t"), "/t"),
        (("m=/t", "/any"), "/t"),
        (("other=/t", "/any"), "/any"),
        (("/a=b/t",), "/a=b/t"),
        (("./m=/t",), "m=/t"),
        (("org/m=/t",), None),
    ],
)
def test_a_models_own_folder_comes_before_the_one_for_all(given: tuple[str, ...], folder: str | None) -> None:
    assert tokenizer_folder(given, "m") == (None if folder is None else Path(folder))


def test_a_folder_in_the_users_home() -> None:
    assert tokenizer_folder(("m=~/t",), "m") == Path.home() / "t"


def test_two_folders_for_one_model_are_refused() -> None:
    assert list(check_tokenizers(("m=/a", "n=/b", "/c"))) == []
    assert list(check_tokenizers(("m=/a", "m=/b", "/c"))) == [
        "tokenizer: 2 folders are given for 'm'; only one is allowed"
    ]
    assert list(check_tokenizers(("/a", "/b"))) == [
        "tokenizer: 2 folders are given without a model's name; only one is allowed"
    ]


def test_an_address_that_is_none_is_named_without_its_password() -> None:
    upstream = Upstream(upstream=("vllm+http://a:1", "ftp://b", "openai+http://user:pass@c"))
    problems = list(check_upstreams(upstream))
    assert len(problems) == 2
    assert "'ftp://b'" in problems[0]
    assert "pass@" not in problems[1]


def test_an_address_twice_is_refused() -> None:
    (problem,) = check_upstreams(Upstream(upstream=("vllm+http://a:1", "vllm+http://a:1")))
    assert "given twice" in problem
    secret = "openai+http://user:pass@c"
    problems = list(
        check_upstreams(Upstream(upstream=(secret, secret, "vllm+http://a", "vllm+http://a:80/v1")))
    )
    assert "given twice: vllm+http://a:80, vllm+http://a:80" in problems[-1]
    assert "pass@" not in str(problems)


@pytest.mark.parametrize("key", ["secret\n", "sec\rret", "secret ", "s\u0435cret", "\x01secret"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    (problem,) = check_upstreams(Upstream(upstream=("vllm+http://a:1",), upstream_api_key=key))
    assert problem.startswith("upstream_api_key: it has characters that no header can hold")
    assert "secret" not in problem
    assert not list(check_upstreams(Upstream(upstream_api_key="a key/of=any-kind~")))
