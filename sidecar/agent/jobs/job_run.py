"""What the agent knows of a job beyond its lease: processes' connections, the stop or resume under way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.messages import Attach
from cadenza.sidecar.agent.ipc.pages import Page, Telemetry
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.jobs.step_rate import StepRateMeter
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.stop_step import Commit, Plan, Progress


@dataclass
class Rank:
    """One attached process. A lost connection leaves it here until the process ends or attaches again."""

    session: Session | None
    pid: int
    hello: Attach
    page: Page
    out: bool = False
    """Its state is in host memory, or it was told to move it there and to wait."""
    arrived: int | None = None
    """Boundary at which it waits for the next word."""
    bytes: int = 0
    refused: str = ""
    requeue_owner: str = ""
    """Who requeues the job by itself, as this rank says."""

    @property
    def progress(self) -> Progress:
        """How far the rank is, for :func:`plan_stop`."""
        if self.arrived is not None:
            return Progress(self.arrived, arrived=True, refused=self.refused)
        return Progress(self.page.step, arriving=self.page.state == wire.STATE_ARRIVED)

    def expected_here(self, hosts: int) -> int:
        """Return how many ranks of the job this host must have, as this one says."""
        return self.hello.local_world_size or -(-self.hello.world_size // max(hosts, 1))


@dataclass
class Waiter:
    """A SPANK plugin that waits for the first lease; monotonic times in seconds."""

    session: Session
    deadline: float
    next_word: float


@dataclass
class Saving:
    """What a stop for a checkpoint knows beyond other stops; seconds, and monotonic times in seconds."""

    save_s: float
    """Longest time that saving may take."""
    hold_s: float
    """How long the ranks stand after it for their job to be requeued."""
    done: set[int] = field(default_factory=set)
    """Pids of the ranks whose part is on the disk."""
    done_at: float | None = None
    """When all of them were."""
    path: str = ""
    """Where the checkpoint is, as far as a rank has said it."""


@dataclass
class Stop:
    """A stop under way; monotonic times in seconds."""

    order: int
    origin: str
    """Who asked: *service*, *turn* (local rotation), *exclusive* (a job that did not opt in starts), *driver*,
    *unpack* (its pack is over), or *stray* (its ranks run without a lease)."""
    began: float
    timeout_s: float
    remote: bool = False
    """The job has ranks on other hosts: the service computes the stop step and says commit."""
    step: int = 0
    committed: bool = False
    boundary_s: float = 0.0
    copy_s: float = 0.0
    bytes: int = 0
    seen: tuple[Progress, ...] = ()
    seen_at: float = 0.0
    asked: int = 0
    """The stop step that the service named; this host may be beyond it."""
    told: tuple[int, bool, str] | None = None
    """The last Steps sent to the service."""
    told_at: float = 0.0
    saving: Saving | None = None
    """Set where the ranks are to save a checkpoint instead of moving their state out."""

    @property
    def purpose(self) -> int:
        """What the ranks' pages say that the stop is for."""
        return wire.PURPOSE_YIELD if self.saving is None else wire.PURPOSE_CHECKPOINT

    def standing(self, plan: Plan) -> tuple[int, bool]:
        """Return the step, and whether all ranks here have arrived at it, for the service's own plan.

        Before all have arrived that is less than the stop step, however far the first of them is: otherwise
        the host would look as if it had slipped past it. When one has, it is the step before the next try.
        """
        if isinstance(plan, Commit):
            return plan.step, True
        steps = [one.step for one in self.seen]
        if not self.asked:
            return max(steps, default=0), False
        if self.step > self.asked:
            return self.step - 1, False
        return min(*steps, self.asked - 1) if steps else 0, False


@dataclass
class Resume:
    """A resume under way; monotonic time in seconds."""

    began: float
    pending: set[int]
    """Pids of ranks that have not answered yet."""
    copy_s: float = 0.0


