"""Room on the GPUs: what a job keeps there while it is out, and if a job that waits fits in with it.

A job is judged by what the driver measures. It may keep what was not torch's before its move, such as NCCL's buffers,
and what torch says to have left; the next job has to fit in with both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from cadenza.sidecar.agent.jobs.job_run import JobRun, Rank
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable
from cadenza.sidecar.agent.telemetry.gpu_watch import SLACK_BYTES, Look

UNKNOWN_NEED, WHOLE_GPU = 1 / 2, 15 / 16
"""Part of a GPU that jobs which are out must leave to one whose need is not known, as before its first turn; and to one
that did not opt in, and expects the GPU for itself."""


def kept_by(lease: Lease, run: JobRun, look: Look) -> dict[int, int]:
    """Return the memory of each GPU that a job will keep when its ranks, which stand at their boundary, move out."""
    kept = dict.fromkeys(lease.gpus, 0)
    for pid in membership.pids_of(lease):
        rank = run.ranks.get(pid)
        moves = _moves(lease, rank, look) if rank else {}
        for gpu, size in look.sizes(lease.gpus, pid).items():
            kept[gpu] += max((size or 0) - moves.get(gpu, 0), 0)
    return kept


def _moves(lease: Lease, rank: Rank, look: Look) -> dict[int, int]:
    """Return the bytes of torch that a rank says it will free on each GPU, and those of NCCL, as at its last move."""
    held, stays, regrown = (look.by_gpu(lease.gpus, rank.pid, one) for one in (rank.held, rank.stays, rank.regrown))
    return {gpu: held.get(gpu, 0) - stays.get(gpu, 0) + regrown.get(gpu, 0) for gpu in lease.gpus}


def may_keep(rank: Rank | None) -> int | None:
    """Return the bytes that a process may keep after a yield: what was not torch's, and what torch says to have left.

    None for a process that was not measured before.
    """
    if rank is None or rank.beyond is None:
        return None
    return sum(rank.beyond.values()) + rank.left + SLACK_BYTES


def shortage(
    waiting: Lease,
    look: Look,
    table: LeaseTable,
    named: Callable[[int], str],
    leaving: Mapping[int, int] | None = None,
    pids: Collection[int] = (),
) -> str:
    """Return why a job has no room on its GPUs once the processes ``pids`` are out; "" if it has, as far as is known.

    They keep ``leaving`` on each GPU. Where the job's need is not known, only what jobs keep that are out is judged.
    """
    kept = leaving or {}
    if waiting.gpu_bytes:
        return look.shortage(waiting.needs, named, pids, kept) or ""
    share = UNKNOWN_NEED if waiting.managed else WHOLE_GPU
    out = [other for other in table.rivals(waiting) if other.state == "yielded"] if kept else []
    for gpu in sorted(waiting.gpus) if kept else ():
        total = look.memory[gpu].total if gpu in look.memory else None
        here = kept.get(gpu, 0) + look.bytes_of((gpu,), {pid for lease in out for pid in membership.pids_of(lease)})
        if total is not None and here > (1 - share) * total:
            return f"jobs that are out would keep {here >> 20} MB of GPU {gpu}, which has {total >> 20} MB"
    return ""


def useless(lease: Lease, kept: Mapping[int, int], look: Look, table: LeaseTable, named: Callable[[int], str]) -> str:
    """Return why no job that waits for a holder's GPUs would fit in with what it keeps; "" if one would, or none waits.

    A job that would not fit if the holder were gone altogether does not count: it waits for others.
    """
    pids, reason = membership.pids_of(lease), ""
    for other in table.rivals(lease):
        if other.occupying or other.unasked:
            continue
        found = shortage(other, look, table, named, kept, pids)
        if not found:
            return ""
        if not shortage(other, look, table, named, None, pids):
            reason = reason or f"it would keep too much of its GPUs for job {other.key}: {found}"
    return reason
