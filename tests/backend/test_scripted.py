"""The scripted engine: what it says, when, and what ends it."""

from __future__ import annotations

import asyncio
import json
from array import array
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from backend.model_files import ModelFilesError
from backend.ports import EngineEvents, Job, Key, Output
from backend.scripted import Faults, ScriptedEngine, ScriptedOptions, serve_scripted
from backend.scripted_tokens import ScriptError
from pipeline.values import MediaSupport, Medium
from tests.backend.linked import EOS_ID, NUM_WORDS, ids_of, make_medium, make_tokenizer, until
from tests.pipeline.small_tokenizers import byte_level


class Listener:
    """Remembers what an engine reports, per key."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.outputs: dict[Key, list[Output]] = {}
        self.ended: list[Key] = []
        self.closed: list[Key] = []
        self.failures: list[tuple[Key, str, str]] = []
        self.deaths: list[str] = []
        self.step_sizes: list[int] = []

    async def start(self) -> None:
        await self.engine.start(
            EngineEvents(
                step=self.on_step,
                closed=self.closed.extend,
                failed=lambda *failure: self.failures.append(failure),
                died=self.deaths.append,
            )
        )

    def on_step(self, outputs: Any) -> None:
        self.step_sizes.append(len(outputs))
        for output in outputs:
            self.outputs.setdefault(output.key, []).append(output)
            if output.finish is not None:
                self.ended.append(output.key)

    def submit(self, key: Key, prompt: list[int], priority: int = 0, **sampling: Any) -> None:
        self.engine.submit(key, Job(ids_of(prompt), {"max_tokens": 5} | sampling, priority))

    async def answer(self, prompt: list[int], **sampling: Any) -> tuple[list[int], str | None, Any]:
        key = object()
        self.submit(key, prompt, **sampling)
        await until(lambda: key in self.ended)
        outputs = self.outputs[key]
        ids = [token for output in outputs for token in output.ids]
        return ids, outputs[-1].finish, outputs[-1].stop


async def make(folder: Path, **options: Any) -> Listener:
    tokenizer = options.pop("tokenizer", None) or make_tokenizer(folder / "model")
    options = {"step_ms": 0.0, "prefill_ms_per_1k": 0.0} | options
    listener = Listener(ScriptedEngine(ScriptedOptions(tokenizer=tokenizer, **options)))
    await listener.start()
    return listener


def write_script(folder: Path, value: Any) -> Path:
    path = folder / "script.json"
    path.write_text(json.dumps(value))
    return path


# -- media -------------------------------------------------------------------------------------------------


async def ask_with(listener: Listener, prompt: list[int], *media: Medium, **sampling: Any) -> Any:
    """The ids and the first output's facts, or the refusal."""
    key, job = object(), Job(ids_of(prompt), {"max_tokens": 20} | sampling, media=media)
    listener.engine.submit(key, job)
    await until(lambda: key in listener.ended or key in [failure[0] for failure in listener.failures])
    if key not in listener.ended:
        return next(failure[1:] for failure in listener.failures if failure[0] == key)
    outputs = listener.outputs[key]
    return [token for output in outputs for token in output.ids], outputs[0].extra


async def test_media_are_many_tokens_that_depend_on_their_bytes_and_kind(tmp_path: Path) -> None:
    listener = await make(tmp_path, media=("image=w400", "audio=w401"))
    assert listener.engine.info.media == {"image": MediaSupport(400, 16), "audio": MediaSupport(401, 16)}
    one, other, sound = make_medium(b"1"), make_medium(b"2"), make_medium(b"1", "audio")
    ids, extra = await ask_with(listener, [1, 400, 2, 401], one, sound)
    assert extra.prompt_tokens == 2 + 2 * 7
    assert (await ask_with(listener, [1, 400, 2, 401], sound, one))[0] == ids  # their order by kind counts
    assert (await ask_with(listener, [1, 400, 2, 401], other, sound))[0] != ids
    first, second = [await ask_with(listener, [400, 400], *pair) for pair in ((one, other), (other, one))]
    assert first[0] != second[0]
    assert (await ask_with(listener, [1, 2]))[1].prompt_tokens is None


