"""Dataset: the source of the ring. A fold over a cursor that hands out one group a firing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int32, Int64

from flowgraph import Array, Below, Dim, Engine, Json, Rows, Run, Tokenizer, effect, fold
from hops import rows
from hops.rows.example import Example, RowSource, pack, prompt_ids
from hops.rows.gym import Format, Split


class Cursor(msgspec.Struct):
    """Where the dataset stands: the next row of this epoch, and how many epochs are finished."""

    at: int = 0
    epoch: int = 0


class Group(NamedTuple):
    """One dataset row, to be sampled several times.

    prompt: token ids
    ground_truth: {"ground_truth": value, "name": its column, "columns": {every other column}}, and for a chat
    "messages": the prompt as messages; `hops.rows.pack` writes it and `hops.rows.unpack` reads it
    """

    prompt: Annotated[Int32[Array, "prompt"], Below("vocab")]
    ground_truth: Annotated[Any, Json(mean=256, max=32768)]


class Groups(NamedTuple):
    group: Annotated[list[Group], Rows("group")]


def _check_reasoning_gym(**options: Any) -> None:
    rows.reasoning_gym(**options)


@fold(source="group", lifetime="consumed", validate=_check_reasoning_gym)
def reasoning_gym(
    state: Cursor,
    *,
    tokenizer: Tokenizer,
    seed: Annotated[int, Run("seed")],
    longest: Annotated[int, Dim("prompt")] = 2**31 - 1,
    task: str,
    options: dict[str, Any] | None = None,
    shots: int = 0,
    format: Format = "plain",
    split: Split = "train",
    held_out: float = 0.2,
    system: str | None = None,
) -> Groups:
    """Questions of a reasoning-gym task, made as they are needed: endless, never one of the held-out split.

    The options are those of `hops.rows.reasoning_gym`. The reward is `hops.reward.reasoning_gym`.
    Returns one group, or none when the held-out split has no further question.
    """
    source = _source(
        state,
        rows.reasoning_gym,
        task=task,
        options=options,
        shots=shots,
        format=format,
        split=split,
        held_out=held_out,
        system=system,
        seed=seed,
    )
    try:
        return _advance(state, source, state.at, tokenizer, longest)
    except IndexError:
        return Groups([])


def _check_table(*, epochs: int | None = None, shuffle: bool = True, **options: Any) -> None:
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be at least 1, not {epochs}; leave it out to go on without end")
    rows.table(**options)


@fold(source="group", lifetime="consumed", validate=_check_table)
def table(
    state: Cursor,
    *,
    tokenizer: Tokenizer,
    seed: Annotated[int, Run("seed")],
    longest: Annotated[int, Dim("prompt")] = 2**31 - 1,
    path: str,
    prompt: str | None = None,
    ground_truth: str | None = None,
    keep: list[str] | None = None,
    chat: bool = False,
    system: str | None = None,
    epochs: int | None = None,
    shuffle: bool = True,
) -> Groups:
    """Rows of a JSON Lines or parquet file, in a new order each epoch that the seed decides.

    The options are those of `hops.rows.table`.
    epochs: how often every row is handed out (default: without end)
    Returns one group, or none when the epochs are finished. Raises ValueError naming file, line and column.
    """
    source = _source(
        state,
        rows.table,
        path=path,
        prompt=prompt,
        ground_truth=ground_truth,
        keep=keep,
        chat=chat,
        system=system,
    )
    if state.at >= len(source):
        state.at, state.epoch = 0, state.epoch + 1
    if epochs is not None and state.epoch >= epochs:
        return Groups([])
    index = int(permutation(seed, state.epoch, len(source))[state.at]) if shuffle else state.at
    return _advance(state, source, index, tokenizer, longest)


class Pick(NamedTuple):
    """Which row of the data a group is."""

    row: Int64[Array, ""]


class Picked(NamedTuple):
    group: Annotated[list[Pick], Rows("group")]


@fold(source="group", lifetime="consumed")
def cursor(state: Cursor) -> Picked:
    """Row after row of a source without end, by number only: `render`, where prompts are read, makes them of it.

    So the driver holds 8 bytes of a group, however long its prompt is.
    """
    picked = Pick(np.int64(state.at))  # type: ignore[arg-type]  # a numpy scalar is an array without dims
    state.at += 1
    return Picked([picked])


class Rendered(NamedTuple):
    """`prompt` and `ground_truth` as in `Group`."""

    prompt: Annotated[Int32[Array, "prompt"], Below("vocab")]
    ground_truth: Annotated[Any, Json(mean=256, max=32768)]


@effect(uses=Engine, owner="rollout", lifetime="consumed", maps="group")
def render(
    row: Int64[Array, ""],
    *,
    tokenizer: Tokenizer,
    longest: Annotated[int, Dim("prompt")] = 2**31 - 1,
    rows: Callable[..., Any],
) -> Rendered:
    """The prompt and the ground truth of row `row`, in the process of the engine that samples it.

    An effect, because a source of rows keeps what it has read of its file.

    rows: index → `hops.rows.Example`, e.g. {use: hops.rows.reasoning_gym, task: chain_sum, split: train}
    Raises ValueError for a prompt that is longer than dims.prompt, and past the last row of a source that ends.
    """
    where = f"row {int(row)}"
    try:
        example = rows(int(row))
    except IndexError as error:
        message = (
            f"the source of rows ends before {where} ({error}); use hops.dataset.table, which begins again"
        )
        raise ValueError(message) from None
    ids = _prompt(example, tokenizer, where, longest)
    return Rendered(ids, pack(example))


def _prompt(example: Example, tokenizer: Tokenizer, where: str, longest: int) -> Int32[Array, "prompt"]:
    ids = prompt_ids(example, tokenizer, where)
    if len(ids) > longest:
        text = f"{where}: the prompt has {len(ids)} tokens, and dims.prompt.max is {longest}"
        raise ValueError(f"{text}; raise it, or leave the row out")
    return ids


def _advance(state: Cursor, source: RowSource, index: int, tokenizer: Tokenizer, longest: int) -> Groups:
    """Row `index` as a group; the cursor moves only when that worked."""
    example = source(index)
    ids = _prompt(example, tokenizer, source.where(index), longest)
    state.at += 1
    return Groups([Group(ids, pack(example))])


def _source(state: Cursor, factory: Callable[..., Any], **options: Any) -> Any:
    """The source with these options, made once a process; a run that begins reads its file anew."""
    if state.at == state.epoch == 0:
        _made.cache_clear()
    return _made(factory, msgspec.json.encode(options))


@functools.lru_cache(maxsize=16)
def _made(factory: Callable[..., Any], options: bytes) -> Any:
    return factory(**msgspec.json.decode(options))


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> Int64[Array, "row"]:
    """A fixed shuffle of range(size): the order of `size` raw words of PCG64.

    numpy promises the raw words of a bit generator for ever, but not what `Generator.permutation` makes of
    them (NEP 19), and a run must resume under a later numpy.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(size)
    return np.argsort(words, kind="stable")
