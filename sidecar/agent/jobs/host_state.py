"""The agent's whole state in one value: settings, leases, jobs, and messages waiting to leave."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from cadenza.policies.core.model import JobKey
from cadenza.policies.core.text import printable
from cadenza.sidecar import orders
from cadenza.sidecar.agent.ipc import slurm_steps
from cadenza.sidecar.agent.ipc.mounts import file_system_of
from cadenza.sidecar.agent.ipc.slurm_steps import Shown
from cadenza.sidecar.agent.ipc.transport import Outbox
from cadenza.sidecar.agent.jobs.job_run import JobRun
from cadenza.sidecar.agent.jobs.job_supervisor import Step, Supervisor
from cadenza.sidecar.agent.jobs.stop_states import AwayStop
from cadenza.sidecar.agent.leases.book import Taken
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable, Stretch
from cadenza.sidecar.agent.leases.membership import belongs, look_at
from cadenza.sidecar.agent_settings import AgentSettings
from cadenza.sidecar.bounds import MAX_NAME, MAX_NUMBER, MAX_PATHS, MAX_TAKEN, MAX_TEXT
from cadenza.sidecar.clock import Clock

log = logging.getLogger(__name__)

NO_FACTS = orders.Facts(orders.VERSION, jobs=(), slice_s=60.0, share_between_users=False, enforce=True)
"""Facts that hold until the service has sent some."""
SURVIVORS_S = 5.0
"""Age at which processes that outlive their job are reported: Slurm kills them first (slurm.conf(5), KillWait)."""
FACTS_S = 2.0
"""Longest wait of an agent that starts for the service's facts, before it gives the first lease."""
LOOK_S = 1.0
"""Time between two looks at a job's processes for the report."""
STEPS_LOOK_S = 2.0
"""Time between two looks at all steps on the host, which cost a look at each process."""
ABSENT_S = 10.0
"""Time without any step after which a job that Slurm calls running has ended."""
AMISS_S = 3.0
"""Time for which processes may contradict Slurm's word, as during a suspend with its grace time of 2 s (slurm.conf(5),
suspend_grace_time)."""
AMISS: Mapping[tuple[bool, Shown], str] = {
    (False, "frozen"): "Slurm calls it running, and its processes are frozen",
    (True, "running"): "Slurm calls it suspended, and its processes run",
}
MEMORY_MARGIN = 1.25
"""Free host memory that GPU state needs there, as a multiple of its size: the copy's allocator rounds up, and what
other processes take in that time is not known."""
CLOCK_JUMP_S = 0.5
"""Smaller steps of the wall clock are ignored: jobs' virtual times differ by as much anyway."""


