"""A submitted job of a simulation: its progress, its resources, and its record in a snapshot."""

from __future__ import annotations

from math import ceil, floor, inf

from cadenza.policies.core.idle_gpus import Wanted
from cadenza.policies.core.model import (
    Gpu,
    Job,
    JobKey,
    JobState,
    Lease,
    LeaseState,
    Options,
    Placement,
    Progress,
    Share,
    StepRate,
)
from cadenza.policies.core.profile import MB_PER_GB, Profile
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.run_values import JobResult
from cadenza.policies.simulator.scheduler import QueuedJob

FIRST_ITERATIONS = 100
ROUNDING = 1e-6
"""Part of an iteration that is rounding error."""


_NOTHING: tuple[int, tuple[str, ...], Progress | None] = (-1, (), None)
"""Version, nodes and progress of a job that no snapshot has shown yet."""


class SimJob:
    """A job between its submission and its end. Times in seconds since the start of the simulation.

    ``queued`` is the job as the simulated slurmctld has it, which the world sets; ``held`` is true while it has been
    requeued into a hold.
    """

    __slots__ = (
        "_shown",
        "allocated",
        "attained_on",
        "attained_s",
        "cost_until_s",
        "counted",
        "cpus",
        "done_s",
        "finish_s",
        "gpu_type",
        "gpu_utilization",
        "gpus",
        "gpus_held",
        "held",
        "hundred_s",
        "hundred_work_s",
        "key",
        "lease",
        "memory_mb",
        "migrations",
        "move_cost_s",
        "moves",
        "num_nodes",
        "options",
        "packed",
        "placement",
        "profile",
        "promised",
        "queued",
        "ran_s",
        "rate",
        "ready_s",
        "requeued_s",
        "required_nodes",
        "restarts",
        "running",
        "saved_s",
        "saved_work_s",
        "settled_s",
        "slurm_start_s",
        "speed",
        "stale",
        "start_s",
        "state",
        "state_reason",
        "trace",
        "truth",
        "tunes",
        "version",
        "waiting_cost_s",
        "yields",
    )

    def __init__(self, trace: TraceJob, request: tuple[int, int, int], stale: list[SimJob]) -> None:
        self.trace = trace
        self.stale = stale
        """Jobs whose record in the last snapshot is out of date."""
        self.key = JobKey(trace.id, 0)
        self.gpus = trace.gpus
        self.cpus, self.memory_mb, self.num_nodes = request
        self.options = None if not trace.managed else Options(
            min_gpus=trace.min_gpus, max_gpus=trace.max_gpus, model=trace.model or None, priority=trace.priority,
            checkpoints=trace.checkpoints or trace.boasts,
        )  # fmt: skip
        self.queued: QueuedJob
        self.profile = trace.profile
        self.truth: Profile | None = trace.truth or trace.profile
        self.state: JobState = "PENDING"
        self.state_reason, self.held = "", False
        self.required_nodes: tuple[str, ...] = ()
        self.promised: Placement = ()
        """Shares at the place that a Place sends it to; empty: an even spread of its request."""
        self.allocated: Placement = ()
        """Its allocation in Slurm's books."""
        self.placement: Placement = ()
        """Its present resources. Where moves take several rounds, tuning changes these and not Slurm's books."""
        self.done_s = self.attained_s = self.rate = self.settled_s = self.cost_until_s = self.waiting_cost_s = 0.0
        self.ready_s = 0.0
        """Time of its launch; launching goes on while other jobs have its GPUs."""
        self.speed, self.gpu_type, self.gpu_utilization = 1.0, "", _utilization(self.truth)
        self.attained_on: dict[str, float] = {}
        """Seconds on earlier GPU types; the rest of ``attained_s`` was on ``gpu_type``."""
        self.running = False
        self.ran_s: float | None = None
        self.start_s: float | None = None
        """Time at which it first had its GPUs."""
        self.slurm_start_s: float | None = None
        """Time at which Slurm started this incarnation, where moves take several rounds; else ``start_s`` counts."""
        self.requeued_s: float | None = None
        """Time of its last requeue, by which Slurm calls it submitted anew."""
        self.hundred_s: float | None = None
        self.hundred_work_s = FIRST_ITERATIONS * trace.iteration_s
        self._shown, self.version = _NOTHING, 0
        """Counts the changes, so that an end that was foreseen before a change no longer counts."""
        self.counted: tuple[Wanted, int] | None = None  # as one that waits
        self.lease: SimLease | None = None
        self.gpus_held: tuple[Gpu, ...] = ()
        self.packed: set[JobKey] = set()
        self.yields = self.migrations = self.tunes = self.restarts = 0
        self.moves = False
        """True from the order of a move until the job has started again."""
        self.move_cost_s: float | None = None
        """Seconds without progress that are left to pay at the next start, of a move or of a requeue after a save."""
        self.finish_s = self.saved_s = inf
        """The latter: time at which the ordered checkpoint is complete."""
        self.saved_work_s = 0.0
        """Work in the last checkpoint that was ordered; those of its own follow at intervals from there."""

    # --- Progress ---------------------------------------------------------------------------------

    def settle(self, now_s: float) -> None:
        """Add the progress since the last time."""
        if self.running:
            self.attained_s += now_s - self.settled_s
            since_s = max(self.settled_s, self.cost_until_s)
            if now_s > since_s:
                done_s = self.done_s + self.rate * (now_s - since_s)
                if self.hundred_s is None and done_s >= self.hundred_work_s:
                    self.hundred_s = since_s + max(self.hundred_work_s - self.done_s, 0.0) / self.rate
                self.done_s = done_s
        self.settled_s = now_s

    def launch(self, ready_s: float, cost_s: float) -> None:
        """Begin anew at ``ready_s`` with a start-up of ``cost_s``; costs of the former processes are void."""
        self.ready_s, self.waiting_cost_s = ready_s, cost_s

    def run(self, now_s: float, speed: float, rate: float, cost_s: float) -> None:
        """Make progress at ``rate`` from ``cost_s`` after now, or after its launch."""
        self.settle(now_s)
        self.speed, self.rate = speed, rate
        if not self.running:
            self.start_s = now_s if self.start_s is None else self.start_s
        self.running = True
        self.cost_until_s = max(self.cost_until_s, now_s, self.ready_s) + cost_s
        self.changed()

    def lose_unsaved(self, every_s: float) -> None:
        """Fall back to the last checkpoint; a job keeps one after each ``every_s`` seconds of work, or none at all."""
        if not every_s:
            return
        since_s = self.done_s - self.saved_work_s
        self.done_s -= since_s % every_s if self.trace.checkpoints else since_s

    def settle_on(self, gpu_type: str, now_s: float) -> None:
        """Note the type of the GPUs that the job has from now on."""
        if gpu_type != self.gpu_type:
            self.settle(now_s)
            before_s = self.attained_s - sum(self.attained_on.values())
            if before_s > 0:
                self.attained_on[self.gpu_type] = self.attained_on.get(self.gpu_type, 0.0) + before_s
            self.gpu_type = gpu_type

    def pause(self, now_s: float) -> None:
        """Stop making progress."""
        self.settle(now_s)
        self.running, self.rate = False, 0.0
        self.waiting_cost_s += max(self.cost_until_s - max(now_s, self.ready_s), 0.0)
        self.cost_until_s = now_s
        self.ran_s = now_s
        self.finish_s = inf
        self.changed()

    def changed(self) -> None:
        """Note that the foreseen end and the last snapshot's record are out of date."""
        self.version += 1
        self.stale.append(self)

    def ends(self, round_s: float | None) -> float:
        """Return when the job ends at its rate; at the end of a round when ``round_s`` is given."""
        left_s = self.trace.work_s - self.done_s
        begin_s = max(self.settled_s, self.cost_until_s)
        if round_s is None:
            return begin_s + max(left_s, 0.0) / self.rate
        return begin_s + max(ceil(left_s / (self.rate * round_s) - ROUNDING), 1) * round_s

    # --- The job as others see it -----------------------------------------------------------------

    def record(self, now_s: float) -> Job:
        """Return the job as a snapshot shows it."""
        trace, started = self.trace, self.state != "PENDING"
        if self._shown[0] != self.version:  # between its changes only its lease's times move on
            here = tuple([share.node for share in self.placement])
            self._shown = self.version, here, self._progress() if trace.managed else None
        _, nodes, progress = self._shown
        return Job(
            key=self.key,
            user=trace.user,
            account=trace.account,
            partition=trace.partition,
            qos=trace.qos,
            state=self.state,
            gpus=self.gpus,
            cpus=self.cpus,
            memory_mb=self.memory_mb,
            num_nodes=self.num_nodes,
            submit_s=trace.submit_s if self.requeued_s is None else self.requeued_s,
            time_limit_s=self.queued.limit_s,
            name=trace.model,
            start_s=(self.start_s if self.slurm_start_s is None else self.slurm_start_s) if started else None,
            slurm_priority=0 if self.held and not started else self.queued.priority,
            state_reason=self.state_reason,
            nodes=nodes,
            required_nodes=self.required_nodes,
            options=self.options,
            lease=self._lease(now_s),
            profile=self.profile,
            placement=self.placement,
            progress=progress,
            gpu_type=trace.gpu_type,
            barred=trace.barred,
        )

    def _progress(self) -> Progress:
        begins_s = max(self.settled_s, self.cost_until_s)
        return Progress(
            begins_s,
            self.trace.work_s,
            self.done_s,
            self.attained_s + (begins_s - self.settled_s if self.running else 0.0),
            self.ran_s,
            self.running,
            self.rate,
            self.speed,
            self.gpu_type,
            dict(self.attained_on),
            None if self.requeued_s is None else self.trace.submit_s,
        )

    def _lease(self, now_s: float) -> Lease | None:
        lease = self.lease
        if lease is None:
            return None
        held_s = now_s - lease.since_s if lease.holds else 0.0
        ran_s = max(now_s - max(self.settled_s, self.cost_until_s), 0.0)
        return Lease(
            state=lease.state,
            gpus=self.gpus_held,
            vtime_s=lease.vtime_s + held_s,
            held_s=held_s,
            waited_s=0.0 if lease.holds else now_s - lease.since_s,
            ready=now_s >= self.ready_s and self.trace.managed,
            iteration_s=self.trace.iteration_s / self.rate if self.rate else lease.iteration_s,
            step=int((self.done_s + self.rate * ran_s) / self.trace.iteration_s + ROUNDING),
            exclusive=not self.trace.managed,
            checkpoints=self.trace.checkpoints and self.trace.managed,
            saves_away=self.trace.checkpoints and self.trace.managed,
            saving=lease.state == "yielded" and self.saved_s < inf,
            saved=lease.state in ("stopping", "yielded") and now_s >= self.saved_s,
            pace=self.pace(now_s),
        )

    def lease_stands(self, now_s: float) -> bool:
        """Return True if only the times of its lease change until something happens to the job."""
        return self.lease is not None and self.lease.state == "held" and now_s >= self.ready_s

    def pace(self, now_s: float) -> StepRate | None:
        """Return the job's iteration time with its present co-runners, or the last ones; exact, so without error."""
        lease = self.lease
        if lease is None or lease.state != "held" or not self.rate:
            return lease.pace if lease is not None else None
        iteration_s, window_s = self.trace.iteration_s / self.rate, now_s - lease.co_runners_since_s
        return StepRate(iteration_s, int(window_s / iteration_s), window_s, co_runners=lease.co_runners)

    def result(self, finish_s: float | None) -> JobResult:
        """Return the job's result."""
        trace = self.trace
        hundred = None if self.hundred_s is None else self.hundred_s - trace.submit_s
        return JobResult(
            trace.id,
            trace.submit_s,
            self.start_s,
            finish_s,
            trace.gpus,
            trace.model,
            trace.user,
            trace.work_s,
            self.attained_s,
            hundred,
            self.yields,
            self.migrations,
            self.tunes,
            self.restarts,
        )