async def test_prefix_cache_tells_media_apart(tmp_path: Path) -> None:
    listener = await make(tmp_path, block_size=4, media=("image=w400",))
    prompt = [*range(8), 400, *range(8)]
    cached = [
        (await ask_with(listener, prompt, make_medium(file)))[1].cached_tokens for file in (b"1", b"1", b"2")
    ]
    assert cached == [0, 20, 8]
    pairs = [[make_medium(file) for file in files] for files in ((b"3", b"4"), (b"3", b"5"), (b"5", b"4"))]
    cached = [(await ask_with(listener, [400, *range(9), 400], *pair))[1].cached_tokens for pair in pairs]
    assert cached == [0, 16, 0]


async def test_placeholders_and_length_are_checked_with_media(tmp_path: Path) -> None:
    listener = await make(tmp_path, max_model_len=30, media=("image=w400",))
    image = make_medium(b"1")
    assert await ask_with(listener, [1, 400]) == (
        "rejected",
        "the prompt has 1 placeholders for 0 of kind 'image'",
    )
    assert await ask_with(listener, [1], image) == (
        "rejected",
        "the prompt has 0 placeholders for 1 of kind 'image'",
    )
    kind, message = await ask_with(listener, [400] * 5, *[image] * 5)
    assert (kind, message) == ("rejected", "the prompt has 140 bytes; it must be 1 to 29 ids of 4 bytes")


@pytest.mark.parametrize("entry", ["image", "image=", "smell=w4", "=w4"])
def test_media_entry_that_is_none_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match=f"scripted_media is {entry!r}"):
        ScriptedOptions(tokenizer=Path("t"), media=(entry,))


async def test_placeholder_that_is_no_token_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no token '<image>'"):
        await make(tmp_path, media=("image=<image>",))


# -- tokens ------------------------------------------------------------------------------------------------


async def test_tokens_depend_on_seed_request_seed_and_prompt_alone(tmp_path: Path) -> None:
    first, again = await make(tmp_path, seed=7), await make(tmp_path, seed=7)
    other = await make(tmp_path, seed=8)
    base = await first.answer([1, 2, 3], max_tokens=50)
    assert await again.answer([1, 2, 3], max_tokens=50) == base
    assert await first.answer([1, 2, 3], max_tokens=50) == base
    assert base[0] == list(islice(first.engine.tape.walk(ids_of([1, 2, 3])), 50))
    different = [
        await first.answer([1, 2, 4], max_tokens=50),
        await first.answer([1, 2, 3], max_tokens=50, seed=1),
        await first.answer([1, 2, 3], max_tokens=50, seed=2),
        await other.answer([1, 2, 3], max_tokens=50),
    ]
    for index, answer in enumerate(different):
        assert answer not in [base, *different[:index]]


async def test_only_ordinary_tokens_are_said(tmp_path: Path) -> None:
    listener = await make(tmp_path)
    assert listener.engine.tape.ids <= set(range(NUM_WORDS))
    ids, finish, stop = await listener.answer([1], max_tokens=3000)
    assert (len(ids), finish, stop) == (3000, "length", None)
    assert EOS_ID not in ids
    assert len(set(ids)) > 400


async def test_stop_token_ends_it_and_is_its_last_id(tmp_path: Path) -> None:
    listener = await make(tmp_path)
    ids, _, _ = await listener.answer([1], max_tokens=20)
    at = ids.index(ids[10])
    assert await listener.answer([1], max_tokens=20, stop_token_ids=[ids[10]]) == (
        ids[: at + 1],
        "stop",
        ids[10],
    )


