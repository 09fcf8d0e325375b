"""A group of commands, each in a module of its own that is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar

import click


class LazyGroup(click.Group):
    """A group whose help is printed without importing any of its commands."""

    table: ClassVar[Mapping[str, tuple[str, str]]]
    """Name: module beside this one, which has it as ``command``, and its line in the help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        del ctx
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None when there is no such one."""
        del ctx
        if cmd_name not in self.table:
            return None
        found: click.Command = import_module(f"cadenza.slurm_plugin.cli.{self.table[cmd_name][0]}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help's list of commands from the table."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.table.items()])
