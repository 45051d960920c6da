"""A step is cut into the same minibatches whatever the number of ranks that have its rows."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.learners.partition import Ints
from flowgraph.learners.protocol import Rows
from flowgraph.learners.rows import minibatches, take
from flowgraph.runtime.messages import Share
from flowgraph.runtime.pieces import places
from tests.unit.packed import make_rows


def ids(rows: Rows) -> list[int]:
    return rows.tokens.tolist()


def test_minibatches_are_whole_trajectories_in_the_order_of_the_batch() -> None:
    rows = make_rows([[i] for i in range(6)], [[False]] * 6)._replace(trajectory=np.array([7, 3, 7, 9, 3, 5]))
    assert [ids(part) for part in minibatches(rows, 2)] == [[0, 1, 2, 4], [3, 5]]
    assert [len(ids(part)) for part in minibatches(rows, 6)] == [2, 2, 0, 1, 1, 0]
    alone = rows._replace(trajectory=None)
    assert [ids(part) for part in minibatches(alone, 3)] == [[0, 1], [2, 3], [4, 5]]
    assert [ids(part) for part in minibatches(take(rows, []), 2)] == [[], []]


@given(
    leaves=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=9),
    names=st.permutations(range(9)),
    ranks=st.integers(1, 3),
    count=st.integers(1, 5),
    known=st.booleans(),
)
def test_what_the_ranks_have_of_each_minibatch_is_together_that_of_one_process(
    leaves: list[tuple[int, int]], names: list[int], ranks: int, count: int, known: bool
) -> None:
    """leaves: how many each trajectory has, and its rank; known: whether the rows name their trajectories"""
    sizes = [leaf for leaf, _ in leaves]
    of = np.repeat(np.arange(len(leaves)), sizes)
    rows = make_rows([[i] for i in range(len(of))], [[False]] * len(of))
    rows = rows._replace(trajectory=np.array(names)[of] if known else None)
    members = [[i for i, (_, on) in enumerate(leaves) if on % ranks == rank] for rank in range(ranks)]
    shares = [Share(one, {"leaf": sizes}) for one in members if one]  # a run gives each rank a trajectory
    own = [(take(rows, np.flatnonzero(np.isin(of, one.members))), places(one, "leaf")) for one in shares]
    told: list[Ints] = []

    def tell(first_N: Ints) -> list[Ints]:
        told.append(first_N)
        return told

    for mine, place in own:  # what they say to each other, and then what each makes of it
        minibatches(mine, count, place, tell)
    found = [minibatches(mine, count, place, lambda _: told) for mine, place in own]
    for number, whole in enumerate(minibatches(rows, count)):
        assert sorted(itertools.chain(*(ids(parts[number]) for parts in found))) == ids(whole)
