"""Whether the tokenizer in a folder is the one that an upstream server has: both read a few texts.

Nothing else tells: a server answers ids of another vocabulary too, with nonsense. Ids that differ are a
misfit, unless the folder's tokenizer reads them as the same text: then the vocabulary is one, and only the
splitting differs (say a server in another tokenizer mode), which costs quality but no sense, and is told.

Not here: which folder a model has (`upstream_server.py`), how a server is asked (its kind).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from backend.catalog import MisfitError
from backend.local_model import LocalModel
from backend.upstream_ports import Ask, ServedModel, UpstreamKind

logger = logging.getLogger(__name__)

# Words, numbers, code with its white space, other scripts: no two families of vocabularies agree on them all.
TEXTS: Final = (
    "The quick brown fox jumps over 1234567 lazy dogs, doesn't it?",
    "def area(radius):\n    return 3.14159 * radius ** 2\t# naïve\n\n",
    "Съешь же ещё этих мягких булок. 我能吞下玻璃而不伤身体。 السلام عليكم 🙂👩‍💻",
)
MAX_SPECIAL: Final = 16  # of its special tokens, which make one text more
MAX_IDS: Final = 4096  # more than any tokenizer makes of these texts
MAX_KEPT: Final = 64

TestText = tuple[str, list[int]]  # and its ids


class FolderTokenizers:
    """What folders' tokenizers say, each loaded once for that: it holds the process up for half a second."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tested: dict[str, list[TestText]] = {}  # by fingerprint
        self._texts: dict[tuple[str, tuple[int, ...]], str] = {}

    async def test_texts(self, local: LocalModel) -> Sequence[TestText]:
        """The texts with the folder's ids. Raises `MisfitError` for a tokenizer that cannot be loaded."""
        async with self._lock:
            found = self._tested.get(local.fingerprint)
            if found is None:
                found = self._tested[local.fingerprint] = await asyncio.to_thread(_test_texts, local)
            return found

    async def text_of(self, local: LocalModel, ids: Sequence[int]) -> str:
        """How the folder's tokenizer reads ids; empty for what are none of its own."""
        async with self._lock:
            key = local.fingerprint, tuple(ids)
            if key not in self._texts:  # one that is refused comes back every few seconds
                if len(self._texts) >= MAX_KEPT:
                    self._texts.clear()
                self._texts[key] = await asyncio.to_thread(_text, local, ids)
            return self._texts[key]


class TokenizerCheck:
    """Of one server, `key`. What it cannot check, or finds odd, it logs once."""

    def __init__(self, kind: UpstreamKind, key: str, tokenizers: FolderTokenizers) -> None:
        self._kind = kind
        self._key = key
        self._tokenizers = tokenizers
        self._told: set[str] = set()

    async def check(
        self, ask: Ask, listed: Sequence[ServedModel], locals_: Sequence[LocalModel | None]
    ) -> None:
        """Raises `MisfitError` where a model's tokenizer is not its folder's, and what `Ask` raises.

        `locals_`: one for each model. Of those that share one the first is asked for: the rest are adapters.
        """
        checked: set[str] = set()
        for served, local in zip(listed, locals_, strict=True):
            if local is not None and local.fingerprint not in checked:
                checked.add(local.fingerprint)
                await self._check(ask, served.name, local)

    async def _check(self, ask: Ask, model: str, local: LocalModel) -> None:
        for number, (text, ours) in enumerate(await self._tokenizers.test_texts(local)):
            theirs = await self._kind.token_ids(ask, model, text)
            if theirs is None:
                self._tell(
                    logging.INFO,
                    f"upstream {self._key} tokenizes nothing for others: whether {local.folder} has "
                    f"the tokenizer of {model!r} cannot be checked",
                )
                return
            if theirs == ours:
                continue
            what = f"of test text {number + 1}, {_difference(theirs, ours)}"
            if len(theirs) > MAX_IDS or await self._tokenizers.text_of(local, theirs) != (
                await self._tokenizers.text_of(local, ours)
            ):
                raise MisfitError(
                    f"upstream {self._key} has another tokenizer for {model!r} than the folder "
                    f"{local.folder}: {what}; tokenizer must name the folder of the very model that it serves"
                )
            self._tell(
                logging.WARNING,
                f"upstream {self._key} splits texts otherwise than the tokenizer of {local.folder}, with the "
                f"same vocabulary: {what}; is it the folder of {model!r}?",
            )

    def _tell(self, level: int, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.log(level, "%s", message)


def _difference(theirs: Sequence[int], ours: Sequence[int]) -> str:
    """The first one, in numbers: no text."""
    pairs = zip(theirs, ours, strict=False)
    at = next((at for at, (their, our) in enumerate(pairs) if their != our), min(len(theirs), len(ours)))
    their, our = (ids[at] if at < len(ids) else "missing" for ids in (theirs, ours))
    return f"token {at + 1} is {their} by the server and {our} by the folder"


def _load(local: LocalModel) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(local.paths["tokenizer.json"].read_bytes())
    except Exception as error:  # tokenizers raises bare Exception
        raise MisfitError(f"tokenizer {local.folder} cannot be used: {error}") from error


def _test_texts(local: LocalModel) -> list[TestText]:
    tokenizer = _load(local)
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    special = "".join([token.content for _, token in added if token.special][:MAX_SPECIAL])
    texts = [*TEXTS, special] if special else TEXTS
    return [(text, tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def _text(local: LocalModel, ids: Sequence[int]) -> str:
    try:
        return str(_load(local).decode(ids, skip_special_tokens=False))
    except OverflowError:  # no id at all
        return ""