@dataclass
class JobRun:
    """One incarnation on this host."""

    key: JobKey
    ranks: dict[int, Rank] = field(default_factory=dict)
    """By pid: a second process that calls itself rank 0 must be stopped as well as the first."""
    waiters: list[Waiter] = field(default_factory=list)
    stop: Stop | None = None
    resume: Resume | None = None
    detached: str = ""
    note: str = ""
    """Last refusal or time-out, for ``cadenza why``."""
    retry_at: float = 0.0
    """Monotonic time before which no new stop is tried."""
    preferred_until: float = 0.0
    """Monotonic time until which free GPUs go to this job before any other."""
    empty_since: float | None = None
    """Monotonic time at which the last known process ended."""
    batch_ended: bool = False
    listed: bool = False
    """The service has named this job in its Facts."""
    freezable: bool = False
    """The driver path may stop it where its ranks cannot."""
    driver: str = ""
    """What the driver path is doing with it; empty when nothing, or when all of it is in host memory."""
    lost: str = ""
    """Why the driver path cannot bring it back, if so."""
    pacer: StepRateMeter = field(default_factory=StepRateMeter)
    followed: bool = False
    """Another host reads the files that it uses: it is to go there."""

    def connected(self) -> list[Rank]:
        """Return the ranks that can be talked to."""
        return [rank for rank in self.ranks.values() if rank.session is not None]

    @property
    def saves(self) -> bool:
        """Whether every rank here can save a checkpoint on order."""
        return bool(self.ranks) and all(rank.page.saves for rank in self.ranks.values())

    @property
    def saved(self) -> bool:
        """Whether the ranks here stand still after a complete checkpoint, ready for a requeue."""
        return self.stop is not None and self.stop.saving is not None and self.stop.saving.done_at is not None

    def may_freeze(self, lease: Lease) -> bool:
        """Whether the driver path may take over: it frees the GPUs of holders only."""
        return self.freezable and lease.occupying

    def strays(self, lease: Lease) -> bool:
        """Whether ranks run although the job has no lease: the agent did not know it, and gave its GPUs away."""
        return not lease.occupying and any(not rank.out for rank in self.ranks.values())

    def world_size(self) -> int:
        """Return the ranks of the whole job as they say; 0 before the first attach."""
        return max((rank.hello.world_size for rank in self.ranks.values()), default=0)

    def requeue_owner(self) -> str:
        """Return who besides us requeues the job, as its ranks say; "" when nobody does."""
        return next((rank.requeue_owner for rank in self.ranks.values() if rank.requeue_owner), "")

    def why_not_ready(self, lease: Lease, now: float) -> str:
        """Return why the job cannot be asked to yield now; empty when it can. ``now`` is monotonic."""
        if not lease.managed:
            return "it did not opt in"
        if not lease.gpus:
            return "its GPUs are not known to the agent"
        if self.driver:
            return self.driver
        if (why := self.unattached(lease)) and not self.freezable:
            return why
        if now < self.retry_at:
            return f"its last stop failed ({self.note}); next try in {self.retry_at - now:.0f} s"
        return ""

    def unattached(self, lease: Lease) -> str:
        """Return why its ranks cannot be asked to stop; empty when they can."""
        return self.detached or self._missing(lease)

    def _missing(self, lease: Lease) -> str:
        """Name the ranks that cannot be reached."""
        if not self.ranks:
            return "no process has attached: call cadenza's attach() or start it with `cadenza run`"
        lost = sorted(rank.hello.rank for rank in self.ranks.values() if rank.session is None)
        if lost:
            return f"rank {lost[0]} has lost its connection to the agent"
        numbers = Counter(rank.hello.rank for rank in self.ranks.values())
        if double := [number for number, count in numbers.items() if count > 1]:
            return f"{numbers[double[0]]} processes attached as rank {double[0]}: they cannot stop together"
        expected = max(rank.expected_here(lease.hosts) for rank in self.ranks.values())
        return "" if len(self.ranks) >= expected else f"{len(self.ranks)} of {expected} ranks have attached"

    def telemetry(self) -> Telemetry:
        """Return the furthest step and the slowest rank's iteration times."""
        each = [rank.page.telemetry() for rank in self.ranks.values()]
        return Telemetry(
            max((one.step for one in each), default=0),
            max((one.iteration_s for one in each if one.iteration_s is not None), default=None),
            max((one.iteration_p99_s for one in each if one.iteration_p99_s is not None), default=None),
        )
