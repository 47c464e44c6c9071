"""One choice's way out: the order of its stages, any chunking alike, logprobs never ahead of their text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from filters.rules import Rule, RuleSet
from filters.stream import CompiledRules
from pipeline.channel_text import ChannelText
from pipeline.channels import Channels
from pipeline.control_dropper import ControlAutomaton, ControlDropper
from pipeline.detokenizer import open_detokenizer
from pipeline.events import CONTENT, PositionLogprobs
from pipeline.logprob_queue import LogprobQueue
from pipeline.outbound import FINISH, Outbound
from pipeline.pieces import Detokenizer, Piece
from pipeline.stop_strings import StopMatcher
from pipeline.values import TokenLogprobs
from pipeline.vocabulary import Vocabulary
from tests.pipeline import small_tokenizers
from tests.pipeline.said import Said
from tests.pipeline.splits import random_split, splits

MASK = Rule("m", ("敏感词",), "mask", replacement="*")
BLOCK = Rule("b", ("敏感词",), "block")


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(small_tokenizers.byte_level())


@cache
def _byte_ids() -> dict[bytes, int]:
    found = {vocabulary().token_bytes(token_id): token_id for token_id in reversed(range(len(vocabulary())))}
    return {data: token_id for data, token_id in found.items() if len(data) == 1}


def ids_of(text: str) -> list[int]:
    return list(vocabulary().tokenizer.encode(text, add_special_tokens=False).ids)


def byte_ids(text: str) -> list[int]:
    """One id a byte: every character beyond ASCII is cut."""
    return [_byte_ids()[bytes([byte])] for byte in text.encode()]


def special(token: str) -> int:
    token_id = vocabulary().tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def outbound(
    *rules: Rule,
    stops: Sequence[str] = (),
    include: bool = False,
    min_tokens: int = 0,
    skip: bool = True,
    max_hold_s_policy: str = "block",
) -> Said:
    matcher = StopMatcher(stops, include, min_tokens) if stops else None
    compiled = CompiledRules(RuleSet(rules), on_max_hold=max_hold_s_policy)  # type: ignore[arg-type]
    return content_only(open_detokenizer(vocabulary(), skip), compiled, matcher, include)


def content_only(
    detokenizer: Detokenizer,
    rules: CompiledRules,
    stops: StopMatcher | None = None,
    include: bool = False,
    texts_of: Vocabulary | None = None,
) -> Said:
    """A choice without parsers."""
    completes = rules.completes if rules.is_active else None
    queue = LogprobQueue((texts_of or vocabulary()).token_text, completes, rules.look_back)
    content = ChannelText(CONTENT, text_filter=rules.stream(), queue=queue)
    return Said(Outbound(detokenizer, Channels(content, queue=queue), stops, include, queue))


def entries_for(ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs([token_id, 0, 1], [-0.5, -0.25, -2.0], 2) for token_id in ids]


def steps(
    choice: Said, chunks: Sequence[Sequence[int]], finish: str | None = "length", logprobs: bool = False
) -> Iterator[str]:
    """What leaves at each chunk, until the choice has ended; the last chunk carries the engine's finish."""
    for number, chunk in enumerate(chunks):
        is_last = number == len(chunks) - 1
        extra = entries_for(chunk) if logprobs else None
        yield choice.feed(list(chunk), finish if is_last else None, None, extra)
        if choice.finish is not None:
            return


def texts(choice: Said, *pieces: str, finish: str | None = None) -> list[str]:
    """What leaves for these texts, each a chunk; `finish` comes in a chunk of its own."""
    shown = []
    for piece in pieces:
        shown.append(choice.feed(ids_of(piece)))
        if choice.finish is not None:
            return shown
    return [*shown, choice.feed([], finish)] if finish else shown


