"""One lease for each job out of the reports of its hosts' agents (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean
from typing import TypeAlias

from msgspec import structs

from cadenza.policies.core.model import (
    ClusterSnapshot,
    Gpu,
    Host,
    Job,
    JobKey,
    JobUsage,
    Lease,
    LeaseState,
    Node,
    Options,
    Receipt,
    StepRate,
    changed,
)
from cadenza.policies.supervision import each
from cadenza.sidecar.bounds import MAX_RECEIPT_PATHS
from cadenza.sidecar.orders import JobTelemetry, LeaseReport
from cadenza.slurm_plugin.service.agents.agent_registry import Agent

Parts: TypeAlias = Mapping[str, LeaseReport]
"""A job's lease reports by host."""

STATES: tuple[LeaseState, ...] = ("stopping", "held", "yielded", "waiting")
"""The first of these that a host reports is the job's state: a lease that is half given still occupies GPUs."""

SHOWN = ("frozen", "running", "gone")
"""The first of these that a host shows is the state of the job's processes, unless a host contradicts Slurm's word."""

OVER_HOSTS: Mapping[str, Callable[[Iterable[float]], float]] = {
    "samples_s": sum,
    "iteration_p99_s": max,
    "data_wait": max,
    "gpu_percent": fmean,
    "gpu_memory_mb": sum,
    "cpu_percent": sum,
    "rss_mb": sum,
    "read_mb_s": sum,
    "memory_low_mb": max,
    "memory_peak_mb": max,
    "order_arrived_s": max,
    "order_done_s": max,
}
"""One value of a job out of those of its hosts: sums, the worst of a rank's values, the mean use of GPUs."""


_MEASURED = attrgetter(*JobUsage.__struct_fields__)


def parts_by_job(snapshot: ClusterSnapshot, agents: Mapping[str, Agent]) -> Mapping[JobKey, Parts]:
    """Return each job's lease reports by host, silent hosts included: their leases are on disk and still count.

    A host's word counts only for the jobs that Slurm has there and for GPUs within Slurm's grant, and the number of a
    job's hosts is Slurm's: no host changes anything for a job elsewhere.
    """
    parts: defaultdict[JobKey, dict[str, LeaseReport]] = defaultdict(dict)
    nodes = {node.name: node for node in snapshot.nodes}
    for host, agent in agents.items():
        for lease in agent.report.leases:
            job = snapshot.job(JobKey(lease.job, lease.restart))
            if job is not None and (granted := _as_granted(lease, host, job, nodes)) is not None:
                parts[job.key][host] = granted
    return parts


def _as_granted(lease: LeaseReport, host: str, job: Job, nodes: Mapping[str, Node]) -> LeaseReport | None:
    """Return a host's word on a job with Slurm's number of hosts; None where Slurm has no such grant there."""
    gpus_of: dict[str, int | None] = {}
    for name in job.nodes:
        node = nodes.get(name)
        gpus_of[node.host if node is not None else name] = node.gpus if node is not None else None
    if host not in gpus_of or (job.gpus and len(lease.gpus) > job.gpus):
        return None
    present = gpus_of[host]
    if present is not None and any(not 0 <= index < present for index in lease.gpus):
        return None
    return lease if lease.hosts == len(gpus_of) else structs.replace(lease, hosts=len(gpus_of))


UP_S = 10.0
"""Time after its start, by Slurm's word, in which a job may have no step on its hosts yet."""


def with_leases(
    snapshot: ClusterSnapshot, agents: Mapping[str, Agent], parts: Mapping[JobKey, Parts]
) -> ClusterSnapshot:
    """Return Slurm's snapshot with each job's lease and each host's agent."""
    names = sorted({node.host for node in snapshot.nodes} | set(agents))
    further = {node.name for node in snapshot.nodes if node.lane}
    host_of = snapshot.host_of
    absent = {
        (host, JobKey(one.job, one.restart))
        for host, agent in agents.items()
        if agent.alive
        for one in agent.report.absent
    }

    def leased(job: Job) -> Job:
        # A host that wakes up knows nothing of the job that it was woken for, and Slurm sets the job's start anew then.
        since_s = snapshot.time_s - (job.start_s if job.start_s is not None else snapshot.time_s)
        up = bool(absent and job.nodes) and not job.starting and since_s >= UP_S
        if up and all((host_of.get(name), job.key) in absent for name in job.nodes):
            job = replace(job, absent=True)
        if job.key not in parts:
            return job
        lease = merge(parts[job.key], agents)
        if job.opted_in or lease.exclusive or further.isdisjoint(job.nodes):
            return changed(job, lease=lease)
        # The owner of a running job may change its comment. On a further lane it shares all the same until it ends: it
        # has the lane because it opted in, and exclusive use needs lane 0.
        return replace(job, lease=lease, options=replace(job.options or Options(), share=True), unmanageable="")

    return replace(
        snapshot, jobs=each(snapshot.jobs, leased), hosts=tuple(_host(name, agents.get(name)) for name in names)
    )


