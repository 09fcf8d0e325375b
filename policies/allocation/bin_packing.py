"""A packing under way: the servers' books and the jobs put on them, of which some fall back to proportional shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cadenza.policies.allocation.demand import JobDemand, JobDemands, Need, Spots, TableOf, best_table
from cadenza.policies.allocation.free_resources import FreeResources
from cadenza.policies.allocation.problem import Plan, Server
from cadenza.policies.core.model import Job

LESS = "it has its proportional share, since its best-case demand left a job without room"


class Packing:
    """Jobs are counted as they are put, servers as in the case."""

    def __init__(self, servers: Sequence[Server], table_of: TableOf = best_table) -> None:
        self.books = FreeResources(servers)
        self.asks = JobDemands(self.books.kinds, table_of)
        self.jobs: list[Job] = []
        self.ask: list[JobDemand] = []
        """The GPUs that each job holds, by server."""
        self.spots: list[Spots] = []
        """The servers on which it holds them."""
        self.on: list[list[int]] = [[] for _ in servers]
        """The jobs of each server."""
        self.dropped: list[int] = []
        """Jobs with less than their best-case demand."""
        self._sizes: dict[tuple[JobDemand, Spots], tuple[int, float, float]] = {}
        """Sizes of jobs that have been computed."""

    def put(self, job: Job, ask: JobDemand, spots: Spots) -> None:
        """Note a job whose resources the books have given."""
        number = len(self.jobs)
        self.jobs.append(job)
        self.ask.append(ask)
        self.spots.append(spots)
        for server, _ in spots:
            self.on[server].append(number)

    def put_less(self, job: Job, ask: JobDemand, spots: Spots) -> None:
        """Note a job that gets less than its best-case demand."""
        self.dropped.append(len(self.jobs))
        self.put(job, ask, spots)

    def drop(self, numbers: Iterable[int]) -> None:
        """Set those of the jobs that hold more to their proportional shares, on all their servers."""
        for number in numbers:
            ask, spots = self.ask[number], self.spots[number]
            if ask.exceeds:
                fair = self.ask[number] = self.asks.fair(ask.gpus, ask.gpu_type)
                self.books.change(ask, fair, spots)
                self.dropped.append(number)

    def size(self, number: int) -> tuple[int, float, float]:
        """Return how many servers a job is on, and its CPUs and memory (MB) for each of its GPUs."""
        key = self.ask[number], self.spots[number]
        known = self._sizes.get(key)
        if known is None:
            ask, spots = key
            needs = [self.books.need(ask, server, count) for server, count in spots]
            cpus, memory_mb = sum(need.cpus for need in needs), sum(need.memory_mb for need in needs)
            known = self._sizes[key] = (len(spots), cpus / ask.gpus, memory_mb / ask.gpus)
        return known

    def excess(self, number: int, server: int) -> Need:
        """Return the surplus of a job over its proportional share on a server; negative if it holds less."""
        ask = self.ask[number]
        count = next(count for at, count in self.spots[number] if at == server)
        has = self.books.need(ask, server, count)
        share = self.books.need(self.asks.fair(ask.gpus, ask.gpu_type), server, count)
        return Need(has.cpus - share.cpus, has.memory_mb - share.memory_mb)

    def missing(self, ask: JobDemand, server: int, count: int) -> Need:
        """Return the shortage of a server for the demand of so many GPUs; negative values are a surplus."""
        need = self.books.need(ask, server, count)
        return Need(need.cpus - self.books.cpus[server], need.memory_mb - self.books.memory_mb[server])

    def plan(self) -> Plan:
        """Return the plan of all packed jobs."""
        placement = self.books.placement
        placements = {
            job.key: ask.made.get(spots) or placement(ask, spots)
            for job, ask, spots in zip(self.jobs, self.ask, self.spots, strict=True)
        }
        return Plan(placements, {self.jobs[number].key: LESS for number in self.dropped})
