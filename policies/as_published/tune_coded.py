"""TUNE as Synergy's published simulator does it (``resources/cluster.py``): first fit, then neighbors give back."""

from __future__ import annotations

from cadenza.policies.allocation.bin_packing import Packing
from cadenza.policies.allocation.demand import JobDemand, Spots
from cadenza.policies.allocation.problem import Case, Plan
from cadenza.policies.core.model import Job


def tune_coded(case: Case) -> Plan:
    """Place every runnable job in policy order: best-case demand, else proportional share, else at its neighbors' cost.

    Each round forgets the last one's downgrades and packs from empty servers. Nothing consolidates a job's GPUs.
    """
    packing = Packing(case.servers)
    for job in case.jobs[: case.runnable]:
        gpu_type = case.gpu_type.get(job.key, "")
        if not _place(packing, job, gpu_type) and gpu_type:
            _place(packing, job, "")
    return packing.plan()


def _place(packing: Packing, job: Job, gpu_type: str) -> bool:
    """Place a job; False when not enough GPUs of the type are free."""
    ask = best = packing.asks.best(job, gpu_type)
    spots = packing.books.first_fit(ask)
    if spots is None:
        if ask.exceeds:
            ask = packing.asks.fair(job.gpus, gpu_type)
        spots = packing.books.first_fit(ask) or _fit_by_force(packing, ask)
        if spots is None:
            return False
    if ask is best:
        packing.put(job, ask, spots)
    else:
        packing.put_less(job, ask, spots)
    return True


def _fit_by_force(packing: Packing, fair: JobDemand) -> Spots | None:
    """Place a job that wants no more than its share where GPUs are free; None when they are not."""
    chosen = _choose(packing, fair)
    if chosen is None:
        return None
    for server, count in chosen:
        _make_room(packing, fair, server, count)
    books = packing.books
    spots = books.first_fit(fair) if min(books.cpus) >= 0 and min(books.memory_mb) >= 0 else None
    if spots is None:  # a share with more memory than the demand it replaced: the published code stops here
        packing.drop(range(len(packing.jobs)))
        spots = books.first_fit(fair)
    return spots


def _choose(packing: Packing, ask: JobDemand) -> Spots | None:
    """Choose servers by free GPUs alone: the first that has all, else those with fewest until there are enough."""
    free = packing.books.gpus
    usable = [at for at, kind in enumerate(packing.books.kind) if free[at] and ask.take[kind]]
    if ask.gpus > 1:
        whole = next((at for at in usable if free[at] >= ask.gpus), None)
        if whole is not None:
            return ((whole, ask.gpus),)
    chosen = []
    missing = ask.gpus
    for server in sorted(usable, key=free.__getitem__):
        count = min(free[server], missing)
        chosen.append((server, count))
        missing -= count
        if not missing:
            return tuple(chosen)
    return None


def _make_room(packing: Packing, ask: JobDemand, server: int, count: int) -> None:
    """Let jobs of a server drop to their proportional shares, one by one, until what they give back is enough.

    A job that holds no more than its share is walked past. The order is the published one: jobs on the fewest
    servers, with the most CPUs a GPU, with the most memory a GPU.
    """
    cpus, memory_mb = packing.missing(ask, server, count)
    if cpus <= 0 and memory_mb <= 0:
        return

    def greed(number: int) -> tuple[int, float, float]:
        servers, cpus_per_gpu, memory_per_gpu = packing.size(number)
        return servers, -cpus_per_gpu, -memory_per_gpu

    jobs = packing.on[server]
    # The order stays for the next walk, where it decides ties, as in the published code.
    jobs.sort(key=greed)
    for walked, number in enumerate(jobs, 1):
        excess = packing.excess(number, server)
        cpus -= max(excess.cpus, 0)
        memory_mb -= max(excess.memory_mb, 0)
        if cpus <= 0 and memory_mb <= 0:
            packing.drop(jobs[:walked])
            return
    packing.drop(jobs)
