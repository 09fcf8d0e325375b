"""The arbiter: gives out free GPUs, and chooses which job yields when the agent decides alone.

Packs are the service's decision. Without the service packed jobs go on together, because it has found that their GPU
memory fits; no further job joins them then.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cadenza.policies.core.model import Gpu, JobKey
from cadenza.policies.sharing.turns.fair_queue import Contender, next_turn
from cadenza.sidecar.agent.ipc.processes import is_stopped
from cadenza.sidecar.agent.jobs.host_state import LOOK_S, Host
from cadenza.sidecar.agent.jobs.job_run import JobRun
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.turns import gpu_room
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator

log = logging.getLogger(__name__)

WATCH_S = 0.02
"""Time between two looks at a job whose suspend or resume by Slurm is awaited."""
SUSPEND_S = 30.0
"""Longest wait for Slurm's suspend of a job that has yielded. After it that job may have its GPUs back."""
ORDER_S = 1.0
"""Longest time between the service's order to yield and its order to resume the next job, which follows it."""
DRIVER_S = 5.0
"""Longest wait for the driver's look at the GPUs before a lease, in seconds; then the lease is given without it."""
FACT_S = 10.0
"""Longest wait of a job of several hosts for the service's first word on it, in seconds."""
FRESH_S = 1.0
"""Age up to which the look that showed the last holder out also shows the room for the next one."""
KEPT_S = 900.0
"""Time for which a measurement of what a job keeps while it is out counts; then it is stopped, and measured, again."""
NO_ROOM_S = 15.0
"""Time for which a job whose GPUs had no room for it gets no lease, in seconds; then the driver is asked again."""


