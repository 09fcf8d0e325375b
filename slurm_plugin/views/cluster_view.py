"""Contents of ``cadenza top`` as plain data, computed from the last recorded round."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from cadenza.policies.core.idle_gpus import HostGpus, Wanted, fits, free_gpus, waits_for_gpus
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Job, JobKey, JobUsage, Lease, Placement
from cadenza.policies.sharing.state.settings import held_for_us
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.service.accounting.effects import Effect
from cadenza.slurm_plugin.service.owner_socket import Remote, ask_latest
from cadenza.slurm_plugin.service.settings import Settings, from_record
from cadenza.slurm_plugin.service.store.reader import ActionRow, Round, StoreReader, SwitchRow, host_faults

STALE_AFTER_S = 30.0
"""Age of the last round from which it says that none followed."""
STOPPED = "the kill switch is set"
"""Begin of the fault that says so."""
SWITCHES_SINCE_S = 60.0
MAX_ACTIONS = 2000
MAX_EFFECTS = 8
NO_LEASE = Lease("waiting", ())


class Agent(msgspec.Struct, frozen=True):
    """Agent of one host; memory in MB."""

    host: str
    alive: bool
    version: str
    memory_mb: int
    memory_free_mb: int


class JobRow(msgspec.Struct, frozen=True):
    """One job; times in seconds. ``lease`` is "" until an agent knows the job."""

    id: int
    restart: int
    name: str
    user: str
    slurm_state: str
    lease: str
    managed: bool
    nodes: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    gpus_wanted: int
    lane: int | None
    ready: bool
    why_not_ready: str
    step: int
    iteration_s: float | None
    held_s: float
    vtime_s: float
    share: float | None
    """Fraction of the weighted GPU time of all jobs on its GPUs; None before the first."""
    last_action: str
    last_action_at_s: float | None
    reason: str
    use: JobUsage | None = None
    """Recent measurements by its hosts."""
    requeue_owner: str = ""
    """Library that requeues the job by itself, such as *lightning*."""
    placement: Placement = ()
    """Resources on each of its nodes: as tuned, otherwise as Slurm allocated them."""
    account: str = ""


class GpuRow(msgspec.Struct, frozen=True):
    """One GPU: its holder and the waiting jobs in the order of their turns."""

    host: str
    index: int
    holder: int | None
    waiting: tuple[int, ...]
    others: bool = False
    """True if a job of another user holds it, of which this user may see no more than its number."""


class TopView(msgspec.Struct, frozen=True):
    """One moment of the cluster. Before the first round ``round`` is 0 and the rest is empty."""

    at_s: float
    age_s: float
    round: int
    mode: str
    slice_s: float
    policy: str = ""
    """Ordering, allocation and sharing."""
    agents: tuple[Agent, ...] = ()
    faults: tuple[str, ...] = ()
    """Faults of the service and the hosts, each as a sentence."""
    gpus: tuple[GpuRow, ...] = ()
    jobs: tuple[JobRow, ...] = ()
    yields: int = 0
    """Finished yields in the last minute on record."""
    yield_p50_s: float | None = None
    yield_p99_s: float | None = None
    effects: tuple[Effect, ...] = ()
    """Effects of the last decisions on iteration times, newest first."""
    idle_gpus: int = 0
    """GPUs that no job may use now."""
    waiting_that_fit: tuple[int, ...] = ()
    """Jobs that wait, in the queue or for a turn, and whose number of GPUs is idle on a host."""
    managed_jobs: int = 0
    movable_jobs: int = 0
    """Managed jobs with a lease, and those of them that keep checkpoints, so that they can move."""
    closed: tuple[str, ...] = ()
    """Lanes that take no jobs although their host is up, each with the reason."""


class Recent(NamedTuple):
    """Recent rows of the store, newest first."""

    actions: Sequence[ActionRow] = ()
    switches: Sequence[SwitchRow] = ()
    effects: Sequence[Effect] = ()
    faults: Sequence[str] = ()
    """Faults of the store's file system, and the kill switch."""
    hosts: Sequence[HostGpus] | None = None
    """Idle GPUs where the round has a user's own jobs only; None: the round has all."""
    others: Mapping[Gpu, int] = MappingProxyType({})
    """GPUs that other users' jobs hold, with the job, or 0."""


