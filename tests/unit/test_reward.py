"""The reward hop and the reward functions that it takes: the plain signature, verl's and TRL's."""

import asyncio
import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph import Tokenizer
from hops import reward, rows
from hops.signature import check_function, name_of, style_of

EOS = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    return Tokenizer(smollm2)


def score(tokenizer: Tokenizer, function: Any, *leaves: tuple[str, Any], **options: Any) -> reward.Scored:
    """Leaves as (completion, ground truth JSON), each after the prompt "1 + 2 ="; uid 10, 11, …"""
    prompt = tokenizer.encode("1 + 2 =")
    parts = [tokenizer.encode(text) for text, _ in leaves]
    tokens = np.concatenate([np.concatenate([prompt, part]) for part in parts])
    mask = np.concatenate([np.repeat([False, True], [len(prompt), len(part)]) for part in parts])
    offsets = np.cumsum([0, *(len(prompt) + len(part) for part in parts)])
    uid = np.arange(10, 10 + len(leaves))
    return reward.score(
        tokens,
        mask,
        offsets,
        [truth for _, truth in leaves],
        uid,
        tokenizer=tokenizer,
        function=function,
        **options,
    )


def pack(truth: Any, name: str = "ground_truth", prompt: Any = "", **columns: Any) -> Any:
    return rows.pack(rows.Example(prompt, truth, name, columns))


# --- where the reward goes -----------------------------------------------------------------------


def test_the_score_stands_on_the_last_response_token(tokenizer: Tokenizer) -> None:
    got = score(tokenizer, reward.exact, (" 3\n", pack("3")), (" 4\n5", pack("4")), (" 7" + EOS, "8"))
    assert got.score.tolist() == [1, 1, 0]
    assert (got.score.dtype, got.scored.dtype, got.token_level_rewards.dtype) == (
        np.float32,
        np.bool_,
        np.float32,
    )
    ends = np.cumsum([len(tokenizer.encode("1 + 2 =" + text)) for text in (" 3\n", " 4\n5", " 7" + EOS)]) - 1
    assert np.flatnonzero(got.token_level_rewards).tolist() == ends[:2].tolist()
    assert got.metrics == {"reward": pytest.approx(2 / 3), "scored": 1.0}


def test_r1_an_empty_response_carries_nothing_and_still_counts(tokenizer: Tokenizer) -> None:
    got = score(tokenizer, lambda completion: 10.0, ("", None), (" 3", None))
    assert got.score.tolist() == [10, 10]
    assert got.scored.all()
    assert np.flatnonzero(got.token_level_rewards).tolist() == [len(got.token_level_rewards) - 1]
    assert not score(tokenizer, lambda completion: 10.0, (" 3", None), ("", None)).token_level_rewards[-1]


def test_r2_observations_neither_count_as_completion_nor_carry_the_reward(tokenizer: Tokenizer) -> None:
    seen: list[str] = []

    def function(completion: str, prompt: str) -> float:
        seen.extend((prompt, completion))
        return 2.0

    parts = ["ask", " call", " seen", " say", " seen"]
    ids = [tokenizer.encode(text) for text in parts]
    mask = np.concatenate(
        [np.full(len(i), text in (" call", " say")) for i, text in zip(ids, parts, strict=True)]
    )
    tokens = np.concatenate(ids)
    got = reward.score(
        tokens,
        mask,
        np.array([0, len(tokens)]),
        [None],
        np.array([1]),
        tokenizer=tokenizer,
        function=function,
    )
    assert seen == ["ask", " call say"]
    assert np.flatnonzero(got.token_level_rewards).tolist() == [np.flatnonzero(mask)[-1]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.booleans(), max_size=6), st.floats(-9, 9, width=32)), min_size=1, max_size=6
    )
)
def test_token_rewards_sum_to_the_score_wherever_there_is_a_response(
    tokenizer: Tokenizer, leaves: list[tuple[list[bool], float]]
) -> None:
    mask = np.array([m for row, _ in leaves for m in row], np.bool_)
    offsets = np.cumsum([0, *(len(row) for row, _ in leaves)])
    arguments: Any = (
        np.full(len(mask), 60, np.int32),
        mask,
        offsets,
        [s for _, s in leaves],
        np.arange(len(leaves)),
    )
    got = reward.score(
        *arguments, tokenizer=tokenizer, function=lambda completion, ground_truth: ground_truth
    )
    for leaf, (row, value) in enumerate(leaves):
        part = got.token_level_rewards[offsets[leaf] : offsets[leaf + 1]]
        assert part.sum() == (value if any(row) else 0)
        assert not part[~np.array(row, np.bool_)].any()
    # maps="leaf": one leaf alone gives the same
    first = offsets[1]
    alone = reward.score(
        arguments[0][:first], mask[:first], offsets[:2], arguments[3][:1], arguments[4][:1],
        tokenizer=tokenizer,
        function=lambda completion, ground_truth: ground_truth,
    )  # fmt: skip
    assert alone.score[0] == got.score[0]
    assert (alone.token_level_rewards == got.token_level_rewards[:first]).all()