@dataclass
class Arbiter:
    """Gives free GPUs at once; displaces only for exclusive jobs, or while the service is away."""

    host: Host
    coordinator: StopCoordinator
    watched: Callable[[Lease], bool] = lambda _: False
    """Returns True if the driver names the processes on a job's GPUs: then a yield ends only once they have left."""
    reasons: Mapping[JobKey, str] = field(default_factory=dict)
    """One sentence for each job, as of the last time."""
    watching: bool = False
    """A suspend by Slurm is awaited, so that the next job may run, or a resume of the next job."""
    _settled: int = -1
    """State of the leases after the last time."""

    @property
    def up_to_date(self) -> bool:
        """True if no lease has changed since the last time."""
        return self._settled == self.host.leases.changed

    def settle(self) -> None:
        """Give out free GPUs, and ask jobs to yield whose turn, or whose pack, is over."""
        # 1. The same pure function as in the service decides who is next.
        facts = self.host.facts
        divided = self.host.divided
        for one in self.host.leases:
            self.host.run(one.key).divided = divided if one.gpus else ""
            if one.occupying:
                self._look_for_use(one)
            else:
                self._look_for_room(one)
        displace = self.host.rotating() and facts.enforce
        self.watching = False
        turn = next_turn(
            [self._contender_or_left_alone(lease) for lease in self.host.leases if not lease.unasked],
            slice_s=facts.slice_s,
            share_between_users=facts.share_between_users,
            min_run_s=facts.min_run_s,
            displace=displace,
        )
        obstacles = {lease.key: self._obstacle(lease) for lease in self.host.leases if not lease.occupying}
        self.reasons = {**turn.reasons, **{key: reason for key, reason in obstacles.items() if reason}}
        # 2. Free GPUs are granted, at the virtual time that the turn gives.
        for key in turn.resumes if not self.host.awaits_facts else ():
            lease = self.host.leases.get(key)
            if lease is not None and self._may_start(lease):
                lease.vtime_s = turn.vtimes.get(key, lease.vtime_s)
                with self.host.supervise(key, "granting its lease"):
                    self.coordinator.resumes.grant(lease)
        # 3. Jobs yield whose turn is over.
        for key in turn.yields:
            if (lease := self.host.leases.get(key)) is not None:
                with self.host.supervise(key, "stopping it"):
                    self.coordinator.stop(lease, "turn" if displace else "exclusive", facts.yield_timeout_s)
        # 4. All but one job of a pack that is over yield, the last to come first; multi-node jobs wait for the service.
        for lease in sorted(self.host.leases, key=lambda one: (one.held_since_s, one.key), reverse=True):
            if (
                lease.loose
                and lease.hosts == 1
                and lease.state == "held"
                and any(other.state == "held" for other in self.host.leases.blockers(lease))
            ):
                self.coordinator.stop(lease, "unpack", facts.yield_timeout_s)
        self._settled = self.host.leases.changed

    def waiting_reason(self, lease: Lease) -> str:
        """Return the reason why a job has no lease, for its owner."""
        return self.reasons.get(lease.key, "its turn has not come")

    def _contender_or_left_alone(self, lease: Lease) -> Contender:
        """Return a lease as the policy sees it; a job that is left alone keeps what it has and gets nothing."""
        if not self.host.run(lease.key).fault:
            with self.host.supervise(lease.key, "its turn"):
                return self._contender(lease)
        gpus = frozenset(Gpu(self.host.name, index) for index in lease.gpus)
        return Contender(
            key=lease.key,
            gpus=gpus,
            user=f"uid {lease.uid}",
            state=lease.state,
            exclusive=not lease.managed,
            eligible=False,
        )

    def _contender(self, lease: Lease) -> Contender:
        """Return a lease as the policy sees it."""
        now, epoch = self.host.clock.monotonic(), self.host.clock.now()
        run = self.host.run(lease.key)
        alone = lease.hosts == 1  # a multi-node job stops and resumes only by the service's orders
        partners = (other for other in self.host.leases.rivals(lease) if other.packed_with(lease))
        return Contender(
            key=lease.key,
            gpus=frozenset(Gpu(self.host.name, index) for index in lease.gpus),
            user=lease.user or f"uid {lease.uid}",
            state="stopping" if self._awaits_suspend(lease, run) else lease.state,
            priority=lease.priority,
            weight=lease.weight,
            vtime_s=lease.vtime(epoch),
            held_s=lease.held_s(epoch),
            waited_s=0.0 if lease.occupying else max(0.0, epoch - lease.since_s),
            ready=alone and run.resume is None and run.not_ready_reason(lease, now) is None,
            exclusive=not lease.managed,
            iteration_s=run.telemetry.iteration_s,
            resume_ordered=now < run.preferred_until,
            eligible=self._eligible(lease, run),
            packed_with=frozenset(other.key for other in partners if set(other.gpus) == set(lease.gpus)),
        )

    def _eligible(self, lease: Lease, run: JobRun) -> bool:
        """Return True if a job may get its lease now."""
        if lease.occupying:
            return True
        rivals = self.host.leases.rivals(lease)
        if run.stop is not None or any(self.host.run(other.key).runs_unleased(other) for other in rivals):
            return False
        if (
            self._in_use(lease)
            or run.no_room
            or self.host.awaits_memory(lease)
            or not (self._is_overdue(lease) or all(map(self._has_left, rivals)))
        ):
            return False
        return not lease.managed or self._may_run(lease, run, contended=bool(rivals))

    def _may_start(self, lease: Lease) -> bool:
        """Return True if a fresh look at the processes confirms that a job may have its lease now."""
        if lease.managed and self.host.shown(lease, 0.0) == "frozen":
            return False
        rivals = [other for other in self.host.leases.rivals(lease) if other.state == "yielded"]
        for other in rivals:
            self.host.run(other.key).seen = None
        return self._is_overdue(lease) or (all(map(self._has_left, rivals)) and self._has_room(lease))

    def _has_room(self, lease: Lease) -> bool:
        """Return True if the driver sees room for a job on its GPUs, or does not say in time."""
        watch, run, now = self.coordinator.gpus, self.host.run(lease.key), self.host.clock.monotonic()
        if watch is None or not lease.gpu_bytes or any(map(lease.packed_with, self.host.leases.rivals(lease))):
            return True
        if run.grant_at is None:  # the look by which the last holder was seen to be out is new enough
            out = [one for one in self.host.leases.rivals(lease) if one.state == "yielded"]
            run.grant_at = max((self.host.run(one.key).out_at for one in out), default=now)
            run.grant_at = run.grant_at if now - run.grant_at < FRESH_S else now
        since = run.grant_at
        if not watch.looked_since(since, lease.gpus):
            return now - since > DRIVER_S
        shortage = watch.last.shortage(lease.needs, self.host.named)
        # Memory of a process that has just ended is free a moment later, so two looks must find too little.
        if shortage and run.short_at is None:
            run.grant_at = run.short_at = now
            return False
        run.grant_at = run.short_at = None
        if shortage:
            run.no_room, run.no_room_until = shortage, now + NO_ROOM_S
            log.warning("no room JOBID=%s: %s", lease.key, shortage)
        return not shortage

    def _obstacle(self, lease: Lease) -> str:
        """Return the reason why the GPUs of a waiting job are not free although no lease has them; otherwise ""."""
        if lease.unasked:
            return "it has not asked for its lease yet"
        running = (other for other in self.host.leases.rivals(lease) if not self._has_left(other))
        awaited = (f"job {other.key} has yielded and its processes still run: Slurm suspends it" for other in running)
        no_room = self.host.run(lease.key).no_room or self.host.awaits_memory(lease)
        return self._in_use(lease) or no_room or next(awaited, "")

    def _in_use(self, lease: Lease) -> str:
        """Return the reason why a GPU of a job is another process's, which has no lease on it; otherwise ""."""
        failed = (
            f"GPU {gpu} has failed: {fault}" for gpu, fault in self.host.gpu_faults().items() if gpu in lease.gpus
        )
        others = (one for one in self.host.taken if one.job != lease.job and not one.gpus.isdisjoint(lease.gpus))
        return next(itertools.chain(failed, map(str, others)), "")

    def _look_for_room(self, lease: Lease) -> None:
        """Note a job that would have no room even if the present holders of its GPUs left; forget an old note."""
        watch, run, now = self.coordinator.gpus, self.host.run(lease.key), self.host.clock.monotonic()
        holders = self.host.leases.blockers(lease)
        if now >= run.no_room_until or run.no_room_beside.difference(holder.key for holder in holders):
            run.no_room, run.no_room_beside = "", frozenset()
        if watch is None or run.no_room or not holders:
            return
        kept: dict[int, int] = {}
        for holder in holders:
            for gpu, size in self._kept(self.host.run(holder.key)).items():
                kept[gpu] = kept.get(gpu, 0) + size
        if not lease.gpu_bytes and not kept:
            return
        leaving = {pid for holder in holders for pid in membership.pids_of(holder)}
        found = gpu_room.shortage(lease, watch.last, self.host.leases, self.host.named, kept, leaving)
        if found:
            run.no_room, run.no_room_until = found, now + NO_ROOM_S
            run.no_room_beside = frozenset(holder.key for holder in holders)

    def _look_for_use(self, lease: Lease) -> None:
        """Note why no job that waits could use what a holder would free, by what it kept or would have kept before."""
        watch, run = self.coordinator.gpus, self.host.run(lease.key)
        kept = self._kept(run)
        if watch is None or lease.state != "held" or not kept:
            run.useless = ""
            return
        state = (watch.last.since_s(lease.gpus), self.host.leases.changed)
        if state != run.judged:
            run.judged = state
            run.useless = gpu_room.useless(lease, kept, watch.last, self.host.leases, self.host.named)

    def _kept(self, run: JobRun) -> Mapping[int, int]:
        """Return the memory that a job keeps while it is out, as measured lately; nothing if it was not."""
        return run.kept if self.host.clock.monotonic() - run.kept_at < KEPT_S else {}

    def _awaits_suspend(self, lease: Lease, run: JobRun) -> bool:
        """Return True while Slurm has to act before the job for which another one has yielded may run.

        The one that has yielded is not yet seen to be off its GPUs, or the next one is still suspended.
        """
        now, epoch = self.host.clock.monotonic(), self.host.clock.now()
        if lease.state != "yielded" or now < run.preferred_until or epoch - lease.since_s > SUSPEND_S:
            return False
        rivals = [other for other in self.host.leases if other is not lease and other.overlaps(lease)]
        wanted = any(
            not other.occupying
            and (not other.managed or self._may_run(other, self.host.run(other.key), contended=True))
            for other in rivals
        )
        recent = epoch - lease.since_s < ORDER_S
        resumes = not self.host.rotating() and any(self._awaits_resume(other, ordered=recent) for other in rivals)
        return not any(map(self._is_overdue, rivals)) and (resumes or (wanted and not self._has_left(lease)))

    def _awaits_resume(self, lease: Lease, *, ordered: bool) -> bool:
        """Return True for a frozen job whose turn the service has ordered, or may be about to: Slurm resumes it."""
        ordered = ordered or self.host.clock.monotonic() < self.host.run(lease.key).preferred_until
        return ordered and lease.managed and not lease.occupying and self.host.shown(lease, WATCH_S) == "frozen"

    def _is_overdue(self, lease: Lease) -> bool:
        """Return True for a job that takes no turns and has waited for longer than any suspend takes."""
        return not lease.managed and not lease.occupying and self.host.clock.now() - lease.since_s > SUSPEND_S

    def _has_left(self, other: Lease) -> bool:
        """Return True if a job that has given its lease back is seen to be off its GPUs, as far as that can be seen.

        With a driver it was seen before the lease ended. Without one a rank's word is taken only where no suspend of
        Slurm's follows; otherwise its processes are gone, or frozen.
        """
        if other.state != "yielded" or self.watched(other) or not self.host.facts.suspends or self.host.rotating():
            return True
        last = self.host.run(other.key).seen
        running = self.host.shown(other, LOOK_S if last is not None and last[1] != "running" else WATCH_S) == "running"
        self.watching = self.watching or running
        return not running

    def _may_run(self, lease: Lease, run: JobRun, *, contended: bool) -> bool:
        """Return True if a managed job could use its lease, and may have it without the service's order."""
        # The driver restores in a thread of the process itself, which cannot run while Slurm has stopped the process.
        if lease.unasked or run.driver or any(is_stopped(one.pid) for one in lease.frozen):
            return False
        # Slurm's suspend is looked at: facts may be old, as after a service that died, or of a watchdog's resume.
        frozen = run.seen is not None and run.seen[1] == "frozen"
        self.watching = self.watching or (frozen and self.host.clock.monotonic() < run.preferred_until)
        seen, fact = self.host.shown(lease, WATCH_S if frozen else LOOK_S), self.host.fact_of(lease)
        suspended = fact is not None and fact.suspended
        if seen == "frozen" or (suspended and seen == "gone"):
            return False
        if self.host.rotating() or self.host.clock.monotonic() < run.preferred_until:
            return True
        if suspended:
            return False
        if lease.hosts == 1:
            return True
        # The service's first word on a job of several hosts says who gives it its first lease.
        gang = fact.gang if fact is not None else self.host.clock.now() - lease.since_s <= FACT_S
        return lease.state == "waiting" and not contended and not (gang and self.host.facts.enforce)
