"""TUNE as in the paper (Synergy, OSDI'22, §4): big demands first, best fit, and who holds more gives it back."""

from __future__ import annotations

from functools import partial

from cadenza.policies.allocation.bin_packing import Packing
from cadenza.policies.allocation.demand import JobDemand, Spots, sound_table
from cadenza.policies.allocation.problem import Case, Plan
from cadenza.policies.core.model import Job


def tune(case: Case) -> Plan:
    """Place every runnable job, none below the throughput of its proportional share.

    In descending order of GPUs, CPUs and memory wanted, each job takes its best-case demand where least is left over,
    on one server if one can hold it; else its proportional share; else room is made by jobs that hold more than
    theirs. Each round packs from empty servers.
    """
    packing = Packing(case.servers, partial(sound_table, margin=case.margin))

    def size(job: Job) -> tuple[float, ...]:
        tables = [table for table in packing.asks.best(job, case.gpu_type.get(job.key, "")).take if table]
        cpus = max((table[-1].cpus for table in tables), default=0)
        memory_mb = max((table[-1].memory_mb for table in tables), default=0)
        return -job.gpus, -cpus, -memory_mb, *job.key

    for job in sorted(case.jobs[: case.runnable], key=size):
        gpu_type = case.gpu_type.get(job.key, "")
        if not place(packing, job, packing.asks.best(job, gpu_type)) and gpu_type:
            place(packing, job, packing.asks.best(job))
    return packing.plan()


def place(packing: Packing, job: Job, wanted: JobDemand) -> bool:
    """Place a job with what it wants or its proportional share, at others' cost if need be; False: no GPUs."""
    ask = wanted
    spots = _fit(packing, ask)
    if spots is None:
        # The guarantee ends here: no job that is placed has less than its proportional share (Synergy, §4).
        if ask.exceeds:
            ask = packing.asks.fair(job.gpus, ask.gpu_type)
        books = packing.books  # where the GPUs alone fit
        free = [(at, gpus) for at, gpus in enumerate(books.gpus) if ask.take[books.kind[at]]]
        spots = _fit(packing, ask) or _in_room(packing, ask, free)
        if spots is None:
            return False
    packing.books.take(ask, spots)
    if ask is wanted:
        packing.put(job, ask, spots)
    else:
        packing.put_less(job, ask, spots)
    settle(packing, spots)
    return True


def _fit(packing: Packing, ask: JobDemand) -> Spots | None:
    """Return where all that is asked fits: the fullest server that has it, else the fewest servers."""
    books = packing.books
    return _in_room(packing, ask, [(at, books.most(ask, at, ask.gpus)) for at in range(books.first, len(books.gpus))])


def _in_room(packing: Packing, ask: JobDemand, room: list[tuple[int, int]]) -> Spots | None:
    """Return the fullest server that has all, else the fewest, the last of them the fullest that has what is missing.

    ``room`` gives servers and the GPUs that they can have.
    """
    whole = [at for at, count in room if count >= ask.gpus]
    if whole:
        return ((min(whole, key=lambda at: _left(packing, at)), ask.gpus),)
    spots = []
    missing = ask.gpus
    left = {at: count for at, count in room if count} if missing > 1 else {}
    while missing:
        if not left:
            return None
        enough = [at for at, count in left.items() if count >= missing]
        at = min(enough or left, key=lambda at: (0 if enough else -left[at], *_left(packing, at)))
        count = min(left.pop(at), missing)
        spots.append((at, count))
        missing -= count
    return tuple(sorted(spots))


def _left(packing: Packing, at: int) -> tuple[int, int, int, int]:
    """Return the free resources of a server, as a sort key."""
    books = packing.books
    return books.gpus[at], books.cpus[at], books.memory_mb[at], at


def settle(packing: Packing, spots: Spots) -> None:
    """Let jobs drop to their proportional shares, the greediest first, until none of these servers gives too much.

    This ends: a server whose jobs all hold at most their proportional shares has enough.
    """
    books = packing.books

    def greed(number: int) -> tuple[int, int, int, tuple[int, int]]:  # its part of what the server lacks
        excess = packing.excess(number, at)
        cpus = max(excess.cpus, 0) if books.cpus[at] < 0 else 0
        memory_mb = max(excess.memory_mb, 0) if books.memory_mb[at] < 0 else 0
        return cpus, memory_mb, -len(packing.spots[number]), packing.jobs[number].key

    waiting = [at for at, _ in spots]
    while waiting:
        at = waiting.pop()
        while books.cpus[at] < 0 or books.memory_mb[at] < 0:
            number = max((number for number in packing.on[at] if packing.ask[number].exceeds), key=greed)
            packing.drop([number])
            waiting.extend(server for server, _ in packing.spots[number])
