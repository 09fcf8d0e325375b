"""A job that starts anew owes the GPU time that its last start had too much."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from snapshots import NOW, cluster, job, lease, node
from test_timeslice import APPLY, decide

from cadenza.policies.core.actions import Requeue, Resume, Yield
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import JobKey
from cadenza.policies.ledger import remember

SLICE_S, RETRY_S, RESTART_S = 5.0, 15.0, 2.0
RULES = replace(APPLY, slice_s=SLICE_S, min_run_s=1.0, share_between_users=True, suspend=False)
LANES = tuple(node(lane=lane) for lane in range(3))


@dataclass
class Job:
    """A job of one GPU and its lease, as an agent keeps it."""

    number: int
    conduct: str = "obeys"
    """*obeys*, *refuses* each stop, or refuses and *restarts* by its owner's requeue; or *keeps* so much of the GPU's
    memory that nobody has room beside it, for which it is not asked to stop."""
    restart: int = 0
    state: str = "waiting"
    vtime_s: float = 0.0
    since_s: float = NOW
    refusals: int = 0
    retry_s: float = 0.0
    back_s: float = 0.0
    had_s: float = 0.0

    @property
    def key(self) -> JobKey:
        return JobKey(self.number, self.restart)

    def vtime(self, now_s: float) -> float:
        return self.vtime_s + (now_s - self.since_s if self.state == "held" else 0.0)

    def seen(self, now_s: float, *, room: bool):
        held_s = now_s - self.since_s if self.state == "held" else 0.0
        facts = lease(
            self.state, 0, vtime_s=self.vtime(now_s), held_s=held_s, refusals=self.refusals,
            waited_s=0.0 if held_s else now_s - self.since_s,
            ready=now_s >= self.retry_s and self.conduct != "keeps", no_room="" if room or held_s else "too full",
        )  # fmt: skip
        lane = f"node1-l{self.number}" if self.number else "node1"
        one = job(self.number, user=f"user{self.number}", nodes=(lane,), lease=facts, start_s=NOW - 800)
        gone = replace(one, state="PENDING", nodes=(), lease=None)
        return replace(one if now_s >= self.back_s else gone, key=self.key)

    def leave(self, now_s: float) -> None:
        """Be requeued: the next start registers as a newcomer."""
        self.restart, self.state, self.refusals, self.retry_s = self.restart + 1, "waiting", 0, 0.0
        self.back_s = self.since_s = now_s + RESTART_S


def shares(*jobs: Job, seconds: int = 800, rules=RULES) -> list[float]:
    """Return each job's part of the time that the jobs had their GPU."""
    memory = Memory()
    for now_s in range(int(NOW), int(NOW) + seconds):
        for one in jobs:  # those that come back begin with the least virtual time of those they meet
            if one.back_s == now_s:
                one.vtime_s = min(other.vtime(now_s) for other in jobs if other is not one and other.back_s <= now_s)
        room = not any(one.conduct == "keeps" and one.state == "held" for one in jobs)
        seen = [one.seen(now_s, room=room) for one in jobs]
        snapshot = replace(cluster(*seen, nodes=LANES), time_s=float(now_s))
        decision = decide(snapshot, memory, rules)
        memory = remember(decision.memory, decision.actions, snapshot)
        by_key = {one.key: one for one in jobs}
        for action in decision.actions:
            follow(action, by_key, float(now_s))
        for one in jobs:
            one.had_s += one.state == "held"
            if one.conduct == "restarts" and now_s - one.since_s >= 3 * SLICE_S:
                one.leave(now_s)
    return [one.had_s / sum(other.had_s for other in jobs) for one in jobs]


def follow(action, jobs: dict[JobKey, Job], now_s: float) -> None:
    """Let agents and Slurm carry out an action; GPUs are given once they are free."""
    match action:
        case Requeue():
            jobs[action.job].leave(now_s)
        case Yield() if jobs[action.job].conduct == "obeys":
            one = jobs[action.job]
            one.vtime_s, one.state, one.since_s = one.vtime(now_s), "yielded", now_s
        case Yield():
            jobs[action.job].refusals, jobs[action.job].retry_s = jobs[action.job].refusals + 1, now_s + RETRY_S
        case Resume() if not any(one.state == "held" for one in jobs.values()):
            jobs[action.job].state, jobs[action.job].since_s = "held", now_s


def test_jobs_that_obey_have_equal_shares():
    assert shares(Job(0), Job(1)) == pytest.approx([0.5, 0.5], abs=0.05)


@pytest.mark.parametrize("conduct", ["refuses", "restarts"])
@pytest.mark.parametrize("turns", ["fair", "order"])
def test_who_refuses_stops_does_not_gain_by_its_requeues(turns, conduct):
    """Its owner may requeue it before the service does, also while it waits."""
    honest, refuses = Job(0), Job(1, conduct)
    assert shares(honest, refuses, rules=replace(RULES, turns=turns))[0] > 0.45
    assert refuses.restart > 5


@pytest.mark.parametrize("turns", ["fair", "order"])
def test_who_would_keep_too_much_of_the_gpu_owes_the_time_for_which_others_had_no_room(turns):
    """It has them for ``lease_wait_s`` and may owe half of that."""
    honest, keeps = Job(0), Job(1, "keeps")
    assert shares(honest, keeps, rules=replace(RULES, turns=turns, lease_wait_s=30.0))[0] > 0.3
    assert keeps.restart > 5


def test_who_refuses_stops_has_its_third_next_to_two_others():
    honest = Job(0), Job(2)
    *theirs, refuses = shares(*honest, Job(1, "refuses"))
    assert min(theirs) > 0.3
    assert refuses < 0.4
