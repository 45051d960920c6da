"""`flowgraph check` as it is used: what it prints, its exit codes, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flowgraph.cli import main
from flowgraph.spec.codes import CODES
from tests.unit.graphs import DIMS, RING

ROOT = Path(__file__).parents[2]
TOY = str(ROOT / "tests/runtime/toy.yaml")
THREE = (
    RING.replace("group: source", "group: sorce").replace("bins: 3", "bins: many").replace("delay: 1, ", "")
)


def check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("ring.yaml").write_text(f"graph: small\n{DIMS}hops:\n{THREE}")
    return "ring.yaml"


def test_three_unrelated_mistakes_are_three_findings_at_their_places(three: str) -> None:
    result = check(three)
    assert result.exit_code == 1
    heads = [line for line in result.stderr.splitlines() if "error[" in line]
    assert heads == [
        "ring.yaml:5:70: error[FG108] there is no hop 'sorce'",
        "ring.yaml:5:93: error[FG401] the cycle split → batch → count → total → sync → split has no delay",
        "ring.yaml:7:78: error[FG111] hops.count.with.bins: expected `int`, got `str`",
    ]
    assert result.stderr.splitlines()[-1] == "3 findings"
    lines = result.stderr.splitlines()
    for head in heads:
        at = lines.index(head)
        assert set(lines[at + 2].partition("|")[2].strip()) == {"^"}
        assert lines[at + 3].startswith("  help: ")


def test_json_says_the_same_to_a_program(three: str) -> None:
    result = check(three, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)["diagnostics"]
    assert [(d["code"], d["place"]["line"], d["place"]["column"]) for d in found] == [
        ("FG108", 5, 70), ("FG401", 5, 93), ("FG111", 7, 78),
    ]  # fmt: skip
    assert all(d["code"] in CODES and d["help"] for d in found)


def test_a_good_graph_exits_zero(three: str) -> None:
    Path(three).write_text(f"graph: small\n{DIMS}hops:\n{RING}")
    assert check(three).exit_code == 0
    assert json.loads(check(three, "--json").stdout) == {"diagnostics": []}


@pytest.mark.parametrize(
    "arguments", [[], ["a.yaml", "b.yaml"], ["a.yaml", "--nonsense"], ["a.yaml", "--set"]]
)
def test_wrong_usage_exits_two(arguments: list[str]) -> None:
    assert check(*arguments).exit_code == 2


def test_a_file_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    result = check(str(tmp_path / "none.yaml"))
    assert result.exit_code == 1
    assert "error[FG100] can't read the graph: No such file or directory" in result.stderr


def test_an_override_that_is_wrong_is_shown_at_the_option(three: str) -> None:
    Path(three).write_text(f"graph: small\n{DIMS}hops:\n{RING}")
    result = check(three, "--set", "run.seed=1", "--set", "run.steps=0")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[:3] == [
        "--set:2:11: error[FG106] run.steps: expected `int` >= 1",
        "    2 | run.steps=0",
        "      |           ^",
    ]
    assert check(three, "--set", "hops.count.with={bins: 5}", "--set", 'dims."prompt".max=32').exit_code == 0


def test_checking_the_quickstart_imports_nothing_heavy() -> None:
    heavy = [
        "torch",
        "transformers",
        "reasoning_gym",
        "pyarrow",
        "rich",
        "networkx",
        "tokenizers",
        "huggingface_hub",
    ]
    code = f"""
import sys
from flowgraph.cli import main
try:
    main(["check", "graphs/quickstart.yaml"])
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {heavy!r} if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


# --- over a budget -----------------------------------------------------------------------------------------

OVER = ["--set", "budgets={driver: 1 B/step}"]
REPORTS = [
    ["check", "--state"],
    ["explain"],
    ["explain", "--place"],
    ["explain", "--stage", "lowered"],
    ["audit"],
    ["draw"],
]


def cli(command: list[str], *arguments: str) -> Result:
    return CliRunner().invoke(main, [command[0], TOY, *command[1:], *arguments])


@pytest.mark.parametrize("command", REPORTS, ids=" ".join)
def test_a_graph_over_its_budget_is_reported_on_all_the_same(command: list[str]) -> None:
    within, over = cli(command), cli(command, *OVER)
    assert (within.exit_code, within.stderr) == (0, "")
    assert over.exit_code == (1 if command[0] == "check" else 0)
    assert "error[FG502] driver moves " in over.stderr
    assert over.stderr.endswith("1 finding\n")
    if command == ["draw"]:
        assert [line.split()[:4] for line in over.stdout.splitlines() if "over driver 1 B/step" in line] == [
            ["batch", "→", "reward", "!"]
        ]
        assert "over" not in within.stdout
    else:
        assert over.stdout.replace("  over driver 1 B/step", " " * 22) == within.stdout


def test_json_of_a_graph_over_its_budget_is_the_report() -> None:
    over = cli(["audit", "--json"], *OVER)
    assert over.exit_code == 0
    priced = json.loads(over.stdout)
    assert [s["over"] for s in priced["seams"] if s["over"]] == ["driver 1 B/step"]
    for seam in priced["seams"]:
        seam["over"] = ""
    assert priced == json.loads(cli(["audit", "--json"]).stdout)


@pytest.mark.parametrize("command", [["check"], ["run", "--plain"]], ids=" ".join)
def test_a_graph_over_its_budget_is_neither_good_nor_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    over = cli(command, *OVER)
    assert over.exit_code == 1
    assert over.stderr.startswith("--set:1:18: error[FG502] ")
    assert over.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", REPORTS, ids=" ".join)
def test_any_other_finding_ends_a_report(command: list[str]) -> None:
    other = cli(command, *OVER, "--set", "hops.rollout.owner=nobody")
    assert other.exit_code == 1
    assert "error[FG301]" in other.stderr
    assert other.stdout == ""


def test_a_diff_shows_what_brought_a_graph_over_its_budget(tmp_path: Path) -> None:
    before, after = tmp_path / "before.yaml", tmp_path / "after.yaml"
    before.write_text(Path(TOY).read_text() + "budgets: {driver: 1 KB/step}\n")
    after.write_text(before.read_text().replace("group: 2", "group: 200"))
    result = CliRunner().invoke(main, ["diff", str(before), str(after)])
    assert result.exit_code == 1
    assert f"{after}:" in result.stderr
    assert "error[FG502]" in result.stderr
    assert "budget" in result.stdout
