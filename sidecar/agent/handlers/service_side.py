"""The service's side: its orders, and reports to it at each change, at most 20 a second, and as a heartbeat."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders
from cadenza.sidecar.agent.ipc.memory_use import HostMemory
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.jobs.job_run import JobRun
from cadenza.sidecar.agent.jobs.stop_states import AwayStop
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.prefetch.prefetcher import Prefetcher
from cadenza.sidecar.agent.tuning.tuner import Tuner
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator

log = logging.getLogger(__name__)

PREFERENCE_S = 60.0
"""Time for which a ResumeOrder holds; the service repeats it each round."""
MIN_REPORT_INTERVAL_S = 0.05
MIN_WEIGHT = 1e-6
"""Weight below which no share follows."""

NOTABLE = attrgetter("rotating", "prefetched", "taken", "faults")
NOTABLE_OF_JOB = attrgetter(
    "job", "restart", "state", "ready", "ranks", "managed", "gpus", "note", "requeue_owner", "checkpoints",
    "saves_away", "saving", "saved", "unrestored", "stalls", "lost", "tuned", "pack", "amiss",
)  # fmt: skip
"""Parts of a report whose change is worth sending at once."""


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
        elif not isinstance(order, orders.JobOrder):
            return
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
                self.coordinator.ends.withdraw(lease, "refused", order.reason)
            case orders.ResumeOrder():
                self.coordinator.ends.go_on(lease, "the service lets it go on")
                run = self.host.run(lease.key)
                run.seen = None  # Slurm's resume came before this order: an earlier look at its processes is no use
                run.preferred_until = self.host.clock.monotonic() + PREFERENCE_S
            case orders.FilesOrder():
                self.prefetcher.list_files(lease)
            case orders.Tune():
                self.tuner.order(lease, order)

    def _stop(self, lease: Lease, order: orders.YieldOrder | orders.CheckpointOrder) -> None:
        """Start a stop, or report a refusal at once; an order for a stop under way changes nothing."""
        if isinstance(order, orders.CheckpointOrder) and order.away:
            self._save_away(lease, order)
            return
        if lease.state in {"stopping", "yielded"}:
            return
        self.host.run(lease.key).preferred_until = 0.0
        checkpoint = (order.save_s, order.hold_s) if isinstance(order, orders.CheckpointOrder) else None
        goal = order.goal if isinstance(order, orders.CheckpointOrder) else ""
        if reason := self.coordinator.stop(lease, "service", order.timeout_s, checkpoint, goal):
            log.info("cannot stop JOBID=%s: %s", lease.key, reason)
            self.host.report_switch(lease, "refused", note=reason)

    def _save_away(self, lease: Lease, order: orders.CheckpointOrder) -> None:
        """Have a job that has yielded save a checkpoint, or report a refusal; a save under way is this order's then."""
        stop = self.host.run(lease.key).stop
        if isinstance(stop, AwayStop):
            stop.hold_s = max(stop.hold_s, order.hold_s)
            return
        if reason := self.coordinator.saves.save(lease, order.save_s, order.hold_s, goal=order.goal):
            log.info("cannot save JOBID=%s: %s", lease.key, reason)
            self.host.report_switch(lease, "refused", note=reason)

    def _learn(self, facts: orders.Facts) -> None:
        """Take over the service's facts about the jobs here; a weight that no share follows from is ignored."""
        changed = msgspec.structs.replace(facts, at_s=self.host.facts.at_s) != self.host.facts
        self.host.facts, self.host.facts_at = facts, self.host.clock.monotonic()
        for lease in self.host.leases:
            fact = self.host.fact_of(lease)
            if fact is not None:
                self.host.run(lease.key).listed = True
                self._learn_receipt(self.host.run(lease.key), fact)
                lease.weight = fact.weight if fact.weight >= MIN_WEIGHT else lease.weight
                lease.priority, lease.user = fact.priority, fact.user
                lease.managed = fact.managed or lease.lane > 0  # exclusive use needs lane 0
                lease.hosts = max(fact.hosts, 1)
        if changed:
            self.host.leases.pack({JobKey(fact.job, fact.restart): fact.pack for fact in facts.jobs})

    def _learn_receipt(self, run: JobRun, fact: orders.JobFacts) -> None:
        """Take over what a job has to find, and tell the ranks that have attached before this was known."""
        run.unrestored = run.unrestored or fact.unrestored
        if run.told or fact.new:
            return
        waiting = [rank for rank in run.connected if self.host.receipt_fields(run, rank.hello.rank) is None]
        run.told, run.to_find = True, fact.receipt
        if fact.receipt is not None:
            run.file_system = run.file_system or self.host.file_system_of(run, fact.receipt.paths)
        for rank in waiting:
            self.host.outbox.post(rank.session, "receipt", receipt=self.host.receipt_fields(run, rank.hello.rank))


