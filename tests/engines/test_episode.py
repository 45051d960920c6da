"""Episodes of several turns on the embedded engine: budgets, keys, limits, and environments that fail."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowgraph import Rejected, Tokenizer
from flowgraph.engines.embedded import embedded_fleet
from flowgraph.engines.fleet import Fleet
from flowgraph.engines.registry import TransformersOptions
from hops.environments import Generate
from hops.episode import turn_key
from hops.rollout import Episode, Trajectory, complete, episode
from hops.rows import Example, pack

TEMPLATE = "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}a:"
LONGEST, BUDGET = 40, 30
ASKED = [{"role": "u", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template, in which a ";" ends a message. No EOS: replies end at their bound."""
    where = shutil.copytree(tiny, tmp_path_factory.mktemp("chat") / "model")
    (where / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return where


@asynccontextmanager
async def engine_of(model: Path) -> AsyncIterator[Fleet]:
    options = TransformersOptions(model="tiny", slots=4, dtype="float32")
    fleet = await embedded_fleet(options, str(model), context=LONGEST + BUDGET, threads=1)
    try:
        yield fleet
    finally:
        await fleet.close()


async def playing(engine: Fleet, model: Path, environment: Any, **options: Any) -> Episode:
    tokenizer = Tokenizer(model)
    example = Example(options.pop("prompt", ASKED), 4)
    text = example.prompt if isinstance(example.prompt, str) else tokenizer.chat(example.prompt)
    options = {"key": 7, "budget": BUDGET, "longest": LONGEST, "leaves": 4} | options
    return await episode(
        tokenizer.encode(text), pack(example), engine=engine, tokenizer=tokenizer, environment=environment, **options
    )  # fmt: skip


def play(model: Path, environment: Any, **options: Any) -> Episode:
    async def run() -> Episode:
        async with engine_of(model) as engine:
            return await playing(engine, model, environment, **options)

    return asyncio.run(run())


def rows(made: Episode) -> list[list[int]]:
    return [made.tokens[a:b].tolist() for a, b in itertools.pairwise(made.leaf_offsets)]


# --- what an episode gives ------------------------------------------------------------------------------------------


def test_turns_that_go_on_are_one_leaf_with_observations_between(model: Path) -> None:
    said: list[str] = []

    async def environment(example: Example, generate: Generate) -> dict[str, float]:
        first = await generate(example.prompt, max_tokens=5)
        asked = [*example.prompt, first.message, {"role": "t", "content": "seen"}]
        second = await generate(asked, max_tokens=3)
        said.extend((first.text, second.text))
        return {"score": 2.5, "tries": 2}

    made = play(model, environment)
    tokenizer = Tokenizer(model)
    assert len(made.leaf_offsets) == 2
    assert tokenizer.decode(made.tokens) == f"u:hi;a:{said[0]};t:seen;a:{said[1]}"
    assert tokenizer.decode(made.tokens[made.response_mask]) == "".join(said)
    assert made.sampled[made.response_mask].tolist() == list(range(8))
    assert (made.logprobs < 0).tolist() == made.response_mask.tolist()
    assert made.versions.tolist() == np.where(made.response_mask, 0, -1).tolist()
    assert made.score.tolist() == [2.5]
    assert made.scored.tolist() == [True]
    assert made.token_level_rewards.tolist() == [0.0] * (len(made.tokens) - 1) + [2.5]
    shown = {name: made.metrics[name] for name in ("turns", "leaves", "forks", "length", "reward", "tries")}
    assert shown == {"turns": 2, "leaves": 1, "forks": 0, "length": 8, "reward": 2.5, "tries": 2}


def test_r2_after_a_fork_the_reward_is_there_once_on_the_token_sampled_last(model: Path) -> None:
    async def environment(example: Example, generate: Generate) -> float:
        for question in "xyx":
            await generate([*example.prompt, {"role": "u", "content": question}], max_tokens=4)
        return 3.0

    made = play(model, environment)
    assert len(rows(made)) == 3
    assert made.score.tolist() == [3.0] * 3
    (at,) = np.flatnonzero(made.token_level_rewards)
    assert made.token_level_rewards[at] == 3.0
    assert made.sampled[at] == made.sampled.max()
    assert made.response_mask[at]


def test_a_prompt_of_text_is_gone_on_with(model: Path) -> None:
    async def environment(example: Example, generate: Generate) -> None:
        assert example.prompt == "1+1="
        first = await generate(example.prompt, max_tokens=2)
        await generate(f"{example.prompt}{first.text}so", max_tokens=2)

    made = play(model, environment, prompt="1+1=")
    assert len(rows(made)) == 1
    assert made.scored.tolist() == [False]
    assert made.score.tolist() == [0]


def test_r1_an_episode_without_a_token_has_its_score_and_no_token_reward(model: Path) -> None:
    async def environment(example: Example, generate: Generate) -> float:
        return 10.0

    made = play(model, environment)
    assert made.score.tolist() == [10]
    assert made.scored.all()
    assert not made.response_mask.any()
    assert not made.token_level_rewards.any()
    assert rows(made) == [Tokenizer(model).encode("u:hi;a:").tolist()]


# --- budgets --------------------------------------------------------------------------------------------------------


def test_m5_the_budget_counts_over_all_turns_and_branches(model: Path) -> None:
    ended: list[str] = []

    async def environment(example: Example, generate: Generate) -> None:
        for question in "xyz":
            ended.append(
                (await generate([*example.prompt, {"role": "u", "content": question}], max_tokens=12)).ended
            )
        ended.append((await generate(example.prompt)).ended)

    made = play(model, environment)
    assert int(made.response_mask.sum()) == BUDGET
    assert made.metrics["length"] == BUDGET
    assert made.metrics["turns"] == 3
    assert ended == ["length"] * 4
    assert made.metrics["truncated"] == 1


def test_turns_at_once_share_the_budget(model: Path) -> None:
    async def environment(example: Example, generate: Generate) -> None:
        asked = [[*example.prompt, {"role": "u", "content": q}] for q in "xyz"]
        replies = await asyncio.gather(*(generate(one, max_tokens=12) for one in asked))
        assert [len(reply.text) > 0 for reply in replies] == [True] * 3

    made = play(model, environment)
    assert [int(m) for m in np.add.reduceat(made.response_mask, made.leaf_offsets[:-1])] == [12, 12, 6]


def test_a_leaf_fits_into_the_context_observations_included(model: Path) -> None:
    ended: list[str] = []

    async def environment(example: Example, generate: Generate) -> None:
        for n in (LONGEST + BUDGET - 10, LONGEST + BUDGET):
            ended.append((await generate([{"role": "u", "content": "x" * n}])).ended)

    made = play(model, environment)
    assert len(rows(made)[0]) == LONGEST + BUDGET
    assert ended == ["context", "context"]
    assert made.metrics["truncated"] == 1


def test_after_max_turns_replies_are_empty_and_who_asks_on_and_on_is_rejected(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def endless(example: Example, generate: Generate) -> None:
        while True:
            await generate(example.prompt, max_tokens=1)

    async def polite(example: Example, generate: Generate) -> float:
        return float([(await generate(example.prompt, max_tokens=1)).ended for _ in range(3)].index("turns"))

    assert play(model, polite, max_turns=2).score[0] == 2
    with pytest.raises(Rejected, match="environment error"):
        play(model, endless, max_turns=2)
    assert "end the episode when a reply has ended 'turns'" in capfd.readouterr().err


def test_more_leaves_than_there_is_room_for_are_refused_by_name(model: Path) -> None:
    async def swallows(example: Example, generate: Generate) -> None:
        for question in "wxyz":
            with suppress(ValueError):
                await generate([*example.prompt, {"role": "u", "content": question}], max_tokens=1)

    assert len(rows(play(model, swallows, leaves=4))) == 4
    with pytest.raises(ValueError, match=r"forked into 3 leaves, and dims\.leaf\.max is 2; raise it"):
        play(model, swallows, leaves=2)


# --- randomness -----------------------------------------------------------------------------------------------------


def test_each_turn_has_a_key_of_its_own_and_an_episode_is_the_same_again(model: Path) -> None:
    async def environment(example: Example, generate: Generate) -> None:
        for _ in range(3):
            await generate(example.prompt, max_tokens=6)

    made, again, other = (play(model, environment, key=key) for key in (7, 7, 8))
    assert rows(made) == rows(again) != rows(other)
    assert len({tuple(row) for row in rows(made)}) == 3
    assert len({turn_key(key, turn) for key in range(50) for turn in range(50)}) == 2500
    assert all(0 <= turn_key(key, 0) < 2**64 for key in (0, 2**64 - 1))


# --- what goes wrong ------------------------------------------------------------------------------------------------

Script = Callable[[Example, Generate], Awaitable[Any]]


async def waits(example: Example, generate: Generate) -> None:
    await asyncio.sleep(100)


async def samples(example: Example, generate: Generate) -> None:
    while True:
        await generate(example.prompt, max_tokens=BUDGET)


async def will_not_end(example: Example, generate: Generate) -> None:
    for _ in range(40):  # two seconds
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


async def leaves_one_under_way(example: Example, generate: Generate) -> None:
    task = asyncio.ensure_future(generate(example.prompt))
    await asyncio.sleep(0.01)
    task.add_done_callback(lambda t: t.cancelled() or t.exception())


async def idle(engine: Fleet) -> bool:
    """Whether nothing of any request is left, a moment later."""
    for _ in range(100):
        if engine.load().running == engine.load().waiting == 0:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.parametrize("environment", [waits, will_not_end])
def test_s12_an_environment_that_hangs_is_rejected_at_its_time_limit(
    model: Path, environment: Script
) -> None:
    async def run() -> None:
        async with engine_of(model) as engine:
            began = asyncio.get_running_loop().time()
            with pytest.raises(Rejected, match="time limit"):
                await playing(engine, model, environment, time_limit=0.1)
            assert asyncio.get_running_loop().time() - began < 1.8
            assert await idle(engine)

    asyncio.run(run())


def test_what_is_under_way_when_the_environment_returns_is_aborted(model: Path) -> None:
    async def run() -> None:
        async with engine_of(model) as engine:
            made = await playing(engine, model, leaves_one_under_way)
            assert made.metrics["turns"] == 1
            assert await idle(engine)

    asyncio.run(run())


def test_a_cancelled_episode_leaves_no_request_in_the_engine(model: Path) -> None:
    async def run() -> None:
        async with engine_of(model) as engine:
            tasks = [asyncio.ensure_future(playing(engine, model, samples, max_turns=99)) for _ in range(6)]
            while engine.load().running + engine.load().waiting < 6:
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(out, asyncio.CancelledError)
                for out in await asyncio.gather(*tasks, return_exceptions=True)
            )
            assert await idle(engine)
            assert (await playing(engine, model, leaves_one_under_way)).metrics["turns"] == 1

    asyncio.run(run())


def test_an_environment_that_raises_is_rejected_and_its_error_told(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken(example: Example, generate: Generate) -> float:
        await generate(example.prompt, max_tokens=1)
        raise KeyError("no such tool")

    with pytest.raises(Rejected, match="environment error"):
        play(model, broken)
    said = capfd.readouterr().err
    assert "broken raised" in said
    assert "KeyError: 'no such tool'" in said


def test_an_environment_may_reject_for_its_own_reason(model: Path) -> None:
    async def picky(example: Example, generate: Generate) -> float:
        raise Rejected("no sandbox")

    with pytest.raises(Rejected, match="no sandbox"):
        play(model, picky)


def test_an_engine_that_fails_is_no_fault_of_the_environment(model: Path) -> None:
    async def hides(example: Example, generate: Generate) -> float:
        try:
            await generate(example.prompt)
        except Exception:
            return 0.0
        return 1.0

    async def run() -> None:
        async with engine_of(model) as engine:
            await engine.close()
            with pytest.raises(Exception, match=r"closed|replica|engine") as error:
                await playing(engine, model, hides)
            assert not isinstance(error.value, Rejected)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (float("nan"), "returned nan as score; give a finite number"),
        ("much", "returned 'much' as score"),
        ({"score": 1, "calls": float("inf")}, "returned inf as calls"),
        ({"reward": 1}, "returned reward, and no 'score'"),
    ],
)
def test_a8_an_outcome_that_is_no_number_is_named(model: Path, outcome: Any, said: str) -> None:
    async def environment(example: Example, generate: Generate) -> Any:
        return outcome

    with pytest.raises(ValueError, match=said):
        play(model, environment)


def test_r4_a_response_that_ends_with_eos_exactly_at_the_bound_is_not_truncated(
    tiny: Path, tiny_with_eos: Callable[[int], Path]
) -> None:
    prompt = np.array([1, 2, 3], np.int32)

    async def sample(model: Path, tokens: int) -> Trajectory:
        async with engine_of(model) as engine:
            return await complete(prompt, 5, engine=engine, max_new_tokens=tokens)  # type: ignore[arg-type]

    ids = asyncio.run(sample(tiny, 9)).tokens[3:].tolist()
    at = next(n for n in range(8, 0, -1) if ids[n] not in ids[:n])
    model = tiny_with_eos(ids[at])
    ended, cut = (asyncio.run(sample(model, tokens)) for tokens in (at + 1, at))
    assert ended.tokens[3:].tolist() == ids[: at + 1]
    assert (ended.metrics["truncated"], cut.metrics["truncated"]) == (0, 1)
