"""The simulated cluster behind the protocols of the round: gateway, clock and store."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    MakeWay,
    Migrate,
    NodeAction,
    Outcome,
    Pack,
    Place,
    Release,
    Requeue,
    Resize,
    Resume,
    Save,
    SetFactor,
    Size,
    Suspend,
    Tune,
    Unpack,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Placement
from cadenza.policies.guard import Guarded
from cadenza.policies.simulator.job import SimJob, even_share
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

    def check(self, snapshot: ClusterSnapshot, decision: Decision, memory: Memory) -> None:
        """Take any round: nothing is written down."""

    def begin(self, snapshot: ClusterSnapshot, decision: Decision, guarded: Sequence[Guarded], memory: Memory) -> int:
        """Take the round's memory; return the round's number."""
        del snapshot, decision, guarded
        self._memory = memory
        self.rounds += 1
        return self.rounds

    def finish(self, number: int, outcomes: Sequence[tuple[Action, Outcome]], seconds: float) -> None:
        """Do nothing: the next snapshot shows the effect of the actions."""
        del number, outcomes, seconds


class SimGateway:
    """Carries out actions in the world as agents and Slurm do on a cluster, and counts them by kind."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.counts: dict[type, int] = {}
        self._shown: ClusterSnapshot | None = None
        self._coming: list[tuple[SimJob, Placement, float]] = []
        """Jobs that left in this round for other GPUs, their new shares, and the cost of the move in seconds."""

    def read(self) -> ClusterSnapshot:
        """Return the world as it is now."""
        if self._shown is None or self._shown.time_s != self.world.now_s:
            self._shown = self.world.snapshot()
        return self._shown

    def apply(self, action: Action) -> Outcome:
        """Carry out one action at once."""
        self._shown = None
        if isinstance(action, NodeAction):
            self.world.drain(action.node, drained=isinstance(action, DrainNode), reason=action.reason)
            return Outcome(ok=True)
        if isinstance(action, MakeWay):
            return self._make_way(action)
        for key in action.jobs if isinstance(action, Pack) else (action.job,):
            if key not in self.world.live:
                return Outcome(ok=False, error=f"job {key} is gone")
        job = self.world.live[action.job]
        if self._counts(action, job):
            self._count(type(action))
        self._carry_out(action, job)
        return Outcome(ok=True)

    def end_round(self) -> None:
        """Let the jobs that move come to their new GPUs, and check the books; raise SimulationError.

        All have left by then, and placed jobs have started, as with jobs that Slurm requeues.
        """
        for job, shares, cost_s in self._coming:
            if job.key in self.world.live:
                job.launch(self.world.now_s + self.world.setup.costs.dispatch_s, cost_s)
                self.world.move(job, shares)
        self._coming.clear()
        self.world.start_queued()
        self._shown = None
        self.world.check()

    def _count(self, kind: type) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def _make_way(self, action: MakeWay) -> Outcome:
        """Requeue the jobs that are still there; those that have ended have made way too."""
        found = [(self.world.live[key], factor) for key, factor in zip(action.jobs, action.factors, strict=True)
                 if key in self.world.live]  # fmt: skip
        for job, factor in found:
            self._count(MakeWay)
            # Before any requeue, as on a cluster: one that is back may start at once.
            self.world.set_factor(job, factor)
        for job, _ in found:
            self.world.requeue(job, hold=False)
        return Outcome(ok=bool(found), error="" if found else f"job {action.job} is gone")

    def _counts(self, action: Action, job: SimJob) -> bool:
        """Return True unless an action is a mere step: a move's requeue, or the save before a plain requeue."""
        if isinstance(action, Requeue):
            return not job.moves
        return not isinstance(action, Migrate) or bool(action.shares)

    def _carry_out(self, action: Action, job: SimJob) -> None:  # noqa: C901, PLR0912 (one case for each kind of action)
        world, costs = self.world, self.world.setup.costs
        leases, now_s = world.leases, world.now_s
        match action:
            case Place():
                self._place(job, action)
            case Release():
                job.required_nodes = () if action.unpin else job.required_nodes
                world.release(job)
            case Size():
                job.cpus, job.memory_mb = action.cpus, action.memory_mb
                world.request(job)
            case SetFactor():
                world.set_factor(job, action.factor)
            case Requeue():
                world.requeue(job, hold=action.hold)
            case Tune():
                job.tunes += 1
                job.waiting_cost_s += costs.tune_s
                world.move(job, action.shares)
            case Migrate() if action.shares or world.setup.phased_moves:
                job.migrations += bool(action.shares)
                self._move(job, action, costs.migrate_s if action.shares else costs.restart_s)
            case Resize():
                self._move(job, action, costs.resize_s)
            case Save():
                world.save(job)
            case Suspend() | Unsuspend():
                job.state = "SUSPENDED" if isinstance(action, Suspend) else "RUNNING"
                job.stale.append(job)  # its record only: the end that is foreseen stays true
            case Yield() if leases is not None:
                world.follow(leases.take(job, now_s))
            case Resume() if leases is not None and job.state == "RUNNING":
                if job.saved_s < inf:  # its move is off
                    job.moves, job.move_cost_s, job.saved_s = False, None, inf
                world.follow(leases.give(job, now_s))
            case Pack() if leases is not None:
                leases.pack(action.jobs)
            case Unpack() if leases is not None:
                world.follow(leases.unpack(job, now_s))

    def _place(self, job: SimJob, action: Place) -> None:
        """Start a pending job on some nodes; where moves take several rounds, as soon as Slurm has them free."""
        if job.state != "PENDING":
            return
        if not self.world.setup.phased_moves:
            even = sorted(action.nodes)
            job.num_nodes = job.num_nodes if action.shares else len(even)
            self.world.start(job, action.shares or tuple(even_share(job, at, node) for at, node in enumerate(even)))
            return
        job.required_nodes, job.promised = action.nodes, ()
        if action.shares:
            job.cpus = sum(share.cpus for share in action.shares)
            job.promised = action.shares
            if action.resize:
                job.gpus, job.num_nodes = sum(share.gpus for share in action.shares), len(action.shares)
            # Slurm knows memory by node.
            job.memory_mb = max(share.memory_mb for share in action.shares) * max(job.num_nodes, 1)
        self.world.release(job)
        self.world.start_queued()

    def _move(self, job: SimJob, action: Migrate | Resize, cost_s: float) -> None:
        """Begin a move with its checkpoint, or where moves take one action, carry all of it out."""
        if self.world.setup.phased_moves:
            job.moves, job.move_cost_s = bool(action.shares), cost_s
            if action.prefetch:
                self.world.prefetch(job, action.prefetch)
            else:
                self.world.save(job)
            return
        if isinstance(action, Resize):  # Slurm's record of the job shows its new size
            job.cpus = sum(share.cpus for share in action.shares)
            job.memory_mb = sum(share.memory_mb for share in action.shares)
            job.num_nodes = len(action.shares)
        self.world.leave(job)
        requested = tuple(  # a share without CPUs: the job keeps what it asked for
            share
            if share.cpus
            else share._replace(
                cpus=max(job.cpus * share.gpus // job.gpus, 1), memory_mb=job.memory_mb * share.gpus // job.gpus
            )
            for share in action.shares
        )
        self._coming.append((job, requested, cost_s))
