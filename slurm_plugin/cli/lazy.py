"""A group of commands that imports each one only when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that prints its help without importing any of its commands.

    ``table``: for each heading the names below it, each with the place of its command, ``module:attribute`` in this
    package, and its line in the help.
    """

    def __init__(self, *words: Any, table: Mapping[str, Mapping[str, tuple[str, str]]], **options: Any) -> None:
        super().__init__(*words, **options)
        self.table = table
        self.places = {name: place for rows in table.values() for name, (place, _) in rows.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        del ctx
        return list(self.places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or None for an unknown name."""
        del ctx
        if cmd_name not in self.places:
            return None
        command: click.Command = resolve_name(f"{__package__}.{self.places[cmd_name]}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the called command; for an unknown name exit with the nearest one."""
        name = args[0]
        if name not in self.places and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, self.places, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see `{ctx.command_path} --help`"
            ctx.fail(f"no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help's lists of commands from the table."""
        del ctx
        for heading, rows in self.table.items():
            with formatter.section(heading):
                formatter.write_dl([(name, line) for name, (_, line) in rows.items()])
