"""Who requeues this job: one owner only, so Cadenza says so when a framework does it by a signal handler."""

from __future__ import annotations

import logging
import os

_log = logging.getLogger("cadenza.client")

LIGHTNING = (
    "Lightning requeues this job by itself when Slurm signals it, so Cadenza takes turns in place and leaves "
    "requeueing to Lightning. To let Cadenza do it: Trainer(plugins=[SLURMEnvironment(auto_requeue=False)])"
)
SUBMITIT = (
    "submitit requeues this job by itself when Slurm signals it, so Cadenza takes turns in place and leaves "
    "requeueing to submitit. To let Cadenza do it, submit the training script with sbatch --cadenza instead"
)


def other_owner(cluster_environment: object = None) -> str:
    """Return what to know when somebody else requeues this job, or "".

    That is Lightning's SLURMEnvironment with ``auto_requeue``, its default under srun, or submitit, which marks
    its jobs by ``SUBMITIT_EXECUTOR``. Their signal handlers stay as they are; Cadenza's client has none.
    """
    if getattr(cluster_environment, "auto_requeue", False):
        return LIGHTNING
    return SUBMITIT if os.environ.get("SUBMITIT_EXECUTOR") == "slurm" else ""


def warn_of_other_owner(cluster_environment: object = None) -> str:
    """Say in a Slurm job that somebody else requeues it, if so; return who, in the agent's word for it, or ""."""
    why = other_owner(cluster_environment)
    if why and os.environ.get("SLURM_JOB_ID"):
        _log.warning(why)
    return {LIGHTNING: "lightning", SUBMITIT: "submitit"}.get(why, "")
