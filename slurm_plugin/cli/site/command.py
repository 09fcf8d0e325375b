"""``cadenza doctor`` and ``record``: check a site, record its Slurm."""

from __future__ import annotations

from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import config_option, emit, json_option, say

COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@click.command("doctor")
@click.option("--gpu", is_flag=True, help="Check this machine's GPUs, driver and site scripts instead, on a GPU host.")
@json_option
@config_option
def doctor(*, gpu: bool, as_json: bool, config: Path | None) -> None:
    """Check this site: versions, lanes, partitions, keys, agents.

    Run it on the machine of cadenzad, and with --gpu on each GPU host. It changes nothing. The exit code is 1 if a
    problem keeps Cadenza from working.
    """
    from cadenza.slurm_plugin.cli.site.checks import examine, failed  # noqa: PLC0415
    from cadenza.slurm_plugin.cli.site.facts import gather  # noqa: PLC0415

    if gpu:
        from cadenza.sidecar.agent_settings import load_settings  # noqa: PLC0415
        from cadenza.slurm_plugin.cli.site.node_gpus import examine_gpus, gather_gpus  # noqa: PLC0415
        from cadenza.slurm_plugin.cli.site.node_scripts import examine_scripts, gather_scripts  # noqa: PLC0415

        gpus = examine_gpus(gather_gpus(), load_settings(config).driver_checkpoint)
        findings = (*gpus, *examine_scripts(gather_scripts()))
    else:
        findings = examine(gather(config))
    if as_json:
        emit(findings)
    else:
        for finding in findings:
            level = click.style(f"{finding.level:4}", COLORS[finding.level])
            click.echo(f"{level} ", nl=False)
            say(f"{finding.about}: {finding.observation}")
            if finding.advice:
                say(f"       -> {finding.advice}")
    if failed(findings):
        raise SystemExit(1)


@click.command("record")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File to append to.")
@click.option("--count", default=1, show_default=True, type=click.IntRange(min=1), help="Number of reads.")
@click.option("--interval", default=15.0, show_default=True, type=click.FloatRange(0), help="Seconds between reads.")
def record(*, out: Path, count: int, interval: float) -> None:
    """Record this cluster's jobs and nodes for tests and bug reports.

    The file contains names of users and jobs, and comments: review it before you share it.
    """
    from cadenza.slurm_plugin.gateway import recording  # noqa: PLC0415
    from cadenza.slurm_plugin.gateway.source_gateway import automatic  # noqa: PLC0415

    with automatic() as gateway:
        size = recording.record(out, count, interval, gateway)
    say(f"{out}: {count} answers, {size} bytes")
