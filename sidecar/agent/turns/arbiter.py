"""Who gets free GPUs, and who makes way when the agent decides alone: the lease book put to pure turns.

Who is packed is the service's word. Without the service packed jobs go on together: it has found that their GPU memory
fits. Nobody joins them then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cadenza.policies.core.model import Gpu, JobKey
from cadenza.policies.sharing.turns.fair_queue import Contender, next_turn
from cadenza.sidecar.agent.ipc.processes import is_stopped
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.jobs.job_run import JobRun
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.turns import unleased_ranks
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator
from cadenza.sidecar.orders import JobFacts


@dataclass
class Arbiter:
    """Gives free GPUs at once; displaces only for exclusive jobs, or when the service is away."""

    host: Host
    coordinator: StopCoordinator
    reasons: Mapping[JobKey, str] = field(default_factory=dict)
    """One sentence for each job, as of the last time."""

    def settle(self) -> None:
        """Give out what is free and ask those to yield whose turn is over."""
        facts = self.host.facts
        displace = self.host.rotating() and facts.enforce
        turn = next_turn(
            [self._contender(lease) for lease in self.host.leases],
            slice_s=facts.slice_s,
            share_between_users=facts.share_between_users,
            min_run_s=facts.min_run_s,
            displace=displace,
        )
        self.reasons = turn.reasons
        for key in turn.resumes:
            self._give(key, turn.vtimes.get(key))
        for key in turn.yields:
            lease = self.host.leases.get(key)
            if lease is not None:
                origin = "turn" if displace else "exclusive"
                self.coordinator.stop(lease, origin, self.host.settings.yield_timeout_s)
        self._part()

    def _part(self) -> None:
        """Ask all but one of those to yield whose pack is over: whoever came last goes first.

        A multi-node job stops by the service's orders only.
        """
        for lease in sorted(self.host.leases, key=lambda one: (one.held_since_s, one.key), reverse=True):
            if lease.loose and lease.hosts == 1 and lease.state == "held" and self._kept_by_another(lease):
                self.coordinator.stop(lease, "unpack", self.host.settings.yield_timeout_s)

    def _kept_by_another(self, lease: Lease) -> bool:
        """Whether a job that a loose one shares a GPU with is not on its way out."""
        return any(other.state == "held" for other in self.host.leases.blockers(lease))

    def why_waiting(self, lease: Lease) -> str:
        """Return why a job has no lease, for its owner."""
        return self.reasons.get(lease.key, "its turn has not come")

    def prefer(self, key: JobKey, seconds: float) -> None:
        """Let a job come before the others of its priority for a while, by the service's order."""
        self.host.run(key).preferred_until = self.host.clock.monotonic() + seconds

    def _give(self, key: JobKey, vtime: float | None) -> None:
        """Grant one lease, with the virtual time that the turn gave it."""
        lease = self.host.leases.get(key)
        if lease is not None:
            lease.vtime_s = lease.vtime_s if vtime is None else vtime
            self.coordinator.grant(lease)

    def _contender(self, lease: Lease) -> Contender:
        """Return a lease as the policy sees it."""
        now, epoch = self.host.clock.monotonic(), self.host.clock.now()
        run = self.host.run(lease.key)
        alone = lease.hosts == 1  # a multi-node job stops and resumes only by the service's orders
        return Contender(
            key=lease.key,
            gpus=frozenset(Gpu(self.host.name, index) for index in lease.gpus),
            user=lease.user or f"uid {lease.uid}",
            state=lease.state,
            priority=lease.priority,
            weight=lease.weight,
            vtime_s=lease.vtime(epoch),
            held_s=lease.held_s(epoch),
            waited_s=0.0 if lease.occupying else max(0.0, epoch - lease.since_s),
            ready=alone and run.resume is None and not run.why_not_ready(lease, now),
            exclusive=not lease.managed,
            iteration_s=run.telemetry().iteration_s,
            preferred=now < run.preferred_until,
            eligible=self._eligible(lease),
            packed_with=self._partners(lease),
        )

    def _partners(self, lease: Lease) -> frozenset[JobKey]:
        """Return whom a job may have its GPUs with."""
        others = (other for other in self.host.leases if other is not lease and other.packed_with(lease))
        return frozenset(other.key for other in others if set(other.gpus) == set(lease.gpus))

    def _eligible(self, lease: Lease) -> bool:
        """Whether a job may get its lease now."""
        if lease.occupying:
            return True
        run = self.host.run(lease.key)
        if run.stop is not None or unleased_ranks.on_gpus_of(self.host, lease):
            return False
        return not lease.managed or self._may_run(lease, run)

    def _may_run(self, lease: Lease, run: JobRun) -> bool:
        """Whether a managed job could use its lease, and may have it without the service's word."""
        if run.driver or any(is_stopped(pid) for pid in (*run.ranks, *(one.pid for one in lease.frozen))):
            return False
        if self.host.rotating() or self.host.clock.monotonic() < run.preferred_until:
            return True
        fact = fact_of(self.host, lease)
        if fact is not None and fact.suspended:
            return False
        return lease.hosts == 1 or (lease.state == "waiting" and not self._contended(lease))

    def _contended(self, lease: Lease) -> bool:
        """Whether anybody else wants one of the job's GPUs."""
        return any(other is not lease and other.overlaps(lease) for other in self.host.leases)


def fact_of(host: Host, lease: Lease) -> JobFacts | None:
    """Return what the service said of a job last, or None."""
    facts = (fact for fact in host.facts.jobs if (fact.job, fact.restart) == (lease.job, lease.restart))
    return next(facts, None)
