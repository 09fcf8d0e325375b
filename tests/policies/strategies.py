"""Hypothesis strategies for random profiles, jobs, servers, queues and allocation cases."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from cadenza.policies.allocation.problem import Case, Server, proportional_share, share_speed
from cadenza.policies.core.model import Job, JobKey, Options, Placement, Progress, Share
from cadenza.policies.core.profile import MB_PER_GB, Profile, Reference
from cadenza.policies.ordering.ranking import Queue

NOW = 100_000.0
GPU_TYPES = ("a100", "v100", "t4")
GPU_COUNTS = (1, 1, 1, 1, 2, 2, 4, 8, 16)
"""One-GPU jobs are the most frequent, as in published traces."""
KINDS = ((8, 24, 500), (8, 96, 1000), (4, 16, 256), (4, 12, 250), (2, 9, 63), (1, 5, 40))
"""Node kinds: GPUs, CPUs, GB; some do not divide evenly."""
CPU_GRID = (1.0, 2.0, 4.0, 6.0, 12.0)
MEMORY_GRID = (20.83, 125.0, 250.0)
REFERENCE = Reference()
MIN_MEMORY_MB = 1024
"""Memory that ``cases`` leaves for each free GPU of a node."""


# --- profiles ------------------------------------------------------------------------------------------


@st.composite
def profiles(draw, noisy: bool | None = None, gpu_types: tuple[str, ...] = ()) -> Profile:
    """A profile on a small grid that holds its reference's proportional point, where its throughput is 1.

    Without noise (``noisy=False``) throughput never falls along an axis; with it each point but the reference is off
    by up to 5 %. ``gpu_types``: there may be siblings on these, each up to four times slower or faster.
    """
    noise = draw(st.booleans()) if noisy is None else noisy
    profile = draw(_one_type(noise, ""))
    if not gpu_types:
        return profile
    measured = draw(st.lists(st.sampled_from(gpu_types), unique=True, max_size=len(gpu_types)).map(sorted))
    siblings = {gpu: draw(_sibling(profile, noise, gpu)) for gpu in measured}
    return replace(profile, siblings=siblings)


@st.composite
def _one_type(draw, noise: bool, gpu: str) -> Profile:
    cpus = _grid(draw, CPU_GRID, REFERENCE.cpus / REFERENCE.gpus)
    memory = _grid(draw, MEMORY_GRID, REFERENCE.memory_gb / REFERENCE.gpus)
    at = cpus.index(REFERENCE.cpus / REFERENCE.gpus), memory.index(REFERENCE.memory_gb / REFERENCE.gpus)
    rows = _monotone(draw, len(cpus), len(memory))
    one = rows[at[0]][at[1]]
    factor = st.floats(0.95, 1.05) if noise else st.just(1.0)
    throughput = tuple(
        tuple(1.0 if (i, j) == at else value / one * draw(factor) for j, value in enumerate(row))
        for i, row in enumerate(rows)
    )
    return Profile(
        model=draw(st.sampled_from(("res18", "gnmt", "m5"))),
        iteration_s=draw(st.floats(0.05, 2.0)),
        cpus_per_gpu=cpus,
        memory_gb_per_gpu=memory,
        throughput=throughput,
        gpu=gpu,
        gpu_utilization=draw(st.none() | st.floats(0.1, 1.0)),
        gpu_memory_low_gb=draw(st.none() | st.floats(0.1, 8.0)),
    )


@st.composite
def _sibling(draw, profile: Profile, noise: bool, gpu: str) -> Profile:
    seconds = profile.iteration_s * draw(st.sampled_from((0.25, 0.5, 0.8, 1.0, 1.5, 4.0)))
    return replace(draw(_one_type(noise, gpu)), model=profile.model, iteration_s=seconds)


def _grid(draw, values: tuple[float, ...], reference: float) -> tuple[float, ...]:
    """Up to four values and always the reference's, ascending."""
    chosen = draw(st.lists(st.sampled_from(values), unique=True, max_size=3))
    return tuple(sorted({*chosen, reference}))


