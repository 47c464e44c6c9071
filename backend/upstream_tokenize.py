"""`POST /tokenize`, as vLLM and SGLang have it: the ids that a server's own tokenizer makes of a text."""

from __future__ import annotations

from typing import Final

import msgspec

from backend.upstream_ports import Ask

TOKENIZE: Final = "/tokenize"
# 403, 404: an older version, or a proxy that lets only some paths through. 5xx: a server without a tokenizer.
_TELLS_NOT: Final = (400, 403, 404, 405, 422, 500, 501)


class _Answer(msgspec.Struct):
    tokens: list[int]


async def ask_token_ids(ask: Ask, model: str, text: str) -> list[int] | None:
    """The ids, without any that are added to a prompt; None where the server does not tell.

    Raises what `Ask` does, and `ValueError` for what is no list of ids.
    """
    body = msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": False})
    response = await ask("POST", TOKENIZE, body, allowed=_TELLS_NOT)
    if response.status != 200:
        return None
    return msgspec.json.decode(response.body, type=_Answer).tokens
