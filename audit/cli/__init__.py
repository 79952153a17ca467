"""The `audit` command: wires things together and computes nothing.

Each module here holds a family of commands; every command imports what it needs when it runs, so that
`audit --help` answers at once. Exit codes: 0 done, 1 a check found something wrong, 2 bad input (one sentence on
stderr), 130 interrupted.
"""

from __future__ import annotations

from pathlib import Path

import click

from audit.cli import mrt, policies, report, signals, study, training, worlds
from envs.core import InputError


class _Group(click.Group):
    """Turns bad input into one sentence and exit code 2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except InputError as error:
            click.echo(f"audit: {error}", err=True)
            ctx.exit(2)
        except RuntimeError as error:
            from audit.llm.journal import PolicyUnavailable

            if not isinstance(error, PolicyUnavailable):
                raise
            click.echo(f"audit: {error} Nothing is lost: repeat the command to go on.", err=True)
            ctx.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="credit-audit", prog_name="audit")
def main() -> None:
    """Find out which steps of an agent's trajectory caused its outcome, and which credit signals can tell."""
    import envs

    ours = Path(__file__).resolve().parents[2] / "envs" / "__init__.py"
    theirs = Path(str(envs.__file__)).resolve()
    if ours != theirs:
        raise InputError(
            f"the import name 'envs' belongs to another package here ({theirs}, not {ours}); install credit-audit "
            f"in a virtual environment of its own."
        )


for family in (worlds, policies, study, signals, training, mrt, report):
    for command in family.COMMANDS:
        main.add_command(command)
