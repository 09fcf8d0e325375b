"""Setup of a simulation, and its result for each job and for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from cadenza.policies.core.model import JobKey
from cadenza.policies.guard import GuardSettings
from cadenza.policies.inputs.cluster import PARTITION
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.inputs.failures import NodeFailure
from cadenza.policies.inputs.queue_rules import QueueRules
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.slurm.backfill import SLURM, Backfill

GUARD = GuardSettings(enforce=True, partitions=frozenset({PARTITION}), max_actions_per_round=10**9, min_run_s=0.0)
"""No limits."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Rounds, costs and conventions of a simulation. Times in seconds."""

    round_s: float = 300.0
    first_round_s: float = 0.0
    costs: SimCosts = field(default_factory=SimCosts)
    synergy: bool = False
    """Conventions of Synergy's simulator: whole iterations a round, jobs end at round ends, speed is best or 1, moves
    are free (``--set preset=synergy``)."""
    lanes: int = 1
    """Lanes per node; with more than one, jobs can take turns."""
    rounds_on_events: bool = False
    """Run a round also at each arrival and end, not only every ``round_s``."""
    horizon_s: float | None = None
    """End here, whether or not jobs still run."""
    until_done: tuple[int, int] | None = None
    """End when the jobs with these positions in order of submission (first included, last excluded) are done."""
    failures: tuple[NodeFailure, ...] = ()
    load: tuple[TraceJob, ...] = ()
    """Jobs without GPUs, which take CPUs and memory: Slurm starts them by itself, and they have no result."""
    interference: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """Relative speeds of two packed models, each in (0, 1] of its speed alone; see ``interference.py``."""
    checkpoint_s: float = 0.0
    """Work between two checkpoints of a job that keeps them: a failure, or a requeue that no save precedes, loses what
    was done since the last one, and of a job that keeps none everything. 0: nothing is ever lost."""
    skip: bool = True
    """Skip rounds whose decision must equal the last one; the result is the same."""
    place: bool = True
    """True: jobs wait until a policy places them, as in the published simulators; False: Slurm starts them."""
    queue: QueueRules = field(default_factory=QueueRules)
    """Rules by which the simulated Slurm orders its queue and bounds it."""
    backfill: Backfill = SLURM
    phased_moves: bool = False
    """True if a move takes several rounds, as on a cluster: checkpoint, requeue, place, start. Then Slurm's books are
    those of its allocations, and a job that is placed where something is still taken waits in Slurm's queue.
    False: one action moves a job at once, and the books follow the policy."""
    lease_times: bool = True
    """False: leases keep the times of their job's last change; only turns, packs and sentences use these."""
    guard: GuardSettings = GUARD
    booked: Callable[[float, int, int], None] | None = None
    """Called with the time, a job and its GPUs from then on, at each change of its allocation."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of one job; times in seconds since the start, None for a time that it did not reach."""

    id: int
    submit_s: float
    start_s: float | None
    finish_s: float | None
    gpus: int
    model: str
    user: str
    work_s: float
    attained_s: float
    to_100_iterations_s: float | None
    """From submission to the end of the hundredth iteration."""
    yields: int = 0
    migrations: int = 0
    tunes: int = 0
    restarts: int = 0

    @property
    def jct_s(self) -> float | None:
        """Return the job completion time, or None if it has not ended."""
        return None if self.finish_s is None else self.finish_s - self.submit_s


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """The cluster from ``time_s`` to the next sample: an event-driven step function; thinned samples are means."""

    time_s: float
    gpus_held: float
    """GPUs that at least one job may use."""
    cpus_used: float
    running: float
    waiting: float
    """Submitted, not ended, without GPUs now."""
    busy: float = 0.0
    """GPUs computing: each held GPU by its jobs' ``gpu_utilization`` (1 without), at most 1 a GPU."""
    idle_waiting: float = 0.0
    """GPUs without a holder while a job waits that fits there by its number of GPUs."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of actions by kind, and of rounds."""

    rounds: int = 0
    decided: int = 0
    """Rounds that were not skipped."""
    yields: int = 0
    migrations: int = 0
    tunes: int = 0
    restarts: int = 0
    packs: int = 0
    unpacks: int = 0
    resizes: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation."""

    jobs: tuple[JobResult, ...]
    """In order of submission, then id."""
    samples: tuple[Sample, ...]
    counts: Counts
    gpus: int
    cpus: int
    end_s: float
    decision_s: tuple[float, ...] = ()
    """Wall time of each decision, for its quantiles; empty without a stopwatch."""
    wall_s: float = 0.0
    unfinished: tuple[JobKey, ...] = ()
