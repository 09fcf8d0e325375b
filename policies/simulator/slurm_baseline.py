"""Slurm without Cadenza on a trace: the simulated cluster and its scheduler, and no policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import msgspec

from cadenza.policies.core.model import Node
from cadenza.policies.gc_pause import uncollected
from cadenza.policies.inputs.queue_rules import Weights
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.run_values import Counts, Result, Setup
from cadenza.policies.simulator.world import World
from cadenza.policies.slurm.backfill import EASY, Backfill


def simulate_slurm(
    jobs: Sequence[TraceJob],
    nodes: Sequence[Node],
    setup: Setup,
    rules: Backfill | None = None,
    *,
    progress: Callable[[float, int], None] | None = None,
) -> Result:
    """Return the result of Slurm alone, with preemption off: what a site has without Cadenza.

    A job of up to a node's GPUs lies within one node; a wider one has an even part on each of the fewest nodes. All
    jobs are taken from their submission to their end, or to the setup's horizon. ``rules`` replace the setup's
    backfill. ``progress`` is called after each event with the simulated time in seconds and the jobs that have ended.
    Raise InputError for a job that can never run.
    """
    # Without Cadenza a host is one node: further lanes would count its GPUs twice.
    whole = tuple(node for node in nodes if node.lane == 0)
    plain = replace(setup, lanes=1, place=False, phased_moves=False, synergy=False, backfill=rules or setup.backfill)
    world, horizon_s = World(jobs, whole, plain), setup.horizon_s or inf
    with uncollected():
        while not world.over and (event_s := world.next_event_s) < horizon_s:
            world.advance(event_s)
            if progress is not None:
                progress(world.now_s, len(world.ended))
        if horizon_s < inf and not world.over:
            world.advance(horizon_s)
    return Result(
        jobs=world.results(),
        samples=tuple(world.samples),
        counts=Counts(),
        gpus=sum(node.gpus for node in whole),
        cpus=sum(node.cpus for node in whole),
        end_s=world.now_s,
        unfinished=tuple(sorted(world.live)),
    )


def first_come(jobs: Sequence[TraceJob], nodes: Sequence[Node], setup: Setup, rules: Backfill = EASY) -> Result:
    """Return the result of the same cluster in the order of submission: EASY, or with ``STRICT`` without backfill."""
    queue = msgspec.structs.replace(setup.queue, weights=Weights(), partitions={})
    plain = [replace(job, nice=0) if job.nice else job for job in jobs]
    return simulate_slurm(plain, nodes, replace(setup, queue=queue), rules)
