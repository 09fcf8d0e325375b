"""``cadenza-agent --jobs``: Slurm's jobs on this host, of all lanes, for a site's own scripts.

Slurm's commands answer for a node, which is one lane. Steps and processes are looked up on the host itself, so the
answer does not depend on the running agent; only the state of a lease is the agent's, from its file.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar.agent.ipc.processes import boot_id, uid_of
from cadenza.sidecar.agent.ipc.slurm_steps import Step, steps
from cadenza.sidecar.agent.leases import handover
from cadenza.sidecar.agent.leases.lease_table import Lease, Process
from cadenza.sidecar.agent.leases.membership import pids_of
from cadenza.sidecar.agent.state_files import LeaseFile
from cadenza.sidecar.agent_settings import AgentSettings

ABSENT = "-"
"""Printed for a value that a job does not have."""
_GROUP = re.compile(r"(?:^|[/:])(?:slurm_([^/]+)/uid_|([^/]+)_slurmstepd\.scope/)")
"""The node in a job's group (cgroups.html, cgroup_v2.html); a slurmd that is alone on its host may not be named."""
HEADER = "JOB NODE UID GPUS LEASE PIDS"


class JobHere(msgspec.Struct, frozen=True, order=True):
    """One job on one node of this host."""

    job: int
    node: str
    uid: int | None
    """None: no process of it has started yet."""
    gpus: tuple[int, ...]
    lease: str
    """``held`` or ``stopping``: it runs on its GPUs; ``yielded`` or ``waiting``: another one does; empty: no lease."""
    pids: tuple[int, ...]

    def __str__(self) -> str:
        """Return one line of six words."""
        lists = (",".join(map(str, self.gpus)), self.lease, ",".join(map(str, self.pids)))
        uid = ABSENT if self.uid is None else self.uid
        return " ".join(map(str, (self.job, self.node or ABSENT, uid, *(text or ABSENT for text in lists))))


def jobs_here(settings: AgentSettings) -> tuple[JobHere, ...]:
    """Return the jobs that have a step on this host now.

    Raise EnvironmentLacks for other users than root, whose /proc does not show all steps, and StateFileError if
    the file of leases is damaged: a script must not take either for an empty host.
    """
    if os.geteuid() != 0:
        raise EnvironmentLacks("--jobs: only root sees all jobs of this host")
    saved = LeaseFile(Path(settings.expert.state_dir), boot_id(), settings.runtime).read().leases
    return inventory(steps(), handover.read_all(settings.runtime / "jobs"), saved)


def node_of(step: Step) -> str:
    """Return the Slurm node of a step, by its group where slurmstepd's title has overwritten its environment."""
    named = _GROUP.search(step.group)
    return step.node or (named[1] or named[2] if named is not None else "")


def inventory(
    found: Iterable[Step], handovers: Iterable[handover.Handover], leases: Iterable[Lease]
) -> tuple[JobHere, ...]:
    """Return each job of these steps, with root's note of its GPUs and its last lease."""
    by_job: defaultdict[tuple[int, str], list[Step]] = defaultdict(list)
    for step in found:
        by_job[step.job, node_of(step)].append(step)
    noted = {(one.job, one.node): one for one in handovers}
    states: Mapping[int, Lease] = {lease.job: lease for lease in sorted(leases, key=lambda one: one.restart)}
    jobs = []
    for (job, node), own in by_job.items():
        group = next((step.group for step in own if step.group), "")
        stepds = tuple(Process(step.pid, step.start_ticks) for step in own)
        pids = tuple(sorted(pids_of(Lease(job, 0, 0, (), 0.0, group=group, stepds=stepds))))
        note, lease = noted.get((job, node)), states.get(job)
        uid = note.uid if note is not None and note.uid is not None else max(map(uid_of, pids), default=None)
        state = lease.state if lease is not None and lease.node in ("", node) else ""
        jobs.append(JobHere(job, node, uid, note.gpus if note is not None else (), state, pids))
    return tuple(sorted(jobs))