def look(source: StoreReader | Path | Remote) -> TopView:
    """Return the current view of a store, or of the user's own jobs from the service."""
    now_s = SystemClock().now()
    if not isinstance(source, StoreReader):
        latest = ask_latest(source, now_s - SWITCHES_SINCE_S)
        last, effects = latest.round(), latest.effects[:MAX_EFFECTS]
        rows = (latest.actions, latest.switches, effects, kill_switch(last))
        return build(last, Recent(*rows, latest.hosts, dict(latest.others)), now_s)
    return view_of(source, source.round(), now_s)


def view_of(reader: StoreReader, last: Round | None, now_s: float) -> TopView:
    """Return the view of the last round of a store."""
    switches, effects = reader.switches(since_s=now_s - SWITCHES_SINCE_S), reader.effects(limit=MAX_EFFECTS)
    faults = (*kill_switch(last), *reader.faults())
    return build(last, Recent(reader.actions(limit=MAX_ACTIONS), switches, effects, faults), now_s)


def kill_switch(last: Round | None) -> tuple[str, ...]:
    """Return a sentence if the kill switch of the last round's settings is set, as far as this user can see."""
    if last is None or not last.settings:
        return ()
    switch = from_record(last.settings).expert.kill_switch
    return (f"{STOPPED}, no action leaves: rm {switch}",) if os.path.lexists(switch) else ()


def build(last: Round | None, recent: Recent, now_s: float) -> TopView:
    """Return the view of one round."""
    if last is None:
        return TopView(now_s, 0.0, 0, Settings().service.mode, Settings().sharing.slice_s)
    settings = from_record(last.settings) if last.settings else Settings()
    snapshot = last.snapshot
    durations = sorted(row.total_s for row in recent.switches if row.kind == "yield")
    idle, fit = idle_and_waiting(last, recent.hosts)
    attached = [job.lease for job in snapshot.jobs if job.opted_in and job.lease is not None]
    return TopView(
        last.at_s,
        max(0.0, now_s - last.at_s),
        last.number,
        settings.service.mode,
        settings.sharing.slice_s,
        f"{settings.policy.order}/{settings.policy.allocate}/{settings.policy.share}",
        _agents(snapshot),
        (*_overdue(now_s - last.at_s), *recent.faults, *host_faults(snapshot)),
        gpu_rows(snapshot, recent.others),
        job_rows(last, recent.actions),
        len(durations),
        percentile(durations, 0.5),
        percentile(durations, 0.99),
        tuple(recent.effects),
        idle,
        fit,
        len(attached),
        sum(lease.checkpoints for lease in attached),
        closed_lanes(snapshot),
    )


def closed_lanes(snapshot: ClusterSnapshot) -> tuple[str, ...]:
    """Return a sentence for each lane that takes no jobs although its host is up; drains are known.

    Another lane of the host takes jobs, or Slurm has lost a host whose agent reports.
    """
    half = {node.host for node in snapshot.nodes if node.takes_jobs}
    alive = {host.name for host in snapshot.hosts if host.agent_alive}
    closed = [node for node in snapshot.nodes if node.gpus and node.closed_reason and not node.drained]
    return tuple(
        f"{node.name} {node.closed_reason}"
        + ("" if node.host in half else " in Slurm, and its agent reports: look at its slurmd")
        for node in sorted(closed, key=lambda node: node.name)
        if node.host in half or (node.host in alive and not node.up and not node.asleep)
    )


def _overdue(age_s: float) -> Iterator[str]:
    if age_s > STALE_AFTER_S:
        yield f"no round for {age_s:.0f} s: `cadenza doctor` looks for the cause"


def idle_and_waiting(last: Round, hosts: Sequence[HostGpus] | None = None) -> tuple[int, tuple[int, ...]]:
    """Return the number of idle GPUs, and the ids of the managed jobs that wait for GPUs although theirs are idle."""
    hosts, memory = free_gpus(last.snapshot) if hosts is None else hosts, last.memory
    alike = cache(partial(fits, hosts))  # jobs by the thousand want the same, and each look goes through all hosts
    fit = [
        job.key.id
        for job in last.snapshot.jobs
        if job.opted_in
        and waits_for_gpus(job, ours=held_for_us(job, memory) or job.key in memory.suspended)
        and alike(Wanted(job.partition, job.gpu_type, job.barred), job.gpus, job.num_nodes)
    ]
    return sum(host.idle for host in hosts), tuple(sorted(fit))


