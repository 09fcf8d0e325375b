"""Measures a command at the CPU points that a search asks for, in one run or one for each, and keeps each point."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from cadenza.profiler.measure import finished_points as files
from cadenza.profiler.measure.agent_stub import AgentStub
from cadenza.profiler.measure.cpu_limits import Limit, open_quota, own_cpus
from cadenza.profiler.measure.finished_points import State
from cadenza.profiler.measure.gpu_use import visible
from cadenza.profiler.measure.interleave import Visit, next_visit
from cadenza.profiler.measure.point import Ended, Point, Probe, Rule
from cadenza.profiler.measure.reaper import Reaper
from cadenza.profiler.measure.training_command import Run, own_caches, surroundings
from cadenza.profiler.model.bisection import Search, next_point
from cadenza.sidecar.clock import Clock

MB_PER_GB = 1024


@dataclass(frozen=True)
class Request:
    """The measurements of a run. CPUs are the job's on this node, all GPUs together."""

    words: tuple[str, ...]
    out: Path
    cpus: tuple[float, ...] = ()
    """Points that may be measured, ascending; empty: all whole numbers for each GPU."""
    share: float | None = None
    """CPUs for each GPU of the proportional share, which becomes a point where it can."""
    gpus: int | None = None
    """None: as many as ranks attach."""
    restart: bool = False
    """Start the command anew for each point instead of changing its CPUs in place."""
    resume: bool = False
    cache_gb: tuple[float, ...] = ()
    """Caches with which to measure, to check the computed memory axis."""
    turns: int = 1
    """Visits of each point; its time is divided among them."""
    rule: Rule = field(default_factory=Rule)
    search: Search = next_point


def grid_of(request: Request, available: int, gpus: int) -> list[float]:
    """Return the points that may be measured, ascending."""
    if request.cpus:
        return sorted(set(request.cpus))
    points = {float(cpus) for cpus in range(gpus, available + 1, gpus)} or {float(available)}
    share = (request.share or 0.0) * gpus
    return sorted(points | ({share} if share % 1 == 0 and points and 0 < share <= available else set()))


class Offline:
    """Profiles one command; ``tell`` hears of each finished point."""

    def __init__(self, request: Request, clock: Clock, tell: Callable[[Point], object]) -> None:
        self._request = request
        self._clock = clock
        self._tell = tell
        self._path = files.path_of(request.out)
        host = os.uname().nodename
        command = list(request.words)
        self.state = files.load(self._path, command, host) if request.resume else State(command, host)
        self.state.within = request.rule.within
        self._began = clock.monotonic() - self.state.spent_s
        self._board = AgentStub()
        quota = open_quota(f"cadenza-profile-{os.getpid()}")
        self._limit = Limit(own_cpus(), quota)
        self._leash = Reaper(self._board.path, quota.path if quota else None, own_caches())

    def close(self) -> None:
        """Let go of the socket and the cgroup; nothing of the command is left then."""
        self._leash.close()
        self._board.close()
        if self._limit.quota is not None:
            self._limit.quota.close()

    @property
    def gpus(self) -> int:
        """Return the GPUs of the job here: as told, else its ranks."""
        ranks = max((point.ranks for point in self.state.points), default=len(self._board.ranks))
        return self._request.gpus or ranks or 1

    @property
    def grid(self) -> list[float]:
        """Return the points that may be measured."""
        return grid_of(self._request, len(self._limit.ids), self.gpus)

    def run(self) -> State:
        """Measure what is missing; raise CommandFailedError, EnvironmentLacks or InputError."""
        self._limit.check(self._request.cpus)
        while not self.state.points or self._next() is not None:
            self._launch()
        for cache_gb in self._request.cache_gb:
            if f"{cache_gb:g}" not in self.state.memory:
                self._check_cache(cache_gb)
        self._keep()
        return self.state

    def _next(self) -> Visit | None:
        return next_visit(self.grid, self.state.points, self._request.search, self._request.turns)

    def _launch(self) -> None:
        """Start the command and measure: one point, or as many as it lives for."""
        done = len(self.state.points)
        visit = self._next() if self.state.points else None
        most = max(self._request.cpus, default=float(len(self._limit.ids)))
        whole = self._request.rule
        rule = replace(whole, most_s=whole.most_s / self._request.turns)
        with self._running(visit.cpus if visit else most, rule) as probe:
            try:
                probe.ready()
                while (visit := self._next()) is not None:
                    point = replace(probe.point(visit.cpus), turn=visit.turn)
                    self.state.points.append(point)
                    self._keep()
                    self._tell(point)
                    if self._request.restart:
                        return
            except Ended:
                if len(self.state.points) == done:
                    raise probe.run.failure(self._too_short("one point")) from None

    def _too_short(self, what: str) -> str:
        """Return the reason why a command that has ended well gave no point."""
        if self._board.attached:
            return f"it ended before {what} was measured: let it train for longer"
        return (
            f"it ended before {what} was measured, and no process of it has made a step: an optimizer of torch.optim "
            "has to step outside the backward pass, or the script has to call client.attach() and client.boundary()"
        )

    def _check_cache(self, cache_gb: float) -> None:
        """Measure with so much cache, and all CPUs."""
        with self._running(self.grid[-1], self._request.rule, cache_gb * MB_PER_GB) as probe:
            try:
                probe.ready()
                found = probe.point(self.grid[-1])
            except Ended:
                raise probe.run.failure(self._too_short("the point")) from None
        self.state.memory[f"{cache_gb:g}"] = found.iteration_s
        self._keep()

    @contextmanager
    def _running(self, cpus: float, rule: Rule, cache_mb: float | None = None) -> Iterator[Probe]:
        """Start the command, and end it afterwards."""
        environ = surroundings(self._board.path, cpus, cache_mb)
        budget = None if cache_mb is None else round(cache_mb)
        self._board.tune(cpus, budget)
        run = Run(self._request.words, self._limit, environ, self._request.out.with_suffix(".log"))
        self.state.launches += 1
        try:
            run.give(cpus)
            alone = self._limit.quota is None  # with a cgroup of its own it comes before others
            yield Probe(self._board, run, self._clock, rule, visible(), alone, budget)
        finally:
            run.end()
            self._board.forget()

    def _keep(self) -> None:
        self.state.spent_s = self._clock.monotonic() - self._began
        files.save(self._path, self.state)