def test_a7_a_missing_score_is_unscored(tokenizer: Tokenizer) -> None:
    got = score(tokenizer, reward.exact, (" 3", "3"), (" 3", None))
    assert got.scored.tolist() == [True, False]
    assert got.metrics == {"reward": 1.0, "scored": 0.5}
    assert score(tokenizer, lambda completion: None, (" 3", "3")).metrics == {"scored": 0.0}


# --- the three signatures ------------------------------------------------------------------------


def verl(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    assert data_source == "sums"
    return {"score": float(solution_str.strip() == ground_truth) + extra_info["bonus"], "acc": 1}


def trl(
    prompts: Any, completions: Any, completion_ids: Any, answer: Any, **kwargs: Any
) -> list[float | None]:
    assert prompts == ["1 + 2 ="] * len(completions)
    assert "level" in kwargs
    scores = [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]
    return [None if level is None else s for s, level in zip(scores, kwargs["level"], strict=True)]


def test_verl_functions_are_called_as_verl_calls_them(tokenizer: Tokenizer) -> None:
    truth = pack("3", data_source="sums", extra_info={"bonus": 0.5})
    assert score(tokenizer, verl, (" 3" + EOS, truth), (" 4", truth)).score.tolist() == [1.5, 0.5]
    # without a column extra_info, all columns are it
    assert score(tokenizer, verl, (" 3", pack("3", data_source="sums", bonus=2))).score.tolist() == [3]

    async def slow(
        data_source: str, solution_str: str, ground_truth: str, threshold: float, **kwargs: Any
    ) -> float:
        await asyncio.sleep(0)
        return threshold

    assert score(tokenizer, slow, (" 3", truth), arguments={"threshold": 0.25}).score.tolist() == [0.25]


def test_trl_functions_get_lists_and_every_column(tokenizer: Tokenizer) -> None:
    got = score(
        tokenizer, trl, (" 3", pack("3", "answer", level=1)), (" 3", pack("4", "answer", level=2)),
        (" 3", pack("3", "answer")),
    )  # fmt: skip
    assert got.scored.tolist() == [True, True, False]
    assert got.score.tolist() == [1, 0, 0]


def test_trl_functions_get_chats_as_messages(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]

    async def function(prompts: Any, completions: Any, log_extra: Any, **kwargs: Any) -> Any:
        log_extra("column", [1])
        assert prompts == [messages]
        assert completions == [[{"role": "assistant", "content": " hello"}]]
        return np.array([0.5])

    assert score(tokenizer, function, (" hello" + EOS, pack("x", prompt=messages))).score.tolist() == [0.5]


def test_async_functions_work_inside_a_running_loop(tokenizer: Tokenizer) -> None:
    async def function(completion: str) -> float:
        await asyncio.sleep(0)
        return 1.0

    async def worker() -> list[float]:
        return score(tokenizer, function, (" 3", None), (" 4", None)).score.tolist()

    assert asyncio.run(worker()) == [1, 1]


def test_plain_functions_may_ask_for_any_column(tokenizer: Tokenizer) -> None:
    class Weighted:
        def __call__(self, completion: str, level: int, answer: str) -> bool:
            return level == 2 and answer == "3"

    assert score(tokenizer, Weighted(), (" 3", pack("3", "answer", level=2))).score.tolist() == [1]
    half = functools.partial(lambda completion, by: by, by=0.5)
    assert score(tokenizer, half, (" 3", None)).score.tolist() == [0.5]


# --- what is refused -----------------------------------------------------------------------------


def unknown(text: str, truth: str) -> float:
    return 0.0


def needs_trainer(completions: Any, trainer_state: Any) -> list[float]:
    return []


def needs_threshold(solution_str: str, threshold: float) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (unknown, {}, r"test_reward.unknown\(text, truth\) has no known signature.*verl's.*TRL's"),
        (needs_trainer, {}, "needs_trainer needs 'trainer_state', which nothing gives"),
        (needs_threshold, {}, "needs 'threshold', which nothing gives; give it under arguments:"),
        (needs_threshold, {"treshold": 1}, r"takes no 'treshold'; did you mean 'threshold'\?"),
        (print, {}, "no known signature"),
    ],
)  # fmt: skip
def test_the_check_refuses_a_function_that_cannot_be_called(
    function: Any, arguments: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reward.score.__flowgraph__.validate(function=function, arguments=arguments)  # type: ignore[attr-defined]


def test_known_functions_pass_the_check() -> None:
    assert [style_of(f) for f in (reward.exact, reward.reasoning_gym, verl, trl)] == [
        "plain",
        "plain",
        "verl",
        "TRL",
    ]
    check_function(needs_threshold, {"threshold": 1})
    assert name_of(reward.exact) == "hops.reward.exact"
    assert name_of(functools.partial(reward.exact)) == "hops.reward.exact"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, "yes", [1.0], {"acc": 1}])
