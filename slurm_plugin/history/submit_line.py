"""Parts of a job's request that only its command line tells: ``--nice`` and the type of GPU (pure)."""

from __future__ import annotations

import re

NICE = re.compile(r"\s--nice(?:=(-?\d{1,10}))?(?=\s|$)", re.ASCII)
USUAL_NICE = 100
"""Value of ``--nice`` without a number (sbatch(1))."""
GPU_TYPE = re.compile(
    r"\s(?:--gres[= ]\S*?\bgpu:([A-Za-z0-9][\w.-]{0,63}):\d+|--gres[= ]\S*?\bgpu:([A-Za-z][\w.-]{0,63})\b"
    r"|(?:-G ?|--gpus(?:-per-(?:node|task|socket))?[= ])([A-Za-z0-9][\w.-]{0,63}):\d+)",
    re.ASCII,
)

GPUS = re.compile(r"\s(?:--gres[= ]\S*?\bgpu\b|-G|--gpus\b)", re.ASCII)


def nice_in(line: str) -> int:
    """Return the nice value of a command line, 0 without one; options in the batch script do not show there.

    >>> nice_in("sbatch --nice=50 job.sh"), nice_in("sbatch --nice job.sh"), nice_in("sbatch job.sh")
    (50, 100, 0)
    """
    found = NICE.search(_options(line))
    return 0 if found is None else int(found[1] or USUAL_NICE)


def gpu_type_in(line: str) -> str:
    """Return the type of GPU that a command line asks for; empty for any.

    >>> gpu_type_in("sbatch --gres=gpu:a100:2 job.sh"), gpu_type_in("srun -G h100:8 x"), gpu_type_in("srun --gpus=4 x")
    ('a100', 'h100', '')
    """
    found = GPU_TYPE.search(_options(line))
    return next(filter(None, found.groups()), "") if found is not None else ""


def asks_for_gpus(line: str) -> bool:
    """Return whether a command line itself asks for GPUs: then it also says whether any type will do.

    >>> asks_for_gpus("sbatch --gres=gpu:2 job.sh"), asks_for_gpus("sbatch job.sh")
    (True, False)
    """
    return GPUS.search(_options(line)) is not None


def _options(line: str) -> str:
    """Return the part of a line ahead of the commands that it wraps."""
    return line.partition(" --wrap")[0]