@dataclass
class Host:
    """Shared by the parts of the agent; only the event loop's thread touches it."""

    settings: AgentSettings
    clock: Clock
    name: str
    leases: LeaseTable = field(default_factory=LeaseTable)
    jobs: dict[JobKey, JobRun] = field(default_factory=dict)
    facts: orders.Facts = NO_FACTS
    outbox: Outbox = field(default_factory=Outbox)
    upward: list[orders.FromAgent] = field(default_factory=list)
    """Messages for the service."""
    last_order: int = 0
    heard_at: float | None = None
    """Monotonic time of the service's last message."""
    facts_at: float = 0.0
    """Monotonic time of its last facts."""
    started_at: float = 0.0
    taken: list[Taken] = field(default_factory=list)
    """GPUs in use without a lease: as the agent found them when it started, or by jobs that had not asked for one."""
    faults: tuple[str, ...] = ()
    """Faults of this host that the agent goes on with, each as a sentence for ``cadenza doctor``."""
    early: dict[int, str] = field(default_factory=dict)
    """Jobs that used a GPU before they had asked for their lease, with what was seen: they wait where they start."""
    steps: Callable[[], Iterable[slurm_steps.Step]] = slurm_steps.steps
    """Returns the steps of all jobs that Slurm has on this host now."""
    look: Callable[[Lease], Shown] = look_at
    """Returns the state of a job's processes now."""
    gpu_faults: Callable[[], Mapping[int, str]] = dict
    """Returns the driver's word on each GPU that has failed."""
    divided_gpus: Callable[[], Sequence[int]] = tuple
    """Returns the GPUs that are divided (MIG)."""
    _clock_offset_s: float | None = None
    _steps_looked_at: float = float("-inf")
    _absent_since: dict[JobKey, float] = field(default_factory=dict)
    _indexed: orders.Facts | None = None
    """Facts that ``_fact_of`` was made from."""
    _fact_of: dict[JobKey, orders.JobFacts] = field(default_factory=dict)

    def rotating(self) -> bool:
        """Return True if the service has been silent for so long that turns are taken here."""
        if not self.settings.agent.service:
            return True
        last = self.started_at if self.heard_at is None else self.heard_at
        return self.clock.monotonic() - last > self.settings.expert.service_timeout_s

    @property
    def stopping(self) -> bool:
        """True while ranks of a job are being brought to one boundary."""
        return any(run.stop is not None and not run.stop.committed for run in self.jobs.values())

    def next_order(self) -> int:
        """Return a new number for an order; a restarted agent does not repeat one, and no job outlives the boot."""
        self.last_order = max(self.last_order + 1, int(self.clock.monotonic() * 1000))
        return self.last_order

    def run(self, key: JobKey) -> JobRun:
        """Return the run of a job that has a lease, new if there is none yet."""
        run = self.jobs.get(key)
        if run is None:  # setdefault() would make one in each call
            run = self.jobs[key] = JobRun(key)
        return run

    def fact_of(self, lease: Lease) -> orders.JobFacts | None:
        """Return the service's last facts of a job, or None."""
        if self._indexed is not self.facts:
            self._indexed = self.facts
            self._fact_of = {JobKey(fact.job, fact.restart): fact for fact in self.facts.jobs}
        return self._fact_of.get(lease.key)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.jobs)

    def supervise(self, key: JobKey | None, step: str) -> Step:
        """Return the supervision of one step of a job, or without a key of a step for the whole host."""
        return self.supervisor.step(key, step)

    @property
    def handled(self) -> list[Lease]:
        """The leases of all jobs but those that are left alone after a fault."""
        return [lease for lease in self.leases if not self.run(lease.key).fault]

    @property
    def awaits_facts(self) -> bool:
        """True for a moment after the start, until the service has been heard: no lease is given before."""
        waiting = bool(self.settings.agent.service) and self.heard_at is None and not self.rotating()
        return waiting and self.clock.monotonic() - self.started_at < FACTS_S

    def release_taken(self) -> None:
        """Give GPUs free whose processes without a lease have ended."""
        left = [one for one in self.taken if one.there]
        for one in self.taken:
            if one not in left:
                log.info("GPU free again: %s", one)
        self.taken = left

    def taken_report(self) -> tuple[str, ...]:
        """Return a sentence for each GPU that has failed, and each process that keeps GPUs without a lease."""
        now = self.clock.monotonic()
        failed = [printable(f"GPU {gpu} has failed: {fault}", MAX_TEXT) for gpu, fault in self.gpu_faults().items()]
        lasting = (one for one in self.taken if now - one.since_s >= SURVIVORS_S)
        divided = (self.divided,) if self.divided else ()
        return (*divided, *failed, *map(str, lasting))[:MAX_TAKEN]

    @property
    def divided(self) -> str:
        """Reason why no job of this host shares its GPUs: MIG is on, so that Slurm numbers instances; otherwise ""."""
        gpus = self.divided_gpus()
        return f"GPU {gpus[0]} is divided (MIG), and jobs take turns on whole GPUs only" if gpus else ""

    def shown(self, lease: Lease, within_s: float = LOOK_S) -> Shown:
        """Return the state of a job's processes as the host shows it, at most ``within_s`` old."""
        run, now = self.run(lease.key), self.clock.monotonic()
        if run.seen is None or now - run.seen[0] >= within_s:
            run.seen = now, self.look(lease)
        return run.seen[1]

    def named(self, pid: int) -> str:
        """Return a process's name in a text: its pid, and its job if that has a lease here."""
        return f"pid {pid}" + next((f" of job {one.key}" for one in self.leases if belongs(pid, one)), "")

    def amiss(self, lease: Lease) -> str:
        """Return the difference between Slurm's word and a job's processes once it has lasted; otherwise "".

        A slurmd that is killed in the middle of a suspend or resume leaves one, and a slurmctld that forgets its last
        seconds.
        """
        fact, run = self.fact_of(lease), self.run(lease.key)
        # Facts of a service that is silent are no word of Slurm's.
        wrong = AMISS.get((fact.suspended, self.shown(lease))) if fact is not None and not self.rotating() else None
        if wrong is None:
            run.amiss_since = None
            return ""
        now = self.clock.monotonic()
        run.amiss_since = now if run.amiss_since is None else run.amiss_since
        return wrong if now - run.amiss_since >= AMISS_S else ""

    def absent(self) -> tuple[orders.AbsentJob, ...]:
        """Return the jobs of the facts of which no step has been here for ``ABSENT_S``."""
        now = self.clock.monotonic()
        if self.rotating() or not self.facts.jobs:
            self._absent_since.clear()
        elif now - self._steps_looked_at >= STEPS_LOOK_S:
            self._steps_looked_at = now
            # A slurmctld that was killed forgets that a job has ended, and calls it running until slurmd registers
            # again, half an hour later. A job that has only just come, or ends, has its slurmstepd.
            here = {step.job for step in self.steps()}
            gone = {JobKey(fact.job, fact.restart) for fact in self.facts.jobs if fact.job not in here}
            self._absent_since = {key: self._absent_since.get(key, now) for key in gone}
        return tuple(
            orders.AbsentJob(key.id, key.restart)
            for key, since in sorted(self._absent_since.items())
            if now - since >= ABSENT_S
        )

    def awaits_memory(self, lease: Lease) -> str:
        """Return the reason why a job waits for host memory before its first lease; otherwise ""."""
        first = lease.state == "waiting" and lease.managed and self.facts.memory_mb
        return self.run(lease.key).no_memory if first else ""

    # --- in each pass of the event loop --------------------------------------------------------------------

    def follow_clock(self) -> None:
        """Shift the leases' times if the wall clock was set, or the host slept, since the last call.

        All waiting is counted by CLOCK_MONOTONIC, which does not jump (clock_gettime(2)). Leases alone have wall times:
        they are on disk, and the service compares them with its own.
        """
        started = self.clock.monotonic()
        offset_s = self.clock.now() - started
        if self.clock.monotonic() - started > CLOCK_JUMP_S / 10:
            return  # the agent was preempted between the two clocks
        before, self._clock_offset_s = self._clock_offset_s, offset_s
        if before is None or abs(offset_s - before) < CLOCK_JUMP_S:
            return
        log.warning("the wall clock jumped by %.1f s; leases move along", offset_s - before)
        self.leases.shift(offset_s - before)

    def update_step_rates(self) -> None:
        """Tell each job's meter its present co-runners: jobs with leases and state on the same GPUs."""
        running = [
            lease
            for lease in self.leases
            if lease.occupying
            and (run := self.run(lease.key)).resume is None
            and any(not rank.out for rank in run.ranks.values())
        ]
        now = self.clock.monotonic()
        for lease in self.leases:
            run, co_runners = self.run(lease.key), None
            if lease in running:
                co_runners = frozenset(other.key for other in running if other is not lease and other.overlaps(lease))
            with self.supervise(lease.key, "measuring its pace"):
                run.step_rate.update(co_runners, run.pages, now)

    # --- receipts ------------------------------------------------------------------------------------------

    def receipt_fields(self, run: JobRun, rank: int) -> dict[str, object] | None:
        """Return the receipt that a rank hears of; empty: it has to find nothing; None: that is not known yet.

        A second process of a rank that has restored is another program of the job, or restores again by itself.
        """
        alone = not self.settings.agent.service
        if not (run.told or alone or run.key.restart == 0):
            return None
        found = run.to_find
        if found is None or rank in run.arrived or run.unrestored:
            return {}
        since_s = self.facts.at_s - found.left_s + self.clock.monotonic() - self.facts_at
        away_s = max(since_s, 0.0) if found.left_s and self.facts.at_s else 0.0
        return {"restart": found.restart, "step": found.step, "paths": found.paths, "away_s": away_s}

    def file_system_of(self, run: JobRun, paths: Sequence[str]) -> str:
        """Return the file system of a job's checkpoint, of several the first; "" if it is not known."""
        pid = next(iter(run.ranks), None)
        return file_system_of(paths[0], self.name, pid) if paths else ""

    # --- messages for the service --------------------------------------------------------------------------

    def files(self, lease: Lease, paths: Iterable[str]) -> orders.Files:
        """Return the message that lists a job's files for other hosts; names that no line can hold are left out."""
        names = tuple(path for path in paths if path.isprintable() and len(path) <= MAX_TEXT)[:MAX_PATHS]
        return orders.Files(orders.VERSION, self.name, lease.job, lease.restart, names)

    def report_stretch(self, stretch: Stretch) -> None:
        """Tell the service of a stretch of holding GPUs."""
        self.upward.append(
            orders.LeaseLog(
                v=orders.VERSION,
                host=self.name,
                job=stretch.key.id,
                restart=stretch.key.restart,
                gpus=stretch.gpus,
                from_s=stretch.from_s,
                to_s=stretch.to_s,
            )
        )

    def report_switch(
        self,
        lease: Lease,
        kind: str,
        seconds: tuple[float, float, float] = (0.0, 0.0, 0.0),
        size: int = 0,
        note: str = "",
    ) -> None:
        """Tell the service how a switch went; ``seconds`` are those of boundary, copy and total."""
        self.upward.append(
            orders.Switched(
                v=orders.VERSION,
                host=self.name,
                job=lease.job,
                restart=lease.restart,
                kind=kind,
                at_s=self.clock.now(),
                boundary_s=seconds[0],
                copy_s=seconds[1],
                total_s=seconds[2],
                bytes=min(size, MAX_NUMBER),
                iteration_p99_s=self.run(lease.key).telemetry.iteration_p99_s,
                note=printable(note, MAX_TEXT),
            )
        )

    def lease_report(self, lease: Lease) -> orders.LeaseReport:
        """Return the report of one job; of one that is left alone the agent's own figures, none of the job's."""
        now, run = self.clock.now(), self.run(lease.key)
        plain = orders.LeaseReport(
            job=lease.job,
            restart=lease.restart,
            uid=lease.uid,
            node=printable(lease.node, MAX_NAME),
            gpus=lease.gpus,
            state=lease.state,
            managed=lease.managed,
            vtime_s=0.0,
            held_s=lease.held_s(now),
            since_s=lease.since_s,
            ranks=0,
            world_size=0,
            hosts=lease.hosts,
            ready=False,
            why_not_ready=run.fault,
            note=run.fault,
            pack=lease.pack,
        )
        if run.fault:
            return plain
        reason = run.not_ready_reason(lease, self.clock.monotonic())
        counters = run.telemetry
        return msgspec.structs.replace(
            plain,
            vtime_s=lease.vtime(now),
            ranks=len(run.connected),
            world_size=run.world_size,
            ready=reason is None,
            why_not_ready=printable(reason or "", MAX_TEXT),
            step=counters.step,
            iteration_s=counters.iteration_s,
            iteration_p99_s=counters.iteration_p99_s,
            note=printable("; ".join(filter(None, (run.note, _kept(lease)))), MAX_TEXT),
            requeue_owner=run.requeue_owner,
            checkpoints=run.can_checkpoint,
            saves_away=run.can_checkpoint_away and not lease.frozen,
            saving=isinstance(run.stop, AwayStop) or run.eviction is not None,
            saved=run.checkpointed,
            receipt=run.receipt,
            lost_s=run.lost_s,
            unrestored=printable(run.unrestored, MAX_TEXT),
            unready=printable(run.unready, MAX_TEXT),
            file_system=printable(run.file_system, MAX_NAME),
            stalls=run.stalls(self.clock.monotonic()),
            lost=printable(run.lost or run.failed, MAX_TEXT),
            pace=run.step_rate.measure(run.pages, self.clock.monotonic()),
            refusals=run.refusals,
            unyielding=""
            if run.unable_reason(lease)
            else printable(run.unyielding_reason(self.clock.monotonic()), MAX_TEXT),
            shown=self.shown(lease),
            amiss=self.amiss(lease),
            late=lease.unasked,
            early=printable(lease.early, MAX_TEXT),
            no_room="" if lease.occupying else printable(run.no_room or self.awaits_memory(lease), MAX_TEXT),
        )


def _kept(lease: Lease) -> str:
    """Return the sentence about GPU memory that a job keeps while it is out, "" for none."""
    left = sum(lease.left_bytes) if lease.state == "yielded" else 0
    return f"it keeps {left >> 20} MB on its GPUs while it is out" if left else ""
