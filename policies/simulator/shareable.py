"""Jobs of a trace that can never share a GPU, and the reason: memory, state of the GPU in host memory, or users."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from cadenza.policies.core.model import Node
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.trace import TraceJob


class Unshareable(NamedTuple):
    """Numbers of jobs, by the first reason for which none of them shares a GPU of a full host."""

    jobs: int
    """All jobs, those that can share included."""
    users: int
    """Users may not share, and the job's user has no other job."""
    memory: int
    """Its memory for each GPU and that of the leanest other job are more than a host has for each GPU."""
    host_memory: int
    """With the GPU state of the other job, which waits in host memory, they are."""

    def text(self) -> str:
        """Return a sentence with the count and the reasons; empty where all jobs can share."""
        reasons = [
            f"{count} {reason}"
            for count, reason in (
                (self.users, "have no other job of their user"),
                (self.memory, "ask for so much memory that no two jobs fit on a host's GPUs (memory_gb_per_gpu)"),
                (self.host_memory, "leave no host memory for the GPU state of another job"),
            )
            if count
        ]
        count = self.users + self.memory + self.host_memory
        return f"{count} of {self.jobs} jobs can share no GPU: {'; '.join(reasons)}" if count else ""


def unshareable_jobs(jobs: Sequence[TraceJob], nodes: Sequence[Node], *, between_users: bool) -> Unshareable:
    """Return the jobs that can share a GPU with none of the others, whenever these run.

    Jobs that share the GPUs of a full host have the memory of all of them there, and the state of those that wait.
    """
    # 1. What a host has, and each job needs, for each GPU.
    widest = max(nodes, key=lambda node: (node.gpus, node.cpus, node.name))
    each_gb = max(node.memory_mb / node.gpus for node in nodes) / MB_PER_GB
    fair_gb = widest.memory_mb / widest.gpus / MB_PER_GB
    rows = []
    for job in jobs:
        memory_gb = fair_gb if job.memory_gb_per_gpu is None else job.memory_gb_per_gpu
        profile = job.truth or job.profile
        state_gb = (profile.gpu_memory_low_gb if profile is not None else None) or 0.0
        rows.append(("" if between_users else job.user, memory_gb, memory_gb + state_gb))
    # 2. The two leanest jobs that each could share with: the second one for the leanest itself.
    plain: dict[str, list[float]] = defaultdict(list)
    whole: dict[str, list[float]] = defaultdict(list)
    for user, memory_gb, with_state_gb in rows:
        plain[user].append(memory_gb)
        whole[user].append(with_state_gb)
    for leanest in (*plain.values(), *whole.values()):
        leanest.sort()
        del leanest[2:]
    # 3. The first reason that holds for a job.
    users = memory = host_memory = 0
    for user, memory_gb, with_state_gb in rows:
        if len(plain[user]) == 1:
            users += 1
        elif memory_gb + plain[user][memory_gb == plain[user][0]] > each_gb:
            memory += 1
        elif memory_gb + whole[user][with_state_gb == whole[user][0]] > each_gb:
            host_memory += 1
    return Unshareable(len(rows), users, memory, host_memory)
