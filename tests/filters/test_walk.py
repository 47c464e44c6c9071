from __future__ import annotations

import random

from filters.automaton import Automaton
from filters.folding import fold, fold_char
from filters.walk import ARRIVED, FAIL, LIVE, PARKED, STATE, Walk


def test_edges_lead_where_steps_lead_and_stops_are_dead_ends() -> None:
    rng = random.Random(1)
    patterns = ["".join(rng.choices("abc我.", k=rng.randint(2, 4))) for _ in range(30)]
    automaton = Automaton(patterns, fold=True, whole=range(0, 30, 2))
    walk = Walk(automaton)
    num_edges = 0
    for state, node in enumerate(walk.nodes):
        assert (node[STATE], node[LIVE]) == (state, automaton.live[state])
        has_fail = automaton.depth[state] > 0 and not automaton.awaiting[state]
        assert node[FAIL] is (walk.nodes[automaton.fail[state]] if has_fail else None)
        for char in (key for key in node if len(key) == 1):
            num_edges += 1
            target = automaton.step(state, fold(char))
            assert node[char][STATE] == target
            if automaton.outputs[target]:
                assert node[char] == {LIVE: ARRIVED, STATE: target, FAIL: None}
            else:
                assert node[char] is walk.nodes[target]
    assert num_edges > 1_000


def test_nodes_of_words_that_wait_have_edges_for_letters_only() -> None:
    automaton = Automaton(["ab", "ab.c", "abd"], fold=True, whole=[0])
    waiting = [node for node, state in zip(Walk(automaton).nodes, automaton.awaiting, strict=True) if state]
    assert waiting
    for node in waiting:
        assert {key for key in node if len(key) == 1 and not key.isalnum()} == set()
        assert "d" in node
        assert "z" in node


def test_root_after_depends_on_the_last_character() -> None:
    walk = Walk(Automaton(["ab", "我的"], fold=True, whole=[0]))
    assert walk.last_root == 1
    assert [walk.root_after(char)[STATE] for char in " 我é"] == [0, 0, 1]
    plain = Walk(Automaton(["ab"], fold=True))
    assert plain.last_root == 0
    assert plain.root_after("é") is plain.root


def test_parked_sends_everything_the_exact_way() -> None:
    assert Walk(Automaton(["ab"], fold=True)).parked(2) == {LIVE: PARKED, STATE: 2, FAIL: None}


def test_irregular_characters_fold_in_ways_that_no_edge_knows() -> None:
    irregular = Walk(Automaton(["ab"], fold=True)).irregular
    assert {"\u200b", "㎏", "ß", "𝐚", "ⓒ"} <= irregular
    assert not irregular & set("aAａＡ我！é")
    assert all(fold_char(char) != char for char in irregular)