def _utilization(profile: Profile | None) -> float:
    """Return the part of the time in which a model computes on its GPUs; 1 if it has not been measured."""
    value = profile.gpu_utilization if profile is not None else None
    return 1.0 if value is None else value


class SimLease:
    """A job's lease as its agents keep it."""

    __slots__ = ("co_runners", "co_runners_since_s", "iteration_s", "pace", "since_s", "state", "vtime_s")

    def __init__(self, now_s: float, vtime_s: float) -> None:
        self.state: LeaseState = "waiting"
        self.since_s = now_s
        self.vtime_s = vtime_s
        self.iteration_s: float | None = None
        self.pace: StepRate | None = None
        """Iteration time when the job last held its GPUs."""
        self.co_runners: tuple[JobKey, ...] = ()
        self.co_runners_since_s = now_s

    @property
    def holds(self) -> bool:
        """Return True while the job has its GPUs, also while it stops."""
        return self.state in ("held", "stopping")

    def remember_rate(self, job: SimJob, now_s: float) -> None:
        """Keep a running job's iteration time for the time in which it does not run."""
        self.iteration_s = job.trace.iteration_s / job.rate if job.rate else self.iteration_s
        self.pace = job.pace(now_s)


def even_share(job: SimJob, index: int, node: str) -> Share:
    """Return one node's part of an even spread of a job's request."""
    count = max(job.num_nodes, 1)
    gpus = job.gpus * (index + 1) // count - job.gpus * index // count
    total = max(job.gpus, 1)
    return Share(node, gpus, job.cpus * gpus // total, job.memory_mb * gpus // total)


def whole_iterations(speed: float, iteration_s: float, round_s: float) -> float:
    """Return the work per second if only whole iterations of a round count (Synergy's simulator)."""
    return floor(round_s / (iteration_s / speed) + ROUNDING) * iteration_s / round_s


def best_or_one(profile: Profile | None, placement: Placement, gpus: int, proportional: tuple[float, float]) -> float:
    """Return the speed of Synergy's simulator: the profile's best with the best-case demand, else 1.

    A demand clipped to the server counts linearly in CPUs between the proportional share and the best case.
    ``proportional``: CPUs and MB for each GPU.
    """
    if profile is None:
        return 1.0
    best = profile.best
    cpus = sum(share.cpus for share in placement)
    memory_mb = sum(share.memory_mb for share in placement)
    fair = proportional[0] * gpus
    if cpus + ROUNDING >= best.cpus * gpus and memory_mb + 1 >= best.memory_gb * MB_PER_GB * gpus:
        return profile.best_speed
    if gpus == 1 or cpus <= fair:
        return 1.0
    return 1.0 + (profile.best_speed - 1.0) * min((cpus - fair) / (best.cpus * gpus - fair), 1.0)