def _monotone(draw, height: int, width: int) -> list[list[float]]:
    """Positive values that never fall along a row or a column."""
    step = st.sampled_from((0.0, 0.0, 0.05, 0.3, 1.0))
    rows: list[list[float]] = []
    for i in range(height):
        row: list[float] = []
        for j in range(width):
            below = max(rows[i - 1][j] if i else 0.1, row[j - 1] if j else 0.1)
            row.append(below + draw(step))
        rows.append(row)
    return rows


# --- jobs ----------------------------------------------------------------------------------------------


@st.composite
def jobs(
    draw,
    n: int = 8,
    *,
    min_size: int = 0,
    gpu_types: tuple[str, ...] = (),
    noisy: bool | None = None,
    gpus: tuple[int, ...] = GPU_COUNTS,
) -> tuple[Job, ...]:
    """Up to ``n`` pending jobs with different ids that share a few profiles; some have run before."""
    pool = draw(st.lists(profiles(noisy=noisy, gpu_types=gpu_types), min_size=1, max_size=3))
    ids = draw(st.lists(st.integers(1, 999), min_size=min_size, max_size=n, unique=True))
    return tuple(_job(draw, number, pool, gpus) for number in ids)


def _job(draw, number: int, pool: list[Profile], counts: tuple[int, ...]) -> Job:
    gpus = draw(st.sampled_from(counts))
    submit = NOW - draw(st.sampled_from((0.0, 1.0, 60.0, 300.0, 3600.0, 90_000.0)))
    account, user = draw(st.sampled_from((("lab", "ann"), ("lab", "bob"), ("bio", "eve"), ("", "eve"))))
    return Job(
        key=JobKey(number, draw(st.integers(0, 1))),
        user=user,
        account=account,
        partition="gpu",
        qos="normal",
        state="PENDING",
        gpus=gpus,
        cpus=3 * gpus,
        memory_mb=64_000 * gpus,
        num_nodes=-(-gpus // 8),
        submit_s=submit,
        slurm_priority=1,
        options=Options(),
        profile=draw(st.none() | st.sampled_from(pool)),
        progress=_waiting(draw, submit),
    )


def _waiting(draw, submit: float) -> Progress:
    total = draw(st.none() | st.floats(1.0, 500_000.0))
    lived = NOW - submit
    if lived == 0.0 or draw(st.booleans()):
        return Progress(at_s=NOW, total_s=total)
    ran = submit + lived * draw(st.floats(0.1, 1.0))
    attained = (ran - submit) * draw(st.floats(0.0, 1.0))
    done = attained if total is None else min(attained, 0.9 * total)
    return Progress(at_s=ran, total_s=total, done_s=done, attained_s=attained, ran_s=ran)


# --- servers -------------------------------------------------------------------------------------------


@st.composite
def servers(
    draw, *, max_nodes: int = 4, min_nodes: int = 1, gpu_types: tuple[str, ...] = ("",), kinds=KINDS
) -> tuple[Server, ...]:
    """Nodes of several kinds in order of names; each has one of ``gpu_types``."""
    kind = st.tuples(st.sampled_from(kinds), st.sampled_from(gpu_types))
    chosen = draw(st.lists(kind, min_size=min_nodes, max_size=max_nodes))
    return tuple(
        Server(f"n{number}", gpus, cpus, memory_gb * MB_PER_GB, gpu_type)
        for number, ((gpus, cpus, memory_gb), gpu_type) in enumerate(chosen, start=1)
    )


def gpus_by_type(nodes: tuple[Server, ...]) -> dict[str, int]:
    """The usable GPUs of servers as a queue gives them."""
    found: dict[str, int] = {}
    for node in nodes:
        found[node.gpu_type] = found.get(node.gpu_type, 0) + node.gpus
    return found


# --- queues and cases ----------------------------------------------------------------------------------


@st.composite
def cases(
    draw,
    n: int = 8,
    *,
    max_nodes: int = 4,
    gpu_types: tuple[str, ...] = ("",),
    noisy: bool | None = None,
    gpus: tuple[int, ...] = GPU_COUNTS,
) -> Case:
    """A case in which some jobs run with placements that fit together; the order of its jobs is arbitrary.

    A running job has all its GPUs on one type, on one node where that has room. Its CPUs and memory may be any that
    fit, so less than proportional too: a plan has to cope with what an earlier policy left.
    """
    nodes = draw(servers(max_nodes=max_nodes, gpu_types=gpu_types))
    named = tuple(gpu for gpu in gpu_types if gpu)
    waiting = draw(jobs(n, gpu_types=named, noisy=noisy, gpus=gpus))
    free = {node.name: node for node in nodes}
    placed = tuple(_start(draw, job, free, nodes) if draw(st.booleans()) else job for job in waiting)
    return Case(now_s=NOW, servers=nodes, jobs=placed, runnable=runnable(placed, nodes))


def runnable(ordered: tuple[Job, ...], nodes: tuple[Server, ...]) -> int:
    """Return the number of first jobs that fit by their GPUs alone; it stops at the first that does not."""
    left = sum(node.gpus for node in nodes)
    for count, job in enumerate(ordered):
        left -= job.gpus
        if left < 0:
            return count
    return len(ordered)


@st.composite
def queues(draw, n: int = 8, *, gpu_types: tuple[str, ...] = ("",)) -> Queue:
    """The queue of a random case, with the usage and the shares of some accounts and users."""
    case = draw(cases(n, gpu_types=gpu_types))
    names = st.sampled_from(("lab", "bio", "", "lab/ann", "lab/bob", "bio/eve", "/eve"))
    usage = draw(st.dictionaries(names, st.floats(0.0, 1e6), max_size=4))
    shares = draw(st.dictionaries(names, st.sampled_from((0.0, 1.0, 2.0, 10.0)), max_size=4))
    return Queue(NOW, case.jobs, gpus_by_type(case.servers), draw(st.booleans()), usage, shares)


def _start(draw, job: Job, free: dict[str, Server], nodes: tuple[Server, ...]) -> Job:
    """The job as it runs on free GPUs, taken out of ``free``; as it is where there are too few of one type."""
    types = {node.name: node.gpu_type for node in nodes}
    for gpu_type in sorted(set(types.values())):
        names = [name for name, kind in types.items() if kind == gpu_type]
        if sum(free[name].gpus for name in names) >= job.gpus:
            placement = _take(draw, job.gpus, free, names)
            return _running(draw, job, placement, gpu_type)
    return job


def _take(draw, gpus: int, free: dict[str, Server], names: list[str]) -> Placement:
    whole = [name for name in names if free[name].gpus >= gpus]
    shares = []
    for name in whole[:1] or names:
        count = min(gpus, free[name].gpus)
        if count:
            shares.append(_share(draw, free[name], count))
            free[name] = _less(free[name], shares[-1])
            gpus -= count
    return tuple(shares)


def _share(draw, left: Server, gpus: int) -> Share:
    """Proportional to what is left, or any that leaves a CPU and a little memory for each other free GPU."""
    fair = proportional_share(left, gpus)
    others = left.gpus - gpus
    cpus = draw(st.just(fair.cpus) | st.integers(gpus, left.cpus - others))
    memory = draw(st.just(fair.memory_mb) | st.integers(gpus * MIN_MEMORY_MB, left.memory_mb - others * MIN_MEMORY_MB))
    return Share(left.name, gpus, cpus, memory)


def _less(left: Server, share: Share) -> Server:
    return left._replace(
        gpus=left.gpus - share.gpus, cpus=left.cpus - share.cpus, memory_mb=left.memory_mb - share.memory_mb
    )


def _running(draw, job: Job, placement: Placement, gpu_type: str) -> Job:
    speed = min(share_speed(job.profile, share, gpu_type) for share in placement)
    started = draw(st.sampled_from((0.0, 300.0, 4000.0)))
    progress = replace(
        job.progress, at_s=max(NOW - started, job.submit_s), running=True, rate=speed, speed=speed, ran_s=None
    )
    return replace(
        job,
        state="RUNNING",
        start_s=progress.at_s,
        nodes=tuple(share.node for share in placement),
        placement=placement,
        progress=progress,
    )
