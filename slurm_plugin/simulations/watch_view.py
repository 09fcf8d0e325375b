"""One look at a cluster with a user's rights: idle GPUs, waiting jobs, and what Cadenza would do (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from cadenza.policies.core.idle_gpus import HostGpus, fits, idle_waiting_gpus, narrowest_jobs
from cadenza.policies.core.model import SiteRules
from cadenza.policies.sharing.preemption.site_factor import powerless_reason
from cadenza.policies.simulator.figures import bounded_slowdown
from cadenza.slurm_plugin.history.cluster_nodes import Hosts
from cadenza.slurm_plugin.history.queue_answer import QueueJob
from cadenza.slurm_plugin.service.accounting.sharing_report import WidthRow, width_rows
from cadenza.slurm_plugin.service.accounting.usage import FirstStart
from cadenza.slurm_plugin.simulations.first_decision import Step, as_if_managed, hidden_gpus, shipped_settings, steps
from cadenza.slurm_plugin.simulations.watch_record import WatchRecord

ASSUMPTIONS = (
    "Slurm does not say which jobs could take part: all are taken to opt in and to keep checkpoints. Where none does, "
    "Cadenza changes nothing. A job fits where GPUs of its partitions and type, on nodes that meet its constraint, are "
    "idle; CPUs and memory are not considered, nor are tiers, QOS and fair share. The waiting tasks of an array count "
    "as one job."
)


class Look(NamedTuple):
    """Slurm's answers of one moment, seconds since the epoch."""

    at_s: float
    cluster: str
    private: str
    """Slurm's PrivateData."""
    hosts: Hosts
    jobs: tuple[QueueJob, ...]
    """Those in the partitions of the hosts, and on the hosts."""
    site: SiteRules = SiteRules(weights={"age": 1})
    notes: tuple[str, ...] = ()
    """Sentences on records that could not be read."""

    @property
    def free(self) -> list[HostGpus]:
        """Return the hosts with their idle GPUs; a host that takes no jobs has none."""
        return [
            HostGpus(
                node.gpus, node.gpus - node.gpus_used if node.takes_jobs else 0, node.partitions, node.gpu_type,
                node.name,
            )
            for node in self.hosts.nodes
        ]  # fmt: skip

    @property
    def idle_waiting(self) -> int:
        """Return the GPUs that are idle while a job waits that fits there."""
        waiting = ((job.wanted, job.record.gpus) for job in self.jobs if job.waits)
        return idle_waiting_gpus(self.free, narrowest_jobs(waiting))


def partitions_of(job: QueueJob) -> list[str]:
    """Return the partitions that a job may start in."""
    return job.record.partition.split(",")


class HostRow(msgspec.Struct, frozen=True):
    """One host: its GPUs, those that Slurm could give to a job now, and those of jobs that this user may not see."""

    name: str
    gpus: int
    idle: int
    hidden: int
    closed: str
    """Why it takes no jobs; empty if it does."""


class WaitingRow(msgspec.Struct, frozen=True):
    """A job that would start on free GPUs."""

    job: int
    user: str
    partition: str
    gpus: int
    waited_s: float
    reason: str
    fits: bool
    """As many GPUs as it needs are idle."""


class Totals(msgspec.Struct, frozen=True):
    """Sums since the watch began, seconds; of all jobs that this user may see."""

    since_s: float
    watched_s: float
    idle_gpu_s: float
    """GPUs idle while a job waited that fits."""
    waiting_job_s: float
    ended: int
    mean_bounded_slowdown: float | None
    widths: tuple[WidthRow, ...]
    dropped: int


class WatchView(msgspec.Struct, frozen=True):
    """The figures of one look."""

    at_s: float
    cluster: str
    gpus: int
    held_gpus: int
    idle_gpus: int
    idle_waiting_gpus: int
    hidden_gpus: int
    hosts: tuple[HostRow, ...]
    waiting: tuple[WaitingRow, ...]
    steps: tuple[Step, ...]
    """The policy's first decision, if all jobs keep checkpoints; if none does, it is empty."""
    totals: Totals
    notes: tuple[str, ...]


