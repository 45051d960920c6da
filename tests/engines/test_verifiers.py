"""Environments made of verifiers' own classes, played by `hops.rollout.episode` on the embedded engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowgraph import Rejected, Tokenizer
from flowgraph.engines.embedded import embedded_fleet
from flowgraph.engines.registry import TransformersOptions
from hops.environments import Reply, verifiers, verifiers_rows
from hops.rollout import Episode, episode
from hops.rows import Example, pack

vf: Any = pytest.importorskip(
    "verifiers", reason="the extra `verifiers` is not installed", exc_type=ImportError
)
pytestmark = pytest.mark.filterwarnings("default")  # it and what it imports warn of each other

TEMPLATE = "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}a:"
QUESTIONS = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]


def dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_list(QUESTIONS)


def shortness(completion: list[Any], **_: Any) -> float:
    """How few characters the model said: something that a random model scores at."""
    return 1 / (1 + sum(len(m["content"]) for m in completion if m["role"] == "assistant"))


def single() -> Any:
    return vf.SingleTurnEnv(dataset=dataset(), rubric=vf.Rubric(funcs=[shortness], weights=[2.0]))


def echoing(turns: int) -> Any:
    class Echo(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": f"no. {len(state['trajectory'])}"}]

    return Echo(dataset=dataset(), rubric=vf.Rubric(funcs=[shortness]), max_turns=turns)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the one
        b: the other
    """
    return a + b


def adding() -> Any:
    def right(completion: list[Any], answer: str, **_: Any) -> float:
        return float(completion[-1]["content"] == answer)

    return vf.ToolEnv(dataset=dataset(), tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=3)


def failing() -> Any:
    class Broken(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            raise vf.Error("no sandbox")

    return Broken(dataset=dataset(), rubric=vf.Rubric(funcs=[shortness]), max_turns=3)


def here(name: str) -> str:
    return f"{__name__}.{name}"


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = shutil.copytree(tiny, tmp_path_factory.mktemp("chat") / "model")
    (where / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return where


def play(model: Path, environment: Any, row: Example) -> Episode:
    async def run() -> Episode:
        options = TransformersOptions(model="tiny", slots=2, dtype="float32")
        engine = await embedded_fleet(options, str(model), context=160, threads=1)
        tokenizer = Tokenizer(model)
        try:
            ids = tokenizer.encode(tokenizer.chat(row.prompt))  # type: ignore[arg-type]
            return await episode(
                ids, pack(row), key=3, engine=engine, tokenizer=tokenizer, environment=environment,
                budget=60, longest=100,
            )  # fmt: skip
        finally:
            await engine.close()

    return asyncio.run(run())


def test_its_rows_are_messages_with_their_answer_and_begin_again_after_the_last() -> None:
    rows = verifiers_rows(load=here("single"))
    assert rows(0).prompt == [{"role": "user", "content": "1+1"}]
    assert rows(1).ground_truth == "4"
    assert rows(2) == rows(0)
    json.dumps(pack(rows(0)))


def test_a_single_turn_environment(model: Path) -> None:
    made = play(model, verifiers(load=here("single"), max_tokens=7), verifiers_rows(load=here("single"))(0))
    text = Tokenizer(model).decode(made.tokens[made.response_mask])
    assert made.response_mask.sum() == 7
    assert made.score.tolist() == pytest.approx([2 / (1 + len(text))])
    assert made.metrics["shortness"] == pytest.approx(1 / (1 + len(text)))


def test_a_multi_turn_environment_goes_on_from_turn_to_turn(model: Path) -> None:
    load = here("echoing")
    environment = verifiers(load=load, arguments={"turns": 3}, max_tokens=5)
    made = play(model, environment, verifiers_rows(load=load, arguments={"turns": 3})(1))
    assert made.metrics["turns"] == made.metrics["num_turns"] == 3
    assert made.metrics["leaves"] == 1
    assert made.response_mask.sum() == 15
    text = Tokenizer(model).decode(made.tokens)
    assert text.startswith("u:2+2;a:")
    assert text.index(";u:no.1;a:") < text.index(";u:no.2;a:")  # this tokenizer knows no space


def test_a_tool_environment_computes_what_the_model_calls() -> None:
    lines = ['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>', "2"]
    asked: list[Any] = []

    async def generate(prompt: Any, **options: Any) -> Reply:
        asked.append((prompt, options))
        return Reply(lines[len(asked) - 1], "stop")

    row = verifiers_rows(load=here("adding"))(0)
    got = asyncio.run(verifiers(load=here("adding"))(row, generate))
    assert isinstance(got, dict)
    assert got["score"] == 1
    prompt, options = asked[1]
    assert [m["role"] for m in prompt] == ["user", "assistant", "tool"]
    assert [m["content"] for m in prompt][1:] == [lines[0], "2"]
    (tool,) = options["tools"]
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}


def test_an_environment_that_fails_is_rejected_with_its_error(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = verifiers_rows(load=here("failing"))(0)
    with pytest.raises(Rejected, match="environment error"):
        play(model, verifiers(load=here("failing"), max_tokens=3), row)
    assert "failing failed" in capfd.readouterr().err
