"""The command line. Heavy modules are imported inside the command that needs them, so `check` stays fast."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from flowgraph.errors import Diagnostic, FlowgraphError
from flowgraph.passes.pipeline import Loaded, load
from flowgraph.spec.render import render

FINDINGS, INTERRUPTED = 1, 130  # and 2 for wrong usage, which click gives
GRAPH = click.argument("graph", type=click.Path())
SET = click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override one value of the graph."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Commands(click.Group):
    """Errors that flowgraph raises on purpose are shown as they are, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlowgraphError as error:
            click.echo(str(error), err=True)
            ctx.exit(FINDINGS)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="flowgraph-rl", prog_name="flowgraph")
def main() -> None:
    """A compiler and runtime for the asynchronous reinforcement-learning ring of language models."""


def _checked(path: str, overrides: tuple[str, ...], *, as_json: bool = False) -> Loaded:
    # A user's own hops and rewards lie where the command is given, or beside the graph.
    sys.path[:0] = [os.getcwd(), str(Path(path).resolve().parent)]
    loaded = load(path, overrides)
    if loaded.diagnostics:
        _findings(loaded, as_json)
    return loaded


def _findings(loaded: Loaded, as_json: bool) -> NoReturn:
    found = loaded.diagnostics
    if as_json:
        click.echo(json.dumps({"diagnostics": [_as_dict(d) for d in found]}, indent=1))
    else:
        click.echo(render(found, loaded.sources), err=True)
        click.echo(f"\n{len(found)} finding{'s' if len(found) > 1 else ''}", err=True)
    raise SystemExit(FINDINGS)


def _as_dict(d: Diagnostic) -> Any:
    import msgspec

    return msgspec.to_builtins(d)


@main.command()
@GRAPH
@SET
@JSON
def check(graph: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check every seam of GRAPH before anything runs. Exit code 1 when there are findings."""
    loaded = _checked(graph, overrides, as_json=as_json)
    assert loaded.graph is not None
    seams = sum(len({b.via for b in node.bindings}) for node in loaded.graph.nodes.values())
    if as_json:
        click.echo(json.dumps({"diagnostics": []}))
    else:
        from flowgraph.passes.staleness import staleness

        lag = staleness(loaded.graph)
        proved = f"; lag at most {lag.bound}" if lag is not None else ""
        click.echo(f"{graph}: {len(loaded.graph.nodes)} hops, {seams} seams, no findings{proved}")


@main.command()
@GRAPH
@SET
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="FILE.svg or FILE.mmd; default: Mermaid on stdout.",
)
@click.option(
    "--run", "run_dir", type=click.Path(exists=True, file_okay=False), help="Show what this run measured too."
)
def draw(graph: str, overrides: tuple[str, ...], output: str | None, run_dir: str | None) -> None:
    """Draw GRAPH: every hop with its owner, every seam with shape, bytes and lifetime."""
    from flowgraph.plan.lower import lower
    from flowgraph.report import draw as drawing

    formats: dict[str, drawing.Format] = {".svg": "svg", ".mmd": "mermaid"}
    suffix = Path(output).suffix if output else ".mmd"
    if suffix not in formats:
        raise click.UsageError(f"{output} is neither .svg nor .mmd")
    loaded = _checked(graph, overrides)
    assert loaded.graph is not None
    measured = _measured(run_dir, loaded.graph.file.name)
    text = drawing.draw(lower(loaded.graph), format=formats[suffix], measured=measured)
    if output:
        _write(Path(output), text)
        click.echo(f"wrote {output}")
    else:
        click.echo(text, nl=False)


@main.command()
@GRAPH
@SET
@click.option(
    "--run",
    "run_dir",
    type=click.Path(exists=True, file_okay=False),
    help="Put what this run measured beside it.",
)
@JSON
def audit(graph: str, overrides: tuple[str, ...], run_dir: str | None, as_json: bool) -> None:
    """Price every seam of GRAPH in bytes a step, largest first."""
    import shutil

    from flowgraph.plan.lower import lower
    from flowgraph.report import audit as auditing

    loaded = _checked(graph, overrides, as_json=as_json)
    assert loaded.graph is not None
    result = auditing.audit(lower(loaded.graph), _measured(run_dir, loaded.graph.file.name))
    click.echo(
        auditing.to_json(result)
        if as_json
        else auditing.render_table(result, shutil.get_terminal_size((120, 24)).columns)
    )


def _measured(run_dir: str | None, graph: str) -> Any:
    """What a run of this graph measured. Raises UsageError when it is of another, or did not get that far."""
    if run_dir is None:
        return None
    import msgspec

    from flowgraph.plan.measured import Measured

    path = Path(run_dir) / "seams.json"
    try:
        ran = json.loads((Path(run_dir) / "plan.json").read_bytes())["graph"]
        if ran != graph:
            raise click.UsageError(f"{run_dir} is a run of the graph {ran}, not of {graph}")
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, ValueError, KeyError, msgspec.DecodeError) as error:
        raise click.UsageError(f"{path} holds no measured seams: {error}") from None


@main.command()
@GRAPH
@SET
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
@click.option("--live/--plain", default=None, help="A live table or plain lines; default: by the terminal.")
def run(
    graph: str,
    overrides: tuple[str, ...],
    executor: Literal["processes", "inproc"],
    steps: int | None,
    runs: str,
    live: bool | None,
) -> None:
    """Run GRAPH to its last step. Everything about the run goes to RUNS/<graph>/<id>/."""
    if steps is not None:
        overrides = (*overrides, f"run.steps={steps}")
    loaded = _checked(graph, overrides)
    assert loaded.graph is not None
    assert loaded.root is not None
    from flowgraph.report.draw import draw as drawing
    from flowgraph.runtime.run import run_graph

    try:
        done = run_graph(
            loaded.graph,
            loaded.root.plain(),
            executor=executor,
            runs=runs,
            live=live,
            diagram=lambda plan: drawing(plan, format="svg"),
        )
    except KeyboardInterrupt:
        click.echo("interrupted; the workers are gone and the metrics are written", err=True)
        raise SystemExit(INTERRUPTED) from None
    click.echo(f"{done.steps} steps in {done.seconds:.0f} s; everything is in {done.directory}")


@main.command()
@click.argument("model")
def pull(model: str) -> None:
    """Fetch MODEL (smollm2-135m, a directory or a hub id) and print where it lies."""
    from flowgraph.models import ensure

    done = ensure(model)
    click.echo(f"{done.path}\n  source {done.source}\n  sha256 {done.sha256}")


@main.command()
@click.argument("file", type=click.Path(dir_okay=False), default="graph.yaml")
def init(file: str) -> None:
    """Write a starter graph to FILE (default graph.yaml)."""
    path = Path(file)
    if path.exists():
        raise click.UsageError(f"{file} exists; give another name")
    starter = Path(__file__).parent / "starter.yaml"
    _write(path, starter.read_text(encoding="utf-8"))
    click.echo(
        f"wrote {file}; try: flowgraph check {file}; flowgraph draw {file} -o ring.svg; flowgraph run {file}"
    )


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise click.UsageError(f"can't write {path}: {error.strerror}") from None


if __name__ == "__main__":
    main()
