"""The three kinds of stop, and the states that a stop passes through.

A stop brings all ranks of a job to one boundary (*aligning*). Its kind decides the rest: the ranks move their
state out (*offloading*) or save a checkpoint (*saving*), and then the lease ends or they stand still for a
requeue (*saved*). Where ranks cannot stop by themselves, the driver path takes over (*freezing*).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from cadenza.sidecar import wire
from cadenza.sidecar.agent.errors import LeaseConflictError
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable, Stretch
from cadenza.sidecar.stop_step import Commit, Plan, Progress, plan_stop

TRANSITIONS: tuple[tuple[str, str, str], ...] = (
    ("running", "order", "aligning"),
    ("aligning", "raise stop step", "aligning"),
    ("aligning", "withdraw", "running"),
    ("aligning", "all arrived to yield", "offloading"),
    ("aligning", "all arrived to save", "saving"),
    ("aligning", "hand to driver", "freezing"),
    ("offloading", "all offloaded", "yielded"),
    ("offloading", "hand to driver", "freezing"),
    ("offloading", "fail", "running"),
    ("saving", "all saved", "saved"),
    ("saving", "fail", "running"),
    ("saved", "go on", "running"),
    ("saved", "fail", "running"),
    ("running", "order away", "saving away"),
    ("saving away", "all saved", "saved away"),
    ("saving away", "fail", "yielded"),
    ("saved away", "go on", "yielded"),
    ("saved away", "fail", "yielded"),
    ("freezing", "all checkpointed by driver", "yielded"),
    ("freezing", "all offloaded", "yielded"),
    ("freezing", "fail", "running"),
    ("freezing", "lose", "lost"),
)
"""State, event, next state. A stop exists from *order* until it comes to *running*, *yielded* or *lost*. A job
that has yielded is ordered to save *away*, and is *yielded* again afterwards."""
_NEXT: Mapping[tuple[str, str], str] = {(state, event): after for state, event, after in TRANSITIONS}
MIN_OFFLOAD_S = 60.0
MAX_OFFLOAD_S = 600.0
"""Bounds of the time in which ranks must have moved their state."""
OFFLOAD_BYTES_S = float(128 << 20)
"""Bytes a second that every host moves, also to a disk as a fallback."""
OVERDUE = 0.5
"""Part of the longest time of a save after which it is overdue."""
REMOTE_EXTRA_S = 5.0
"""Extra time that an agent waits for the service in a multi-node stop, beyond the service's own time-out."""


@dataclass
class Stop:
    """A stop under way; monotonic times in seconds."""

    order: int
    origin: str
    """Cause: *service*, *turn* (local rotation), *exclusive* (a job that did not opt in starts), *driver*, *unpack*
    (the service ended its pack), *unleased* (its ranks run without a lease), *no room* (its state did not fit on its
    GPUs when it had its lease back), *failed* or *failed again* (one of these GPUs fails)."""
    began: float
    timeout_s: float
    multi_node: bool = False
    """The job has ranks on other hosts: the service computes the stop step and commits."""
    state: str = "running"
    step: int = 0
    boundary_s: float = 0.0
    """Time from the order until all ranks had arrived."""
    copy_s: float = 0.0
    survey_s: float = 0.0
    """Time that a rank looked for its state at the boundary, which is part of ``boundary_s``."""
    bytes: int = 0
    progress: tuple[Progress, ...] = ()
    progress_at: float = 0.0
    """Time of the last change of ``progress``."""
    service_step: int = 0
    """Stop step named by the service; this host may be beyond it."""
    arrived_at: float = 0.0
    """Time at which a rank has last said that it stands at a boundary."""
    out_at: float | None = None
    """Time at which all ranks said that they have moved out."""
    sent: tuple[int, bool, str] | None = None
    """Content of the last Steps message to the service."""
    sent_at: float = 0.0

    purpose: ClassVar[int] = wire.PURPOSE_YIELD
    """The wire's ``PURPOSE_…`` for the ranks' pages."""
    begin: ClassVar[str] = "order"
    arrival: ClassVar[str] = "all arrived to yield"
    driver_may_help: ClassVar[bool] = True
    """A job whose ranks refuse to stop may be handed to the driver path."""

    def __post_init__(self) -> None:
        self.progress_at = self.began
        if self.state == "running":
            self.move(self.begin)

    @property
    def committed(self) -> bool:
        """True once all ranks have arrived, or the driver path has taken over."""
        return self.state != "aligning"

    def move(self, event: str) -> None:
        """Go to the next state; raise LeaseConflictError for an event that the table does not have."""
        after = _NEXT.get((self.state, event))
        if after is None:
            raise LeaseConflictError(f"order {self.order}: {event!r} does not follow {self.state!r}")
        self.state = after

    def plan(self, progress: tuple[Progress, ...], now: float, *, in_step: bool) -> Plan:
        """Return the next step toward one common boundary, given the progress of this host's ranks.

        Ranks that are not ``in_step`` each stop at a boundary of their own.
        """
        if progress != self.progress:
            self.progress, self.progress_at = progress, now
        return plan_stop(
            progress,
            stop=self.step,
            waited_s=now - self.began,
            timeout_s=self.timeout_s + REMOTE_EXTRA_S * self.multi_node,
            quiet_s=now - self.progress_at,
            in_step=in_step,
        )

    def host_progress(self, plan: Plan) -> tuple[int, bool]:
        """Return the step of this host, and True if all its ranks have arrived there, for the service's own plan.

        Until all have arrived the step is less than the stop step, however far the first rank is: otherwise the host
        would look as if it had slipped past. If a rank did slip past, it is the step before the next attempt.
        """
        if isinstance(plan, Commit):
            return plan.step, True
        steps = [one.step for one in self.progress]
        if not self.service_step:
            return max(steps, default=0), False
        if self.step > self.service_step:
            return self.step - 1, False
        return min(*steps, self.service_step - 1) if steps else 0, False

    def on_all_arrived(self, now: float) -> None:
        """Let the ranks do what the stop is for."""
        self.move(self.arrival)
        self.boundary_s = now - self.began

    def on_timeout(self, now: float) -> tuple[str, str] | None:
        """Return event and reason if the ranks stand longer than allowed."""
        del now
        return None

    def end(self, leases: LeaseTable, lease: Lease, now: float) -> Stretch | None:
        """Take the lease of a job that no longer uses its GPUs; return the stretch that ends."""
        return leases.release(lease, now)

    def give_back(self, leases: LeaseTable, lease: Lease, now: float) -> None:
        """Return the lease to a job that runs on."""
        if lease.occupying:
            leases.keep(lease, now)


