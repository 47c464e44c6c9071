"""Images and sounds made into what vLLM takes: checked, decoded off the event loop, put into the prompt.

A gateway has looked at them before, but a worker trusts no file: what a decoder trips over, or would blow up
to gigabytes, ends one job and nothing else. What fetches and limits them is the gateway's `media.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from backend.large_blocks import give_back_large_blocks
from backend.media_support import KINDS, Support, lack
from backend.ports import Job
from backend.vllm_request import BadJobError, prompt_ids, refusal
from backend.wav import decode_wav, is_wav
from pipeline.image_blocks import check_blocks, format_of
from pipeline.values import MediaKind, MediaSupport, Medium

logger = logging.getLogger(__name__)

MAX_AUDIO_S: Final = 600.0  # as the gateway's default; vLLM's own limit where it has one
# Jobs whose media are decoded at the same time: vLLM's processor takes one after the other, and each may hold
# 3 bytes for each pixel.
_MAX_DECODING: Final = 2
_MAX_IMAGES_OF_PIXELS: Final = 8  # of the largest size that one may have, in one job
# Where models' configurations have the id of their placeholder.
_ID_FIELDS: Final[Mapping[MediaKind, tuple[str, ...]]] = {
    "image": ("image_token_id", "image_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}


class MediaReader:
    """Makes prompts with media for one engine. `support` is what its model takes; empty for a text model."""

    def __init__(self, llm: Any, max_image_pixels: int) -> None:
        self.support: Support = media_support(llm)
        self._llm = llm
        self._max_image_pixels = max_image_pixels
        self._turns = asyncio.Semaphore(_MAX_DECODING)
        if self.support:  # here, and not in the engine core, which is another process by now
            give_back_large_blocks()

    def check(self, job: Job) -> None:
        """Raises `BadJobError` unless a job has a medium for each placeholder: the engine core would go on
        without, or die."""
        if (problem := lack(self.support, [medium.kind for medium in job.media])) is not None:
            raise BadJobError(problem)
        for kind, each in self.support.items():
            num_media = sum(medium.kind == kind for medium in job.media)
            num_places = _count(job.ids, each.token_id)
            if num_places != num_media:
                raise BadJobError(
                    f"the prompt has {num_places} placeholders of kind {kind}, and {num_media} media"
                )

    async def prompt(self, job: Job, is_wanted: Callable[[], bool] = lambda: True) -> Any:
        """vLLM's engine input for a job with media, their placeholders made the tokens that they stand for.

        None if the job is no longer wanted when its turn comes. Raises `BadJobError`.
        """
        self.check(job)
        async with self._turns:
            if not is_wanted():
                return None
            prompt = await asyncio.to_thread(self._decoded, job)
            try:
                # In vLLM's own thread for this: its processors must not run side by side.
                found = await self._llm.renderer.process_for_engine_async(prompt, time.time())
            except ImportError as error:  # changing a sound's sample rate takes one
                raise BadJobError(
                    "the model's processor needs a library for these media that this worker lacks; for "
                    "sample rates other than the model's own, vLLM's extra for audio has it"
                ) from error
            except Exception as error:  # whatever a model's processor makes of an image
                raise BadJobError(f"the model's processor refuses the media: {refusal(error)}") from error
        num_tokens, max_tokens = len(found["prompt_token_ids"]), self._llm.model_config.max_model_len
        if num_tokens >= max_tokens:
            raise BadJobError(
                f"the prompt has {num_tokens} tokens with its media; an answer needs it to have at most "
                f"{max_tokens - 1}"
            )
        return found

    def _decoded(self, job: Job) -> Any:
        """The prompt with its media as vLLM's processors take them."""
        from vllm.inputs import TokensPrompt

        data: dict[str, list[Any]] = {}
        names: dict[str, list[str]] = {}
        pixels_left = self._max_image_pixels * _MAX_IMAGES_OF_PIXELS
        for medium in job.media:
            of_kind = data.setdefault(medium.kind, [])
            options = _io_options(self._llm, medium.kind)
            try:
                if medium.kind == "image":
                    file = bytes(medium.data)
                    pixels_left -= check_image(file, min(self._max_image_pixels, pixels_left))
                    of_kind.append(decode_image(file, options))
                else:
                    of_kind.append(decode_audio(medium.data, medium.format, options))
            except Exception as error:  # decoders raise whatever they like
                raise BadJobError(f"{medium.kind} number {len(of_kind) + 1}: {refusal(error)}") from error
            names.setdefault(medium.kind, []).append(_identity(medium, job.cache_salt))
        prompt = TokensPrompt(prompt_token_ids=prompt_ids(job.ids), multi_modal_data=data)
        prompt["multi_modal_uuids"] = names
        if job.cache_salt is not None:
            prompt["cache_salt"] = job.cache_salt
        return prompt


