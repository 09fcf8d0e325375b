"""The cluster as one gateway: Slurm's books and the agents' leases in, actions to whom they concern."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from cadenza.policies.core.actions import (
    Action,
    Migrate,
    Outcome,
    Pack,
    Resize,
    Resume,
    Save,
    Suspend,
    Tune,
    Unpack,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.model import ClusterSnapshot, Host, Job, JobKey, Share
from cadenza.policies.round import RoundReport
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, Facts, JobFacts
from cadenza.slurm_plugin.gateway.slurm_gateway import SlurmGateway
from cadenza.slurm_plugin.service.agents.agent_registry import Agent
from cadenza.slurm_plugin.service.errors import HubError
from cadenza.slurm_plugin.service.observe.lease_merge import Parts, half_given, merge, parts_by_job
from cadenza.slurm_plugin.service.settings import Settings, guard_settings, sharing_settings

log = logging.getLogger(__name__)


class AgentLink(Protocol):
    """What the cluster needs of the hub."""

    def agents(self) -> Mapping[str, Agent]:
        """Return every agent's last report, by host."""
        ...

    def yield_job(self, key: JobKey, hosts: tuple[str, ...]) -> Outcome:
        """Ask a job to stop and free its GPUs."""
        ...

    def checkpoint_job(self, key: JobKey, hosts: tuple[str, ...]) -> Outcome:
        """Ask a job to save a checkpoint and to stand still for a requeue."""
        ...

    def prefetch_job(self, key: JobKey, hosts: tuple[str, ...], there: tuple[str, ...]) -> Outcome:
        """Have the hosts ``there`` read the files that a job uses on its hosts."""
        ...

    def resume_job(self, key: JobKey, hosts: tuple[str, ...]) -> Outcome:
        """Prefer a job for the GPUs that it waits for."""
        ...

    def tune_job(self, key: JobKey, wanted: Mapping[str, Share], caches_mb: Mapping[str, int | None]) -> Outcome:
        """Change what a job has on each host that is named, and what its caches may take of it there."""
        ...

    def mark_suspended(self, key: JobKey, *, suspended: bool) -> None:
        """Tell a job's agents whether Slurm has its processes stopped."""
        ...


class ClusterGateway:
    """``policies.round.Gateway`` over Slurm and the agents; one thread at a time."""

    def __init__(self, slurm: SlurmGateway, link: AgentLink, clock: SystemClock) -> None:
        self.load_s = 0.0
        """How long Slurm took for its last answer, seconds."""
        self._slurm = slurm
        self._link = link
        self._clock = clock
        self._parts: Mapping[JobKey, Parts] = {}
        self._orders: Mapping[type[Action], Callable[[JobKey, tuple[str, ...]], Outcome]] = {
            Yield: link.yield_job,
            Resume: link.resume_job,
            Migrate: link.checkpoint_job,
            Resize: link.checkpoint_job,
            Save: link.checkpoint_job,
        }

    def read(self) -> ClusterSnapshot:
        """Return Slurm's snapshot with the agents' leases in it; errors of the Slurm gateway pass through."""
        began_s = self._clock.monotonic()
        snapshot = self._slurm.read()
        self.load_s = self._clock.monotonic() - began_s
        agents = self._link.agents()
        self._parts = parts_by_job(agents)
        return compose(snapshot, agents, self._parts)

    def apply(self, action: Action) -> Outcome:
        """Send what agents do to the job's agents, everything else to Slurm."""
        try:
            if isinstance(action, Yield | Resume | Migrate | Resize | Save):
                return self._order(action)
            if isinstance(action, Suspend):
                return self._suspend(action)
            if isinstance(action, Tune):
                return self._tune(action)
            if isinstance(action, Pack | Unpack):
                return Outcome(ok=True)  # the facts that agents are told after the round say who is packed
            outcome = self._slurm.apply(action)
            if isinstance(action, Unsuspend) and outcome.ok:
                self._link.mark_suspended(action.job, suspended=False)
        except HubError as error:
            return Outcome(ok=False, error=str(error))
        return outcome

    def _order(self, action: Yield | Resume | Migrate | Resize | Save) -> Outcome:
        """Tell a job's agents; of a move this is the first step, the others follow in later rounds."""
        hosts = tuple(sorted(self._parts.get(action.job, {})))
        if not hosts:
            return Outcome(ok=False, error=f"job {action.job}: no agent has reported it")
        if isinstance(action, Migrate | Resize) and action.warm:
            outcome = self._link.prefetch_job(action.job, hosts, action.warm)
        else:
            outcome = self._orders[type(action)](action.job, hosts)
        return outcome if outcome.ok else Outcome(ok=False, error=f"job {action.job}: {outcome.error}")

    def _tune(self, action: Tune) -> Outcome:
        """Send each agent of the job its share; the agents know the job's node, which is a lane of theirs."""
        host_of = {part.node: host for host, part in self._parts.get(action.job, {}).items()}
        wanted = {host_of[share.node]: share for share in action.shares if share.node in host_of}
        if len(wanted) < len(action.shares) or not wanted:
            missing = ", ".join(share.node for share in action.shares if share.node not in host_of)
            return Outcome(ok=False, error=f"job {action.job}: no agent has reported it on {missing or 'any node'}")
        caches = zip(action.shares, action.caches_mb, strict=False)
        outcome = self._link.tune_job(action.job, wanted, {host_of[share.node]: mb for share, mb in caches})
        return outcome if outcome.ok else Outcome(ok=False, error=f"job {action.job}: {outcome.error}")

    def _suspend(self, action: Suspend) -> Outcome:
        """Suspend only what its agents have been told of and do not report as running since the snapshot."""
        self._link.mark_suspended(action.job, suspended=True)
        agents = self._link.agents()
        parts = parts_by_job(agents).get(action.job)
        if parts and merge(parts, agents, self._clock.now()).state in ("held", "stopping"):
            outcome = Outcome(ok=False, error=f"job {action.job}: it has got its GPUs since; left running")
        else:
            outcome = self._slurm.apply(action)
        if not outcome.ok:
            self._link.mark_suspended(action.job, suspended=False)
        return outcome

    def complete_gangs(self) -> None:
        """Ask for the missing hosts of multi-node jobs that hold their GPUs on some hosts only.

        Such a job cannot run and cannot stop: the sooner it has all its GPUs, the sooner either works.
        """
        for key, parts in self._parts.items():
            waiting = half_given(parts)
            if waiting and len(parts) > 1:
                outcome = self._link.resume_job(key, waiting)
                log.info("JOBID=%s half given, waits on %s %s", key, ",".join(waiting), outcome.error)