# -- text ----------------------------------------------------------------------------------------------------


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stops": {"stops": ["STOP", "感词", "OP t"]},
    "stop included": {"stops": ["STOP", "感词"], "include": True},
    "min tokens": {"stops": ["STOP", "感词"], "min_tokens": 4},
    "mask": {"rules": [MASK]},
    "block": {"rules": [BLOCK]},
    "mask and stops": {"rules": [MASK], "stops": ["感词", "STOP"]},
    "block and stops": {"rules": [BLOCK], "stops": ["STOP"]},
}
PIECES = [*small_tokenizers.WORDS, "敏感词", "敏感", "感词", "STOP", "ST", "OP t", "敏"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("logprobs", [False, True], ids=["text", "logprobs"])
def test_any_chunking_gives_the_same_text_and_end(name: str, logprobs: bool) -> None:
    rng = random.Random(name)
    options = dict(CONFIGURATIONS[name])
    rules = options.pop("rules", [])
    ends = set()
    for _ in range(25):
        text = "a" + " ".join(rng.choices(PIECES, k=rng.randint(1, 6)))
        ids = rng.choice([ids_of, byte_ids])(text)[:32]
        outcomes = set()
        for chunks in splits(ids, rng):
            choice = outbound(*rules, **options)
            shown = "".join(steps(choice, chunks, "length", logprobs))
            released = tuple(entry.token_id for entry in choice.logprobs)
            outcomes.add((shown, choice.finish, choice.stop_reason, released))
            assert choice.num_held == 0
        assert len(outcomes) == 1, (text, outcomes)
        ends.add(outcomes.pop()[1])
    if name == "plain":
        assert ends == {"length"}
    else:
        assert len(ends) > 1 or name == "mask", ends


def test_text_is_the_whole_decode_of_the_ids() -> None:
    rng = random.Random(3)
    tokenizer = vocabulary().tokenizer
    for _ in range(50):
        ids = [rng.randrange(len(vocabulary())) for _ in range(rng.randint(1, 20))]
        choice = outbound()
        assert "".join(steps(choice, random_split(ids, rng))) == tokenizer.decode(ids)


def test_stop_ends_the_text_before_the_filter_looks_at_its_tail() -> None:
    choice = outbound(MASK, stops=["感词"])
    assert texts(choice, "敏", "感", "词") == ["", "", "敏"]
    assert (choice.finish, choice.stop_reason, choice.ended_here) == ("stop", "感词", True)
    assert choice.hits == []


def test_stop_is_found_on_the_raw_text_and_not_on_the_masked_one() -> None:
    choice = outbound(MASK, stops=["***"])
    assert texts(choice, "敏感词", finish="length") == ["***", ""]
    assert choice.finish == "length"


def test_control_token_is_dropped_before_the_filter() -> None:
    choice = outbound(Rule("m", ("abc",), "mask", replacement="*"))
    ids = [*ids_of("ab"), special("<|im_end|>"), *ids_of("c")]
    assert "".join(steps(choice, [[token_id] for token_id in ids])) == "***"


def test_stop_split_over_chunks_is_never_sent() -> None:
    choice = outbound(stops=["STOP"])
    assert texts(choice, "ok ST", "OP tail") == ["ok ", ""]
    assert (choice.finish, choice.stop_reason) == ("stop", "STOP")
    choice = outbound(stops=["STOP"])
    assert texts(choice, "ok ST", finish="length") == ["ok ", "ST"]
    assert (choice.finish, choice.stop_reason, choice.ended_here) == ("length", None, False)


def test_choices_do_not_share_what_they_hold() -> None:
    first, second = outbound(MASK), outbound(MASK)
    assert texts(first, "敏") == [""]
    assert texts(second, "感词") == ["感词"]
    assert texts(first, "感词") == ["***"]
    assert texts(second, "!") == ["!"]


def test_held_text_is_not_flushed_without_an_end() -> None:
    choice = outbound(MASK)
    assert texts(choice, "a敏") == ["a"]
    assert (choice.num_held, choice.finish, choice.hits) == (1, None, [])


# -- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reason", "shown"), sorted(FINISH.items()))
def test_engines_finish_is_told_in_openais_words(reason: str, shown: str) -> None:
    choice = outbound()
    choice.feed(ids_of("hi"), reason)
    assert (choice.finish, choice.ended_here) == (shown, False)


@pytest.mark.parametrize("stop", [None, 17])
def test_stop_token_is_hidden_and_its_id_is_the_reason(stop: int | None) -> None:
    choice = outbound(skip=False)
    assert choice.feed([*ids_of("hi"), special("<|im_end|>")], "stop", stop) == "hi"
    assert (choice.finish, choice.stop_reason, choice.ended_here) == ("stop", stop, False)


def test_stop_token_is_shown_when_included_unless_special_tokens_are_skipped() -> None:
    ids = [*ids_of("hi"), special("<|im_end|>")]
    assert outbound(skip=False, include=True).feed(ids, "stop") == "hi<|im_end|>"
    assert outbound(skip=True, include=True).feed(ids, "stop") == "hi"
    assert outbound(include=True).feed([*ids_of("hi"), special("<think>")], "stop") == "hi<think>"


def test_last_token_of_a_length_finish_is_shown() -> None:
    assert outbound().feed([*ids_of("hi"), special("<think>")], "length") == "hi<think>"


def test_logprobs_of_a_hidden_stop_token_are_hidden_too() -> None:
    choice = outbound()
    ids = [*ids_of("hi"), special("<|im_end|>")]
    choice.feed(ids, "stop", None, entries_for(ids))
    assert [entry.token_id for entry in choice.logprobs] == ids_of("hi")


def test_stop_string_in_the_last_chunk_needs_no_abort() -> None:
    choice = outbound(stops=["STOP"])
    assert choice.feed(ids_of("a STOP b"), "length") == "a "
    assert (choice.finish, choice.stop_reason, choice.ended_here) == ("stop", "STOP", False)


@pytest.mark.parametrize(("finish", "ended_here"), [(None, True), ("length", False)])
def test_block_ends_the_choice_at_the_start_of_its_match(finish: str | None, ended_here: bool) -> None:
    choice = outbound(BLOCK)
    assert choice.feed(ids_of("abc敏")) == "abc"
    assert choice.feed(ids_of("感词def"), finish) == ""
    assert (choice.finish, choice.stop_reason, choice.ended_here) == ("content_filter", None, ended_here)
    assert [(hit.rule_id, hit.start, hit.end) for hit in choice.hits] == [("b", 3, 6)]


def test_block_in_front_of_a_stop_still_ends_the_engine() -> None:
    choice = outbound(BLOCK, stops=["STOP"])
    assert choice.feed(ids_of("a敏感词 STOP")) == "a"
    assert (choice.finish, choice.stop_reason, choice.ended_here) == ("content_filter", None, True)


def test_block_behind_a_stop_is_never_seen() -> None:
    choice = outbound(BLOCK, stops=["STOP"])
    assert choice.feed(ids_of("a STOP 敏感词")) == "a "
    assert (choice.finish, choice.ended_here, choice.hits) == ("stop", True, [])


def test_word_that_the_end_completes_blocks() -> None:
    choice = outbound(Rule("w", ("ass",), "block", whole_word=True))
    assert texts(choice, "a ass", finish="stop") == ["a ", ""]
    assert (choice.finish, choice.ended_here) == ("content_filter", False)


def test_an_ended_choice_refuses_more() -> None:
    choice = outbound()
    choice.feed(ids_of("hi"), "stop")
    with pytest.raises(AssertionError, match="after its end"):
        choice.feed(ids_of("hi"))


def test_min_tokens_exempts_the_first_tokens_of_a_merged_chunk() -> None:
    ids = [*byte_ids("STOP"), *byte_ids("ab STOP c")]
    for min_tokens, shown in ((3, ""), (4, "STOPab "), (5, "STOPab "), (20, "STOPab STOP c")):
        for chunks in ([ids], [ids[:6], ids[6:]], [[token_id] for token_id in ids]):
            choice = outbound(stops=["STOP"], min_tokens=min_tokens)
            assert "".join(steps(choice, chunks)) == shown, (min_tokens, chunks)


def test_incomplete_character_at_the_end_is_shown_as_such() -> None:
    ids = byte_ids("a敏")[:-1]
    choice = outbound()
    assert [*steps(choice, [ids[:2], ids[2:]])] == ["a", "\ufffd"]


# -- text that is held ---------------------------------------------------------------------------------------


def test_expired_hold_blocks() -> None:
    choice = outbound(MASK)
    assert texts(choice, "a敏感") == ["a"]
    assert choice.num_held == choice.peak_held == 2
    assert choice.expire() == ""
    assert (choice.finish, choice.ended_here, choice.num_held, choice.num_leaked) == (
        "content_filter",
        True,
        0,
        0,
    )
    assert [hit.action for hit in choice.hits] == ["block"]


def test_expired_hold_is_released_and_counted_as_leaked() -> None:
    choice = outbound(MASK, max_hold_s_policy="release")
    assert texts(choice, "a敏感") == ["a"]
    assert choice.expire() == "敏感"
    assert (choice.finish, choice.num_held, choice.num_leaked) == (None, 0, 2)
    assert texts(choice, "词。", finish="stop") == ["*。", ""]  # the rest of the word is still masked


def test_without_rules_nothing_is_held() -> None:
    choice = outbound()
    assert texts(choice, "敏感词") == ["敏感词"]
    assert (choice.num_held, choice.peak_held, choice.num_leaked) == (0, 0, 0)


# -- logprobs ------------------------------------------------------------------------------------------------


def touched(ids: Sequence[int]) -> list[tuple[int, int]]:
    """The characters of the text that each id has a byte of, from the bytes alone."""
    owners: list[int] = []  # per byte, the character that it belongs to
    for number, char in enumerate(b"".join(map(vocabulary().token_bytes, ids)).decode()):
        owners += [number] * len(char.encode())
    spans, at = [], 0
    for token_id in ids:
        size = len(vocabulary().token_bytes(token_id))
        spans.append((owners[at], owners[at + size - 1] + 1))
        at += size
    return spans


@pytest.mark.parametrize("rules", [[], [MASK]], ids=["no filter", "mask"])
def test_no_logprobs_leave_before_all_characters_of_their_token(rules: list[Rule]) -> None:
    rng = random.Random(11)
    for _ in range(25):
        text = "".join(rng.choices(["敏感词", "敏感", "敏", "x", " día", "👋", "感觉"], k=rng.randint(1, 6)))
        ids = rng.choice([ids_of, byte_ids])(text)
        spans = touched(ids)
        shown_of_all = "".join(steps(outbound(*rules), [ids]))
        for chunks in (*[[ids]], [[token_id] for token_id in ids], random_split(ids, rng)):
            choice, shown, seen = outbound(*rules), "", 0
            for piece in steps(choice, chunks, "length", logprobs=True):
                shown += piece
                for entry in choice.logprobs[seen:]:
                    assert entry.end <= len(shown), (text, entry)
                seen = len(choice.logprobs)
            assert shown == shown_of_all
            kept = [i for i, (start, end) in enumerate(spans) if shown[start:end] == text[start:end]]
            got = [entry.token_id for entry in choice.logprobs]
            assert got == [ids[i] for i in kept], text
            for entry, i in zip(choice.logprobs, kept, strict=True):
                assert entry.start <= spans[i][0]
                assert entry.end >= spans[i][1]


def test_logprobs_come_complete_and_in_order() -> None:
    ids = byte_ids("a敏b")
    choice = outbound()
    list(steps(choice, [ids], "length", logprobs=True))
    assert [(entry.token_id, entry.start, entry.end) for entry in choice.logprobs] == [
        (ids[0], 0, 1),
        (ids[1], 1, 2),
        (ids[2], 1, 2),
        (ids[3], 1, 2),
        (ids[4], 2, 3),
    ]


def test_logprobs_wait_with_held_text_and_are_dropped_where_it_is_rewritten() -> None:
    choice = outbound(MASK)
    first, second = ids_of("a"), byte_ids("敏")
    choice.feed(first + second, None, None, entries_for(first + second))
    assert [entry.token_id for entry in choice.logprobs] == first
    rest = byte_ids("感词。")
    assert choice.feed(rest, None, None, entries_for(rest)) == "***。"
    assert [entry.token_id for entry in choice.logprobs] == first + rest[-3:]


def test_token_that_ends_a_masked_word_in_mid_character_is_dropped_too() -> None:
    """It is a part of the masked word, and of the piece that ends with the character's other half."""
    ids = [7000, 7001, 7002]

    class ThreeTokens:
        """First `敏感词` and a third of the next character, then the rest of that, then a whole one."""

        is_mid_character = False
        texts_now = None

        def feed(self, ids: list[int]) -> str:
            raise AssertionError("it matters which id made which text")

        def pieces(self, ids: list[int]) -> list[Piece]:
            return [Piece("敏感词好", (7000, 7001))] * (7001 in ids) + [Piece("。", (7002,))] * (7002 in ids)

        def flush(self) -> str:
            return ""

        def flush_pieces(self) -> list[Piece]:
            return []

    choice = content_only(ThreeTokens(), CompiledRules(RuleSet((MASK,))))
    assert choice.feed(ids[:1], None, None, entries_for(ids[:1])) == ""
    assert choice.feed(ids[1:], "length", None, entries_for(ids[1:])) == "***好。"
    assert [entry.token_id for entry in choice.logprobs] == [7002]


def test_a_run_of_byte_tokens_waits_for_its_last_character() -> None:
    vocabulary_ = Vocabulary(small_tokenizers.byte_fallback())
    id_of = {token: token_id for token_id, token in vocabulary_.tokens.items()}
    ids = [id_of[f"<0x{byte:02X}>"] for byte in "敏感".encode()]
    last = id_of["a"]
    rules = CompiledRules(RuleSet((Rule("m", ("感词",), "mask", replacement="*"),)))
    choice = content_only(open_detokenizer(vocabulary_), rules, texts_of=vocabulary_)
    assert choice.feed(ids, None, None, entries_for(ids)) == ""
    assert choice.feed([last], None, None, entries_for([last])) == "敏感a"
    assert [(entry.start, entry.end) for entry in choice.logprobs] == [(0, 2)] * 6 + [(2, 3)]


def test_logprobs_of_an_incomplete_last_character_are_kept() -> None:
    ids = byte_ids("a敏")[:-1]
    for choice in (outbound(), outbound(MASK), outbound(stops=["STOP"])):
        list(steps(choice, [ids], "length", logprobs=True))
        assert [entry.token_id for entry in choice.logprobs] == ids
        assert [entry.end for entry in choice.logprobs] == [1, 2, 2]


def test_logprobs_behind_a_stop_or_a_block_never_leave() -> None:
    for choice in (outbound(stops=["STOP"]), outbound(BLOCK)):
        for token_id in (ids := [*ids_of("a "), *byte_ids("STO"), *byte_ids("P敏感词"), *ids_of("tail")]):
            if choice.finish is None:
                choice.feed([token_id], None, None, entries_for([token_id]))
        released = [entry.token_id for entry in choice.logprobs]
        assert choice.finish in ("stop", "content_filter")
        assert released == ids[: len(released)]
        expected = ids_of("a ") if choice.finish == "stop" else [*ids_of("a "), *byte_ids("STOP")]
        assert released == expected


def test_logprobs_of_tokens_without_text_are_kept() -> None:
    ids = [special("<|im_start|>"), *ids_of("hi"), special("<|im_start|>")]
    choice = outbound()
    list(steps(choice, [[token_id] for token_id in ids], "length", logprobs=True))
    assert [entry.token_id for entry in choice.logprobs] == ids


@pytest.mark.parametrize("chunked", [False, True])
def test_alternative_that_would_complete_a_denied_word_does_not_leave(chunked: bool) -> None:
    """After `ab` the model says `x`; it might have said `c`, or `d`."""
    a, b, x, c, d = (ids_of(char)[0] for char in "abxcd")
    entries = [TokenLogprobs([a], [-1.0], 1), TokenLogprobs([b, c], [-1.0, -2.0], 1)]
    entries.append(TokenLogprobs([x, c, d, x], [-1.0, -0.1, -3.0, -1.0], 2))
    for rules, kept in (((), [x, c, d, x]), ((Rule("m", ("abc",), "mask", replacement="*"),), [x, d, x])):
        choice = outbound(*rules)
        if chunked:
            for token_id, entry in zip((a, b, x), entries, strict=True):
                choice.feed([token_id], None, None, [entry])
        else:
            choice.feed([a, b, x], None, None, entries)
        assert [list(each.logprobs.token_ids) for each in choice.logprobs] == [[a], [b, c], kept]
        assert len(choice.logprobs[2].logprobs.logprobs) == len(kept)
        assert choice.logprobs[2] == PositionLogprobs(x, 2, 3, choice.logprobs[2].logprobs)


@pytest.mark.parametrize(
    "other",
    [
        Rule("f", ("secret",), "flag", whole_word=True),
        Rule("s", ("secret",), "block", whole_word=True, shadow=True),
        Rule("r", ("secrett",), "flag", repeats=True),
        Rule("p", (), "flag", pii="email"),
    ],
    ids=["flag", "shadow", "repeats", "pii"],
)
@pytest.mark.parametrize("text", ["a secret b", "x@y.secret", "secretsecret.", "a secret"])
def test_no_logprobs_of_a_masked_word_while_another_rule_is_still_at_it(other: Rule, text: str) -> None:
    """The word leaves masked at once; its hit is told in its turn, after those of the other rule."""
    ids = byte_ids(text)
    for chunks in ([[each] for each in ids], [ids]):
        choice = outbound(Rule("m", ("secret",), "mask", replacement="*"), other)
        shown = "".join(steps(choice, chunks, "length", logprobs=True))
        assert "******" in shown
        kept = [(entry.start, vocabulary().token_text(entry.token_id)) for entry in choice.logprobs]
        assert all(shown[start] == char for start, char in kept), kept
        assert len(kept) == len(text) - shown.count("*")


def test_alternative_that_is_a_part_of_a_character_does_not_leave() -> None:
    """After the bytes of `敏` and two of those of `感`, an alternative is the third."""
    ids = byte_ids("敏感")
    rules = (Rule("m", ("敏感",), "mask", replacement="*"),)
    other = byte_ids("愞")  # its first two bytes are those of `感`
    assert other[:2] == ids[3:5]
    said = [*ids[:5], other[2]]
    entries = [TokenLogprobs([token_id, token_id, ids[5]], [-1.0, -1.0, -2.0], 1) for token_id in said]
    shown = {(): 3, rules: 2}
    for given, num_kept in shown.items():
        choice = outbound(*given)
        choice.feed(said, "length", None, entries)
        assert [len(each.logprobs.token_ids) for each in choice.logprobs] == [num_kept] * 6


def test_hold_is_not_new_again_while_no_text_comes() -> None:
    out = outbound(MASK)
    out.feed(ids_of("敏"))
    assert (out.num_held, out.is_new_hold) == (1, True)
    out.feed([special("<|im_start|>")])
    assert (out.num_held, out.is_new_hold) == (1, False)


def test_logprobs_of_text_released_at_its_time_limit_leave_with_it() -> None:
    choice = outbound(MASK, max_hold_s_policy="release")
    ids = byte_ids("敏")
    choice.feed(ids, None, None, entries_for(ids))
    assert choice.logprobs == []
    assert choice.expire() == "敏"
    assert [entry.token_id for entry in choice.logprobs] == ids


def test_hold_begins_anew_when_all_that_was_held_has_left() -> None:
    out = outbound(Rule("r", ("aab",), "mask", replacement="*"))
    seen = []
    for text in ("x", "a", "a", "a", "a", "c"):
        out.feed(ids_of(text))
        seen.append((out.num_held, out.num_held > 0 and out.is_new_hold))
    # The first `a` begins a hold of one character, the third lets it go and begins the next one.
    assert seen == [(0, False), (1, True), (2, False), (2, True), (2, False), (0, False)]


# -- the token path ------------------------------------------------------------------------------------------


def plain_choice(*rules: Rule, passes_by: bool = True) -> Outbound:
    """A choice without logprobs and parsers: stages with nothing to do may be passed by, or not."""

    class EachStage(ChannelText):
        __slots__ = ()
        filter_now = None

    dropper = ControlDropper(ControlAutomaton(["<|im_end|>", "<x>"]))
    text_filter = CompiledRules(RuleSet(rules)).stream()
    content = (ChannelText if passes_by else EachStage)(CONTENT, dropper, text_filter=text_filter)
    return Outbound(open_detokenizer(vocabulary()), Channels(content))


def some_ids(rng: random.Random) -> list[int]:
    """Whole texts, halves of characters and of control strings, special tokens, ids of no token."""
    ids: list[int] = []
    while len(ids) < 60:
        text = rng.choice(
            ["a", " the", "<", "<x>", "<|im_", "end|>", "敏", "感", "词", "敏感", "é", "e\\u0301", ""]
        )
        ids += (byte_ids if rng.random() < 0.4 else ids_of)(text)
        ids += byte_ids("敏")[: rng.randint(1, 2)] * (rng.random() < 0.1)
        ids += [rng.choice([special("<|im_end|>"), 10**6])] * (rng.random() < 0.1)
    return ids


@pytest.mark.parametrize("seed", range(60))
def test_stages_that_are_passed_by_would_have_done_nothing(seed: int) -> None:
    rng = random.Random(seed)
    ids = some_ids(rng)
    rules = [(), (MASK,), (MASK, Rule("w", ("the",), "mask", replacement="T", whole_word=True)), (BLOCK,)][
        seed % 4
    ]
    quick, whole = plain_choice(*rules), plain_choice(*rules, passes_by=False)
    for chunk in random_split(ids, rng) if seed % 3 else [[token_id] for token_id in ids]:
        shown = [choice.feed(list(chunk)) for choice in (quick, whole)]
        assert shown[0] == shown[1]
        assert (quick.is_new_hold, quick.num_held) == (whole.is_new_hold, whole.num_held)
        assert quick.take_hits() == whole.take_hits()
        assert quick.finish == whole.finish
        if quick.finish is not None:
            return
        if rng.random() < 0.05:
            assert quick.expire() == whole.expire()
            if quick.finish is not None:
                return
    assert quick.feed([], "length") == whole.feed([], "length")
    assert quick.take_hits() == whole.take_hits()
    assert (quick.peak_held, quick.num_leaked) == (whole.peak_held, whole.num_leaked)


def test_a_token_of_plain_text_is_not_shown_to_stages_without_anything_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = plain_choice(MASK)
    letter, half, rest = ids_of("a"), byte_ids("é")[:1], byte_ids("é")[1:]
    choice.feed(letter)
    with monkeypatch.context() as patched:
        patched.setattr(ChannelText, "feed", lambda *_: pytest.fail("it went through all stages"))
        assert choice.feed_text(letter) == "a"
    assert choice.feed_text(half) == ""
    assert choice.feed_text(rest) == "é"
    with monkeypatch.context() as patched:
        patched.setattr(ChannelText, "feed", lambda *_: pytest.fail("it went through all stages"))
        assert choice.feed_text(letter) == "a"


def test_a_choice_that_has_ended_refuses_plain_text() -> None:
    choice = plain_choice(BLOCK)
    choice.feed(ids_of("a"))
    choice.feed(ids_of("敏感词"))
    assert choice.finish == "content_filter"
    with pytest.raises(AssertionError):
        choice.feed_text(ids_of("a"))
