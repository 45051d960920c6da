"""Commands that make something: a run, a model's directory, a graph to begin with."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

import click

from flowgraph import api
from flowgraph.cli.shared import GRAPH, INTERRUPTED, MODEL, NO_PASS, SET, checked, write_file
from flowgraph.spec.units import counted


@click.command()
@GRAPH
@SET
@MODEL
@NO_PASS
@click.option(
    "--executor", type=click.Choice(["processes", "inproc"]), default="processes", show_default=True
)
@click.option("--steps", type=int, help="Short for --set run.steps=N.")
@click.option(
    "--runs",
    type=click.Path(file_okay=False),
    default="runs",
    show_default=True,
    help="Where run directories go.",
)
@click.option(
    "--verify", is_flag=True, help="Check every promise and every hop's purity while it runs; slower."
)
@click.option("--live/--plain", default=None, help="A live table or plain lines; default: by the terminal.")
def run(
    graph: str,
    overrides: tuple[str, ...],
    executor: Literal["processes", "inproc"],
    steps: int | None,
    runs: str,
    live: bool | None,
    no_pass: tuple[str, ...],
    verify: bool,
) -> None:
    """Run GRAPH to its last step. Everything about the run goes to RUNS/<graph>/<id>/."""
    more = () if steps is None else (f"run.steps={steps}",)
    loaded = checked(graph, (*overrides, *more), no_pass=no_pass)
    try:
        done = api.run(loaded, executor=executor, runs=runs, live=live, no_pass=no_pass, verify=verify)
    except KeyboardInterrupt:
        click.echo("interrupted; the workers are gone and the metrics are written", err=True)
        raise SystemExit(INTERRUPTED) from None
    from flowgraph.runtime.view import shown_idle, shown_lags

    click.echo("; ".join(text for text in (shown_idle(done.idle), shown_lags(done.lags)) if text))
    click.echo(f"{counted(done.steps, 'step')} in {done.seconds:.0f} s; everything is in {done.directory}")


@click.command()
@click.argument("model")
def pull(model: str) -> None:
    """Fetch or make MODEL (a built-in one, a directory or a hub id) and print where it lies."""
    from flowgraph.models import ensure

    done = ensure(model)
    click.echo(f"{done.path}\n  source {done.source}\n  sha256 {done.sha256}")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False), default="graph.yaml")
def init(file: str) -> None:
    """Write a starter graph to FILE (default graph.yaml)."""
    path = Path(file)
    if path.exists():
        raise click.UsageError(f"{file} exists; give another name")
    starter = files("flowgraph").joinpath("starter.yaml")
    write_file(path, starter.read_text(encoding="utf-8"))
    click.echo(
        f"wrote {file}; try: flowgraph check {file}; flowgraph draw {file} -o ring.svg; flowgraph run {file}"
    )
