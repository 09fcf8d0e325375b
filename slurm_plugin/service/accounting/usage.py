"""GPU time, waiting and starts of jobs between two rounds, and the moment when lane 0 had room for them (pure)."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import msgspec

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.idle_gpus import (
    Wanted,
    free_gpus,
    idle_waiting_gpus,
    narrowest_jobs,
    waits_for_gpus,
)
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Job, JobKey
from cadenza.policies.sharing.state.settings import held_for_us
from cadenza.slurm_plugin.service.observe.progress import held_within

HOUR_S = 3600.0
MAX_GAP_S = 300.0
"""A longer time between two rounds is not counted, because its events are unknown."""
STARTED = ("RUNNING", "SUSPENDED")
SLURM_TICK_S = 1.0
"""Slurm's times are whole seconds."""


class Spent(NamedTuple):
    """GPU time and waiting time of one job between two rounds, in seconds and GPU seconds.

    A GPU that several jobs used at once counts in equal parts, so that the sum over jobs never exceeds the time of
    the GPUs.
    """

    key: JobKey
    user: str
    managed: bool
    gpu_s: float = 0.0
    further_gpu_s: float = 0.0
    """The part of ``gpu_s`` on a further lane."""
    queue_s: float = 0.0
    turn_s: float = 0.0
    """Started, and waiting for its turn on the GPUs."""
    held_s: float = 0.0
    """Time in which it could use its GPUs."""


class HourRow(msgspec.Struct, frozen=True):
    """The sums of one job in one hour since the epoch, in seconds and GPU seconds; see ``Spent``."""

    hour: int
    job: int
    restart: int
    user: str
    managed: bool
    gpu_s: float
    further_gpu_s: float
    queue_s: float
    turn_s: float
    yields: int
    """Finished yields, one for each of its hosts."""


class FirstStart(msgspec.Struct, frozen=True):
    """A job's first start on GPUs, and its end once it is known; epoch seconds."""

    job: int
    user: str
    at_s: float
    gpus: int
    wait_s: float
    """Its time in the queue until then, as far as it is on record."""
    ended_s: float | None = None
    slowdown: float | None = None
    """Bounded slowdown: its time in the queue, with its GPUs and without its turn, over that with its GPUs."""
    account: str = ""
    qos: str = ""
    partition: str = ""
    gpu_type: str = ""
    managed: bool = False
    limit_s: float | None = None
    waited_s: float | None = None
    """All its time in the queue, also after it made way, and waiting for turns; None until it has ended."""
    held_s: float | None = None
    """Its time with GPUs; None until it has ended."""


class Start(msgspec.Struct, frozen=True):
    """A managed job that Slurm started on a further lane, and the time at which lane 0 had room; epoch seconds."""

    job: int
    user: str
    at_s: float
    submit_s: float
    partition: str
    gpus: int
    num_nodes: int
    free_s: float | None = None
    """Time at which lane 0 first had enough GPUs for it; None: not yet."""
    delay_s: float = 0.0
    """Longest wait for turns of a job on lane 0 until then: without sharing lane 0 may have been free sooner by it."""

    def saved_s(self, since_s: float, until_s: float) -> float:
        """Return the waiting that the job saved between two moments."""
        end_s = (until_s if self.free_s is None else self.free_s) - self.delay_s
        return max(min(end_s, until_s) - max(self.at_s, since_s), 0.0)


def counts(before: ClusterSnapshot | None, after: ClusterSnapshot) -> bool:
    """Return whether the time between two rounds is short enough to be counted."""
    return before is not None and 0.0 < after.time_s - before.time_s <= MAX_GAP_S


