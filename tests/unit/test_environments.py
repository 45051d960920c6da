"""Environments: the calculator computes and never raises, rows show its use, and others are called as they are."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hops import environments
from hops.environments import Generate, Reply, calculator, calculator_rows, check_environment
from hops.environments.calculator import answer, called, steps
from hops.environments.verifiers import tool_calls
from hops.rows import Example


class Said:
    """A model that says one line after the other, and keeps what it was asked."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.asked = list(lines), list[Any]()

    async def __call__(self, prompt: Any, **options: Any) -> Reply:
        self.asked.append(prompt)
        return Reply(self.lines.pop(0), "stop") if self.lines else Reply("", "length")


def play(environment: Any, example: Example, *lines: str) -> tuple[Any, list[Any]]:
    said = Said(*lines)
    return asyncio.run(environment(example, said)), said.asked


SUM = Example([{"role": "user", "content": "31 + 17 - 6"}], "42", "answer")


# --- calculator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*7", "84"), ("84 - 100", "-16"), ("-16 + 1", "-15"), ("-7//2", "-4"), (" 5 ", "5"), ("--2", "2")],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert answer(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1+2+3", "at most 1 operation at a time"),
        ("1/2", "only numbers and + - * //"),
        ("2**9", "only numbers and + - * //"),
        ("1.5+1", "only numbers and + - * //"),
        ("True+1", "only numbers and + - * //"),
        ("__import__('os')", "only numbers and + - * //"),
        ("f(1)", "only numbers and + - * //"),
        ("", "no arithmetic"),
        ("1 +", "no arithmetic"),
        ("012", "no arithmetic"),
        ("'\\d'", "only numbers and + - * //"),
        ("a\0", "only numbers and + - * //"),
        ("1 2", "no arithmetic"),
        ("1(2)", "only numbers and + - * //"),
        ("4//0", "division by zero"),
        ("9" * 13, "too large a number"),
        ("999999*999999999", "too large a number"),
        ("(" * 101, "at most 100 characters"),
        ("-" * 99 + "x", "only numbers and + - * //"),
    ],
)
def test_what_it_does_not_compute_is_an_observation(expression: str, error: str) -> None:
    assert answer(expression) == f"error: {error}"


@given(st.text(st.sampled_from("0123456789+-*/() .ae_[]'\n"), max_size=40) | st.text(max_size=20))
def test_no_expression_raises(expression: str) -> None:
    assert answer(expression, operations=9)


@given(st.lists(st.integers(0, 99), min_size=2, max_size=5), st.data())
def test_steps_compute_what_python_computes(numbers: list[int], data: st.DataObject) -> None:
    text = str(numbers[0])
    for number in numbers[1:]:
        text += data.draw(st.sampled_from([" + ", " - ", "*"])) + str(number)
    made = steps(text)
    assert made[-1].result == str(eval(text))
    assert all(
        answer(call.expression) == call.result and called(call.said) == call.expression for call in made
    )


def test_steps_of_what_the_calculator_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="below 0 stands on the right"):
        steps("2*(1-5)")
    with pytest.raises(ValueError, match="only numbers"):
        steps("1.5 + 2")


def test_a_call_is_what_a_message_ends_with() -> None:
    assert called("calc(1+2)") == "1+2"
    assert called("Let me see: calc( 1 + 2 ) \n") == " 1 + 2 "
    assert called("calc((1+2)*3)") == "(1+2)*3"
    assert called("calc(1+2) is 3") is None
    assert called("3") is None


def test_in_a_dialogue_each_prompt_goes_on_from_the_one_before() -> None:
    got, asked = play(calculator(), SUM, "Well, calc(31+17)", "calc(48-6)", "42")
    assert got == {"score": 1.0, "right": True, "calls": 2, "errors": 0}
    assert [one["content"] for one in asked[2]] == [
        "31 + 17 - 6",
        "Well, calc(31+17)",
        "48",
        "calc(48-6)",
        "42",
    ]
    assert [one["role"] for one in asked[2]] == ["user", "assistant", "tool", "assistant", "tool"]
    assert asked[2][:3] == asked[1]


def test_notes_rewrite_the_question_and_leave_no_other_message() -> None:
    got, asked = play(calculator(history="notes"), SUM, "calc(31+17-6)", "calc(31+17)", "48")
    assert got == {"score": 0.1, "right": False, "calls": 2, "errors": 1}
    assert [one["content"] for one in asked[2]] == [
        "31 + 17 - 6\n31+17-6 = error: at most 1 operation at a time\n31+17 = 48"
    ]


