"""What a worker is started with: the settings in its terms."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.progress import StreamProgress
from backend.worker import build_server
from gateway.run_serve import check_engine_arguments
from gateway.run_worker import worker_options
from gateway.settings import Settings
from gateway.settings_answers import Answers
from gateway.settings_load import SettingsError
from gateway.settings_media import Media
from gateway.settings_upstream import Upstream
from gateway.settings_worker import Engine, Scripted
from pipeline.values import MediaSupport
from tests.backend.linked import make_tokenizer


def settings(*parsers: str, **engine: object) -> Settings:
    return Settings(answers=Answers(reasoning_parser=parsers), engine=Engine(**engine))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parsers", "engine", "expected"),
    [
        ((), {"model": "org/m"}, None),
        (("qwen3",), {"model": "org/m"}, "qwen3"),
        (("org/m=qwen3", "olmo3"), {"model": "org/m"}, "qwen3"),
        (("other=qwen3",), {"model": "org/m"}, None),
        (("b=qwen3",), {"model": "org/m", "served_model_name": ("a", "b")}, "qwen3"),
        (("SmolLM2-135M-Instruct=qwen3",), {}, "qwen3"),
    ],
)
def test_a_worker_takes_the_reasoning_parser_of_its_model(
    parsers: tuple[str, ...], engine: dict[str, object], expected: str | None
) -> None:
    assert worker_options(settings(*parsers, **engine)).reasoning_parser == expected


async def test_the_reasoning_parser_is_an_engine_argument_before_the_users_own() -> None:
    given = settings("qwen3", model="org/m", engine_args=("--seed", "1", "--reasoning-parser", "olmo3"))
    server = build_server(worker_options(given), StreamProgress())
    assert list(server._engine._options.engine_args) == [  # type: ignore[attr-defined]
        *("--reasoning-parser", "qwen3"),
        *("--seed", "1", "--reasoning-parser", "olmo3"),
    ]


async def test_a_scripted_worker_announces_the_reasoning_parser(tmp_path: Path) -> None:
    tokenizer = str(make_tokenizer(tmp_path / "model"))
    given = Settings(
        answers=Answers(reasoning_parser=("scripted=qwen3", "olmo3")),
        scripted=Scripted(scripted=True),
        upstream=Upstream(tokenizer=(tokenizer,)),
    )
    server = build_server(worker_options(given), StreamProgress())
    assert server.info.reasoning_parser == "qwen3"
    assert server.welcome(b"n").reasoning_parser == "qwen3"


@pytest.mark.parametrize(("parsers", "shown"), [((), "none"), (("qwen3",), "'qwen3'")])
def test_serve_refuses_an_engine_argument_that_its_gateway_does_not_know(
    parsers: tuple[str, ...], shown: str
) -> None:
    given = settings(*parsers, model="m", engine_args=("--reasoning-parser=olmo3",))
    with pytest.raises(SettingsError, match=f"say 'olmo3', but the gateway has {shown}; give"):
        check_engine_arguments(given)


def test_serve_takes_an_engine_argument_that_says_the_same_or_nothing() -> None:
    check_engine_arguments(settings("olmo3", model="m", engine_args=("--reasoning-parser=olmo3",)))
    check_engine_arguments(settings("olmo3", model="m"))
    check_engine_arguments(settings(model="m", engine_args=("--seed", "1")))


async def test_a_scripted_worker_takes_media_as_its_settings_say(tmp_path: Path) -> None:
    tokenizer = str(make_tokenizer(tmp_path / "model"))
    scripted = Scripted(scripted=True, scripted_media=("image=w7",))
    given = Settings(scripted=scripted, upstream=Upstream(tokenizer=(tokenizer,)))
    server = build_server(worker_options(given), StreamProgress())
    assert server.info.media == {"image": MediaSupport(7, 16)}


async def test_a_worker_refuses_the_images_that_its_gateway_does() -> None:
    given = Settings(media=Media(max_image_pixels=99), engine=Engine(model="org/m"))
    server = build_server(worker_options(given), StreamProgress())
    assert server._engine._options.max_image_pixels == 99  # type: ignore[attr-defined]
