"""Waits of a period's jobs next to those of the same submissions in a simulation of Slurm alone (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from cadenza.policies.core.model import Node, SiteRules
from cadenza.policies.inputs.queue_rules import AGE_ALONE, NAMES, Qos, QueueRules, Tier, Weights
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.figures import WIDTHS
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.slurm_baseline import simulate_slurm
from cadenza.slurm_plugin.service.accounting.sharing_report import Replay, ReplayRow
from cadenza.slurm_plugin.service.accounting.usage import FirstStart

MAX_JOBS = 5_000
"""More jobs would take minutes; ``cadenza whatif`` takes them, next to each other."""
SHORTEST_S = 1.0


class Cluster(NamedTuple):
    """Slurm's nodes and rules as of the last round on record."""

    nodes: Sequence[Node]
    site: SiteRules


def replayed(jobs: Sequence[FirstStart], cluster: Cluster, since_s: float, until_s: float) -> Replay:
    """Return the waits of the jobs that ended in a period, and those that Slurm alone would have given them.

    All jobs of the period are submitted to an empty cluster when they really were; one that had started before it
    comes with its start. Each works for as long as it had its GPUs. CPUs and memory are those of its GPUs.
    """
    traced = _traced(jobs, cluster.nodes, since_s, until_s)
    if len(traced) > MAX_JOBS or not traced:
        return Replay((), len(traced), max(len(jobs) - len(traced), 0))
    nodes = [_empty(node) for node in cluster.nodes if node.lane == 0 and node.gpus]
    result = simulate_slurm(traced, nodes, Setup(queue=queue_rules(cluster.site), place=False))
    submitted = {job.id: job.submit_s for job in traced}
    waits = {one.id: one.start_s - submitted[one.id] for one in result.jobs if one.start_s is not None}
    ended = [job for job in jobs if job.job in waits and job.at_s >= since_s and (job.ended_s or 0.0) > since_s]
    return Replay(tuple(_rows(ended, waits)), len(traced), len(jobs) - len(traced))


def queue_rules(site: SiteRules) -> QueueRules:
    """Return the rules that the service reads from Slurm; shares of accounts and limits are not among them."""
    weights = {name: float(site.weights.get(name, 0)) for name in NAMES} if site.multifactor else {}
    if not any(weights.values()):
        weights = dict(AGE_ALONE)
    return QueueRules(
        weights=Weights(**weights), max_age_s=max(site.max_age_s, 1.0),
        partitions={name: Tier(tier) for name, tier in site.tiers.items()},
        qos={name: Qos(priority) for name, priority in site.qos_priority.items()},
    )  # fmt: skip


def _traced(jobs: Iterable[FirstStart], nodes: Iterable[Node], since_s: float, until_s: float) -> list[TraceJob]:
    """Return the jobs that these nodes can hold, with times since the first of them."""
    gpus: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        for name in node.partitions if node.lane == 0 else ():
            for gpu_type in {"", node.gpu_type}:
                gpus[name, gpu_type] += node.gpus
    fitting = [job for job in jobs if 0 < job.gpus <= gpus[job.partition, job.gpu_type]]
    begin = {job.job: job.at_s - (job.wait_s if job.at_s >= since_s else 0.0) for job in fitting}
    first_s = min(begin.values(), default=0.0)
    return [
        TraceJob(
            id=job.job, submit_s=begin[job.job] - first_s, gpus=job.gpus, user=job.user, account=job.account,
            # Of one that still runs, the time since its start is known.
            work_s=max(until_s - job.at_s if job.held_s is None else job.held_s, SHORTEST_S),
            qos=job.qos, partition=job.partition, gpu_type=job.gpu_type, time_limit_s=job.limit_s,
        )
        for job in fitting
    ]  # fmt: skip


def _empty(node: Node) -> Node:
    return replace(node, up=True, asleep=False, drained=False, cpus_used=0, memory_used_mb=0, gpus_used=0, ending_s=0.0)


def _rows(jobs: Sequence[FirstStart], slurm: Mapping[int, float]) -> Iterable[ReplayRow]:
    """Yield the means of all jobs, of those that opted in and of the others, and by number of GPUs."""
    groups = [
        ("all", jobs),
        ("opted in", [job for job in jobs if job.managed]),
        ("did not opt in", [job for job in jobs if not job.managed]),
        *((width.name, [job for job in jobs if width.holds(job.gpus)]) for width in WIDTHS),
    ]
    for name, mine in groups:
        if mine:
            waited_s = fmean(job.wait_s if job.waited_s is None else job.waited_s for job in mine)
            yield ReplayRow(name, len(mine), waited_s, fmean(slurm[job.job] for job in mine))