def view(look: Look, record: WatchRecord) -> WatchView:
    """Return the figures of a look, with the sums of a record that has it already."""
    nodes, free = look.hosts.nodes, look.free
    hidden = hidden_gpus(look.jobs, look.hosts)
    # 1. What Cadenza would do.
    snapshot = as_if_managed(look.jobs, look.hosts, hidden, look.at_s, look.site)
    decision = tuple(steps(snapshot, shipped_settings(nodes)))
    # 2. The jobs that wait, the longest wait first.
    waiting = []
    for job in sorted((job for job in look.jobs if job.waits), key=lambda job: (job.record.submit_s, job.record.job)):
        one = job.record
        waiting.append(
            WaitingRow(
                one.job, one.user, one.partition, one.gpus, max(look.at_s - one.submit_s, 0.0), job.reason,
                fits=fits(free, job.wanted, one.gpus, job.num_nodes),
            )
        )  # fmt: skip
    # 3. All of it.
    return WatchView(
        look.at_s, look.cluster, sum(node.gpus for node in nodes), sum(node.gpus_used for node in nodes),
        sum(host.idle for host in free), look.idle_waiting, sum(hidden.values()),
        tuple(
            HostRow(node.host, node.gpus, host.idle, hidden.get(node.host, 0), node.closed_reason)
            for node, host in zip(nodes, free, strict=True)
        ),
        tuple(waiting), decision, totals(record), tuple(_notes(look, sum(hidden.values()))),
    )  # fmt: skip


def totals(record: WatchRecord) -> Totals:
    """Return the sums of a record."""
    sums: defaultdict[str, float] = defaultdict(float)
    for hour in record.hours:
        for name in ("watched_s", "idle_gpu_s", "waiting_job_s"):
            sums[name] += getattr(hour, name)
    runs = [run.record for run in (*record.runs, *record.running)]
    jobs = [
        FirstStart(run.job, run.user, run.start_s, run.gpus, run.start_s - run.submit_s, run.end_s, slowdown)
        for run in runs
        if run.start_s is not None
        for slowdown in (
            [bounded_slowdown(run.end_s - run.submit_s, run.end_s - run.start_s - run.suspended_s)]
            if run.end_s is not None
            else [None]
        )
    ]
    slowdowns = [job.slowdown for job in jobs if job.slowdown is not None]
    return Totals(
        record.since_s, sums["watched_s"], sums["idle_gpu_s"], sums["waiting_job_s"], len(record.runs),
        fmean(slowdowns) if slowdowns else None, width_rows(jobs, record.since_s, record.at_s), record.dropped,
    )  # fmt: skip


def _notes(look: Look, hidden: int) -> Iterator[str]:
    """Yield sentences on the limits of a user's sight."""
    private = "jobs" in look.private.lower().split(",") or "all" in look.private.lower().split(",")
    if private or hidden:
        cause = f"Slurm's PrivateData = {look.private} may hide" if private else "Slurm hides"
        yield (
            f"{cause} jobs of other users: {hidden} of the GPUs in use are theirs. Their waiting jobs are not counted, "
            "so that the idle GPUs while a job waits, and all waits, are those of the jobs that you see."
        )
    yield from look.notes
    if odd := sum(job.odd_constraint for job in look.jobs if job.waits):
        yield f"{odd} waiting jobs have a constraint that binds several nodes together: it is left out."
    if reason := powerless_reason(look.site):
        yield f"Each waiting job {reason}."
    yield ASSUMPTIONS


def remarks(sums: Totals, notes: Sequence[str]) -> tuple[str, ...]:
    """Return the sentences of the page on what was watched."""
    hours, idle_h, waiting_h = (value / 3600.0 for value in (sums.watched_s, sums.idle_gpu_s, sums.waiting_job_s))
    lost = f" The oldest {sums.dropped:,} runs are no longer kept." if sums.dropped else ""
    watched = (
        f"Watched for {hours:,.1f} hours: {idle_h:,.1f} GPU hours, {idle_h / max(hours, 1e-9):.1f} GPUs on average, "
        f"were idle while a job waited that fits, and jobs waited for {waiting_h:,.1f} hours in all. The runs below "
        f"are those that ended in that time.{lost}"
    )
    return watched, *(note for note in notes if note != ASSUMPTIONS)
