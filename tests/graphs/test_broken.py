"""A broken graph is refused with positions and codes, or it makes a step: nothing that was checked fails later."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowgraph.cli import main
from flowgraph.errors import HopError
from flowgraph.passes.pipeline import load
from flowgraph.spec.codes import CODES
from tests.graphs.mutants import FAMILIES, broken
from tests.runtime.generated import one_step

QUICKSTART = (Path(__file__).parents[2] / "graphs/quickstart.yaml").read_text()
COUNT = 200
ENDS = ("refused", "ran", "too long a prompt")
# The one thing that a check can't know: how long a prompt of the dataset is. The error names the option that bounds it.
TOO_LONG = re.compile(
    r"fold dataset: .* row \d+: the prompt has \d+ tokens, and dims\.prompt\.max is \d+; raise it"
)
FINDING = re.compile(
    r"^(?P<file>\S+):(?P<line>\d+):(?P<column>\d+): error\[(?P<code>FG\d{3})\] \S", re.MULTILINE
)


def outcome(path: Path, text: str, models: dict[str, str]) -> str:
    """ "refused" by `flowgraph check`, every finding with its position and code, or "ran" a step on generated data."""
    path.write_text(text)
    checked = CliRunner().invoke(main, ["check", str(path)])
    assert checked.exception is None or isinstance(checked.exception, SystemExit), checked.exception
    if checked.exit_code:
        findings = list(FINDING.finditer(checked.output))
        assert checked.exit_code == 1
        assert findings
        assert all(one["code"] in CODES and one["file"] == str(path) for one in findings)
        assert all(int(one["line"]) <= len(text.splitlines()) + 1 for one in findings)
        return "refused"
    graph = load(str(path), ["run.steps=1", "run.deadline=20"]).graph
    assert graph is not None
    try:
        assert one_step(graph, models).steps_done == 1
    except HopError as error:
        if not TOO_LONG.search(str(error)):
            raise
        return "too long a prompt"
    return "ran"


def test_a_broken_quickstart_is_refused_or_makes_a_step(
    tmp_path: Path, smollm2: str, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for number, (family, text) in enumerate(broken(QUICKSTART, seed=0, count=COUNT)):
        try:
            counts[family, outcome(tmp_path / "quickstart.yaml", text, {"smollm2-135m": smollm2})] += 1
        except Exception as error:
            error.add_note(f"mutant {number}, {family}:\n{text}")
            raise
    totals = Counter({end: sum(n for (_, e), n in counts.items() if e == end) for end in ENDS})
    with capsys.disabled():
        print(f"\n{COUNT} broken graphs: " + ", ".join(f"{totals[end]} {end}" for end in ENDS))
        for family in (one.__name__ for one in FAMILIES):
            print(f"  {family}: " + ", ".join(f"{counts[family, end]} {end}" for end in ENDS))
    assert totals.total() == COUNT
    assert totals["refused"] > 0
    assert totals["ran"] > 0
    assert totals["too long a prompt"] < totals["ran"]
