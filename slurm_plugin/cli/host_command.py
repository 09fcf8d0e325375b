"""``cadenza host``: hosts that an admin empties for a while, by Slurm's own drain, reservation and reboot."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import click

from cadenza.policies.core.model import ClusterSnapshot, Job, Node
from cadenza.policies.relocation.phases import refusal_reason
from cadenza.policies.sharing.migration.leave_host import ends_s
from cadenza.sidecar.clock import local, now, sleep
from cadenza.slurm_plugin.cli.common import TIME_AGO, UNITS_S, config_option, moment, say
from cadenza.slurm_plugin.errors import NO_ROUND
from cadenza.slurm_plugin.gateway.commands import command as run
from cadenza.slurm_plugin.gateway.json_source import SlurmCommands
from cadenza.slurm_plugin.gateway.translate import EMPTIES, RESERVES, nodes
from cadenza.slurm_plugin.service.settings import Settings, load_settings
from cadenza.slurm_plugin.service.store.reader import StoreReader

WAIT_S = 2.0
"""Time between two looks at the further lanes of a host that is to be rebooted."""


class Step(NamedTuple):
    """One command of Slurm's, and the host that it is about."""

    host: str
    words: tuple[str, ...]
    lanes: tuple[str, ...] = ()
    """Nodes that must be without jobs before."""


@click.command("host")
@click.argument("action", type=click.Choice(["drain", "undrain", "maintenance", "reboot"]))
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option("--reason", metavar="TEXT", help="Reason, as Slurm shows it; all but undrain need one.")
@click.option("--during", metavar="[DATE/]TIME", help="Time of a maintenance: 4h, or 2026-12-01T08:00/4h.")
@click.option("--dry-run", is_flag=True, help="Print Slurm's commands and what becomes of the jobs; change nothing.")
@config_option
def command(
    *, action: str, hosts: tuple[str, ...], reason: str | None, during: str | None, dry_run: bool, config: Path | None
) -> None:
    """Empty hosts for a while, or give them back.

    \b
    drain        Slurm starts nothing more there
    maintenance  reserves all lanes of the hosts, from now or DATE on
    reboot       drains, and reboots each host once its further lanes are empty
    undrain      takes back what the other three have set, and nothing else

    Jobs that keep checkpoints save, are requeued and start elsewhere: at once, or in the ten minutes before a
    maintenance. The others are named, with the time by which their limit ends them.
    """  # noqa: D301 (click's mark)
    if action != "undrain" and not (reason or "").strip():
        raise click.UsageError(f"{action} needs a --reason")
    if (action == "maintenance") != (during is not None):
        raise click.UsageError("maintenance needs a time, --during; nothing else has one")

    # 1. The hosts as Slurm shows them now.
    settings, slurm = load_settings(config), SlurmCommands()
    lanes = lanes_of(slurm, hosts)
    # 2. Slurm's commands.
    begins_s, minutes = _window(during) if during else (0.0, 0)
    if action == "drain":
        steps = [_drain(host, nodes, str(reason)) for host, nodes in lanes.items()]
    elif action == "reboot":
        steps = [step for host, nodes in lanes.items() for step in _reboot(host, nodes, str(reason))]
        steps.sort(key=lambda step: bool(step.lanes))  # no host waits for another one before it is drained
    elif action == "maintenance":
        steps = [_reserve(host, nodes, (begins_s, minutes), str(reason)) for host, nodes in lanes.items()]
    else:
        steps = [step for host, nodes in lanes.items() for step in _give_back(host, nodes[0], slurm)]
    # 3. What becomes of the jobs there, before anything is changed.
    if action != "undrain":
        say(*fates(settings, lanes, begins_s))
    # 4. The change itself.
    for step in steps:
        if dry_run:
            say(shlex.join(step.words))
        else:
            _carry_out(step)


def lanes_of(slurm: SlurmCommands, hosts: Sequence[str]) -> dict[str, list[Node]]:
    """Return the nodes of each host, lane 0 first; raise ClickException for a host that Slurm does not know."""
    found = nodes([slurm.node_fields(node) for node in slurm.nodes()])
    lanes = {host: sorted((n for n in found if n.host == host), key=lambda node: node.lane) for host in hosts}
    if unknown := [host for host, there in lanes.items() if not there or there[0].lane]:
        raise click.ClickException(f"{', '.join(unknown)}: Slurm knows no such host")
    return lanes


# --- Slurm's commands --------------------------------------------------------------------------------------


def _drain(host: str, nodes: list[Node], reason: str) -> Step:
    """Return the drain of lane 0; the service drains the host's further lanes for it."""
    if nodes[0].drained and not nodes[0].drain_reason.startswith(EMPTIES):
        raise click.ClickException(f"{nodes[0].name} is drained already, by another hand: {nodes[0].drain_reason}")
    return Step(host, ("scontrol", "update", f"NodeName={nodes[0].name}", "State=DRAIN", f"Reason={EMPTIES}{reason}"))


