from itertools import islice
from random import Random

from gateway.bench.conversation import Conversation, as_text
from gateway.bench.dataset import Record
from gateway.bench.lengths import parse_lengths
from gateway.bench.prompts import Measure, Texts
from gateway.bench.workload import Shape, from_records, made_up

MEASURE = Measure(1.0, 6.0, "measured")


def first(count: int, shape: Shape, measure: Measure = MEASURE) -> list[Conversation]:
    return list(islice(made_up(shape, Texts(shape.seed, salt=shape.salt), measure), count))


def shape(prompt: str = "50", output: str = "9", salt: str | None = None, **more: int) -> Shape:
    return Shape(parse_lengths(prompt), parse_lengths(output), salt=salt, **more)


def num_words(conversation: Conversation, turn: int = 0, message: int = -1) -> int:
    return len(conversation.turns[turn].messages[message]["content"].split())


def test_a_prompt_is_as_long_as_drawn_with_what_the_template_adds() -> None:
    for conversation in first(20, shape("uniform:20:90", "uniform:3:30")):
        (turn,) = conversation.turns
        assert turn.prompt_tokens == num_words(conversation) + 6
        assert 20 <= turn.prompt_tokens <= 90
        assert 3 <= (turn.output_tokens or 0) <= 30
        assert [message["role"] for message in turn.messages] == ["user"]


def test_a_prompt_has_a_word_also_where_the_template_alone_is_longer() -> None:
    assert num_words(first(1, shape("2"))[0]) == 1


def test_the_same_seed_gives_the_same_conversations_and_another_one_others() -> None:
    assert first(5, shape("normal:50:20")) == first(5, shape("normal:50:20"))
    assert first(5, shape("normal:50:20")) != first(5, shape("normal:50:20", seed=1))


def test_a_salt_changes_the_first_words_of_prompts_and_prefixes_and_no_length() -> None:
    def with_salt(salt: str) -> list[Conversation]:
        return first(
            9, shape("uniform:5:90", "uniform:1:99", salt, prefix_tokens=20, num_prefixes=2, turns=2)
        )

    def openings(conversations: list[Conversation]) -> list[int]:
        """Which of the prefixes each has, numbered as they come."""
        numbers: dict[str, int] = {}
        texts = [each.turns[0].messages[0]["content"] for each in conversations]
        return [numbers.setdefault(text, len(numbers)) for text in texts]

    one, other = with_salt("a"), with_salt("b")
    assert one == with_salt("a")
    assert openings(one) == openings(other)
    for each, instead in zip(one, other, strict=True):
        for turn, new in zip(each.turns, instead.turns, strict=True):
            assert (turn.prompt_tokens, turn.output_tokens) == (new.prompt_tokens, new.output_tokens)
            for message, fresh in zip(turn.messages, new.messages, strict=True):
                assert message["content"].split()[:3] != fresh["content"].split()[:3]


def test_lengths_do_not_depend_on_how_the_server_counts() -> None:
    drawn = [
        [(turn.prompt_tokens, turn.output_tokens) for each in conversations for turn in each.turns]
        for conversations in (
            first(9, shape("uniform:5:90", "uniform:1:99"), measure)
            for measure in (MEASURE, Measure(9.0, 40.0, "measured"))
        )
    ]
    assert drawn[0] == drawn[1]


def test_shared_prefixes_come_before_the_prompt_and_all_are_used() -> None:
    conversations = first(60, shape(prefix_tokens=40, num_prefixes=3))
    openings = {each.turns[0].messages[0]["content"] for each in conversations}
    assert len(openings) == 3
    assert {len(opening.split()) for opening in openings} == {40}
    assert {each.turns[0].prompt_tokens for each in conversations} == {90}
    assert [message["role"] for message in conversations[0].turns[0].messages] == ["system", "user"]


def test_later_turns_add_a_question_alone() -> None:
    (conversation,) = first(1, shape(turns=3, prefix_tokens=10))
    assert [len(turn.messages) for turn in conversation.turns] == [2, 1, 1]
    assert [num_words(conversation, turn) for turn in range(3)] == [44, 50, 50]
    assert [turn.prompt_tokens for turn in conversation.turns] == [60, 50, 50]


def test_records_are_repeated_and_keep_their_lengths() -> None:
    messages = ({"role": "user", "content": "x"},)
    records = [Record((messages,), 5), Record((messages, messages))]
    given = list(islice(from_records(records, parse_lengths("9"), seed=0), 4))
    assert [[turn.output_tokens for turn in each.turns] for each in given] == [[5], [9, 9], [5], [9, 9]]


def test_records_without_a_length_draw_it_from_the_seed() -> None:
    records = [Record((({"role": "user", "content": "x"},),))]
    lengths = [
        [
            turn.output_tokens
            for each in islice(from_records(records, parse_lengths("uniform:1:1000"), seed), 9)
            for turn in each.turns
        ]
        for seed in (1, 1, 2)
    ]
    assert lengths[0] == lengths[1] != lengths[2]
    assert len(set(lengths[0])) > 5


def test_messages_as_text_are_their_contents() -> None:
    texts = Texts(0).draw(Random(0), 3)
    assert (
        as_text([{"role": "system", "content": texts}, {"role": "user", "content": "b"}]) == f"{texts}\n\nb"
    )
