"""One pass of Slurm over its queue, played ahead: which jobs it starts, and which nodes it keeps for those before.

Room that running jobs make reaches the job that it is for only if Slurm's own pass starts that one there. The
reservations of the jobs before it move as soon as GPUs are free, so the pass is played with the GPUs free: without that
half of the room in simulated weeks went to other jobs (docs/decisions.md, 0010).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from cadenza.policies.core.amounts import Amount
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.sharing.board.node_room import NodeRequest, NodeRoom
from cadenza.policies.sharing.preemption.standing import limit_s
from cadenza.policies.slurm.backfill import SLURM, Future, Pass, Shares, bits_of


class PassJob(NamedTuple):
    """A waiting job as backfill sees it."""

    each: tuple[Amount, ...]
    among: int
    limit_s: float
    pins: Shares = ()


class RoundNodes:
    """Slurm's nodes and the jobs on them, as all passes of a round have them."""

    def __init__(self, room: NodeRoom, jobs: Iterable[Job], now_s: float) -> None:
        """``jobs``: without those that leave already."""
        self.room, self.now_s = room, now_s
        self.free = list(room.free.values())
        """Resources of each node that are free as the round begins."""
        self.names = tuple(room.free)
        self.at = {name: at for at, name in enumerate(self.names)}
        lanes: dict[int, int] = {}
        for at, name in enumerate(self.names):
            lane = room.nodes[name].lane
            lanes[lane] = lanes.get(lane, 0) | 1 << at
        self.lanes = [lanes[lane] for lane in sorted(lanes)]
        self._jobs = jobs
        self._bits: dict[tuple[object, ...], int] = {}

    @cached_property
    def running(self) -> Mapping[JobKey, tuple[float, Shares]]:
        """Return when Slurm ends each started job at the latest, and what it has."""
        found: dict[JobKey, tuple[float, Shares]] = {}
        at, now_s = self.at, self.now_s
        for job in self._jobs:
            # Slurm plans with time limits. A suspended job keeps its GPUs and memory, and its limit stands still.
            if job.nodes and job.state in ("RUNNING", "SUSPENDED"):
                ran_s = job.run_s if job.run_s is not None else now_s - (job.start_s or now_s)
                shares = [(at[name], amount) for name, amount in job.amounts.items() if name in at]
                found[job.key] = now_s + max(limit_s(job) - ran_s, 0.0), tuple(shares)
        return found

    @cached_property
    def _future(self) -> Future:
        return Future(self.now_s, self.free, self.running.values(), self.lanes)

    def future_with(self, free: Sequence[Amount]) -> Future:
        """Return the resources that are free now, and later ones."""
        if free == self.free:  # no job in the queue has taken any
            return self._future.copy()
        return Future(self.now_s, free, self.running.values(), self.lanes)

    def future_without(self, gone: Iterable[JobKey]) -> Future:
        """Return the free resources as the round begins, and later ones, with some of the jobs gone."""
        future = self._future.copy()
        for key in gone:
            future.leave(*self.running[key])
        return future

    def among(self, request: NodeRequest) -> int:
        """Return the nodes on which Slurm may start such a job, as bits."""
        rules = request[2:]
        if rules not in self._bits:
            self._bits[rules] = bits_of(self.at[name] for name in self.room.admitting(request))
        return self._bits[rules]


class SlurmPass:
    """A pass over jobs in Slurm's order; ``future`` follows the jobs that it starts."""

    def __init__(self, nodes: RoundNodes, future: Future) -> None:
        self.nodes, self.future, self.now_s = nodes, future, nodes.now_s
        self._pass = Pass(self.now_s, (1 << len(nodes.names)) - 1, SLURM)
        self._waiting: list[PassJob] = []
        """Jobs whose reservations are not worked out yet: most matter to no job behind them."""

    def unreserved(self, job: Job, request: NodeRequest) -> list[str]:
        """Return the nodes on which a job that starts now delays no reservation by its time limit."""
        self._reserve()
        nodes = self._pass.unreserved(limit_s(job))
        return [name for name in self.nodes.room.admitting(request) if nodes >> self.nodes.at[name] & 1]

    def take_turn(self, job: Job, request: NodeRequest) -> bool:
        """Start a job if it can start now; else reserve nodes for it, if there are some."""
        one = PassJob((request.each,) * request.nodes, self.nodes.among(request), limit_s(job))
        self._waiting.append(one)
        spot = self.future.spot(one, one.among, 0) and self._reserve()
        if spot:
            self.future.start(self.now_s + one.limit_s, tuple((at, request.each) for at in spot))
        return bool(spot)

    def _reserve(self) -> list[int]:
        """Reserve nodes for the jobs that wait, in their order; return those on which the last one can start now.

        The others cannot, as no node had room for them, and no job has started or left since.
        """
        found: list[int] = []
        for job in self._waiting:
            start_s, spot = self._pass.earliest(job, self.future)
            found = spot if start_s <= self.now_s else []
            # Slurm's backfill reserves for each job that it looks at, EASY for the first one only.
            if start_s > self.now_s and spot:
                self._pass.reserve(start_s, start_s + job.limit_s, bits_of(spot))
        self._waiting.clear()
        return found

    def leave(self, key: JobKey) -> None:
        """Take a running job away."""
        self._reserve()
        self.future.leave(*self.nodes.running[key])

    def start(self, job: Job, request: NodeRequest, names: Iterable[str]) -> None:
        """Give a job its nodes."""
        self._reserve()
        self.future.start(self.now_s + limit_s(job), tuple((self.nodes.at[name], request.each) for name in names))
