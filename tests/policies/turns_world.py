"""A small world that applies turns second by second: jobs arrive, run, stop at boundaries, yield and end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cadenza.policies.core.model import Gpu, JobKey
from cadenza.policies.sharing.turns.fair_queue import Contender, arrival_vtime, next_turn

SLICE_S, MIN_RUN_S, COPY_S, TICK_S = 10.0, 2.0, 0.5, 0.5


def key(number: int) -> JobKey:
    return JobKey(number, 0)


def gpus(*indices: int, host: str = "node1") -> frozenset[Gpu]:
    return frozenset(Gpu(host, index) for index in indices)


@dataclass
class Wait:
    """Waiting time of a job, number of jobs at once, and longest time that its GPUs were free."""

    seconds: float = 0.0
    met: int = 1
    free_s: float = 0.0


@dataclass
class World:
    arrivals: list[tuple[float, Contender, float]]
    """When, who, and for how long it holds GPUs in all."""
    share: bool = True
    displace: bool = True
    successors: bool = False
    """Every job that ends is followed at once by a new one like it: lanes that are never empty."""
    now: float = 0.0
    live: dict[JobKey, Contender] = field(default_factory=dict)
    left: dict[JobKey, float] = field(default_factory=dict)
    stops: dict[JobKey, float] = field(default_factory=dict)
    waits: dict[JobKey, Wait] = field(default_factory=dict)
    done: list[tuple[Contender, Wait]] = field(default_factory=list)
    held: dict[JobKey, float] = field(default_factory=dict)
    yields: int = 0

    def run(self, until_s: float) -> World:
        while self.now < until_s:
            self.step()
        return self

    def step(self) -> None:
        self._arrive()
        self._turn()
        self._account()
        self.now += TICK_S
        self._advance()

    def _arrive(self) -> None:
        due = [row for row in self.arrivals if row[0] <= self.now]
        self.arrivals = [row for row in self.arrivals if row[0] > self.now]
        for _, job, work_s in due:
            start = max(job.vtime_s, arrival_vtime(job.gpus, self.live.values()))
            self.live[job.key] = replace(job, vtime_s=start)
            self.left[job.key] = work_s
            self.waits[job.key] = Wait()

    def _turn(self) -> None:
        turn = next_turn(
            self.live.values(),
            slice_s=SLICE_S,
            min_run_s=MIN_RUN_S,
            share_between_users=self.share,
            displace=self.displace,
        )
        for job in turn.yields:
            self.yields += 1
            iteration = self.live[job].iteration_s or 0.0
            boundary = -self.live[job].held_s % iteration if iteration else 0.0
            self.stops[job] = self.now + boundary + COPY_S
            self.live[job] = replace(self.live[job], state="stopping")
        for job in turn.resumes:
            self.live[job] = replace(self.live[job], state="held", held_s=0.0, waited_s=0.0, vtime_s=turn.vtimes[job])
            self.done.append((self.live[job], self.waits.pop(job)))

    def _account(self) -> None:
        used: set[Gpu] = set()
        for job in self.live.values():
            if job.holding:
                assert not used & job.gpus, f"a GPU of job {job.key} is held twice at {self.now}"
                used |= job.gpus
        for name, wait in self.waits.items():
            job = self.live[name]
            wait.seconds += TICK_S
            self.live[name] = replace(job, waited_s=wait.seconds)
            wait.met = max(wait.met, sum(1 for other in self.live.values() if other.gpus & job.gpus))
            wait.free_s = 0.0 if job.gpus & used else wait.free_s + TICK_S

    def _advance(self) -> None:
        for name, job in list(self.live.items()):
            if not job.holding:
                continue
            self.live[name] = replace(job, held_s=job.held_s + TICK_S, vtime_s=job.vtime_s + TICK_S / job.weight)
            self.held[name] = self.held.get(name, 0.0) + TICK_S
            self.left[name] -= TICK_S
            if self.left[name] <= 0:
                if self.successors:
                    self._succeed(job)
                del self.live[name]
                self.stops.pop(name, None)
            elif job.state == "stopping" and self.now >= self.stops[name]:
                del self.stops[name]
                self.live[name] = replace(self.live[name], state="yielded", held_s=0.0)
                self.waits[name] = Wait()

    def _succeed(self, job: Contender) -> None:
        fresh = replace(job, key=key(max(self.live)[0] + 1), state="waiting", held_s=0.0, waited_s=0.0, vtime_s=0.0)
        self.arrivals.append((self.now, fresh, self.held[job.key]))

    def all_waits(self) -> list[tuple[Contender, Wait]]:
        """Return the finished waits and those still going on."""
        return [*self.done, *((self.live[name], wait) for name, wait in self.waits.items())]