def test_a8_what_is_no_finite_number_names_uid_and_function(value: Any, tokenizer: Tokenizer) -> None:
    def bad(completion: str, ground_truth: Any) -> Any:
        return value if completion == " 4" else 1.0

    with pytest.raises(
        ValueError, match=r"test_reward\..*bad gave .* for uid 11, completion ' 4'; it must give a fin"
    ):
        score(tokenizer, bad, (" 3", None), (" 4", None))


def test_a_function_that_raises_is_named_with_uid_and_completion(tokenizer: Tokenizer) -> None:
    def bad(completion: str) -> float:
        raise KeyError("x")

    async def bad_later(completions: Any) -> Any:
        raise KeyError("x")

    with pytest.raises(
        ValueError, match="bad raised KeyError: 'x' for uid 10, completion ' 3'; mend it"
    ) as caught:
        score(tokenizer, bad, (" 3", None))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ValueError, match=r"bad_later raised .* for uid 10, .*and 1 others in the same call"):
        score(tokenizer, bad_later, (" 3", None), (" 4", None))


def test_missing_columns_and_wrong_counts_are_named(tokenizer: Tokenizer) -> None:
    def columns(completions: Any, solution: Any) -> list[float]:
        return [0.0]

    with pytest.raises(
        ValueError, match=r"columns needs 'solution', which the rows do not have; did you mean 'solutions'"
    ):
        score(tokenizer, columns, (" 3", pack("3", "solutions")))
    with pytest.raises(ValueError, match="gave 1 scores for 2 completions"):
        score(tokenizer, columns, (" 3", pack("3", "solution")), (" 3", pack("3", "solution")))
    with pytest.raises(ValueError, match=r"gave 1.0 scores for 1 completions; it must give a list"):
        score(tokenizer, lambda completions: 1.0, (" 3", None))


# --- ready-made functions ------------------------------------------------------------------------


def test_reasoning_gym_scores_the_first_line_of_few_shot_text(tokenizer: Tokenizer) -> None:
    example = rows.reasoning_gym(task="chain_sum", format="compact", options={"max_digits": 1})(0)
    truth = rows.pack(example)
    right = example.ground_truth
    got = score(
        tokenizer, reward.reasoning_gym, (f" {right}\n1 + 1 = 2", truth), (f"\n{right}", truth),
        (f" {right}.0", truth),
        (f"I think <answer> {right} </answer>.\nYes", truth), ("", truth), (" no", truth),
    )  # fmt: skip
    assert got.score.tolist() == [1, 0, 1, 1, 0, 0]


def test_every_task_scores_its_own_answer_as_reasoning_gym_does() -> None:
    """Through JSON and back, without what was left out of the entry; wrong text never raises."""
    import msgspec

    from hops.rows.catalogue import UNORDERED, _files
    from hops.rows.gym import scorer

    # making one question of these takes a second
    slow = {
        "acre",
        "arc_agi",
        "knight_swap",
        "futoshiki",
        "rush_hour",
        "figlet_font",
        "group_anagrams",
        "codeio",
    }
    for task in sorted(set(_files()) - set(UNORDERED) - slow):
        source = rows.reasoning_gym(task=task, split="train", held_out=0.01)
        entry, example = source._train(0), msgspec.json.decode(msgspec.json.encode(rows.pack(source(0))))
        given = rows.unpack(example)
        judge = scorer(task, {})
        if entry["answer"] is not None:
            assert reward.reasoning_gym(entry["answer"], given.ground_truth, **given.columns) == judge(
                entry["answer"].strip(), entry
            ), task
        assert 0 <= reward.reasoning_gym("seven (\n", given.ground_truth, **given.columns) <= 1, task


def test_printable_is_the_share_of_printable_characters() -> None:
    assert [reward.printable(text, None) for text in ("", "ab 1", "a\n", "\ufffd\x00é~")] == [0, 1, 0.5, 0.25]


def test_exact_compares_one_line_unless_the_truth_has_several() -> None:
    assert reward.exact(" 3 \n4", 3) == 1
    assert reward.exact(" 3 \n4", "3") == 1
    assert reward.exact("1\n2\n", "1\n2") == 1
    assert reward.exact("1\n2", "1") == 1
    assert reward.exact("13", "3") == 0
    assert reward.exact("3", None) is None
