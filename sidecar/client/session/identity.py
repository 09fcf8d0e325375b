"""Rank and job of this process, from the environment of Slurm and torchrun."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """One rank of one incarnation of a job; ``gpus`` are the host's indices as Slurm granted them."""

    job: int
    restart: int
    rank: int
    world_size: int
    local_world_size: int | None
    node: str
    hosts: int
    gpus: tuple[int, ...]

    def fields(self) -> dict[str, Any]:
        """Return the fields of an ``attach`` message (see the wire format)."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return {**known, "gpus": list(self.gpus)}


def read(environ: Mapping[str, str]) -> Identity | None:
    """Return this process's identity, or None outside a Slurm job.

    The rank comes from an initialized torch.distributed, else from torchrun's RANK and WORLD_SIZE, else from
    the job step (srun). In a batch script SLURM_NTASKS counts the whole allocation although one process runs,
    so only the step's own SLURM_STEP_NUM_TASKS counts (srun(1), "output environment variables").
    """
    job = number(environ, "SLURM_JOB_ID")
    if not job:
        return None
    rank, world_size, local_world_size = _ranks(environ)
    return Identity(
        job=job,
        restart=number(environ, "SLURM_RESTART_COUNT") or 0,
        rank=rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node=environ.get("SLURMD_NODENAME", ""),
        hosts=number(environ, "SLURM_JOB_NUM_NODES") or 1,
        # These two name the host's GPUs. CUDA_VISIBLE_DEVICES counts from 0 where Slurm's device cgroup hides the
        # others (sbatch(1), SLURM_JOB_GPUS).
        gpus=parse_indices(environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""),
    )


def _ranks(environ: Mapping[str, str]) -> tuple[int, int, int | None]:
    """Return rank, world size, and the local world size if the environment has it."""
    local = number(environ, "LOCAL_WORLD_SIZE") or None
    step_rank, step_size = number(environ, "SLURM_PROCID"), number(environ, "SLURM_STEP_NUM_TASKS")
    distributed = sys.modules.get("torch.distributed")
    # A torch that was built without torch.distributed has the module, and none of its functions.
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        world_size = distributed.get_world_size()
        if world_size == step_size:
            local = local or _step_tasks_here(environ)
        return distributed.get_rank(), world_size, local
    rank, world_size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if rank is not None and world_size is not None and rank < world_size:
        return rank, world_size, local
    if step_rank is not None and step_size is not None and step_rank < step_size:
        return step_rank, step_size, _step_tasks_here(environ)
    return 0, 1, 1


def world_size(environ: Mapping[str, str]) -> int:
    """Return the number of the job's ranks, 1 by default; see ``read`` for the sources."""
    return _ranks(environ)[1]


def _step_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return this node's tasks of the step from SLURM_STEP_TASKS_PER_NODE, such as ``2(x3),1``."""
    node = number(environ, "SLURM_NODEID")
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node is not None and node < len(counts) else None


def parse_indices(text: str) -> tuple[int, ...]:
    """Return the GPU indices of ``0,2-3``, none for a text that cannot be read.

    >>> parse_indices("0,2-3")
    (0, 2, 3)
    """
    indices: set[int] = set()
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        if not match:
            return ()
        indices.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(indices))


def number(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a count, or None when it is missing or no number."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def requeue_owner(environ: Mapping[str, str]) -> str:
    """Return the framework that requeues this job by its own signal handler, by the environment: submitit, or ""."""
    return "submitit" if environ.get("SUBMITIT_EXECUTOR") == "slurm" else ""


def here() -> Identity | None:
    """Return the identity that this process's own environment gives."""
    return read(os.environ)