def test_without_a_call_that_was_computed_a_wrong_answer_is_worth_nothing() -> None:
    assert play(calculator(), SUM, "41")[0]["score"] == 0
    assert play(calculator(), SUM, "calc(x)", "41")[0]["score"] == 0
    assert play(calculator(credit=0.5), SUM, "calc(1+1)", "41")[0]["score"] == 0.5
    assert play(calculator(), SUM)[0] == {"score": 0.0, "right": False, "calls": 0, "errors": 0}


def test_after_the_last_call_the_next_message_is_the_answer() -> None:
    got, asked = play(calculator(calls=1), SUM, "calc(31+17)", "calc(48-6)", "42")
    assert (got["right"], got["calls"], len(asked)) == (False, 1, 2)


def test_rows_show_the_calculator_as_it_is_used() -> None:
    options = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    shown = {}
    for history in ("dialogue", "notes"):
        row = calculator_rows(task="chain_sum", options=options, shots=4, history=history, system="Go.")(3)  # type: ignore[arg-type]
        assert row == calculator_rows(
            task="chain_sum", options=options, shots=4, history=history, system="Go."
        )(3)  # type: ignore[arg-type]
        asked: Sequence[Any] = row.prompt  # type: ignore[assignment]
        assert asked[0] == {"role": "system", "content": "Go."}
        assert str(eval(asked[-1]["content"])) == row.ground_truth
        shown[history] = asked
    assert [m["role"] for m in shown["notes"][1:]] == ["user", "assistant"] * (
        len(shown["notes"][1:]) // 2
    ) + ["user"]
    assert "tool" in [m["role"] for m in shown["dialogue"]]
    # a model that has learned from the rows is right: what is shown is what the calculator does
    lines = [m["content"] for m in shown["notes"][2:-1] if m["role"] == "assistant"]
    first = shown["notes"][1]["content"]
    upto = next(i for i, line in enumerate(lines) if called(line) is None)
    example = Example([{"role": "user", "content": first}], lines[upto], "answer")
    got, asked_of = play(calculator(history="notes"), example, *lines[: upto + 1])
    assert got["right"]
    assert [one[-1]["content"] for one in asked_of] == [
        m["content"] for m in shown["notes"][1 : 2 * upto + 2 : 2]
    ]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: calculator(calls=0), "calls and operations must be at least 1"),
        (lambda: calculator(history="diary"), "history 'diary' is none of dialogue, notes"),  # type: ignore[arg-type]
        (lambda: calculator_rows(task="chain_sum", history="x"), "is none of dialogue, notes"),  # type: ignore[arg-type]
        (lambda: calculator_rows(task="maze"), "needs a task that is one expression"),
    ],
)
def test_options_that_make_no_calculator_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


# --- one turn -------------------------------------------------------------------------------------------------------


def test_reasoning_gym_is_one_turn_scored_by_the_task() -> None:
    from hops.rows import reasoning_gym

    row = reasoning_gym(task="chain_sum", format="chat")(0)
    environment = environments.reasoning_gym(max_tokens=9)
    assert play(environment, row, str(row.ground_truth))[0] == 1
    assert play(environment, row, "none")[0] < 1
    assert play(environment, row, "none")[1] == [row.prompt]


# --- what an environment is -----------------------------------------------------------------------------------------


async def _fine(example: Example, generate: Generate) -> float:
    return 0.0


class _Played:
    async def __call__(self, example: Example, generate: Generate) -> float:
        return 0.0


def _plain(example: Example, generate: Generate) -> float:
    return 0.0


async def _one(example: Example) -> float:
    return 0.0


def test_a_coroutine_function_of_two_or_an_object_that_is_called_so_is_an_environment() -> None:
    for environment in (_fine, _Played(), calculator()):
        check_environment(environment)
    with pytest.raises(ValueError, match=r"_plain is no `async def` of \(example, generate\)"):
        check_environment(_plain)
    with pytest.raises(
        ValueError, match=r"calculator is no `async def`.*environment: {use: hops.environments"
    ):
        check_environment(calculator)
    with pytest.raises(ValueError, match=r"_one.* can't be called with \(example, generate\)"):
        check_environment(_one)


# --- verifiers ------------------------------------------------------------------------------------------------------


def test_tool_calls_are_read_from_text() -> None:
    text = 'So. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><tool_call>{bad}</tool_call>'
    assert tool_calls(text) == [{"id": "call_0", "name": "add", "arguments": '{"a": 1}'}]
    assert tool_calls("none <tool_call>[1]</tool_call>") == []


def test_without_the_package_a_check_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "verifiers":
            raise ModuleNotFoundError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(
        ValueError, match=r"verifiers is not installed; pip install 'flowgraph-rl\[verifiers\]'"
    ):
        environments.verifiers(load="wordle")
