"""``cadenza move``: has the service move or resize a running job by checkpoint and requeue."""

from __future__ import annotations

from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import config_option, emit, json_option

REASON = "asked for by hand"


@click.command("move")
@click.argument("job_id", metavar="JOBID", type=click.IntRange(min=1))
@click.option("--to", "nodes", required=True, metavar="NODE[,NODE…]", help="Slurm's names of the nodes to go to.")
@click.option("--gpus", type=click.IntRange(min=1), help="Resize: GPUs over all nodes, within the job's min and max.")
@json_option
@config_option
def command(*, job_id: int, nodes: str, gpus: int | None, as_json: bool, config: Path | None) -> None:
    """Have the service move a running job to other nodes, or resize it.

    The job saves a checkpoint, is requeued into a hold, changed and released, and restores. The guard judges this
    like any other action; `cadenza why JOBID` tells how it goes.
    """
    from cadenza.slurm_plugin.service.move_requests import wish, write  # noqa: PLC0415
    from cadenza.slurm_plugin.service.settings import load_settings  # noqa: PLC0415
    from cadenza.slurm_plugin.service.store.reader import StoreReader  # noqa: PLC0415

    store = Path(load_settings(config).service.store)
    with StoreReader(store) as reader:
        last = reader.round()
    if last is None:
        raise click.ClickException("no round is on record yet: is cadenzad running?")
    move = wish(last.snapshot, job_id, tuple(filter(None, nodes.split(","))), gpus, REASON)
    write(store, move)
    if as_json:
        emit(move)
    else:
        click.echo(f"job {move.job}: goes to {','.join(move.nodes)}; see `cadenza why {job_id}`")
