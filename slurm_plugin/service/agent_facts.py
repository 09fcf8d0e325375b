"""Facts for the agents: after each round every host gets those with which it can take turns without the service."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from cadenza.policies.core.actions import Suspend, Unsuspend
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.policies.round import RoundReport
from cadenza.policies.sharing.turns.lanes import hosts_to_leave
from cadenza.sidecar.orders import VERSION, Facts, JobFacts, Receipt
from cadenza.slurm_plugin.service.settings import Settings, guard_settings, sharing_settings


def suspended_after(report: RoundReport) -> frozenset[JobKey]:
    """Return the jobs that Slurm has suspended after a round's actions (pure)."""
    suspended = {job.key for job in report.snapshot.jobs if job.state == "SUSPENDED"}
    for action, outcome in report.outcomes:
        if isinstance(action, Suspend) and outcome.ok:
            suspended.add(action.job)
        elif isinstance(action, Unsuspend) and outcome.ok:
            suspended.discard(action.job)
    return frozenset(suspended)


def facts_of(
    snapshot: ClusterSnapshot, settings: Settings, suspended: frozenset[JobKey], memory: Memory | None = None
) -> Mapping[str, Facts]:
    """Return each host's facts: the jobs that Slurm has there, and the rules of turns; ``memory``: after the round."""
    rules = sharing_settings(settings)
    killed = guard_settings(settings).killed
    # Agents that observe only give back the resources that jobs are tuned to.
    enforce = settings.applies and not killed
    sharing = enforce and settings.policy.share != "none"
    memory = memory or Memory()
    pack_of = {key: min(group).id for group in memory.sharing.packs for key in group}
    host_of = snapshot.host_of
    jobs_on: dict[str, list[JobFacts]] = {host.name: [] for host in snapshot.hosts}
    for job in sorted((job for job in snapshot.jobs if job.nodes), key=attrgetter("key")):
        hosts = {host_of.get(node, node) for node in job.nodes}
        facts = JobFacts(
            job=job.key.id,
            restart=job.key.restart,
            managed=rules.manages(job),
            weight=job.lease.weight if job.lease else 1.0,
            priority=rules.priority(job),
            user=job.user,
            hosts=len(hosts),
            suspended=job.key in suspended,
            cpus=-(-job.cpus // max(job.num_nodes, 1)),  # Slurm's allocation, whatever the job was tuned to
            memory_mb=-(-job.memory_mb // max(job.num_nodes, 1)),
            pack=pack_of.get(job.key, 0),
            requeueable=job.requeueable,
            receipt=_receipt(memory, job.key),
            unrestored=memory.unrestored.get(job.key.id, ""),
            gang=sharing and rules.manages(job) and len(hosts) > 1,
        )
        for host in hosts:
            jobs_on.setdefault(host, []).append(facts)
    leaving = hosts_to_leave(snapshot)  # there jobs stay awake, if their word is enough
    guarded = enforce and settings.service.lanes_memory == "full"
    lane_0_mb = {node.host: node.memory_mb for node in snapshot.nodes if node.lane == 0}
    suspending = sharing and rules.suspend
    return {
        host: Facts(
            VERSION,
            tuple(jobs),
            rules.slice_s,
            rules.share_between_users,
            enforce,
            rules.min_run_s,
            settings.sharing.yield_timeout_s,
            suspends=suspending and host not in leaving,
            memory_mb=lane_0_mb.get(host, 0) if guarded else 0,
        )
        for host, jobs in jobs_on.items()
    }


def _receipt(memory: Memory, key: JobKey) -> Receipt | None:
    """Return the checkpoint that this start of a job has to find."""
    receipt = memory.receipts.get(key.id)
    return Receipt(*receipt) if receipt is not None and receipt.restart <= key.restart else None
