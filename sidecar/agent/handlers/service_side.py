"""Handler of the service's orders."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.prefetch.prefetcher import Prefetcher
from cadenza.sidecar.agent.tuning.tuner import Tuner
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator

log = logging.getLogger(__name__)

PREFERENCE_S = 60.0
"""Time for which a ResumeOrder holds; the service repeats it each round."""


@dataclass
class ServiceHandler:
    """The service's half of the agent. Orders are recorded here; the event loop acts on them in the same pass."""

    host: Host
    coordinator: StopCoordinator
    tuner: Tuner
    prefetcher: Prefetcher

    def obey(self, order: orders.ToAgent) -> None:
        """Carry out one order; one for a job that is no longer here is only logged."""
        self.host.heard_at = self.host.clock.monotonic()
        if isinstance(order, orders.Facts):
            self._learn(order)
        elif isinstance(order, orders.PrefetchOrder):
            self.prefetcher.read(order)
        elif (lease := self.host.leases.get(JobKey(order.job, order.restart))) is not None:
            self._obey_for(lease, order)
        else:
            log.info("order for an unknown job JOBID=%s: %s", order.job, type(order).__name__)

    def _obey_for(self, lease: Lease, order: orders.ToAgent) -> None:
        """Carry out an order for one job here."""
        match order:
            case orders.YieldOrder() | orders.CheckpointOrder():
                self._stop(lease, order)
            case orders.StopAt():
                self.coordinator.raise_stop_step(lease, order.step, by_service=True)
            case orders.CommitOrder():
                self.coordinator.commit(lease)
            case orders.CancelOrder():
                self.coordinator.withdraw(lease, "refused", order.reason)
            case orders.ResumeOrder():
                self.coordinator.go_on(lease, "the service lets it go on")
                self.host.run(lease.key).preferred_until = self.host.clock.monotonic() + PREFERENCE_S
            case orders.FilesOrder():
                self.prefetcher.list_files(lease)
            case orders.Tune():
                self.tuner.order(lease, order)

    def _stop(self, lease: Lease, order: orders.YieldOrder | orders.CheckpointOrder) -> None:
        """Start a stop, or report a refusal at once; an order for a stop under way changes nothing."""
        if lease.state in {"stopping", "yielded"}:
            return
        self.host.run(lease.key).preferred_until = 0.0
        checkpoint = (order.save_s, order.hold_s) if isinstance(order, orders.CheckpointOrder) else None
        if reason := self.coordinator.stop(lease, "service", order.timeout_s, checkpoint):
            log.info("cannot stop JOBID=%s: %s", lease.key, reason)
            self.host.report_switch(lease, "refused", note=reason)

    def _learn(self, facts: orders.Facts) -> None:
        """Take over the service's facts about the jobs here; a weight that no share follows from is ignored."""
        changed = facts != self.host.facts
        self.host.facts = facts
        for lease in self.host.leases:
            fact = self.host.fact_of(lease)
            if fact is not None:
                self.host.run(lease.key).listed = True
                lease.weight = fact.weight if fact.weight > 0 else lease.weight
                lease.priority, lease.user = fact.priority, fact.user
                lease.managed, lease.hosts = fact.managed, max(fact.hosts, 1)
        if changed:
            self.host.leases.pack({JobKey(fact.job, fact.restart): fact.pack for fact in facts.jobs})