def compose(snapshot: ClusterSnapshot, agents: Mapping[str, Agent], parts: Mapping[JobKey, Parts]) -> ClusterSnapshot:
    """Return Slurm's snapshot with each job's lease and each host's agent (pure)."""
    names = sorted({node.host for node in snapshot.nodes} | set(agents))
    jobs = tuple(
        replace(job, lease=merge(parts[job.key], agents, snapshot.time_s)) if job.key in parts else job
        for job in snapshot.jobs
    )
    return replace(snapshot, jobs=jobs, hosts=tuple(_host(name, agents.get(name)) for name in names))


def suspended_after(report: RoundReport) -> frozenset[JobKey]:
    """Return which jobs Slurm has suspended now, after a round's actions (pure)."""
    suspended = {job.key for job in report.snapshot.jobs if job.state == "SUSPENDED"}
    for action, outcome in report.outcomes:
        if isinstance(action, Suspend) and outcome.ok:
            suspended.add(action.job)
        elif isinstance(action, Unsuspend) and outcome.ok:
            suspended.discard(action.job)
    return frozenset(suspended)


def facts_of(
    snapshot: ClusterSnapshot, settings: Settings, suspended: frozenset[JobKey], packs: Iterable[Sequence[JobKey]] = ()
) -> Mapping[str, Facts]:
    """Return what the agent of each host is told of the jobs that Slurm has there; ``packs``: who is packed.

    While the kill switch is set they are told to observe, so that they give back what jobs are tuned to.
    """
    enforce = settings.applies and not guard_settings(settings).killed
    host_of = {node.name: node.host for node in snapshot.nodes}
    rules = sharing_settings(settings)
    pack_of = {key: min(group).id for group in packs for key in group}
    jobs_on: dict[str, list[JobFacts]] = {host.name: [] for host in snapshot.hosts}
    for job in sorted(snapshot.jobs, key=lambda job: job.key):
        hosts = {host_of.get(node, node) for node in job.nodes}
        for host in hosts:
            facts = _facts(job, len(hosts), rules, suspended=job.key in suspended, pack=pack_of.get(job.key, 0))
            jobs_on.setdefault(host, []).append(facts)
    return {
        host: Facts(
            v=VERSION,
            jobs=tuple(jobs),
            slice_s=rules.slice_s,
            share_between_users=rules.share_between_users,
            enforce=enforce,
            min_run_s=rules.min_run_s,
        )
        for host, jobs in jobs_on.items()
    }


def _host(name: str, agent: Agent | None) -> Host:
    if agent is None:
        return Host(name, agent_alive=False)
    report = agent.report
    return Host(
        name, agent.alive, report.version, report.memory_mb, report.memory_free_mb, report.lacks,
        tuple(JobKey(one.job, one.restart) for one in report.prefetched),
    )  # fmt: skip


def _facts(job: Job, hosts: int, rules: SharingSettings, *, suspended: bool, pack: int) -> JobFacts:
    return JobFacts(
        job=job.key.id,
        restart=job.key.restart,
        managed=rules.manages(job),
        weight=job.lease.weight if job.lease else 1.0,
        priority=rules.priority(job),
        user=job.user,
        hosts=hosts,
        suspended=suspended,
        cpus=-(-job.cpus // max(job.num_nodes, 1)),  # Slurm's books, whatever it was tuned to
        memory_mb=-(-job.memory_mb // max(job.num_nodes, 1)),
        pack=pack,
    )
