"""``cadenza doctor`` and ``record``: check a site, record its Slurm."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import config_option, emit, json_option, say
from cadenza.slurm_plugin.cli.site import checks
from cadenza.slurm_plugin.cli.site.checks import Finding, failed

COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@click.command("doctor")
@click.option("--gpu", is_flag=True, help="Check this machine's GPUs, driver and site scripts instead, on a GPU host.")
@click.option(
    "--python",
    default=sys.executable,
    metavar="PATH",
    help="With --gpu: a Python that has the torch of jobs, for the trial of the offload engine.",
)
@click.option("--ranks", is_flag=True, help="With --gpu: try jobs of several ranks, too; takes minutes.")
@json_option
@config_option
def doctor(*, gpu: bool, python: str, ranks: bool, as_json: bool, config: Path | None) -> None:
    """Check this site: versions, lanes, partitions, keys, agents.

    Run it on the machine of cadenzad, and with --gpu on each GPU host. It changes nothing but the record of two trials
    with --gpu, for which root is needed: on a free GPU the driver checkpoints a process of its own, and the offload
    engine moves another's state out and back. The exit code is 1 if a problem keeps Cadenza from working.
    """
    from cadenza.slurm_plugin.cli.site.facts import gather  # noqa: PLC0415

    if ranks and not gpu:
        raise click.UsageError("--ranks needs --gpu")
    if gpu:
        from cadenza.sidecar.agent_settings import load_settings  # noqa: PLC0415
        from cadenza.slurm_plugin.cli.site.node_gpus import examine_gpus, gather_gpus, try_gpu  # noqa: PLC0415
        from cadenza.slurm_plugin.cli.site.node_scripts import examine_scripts, gather_scripts  # noqa: PLC0415
        from cadenza.slurm_plugin.cli.site.rank_rows import try_ranks  # noqa: PLC0415

        settings = load_settings(config)
        gpus = examine_gpus(try_gpu(gather_gpus(), Path(settings.state_dir), python), settings.driver_checkpoint)
        findings = (*gpus, *examine_scripts(gather_scripts()), *(try_ranks(python) if ranks else ()))
    else:
        findings = checks.examine(gather(config))
    show(findings, as_json=as_json)
    if failed(findings):
        raise SystemExit(1)


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print findings, each with its advice."""
    if as_json:
        emit(findings)
        return
    for finding in findings:
        level = click.style(f"{finding.level:4}", COLORS[finding.level])
        click.echo(f"{level} ", nl=False)
        say(f"{finding.about}: {finding.observation}")
        if finding.advice and finding.level != "OK":
            say(f"       -> {finding.advice}")


@click.command("record")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File to append to.")
@click.option("--count", default=1, show_default=True, type=click.IntRange(min=1), help="Number of reads.")
@click.option("--interval", default=15.0, show_default=True, type=click.FloatRange(0), help="Seconds between reads.")
def record(*, out: Path, count: int, interval: float) -> None:
    """Record this cluster's jobs and nodes for tests and bug reports.

    The file contains names of users and jobs, and comments: review it before you share it.
    """
    from cadenza.slurm_plugin.cli.site import recording  # noqa: PLC0415
    from cadenza.slurm_plugin.gateway.source_gateway import automatic  # noqa: PLC0415

    with automatic() as gateway:
        size = recording.record(out, count, interval, gateway)
    say(f"{out}: {count} answers, {size} bytes")
