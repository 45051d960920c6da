"""The dataset hops and their row sources, on real reasoning-gym tasks and files."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph import Tokenizer
from hops import dataset, rows
from hops.dataset import Cursor, permutation
from hops.rows.catalogue import COMPACT, UNORDERED, _fields, _files, check_task

DIGITS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
SUMS: dict[str, Any] = {"task": "chain_sum", "options": DIGITS, "shots": 4, "format": "compact"}


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    return Tokenizer(smollm2)


def texts(
    fold: Any, tokenizer: Tokenizer, count: int, state: Cursor | None = None, **options: Any
) -> list[str]:
    state = Cursor() if state is None else state
    found = []
    for _ in range(count):
        group = fold(state, tokenizer=tokenizer, **options).group
        if not group:
            break
        found.append(tokenizer.decode(group[0].prompt))
    return found


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


# --- reasoning-gym -------------------------------------------------------------------------------


def test_compact_chain_sum_is_bare_sums_with_the_same_shots_in_front(tokenizer: Tokenizer) -> None:
    first, second = texts(dataset.reasoning_gym, tokenizer, 2, seed=0, **SUMS)
    assert first.count("\n") == 4
    assert first.rsplit("\n", 1)[0] == second.rsplit("\n", 1)[0]
    for line in first.split("\n")[:4]:
        sum_, _, answer = line.partition(" = ")
        assert eval(sum_) == int(answer)
    assert first.endswith(" =")


def test_a_group_carries_what_the_reward_needs_in_json(tokenizer: Tokenizer) -> None:
    (group,) = dataset.reasoning_gym(Cursor(), tokenizer=tokenizer, seed=0, **SUMS).group
    assert group.prompt.dtype == np.int32
    packed = msgspec.json.decode(msgspec.json.encode(group.ground_truth))
    assert packed["name"] == "answer"
    assert packed["columns"]["task"] == "chain_sum"
    assert packed["columns"]["options"] == DIGITS
    assert eval(packed["columns"]["metadata"]["expression"]) == int(packed["ground_truth"])
    assert len(msgspec.json.encode(packed)) < 300


def questions(count: int, **options: Any) -> set[str]:
    source = rows.reasoning_gym(**{**SUMS, "shots": 0, **options})
    return {str(source(i).prompt) for i in range(count)}


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from([0.1, 0.2, 0.5]))
def test_the_train_split_never_shows_a_held_out_question(seed: int, share: float) -> None:
    two = {**DIGITS, "max_terms": 2}
    held = questions(15, split="held_out", held_out=share, options=two)
    assert not held & questions(300, split="train", held_out=share, seed=seed, options=two)


def test_held_out_rows_are_distinct_fixed_and_none_of_the_shots() -> None:
    assert len(questions(64, split="held_out")) == 64
    assert questions(64, split="held_out", seed=7) == questions(64, split="held_out")
    shots = str(rows.reasoning_gym(**SUMS)(0).prompt).split("\n")[:4]
    shown = {line.partition("=")[0] + "=" for line in shots}
    assert len(shown) == 4
    source = rows.reasoning_gym(**SUMS, split="train")
    trained = {str(source(i).prompt).rsplit("\n", 1)[1] for i in range(4000)}
    assert not shown & (trained | questions(64, split="held_out"))


def test_held_out_rows_end_when_there_is_no_further_question(tokenizer: Tokenizer) -> None:
    tiny = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    source = rows.reasoning_gym(task="chain_sum", options=tiny)
    with pytest.raises(IndexError, match=r"chain_sum has only . distinct held-out questions"):
        source(10)
    found = texts(
        dataset.reasoning_gym, tokenizer, 99, seed=0, task="chain_sum", options=tiny, split="held_out"
    )
    assert 0 < len(found) == len(set(found)) < 10
    with pytest.raises(ValueError, match=r"has only . questions for 12 shots; lower shots"):
        rows.reasoning_gym(task="chain_sum", options=tiny, shots=12)(0)


def test_seeds_and_indices_give_other_rows_but_always_the_same_ones(tokenizer: Tokenizer) -> None:
    def sums(seed: int) -> list[str]:
        return texts(dataset.reasoning_gym, tokenizer, 30, seed=seed, **SUMS)

    assert sums(0) == sums(0)
    # a task seeds row i with seed + i: neighbouring seeds must not be the same rows shifted by one
    assert len(set(sums(0)) & set(sums(1))) < 10


@pytest.mark.parametrize("task", ["letter_counting", "sudoku", "rubiks_cube"])
def test_chats_and_several_lines_are_rendered(task: str, tokenizer: Tokenizer) -> None:
    chat = rows.reasoning_gym(task=task, format="chat", system="Be brief.")(0)
    assert [m["role"] for m in chat.prompt if isinstance(m, dict)] == ["system", "user"]
    assert rows.pack(chat)["messages"] == chat.prompt
    ids = rows.prompt_ids(chat, tokenizer, "here")
    assert tokenizer.decode(ids, skip_special=False).endswith("<|im_start|>assistant\n")
    plain = str(rows.reasoning_gym(task=task)(0).prompt)
    assert plain.endswith("\n") == ("\n" in plain)
    if task == "rubiks_cube":
        with pytest.raises(ValueError, match="states no answer that could be shown; use shots: 0"):
            rows.reasoning_gym(task=task, shots=1)(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "chain_sums"}, r"no task 'chain_sums'; did you mean 'chain_sum'\?"),
        (
            {"task": "chain_sum", "options": {"min_term": 2}},
            r"no option 'min_term'; did you mean 'min_terms'\?",
        ),
        ({"task": "chain_sum", "options": {"seed": 2}}, "'seed' of chain_sum is not yours to set"),
        (
            {"task": "gcd", "format": "compact"},
            "format compact needs a task that is one expression: .*use plain",
        ),
        ({"task": "gcd", "split": "test"}, "'test' is none of train, held_out"),
        ({"task": "gcd", "held_out": 1.5}, "share between 0 and 1, not 1.5"),
        ({"task": "gcd", "shots": -1}, "must not be negative"),
        ({"task": "gcd", "system": "x"}, "a system message needs format: chat"),
    ],
)
def test_bad_options_are_refused_by_the_check(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset.reasoning_gym.__flowgraph__.validate(**options)  # type: ignore[attr-defined]


def test_options_that_the_task_refuses_name_task_and_reason() -> None:
    source = rows.reasoning_gym(task="chain_sum", options={"min_terms": 3, "max_terms": 2})
    with pytest.raises(
        ValueError, match=r"refuses the options .* of task chain_sum: max_terms must be >= min_terms"
    ):
        source(0)


def test_the_catalogue_read_from_source_is_the_registry() -> None:
    from reasoning_gym.factory import DATASETS

    assert set(_files()) == set(DATASETS) - {"composite"}
    for task, (_, config) in DATASETS.items():
        if task != "composite":
            fields = _fields(_files()[task])
            assert set(fields) == set(config.__dataclass_fields__) - {"seed", "size"} or not fields, task
    assert set(COMPACT) | set(UNORDERED) <= set(DATASETS)


def test_a_task_that_differs_between_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=r"ransom_note gives other rows in every process.*PYTHONHASHSEED=0"):
        check_task("ransom_note", {})
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_task("ransom_note", {})


# --- the cursor ----------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.booleans(), st.integers(0, 2**63))
def test_a_restored_cursor_goes_on_with_the_next_row(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, count: int, shuffle: bool, seed: int
) -> None:
    path = write(
        tmp_path_factory.getbasetemp() / "cursor.jsonl", *({"prompt": f"p{i}", "label": i} for i in range(13))
    )
    options = {"seed": seed, "path": path, "shuffle": shuffle}
    straight = texts(dataset.table, tokenizer, count + 1, **options)
    state = Cursor()
    texts(dataset.table, tokenizer, count, state, **options)
    restored = msgspec.json.decode(msgspec.json.encode(state), type=Cursor)
    assert texts(dataset.table, tokenizer, 1, restored, **options) == straight[count:]


@settings(deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 5), st.integers(0, 200))
def test_every_epoch_is_a_permutation(seed: int, epoch: int, size: int) -> None:
    assert sorted(permutation(seed, epoch, size).tolist()) == list(range(size))


def test_the_shuffle_is_fixed_for_ever() -> None:
    assert permutation(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert permutation(0, 1, 8).tolist() != permutation(1, 0, 8).tolist() != permutation(0, 0, 8).tolist()


def test_epochs_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": f"p{i}", "label": i} for i in range(5)))
    state = Cursor()
    found = texts(dataset.table, tokenizer, 99, state, seed=3, path=path, epochs=2)
    assert len(found) == 10
    assert set(found[:5]) == set(found[5:])
    assert found[:5] != found[5:]
    assert state == Cursor(0, 2)
    assert texts(dataset.table, tokenizer, 1, state, seed=3, path=path, epochs=2) == []


def test_a_run_that_begins_reads_its_file_anew(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for text in ("one", "two"):
        path = write(tmp_path / "a.jsonl", {"prompt": text, "label": ""})
        assert texts(dataset.table, tokenizer, 1, seed=0, path=path) == [text]


# --- layouts -------------------------------------------------------------------------------------

VERL = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_verl_rows_are_recognised(kind: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = str(tmp_path / f"a.{kind}")
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([VERL, VERL]), path)
    else:
        write(Path(path), VERL, VERL)
    example = rows.table(path=path)(1)
    assert example.prompt == VERL["prompt"]
    assert (example.ground_truth, example.name) == ("4", "ground_truth")
    assert example.columns == {
        **{key: VERL[key] for key in ("data_source", "ability", "extra_info")},
        "reward_model": {"style": "rule"},
    }
    assert rows.unpack(rows.pack(example)) == example
    (text,) = texts(dataset.table, tokenizer, 1, seed=0, path=path, system="Add.")
    assert "Add." in text
    assert "What is 2 + 2?" in text


@pytest.mark.parametrize(
    ("row", "truth", "columns"),
    [
        ({"prompt": "a", "label": "b", "metadata": {"k": [1]}}, "b", {"metadata": {"k": [1]}}),
        ({"input": "a", "label": "b"}, "b", {}),
        ({"prompt": "a", "solution": "b", "level": 3}, "b", {"level": 3}),
        ({"prompt": "a", "answer": None}, None, {}),
    ],
)
def test_slime_and_trl_rows_are_recognised(row: Any, truth: Any, columns: Any, tmp_path: Path) -> None:
    example = rows.table(path=write(tmp_path / "a.jsonl", row))(0)
    assert example[:2] == ("a", truth)
    assert example.name in row
    assert example.columns == columns


def test_columns_are_named_kept_and_wrapped_as_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "", {"q": {"text": "hi"}, "a.b": 1, "c": 2, "d": 3})
    example = rows.table(path=path, prompt="q.text", ground_truth="a.b", keep=["d"], chat=True)(0)
    assert example.prompt == [{"role": "user", "content": "hi"}]
    assert (example.ground_truth, example.name, example.columns) == (1, "a.b", {"d": 3})
    assert rows.table(path=path, prompt="q.text", ground_truth="")(0).ground_truth is None


# --- bad files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], {}, "a.jsonl is empty; it needs at least one row"),
        (["", " "], {}, "has no rows, only blank lines"),
        (["{'a': 1}"], {}, r"a.jsonl:1: no JSON \(.*; mend the line"),
        (["["], {}, "a.jsonl:1: .*one JSON array: write one object a line"),
        (["[1]"], {}, "a.jsonl:1: a JSON list; write one object a line"),
        ([{"question": "a", "x": 1}], {}, r"columns question, x, which fit no known layout: .* \(verl\)"),
        ([{"promt": "a", "y": 1}], {"prompt": "prompt", "ground_truth": "y"}, "did you mean 'promt'"),
        ([{"prompt": 3, "label": 1}], {}, "a.jsonl:1, column prompt: the prompt is a int, neither text nor"),
        ([{"prompt": "", "label": 1}], {}, "a.jsonl:1, column prompt: the prompt is empty"),
        ([{"prompt": ["hi"], "label": 1}], {}, "column prompt: 'hi' is no message; write {role, content}"),
        ([{"prompt": [{"role": "user", "content": []}], "label": 1}], {}, "role and content .* are text"),
        ([{"prompt": "a", "label": 1}], {"system": "x"}, "a system message needs a chat.*add chat: true"),
        ([{"prompt": "a", "label": 1}], {"keep": ["lable"]}, ":1: no column 'lable'; did you mean 'label'"),
        ([{"prompt": "a", "label": 1}], {"epochs": 0}, "epochs must be at least 1, not 0"),
    ],
)  # fmt: skip
def test_the_check_says_what_is_wrong_with_a_file(
    lines: list[Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        dataset.table.__flowgraph__.validate(path=write(tmp_path / "a.jsonl", *lines), **options)  # type: ignore[attr-defined]


def test_a_bad_line_further_down_is_found_before_the_first_step(tmp_path: Path) -> None:
    source = rows.table(path=write(tmp_path / "a.jsonl", {"prompt": "a", "label": 1}, "", "{"))
    with pytest.raises(ValueError, match=r"a.jsonl:3: no JSON"):
        source(0)
    source = rows.table(path=write(tmp_path / "b.jsonl", {"prompt": "a", "label": 1}, {"prompt": "a"}))
    with pytest.raises(ValueError, match=r"b.jsonl:2: no column 'label'"):
        source(1)
    with pytest.raises(IndexError, match="has 2 rows"):
        source(2)


def test_files_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    for name, message in (
        ("a.csv", "neither .jsonl nor .parquet"),
        ("a.parquet", "does not begin with PAR1"),
    ):
        (tmp_path / name).write_text("x,y\n")
        with pytest.raises(ValueError, match=message):
            rows.table(path=str(tmp_path / name))
    with pytest.raises(ValueError, match="does not exist"):
        rows.table(path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="is no file"):
        rows.table(path=str(tmp_path))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="can't be read as parquet"):
        rows.table(path=str(tmp_path / "b.parquet"))(0)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="has no rows"):
        rows.table(path=str(tmp_path / "c.parquet"))(0)


def test_what_is_no_json_names_row_and_column(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "label": ["b"], "image": [b"\x00"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet row 0, column image: a bytes is no JSON.*keep:"):
        rows.table(path=str(tmp_path / "a.parquet"))(0)
    assert rows.table(path=str(tmp_path / "a.parquet"), keep=[])(0).columns == {}


def test_a_prompt_without_tokens_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="row 3: the prompt has no tokens"):
        rows.prompt_ids(rows.Example("", None), tokenizer, "row 3")


def test_the_check_imports_neither_reasoning_gym_nor_pyarrow() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from hops import dataset, evaluate, reward, rows\n"
        "rows.reasoning_gym(task='chain_sum', options={'min_terms': 2})\n"
        "print([m for m in ('reasoning_gym', 'pyarrow', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_prompt_that_is_too_long_is_refused_with_its_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "short", "answer": "1"}\n{"prompt": "' + "long " * 50 + '", "answer": "2"}\n')
    state = Cursor()
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "seed": 0,
        "path": str(path),
        "shuffle": False,
        "longest": 40,
    }
    assert len(dataset.table(state, **options).group) == 1
    with pytest.raises(
        ValueError, match=r"rows\.jsonl:2: the prompt has \d+ tokens, and dims\.prompt\.max is 40"
    ):
        dataset.table(state, **options)


def test_a_named_column_that_is_not_there_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n')
    with pytest.raises(ValueError, match="has no column 'promt', which prompt: names; did you mean 'prompt'"):
        dataset.table(Cursor(), tokenizer=tokenizer, seed=0, path=str(path), prompt="promt")
