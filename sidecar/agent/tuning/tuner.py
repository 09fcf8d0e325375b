"""The agent's part in tuning: takes orders, divides the host whenever its jobs change, and keeps limits in force."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from cadenza.policies.core.model import JobKey
from cadenza.policies.core.text import ranges
from cadenza.sidecar import orders
from cadenza.sidecar.agent.errors import AgentError
from cadenza.sidecar.agent.ipc.pages import Page
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.state_files import TunedJob, TuningFile, Wish
from cadenza.sidecar.agent.tuning.cgroup_v1 import sweep
from cadenza.sidecar.agent.tuning.claims import Part, Scale, claims, unregistered_jobs
from cadenza.sidecar.agent.tuning.detect import limits_of, writable_groups
from cadenza.sidecar.agent.tuning.limits import Limits, TuningError
from cadenza.sidecar.agent.tuning.planner import MILLI, Grant, plan
from cadenza.sidecar.agent.tuning.topology import Topology

log = logging.getLogger(__name__)

NO_GROUPS = "tuning = cgroups: no control group can be written here, so CPUs go by affinity and memory not at all"
CHECK_INTERVAL_S = 0.5
"""Time between two searches for new steps and processes of tuned jobs, and for jobs that did not register."""


@dataclass
class Tuner:
    """Every method runs in the event loop's thread. ``topology`` is read once: hot-plugged CPUs need a restart.

    While a job is tuned, the other managed jobs of the host are held to their own CPUs if Slurm does not bind them.
    Otherwise they would use the CPUs that one of them lends.
    """

    host: Host
    file: TuningFile
    topology: Topology
    root: Path = Path("/")
    _jobs: dict[JobKey, Part] = field(default_factory=dict)
    _saved: dict[JobKey, dict[str, str]] = field(default_factory=dict)
    _notes: dict[JobKey, str] = field(default_factory=dict)
    _sent: dict[int, tuple[Page, float, int | None]] = field(default_factory=dict)
    """Last values sent to each rank, by pid, with its page."""
    _last_state: tuple[object, ...] = ()
    _unregistered: frozenset[int] = frozenset()
    _orders: int = 0
    _next_check: float = 0.0

    def __post_init__(self) -> None:
        self._scale = Scale(self.topology, self.host.settings.expert.slurm_cpus)
        self._everywhere = frozenset(cpu.id for cpu in self.topology.cpus)
        cgroups = self.host.settings.agent.tuning == "cgroups"
        self.lack = NO_GROUPS if cgroups and not writable_groups(self.root) else ""
        """Reason why this host cannot follow the settings; otherwise empty."""

    # --- orders --------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Take over the limits that an earlier agent had set on jobs that are still here."""
        for job in self.file.recover():
            key = JobKey(job.job, job.restart)
            lease = self.host.leases.get(key)
            self._saved[key] = job.saved
            if lease is not None:
                self._jobs[key] = Part(job.wish, self._limits(lease), ordered=job.ordered)
        sweep(self.root, self._prefix, frozenset(map(self._name, self._jobs)))

    def order(self, lease: Lease, order: orders.Tune) -> None:
        """Take the service's wish for a job; a wish without CPUs and memory ends its tuning."""
        if not (order.cpus > 0 or order.memory_mb > 0):
            self._withdraw(lease.key, "the service took it back")
            return
        off = self.host.settings.agent.tuning == "off"
        if off or not lease.managed:
            reason = "tuning is off in the agent's settings" if off else "it did not opt in"
            log.info("not tuned JOBID=%s: %s", lease.key, reason)
            return
        wish = Wish(max(order.cpus, 0.0), max(order.memory_mb, 0), order.cache_mb)
        part = self._jobs.setdefault(lease.key, Part(wish, None))
        if (part.wish.cpus and not wish.cpus) or (part.wish.memory_mb and not wish.memory_mb):
            self._give_back(lease.key)
        part.wish, part.ordered = wish, True
        self._orders += 1

    def in_force(self, key: JobKey) -> orders.InForce | None:
        """Return the limits in force on a tuned job; None for others."""
        part = self._jobs.get(key)
        if part is None or not part.ordered or part.grant is None or part.limits is None:
            return None
        return orders.InForce(
            cpus=self._scale.cpus(part.grant.milli),
            memory_mb=part.grant.memory_mb,
            cache_mb=_cache(part.wish, part.grant),
            cpu_list=ranges(part.grant.cpus),
            means=part.limits.means,
            note=self._notes.get(key, ""),
        )

    # --- the loop ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Divide anew if a job has come, gone, started or stopped, and enforce the limits on new processes.

        This runs before the agent answers any peer: a job that has just registered finds its CPUs free.
        """
        now = self.host.clock.monotonic()
        checking = bool(self._jobs) and now >= self._next_check
        if checking:
            self._next_check = now + CHECK_INTERVAL_S
            self._unregistered = unregistered_jobs(self.host)
        state = (self.host.leases.changed, id(self.host.facts), self._orders, self._unregistered)
        if not checking and state == self._last_state:
            return
        self._last_state = state
        # Forget jobs that have left the host, and remove the agent's groups of them.
        for key in [key for key in {*self._jobs, *self._saved} if self.host.leases.get(key) is None]:
            if key in self._jobs:
                self._give_back(key)
            self._drop(key)
        pids = {pid for run in self.host.jobs.values() for pid in run.ranks}
        self._sent = {pid: sent for pid, sent in self._sent.items() if pid in pids}
        try:
            self._divide()
        except AgentError as error:
            log.error("tuning is held back: %s", error)  # noqa: TRY400 - the message is complete

    def _divide(self) -> None:
        """Plan all grants, and enforce them: first those that shrink, then those that grow."""
        # 1. All tuning ends if the service only observes or is silent: then it cannot order the end itself.
        facts, silent = self.host.facts, bool(self.host.settings.agent.service) and self.host.rotating()
        if silent or not facts.enforce:
            for key in tuple(self._jobs):
                self._withdraw(key, "the service is silent" if facts.enforce else "the service only observes")
        # 2. Jobs with an order, and those that must be held to their own CPUs, get limits; they are saved first.
        for key, part in self._jobs.items():
            lease = self.host.leases.get(key)
            if part.limits is None and lease is not None:
                with self.host.supervise(key, "its tuning"):
                    part.limits = self._limits(lease)
        self._hold_others()
        self._save()
        if not self._jobs:
            return
        # 3. The plan is enforced, shrinking grants first.
        wanted = plan(self.topology, claims(self.host, self._scale, self._jobs, self._unregistered))
        had = {key: len(part.grant.cpus) if part.grant else 0 for key, part in self._jobs.items()}
        for key in sorted(wanted, key=lambda key: (len(wanted[key].cpus) - had[key], key)):
            with self.host.supervise(key, "its tuning"):
                self._apply(key, self._jobs[key], wanted[key])
        self._save()

    def _hold_others(self) -> None:
        """Hold managed jobs without an order to their own CPUs, as long as others are tuned."""
        tuned = any(part.ordered for part in self._jobs.values())
        for lease in self.host.leases:
            part = self._jobs.get(lease.key)
            if part is not None and part.ordered:
                continue
            held = self._held(lease, part) if tuned and lease.managed else None
            if held is not None:
                self._jobs[lease.key] = held
            elif part is not None:
                self._give_back(lease.key)
                self._drop(lease.key)

    def _held(self, lease: Lease, part: Part | None) -> Part | None:
        """Return the limits that hold a job to its own CPUs; None if Slurm binds it, or if its CPUs are unknown."""
        limits, floor = part.limits if part is not None else self._limits(lease), self._floor(lease.key)
        if limits is None or limits.own or not floor:
            return None
        return Part(Wish(floor, 0), limits, part.grant if part is not None else None, ordered=False)

    def _apply(self, key: JobKey, part: Part, grant: Grant) -> None:
        """Enforce one grant, and tell the job's ranks."""
        if part.limits is None:
            return
        if grant != part.grant:
            log.info(
                "tuned JOBID=%s cpus=%g on %s memory=%d MB by %s",
                key, grant.milli / MILLI, ranges(grant.cpus), grant.memory_mb, part.limits.means,
            )  # fmt: skip
        floor = self._scale.milli(self._floor(key)) or len(part.limits.own) * MILLI or grant.milli or MILLI
        try:
            part.limits.apply(grant, floor)
        except TuningError as error:
            self._failed(key, str(error))
            return
        part.grant = grant
        self._notes.pop(key, None)
        self._tell(key, (grant.milli or floor) / MILLI, _cache(part.wish, grant))

    def _tell(self, key: JobKey, cpus: float, cache_mb: int | None) -> None:
        """Tell each of a job's ranks its resources, once."""
        run = self.host.jobs.get(key)
        for pid, rank in run.ranks.items() if run else ():
            values = (rank.page, cpus, cache_mb)
            if self._sent.get(pid) != values:
                self._sent[pid] = values
                rank.page.tune(cpus, cache_mb)

    def _floor(self, key: JobKey) -> float:
        """Return the CPUs of a job's allocation in Slurm; 0 if unknown."""
        lease = self.host.leases.get(key)
        fact = self.host.fact_of(lease) if lease else None
        return (fact.cpus if fact else 0.0) or (lease.cpus if lease else 0.0)

    def _failed(self, key: JobKey, reason: str) -> None:
        """Log once the reason why a job's limits could not be set."""
        if self._notes.get(key) != reason:
            log.warning("not tuned JOBID=%s: %s", key, reason)
        self._notes[key] = reason

    # --- ends ----------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore Slurm's values because the agent ends: while it is away, no lent CPUs could be returned.

        Orders stay on record, and the next agent enforces them again.
        """
        for key in tuple(self._jobs):
            self._give_back(key)

    def _withdraw(self, key: JobKey, reason: str) -> None:
        """End the tuning of one job."""
        if key in self._jobs:
            log.info("tuning ends JOBID=%s: %s", key, reason)
            self._give_back(key)
            self._drop(key)

    def _give_back(self, key: JobKey) -> None:
        """Restore Slurm's values for one job."""
        part = self._jobs[key]
        if part.limits is not None:
            try:
                part.limits.restore()
            except TuningError as error:
                self._failed(key, str(error))
        if (floor := self._scale.milli(self._floor(key))) and part.grant is not None:
            self._tell(key, floor / MILLI, None)
        part.grant = None
        self._orders += 1

    def _drop(self, key: JobKey) -> None:
        """Take a job off the record."""
        for record in (self._jobs, self._saved, self._notes):
            record.pop(key, None)

    # --- helpers -------------------------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        """Prefix of this agent's groups: agents of several hosts may share a kernel."""
        return f"cadenza_{self.host.name}_"

    def _name(self, key: JobKey) -> str:
        """Return the name of the agent's groups for a job."""
        return f"{self._prefix}{key}"

    def _limits(self, lease: Lease) -> Limits | None:
        """Return a job's limits; None until one of its processes is known."""
        return limits_of(
            lambda: tuple(process.pid for process in lease.processes),
            self._name(lease.key),
            self._saved.setdefault(lease.key, {}),
            self._everywhere,
            cgroups=self.host.settings.agent.tuning == "cgroups",
            root=self.root,
        )

    def _save(self) -> None:
        """Bring the record up to date; raise StateFileError."""
        self.file.write(
            tuple(
                TunedJob(key.id, key.restart, part.wish, self._saved.get(key, {}), part.ordered)
                for key, part in self._jobs.items()
            )
        )


def _cache(wish: Wish, grant: Grant) -> int | None:
    """Return the memory for a job's caches: the ordered amount, less the missing part of its memory."""
    if wish.cache_mb is None:
        return None
    return max(0, wish.cache_mb - max(0, wish.memory_mb - grant.memory_mb))
