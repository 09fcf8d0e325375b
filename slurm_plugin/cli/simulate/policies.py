"""``cadenza policies``: the orderings, allocations and ways of sharing, a line and a source for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from cadenza.slurm_plugin.cli.common import console, emit, json_option, say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from cadenza.policies.registry import Entry

OPTIONS = {"ordering": "--order", "allocation": "--allocate", "sharing": "--share"}


class Row(msgspec.Struct, frozen=True):
    """One policy."""

    name: str
    kind: str
    line: str
    source: str


@click.command("policies")
@json_option
def command(*, as_json: bool) -> None:
    """List the policies that `cadenza simulate` and the service know, with their sources.

    Any ordering goes with any allocation and any way of sharing.
    """
    from cadenza.policies.registry import ENTRIES  # noqa: PLC0415

    if as_json:
        emit([Row(entry.name, entry.kind, entry.line, entry.source) for entry in ENTRIES])
    else:
        from cadenza.policies.sharing.pipeline import STAGES  # noqa: PLC0415

        console().print(table(ENTRIES))
        for name, stages in STAGES.items():
            say("", f"Stages of a round with --share {name}: {', '.join(stage.__name__ for stage in stages)}")


def table(entries: Iterable[Entry]) -> Table:
    """Return one row a policy, under the option that takes its name."""
    from rich.table import Table  # noqa: PLC0415

    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("OPTION", "NAME", "WHAT IT DOES", "SOURCE"):
        found.add_column(name, no_wrap=name in {"OPTION", "NAME"})
    last = ""
    for entry in entries:
        option = OPTIONS[entry.kind]
        if last and option != last:
            found.add_section()
            found.add_row()
        found.add_row(option if option != last else "", entry.name, entry.line, entry.source)
        last = option
    return found
