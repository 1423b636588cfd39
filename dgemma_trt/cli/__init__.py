"""The command line, `dgemma-trt COMMAND`. Exit codes: 2 wrong usage, 1 failure, 130 interrupted, 143 terminated."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

import click

from dgemma_trt.errors import UserError


class _Group(click.Group):
    """Turns what a user can mend into one line on standard error."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        # What is being written is removed on the way out, as on Ctrl-C.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        for stream in (sys.stdout, sys.stderr):
            # A terminal that cannot show a character shows a question mark.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (UserError, OSError) as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(130)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command's module when it is asked for, so that `--help` does not load torch."""
        if cmd_name not in _COMMANDS:
            return None
        from importlib import import_module

        command: click.Command = import_module(f"dgemma_trt.cli.{cmd_name}").command
        return command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which they are used."""
        return list(_COMMANDS)


_COMMANDS = ("quantize", "build", "run")


@click.group(cls=_Group)
@click.version_option(package_name="dgemma-trt")
def main() -> None:
    """Compile DiffusionGemma with TensorRT and run its diffusion loop."""
