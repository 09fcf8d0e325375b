"""``cadenza move`` and ``release``: commands that change a job."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from cadenza.policies.core.actions import Action, Outcome
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.policies.sharing.turns.slurm_sync import release_plan
from cadenza.slurm_plugin.cli.common import JobId, config_option, emit, json_option, say
from cadenza.slurm_plugin.errors import NO_ROUND, StoreError
from cadenza.slurm_plugin.gateway.slurm_gateway import SlurmGateway, open_gateway
from cadenza.slurm_plugin.gateway.source_gateway import over_text
from cadenza.slurm_plugin.service.failover.lock import StoreLock
from cadenza.slurm_plugin.service.failover.release_round import adopted
from cadenza.slurm_plugin.service.move_requests import requested_move, write
from cadenza.slurm_plugin.service.settings import Settings, load_settings
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.schema import read_undo

MOVE_REASON = "requested by hand"
RELEASE_REASON = "released by hand"


# --- move ----------------------------------------------------------------------------------------------------


@click.command("move")
@click.argument("job_id", metavar="JOBID", type=JobId())
@click.option("--to", "nodes", required=True, metavar="NODE[,NODE…]", help="Slurm's names of the target nodes.")
@click.option("--gpus", type=click.IntRange(min=1), help="Resize: GPUs over all nodes, within the job's min and max.")
@json_option
@config_option
def move(*, job_id: int, nodes: str, gpus: int | None, as_json: bool, config: Path | None) -> None:
    """Ask the service to move a running job to other nodes, or to resize it.

    The job saves a checkpoint, is requeued and held, changed and released, and restores its state. The guard checks
    this move like any other action; `cadenza why JOBID` shows its progress.
    """
    store = Path(load_settings(config).service.store)
    with StoreReader(store) as reader:
        last = reader.round()
    if last is None:
        raise click.ClickException(NO_ROUND)
    request = requested_move(last.snapshot, job_id, tuple(filter(None, nodes.split(","))), gpus, MOVE_REASON)
    write(store, request)
    if as_json:
        emit("cadenza.move/1", request)
    else:
        say(f"job {request.job}: will move to {','.join(request.nodes)}; see `cadenza why {job_id}`")


# --- release -------------------------------------------------------------------------------------------------


@click.command("release")
@click.argument("job_id", metavar="[JOBID]", type=JobId(), required=False)
@click.option("--all", "everything", is_flag=True, help="Release all jobs and pause a service in apply mode.")
@json_option
@config_option
def release(*, job_id: int | None, everything: bool, as_json: bool, config: Path | None) -> None:
    """Undo Cadenza's holds, suspends, pins and SiteFactors in Slurm, bypassing the guard.

    Holds and suspends by users or admins stay. It is safe to run this twice. With --all, a running service in apply
    mode is paused first by its kill switch, because it would repeat these actions; the agents then also give back
    the CPUs and memory that jobs were tuned to. Remove the kill switch to let the service continue. A single
    released job may be suspended again at its next turn.
    """
    if everything == (job_id is not None):
        raise click.UsageError("name one job or give --all")

    # 1. Stop the service from repeating what is about to be undone.
    settings = load_settings(config)
    switch = Path(settings.expert.kill_switch)
    paused = everything and _pause(settings, switch)
    # 2. Undo.
    outcomes, unreadable = _release(settings, job_id)
    # 3. Report each action, and what a running service does from now on.
    if as_json:
        rows = [(type(action).__name__, *map(msgspec.to_builtins, (action, outcome))) for action, outcome in outcomes]
        emit("cadenza.release/1", [{"action": name, **action, **outcome} for name, action, outcome in rows])
    else:
        for action, outcome in outcomes:
            result = "done" if outcome.ok else f"failed: {outcome.error}"
            say(f"{type(action).__name__.lower()} job {_job_of(action)}: {result}")
        if not outcomes:
            say("Cadenza holds, suspends and orders no job")
    if paused:
        say(
            f"cadenzad is paused: {switch} keeps it from acting until you remove that file; at its next round, within "
            f"{settings.service.poll_s:g} s, jobs give back the CPUs and memory that they were tuned to",
            err=True,
        )
    elif settings.applies and not switch.exists():
        say(f"a running cadenzad continues to share GPUs; `touch {switch}` stops all its actions", err=True)
    if not all(outcome.ok for _, outcome in outcomes):
        raise SystemExit(1)
    if unreadable is not None:
        say(f"{unreadable}: SiteFactors of all jobs that opted in were set to 0, suspends may be left", err=True)
        raise SystemExit(3)


def _pause(settings: Settings, switch: Path) -> bool:
    """Set the kill switch if a running service would repeat the undone actions; return True if it did."""
    if not settings.applies or switch.exists() or StoreLock(Path(settings.service.store)).owner() is None:
        return False
    try:
        switch.touch()
    except OSError as error:
        raise click.ClickException(f"{switch}: {error.strerror}; stop cadenzad first, it would undo this") from None
    return True


def _release(settings: Settings, job_id: int | None) -> tuple[list[tuple[Action, Outcome]], StoreError | None]:
    """Undo all that is ours of one job or of all jobs; also return why the record of it cannot be read, if so.

    Without the record every job that opted in may have a SiteFactor of ours.
    """
    memory, unreadable = Memory(), None
    try:
        memory = read_undo(Path(settings.service.store))
    except StoreError as error:
        unreadable = error
    gateway: SlurmGateway = open_gateway(settings.service.gateway)
    try:
        try:
            snapshot = gateway.read()
        except EnvironmentLacks:  # what is ours must go also under a Slurm whose JSON is not read
            gateway.close()
            gateway = over_text()
            snapshot = gateway.read()
        memory = adopted(snapshot, settings.guard.partitions) if unreadable is not None else memory
        plan = release_plan(snapshot, memory, RELEASE_REASON, everything=True)
        chosen = [action for action in plan if job_id in (None, _job_of(action))]
        if job_id is not None and not chosen and unreadable is None:
            raise click.ClickException(f"job {job_id}: Cadenza neither holds nor suspends it, nor orders it")
        return [(action, gateway.apply(action)) for action in chosen], unreadable
    finally:
        gateway.close()


def _job_of(action: Action) -> int | None:
    key = getattr(action, "job", None)
    return None if key is None else int(key.id)
