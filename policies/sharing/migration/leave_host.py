"""Stage: jobs that keep checkpoints leave the hosts that an admin empties (`cadenza host`), and Slurm starts them anew.

Slurm starts nothing more on these hosts: they are drained, or reserved. So a job that saves and is requeued comes to
others, or waits.
"""

from __future__ import annotations

from math import inf

from cadenza.policies.core.actions import Migrate
from cadenza.policies.core.model import Job
from cadenza.policies.sharing.state.round_state import RoundState

LEAD_S = 600.0
"""Time before a reservation begins in which jobs leave: that for saves, KillWait and epilogs, with some to spare."""


def leave_hosts(state: RoundState) -> None:
    """Let each job that can save a checkpoint now leave the hosts that are to be empty before it ends."""
    wanted = [node for node in state.snapshot.nodes if node.empty_from_s is not None]
    if not wanted:
        return
    from_s: dict[str, float] = {}
    for node in wanted:
        from_s[node.host] = min(node.empty_from_s or 0.0, from_s.get(node.host, inf))
    going = {action.job for action in state.outcome.moves} | {key for way in state.outcome.ways for key in way.jobs}
    host_of = state.snapshot.host_of
    for job in state.jobs.ours.values():
        here = sorted({host_of[name] for name in job.nodes if host_of.get(name) in from_s})
        end_s = ends_s(job, state.now_s)
        due = [host for host in here if from_s[host] - state.now_s <= LEAD_S and end_s > from_s[host]]
        # A job that cannot stop and save now stays; what else keeps it is said where moves begin.
        lease = job.lease
        saves = job.state == "RUNNING" and lease is not None and lease.checkpoints and lease.stoppable
        if due and saves and job.key not in going:
            state.outcome.moves.append(Migrate(job.key, (), f"an admin empties {', '.join(due)}"))


def ends_s(job: Job, now_s: float) -> float:
    """Return when a job's time limit ends it at the latest, seconds since the epoch; inf without a limit."""
    return inf if job.time_limit_s is None else now_s + max(job.time_limit_s - (job.run_s or 0.0), 0.0)
