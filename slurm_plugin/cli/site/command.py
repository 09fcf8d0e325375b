"""``cadenza doctor``: check a site, and write what a bug report needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from cadenza.policies.core.errors import CadenzaError
from cadenza.policies.core.text import printable
from cadenza.sidecar.agent_settings import AgentSettings, load_settings
from cadenza.sidecar.config import DEFAULT_PATH, ConfigError
from cadenza.slurm_plugin.cli.common import MAX_LINE, config_option, console, emit, json_option, say
from cadenza.slurm_plugin.cli.site.config_command import rows
from cadenza.slurm_plugin.gateway.source_gateway import automatic
from cadenza.slurm_plugin.site import checks
from cadenza.slurm_plugin.site.checks import Finding, failed
from cadenza.slurm_plugin.site.facts import gather
from cadenza.slurm_plugin.site.node_gpus import examine_gpus, gather_gpus, try_gpu
from cadenza.slurm_plugin.site.node_scripts import examine_scripts, gather_scripts
from cadenza.slurm_plugin.site.rank_rows import try_ranks
from cadenza.slurm_plugin.site.upgrade_check import upgrade

COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
NEEDS = (("FAIL", "problem"), ("WARN", "warning"))


def _release(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Return a release of Slurm, such as 26.05, as its two numbers."""
    if value is None or re.fullmatch(r"\d\d\.(05|11)", value):
        return None if value is None else (int(value[:2]), int(value[3:]))
    raise click.BadParameter(f"{value!r} is no release such as 26.05", ctx, param)


@click.command("doctor")
@click.option("--gpu", is_flag=True, help="Check this machine's GPUs, driver and site scripts instead, on a GPU host.")
@click.option(
    "--python",
    default=sys.executable,
    metavar="PATH",
    help="With --gpu: a Python that has the torch of jobs, for the trial of the offload engine.",
)
@click.option("--ranks", is_flag=True, help="With --gpu: try jobs of several ranks, too; takes minutes.")
@click.option("--to", metavar="RELEASE", callback=_release, help="Check what an upgrade of Slurm would meet: 26.05.")
@click.option("--save", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write findings, settings, and Slurm's jobs and nodes for a bug report, too.")  # fmt: skip
@json_option
@config_option
def doctor(  # noqa: PLR0913 - an argument for each option
    *, gpu: bool, python: str, ranks: bool, to: tuple[int, int] | None, save: Path | None, as_json: bool,
    config: Path | None,
) -> None:  # fmt: skip
    """Check this site: versions, lanes, partitions, keys, agents.

    Run it on the machine of cadenzad, and with --gpu on each GPU host. It changes nothing but the record of two trials
    with --gpu, for which root is needed: on a free GPU the driver checkpoints a process of its own, and the offload
    engine moves another's state out and back. The exit code is 1 if a problem keeps Cadenza from working. The file of
    --save has names of users and jobs, and comments: read it before you send it.
    """
    if ranks and not gpu:
        raise click.UsageError("--ranks needs --gpu")
    if to is not None:
        findings: tuple[Finding, ...] = tuple(upgrade(gather(config), to))
    elif gpu:
        path = config or DEFAULT_PATH
        settings = load_settings(path) if config or path.exists() else AgentSettings()
        facts = try_gpu(gather_gpus(), Path(settings.expert.state_dir), python)
        gpus = examine_gpus(facts, settings.agent.driver_checkpoint)
        findings = (*gpus, *examine_scripts(gather_scripts()), *(try_ranks(python) if ranks else ()))
    else:
        findings = checks.examine(gather(config))
    if save is not None:
        save.write_bytes(msgspec.json.encode({"findings": findings, **answers(config)}) + b"\n")
    show(findings, as_json=as_json)
    if save is not None:
        say(f"written: {save}", err=True)
    if failed(findings):
        raise SystemExit(1)


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print findings, each with its advice, and how many need one."""
    if as_json:
        emit("cadenza.doctor/1", findings)
        return
    from rich.text import Text  # noqa: PLC0415 (slow, and not needed for JSON)

    out = console()
    for finding in findings:
        level = (f"{finding.level:4} ", COLORS[finding.level])
        seen = printable(f"{finding.about}: {finding.observation}", MAX_LINE)
        out.print(Text.assemble(level, seen), soft_wrap=True)
        if finding.advice and finding.level != "OK":
            out.print(printable(f"       -> {finding.advice}", MAX_LINE), soft_wrap=True)
    counts = ((sum(one.level == level for one in findings), name) for level, name in NEEDS)
    out.print(", ".join(f"{number} {name}{'' if number == 1 else 's'}" for number, name in counts))


def answers(config: Path | None) -> dict[str, Any]:
    """Return the settings, and Slurm's jobs and nodes as they are read, each or why it is not known."""
    found: dict[str, Any] = {}
    try:
        found["settings"] = list(rows(config))
    except ConfigError as error:
        found["settings"] = str(error)
    try:
        with automatic() as gateway:
            found["slurm"] = gateway.read_raw()
    except CadenzaError as error:
        found["slurm"] = str(error)
    return found