@dataclass
class YieldStop(Stop):
    """The ranks move their state to host memory, and the lease ends."""

    def on_timeout(self, now: float) -> tuple[str, str] | None:
        """Return event and reason if the ranks take too long to move their state, or do not say that they have."""
        limit_s = min(MIN_OFFLOAD_S + self.bytes / OFFLOAD_BYTES_S, MAX_OFFLOAD_S)
        if self.state == "offloading" and self.out_at is None and now - self.began - self.boundary_s > limit_s:
            return "fail", f"its ranks had not moved their state after {limit_s:.0f} s"
        return None


@dataclass
class CheckpointStop(Stop):
    """The ranks save a checkpoint and stand still until a requeue, an order to go on, or a time-out."""

    save_s: float = 0.0
    """Longest time that saving may take."""
    hold_s: float = 0.0
    """Longest time that the ranks wait for the requeue afterwards."""
    goal: str = ""
    """Purpose for the job's own output: a predicate of what it does then."""
    saved_pids: set[int] = field(default_factory=set)
    """Ranks with their part on disk."""
    saved_at: float | None = None
    """Time at which the checkpoint was complete."""
    paths: tuple[str, ...] = ()
    """Paths of the checkpoint, once a rank has reported them."""
    saved_step: int = 0
    """Its step, in the unit of the script."""
    lost_s: float = 0.0
    """Training since then that the next start repeats."""

    purpose: ClassVar[int] = wire.PURPOSE_CHECKPOINT
    arrival: ClassVar[str] = "all arrived to save"
    driver_may_help: ClassVar[bool] = False

    def on_timeout(self, now: float) -> tuple[str, str] | None:
        """Return event and reason if saving, or the requeue after it, takes too long."""
        if self.saved_at is not None and now - self.saved_at > self.hold_s:
            waited = f"not requeued within {self.hold_s:g} s of its checkpoint"
            return "go on", waited if self.hold_s else "its checkpoint is complete"
        if self.saved_at is None and self.committed and now - self.began - self.boundary_s > self.save_s:
            return "fail", f"its checkpoint was not complete after {self.save_s:g} s"
        return None

    def overdue(self, now: float) -> bool:
        """Return True if the ranks have been saving for so long that something may be wrong with their file system."""
        saving = self.saved_at is None and self.committed
        return saving and now - self.began - self.boundary_s > OVERDUE * self.save_s


@dataclass
class AwayStop(CheckpointStop):
    """The ranks of a job that has yielded save a checkpoint from host memory, each where it waits for the lease.

    They stand at one boundary already. Until this stop ends the job gets no lease.
    """

    begin: ClassVar[str] = "order away"


@dataclass
class UnleasedStop(Stop):
    """Ranks run without a lease because the agent had forgotten their job and given its GPUs away.

    If each rank were told to stop alone, it would do so at a boundary of its own and leave the others waiting in a
    collective, with their state on the GPUs. So they train on until this stop brings them to one boundary. Until then
    no other job gets their GPUs; the present holder keeps them.
    """

    def end(self, leases: LeaseTable, lease: Lease, now: float) -> None:
        """Note that the job waits for a lease, which it did not have."""
        leases.set_aside(lease, now)
