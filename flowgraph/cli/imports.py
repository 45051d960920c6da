"""import: the graph of what another system ships, from its own options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from flowgraph.cli.shared import write_file
from flowgraph.importers import Imported, import_slime, import_verl

OUTPUT = click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="The graph file; default: stdout."
)


@click.group("import")
def imports() -> None:
    """Write a graph of what a run of another system ships, to audit the system that you have.

    The graph goes to stdout or to -o; stderr says which options decided what, which change nothing that crosses, which
    are not known, and what had to be assumed.
    """


@imports.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False))
@click.argument("overrides", nargs=-1)
@OUTPUT
def verl(config: str, overrides: tuple[str, ...], output: str | None) -> None:
    """A verl run: its config as YAML, or a script that calls main_ppo; OVERRIDES are as hydra has them."""
    _write(lambda: import_verl(Path(config), overrides), output)


@imports.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED)
@OUTPUT
def slime(arguments: tuple[str, ...], output: str | None) -> None:
    """A slime run: a script that calls train.py or train_async.py, or its options behind `--`."""
    _write(lambda: import_slime(arguments), output)


def _write(make: Callable[[], Imported], output: str | None) -> None:
    try:
        made = make()
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    click.echo(str(made), err=True)
    if output in (None, "-"):
        click.echo(made.graph, nl=False)
    else:
        assert output is not None
        write_file(Path(output), made.graph)
        click.echo(f"wrote {output}; try: flowgraph audit {output} --naive", err=True)
