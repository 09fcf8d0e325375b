"""``cadenza release``: undoes what Cadenza holds and suspends in Slurm, past the guard; for good with ``--all``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from cadenza.slurm_plugin.cli.common import config_option, emit, json_option

if TYPE_CHECKING:
    from cadenza.policies.core.actions import Action, Outcome
    from cadenza.policies.core.decision import Memory
    from cadenza.slurm_plugin.service.settings import Settings

REASON = "released by hand"


@click.command("release")
@click.argument("job_id", metavar="[JOBID]", type=click.IntRange(min=1), required=False)
@click.option("--all", "everything", is_flag=True, help="Release all jobs, and pause a service that acts.")
@json_option
@config_option
def command(*, job_id: int | None, everything: bool, as_json: bool, config: Path | None) -> None:
    """Undo the holds and suspends that are Cadenza's, past the guard.

    What users or admins held or suspended stays as it is. Doing it twice does no harm. With --all, a running
    service that acts is paused first, by its kill switch: it would do all of that again. That also has the agents
    give back the CPUs and memory that jobs are tuned to. Remove the kill switch to let it go on. A single job
    that is released may be suspended again at its next turn.
    """
    if everything == (job_id is not None):
        raise click.UsageError("name one job, or say --all")
    from cadenza.slurm_plugin.service.settings import load_settings  # noqa: PLC0415

    settings = load_settings(config)
    paused = everything and _pause(settings)
    outcomes = _release(settings, job_id)
    if as_json:
        emit([_row(action, outcome) for action, outcome in outcomes])
    else:
        _tell(outcomes)
    _warn(settings, paused=paused)
    if not all(outcome.ok for _, outcome in outcomes):
        raise SystemExit(1)


def _pause(settings: Settings) -> bool:
    """Set the kill switch if a service is there that would do everything again; return whether that was so."""
    from cadenza.slurm_plugin.service.failover.lock import StoreLock  # noqa: PLC0415

    switch = Path(settings.guard.kill_switch)
    if not settings.applies or switch.exists() or StoreLock(Path(settings.service.store)).owner() is None:
        return False
    try:
        switch.touch()
    except OSError as error:
        raise click.ClickException(f"{switch}: {error.strerror}; stop cadenzad first, it would undo this") from None
    return True


def _release(settings: Settings, job_id: int | None) -> list[tuple[Action, Outcome]]:
    from cadenza.slurm_plugin.gateway.slurm_gateway import open_gateway  # noqa: PLC0415
    from cadenza.slurm_plugin.service.failover.release_round import release_plan  # noqa: PLC0415

    gateway = open_gateway(settings.service.gateway)
    try:
        plan = release_plan(gateway.read(), _memory(settings), REASON)
        wanted = [action for action in plan if job_id in (None, _job_of(action))]
        if job_id is not None and not wanted:
            raise click.ClickException(f"job {job_id}: Cadenza neither holds nor suspends it")
        return [(action, gateway.apply(action)) for action in wanted]
    finally:
        gateway.close()


def _memory(settings: Settings) -> Memory:
    """Return what the last round remembers; it alone says which suspends are ours."""
    from cadenza.policies.core.decision import Memory  # noqa: PLC0415
    from cadenza.slurm_plugin.service.store.reader import StoreReader  # noqa: PLC0415

    with StoreReader(Path(settings.service.store)) as reader:
        last = reader.round()
    return last.memory if last else Memory()


def _job_of(action: Action) -> int | None:
    key = getattr(action, "job", None)
    return None if key is None else int(key.id)


def _row(action: Action, outcome: Outcome) -> dict[str, object]:
    return {"action": type(action).__name__, **msgspec.to_builtins(action), **msgspec.to_builtins(outcome)}


def _tell(outcomes: list[tuple[Action, Outcome]]) -> None:
    for action, outcome in outcomes:
        word = "done" if outcome.ok else f"failed: {outcome.error}"
        click.echo(f"{type(action).__name__.lower()} job {_job_of(action)}: {word}")
    if not outcomes:
        click.echo("nothing is held or suspended by Cadenza")


def _warn(settings: Settings, *, paused: bool) -> None:
    """Say what a running service does from now on."""
    switch = settings.guard.kill_switch
    if paused:
        click.echo(
            f"cadenzad is paused: {switch} keeps it from acting until you remove that file; jobs give back the "
            f"CPUs and memory that they were tuned to at its next round, within {settings.service.poll_s:g} s",
            err=True,
        )
    elif settings.applies and not Path(switch).exists():
        click.echo(f"a running cadenzad goes on sharing; `touch {switch}` stops all its actions", err=True)