def media_support(llm: Any) -> dict[MediaKind, MediaSupport]:
    """Which media an engine's model takes, and the placeholder of each as it stands in a prompt."""
    model = llm.model_config
    if not getattr(model, "is_multimodal_model", False) or getattr(model, "is_encoder_decoder", False):
        return {}
    limits = llm.renderer.get_mm_processor().info.allowed_mm_limits
    support: dict[MediaKind, MediaSupport] = {}
    for kind in KINDS:
        if not limits.get(kind):
            continue
        token_id = _placeholder_id(llm, kind)
        if token_id is None:
            logger.warning("this model's placeholder for media of kind %s is no token: none are taken", kind)
        else:
            support[kind] = MediaSupport(token_id, int(limits[kind]))
    return support


def _placeholder_id(llm: Any, kind: MediaKind) -> int | None:
    """The one id that a template writes for a medium, by the model's class, else by its configuration."""
    from vllm.model_executor.model_loader import get_model_cls

    config = llm.model_config.hf_config
    known = [value for name in _ID_FIELDS[kind] if isinstance(value := getattr(config, name, None), int)]
    model_class = get_model_cls(llm.model_config)
    texts = [model_class.get_placeholder_str(kind, number) for number in (1, 2)]
    if texts[0] is None:
        return known[0] if known else None
    ids = llm.renderer.get_tokenizer().encode(texts[0], add_special_tokens=False)
    for token_id in known:
        if token_id in ids:
            return token_id
    # Numbered placeholders have a token for each number: no one id tells how many there are.
    return int(ids[0]) if len(ids) == 1 and texts[0] == texts[1] else None


def check_image(data: bytes, max_pixels: int) -> int:
    """The pixels of an image, from its header alone: a small file may be an image of any size.

    Raises `ValueError` for more than `max_pixels`, and for what is no image that is taken.
    """
    form = format_of(data)
    if form is not None:
        try:
            check_blocks(data, form)
        except ValueError as problem:
            raise ValueError(f"it {problem}") from None
    with _opened(data) as image:
        width, height = image.size
    if width * height > max_pixels:
        raise ValueError(f"it has {width} x {height} pixels; the limit is {max_pixels}")
    return int(width * height)


def decode_image(data: bytes, options: Mapping[str, Any]) -> Any:
    """The image as vLLM's own server would load it. Raises what the decoder raises, and `ValueError`.

    But not by vLLM's loader, which goes by what the first of 37 readers makes of the file: one that is a
    small WebP image to `check_image` can be a huge one to another reader.
    """
    from PIL import ImageOps
    from vllm.multimodal.media import ImageMediaIO

    try:
        with _opened(data) as image:
            image.load()
            with contextlib.suppress(Exception):  # an orientation that cannot be read is none
                ImageOps.exif_transpose(image, in_place=True)
            return ImageMediaIO(**options)._convert_image_mode(image)
    except OSError as error:
        raise ValueError(f"it cannot be decoded: {error}") from error


def _opened(data: bytes) -> Any:
    """Its size and mode are known; by the one reader that its first bytes tell."""
    from PIL import Image, UnidentifiedImageError

    form = format_of(data)
    try:
        return Image.open(io.BytesIO(data), formats=(form,) if form is not None else ())
    except UnidentifiedImageError:
        raise ValueError("it is no PNG, JPEG, WebP or GIF image, or its beginning is broken") from None


def decode_audio(data: Any, form: str, options: Mapping[str, Any]) -> tuple[Any, float]:
    """Samples and their rate. Raises what the decoder raises, and `ValueError`."""
    import vllm.envs

    if is_wav(data):
        max_s = getattr(vllm.envs, "VLLM_MAX_AUDIO_DECODE_DURATION_S", MAX_AUDIO_S)
        return decode_wav(data, max_s)
    from vllm.multimodal.media import AudioMediaIO

    try:
        samples, rate = AudioMediaIO(**options).load_bytes(bytes(data))
    except ImportError:
        raise ValueError(f"this worker has no library that reads {form[:20]}; WAV needs none") from None
    return samples, rate


def _io_options(llm: Any, kind: MediaKind) -> Mapping[str, Any]:
    """What vLLM was told of loading this kind: its `--media-io-kwargs`."""
    config = getattr(llm.model_config, "multimodal_config", None)
    options: Mapping[str, Any] = (getattr(config, "media_io_kwargs", None) or {}).get(kind) or {}
    return options


def _identity(medium: Medium, cache_salt: str | None) -> str:
    """Equal files are the same to the engine's caches, unless different salts keep their requests apart."""
    digest = hashlib.sha256(f"{medium.kind}:{len(cache_salt or '')}:{cache_salt or ''}:".encode())
    digest.update(medium.data)
    return digest.hexdigest()


def _count(ids: bytes, token_id: int) -> int:
    import numpy as np

    return int(np.count_nonzero(np.frombuffer(ids[: len(ids) & ~3], "<i4") == token_id))
