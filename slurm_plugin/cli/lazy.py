"""A group of commands that imports each one only when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that prints its help without importing any of its commands.

    ``table``: for each name the place of its command, ``module:attribute`` in this package, and its line in the help.
    """

    def __init__(self, *words: Any, table: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*words, **options)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        del ctx
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or None for an unknown name."""
        del ctx
        if cmd_name not in self.table:
            return None
        command: click.Command = resolve_name(f"{__package__}.{self.table[cmd_name][0]}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help's list of commands from the table."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.table.items()])
