"""The processes of a job: those in the control group that root registered, or below the processes that it named."""

from __future__ import annotations

from cadenza.sidecar.agent.ipc import cgroup_paths
from cadenza.sidecar.agent.ipc.processes import is_stepd, parent_of, start_ticks
from cadenza.sidecar.agent.ipc.slurm_steps import Shown, ancestors, descendants, is_halted, shown, step_of
from cadenza.sidecar.agent.leases.lease_table import Lease, Process


def enroll(lease: Lease, pid: int, *, batch: bool = False) -> bool:
    """Add a process that root has registered, its step and its job's group to a lease; return True if that is new."""
    before = lease.processes, lease.stepds, lease.group
    lease.processes = _with(lease.processes, pid, batch=batch)
    lease.group = cgroup_paths.of(pid).slurm_job() or lease.group
    parent = parent_of(pid)
    step = step_of(parent) if parent is not None else None
    if step is not None and step.job == lease.job:
        lease.stepds = _with(lease.stepds, step.pid)
    return before != (lease.processes, lease.stepds, lease.group)


def add(lease: Lease, pid: int) -> bool:
    """Add a process that was seen to belong to the job; return True if it is new."""
    before = lease.processes
    lease.processes = _with(before, pid)
    return lease.processes != before


def belongs(pid: int, lease: Lease) -> bool:
    """Return True if a process is one of the job: neither its environment nor its messages count."""
    if lease.group:
        # slurmd places a job's processes in the group as root: one that has left its parents is still in it.
        return cgroup_paths.of(pid).slurm_job() == lease.group
    known = {one.pid: one.start_ticks for one in (*lease.processes, *lease.stepds)}
    return any(known.get(one) == start_ticks(one) for one in ancestors(pid) if one in known)


def pids_of(lease: Lease) -> frozenset[int]:
    """Return all processes of a job that live here; slurmstepd is none of them."""
    known = frozenset(one.pid for one in lease.running_processes(start_ticks))
    if lease.group:
        return known | cgroup_paths.members_of(lease.group)
    stepds = frozenset(one.pid for one in lease.stepds if start_ticks(one.pid) == one.start_ticks)
    return known | frozenset(pid for pid in descendants(known | stepds) if not is_stepd(pid))


def look_at(lease: Lease) -> Shown:
    """Return the state of a job's processes as the host shows it."""
    known = [one.pid for one in lease.running_processes(start_ticks)]
    if not all(map(is_halted, known)):
        return "running"
    if not lease.group:
        return shown(pids_of(lease))
    thawed = (pid for pid in cgroup_paths.thawed_members_of(lease.group) if not is_stepd(pid))
    if any(not is_halted(pid) for pid in thawed):
        return "running"
    return "frozen" if known or not all(map(is_stepd, cgroup_paths.processes_of(lease.group))) else "gone"


def _with(processes: tuple[Process, ...], pid: int, *, batch: bool = False) -> tuple[Process, ...]:
    """Return the processes with one more, unless it is among them or gone."""
    ticks = start_ticks(pid)
    if ticks is None or any((one.pid, one.start_ticks) == (pid, ticks) for one in processes):
        return processes
    return (*processes, Process(pid, ticks, batch))
