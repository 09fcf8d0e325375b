"""Yardsticks of a replay: EASY backfill, and preemptive LAS whose switches cost nothing, with first starts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray
from philly_sample import GPUS, NODES, PER_NODE, PhillyJob

BACKFILL_S = 30.0
QUANTUM_S = 60.0
"""Time after which the ideal orders the jobs anew, besides at arrivals and ends."""
DONE_S = 1e-6


@dataclass(frozen=True)
class Times:
    """First start and end of each job by id, seconds."""

    start_s: dict[int, float]
    end_s: dict[int, float]


# --- EASY backfill (Lifka 1995; Mu'alem and Feitelson 2001) --------------------------------------------------------


def room(free: Sequence[int], gpus: int) -> dict[int, int] | None:
    """Return GPUs by node for a job, None without room: on the fullest node that fits, or wide jobs on whole nodes."""
    if gpus <= PER_NODE:
        fit = [node for node in range(NODES) if free[node] >= gpus]
        return {min(fit, key=lambda node: (free[node], node)): gpus} if fit else None
    whole, needed = [node for node in range(NODES) if free[node] == PER_NODE], ceil(gpus / PER_NODE)
    return dict.fromkeys(whole[:needed], PER_NODE) if len(whole) >= needed else None


class Easy:
    """First come, first served with one reservation; backfill runs every 30 s and delays the queue's head never."""

    def __init__(self, jobs: Sequence[PhillyJob]) -> None:
        self.jobs = jobs
        self.free = [PER_NODE] * NODES
        self.queue: list[PhillyJob] = []
        self.running: list[tuple[float, int]] = []
        self.times = Times({}, {})
        self.by_id = {job.id: job for job in jobs}
        self.where: dict[int, dict[int, int]] = {}

    def run(self) -> Times:
        """Run all jobs to their end."""
        at, now_s, tick_s = 0, 0.0, inf
        while at < len(self.jobs) or self.running:
            arrival_s = self.jobs[at].submit_s if at < len(self.jobs) else inf
            now_s = min(arrival_s, self.running[0][0] if self.running else inf, tick_s)
            # 1. Ends and arrivals.
            changed = False
            while self.running and self.running[0][0] <= now_s:
                _, ended = heapq.heappop(self.running)
                for node, count in self.where.pop(ended).items():
                    self.free[node] += count
                changed = True
            while at < len(self.jobs) and self.jobs[at].submit_s <= now_s:
                self.queue.append(self.jobs[at])
                at, changed = at + 1, True
            # 2. The queue's head at each of them, backfill at the next half minute.
            if changed:
                while self.queue and (spot := room(self.free, self.queue[0].gpus)) is not None:
                    self._start(self.queue.pop(0), spot, now_s)
                tick_s = min(tick_s, ceil(now_s / BACKFILL_S) * BACKFILL_S) if self.queue else inf
            if tick_s <= now_s:
                self._backfill(now_s)
                tick_s = inf
        return self.times

    def _start(self, job: PhillyJob, spot: dict[int, int], now_s: float) -> None:
        for node, count in spot.items():
            self.free[node] -= count
        self.where[job.id] = spot
        self.times.start_s[job.id], self.times.end_s[job.id] = now_s, now_s + job.run_s
        heapq.heappush(self.running, (now_s + job.run_s, job.id))

    def _backfill(self, now_s: float) -> None:
        """Start later jobs that end, by their limits, before the head needs their GPUs, or use others than it will."""
        if not self.queue:
            return
        # 1. The head's reservation: when, and what is left at that time.
        later, shadow_s = list(self.free), inf
        limits = sorted((self.times.start_s[key] + self.by_id[key].limit_s, key) for _, key in self.running)
        for end_s, key in limits:
            for node, count in self.where[key].items():
                later[node] += count
            if (spot := room(later, self.queue[0].gpus)) is not None:
                shadow_s = max(end_s, now_s)
                for node, count in spot.items():
                    later[node] -= count
                break
        # 2. Each job in order; a width without room is not tried again.
        kept, widest, widest_over = [self.queue[0]], GPUS + 1, GPUS + 1
        for job in self.queue[1:]:
            over = now_s + job.limit_s > shadow_s
            if job.gpus >= widest or (over and job.gpus >= widest_over):
                kept.append(job)
                continue
            free = [min(pair) for pair in zip(self.free, later, strict=True)] if over else self.free
            spot = room(free, job.gpus)
            if spot is None:
                kept.append(job)
                widest, widest_over = (widest, job.gpus) if over else (job.gpus, job.gpus)
                continue
            self._start(job, spot, now_s)
            for node, count in spot.items() if over else ():
                later[node] -= count
        self.queue = kept


# --- Preemptive LAS without costs ----------------------------------------------------------------------------------


def ideal(jobs: Sequence[PhillyJob]) -> Times:
    """Return the times where the jobs with the least attained GPU time that fit run, at no cost."""
    submit_s = np.array([job.submit_s for job in jobs])
    width = np.array([job.gpus for job in jobs])
    left_s, attained = np.array([job.run_s for job in jobs]), np.zeros(len(jobs))
    live, at, now_s = np.array([], dtype=int), 0, 0.0
    start_s, end_s = np.full(len(jobs), inf), np.zeros(len(jobs))
    while at < len(jobs) or len(live):
        # 1. The jobs that go now.
        going, crowded = live, int(width[live].sum()) > GPUS
        if crowded:
            going = _fitting(live[np.lexsort((live, attained[live]))], width)
        start_s[going] = np.minimum(start_s[going], now_s)
        # 2. The next event.
        until_s = submit_s[at] if at < len(jobs) else inf
        if len(going):
            until_s = min(until_s, now_s + left_s[going].min())
        if crowded:
            until_s = min(until_s, now_s + QUANTUM_S)
        attained[going] += (until_s - now_s) * width[going]
        left_s[going] -= until_s - now_s
        now_s = float(until_s)
        # 3. Ends and arrivals.
        over = left_s[live] <= DONE_S
        end_s[live[over]] = now_s
        live = live[~over]
        come = int(np.searchsorted(submit_s, now_s, side="right"))
        live, at = np.append(live, np.arange(at, come)), come
    ids = [job.id for job in jobs]
    return Times(dict(zip(ids, start_s.tolist(), strict=True)), dict(zip(ids, end_s.tolist(), strict=True)))


def _fitting(order: NDArray[np.int_], width: NDArray[np.int_]) -> NDArray[np.int_]:
    """Return the jobs that have GPUs when each in order takes its own, and later ones use the rest."""
    free, going = GPUS, []
    for job, gpus in zip(order.tolist(), width[order].tolist(), strict=True):
        if gpus <= free:
            going.append(job)
            free -= gpus
            if not free:
                break
    return np.array(going)
