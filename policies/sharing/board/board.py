"""The board: the hosts with who is there and what is free, and which jobs may still move in this round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from cadenza.policies.core.model import Job, JobKey, Relocating
from cadenza.policies.sharing.board.host import HostState, Seat
from cadenza.policies.sharing.board.resource_request import ResourceRequest


@dataclass
class Board:
    """Places of jobs, and free ones. The hosts follow every placement and move that a stage plans."""

    observe: Callable[[], dict[str, HostState]]
    """Returns the hosts as the round begins; called when a stage first asks for them, because many rounds never do."""
    further: frozenset[str]
    """Nodes that are further lanes of their host."""
    relocating: Mapping[int, Relocating]
    """Destinations of the jobs that are on their way to other nodes, by the job's id."""
    making_way: frozenset[int]
    """Ids of jobs that are on their way back to the queue, so that others start where they are."""
    moved_s: Mapping[int, float]
    """When the job with this id was last migrated or resized, in seconds since the epoch."""
    fixed: set[JobKey]
    """Jobs that stay where they are this round."""
    moves_left: int
    """Number of migrations and resizes that this round may still begin."""

    @cached_property
    def hosts(self) -> dict[str, HostState]:
        """Return the hosts with a live agent, as the round has changed them."""
        return self.observe()

    @cached_property
    def by_node(self) -> Mapping[str, HostState]:
        """Return the host of each Slurm node."""
        return {node.name: host for host in self.hosts.values() for node in host.lanes}

    def lane_of(self, name: str) -> int:
        """Return the lane of a Slurm node whose host has a live agent."""
        return next(node.lane for node in self.by_node[name].lanes if node.name == name)

    def home(self, key: JobKey) -> HostState | None:
        """Return the host of a job of one host."""
        return next((host for host in self.hosts.values() if key in host.residents), None)

    def settle(self, job: Job, target: HostState, seat: Seat, request: ResourceRequest) -> None:
        """Take a job from where it is to a seat, as one of the round's moves."""
        for host in self.hosts.values():
            if job.key in host.residents:
                host.leave(host.residents[job.key])
        target.enter(job, request, seat)
        self.count(job)

    def count(self, job: Job) -> None:
        """Count one of the round's moves: its job stays where that brings it."""
        self.fixed.add(job.key)
        self.moves_left -= 1