def _host(name: str, agent: Agent | None) -> Host:
    if agent is None:
        return Host(name, agent_alive=False)
    report = agent.report
    return Host(
        name,
        agent.alive,
        report.version,
        report.memory_mb,
        report.memory_free_mb,
        report.lacks,
        tuple(JobKey(one.job, one.restart) for one in report.prefetched),
        report.taken,
        (*report.faults, *_clock_faults(agent)),
        agent.refused,
    )


def _clock_faults(agent: Agent) -> Iterator[str]:
    if agent.ahead_s:
        way = "ahead of" if agent.ahead_s > 0 else "behind"
        yield f"its clock is {abs(agent.ahead_s):.0f} s {way} the service's"


def merge(parts: Parts, agents: Mapping[str, Agent]) -> Lease:
    """Return the job's present lease; ``parts`` must not be empty.

    A job counts as holding while any of its hosts does, because its GPUs there are in use. It can be asked to yield
    only when all its hosts report, hold, and have all their ranks attached.
    """
    leases = list(parts.values())
    reported = {lease.state for lease in leases}
    state: LeaseState = next((state for state in STATES if state in reported), "waiting")
    occupying = state in ("stopping", "held")
    not_ready = _not_ready_reason(parts, agents)
    saved = state in ("stopping", "yielded") and len(parts) >= leases[0].hosts and all(one.saved for one in leases)
    wrong = next(((host, lease) for host, lease in sorted(parts.items()) if lease.amiss), None)
    return Lease(
        state=state,
        gpus=tuple(sorted(Gpu(host, index) for host, lease in parts.items() for index in lease.gpus)),
        vtime_s=max(lease.vtime_s for lease in leases),
        held_s=min((lease.held_s for lease in leases if lease.state in ("held", "stopping")), default=0.0),
        waited_s=0.0 if occupying else min(_waited_s(lease, agents[host]) for host, lease in parts.items()),
        ready=not_ready is None,
        why_not_ready=not_ready or "",
        iteration_s=max((one.iteration_s for one in leases if one.iteration_s is not None), default=None),
        exclusive=not all(lease.managed for lease in leases),
        step=min(lease.step for lease in leases),
        use=use([lease.telemetry for lease in leases if lease.telemetry is not None]),
        requeue_owner=next((lease.requeue_owner for lease in leases if lease.requeue_owner), ""),
        checkpoints=all(lease.checkpoints and not lease.requeue_owner for lease in leases),
        saves_away=all(lease.saves_away and not lease.requeue_owner for lease in leases),
        saving=any(lease.saving for lease in leases),
        lost=next((f"{host}: {lease.lost}" for host, lease in sorted(parts.items()) if lease.lost), ""),
        pace=_pace(leases),
        cpus_per_gpu=min(
            (
                0.0 if one.tuned.note or not one.gpus else one.tuned.cpus / len(one.gpus)  # 0: not known
                for one in leases
                if one.tuned is not None
            ),
            default=None,
        ),
        refusals=max(lease.refusals for lease in leases),
        unyielding=_unyielding_reason(parts, agents),
        shown=wrong[1].shown if wrong else next((kind for kind in SHOWN if kind in {one.shown for one in leases}), ""),
        waiting_on=tuple(sorted(host for host, one in parts.items() if one.state == "waiting" != state)),
        amiss=f"{wrong[0]}: {wrong[1].amiss}" if wrong else "",
        late=state == "waiting" and any(lease.late for lease in leases),
        early=next((f"{host}: {lease.early}" for host, lease in sorted(parts.items()) if lease.early), ""),
        no_room=next((f"{host}: {lease.no_room}" for host, lease in sorted(parts.items()) if lease.no_room), ""),
        saved=saved,
        receipt=_receipt(leases) if saved else None,
        lost_s=max(lease.lost_s for lease in leases),
        unrestored=next((lease.unrestored for lease in leases if lease.unrestored), ""),
        unready=next((lease.unready for lease in leases if lease.unready), ""),
        file_system=next((lease.file_system for lease in leases if lease.file_system), ""),
        stalls=any(lease.stalls for lease in leases),
    )