async def test_min_tokens_comes_before_any_stop(tmp_path: Path) -> None:
    listener = await make(tmp_path, script=write_script(tmp_path, ["w1 w2"]))
    assert await listener.answer([9]) == ([1, 2, EOS_ID], "stop", None)
    ids, finish, _ = await listener.answer([9], min_tokens=4, max_tokens=9)
    assert (ids[:2], len(ids), finish) == ([1, 2], 9, "length")
    assert EOS_ID not in ids
    ids, finish, stop = await listener.answer([9], min_tokens=1, stop_token_ids=[2])
    assert (ids, finish, stop) == ([1, 2], "stop", 2)


async def test_ignore_eos_goes_on_to_max_tokens(tmp_path: Path) -> None:
    listener = await make(tmp_path, script=write_script(tmp_path, ["w1 w2"]))
    ids, finish, _ = await listener.answer([9], ignore_eos=True, max_tokens=6)
    assert (ids[:3], len(ids), finish) == ([1, 2, EOS_ID], 6, "length")


async def test_context_of_the_model_is_the_last_bound(tmp_path: Path) -> None:
    listener = await make(tmp_path, max_model_len=20)
    ids, finish, _ = await listener.answer([1] * 15, max_tokens=100)
    assert (len(ids), finish) == (5, "length")
    listener.submit("long", [1] * 20)
    listener.submit("empty", [])
    assert [(key, kind) for key, kind, _ in listener.failures] == [
        ("long", "rejected"),
        ("empty", "rejected"),
    ]


async def test_logprobs_have_the_sampled_token_first_then_the_best(tmp_path: Path) -> None:
    listener = await make(tmp_path)
    ids, _, _ = await listener.answer([1], logprobs=2, max_tokens=4)
    (outputs,) = listener.outputs.values()
    entries = [entry for output in outputs for entry in output.extra.logprobs or ()]  # type: ignore[union-attr]
    assert [entry[0][0] for entry in entries] == ids
    for token_ids, logprobs, rank in entries:
        assert token_ids[0] == token_ids[1]
        assert (len(token_ids), len(logprobs), rank) == (3, 3, 1)
        assert logprobs[1:] == sorted(logprobs[1:], reverse=True)
        assert all(logprob < 0 for logprob in logprobs)
    assert [output.extra.is_first for output in outputs] == [True, False, False, False]  # type: ignore[union-attr]


async def test_tokenizer_without_end_token_ends_a_script_with_no_id_of_its_own(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "bare")
    (tokenizer / "tokenizer_config.json").unlink()
    listener = await make(tmp_path, tokenizer=tokenizer, script=write_script(tmp_path, ["w1 w2"]))
    assert await listener.answer([9]) == ([1, 2], "stop", None)
    assert listener.engine.stats().kv_usage == 0.0


