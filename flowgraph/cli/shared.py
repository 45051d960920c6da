"""What the commands have in common: options, loading a graph, showing its findings, writing a file."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from flowgraph import api
from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph
from flowgraph.passes.pipeline import Loaded
from flowgraph.passes.rewrite import PASSES
from flowgraph.spec.render import render
from flowgraph.spec.units import counted

FINDINGS, INTERRUPTED = 1, 130  # and 2 for wrong usage, which click gives
GRAPH = click.argument("graph", type=click.Path())
SET = click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override one value of the graph."
)
MODEL = click.option(
    "--model",
    metavar="MODEL",
    expose_value=False,
    callback=lambda context, _, value: context.meta.update(model=value),
    help="Of every engine and learner: a name, directory, config.json, hub id, or transformers.SomeConfig(…).",
)
NO_PASS = click.option(
    "--no-pass", multiple=True, type=click.Choice([*PASSES, "all"]), help="Leave a pass of the compiler out."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def checked(
    path: str,
    overrides: tuple[str, ...] = (),
    *,
    as_json: bool = False,
    no_pass: tuple[str, ...] = (),
    report: bool = False,
    fails: bool = True,
) -> Loaded:
    """The graph, when it has no findings to end with; see `show_findings`. It has the model of the option MODEL."""
    loaded = api.load(path, overrides, no_pass=no_pass, model=click.get_current_context().meta.get("model"))
    show_findings(loaded, as_json=as_json, report=report, fails=fails)
    return loaded


def refuse_resized(overrides: tuple[str, ...], no_pass: tuple[str, ...]) -> None:
    """With --run, what ran is priced: another size, model or set of passes would be told of and not be so."""
    sized = [one for one in overrides if not one.startswith(("budgets", "run."))]
    asked = [*(f"--set {one}" for one in sized), *(f"--no-pass {one}" for one in no_pass)]
    asked += ["--model"] if click.get_current_context().meta.get("model") else []
    if asked:
        raise click.UsageError(f"--run prices what ran, so {asked[0]} means nothing beside it; leave one out")


def graph_of(loaded: Loaded) -> Graph:
    assert loaded.graph is not None, "it has no findings"
    return loaded.graph


def show_findings(*graphs: Loaded, as_json: bool, report: bool = False, fails: bool = True) -> None:
    """Show what there is to find in graphs, if anything, and end.

    report: go on all the same when each has a plan; a report says why it is over a budget
    fails: whether such a report then ends with the exit code of findings
    """
    found = [d for loaded in graphs for d in loaded.diagnostics]
    if not found:
        return
    go_on = report and all(loaded.compiles for loaded in graphs)
    if as_json and not go_on:
        click.echo(json.dumps({"diagnostics": [_as_dict(d) for d in found]}, indent=1))
    else:
        print_findings(found, {name: text for loaded in graphs for name, text in loaded.sources.items()})
    if not go_on:
        raise SystemExit(FINDINGS)
    if fails:
        fail_at_the_end()


def print_findings(found: list[Diagnostic], sources: dict[str, str]) -> None:
    click.echo(render(found, sources), err=True)
    click.echo(f"\n{counted(len(found), 'finding')}", err=True)


def fail_at_the_end() -> None:
    """Let a command go on, to the exit code of findings."""
    click.get_current_context().find_root().obj = FINDINGS


def _as_dict(d: Diagnostic) -> Any:
    import msgspec

    return msgspec.to_builtins(d)


def color() -> bool:
    """Whether what is printed is seen on a terminal that shows colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def write_file(path: Path, content: str | bytes) -> None:
    """Whole or not at all. What is no regular file (a device, a pipe) is written to; a link is followed."""
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        partial = target.with_name(f".{target.name}.partial")
        try:
            partial.write_bytes(data)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise click.UsageError(f"can't write {path}: {error.strerror}") from None
