"""A tokenizer for text that spells control strings: in it the control tokens have names that no text has.

A rendered prompt in which every control string that the template wrote is replaced by its token's name has
the ids of the original, but for what users spelled: that is ordinary text now. Whatever a control token does
to its neighbours (swallowing white space, ending a word) it still does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from tokenizers import Tokenizer

from pipeline.controls import ControlStrings

# Private characters of Unicode's last plane, one for each control token. More than the last 2,046 of them are
# used only where a tokenizer has more.
_FIRST_PRIVATE: Final = 0x100000
_FIRST_NAME: Final = 0x10F800
_LAST_NAME: Final = 0x10FFFD


class RenamedTokenizer:
    """Made of a model's tokenizer in 0.1 to 3 s. Safe to call from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, controls: ControlStrings) -> None:
        first = min(_FIRST_NAME, _LAST_NAME + 1 - len(controls))
        if first < _FIRST_PRIVATE:
            raise ValueError(f"the tokenizer has {len(controls)} control tokens; too many to be renamed")
        self.names = {text: chr(first + index) for index, text in enumerate(controls.ids)}
        self._name = re.compile(f"[{chr(first)}-{chr(_LAST_NAME)}]")
        self._controls = controls
        config: dict[str, Any] = json.loads(tokenizer.to_str())
        real = {}
        for token in config["added_tokens"]:
            token["content"] = self.names.get(token["content"], token["content"])
            real[token["content"]] = token["id"]
        config["post_processor"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(config))
        ids = ((self._tokenizer.token_to_id(content), token_id) for content, token_id in real.items())
        # A token of the model's own vocabulary gets an id at the end, and so do those after it.
        self._real_ids = {new: token_id for new, token_id in ids if new is not None and new != token_id}

    def ids(self, opening: str, segments: Iterable[tuple[str, str]]) -> list[int]:
        """Ids of an opening and of segments, each as the control string that it begins with and the rest."""
        texts = [opening]
        heads = []
        for head, rest in segments:
            heads.append(self._controls.ids[head])
            texts += [self.names[head], rest]
        if not any(map(self._name.search, texts[::2])):
            ids = self._encode("".join(texts))
            if [token_id for token_id in ids if token_id in self._controls.id_set] == heads:
                return ids
        return self._by_pieces(texts[::2], heads)

    def _by_pieces(self, texts: list[str], heads: list[int]) -> list[int]:
        """The same for text that spells even the names: safe, and perhaps not as one would cut it."""
        ids: list[int] = []
        for index, text in enumerate(texts):
            ids += heads[index - 1 : index] if index else []
            for piece in self._name.split(text):
                found = self._encode(piece)
                if not self._controls.id_set.isdisjoint(found):
                    found = [token_id for char in piece for token_id in self._encode(char)]
                ids += [token_id for token_id in found if token_id not in self._controls.id_set]
        return ids

    def _encode(self, text: str) -> list[int]:
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._real_ids:
            return list(encoded)
        return [self._real_ids.get(token_id, token_id) for token_id in encoded]
