"""One pass of Slurm over its queue, played ahead: which jobs it starts, and which nodes it keeps for those before.

Room that running jobs make reaches the job that it is for only if Slurm's own pass starts that one there. The
reservations of the jobs before it move as soon as GPUs are free, so the pass is played with the GPUs free: without that
half of the room in simulated weeks went to other jobs (docs/decisions, 0010).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.sharing.preemption.node_room import Amount, NodeRequest, NodeRoom, shares_of
from cadenza.policies.sharing.preemption.standing import limit_s
from cadenza.policies.slurm.backfill import SLURM, Future, Pass, Shares, bits_of

Running = dict[JobKey, tuple[float, Mapping[str, Amount]]]
"""The end of each running job by its time limit, and what it has on which nodes."""


class PassJob(NamedTuple):
    """A waiting job as backfill sees it."""

    each: tuple[Amount, ...]
    among: int
    limit_s: float
    pins: Shares = ()


def running_until(jobs: Iterable[Job], now_s: float) -> Running:
    """Return when Slurm ends each started job at the latest, and what it has."""
    found: Running = {}
    for job in jobs:
        if job.nodes and job.state in ("RUNNING", "SUSPENDED"):
            ran_s = job.run_s if job.run_s is not None else now_s - (job.start_s or now_s)
            found[job.key] = now_s + max(limit_s(job) - ran_s, 0.0), shares_of(job)
    return found


class SlurmPass:
    """A pass over jobs in Slurm's order; ``room`` and ``running`` follow the jobs that it starts."""

    def __init__(self, room: NodeRoom, running: Running, now_s: float) -> None:
        self.room, self.running, self.now_s = room, running, now_s
        self._at = {name: at for at, name in enumerate(room.free)}
        self._names = tuple(room.free)
        self._bits: dict[tuple[object, ...], int] = {}
        lanes: dict[int, int] = {}
        for at, name in enumerate(self._names):
            lane = room.nodes[name].lane
            lanes[lane] = lanes.get(lane, 0) | 1 << at
        self._lanes = [lanes[lane] for lane in sorted(lanes)]
        self._pass = Pass(now_s, (1 << len(self._names)) - 1, SLURM)
        self._future: Future | None = None

    def changed(self) -> None:
        """Note that jobs have left or started."""
        self._future = None

    def unreserved(self, job: Job, request: NodeRequest) -> list[str]:
        """Return the nodes on which a job that starts now delays no reservation by its time limit."""
        nodes, _ = self._pass.free_of_reservations(self.now_s, self.now_s + limit_s(job))
        return [name for name in self.room.admitting(request) if nodes >> self._at[name] & 1]

    def take_turn(self, job: Job, request: NodeRequest) -> tuple[str, ...]:
        """Start a job if it can start now, and return its nodes; else reserve nodes for it, if there are some."""
        one = PassJob((request.each,) * request.nodes, self._among(request), limit_s(job))
        if self._future is None:
            shares = [
                (end_s, tuple((self._at[name], amount) for name, amount in had.items() if name in self._at))
                for end_s, had in self.running.values()
            ]
            self._future = Future(self.now_s, list(self.room.free.values()), shares, self._lanes)
        start_s, spot = self._pass.earliest(one, self._future)
        if not spot:
            return ()
        if start_s > self.now_s:
            self._pass.reserve(start_s, start_s + one.limit_s, bits_of(spot))
            return ()
        names = tuple(self._names[at] for at in spot)
        self.start(job, request, names)
        return names

    def start(self, job: Job, request: NodeRequest, names: Iterable[str]) -> None:
        """Give a job its nodes."""
        there = tuple(names)
        self.room.take(request, there)
        self.running[job.key] = self.now_s + limit_s(job), dict.fromkeys(there, request.each)
        self.changed()

    def _among(self, request: NodeRequest) -> int:
        rules = request[2:]
        if rules not in self._bits:
            self._bits[rules] = bits_of(self._at[name] for name in self.room.admitting(request))
        return self._bits[rules]