def _receipt(leases: Sequence[LeaseReport]) -> Receipt | None:
    """Return the receipt of a job's checkpoint; the ranks of each host may have named paths of their own."""
    receipts = [lease.receipt for lease in leases if lease.receipt is not None]
    if len(receipts) < len(leases):
        return None
    paths = (*dict.fromkeys(path for one in receipts for path in one.paths),)
    nameable = all(one.paths for one in receipts) and len(paths) <= MAX_RECEIPT_PATHS
    return Receipt(leases[0].restart + 1, min(one.step for one in receipts), paths if nameable else ())


def _waited_s(lease: LeaseReport, agent: Agent) -> float:
    """Return the seconds since a lease's last change: by its host's clock until the report, by ours since then."""
    return max(0.0, agent.report.at_s - lease.since_s) + agent.silent_s


def use(hosts: Sequence[JobTelemetry]) -> JobUsage | None:
    """Return a job's measurements over its hosts, each combined as ``OVER_HOSTS`` says; None without any."""
    if not hosts:
        return None
    if len(hosts) == 1 and hosts[0].memory_kind == "gpu":
        return JobUsage(*[None if one is None else round(one, 6) for one in _MEASURED(hosts[0])])
    usage: dict[str, float | None] = {}
    for field, combine in OVER_HOSTS.items():
        values = [value for host in hosts if (value := getattr(host, field)) is not None]
        usage[field] = round(combine(values), 6) if values else None
    if any(host.memory_kind != "gpu" for host in hosts):
        usage |= {"memory_low_mb": None, "memory_peak_mb": None}
    return JobUsage(**usage)


def _pace(leases: Sequence[LeaseReport]) -> StepRate | None:
    """Return the pace of the slowest host, over the window common to all hosts, with all co-runners."""
    paces = [lease.pace for lease in leases if lease.pace is not None]
    if not paces or len(paces) < len(leases):
        return None
    slowest = max(paces, key=lambda pace: (pace.iteration_s, -pace.iterations))
    return StepRate(
        slowest.iteration_s,
        min(pace.iterations for pace in paces),
        min(pace.window_s for pace in paces),
        slowest.error,
        max(pace.data_wait for pace in paces),
        tuple(sorted({key for pace in paces for key in pace.co_runners})),
    )


def half_given(parts: Parts) -> tuple[str, ...]:
    """Return the hosts where a multi-node job still waits while it holds its GPUs elsewhere."""
    states = {host: lease.state for host, lease in parts.items()}
    if "held" not in states.values() or "stopping" in states.values():
        return ()
    return tuple(sorted(host for host, state in states.items() if state in ("waiting", "yielded")))


def _unyielding_reason(parts: Parts, agents: Mapping[str, Agent]) -> str:
    """Return why a job is not asked to yield although all its ranks can stop at a boundary; "" otherwise."""
    reason = next((one.unyielding for one in parts.values() if one.unyielding), "")
    if not reason:
        return ""
    able = {host: structs.replace(one, ready=one.ready or bool(one.unyielding)) for host, one in parts.items()}
    return reason if _not_ready_reason(able, agents) is None else ""


def _not_ready_reason(parts: Parts, agents: Mapping[str, Agent]) -> str | None:
    """Return the reason for which a job cannot yield; None if it can."""
    leases = list(parts.values())
    hosts = max(lease.hosts for lease in leases)
    silent = sorted(host for host in parts if not agents[host].alive)
    if silent:
        return f"the agent of {', '.join(silent)} is silent"
    if len(parts) < hosts:
        return f"{len(parts)} of its {hosts} hosts have reported it"
    if waiting := half_given(parts):
        return f"it still waits for its GPUs on {', '.join(waiting)}"
    for host, lease in sorted(parts.items()):
        if not lease.ready:
            return lease.why_not_ready or f"not all ranks on {host} have attached"
    ranks, world = sum(lease.ranks for lease in leases), max(lease.world_size for lease in leases)
    return None if ranks == world else f"{ranks} of its {world} ranks have attached"
