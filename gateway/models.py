"""The models that this gateway serves:

per model its text side, built when the first worker of it is connected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from pipeline.errors import NoWorker, UnknownModel
from pipeline.inbound import Inbound, InboundOptions
from pipeline.model_text import ModelText
from pipeline.values import ModelInfo


@dataclass(frozen=True, slots=True)
class Model:
    info: ModelInfo
    text: ModelText
    inbound: Inbound


class Models:
    """Model name -> its text side.

    A model stays known when its last worker has gone: that is 503, not 404.
    """

    def __init__(self, options: InboundOptions, pool: ThreadPoolExecutor) -> None:
        self._options = options
        self._pool = pool
        self._models: dict[str, Model] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    async def load(self, info: ModelInfo, files: Mapping[str, bytes]) -> None:
        """Build a model's text side off the event loop: a large tokenizer takes seconds."""
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._pool, ModelText.from_files, files)
        self._models[info.name] = Model(info, text, Inbound(text, info, self._options))

    def get(self, name: str) -> Model:
        """Raises `UnknownModel`, or `NoWorker` while no worker has connected yet."""
        model = self._models.get(name)
        if model is None:
            if not self._models:
                raise NoWorker("No worker has connected yet.")
            raise UnknownModel(name, self.names)
        return model

    def within(self, model: Model, max_model_len: int) -> Model:
        """The model with the context length that its workers have now."""
        if model.info.max_model_len == max_model_len:
            return model
        info = replace(model.info, max_model_len=max_model_len)
        self._models[info.name] = Model(info, model.text, Inbound(model.text, info, self._options))
        return self._models[info.name]
