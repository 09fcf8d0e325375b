"""What the agent does with each order of the service, and what it reports back."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.jobs.job_run import Saving
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.prefetch.prefetcher import Prefetcher
from cadenza.sidecar.agent.tuning.tuner import Tuner
from cadenza.sidecar.agent.turns import checkpoint_stop
from cadenza.sidecar.agent.turns.arbiter import Arbiter
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator

log = logging.getLogger(__name__)

PREFERENCE_S = 60.0
"""How long a ResumeOrder holds; the service repeats it each round while it means it."""


@dataclass
class ServiceHandler:
    """The service's half of the agent."""

    host: Host
    coordinator: StopCoordinator
    arbiter: Arbiter
    tuner: Tuner
    prefetcher: Prefetcher
    _told: set[str] = field(default_factory=set)

    def obey(self, order: orders.ToAgent) -> None:
        """Carry out one order; one for a job that is not here any more is only logged."""
        self.host.heard_at = self.host.clock.monotonic()
        if isinstance(order, orders.Facts):
            self._learn(order)
            return
        if isinstance(order, orders.PrefetchOrder):
            self.prefetcher.read(order)
            return
        lease = self.host.leases.get(JobKey(order.job, order.restart))
        if lease is None:
            log.info("order for an unknown job JOBID=%s: %s", order.job, type(order).__name__)
            return
        match order:
            case orders.YieldOrder() | orders.CheckpointOrder():
                self._stop(lease, order)
            case orders.FilesOrder():
                self.prefetcher.list_files(lease)
            case orders.StopAt() | orders.CommitOrder() | orders.CancelOrder():
                self._lead(lease, order)
            case orders.Tune():
                self.tuner.order(lease, order)
            case orders.ResumeOrder():
                checkpoint_stop.go_on(self.coordinator, lease, "the service lets it go on")
                self.arbiter.prefer(lease.key, PREFERENCE_S)
                self.arbiter.settle()

    def _lead(self, lease: Lease, order: orders.StopAt | orders.CommitOrder | orders.CancelOrder) -> None:
        """Pass on the service's word in a stop of a multi-node job."""
        match order:
            case orders.StopAt():
                self.coordinator.asked(lease, order.step)
            case orders.CommitOrder():
                self.coordinator.commit(lease)
            case orders.CancelOrder():
                self.coordinator.cancel(lease, "refused", order.reason)

    def _stop(self, lease: Lease, order: orders.YieldOrder | orders.CheckpointOrder) -> None:
        """Start a stop, or say at once why not; an order for a stop under way changes nothing."""
        if lease.state in {"stopping", "yielded"}:
            return
        self.host.run(lease.key).preferred_until = 0.0
        terms = Saving(order.save_s, order.hold_s) if isinstance(order, orders.CheckpointOrder) else None
        if why := self.coordinator.stop(lease, "service", order.timeout_s, terms):
            log.info("cannot stop JOBID=%s: %s", lease.key, why)
            self.host.upward.append(
                orders.Switched(
                    v=orders.VERSION,
                    host=self.host.name,
                    job=lease.job,
                    restart=lease.restart,
                    kind="refused",
                    at_s=self.host.clock.now(),
                    boundary_s=0.0,
                    copy_s=0.0,
                    total_s=0.0,
                    bytes=0,
                    note=why,
                )
            )

    def _learn(self, facts: orders.Facts) -> None:
        """Take over what the service knows of the jobs here."""
        changed = facts != self.host.facts
        self.host.facts = facts
        known = {JobKey(fact.job, fact.restart): fact for fact in facts.jobs}
        for lease in self.host.leases:
            fact = known.get(lease.key)
            if fact is not None:
                self.host.run(lease.key).listed = True
                self._update(lease, fact)
        if changed:
            self.host.leases.pack({key: fact.pack for key, fact in known.items()})
            self.arbiter.settle()

    def _update(self, lease: Lease, fact: orders.JobFacts) -> None:
        """Bring one job up to date; a weight that no share follows from is refused."""
        if fact.weight > 0:
            lease.weight = fact.weight
        lease.priority, lease.user = fact.priority, fact.user
        lease.managed, lease.hosts = fact.managed, max(fact.hosts, 1)
