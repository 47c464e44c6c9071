"""The tree of warm prompts against a plain search through all of them."""

from __future__ import annotations

import random
from array import array

import pytest

from gateway.warm_tree import WarmTree

BLOCK = 4


def packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def plain_match(
    rows: dict[str, tuple[list[int], str | None]], prompt: list[int], salt: str | None, cached: int
) -> tuple[list[str], set[str]]:
    """What a match means, one row at a time."""
    same_salt = {name: ids for name, (ids, of) in rows.items() if of == salt}
    used = sorted((len(ids), name) for name, ids in same_salt.items() if prompt[: len(ids)] == ids)
    lost = (cached // BLOCK + 1) * BLOCK
    if lost > (len(prompt) - 1) // BLOCK * BLOCK:
        return [name for _, name in used], set()
    damaged = {name for name, ids in same_salt.items() if len(ids) >= lost and ids[:lost] == prompt[:lost]}
    return [name for _, name in used], damaged


@pytest.mark.parametrize("seed", range(20))
def test_match_equals_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    tree: WarmTree[str] = WarmTree(BLOCK)
    rows: dict[str, tuple[list[int], str | None]] = {}

    def some_ids(most: int) -> list[int]:
        # Few different ids, and often a known beginning: branches at every depth, rows within rows.
        begin: list[int] = []
        if rows and rng.random() < 0.7:
            known = rng.choice(list(rows.values()))[0]
            begin = known[: rng.randrange(len(known) + 1)]
        return (begin + [rng.randrange(2) for _ in range(rng.randrange(1, 12))])[:most]

    for number in range(40):
        ids = some_ids(60)
        ids += [0] * (-len(ids) % BLOCK)
        salt = rng.choice([None, None, "a", "b"])
        rows[f"row {number}"] = (ids, salt)
        tree.insert(packed(ids), salt, f"row {number}")
    num_damaged = 0
    for _ in range(500):
        prompt, salt, cached = (
            some_ids(80),
            rng.choice([None, "a", "b", "c"]),
            rng.choice([0, 0, rng.randrange(0, 60)]),
        )
        used, damaged = tree.match(memoryview(packed(prompt)), salt, cached)
        expected_used, expected_damaged = plain_match(rows, prompt, salt, cached)
        lengths = [len(rows[name][0]) for name in used]
        assert lengths == sorted(lengths)
        assert set(used) == set(expected_used)
        assert len(used) == len(expected_used)
        assert set(damaged or ()) == expected_damaged
        num_damaged += len(expected_damaged)
    assert num_damaged > 50


def test_last_token_is_never_a_loss() -> None:
    tree: WarmTree[str] = WarmTree(BLOCK)
    tree.insert(packed([1] * 8), None, "row")
    used, damaged = tree.match(memoryview(packed([1] * 8)), None, 4)
    assert (used, damaged) == (["row"], None)
    used, damaged = tree.match(memoryview(packed([1] * 9)), None, 4)
    assert (used, list(damaged or ())) == (["row"], ["row"])


def test_half_a_block_is_refused() -> None:
    tree: WarmTree[str] = WarmTree(BLOCK)
    with pytest.raises(AssertionError):
        tree.insert(packed([1] * 7), None, "row")
    with pytest.raises(AssertionError):
        tree.insert(b"", None, "row")