async def test_generation_config_gives_end_tokens_and_sampling_defaults(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    config = {"eos_token_id": [3, 4], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (tokenizer / "generation_config.json").write_text(json.dumps(config))
    listener = await make(tmp_path, tokenizer=tokenizer, script=write_script(tmp_path, [[1, 4, 2]]))
    assert listener.engine.info.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert listener.engine.info.scripted is True
    assert await listener.answer([9]) == ([1, 4], "stop", None)


# -- scripts -----------------------------------------------------------------------------------------------


async def test_script_list_answers_in_order_and_round_again(tmp_path: Path) -> None:
    listener = await make(tmp_path, script=write_script(tmp_path, ["w1", [2, 3]]))
    assert [(await listener.answer([9]))[0] for _ in range(3)] == [[1, EOS_ID], [2, 3, EOS_ID], [1, EOS_ID]]


async def test_script_object_answers_by_what_the_prompt_contains(tmp_path: Path) -> None:
    script = write_script(tmp_path, {"w7 w8": "w1", "w9": "w2"})
    listener = await make(tmp_path, script=script)
    assert (await listener.answer([6, 7, 8]))[0] == [1, EOS_ID]
    assert (await listener.answer([8, 7, 9]))[0] == [2, EOS_ID]
    assert (await listener.answer([5]))[0] == list(islice(listener.engine.tape.walk(ids_of([5])), 5))


async def test_script_object_takes_turns_with_the_answers_of_a_key(tmp_path: Path) -> None:
    script = write_script(tmp_path, {"w7": ["w1", "w2 w3"], "w8": [4, 5], "": "w6"})
    listener = await make(tmp_path, script=script)
    found = [(await listener.answer([prompt]))[0][:-1] for prompt in (7, 8, 7, 9, 7, 8)]
    assert found == [[1], [4, 5], [2, 3], [6], [1], [4, 5]]


async def test_script_says_control_strings_as_their_tokens(tmp_path: Path) -> None:
    """Reasoning and tool calls can be scripted as a model says them, special tokens and plain added ones."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    call = '<think>so</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    script = write_script(tmp_path, {"weather": [call, "plain"], "": "other"})
    listener = await make(tmp_path, tokenizer=folder, script=script, reasoning_parser="qwen3")
    prompt = tokenizer.encode("<|im_start|>weather<|im_end|>", add_special_tokens=False).ids
    grammar = {"json": {"type": "object"}}  # it has no grammar, and makes no fuss about it
    ids, finish, _ = await listener.answer(prompt, max_tokens=200, structured_outputs=grammar)
    assert finish == "stop"
    assert tokenizer.decode(ids, skip_special_tokens=False) == call
    for control in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert ids.count(tokenizer.token_to_id(control)) == 1
    assert tokenizer.decode((await listener.answer(prompt, max_tokens=50))[0]) == "plain"
    assert listener.engine.info.reasoning_parser == "qwen3"


async def test_script_text_is_an_answer_per_line(tmp_path: Path) -> None:
    path = tmp_path / "script.txt"
    path.write_text("w1\n\nw2\u2028w3\n", encoding="utf-8")
    listener = await make(tmp_path, script=path)
    assert [(await listener.answer([9]))[0] for _ in range(2)] == [[1, EOS_ID], [2, 3, EOS_ID]]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "not empty"),
        ("text", "a list of answers"),
        ([["w1"]], "answer 0"),
        ({"a": [501]}, "answer 'a'"),
        ({"a": ["w1", 2]}, "answer 'a'"),
        ({"a": [[]]}, "'a'"),
    ],
)
async def test_bad_script_is_named_with_its_entry(tmp_path: Path, value: Any, reason: str) -> None:
    with pytest.raises(ScriptError) as caught:
        await make(tmp_path, script=write_script(tmp_path, value))
    assert "script.json" in str(caught.value)
    assert reason in str(caught.value)


async def test_script_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text("{")
    with pytest.raises(ScriptError, match=r"script\.json"):
        await make(tmp_path, script=tmp_path / "script.json")


async def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        ScriptedEngine(ScriptedOptions(tokenizer=tmp_path / "empty"))


# -- time and order ----------------------------------------------------------------------------------------


async def test_one_step_serves_all_running_streams(tmp_path: Path) -> None:
    listener = await make(tmp_path, step_ms=2.0)
    for number in range(50):
        listener.submit(number, [number], max_tokens=4)
    await until(lambda: len(listener.ended) == 50)
    assert listener.step_sizes == [50, 50, 50, 50]


class HandLoop:
    """Stands in for the event loop's clock and timers, so that time passes as the test says."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, Any]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, callback: Any) -> Any:
        self.timers.append((when_s, callback))
        return self

    def call_soon(self, callback: Any, *args: Any) -> None:
        callback(*args)

    def cancel(self) -> None:
        self.timers.clear()

    def run(self, late_s: float = 0.0) -> float:
        """Fire the next timer, this much too late; returns when it was due."""
        when_s, callback = self.timers.pop(0)
        self.now_s = max(self.now_s, when_s + late_s)
        callback()
        return when_s


async def make_timed(folder: Path, **options: Any) -> tuple[Listener, HandLoop]:
    listener, loop = await make(folder, **options), HandLoop()
    listener.engine._loop = loop  # type: ignore[assignment]
    return listener, loop


async def test_steps_keep_their_rate_when_timers_come_late(tmp_path: Path) -> None:
    listener, loop = await make_timed(tmp_path, step_ms=20.0)
    listener.submit("a", [1], max_tokens=1000)
    due_s = [loop.run(late_s=0.003 * (number % 4)) for number in range(200)]
    assert due_s == pytest.approx([100.0 + 0.02 * (number + 1) for number in range(200)])


async def test_steps_missed_while_the_process_stood_still_are_not_made_up_for(tmp_path: Path) -> None:
    listener, loop = await make_timed(tmp_path, step_ms=20.0)
    listener.submit("a", [1], max_tokens=1000)
    loop.run()
    loop.run(late_s=60.0)
    assert loop.run() == loop.now_s > 160.0


async def test_jitter_moves_single_steps_and_not_the_rate(tmp_path: Path) -> None:
    listener, loop = await make_timed(tmp_path, step_ms=20.0, jitter_ms=5.0)
    listener.submit("a", [1], max_tokens=1000)
    due_s = [loop.run() for _ in range(200)]
    offsets = [when - (100.0 + 0.02 * (number + 1)) for number, when in enumerate(due_s)]
    assert all(abs(offset) <= 0.005 + 1e-9 for offset in offsets)
    assert len({round(offset, 6) for offset in offsets}) > 100


async def test_prefills_queue_behind_each_other_and_cached_tokens_cost_nothing(tmp_path: Path) -> None:
    listener, loop = await make_timed(tmp_path, step_ms=10.0, prefill_ms_per_1k=100.0, block_size=16)
    for key, prompt in (("a", [1] * 1600), ("b", [2] * 1600), ("c", [1] * 1600)):
        listener.submit(key, prompt, max_tokens=100)
    for _ in range(40):
        loop.run()
    first = {key: outputs[0].extra for key, outputs in listener.outputs.items()}
    assert [first[key].cached_tokens for key in "abc"] == [0, 0, 1584]  # type: ignore[union-attr]
    times = [first[key].prefill_ms for key in "abc"]  # type: ignore[union-attr]
    assert times == pytest.approx([160.0, 320.0, 330.0], abs=10.1)


@pytest.mark.parametrize(("aborted", "first_ms"), [("a", [None, 180.0, 340.0]), ("b", [160.0, None, 320.0])])
async def test_aborted_prefill_delays_nobody(
    tmp_path: Path, aborted: str, first_ms: list[float | None]
) -> None:
    """160 ms each; the abort comes after 20 ms."""
    listener, loop = await make_timed(tmp_path, step_ms=10.0, prefill_ms_per_1k=100.0)
    for key, word in (("a", 1), ("b", 2), ("c", 3)):
        listener.submit(key, [word] * 1600, max_tokens=100)
    loop.run()
    loop.run()
    listener.engine.abort([aborted])
    for _ in range(40):
        loop.run()
    firsts = {key: outputs[0].extra for key, outputs in listener.outputs.items()}
    got = [firsts[key].prefill_ms if key in firsts else None for key in "abc"]  # type: ignore[union-attr]
    assert [at is None for at in got] == [at is None for at in first_ms]
    assert [at for at in got if at] == pytest.approx([at for at in first_ms if at], abs=10.1)


async def test_cached_blocks_belong_to_their_salt(tmp_path: Path) -> None:
    listener, _ = await make_timed(tmp_path, block_size=16)
    cache = listener.engine._cache
    ids = ids_of([1] * 100)
    assert [cache.admit(ids, salt) for salt in (None, None, "a", "a", "b")] == [0, 96, 0, 96, 0]
    assert cache.admit(ids_of([1] * 32), None) == 16  # at least one token is computed
    assert cache.admit(ids_of([1] * 16 + [2] * 50), None) == 16


async def test_cache_forgets_what_was_not_used_longest(tmp_path: Path) -> None:
    listener, _ = await make_timed(tmp_path, block_size=16, kv_tokens=64)
    cache = listener.engine._cache
    first, second = ids_of([1] * 33), ids_of([2] * 33)
    assert [cache.admit(ids, None) for ids in (first, second, first)] == [0, 0, 32]
    cache.admit(ids_of([3] * 33), None)
    assert cache.admit(first, None) == 32
    assert cache.admit(second, None) == 0


async def test_waiting_streams_come_in_by_priority_then_arrival(tmp_path: Path) -> None:
    listener = await make(tmp_path, max_running=1, max_waiting=3)
    for key, priority in (("first", 0), ("later", 5), ("urgent", -1), ("early", 0)):
        listener.submit(key, [1], priority)
    listener.submit("too many", [1])
    assert (listener.engine.stats().running, listener.engine.stats().waiting) == (1, 3)
    assert [(key, kind) for key, kind, _ in listener.failures] == [("too many", "busy")]
    assert "the limit is 3" in listener.failures[0][2]
    await until(lambda: len(listener.ended) == 4)
    assert listener.ended == ["first", "urgent", "early", "later"]
    assert listener.engine.stats().running == 0


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "running"])
async def test_abort_frees_everything_in_every_phase(tmp_path: Path, phase: str) -> None:
    prefill_ms = 1e6 if phase == "prefilling" else 0.0
    listener = await make(tmp_path, max_running=1, step_ms=1.0, prefill_ms_per_1k=prefill_ms)
    if phase == "waiting":
        listener.submit("other", [1], max_tokens=10_000)
    listener.submit("key", [1] * 40, max_tokens=10_000)
    if phase == "running":
        await until(lambda: "key" in listener.outputs)
    listener.engine.abort(["key", "unknown"])
    listener.engine.abort(["key"])
    await asyncio.sleep(0.02)
    assert listener.closed == ["key"]
    num_outputs = len(listener.outputs.get("key", ()))
    await asyncio.sleep(0.01)
    assert len(listener.outputs.get("key", ())) == num_outputs
    listener.engine.abort(["other"])
    stats = listener.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    await listener.engine.stop()


