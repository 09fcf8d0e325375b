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
from cadenza.sidecar.agent.leases.lease_table import Entry
from cadenza.sidecar.agent.turns import unleased_ranks
from cadenza.sidecar.agent.turns.coordinator import Conductor
from cadenza.sidecar.orders import JobFacts


@dataclass
class Arbiter:
    """Gives free GPUs at once; displaces only for exclusive jobs, or when the service is away."""

    host: Host
    conductor: Conductor
    reasons: Mapping[JobKey, str] = field(default_factory=dict)
    """One sentence for each job, as of the last time."""

    def settle(self) -> None:
        """Give out what is free and ask those to yield whose turn is over."""
        facts = self.host.facts
        displace = self.host.rotating() and facts.enforce
        turn = next_turn(
            [self._contender(entry) for entry in self.host.book],
            slice_s=facts.slice_s,
            share_between_users=facts.share_between_users,
            min_run_s=facts.min_run_s,
            displace=displace,
        )
        self.reasons = turn.reasons
        for key in turn.resumes:
            self._give(key, turn.vtimes.get(key))
        for key in turn.yields:
            entry = self.host.book.get(key)
            if entry is not None:
                origin = "turn" if displace else "exclusive"
                self.conductor.stop(entry, origin, self.host.settings.yield_timeout_s)
        self._part()

    def _part(self) -> None:
        """Ask all but one of those to yield whose pack is over: whoever came last goes first.

        A multi-node job stops by the service's orders only.
        """
        for entry in sorted(self.host.book, key=lambda one: (one.held_since_s, one.key), reverse=True):
            if entry.loose and entry.hosts == 1 and entry.state == "held" and self._kept_by_another(entry):
                self.conductor.stop(entry, "unpack", self.host.settings.yield_timeout_s)

    def _kept_by_another(self, entry: Entry) -> bool:
        """Whether a job that a loose one shares a GPU with is not on its way out."""
        return any(other.state == "held" for other in self.host.book.blockers(entry))

    def why_waiting(self, entry: Entry) -> str:
        """Return why a job has no lease, for its owner."""
        return self.reasons.get(entry.key, "its turn has not come")

    def prefer(self, key: JobKey, seconds: float) -> None:
        """Let a job come before the others of its priority for a while, by the service's order."""
        self.host.run(key).preferred_until = self.host.clock.monotonic() + seconds

    def _give(self, key: JobKey, vtime: float | None) -> None:
        """Grant one lease, with the virtual time that the turn gave it."""
        entry = self.host.book.get(key)
        if entry is not None:
            entry.vtime_s = entry.vtime_s if vtime is None else vtime
            self.conductor.grant(entry)

    def _contender(self, entry: Entry) -> Contender:
        """Return a lease as the policy sees it."""
        now, epoch = self.host.clock.monotonic(), self.host.clock.now()
        run = self.host.run(entry.key)
        alone = entry.hosts == 1  # a multi-node job stops and resumes only by the service's orders
        return Contender(
            key=entry.key,
            gpus=frozenset(Gpu(self.host.name, index) for index in entry.gpus),
            user=entry.user or f"uid {entry.uid}",
            state=entry.state,
            priority=entry.priority,
            weight=entry.weight,
            vtime_s=entry.vtime(epoch),
            held_s=entry.held_s(epoch),
            waited_s=0.0 if entry.occupying else max(0.0, epoch - entry.since_s),
            ready=alone and run.resume is None and not run.why_not_ready(entry, now),
            exclusive=not entry.managed,
            iteration_s=run.telemetry().iteration_s,
            preferred=now < run.preferred_until,
            eligible=self._eligible(entry),
            packed_with=self._partners(entry),
        )

    def _partners(self, entry: Entry) -> frozenset[JobKey]:
        """Return whom a job may have its GPUs with."""
        others = (other for other in self.host.book if other is not entry and other.packed_with(entry))
        return frozenset(other.key for other in others if set(other.gpus) == set(entry.gpus))

    def _eligible(self, entry: Entry) -> bool:
        """Whether a job may get its lease now."""
        if entry.occupying:
            return True
        run = self.host.run(entry.key)
        if run.stop is not None or unleased_ranks.on_gpus_of(self.host, entry):
            return False
        return not entry.managed or self._may_run(entry, run)

    def _may_run(self, entry: Entry, run: JobRun) -> bool:
        """Whether a managed job could use its lease, and may have it without the service's word."""
        if run.driver or any(is_stopped(pid) for pid in (*run.ranks, *(one.pid for one in entry.frozen))):
            return False
        if self.host.rotating() or self.host.clock.monotonic() < run.preferred_until:
            return True
        fact = fact_of(self.host, entry)
        if fact is not None and fact.suspended:
            return False
        return entry.hosts == 1 or (entry.state == "waiting" and not self._contended(entry))

    def _contended(self, entry: Entry) -> bool:
        """Whether anybody else wants one of the job's GPUs."""
        return any(other is not entry and other.overlaps(entry) for other in self.host.book)


def fact_of(host: Host, entry: Entry) -> JobFacts | None:
    """Return what the service said of a job last, or None."""
    facts = (fact for fact in host.facts.jobs if (fact.job, fact.restart) == (entry.job, entry.restart))
    return next(facts, None)
