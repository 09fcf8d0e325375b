"""``cadenza doctor``: is everything there that sharing GPUs needs, and what to do where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cadenza.slurm_plugin.cli.common import config_option, emit, json_option

if TYPE_CHECKING:
    from pathlib import Path

COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@click.command("doctor")
@json_option
@config_option
def command(*, as_json: bool, config: Path | None) -> None:
    """Check this site: versions, lanes, partitions, keys, agents. Run it where cadenzad runs.

    It changes nothing. Exit code 1 when something keeps Cadenza from working.
    """
    from cadenza.slurm_plugin.cli.site.checks import examine, failed  # noqa: PLC0415
    from cadenza.slurm_plugin.cli.site.facts import gather  # noqa: PLC0415

    findings = examine(gather(config))
    if as_json:
        emit(findings)
    else:
        for finding in findings:
            click.echo(f"{click.style(f'{finding.level:4}', COLOURS[finding.level])} {finding.about}: {finding.seen}")
            if finding.advice:
                click.echo(f"       -> {finding.advice}")
    if failed(findings):
        raise SystemExit(1)
