"""The simulator's prediction of both runs of a list, before any cluster is there (pure)."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from metrics import mean, percentile

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.state.settings import SharingOptions, SharingSettings
from cadenza.policies.simulator.run_values import Result, Setup
from cadenza.policies.simulator.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workload import Job

CLUSTER = "2x4:24:64"
MEMORY_GB = 1.5
STARTUP_S = 4.0
"""Seconds from a job's launch to its first step: Python's start and the import of PyTorch on a busy machine."""
SWITCHES = SimCosts(dispatch_s=0.5, yield_s=0.02, resume_s=0.02, restart_s=STARTUP_S, migrate_s=STARTUP_S)
"""Slurm launches a job within half a second; the models of the demo are small, and so are their checkpoints."""


def predict(
    jobs: Sequence[Job], *, lanes: int = 1, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, float]:
    """Return the figures of a run by their names: on plain Slurm, or in several lanes with Cadenza's ``settings``.

    The settings are those of ``cadenzad``'s file, by table.
    """
    trace = [
        TraceJob(
            id=number, submit_s=job.submit_s, gpus=job.gpus, work_s=job.work_s, user=job.user,
            iterations=job.iterations, startup_s=STARTUP_S, memory_gb_per_gpu=MEMORY_GB / job.gpus,
        )
        for number, job in enumerate(jobs)
    ]  # fmt: skip
    partitions = frozenset({PARTITION})
    if settings is None:
        order, share, turns = "fifo", "none", SharingSettings(partitions=partitions)
    else:
        order, share = settings["policy"]["order"], settings["policy"]["share"]
        known = {field.name for field in fields(SharingOptions)}
        own = {name: value for name, value in settings["sharing"].items() if name in known}
        turns = SharingSettings(enforce=True, partitions=partitions, **own)
    policy = build(order, "none", share, PolicySettings(partitions=partitions, sharing=turns))
    setup = Setup(round_s=1.0, rounds_on_events=True, lanes=lanes, costs=SWITCHES, place=False)
    return figures(jobs, simulate(trace, read_cluster(CLUSTER, lanes), policy, setup))


def figures(jobs: Sequence[Job], result: Result) -> dict[str, float]:
    """Return a simulation's figures under the names of those that are measured."""
    times = [job.jct_s or float("nan") for job in result.jobs]
    end_s = max(job.finish_s or float("nan") for job in result.jobs)
    makespan_s = end_s - min(job.submit_s for job in jobs)
    return {
        "time_to_100_s": mean([job.to_100_iterations_s or float("nan") for job in result.jobs]),
        "jct_mean_s": mean(times),
        "jct_p95_s": percentile(times, 0.95) or 0.0,
        "makespan_s": makespan_s,
        "iterations_per_s": sum(job.iterations for job in jobs) / makespan_s,
    }