def by_hour(from_s: float, to_s: float) -> Iterator[tuple[int, float]]:
    """Yield the hours since the epoch that a stretch of time touches, each with its part of it; parts add up to 1.

    >>> list(by_hour(3540.0, 3780.0))
    [(0, 0.25), (1, 0.75)]
    """
    at_s = from_s
    while at_s < to_s:
        hour = int(at_s // HOUR_S)
        next_s = min((hour + 1) * HOUR_S, to_s)
        yield hour, (next_s - at_s) / (to_s - from_s)
        at_s = next_s


# --- Time and GPUs -----------------------------------------------------------------------------------------


def spent(
    before: ClusterSnapshot, after: ClusterSnapshot, memory: Memory, later: Collection[JobKey] = ()
) -> tuple[Spent, ...]:
    """Return the spending since the first round of the jobs that are there in the second one.

    ``memory``: that of the first round, which tells our holds and suspends from others'; ``later``: jobs that are left
    out.
    """
    stretch = (before.time_s, after.time_s)
    times = {
        job.key: _times(job, before.by_key.get(job.key), stretch, memory)
        for job in after.jobs
        if job.gpus and job.key not in later
    }
    shares = _gpu_seconds([(after.by_key[key], row.held_s) for key, row in times.items()], stretch[1] - stretch[0])
    lanes = {node.name: node.lane for node in after.nodes}
    rows = []
    for key, own in times.items():
        job, gpu_s = after.by_key[key], shares.get(key, 0.0)
        further_s = gpu_s if on_further_lane(job, lanes) else 0.0
        rows.append(Spent(key, job.user, job.opted_in, gpu_s, further_s, own.queue_s, own.turn_s, own.held_s))
    return tuple(rows)


ROWS_A_ROUND = 2000
"""Waiting jobs that are counted in one round; on a large site each one's turn comes after some rounds."""


def counted_later(
    before: ClusterSnapshot, after: ClusterSnapshot, since_s: Mapping[JobKey, float], turn: int
) -> dict[JobKey, float]:
    """Return the jobs that are counted in a later round because they wait as before, with since when.

    ``since_s``: the same as returned for the first round; ``turn``: number of the round.
    """
    slices = 1 + len(after.jobs) // ROWS_A_ROUND
    if slices == 1:
        return {}
    earlier, turn = before.by_key, turn % slices
    return {
        job.key: since_s.get(job.key, before.time_s)
        for job in after.jobs
        if job.state == "PENDING" and job.slurm_priority and job.key.id % slices != turn and earlier.get(job.key) is job
    }


def waited(before: ClusterSnapshot, memory: Memory, since_s: Mapping[JobKey, float]) -> Iterator[tuple[float, Spent]]:
    """Yield the time in the queue until a round that is still to be counted, with since when."""
    for key, from_s in since_s.items():
        job = before.by_key.get(key)
        if job is not None and _queues(job, memory) and from_s < before.time_s:
            queue_s = max(before.time_s - max(from_s, job.submit_s), 0.0)
            yield from_s, Spent(key, job.user, job.opted_in, queue_s=queue_s)


def on_further_lane(job: Job, lanes: Mapping[str, int]) -> bool:
    """Return whether any of a job's nodes is a further lane; ``lanes``: by node name."""
    return any(lanes.get(name, 0) for name in job.nodes)


class _Times(NamedTuple):
    queue_s: float = 0.0
    held_s: float = 0.0
    turn_s: float = 0.0


def _times(job: Job, before: Job | None, stretch: tuple[float, float], memory: Memory) -> _Times:
    since_s, now_s = stretch
    if job.state == "PENDING":
        queue_s = now_s - max(since_s, job.submit_s) if _queues(job, memory) else 0.0
        return _Times(max(queue_s, 0.0))
    if job.state not in STARTED:
        return _Times()
    began_s = min(max(since_s, job.start_s or since_s), now_s)
    queued = before is None or (before.state == "PENDING" and _queues(before, memory))
    queue_s = max(began_s - max(since_s, job.submit_s), 0.0) if queued else 0.0
    held_s = held_within(job, before, now_s - began_s)
    by_leases = job.lease is not None and (job.state == "RUNNING" or job.key in memory.suspended)
    return _Times(queue_s, held_s, now_s - began_s - held_s if by_leases else 0.0)


def _queues(job: Job, memory: Memory) -> bool:
    """Return whether a job is pending for GPUs, and not for its owner or another job."""
    return job.state == "PENDING" and waits_for_gpus(job, ours=held_for_us(job, memory))


def _gpu_seconds(held: Sequence[tuple[Job, float]], span_s: float) -> dict[JobKey, float]:
    """Return each job's GPU seconds; jobs that use a GPU at once share its time equally."""
    users: defaultdict[Gpu, float] = defaultdict(float)
    for job, held_s in held:
        for gpu in job.leased_gpus:
            users[gpu] += held_s
    seconds = {}
    for job, held_s in held:
        gpus = job.leased_gpus
        each = (held_s * min(1.0, span_s / users[gpu]) for gpu in gpus if users[gpu] > 0.0)
        seconds[job.key] = sum(each) if gpus else held_s * job.gpus
    return seconds


# --- Idle GPUs -------------------------------------------------------------------------------------------------


def idle_waiting_s(before: ClusterSnapshot, after: ClusterSnapshot, memory: Memory) -> float:
    """Return the GPU seconds between two rounds in which GPUs were idle while a job waited that fits.

    The smaller number of the two rounds counts, so that a job that starts at once is none that waited.
    """
    return (after.time_s - before.time_s) * min(_idle_waiting(before, memory), _idle_waiting(after, memory))


def _idle_waiting(snapshot: ClusterSnapshot, memory: Memory) -> int:
    return idle_waiting_gpus(free_gpus(snapshot), narrowest_waiting(snapshot, memory))


def narrowest_waiting(snapshot: ClusterSnapshot, memory: Memory) -> dict[Wanted, int]:
    """Return the smallest number of GPUs that a waiting job needs, for each of its partitions by itself."""
    kinds = {
        (job.partition, job.gpu_type, job.barred, job.gpus)
        for job in snapshot.jobs
        if waits_for_gpus(job, ours=held_for_us(job, memory) or job.key in memory.suspended)
    }
    return narrowest_jobs((Wanted(partition, kind, barred), gpus) for partition, kind, barred, gpus in kinds)


# --- Starts ------------------------------------------------------------------------------------------------------


def first_starts(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[tuple[Job, float]]:
    """Yield the jobs with GPUs that Slurm has started since the first round, with the time of the start."""
    for job in after.jobs:
        # A requeued job was started before: only a job's first incarnation counts.
        if not (job.gpus and job.state in STARTED) or job.key.restart or job.start_s is None:
            continue
        old = before.job(job.key)
        if old.state == "PENDING" if old is not None else job.submit_s >= before.time_s - SLURM_TICK_S:
            yield job, job.start_s


def started(before: ClusterSnapshot, after: ClusterSnapshot) -> tuple[Start, ...]:
    """Return the managed jobs that Slurm has started on a further lane since the first round, for the first time."""
    lanes = {node.name: node.lane for node in after.nodes}
    return tuple(
        Start(job.key.id, job.user, at_s, job.submit_s, job.partition, job.gpus, max(job.num_nodes, 1))
        for job, at_s in first_starts(before, after)
        if job.opted_in and on_further_lane(job, lanes)
    )


def ended(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[int]:
    """Yield the ids of the jobs that Slurm no longer has in any incarnation."""
    yield from {job.key.id for job in before.jobs} - {job.key.id for job in after.jobs}


def watched(
    starts: Iterable[Start], before: ClusterSnapshot, after: ClusterSnapshot, turns: Mapping[JobKey, float]
) -> tuple[Start, ...]:
    """Return the open starts, and those closed for which lane 0 has become free.

    GPUs count as free for a job when no job has them in Slurm's allocation, when a job that was submitted after it has
    got them, or when the job has them itself by now. The time is that of the last round before, so that savings are
    rather too small. ``turns``: waiting for turns of live jobs so far, seconds.
    """
    lane0, rows = _Lane0(after, turns), []
    for start in starts:
        delay_s = max(start.delay_s, lane0.delays_s[start.partition])
        free_s = max(start.at_s, before.time_s) if lane0.has_room(start) else None
        rows.append(msgspec.structs.replace(start, delay_s=delay_s, free_s=free_s))
    return tuple(rows)


def given_up(starts: Iterable[Start], at_s: float) -> tuple[Start, ...]:
    """Return open starts, closed at the last moment on record."""
    return tuple(msgspec.structs.replace(start, free_s=max(start.at_s, at_s)) for start in starts)


Mark: TypeAlias = tuple[float, int]
"""A job's place in a first-come queue: its submission and its id."""


class _Room(NamedTuple):
    """GPUs of a node of lane 0 for a job: those that are free, and those that jobs which came later have got."""

    free: int
    taken: tuple[tuple[Mark, int], ...]
    newest: Mark

    def for_job(self, mark: Mark) -> int:
        """Return their number, with those that the job has there itself."""
        return self.free + (sum(gpus for at, gpus in self.taken if at >= mark) if self.newest >= mark else 0)


def _later_first(mark: Mark) -> Mark:
    return -mark[0], -mark[1]


class _Lane0:
    """Lane 0 of every host, with the jobs there."""

    def __init__(self, snapshot: ClusterSnapshot, turns: Mapping[JobKey, float]) -> None:
        jobs: defaultdict[str, list[Job]] = defaultdict(list)
        for job in snapshot.jobs:
            for name in job.nodes if job.state in STARTED else ():
                jobs[name].append(job)
        nodes = [node for node in snapshot.nodes if node.lane == 0 and node.gpus and node.up and not node.drained]
        self._rooms: defaultdict[str, list[_Room]] = defaultdict(list)
        self.delays_s: defaultdict[str, float] = defaultdict(float)
        """By partition, the longest wait for turns so far of a job on lane 0."""
        for node in nodes:
            taken = tuple(((job.submit_s, job.key.id), job.amounts[node.name][0]) for job in jobs[node.name])
            used = max(node.gpus_used, sum(gpus for _, gpus in taken))
            room = _Room(node.gpus - used, taken, max((mark for mark, _ in taken), default=(0.0, 0)))
            delay_s = max((turns.get(job.key, 0.0) for job in jobs[node.name]), default=0.0)
            for partition in node.partitions:
                self._rooms[partition].append(room)
                self.delays_s[partition] = max(self.delays_s[partition], delay_s)
        for rooms in self._rooms.values():
            rooms.sort(key=lambda room: _later_first(room.newest))
        self._free: dict[tuple[str, int], int] = {}
        """Nodes of a partition with so many free GPUs."""

    def has_room(self, start: Start) -> bool:
        """Return whether as many nodes as the job has could give it its GPUs."""
        each, mark = -(-start.gpus // start.num_nodes), (start.submit_s, start.job)
        rooms = self._rooms[start.partition]
        # 1. Free ones, the same for all jobs of a size; 2. those with a job that came later, the first in this order.
        free = self._free.get((start.partition, each))
        if free is None:
            free = self._free[start.partition, each] = sum(room.free >= each for room in rooms)
        count = bisect_right(rooms, _later_first(mark), key=lambda room: _later_first(room.newest))
        more = (room.free < each <= room.for_job(mark) for room in rooms[:count])
        return free >= start.num_nodes or any(at >= start.num_nodes for at in accumulate(more, initial=free))
