"""The simulated cluster behind the protocols of the round: gateway, clock and store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    Migrate,
    OpenNode,
    Outcome,
    Pack,
    Place,
    Requeue,
    Resize,
    Resume,
    Suspend,
    Tune,
    Unpack,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey, Placement, Share
from cadenza.policies.guard import Guarded
from cadenza.policies.simulator.job import Live
from cadenza.policies.simulator.world import World


class SimClock:
    """The world's time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        """Return seconds since the start of the simulation."""
        return self._world.now_s


class RunStore:
    """Keeps the policy's memory between rounds, and nothing else."""

    def __init__(self) -> None:
        self._memory = Memory()
        self.rounds = 0

    def memory(self) -> Memory:
        """Return the memory of the last round."""
        return self._memory

    def begin(self, snapshot: ClusterSnapshot, decision: Decision, guarded: Sequence[Guarded], memory: Memory) -> int:
        """Take the round's memory; return the round's number."""
        del snapshot, decision, guarded
        self._memory = memory
        self.rounds += 1
        return self.rounds

    def finish(self, number: int, outcomes: Sequence[tuple[Action, Outcome]], seconds: float) -> None:
        """Nothing: the world itself shows what became of the actions."""
        del number, outcomes, seconds


OK = Outcome(ok=True)


class SimGateway:
    """Applies actions to the world, and counts them by kind."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.counts: dict[type, int] = {}
        self._shown: ClusterSnapshot | None = None
        self._coming: list[tuple[Live, Placement, float]] = []
        """Who has left in this round for other GPUs, where to, and what that costs in seconds."""
        self._do: dict[type, Callable[[Live, Action], None]] = {
            Place: self._place,
            Requeue: self._requeue,
            Tune: self._tune,
            Migrate: self._migrate,
            Resize: self._resize,
            Yield: self._yield,
            Resume: self._resume,
            Suspend: self._suspend,
            Unsuspend: self._unsuspend,
            Unpack: self._unpack,
        }

    def read(self) -> ClusterSnapshot:
        """Return the world as it is now."""
        if self._shown is None or self._shown.time_s != self.world.now_s:
            self._shown = self.world.snapshot()
        return self._shown

    def apply(self, action: Action) -> Outcome:
        """Carry out one action at once."""
        self._shown = None
        kind = type(action)
        if isinstance(action, DrainNode | OpenNode):
            return OK
        if isinstance(action, Pack):
            missing = [key for key in action.jobs if key not in self.world.live]
            if missing:
                return _gone(missing[0])
            if self.world.leases is not None:
                self.world.leases.pack(action.jobs)
        else:
            job = self.world.live.get(action.job)
            if job is None:
                return _gone(action.job)
            if kind in self._do:
                self._do[kind](job, action)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return OK

    def end_round(self) -> None:
        """Let the movers come to where they go, and check the books; raises SimulationError.

        All have left by then, and who was placed has started, as with jobs that Slurm requeues.
        """
        for job, shares, cost_s in self._coming:
            if job.key in self.world.live:
                job.launch(self.world.now_s + self.world.setup.costs.dispatch_s, cost_s)
                self.world.move(job, shares)
        self._coming.clear()
        self._shown = None
        self.world.check()

    def _place(self, job: Live, action: Action) -> None:
        if isinstance(action, Place) and job.state == "PENDING":
            self.world.start(job, action.shares or self._as_asked(job, action.nodes))

    def _as_asked(self, job: Live, nodes: tuple[str, ...]) -> Placement:
        """Return an even spread of what the job asked for."""
        count = len(nodes)
        parts = [(job.gpus * (i + 1) // count - job.gpus * i // count) for i in range(count)]
        return tuple(
            Share(node, gpus, job.cpus * gpus // job.gpus, job.memory_mb * gpus // job.gpus)
            for node, gpus in sorted(zip(nodes, parts, strict=True))
        )

    def _requeue(self, job: Live, action: Action) -> None:
        del action
        self.world.requeue(job)

    def _tune(self, job: Live, action: Action) -> None:
        if isinstance(action, Tune):
            job.tunes += 1
            job.waiting_cost_s += self.world.setup.costs.tune_s
            self.world.move(job, action.shares)

    def _migrate(self, job: Live, action: Action) -> None:
        if isinstance(action, Migrate):
            job.migrations += 1
            self._leave(job, action.shares, self.world.setup.costs.migrate_s)

    def _resize(self, job: Live, action: Action) -> None:
        if isinstance(action, Resize):  # Slurm's record of the job shows what it was changed to
            job.cpus = sum(share.cpus for share in action.shares)
            job.memory_mb = sum(share.memory_mb for share in action.shares)
            job.num_nodes = len(action.shares)
            self._leave(job, action.shares, self.world.setup.costs.resize_s)

    def _leave(self, job: Live, shares: Placement, cost_s: float) -> None:
        self.world.leave(job)
        self._coming.append((job, shares, cost_s))

    def _yield(self, job: Live, action: Action) -> None:
        del action
        if self.world.leases is not None:
            self.world.leases.take(job)

    def _resume(self, job: Live, action: Action) -> None:
        del action
        if self.world.leases is not None and job.state == "RUNNING":
            self.world.leases.give(job)

    def _suspend(self, job: Live, action: Action) -> None:
        del action
        job.state = "SUSPENDED"
        job.stale.append(job)  # its books only: the end that is foreseen stays true

    def _unsuspend(self, job: Live, action: Action) -> None:
        del action
        job.state = "RUNNING"
        job.stale.append(job)  # its books only: the end that is foreseen stays true

    def _unpack(self, job: Live, action: Action) -> None:
        del action
        if self.world.leases is not None:
            self.world.leases.unpack(job)


def _gone(key: JobKey) -> Outcome:
    return Outcome(ok=False, error=f"job {key} is gone")