def _reboot(host: str, nodes: list[Node], reason: str) -> list[Step]:
    """Return the drain and the reboot: Slurm reboots as soon as lane 0 is idle, under jobs of other lanes."""
    words = ("scontrol", "reboot", "ASAP", "nextstate=RESUME", f"reason={EMPTIES}{reason}", nodes[0].name)
    return [_drain(host, nodes, reason), Step(host, words, tuple(node.name for node in nodes[1:]))]


def _window(text: str) -> tuple[float, int]:
    """Return the begin of a maintenance in seconds since the epoch, 0: now, and its length in minutes."""
    date, _, span = text.rpartition("/")
    length = TIME_AGO.fullmatch(span)
    if length is None:
        raise click.BadParameter(f"{span!r}: give 90m, 4h or 2d", param_hint="--during")
    minutes = max(round(float(length[1]) * UNITS_S[length[2]] / 60), 1)
    return (moment(date, now(), "--during") if date else 0.0), minutes


def _reserve(host: str, nodes: list[Node], window: tuple[float, int], reason: str) -> Step:
    """Return the reservation of all lanes: Slurm starts jobs on those that it does not name."""
    begins_s, minutes = window
    begin = datetime.fromtimestamp(begins_s).strftime("%Y-%m-%dT%H:%M:%S") if begins_s else "now"  # noqa: DTZ006 (Slurm's)
    names = ",".join(node.name for node in nodes)
    # Slurm refuses a reservation over running jobs, unless it is told to ignore them (scontrol(1), IGNORE_JOBS).
    words = (f"StartTime={begin}", f"Duration={minutes}", "Users=root", "Flags=MAINT,IGNORE_JOBS", f"Nodes={names}")
    name = f"ReservationName={RESERVES}{host}"
    return Step(host, ("scontrol", "create", "reservation", name, *words, f"Comment={reason}"))


def _give_back(host: str, first: Node, slurm: SlurmCommands) -> Iterable[Step]:
    """Yield the steps that undo our reservation, reboot and drain; a drain of others stays, and is named."""
    name = f"{RESERVES}{host}"
    if any(one["name"] == name for one in slurm.reservations()):
        yield Step(host, ("scontrol", "delete", f"ReservationName={name}"))
    if first.drained and first.drain_reason.startswith(EMPTIES):
        if "REBOOT_REQUESTED" in slurm.node(first.name).state:
            yield Step(host, ("scontrol", "cancel_reboot", first.name))
        yield Step(host, ("scontrol", "update", f"NodeName={first.name}", "State=UNDRAIN"))
    elif first.drained:
        say(f"{first.name} stays drained, by another hand: {first.drain_reason}")


def _carry_out(step: Step) -> None:
    """Wait until the step's lanes are empty, carry it out, and say so."""
    told = ""
    while step.lanes:
        left = ",".join(run("squeue", "--noheader", f"--nodelist={','.join(step.lanes)}", "--format=%i").split())
        if not left:
            break
        if left != told:
            say(f"{step.host}: waits for {left} on its further lanes")
            told = left
        sleep(WAIT_S)
    run(*step.words)
    say(f"{step.host}: {shlex.join(step.words)}")


# --- Jobs --------------------------------------------------------------------------------------------------


def fates(settings: Settings, lanes: dict[str, list[Node]], begins_s: float) -> Iterable[str]:
    """Yield a line on each job of the hosts, by the service's last round."""
    with StoreReader(Path(settings.service.store)) as reader:
        last = reader.round()
    if last is None:
        raise click.ClickException(NO_ROUND)
    age_s = now() - last.at_s
    moves = settings.applies and age_s <= settings.trust_s
    if not settings.applies:
        yield 'the mode is "observe": no job leaves before it ends'
    elif not moves:
        yield f"the last round was {age_s:.0f} s ago: until cadenzad runs no job leaves, and no further lane is drained"
    names = {node.name for nodes in lanes.values() for node in nodes}
    for job in last.snapshot.jobs:
        if not names.isdisjoint(job.nodes):
            yield f"job {job.key.id} ({job.user}, {job.name}) on {','.join(job.nodes)}: " + fate(
                job, last.snapshot, settings, begins_s, moves=moves
            )


def fate(job: Job, snapshot: ClusterSnapshot, settings: Settings, begins_s: float, *, moves: bool) -> str:
    """Return whether a job leaves, and until when and why it stays otherwise."""
    end_s = ends_s(job, snapshot.time_s)
    limit = f"until {local(end_s)} at the latest" if job.time_limit_s is not None else "without a time limit"
    lease = job.lease
    if end_s <= begins_s:
        return f"ends before, {limit}"
    why = "" if moves else "no job leaves now"
    if not job.opted_in or job.partition not in settings.guard.partitions:
        why = job.unmanageable or "it did not opt in"
    elif lease is None:
        why = "no agent knows it"
    elif reason := refusal_reason(job, by_hand=True):
        why = reason
    elif not lease.checkpoints:
        why = lease.why_not_ready or "it saves no checkpoints (client.checkpoint)"
    return f"stays, {limit}: {why}" if why else "saves and leaves"
