"""Reference of all commands as Markdown, generated from click: ``python -m cadenza.slurm_plugin.cli.reference``."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

import click

from cadenza.slurm_plugin.cli.keys import KeyedCommand, row_of
from cadenza.slurm_plugin.cli.main import main


def reference(command: click.Command, ctx: click.Context, level: int = 2) -> Iterator[str]:
    """Yield the Markdown blocks of a command and of its subcommands."""
    yield f"{'#' * level} `{ctx.command_path}`"
    yield f"```\n{command.get_usage(ctx).removeprefix('Usage: ')}\n```"
    yield from _paragraphs(command.help or "")
    items = (item for item in command.get_params(ctx) if isinstance(item, click.Option) and "--help" not in item.opts)
    if records := [record for item in items if (record := item.get_help_record(ctx))]:
        rows = (f"| `{_cell(name)}` | {_cell(text)} |" for name, text in records)
        yield "\n".join(("| option | meaning |", "|---|---|", *rows))
    if isinstance(command, KeyedCommand):
        keys = (f"| `{_cell(name)}` | {_cell(text)} |" for name, text in map(row_of, command.keys.values()))
        yield "\n".join(("| key of `--set` | meaning |", "|---|---|", *keys))
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            child = command.get_command(ctx, name)
            if child is not None:
                yield from reference(child, click.Context(child, info_name=name, parent=ctx), level + 1)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; click keeps the lines of one that starts with a backspace."""
    for paragraph in cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            lines = paragraph.removeprefix("\b").strip()
            yield f"```\n{lines}\n```"
        else:
            yield " ".join(paragraph.split())


def _cell(text: str) -> str:
    """Return a text that fits into one cell of a table."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def markdown() -> str:
    """Return the whole reference as one Markdown document."""
    context = click.Context(main, info_name="cadenza", **main.context_settings)
    return "\n\n".join(("# Commands", *reference(main, context))) + "\n"


if __name__ == "__main__":
    click.echo(markdown(), nl=False)
