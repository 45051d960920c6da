"""A graph at a revision of git: how it is named, what is read, and what is said where there is nothing to read."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import flowgraph
from flowgraph.cli import main
from tests.unit.graphs import DIMS, RING

GRAPH = f"graph: small\n{DIMS}hops:\n{RING}"


def git(*arguments: str) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """graphs/ring.yaml with bins 3 at HEAD~1, 5 at HEAD and 7 in the working tree."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "repository"
    (root / "graphs").mkdir(parents=True)
    monkeypatch.chdir(root)
    git("init", "--quiet")
    for bins in (3, 5):
        bins_of(root, bins)
        git("add", ".")
        git("commit", "--quiet", "-m", f"bins {bins}")
    bins_of(root, 7)
    return root


def bins_of(root: Path, bins: int) -> None:
    (root / "graphs/ring.yaml").write_text(GRAPH.replace("bins: 3", f"bins: {bins}"))


def bins(name: str | Path) -> object:
    return flowgraph.compile(name).hops["count"].config["bins"]


def diff(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["diff", *arguments])


def test_a_revision_is_named_as_git_does(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [
        bins(name) for name in ("HEAD~1:graphs/ring.yaml", "HEAD:graphs/ring.yaml", "graphs/ring.yaml")
    ] == [3, 5, 7]
    assert bins("HEAD^{/bins 3}:graphs/ring.yaml") == 3
    monkeypatch.chdir("graphs")
    assert [
        bins(f"HEAD~1:{path}") for path in ("graphs/ring.yaml", "./ring.yaml", "../graphs/ring.yaml")
    ] == [3, 3, 3]
    monkeypatch.chdir(repository.parent)
    assert bins(f"HEAD:{repository}/graphs/ring.yaml") == 5
    assert bins("HEAD:./repository/graphs/ring.yaml") == 5


def test_a_file_with_a_colon_in_its_name_is_a_file(repository: Path) -> None:
    Path("HEAD:ring.yaml").write_text(GRAPH)
    assert bins("HEAD:ring.yaml") == 3


def test_a_file_that_is_gone_is_still_there_at_its_revision(repository: Path) -> None:
    (repository / "graphs/ring.yaml").unlink()
    (repository / "graphs").rmdir()
    assert bins("HEAD:graphs/ring.yaml") == bins("HEAD:./graphs/ring.yaml") == 5


def test_the_repository_of_a_git_hook_is_not_mistaken_for_that_of_the_file(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", ".git")
    monkeypatch.chdir("graphs")
    assert bins("HEAD:./ring.yaml") == 5


def test_findings_of_a_revision_are_at_its_lines(repository: Path) -> None:
    Path("graphs/ring.yaml").write_text(GRAPH.replace("bins: 3", "bins: many"))
    git("commit", "--quiet", "-am", "broken")
    bins_of(repository, 7)
    result = diff("--rev", "HEAD", "graphs/ring.yaml")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "HEAD:./graphs/ring.yaml:7:78: error[FG111] hops.count.with.bins: expected `int`, got `str`\n"
        "    7 |   count: {use: tests.diagnostics.small.count, in: {key: batch}, with: {bins: many}}\n"
    )


def test_diff_against_a_revision_says_the_same_either_way(repository: Path) -> None:
    one = diff("--rev", "HEAD~1", "graphs/ring.yaml")
    two = diff("HEAD~1:graphs/ring.yaml", "graphs/ring.yaml")
    assert (one.exit_code, two.exit_code) == (0, 0)
    changes = "\n\nhops\n  ~ count  with.bins 3 → 7\n"
    assert one.stdout == f"HEAD~1:./graphs/ring.yaml → graphs/ring.yaml{changes}"
    assert two.stdout == f"HEAD~1:graphs/ring.yaml → graphs/ring.yaml{changes}"


@pytest.mark.parametrize(
    ("name", "message", "help"),
    [
        ("HEAD~9:graphs/ring.yaml", "git knows no revision 'HEAD~9' in", "`git log --oneline` lists those"),
        ("--all:graphs/ring.yaml", "git knows no revision '--all' in", "`git log --oneline` lists those"),
        (":graphs/ring.yaml", "git knows no revision '' in", "`git log --oneline` lists those"),
        (
            "HEAD:ring.yaml",
            "revision HEAD has no file ring.yaml",
            "write the path from the root of the repository",
        ),
        ("HEAD:graphs", "revision HEAD has no file graphs", "write the path from the root of the repository"),
        ("HEAD:../ring.yaml", "is in no git repository: fatal: ", "give the path of a graph file"),
    ],
)
def test_what_is_not_there_is_a_finding_with_a_fix(
    repository: Path, name: str, message: str, help: str
) -> None:
    (found,) = flowgraph.load(name).diagnostics
    assert (found.code, str(found.place)) == ("FG100", f"{name}:1:1")
    assert message in found.message
    assert found.help.startswith(help)


def test_without_git_there_are_still_files(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert bins("graphs/ring.yaml") == 7
    (found,) = flowgraph.load("HEAD:graphs/ring.yaml").diagnostics
    assert found.message == "can't read the graph: there is no git to read a revision with"


def test_json_is_for_programs_with_and_without_findings(repository: Path) -> None:
    found = json.loads(diff("--json", "--rev", "HEAD", "graphs/ring.yaml").stdout)
    assert [(c["name"], c["before"]["options"], c["after"]["options"]) for c in found["hops"]] == [
        ("count", {"with.bins": 5}, {"with.bins": 7})
    ]
    result = diff("--json", "none.yaml", "gone.yaml")
    assert result.exit_code == 1
    assert [d["place"]["file"] for d in json.loads(result.stdout)["diagnostics"]] == [
        "none.yaml",
        "gone.yaml",
    ]


@pytest.mark.parametrize(
    "arguments", [[], ["a.yaml"], ["a", "b", "c"], ["a", "b", "--rev", "HEAD"], ["--rev", "HEAD"]]
)
def test_diff_wants_two_graphs_or_one_and_a_revision(arguments: list[str]) -> None:
    assert diff(*arguments).exit_code == 2


def test_equal_graphs_have_no_difference(repository: Path) -> None:
    bins_of(repository, 5)
    result = diff("--rev", "HEAD", "graphs/ring.yaml")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "no difference")
