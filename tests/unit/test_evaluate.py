"""The held-out evaluation, on an engine whose answers are known."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowgraph import Generation, RunError, Sampling, Tokenizer
from hops import reward, rows
from hops.evaluate import held_out, sample_key, summary
from hops.rows import Example


class Echo:
    """Answers with the low bit of the key; remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer, version: int = 3, reason: Any = "stop") -> None:
        self.tokenizer, self.version, self.reason = tokenizer, version, reason
        self.asked: list[tuple[str, Sampling, int, str]] = []
        self.aborted: list[str] = []
        self.running = self.most = 0

    async def generate(self, prompt: Any, sampling: Sampling, *, key: int, rid: str) -> Generation:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        text = self.tokenizer.decode(prompt)
        if text == "fail":
            raise ValueError("the prompt is too long")
        self.asked.append((text, sampling, key, rid))
        ids = self.tokenizer.encode(f" {key % 2}")
        return Generation(
            ids, np.zeros(len(ids), np.float32), np.full(len(ids), self.version, np.int32), self.reason
        )

    def abort(self, rid: str) -> bool:
        self.aborted.append(rid)
        return False


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    return Tokenizer(smollm2)


def evaluate(tokenizer: Tokenizer, engine: Echo, version: int = 3, **options: Any) -> dict[str, float]:
    options = {
        "rows": lambda i: Example(f"{i} =", "1"),
        "function": reward.exact,
        "prompts": 8,
        "samples": 4,
        **options,
    }
    made = held_out(version, engine=engine, tokenizer=tokenizer, max_new_tokens=6, **options)  # type: ignore[arg-type]
    return asyncio.run(made).metrics


def test_the_score_is_the_mean_over_prompts(tokenizer: Tokenizer) -> None:
    engine = Echo(tokenizer)
    got = evaluate(tokenizer, engine, stop=["\n"], temperature=0.5)
    hits = np.array([[sample_key(i, s) % 2 for s in range(4)] for i in range(8)])
    means = hits.mean(1)
    assert got == {
        "score": pytest.approx(means.mean()),
        "stderr": pytest.approx(means.std(ddof=1) / np.sqrt(8)),
        "scored": 1.0,
        "version": 3.0,
        "off_version": 0.0,
    }
    assert {a[1] for a in engine.asked} == {Sampling(6, 0.5, ("\n",))}
    assert engine.most == 32  # all at once: the engine decides how many run


def test_every_version_draws_alike_under_request_ids_of_its_own(tokenizer: Tokenizer) -> None:
    first, second = Echo(tokenizer), Echo(tokenizer)
    evaluate(tokenizer, first, version=3)
    assert evaluate(tokenizer, second, version=4)["off_version"] == 1.0
    assert [a[:3] for a in first.asked] == [a[:3] for a in second.asked]
    assert len({a[3] for a in first.asked + second.asked}) == 64
    assert len({a[2] for a in first.asked}) == 32
    assert all(0 <= a[2] < 2**64 for a in first.asked)


def test_keys_are_fixed_for_ever() -> None:
    assert sample_key(0, 0) == 1284326675386713378


def test_reasoning_gym_rows_are_scored_by_their_own_scorer(tokenizer: Tokenizer) -> None:
    source = rows.reasoning_gym(task="chain_sum", format="compact", shots=2, options={"max_digits": 1})
    got = evaluate(
        tokenizer, Echo(tokenizer), rows=source, function=reward.reasoning_gym, prompts=3, samples=2
    )
    assert 0 <= got["score"] <= 1


def test_too_few_rows_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    with pytest.raises(
        ValueError, match=r"prompts: 8, but there are only 1 held-out rows \(.*a.jsonl has 1 rows"
    ):
        evaluate(tokenizer, Echo(tokenizer), rows=rows.table(path=str(tmp_path / "a.jsonl")))


def test_a_request_that_fails_ends_the_others(tokenizer: Tokenizer) -> None:
    engine = Echo(tokenizer)
    with pytest.raises(ValueError, match="too long"):
        evaluate(tokenizer, engine, rows=lambda i: Example("fail" if i == 2 else "ok", ""))
    assert len(engine.aborted) == 32
    with pytest.raises(RunError, match="ended sample 0 of held-out row 0 early"):
        evaluate(tokenizer, Echo(tokenizer, reason="abort"))


def test_a_raising_reward_function_names_row_and_sample(tokenizer: Tokenizer) -> None:
    async def bad(completion: str) -> float:
        raise KeyError("x")

    with pytest.raises(
        ValueError, match=r"bad raised KeyError: 'x' for held-out row 0, sample 0, completion ' [01]'"
    ):
        evaluate(tokenizer, Echo(tokenizer), function=bad)


def test_missing_scores_are_left_out_of_means() -> None:
    nan = np.nan
    got = summary(np.array([[1, nan], [0, 1], [nan, nan]]))
    assert got == {"score": 0.75, "stderr": pytest.approx(0.25), "scored": 0.5}
    assert summary(np.array([[1.0, 0.0]])) == {"score": 0.5, "scored": 1.0}
    assert summary(np.array([[nan]])) == {"scored": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": 0}, "prompts must be at least 1, not 0"),
        ({"samples": 0}, "samples must be at least 1, not 0"),
        ({"temperature": -1}, "temperature must be finite and not negative"),
        ({"temperature": 0}, "all 4 samples of a prompt are equal; set samples: 1"),
        ({"stop": [""]}, "a stop string must not be empty"),
        ({"function": print}, "no known signature"),
    ],
)
def test_bad_options_are_refused_by_the_check(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        held_out.__flowgraph__.validate(**{"rows": print, "function": reward.exact, **options})  # type: ignore[attr-defined]