def gpu_rows(snapshot: ClusterSnapshot, others: Mapping[Gpu, int]) -> tuple[GpuRow, ...]:
    """Return a row for each physical GPU, in order."""
    counts = {node.host: node.gpus for node in snapshot.nodes if node.lane == 0}
    here: dict[Gpu, list[Job]] = {Gpu(host, index): [] for host, n in counts.items() for index in range(n)}
    for job in snapshot.jobs:
        for gpu in job.lease.gpus if job.lease else ():
            here.setdefault(gpu, []).append(job)
    rows = []
    for gpu, jobs in sorted(here.items()):
        holders = [job for job in jobs if job.lease and job.lease.state in ("held", "stopping")]
        behind = [job for job in jobs if job not in holders]
        waiting = sorted(behind, key=lambda job: ((job.lease or NO_LEASE).vtime_s, job.key))
        holder = holders[0].key.id if holders else others.get(gpu) or None
        rows.append(GpuRow(gpu.host, gpu.index, holder, tuple(job.key.id for job in waiting), gpu in others))
    return tuple(rows)


def job_rows(last: Round, actions: Iterable[ActionRow]) -> tuple[JobRow, ...]:
    """Return a row for each job with a lease and each live job with our options."""
    newest: dict[JobKey, ActionRow] = {}
    for row in actions:
        if row.job is not None:
            newest.setdefault(JobKey(row.job, row.restart or 0), row)
    lanes = {node.name: node.lane for node in last.snapshot.nodes}
    shares = _shares(last.snapshot.jobs)
    shown = [job for job in last.snapshot.jobs if job.lease or (job.options and job.state != "OTHER")]
    rows = [
        _job_row(job, lanes, shares.get(job.key), newest.get(job.key), last.decision.reasons.get(job.key, ""))
        for job in shown
    ]
    return tuple(sorted(rows, key=lambda row: (row.lease == "", row.gpus, row.lane or 0, row.id)))


def _agents(snapshot: ClusterSnapshot) -> tuple[Agent, ...]:
    """Return the agents that are alive or required; a host without further lanes requires none."""
    lanes = {node.host for node in snapshot.nodes if node.lane}
    hosts = [host for host in snapshot.hosts if host.agent_alive or host.name in lanes]
    return tuple(
        Agent(host.name, host.agent_alive, host.agent_version, host.memory_mb, host.memory_free_mb)
        for host in sorted(hosts, key=lambda host: host.name)
    )


def _shares(jobs: Sequence[Job]) -> dict[JobKey, float]:
    """Return each job's fraction of the virtual time of all jobs on its GPUs."""
    on_gpu: dict[Gpu, dict[JobKey, float]] = {}
    for job in jobs:
        for gpu in job.lease.gpus if job.lease else ():
            on_gpu.setdefault(gpu, {})[job.key] = job.lease.vtime_s if job.lease else 0.0
    shares = {}
    for job in jobs:
        if job.lease and (total_s := sum(dict(chain(*(on_gpu[gpu].items() for gpu in job.lease.gpus))).values())) > 0:
            shares[job.key] = job.lease.vtime_s / total_s
    return shares


def _job_row(job: Job, lanes: Mapping[str, int], share: float | None, action: ActionRow | None, reason: str) -> JobRow:
    lease = job.lease or NO_LEASE
    lane = next((lanes[name] for name in job.nodes if name in lanes), None)
    if action is None:
        last = ""
    elif action.allowed:
        last = action.kind.lower() + (" (failed)" if action.ok is False else "")
    else:
        last = f"would {action.kind.lower()}: {action.rule}"
    return JobRow(
        *job.key, job.name, job.user, job.state, lease.state if job.lease else "", job.opted_in, job.nodes,
        lease.gpus, job.gpus, lane, lease.ready, lease.why_not_ready, lease.step, lease.iteration_s, lease.held_s,
        lease.vtime_s, share, last, action.at_s if action else None, reason or (action.reason if action else ""),
        lease.use, lease.requeue_owner, job.placement, job.account,
    )  # fmt: skip


def percentile(ordered: Sequence[float], part: float) -> float | None:
    """Return the nearest-rank percentile of sorted values, or None without values."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None
