"""The command line. A command reads its options, calls the library, and shows what comes of it."""

from __future__ import annotations

from typing import Any

import click

from flowgraph.cli import doctor, imports, reports, runs, simulate
from flowgraph.cli.shared import FINDINGS
from flowgraph.errors import FlowgraphError


class Commands(click.Group):
    """Errors that flowgraph raises on purpose are shown as they are, without a traceback.

    ctx.obj: the exit code of a command that had findings to show, and still went on to its end
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            super().invoke(ctx)
            if ctx.obj:
                ctx.exit(ctx.obj)
        except FlowgraphError as error:
            click.echo(str(error), err=True)
            ctx.exit(FINDINGS)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="flowgraph-rl", prog_name="flowgraph")
def main() -> None:
    """A compiler and runtime for the asynchronous reinforcement-learning ring of language models."""


for command in (
    reports.check, reports.explain, reports.draw, reports.audit, reports.diff, reports.schema,
    runs.run, runs.pull, runs.init, simulate.simulate, imports.imports, doctor.doctor,
):  # fmt: skip
    main.add_command(command)
