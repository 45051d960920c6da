"""The pages on errors of a run: the example fails with exactly its text, the mended one runs to its last step."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgraph.errors import RunError
from flowgraph.passes.pipeline import load
from flowgraph.runtime.run import Outcome, run_graph
from tests.diagnostics import pages


def run(page: pages.Page) -> Outcome:
    """As the page's own command does."""
    loaded = load("graph.yaml")
    assert not loaded.diagnostics, loaded.diagnostics
    assert loaded.graph is not None
    assert loaded.root is not None
    executor = "inproc" if "--executor inproc" in page.command else "processes"
    return run_graph(loaded.graph, loaded.root.plain(), executor=executor, live=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", pages.RUN)
def test_the_example_of_a_page_fails_with_exactly_its_text(code: str, here: Path) -> None:
    page = pages.ALL[code]
    page.case.write(here)
    with pytest.raises(RunError) as failure:
        run(page)
    assert failure.value.code == code
    assert pages.steady(f"{failure.value}\n") == pages.steady(page.text)


@pytest.mark.parametrize("code", pages.RUN)
def test_what_a_page_says_to_use_instead_runs_to_its_end(code: str, here: Path) -> None:
    page = pages.ALL[code]
    page.mended.write(here)
    assert run(page).steps == 2