@dataclass
class Reporter:
    """Decides when a report is due.

    ``memory`` returns the host's memory, ``telemetry`` a job's last sample, ``tuned`` its limits in
    force if they are not Slurm's own, ``lacks`` the settings that this host cannot follow, ``prefetched`` the results
    of prefetches for jobs to come.
    """

    host: Host
    version: str
    memory: Callable[[], HostMemory]
    telemetry: Callable[[JobKey], orders.JobTelemetry | None]
    tuned: Callable[[JobKey], orders.InForce | None]
    lacks: Callable[[], tuple[str, ...]]
    prefetched: Callable[[], tuple[orders.Prefetched, ...]]
    _last: tuple[object, ...] = ()
    _sent_at: float = float("-inf")

    def due(self) -> orders.Report | None:
        """Return a report if something changed or the heartbeat is due; otherwise None."""
        now = self.host.clock.monotonic()
        if now - self._sent_at < MIN_REPORT_INTERVAL_S:
            return None
        report = self._report()
        notable = (*NOTABLE(report), *map(NOTABLE_OF_JOB, report.leases))
        if notable == self._last and now - self._sent_at < self.host.settings.expert.heartbeat_s:
            return None
        self._last, self._sent_at = notable, now
        try:
            msgspec.json.decode(msgspec.json.encode(report), type=orders.Report)
        except (msgspec.MsgspecError, ValueError):
            leases = zip(report.leases, self.host.leases, strict=True)
            return msgspec.structs.replace(report, leases=tuple(self._readable_part(*pair) for pair in leases))
        return report

    def _report(self) -> orders.Report:
        """Return the state of this host and its jobs."""
        memory = self.memory()
        return orders.Report(
            v=orders.VERSION,
            host=self.host.name,
            version=self.version,
            memory_mb=memory.total >> 20,
            memory_free_mb=memory.available >> 20,
            rotating=self.host.rotating(),
            at_s=self.host.clock.now(),
            leases=tuple(self._lease_report(lease) for lease in self.host.leases),
            taken=self.host.taken_report(),
            lacks=self.lacks(),
            prefetched=self.prefetched(),
            absent=self.host.absent(),
            faults=self.host.faults,
        )

    def _lease_report(self, lease: Lease) -> orders.LeaseReport:
        """Return the report of one job; of one that is left alone only the agent's own figures."""
        with self.host.supervise(lease.key, "its report"):
            return msgspec.structs.replace(
                self.host.lease_report(lease), telemetry=self.telemetry(lease.key), tuned=self.tuned(lease.key)
            )
        return self.host.lease_report(lease)

    def _readable_part(self, part: orders.LeaseReport, lease: Lease) -> orders.LeaseReport:
        """Return a job's part of a report if it can be read; otherwise leave the job alone, and say so."""
        with self.host.supervise(lease.key, "its report"):
            msgspec.json.decode(msgspec.json.encode(part), type=orders.LeaseReport)
            return part
        return self.host.lease_report(lease)