async def test_engine_dies_when_it_was_told_to(tmp_path: Path) -> None:
    listener = await make(tmp_path, faults=Faults(die_after_tokens=6))
    for number in range(3):
        listener.submit(number, [number], max_tokens=100)
    await until(lambda: listener.deaths)
    assert listener.deaths == ["scripted to die after 6 tokens"]
    assert listener.step_sizes == [3, 3]


# -- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"step_ms": -1.0}, "step_ms is -1.0"),
        ({"step_ms": float("nan")}, "step_ms is nan"),
        ({"max_running": 0}, "max_running is 0"),
        ({"step_ms": 5.0, "jitter_ms": 6.0}, "jitter_ms is 6.0"),
        ({"model_names": ()}, "model_names is empty"),
    ],
)
def test_bad_option_is_named(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ScriptedOptions(tokenizer=tmp_path, **options)


def test_bad_fault_is_named() -> None:
    with pytest.raises(ValueError, match="stall_after_tokens is -1"):
        Faults(stall_after_tokens=-1)
    with pytest.raises(ValueError, match="slow_write_bytes_per_s is 0"):
        Faults(slow_write_bytes_per_s=0)


async def test_serve_scripted_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    path = tmp_path / "s"
    stop = asyncio.Event()
    options = ScriptedOptions(tokenizer=make_tokenizer(tmp_path / "model"), listen=f"unix://{path}")
    serving = asyncio.create_task(serve_scripted(options, stop))
    await until(path.exists)
    stop.set()
    await asyncio.wait_for(serving, 10)
    assert not path.exists()


def test_prompt_bytes_are_int32() -> None:
    assert array("i").itemsize == 4
