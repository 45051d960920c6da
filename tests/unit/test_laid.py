"""explain says what `pack: tree` saves of a forward pass, by hand and by the packing itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flowgraph
from flowgraph.learners import pack
from flowgraph.plan.laid import Laid, positions
from flowgraph.report.explain import render
from flowgraph.spec.dims import Size
from tests.unit.packed import make_rows

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "graphs/quickstart.yaml")


def dims(**sizes: int) -> dict[str, Size]:
    return {name: Size(size, size) for name, size in sizes.items()}


def test_the_quickstart_computes_each_prompt_once_and_no_last_token() -> None:
    found = flowgraph.explain(QUICKSTART)
    assert found.learners == (Laid("trainer", 8 * 38 + 64 * 3, 64 * (38 + 3)),)
    assert "pack: tree of trainer lays at most 496 of 2,624 mean tokens a step (0.19)" in render(found)


def test_other_packings_and_graphs_without_a_learner_say_nothing() -> None:
    packed = flowgraph.explain(QUICKSTART, overrides={"owners.trainer.learner.pack": "packed"})
    assert packed.learners == ()
    assert "lays" not in render(packed)
    assert flowgraph.explain(str(ROOT / "tests/runtime/toy.yaml")).learners == ()


@pytest.mark.parametrize("max_tokens", [10_000, 90, 40])
@pytest.mark.parametrize(("groups", "samples", "leaves"), [(3, 4, 1), (2, 3, 2), (5, 1, 1)])
def test_it_is_what_packing_lays_of_rows_of_that_size(
    groups: int, samples: int, leaves: int, max_tokens: int
) -> None:
    random = np.random.default_rng(0)
    tokens = []
    for group in range(groups):
        prompt = [group, *random.integers(0, 99, 9).tolist()]
        tokens += [[*prompt, 100 + i, 1, 2, 3, 4] for i in range(samples * leaves)]
    rows = make_rows(tokens, [[False] * 10 + [True] * 5] * len(tokens))
    laid, alone = positions(
        dims(group=groups, sample=samples, leaf=leaves, prompt=10, response=5), max_tokens
    )
    assert alone == pack.positions(pack.pack(rows, "packed", max_tokens))
    assert laid == pack.positions(pack.pack(rows, "tree", max_tokens))


def test_a_graph_that_sizes_no_prompt_shares_nothing_and_a_rank_more_repeats_a_prompt() -> None:
    assert positions(dims(group=2, sample=4, response=5), 1000) == (32, 32)
    sizes = dims(group=2, sample=4, prompt=10, response=5)
    assert positions(sizes, 1000) == (2 * 10 + 8 * 4, 8 * 14)
    assert positions(sizes, 1000, ranks=2)[0] == 2 * 10 + 8 * 4 + 10
