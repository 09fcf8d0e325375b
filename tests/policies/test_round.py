"""The round and its memory, with a small cluster in memory: what is recorded, what leaves, what is remembered."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, key, lease, node

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    OpenNode,
    Outcome,
    Place,
    Release,
    Requeue,
    Resume,
    Suspend,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.policies.guard import GuardSettings
from cadenza.policies.ledger import remember
from cadenza.policies.round import Live, run_round
from cadenza.policies.sharing.pipeline import Pipeline, stages_of
from cadenza.policies.sharing.state.settings import REQUEUE_HOLD, GandivaSettings, SharingSettings, held_for_us
from cadenza.policies.supervision import each


@dataclass
class SmallCluster:
    """Gateway: Slurm's and the agents' side, each order carried out at once."""

    snapshot: ClusterSnapshot
    refuse: tuple[type, ...] = ()
    log: list[Action] = field(default_factory=list)

    def read(self) -> ClusterSnapshot:
        return self.snapshot

    def apply(self, action: Action) -> Outcome:
        self.log.append(action)
        if isinstance(action, self.refuse):
            return Outcome(ok=False, error=f"{type(action).__name__}: refused")
        if isinstance(action, DrainNode | OpenNode):
            self._node(action)
        else:
            self._job(action)
        return Outcome(ok=True)

    def _node(self, action: DrainNode | OpenNode) -> None:
        changed = {"drained": isinstance(action, DrainNode), "drain_reason": "cadenza: test"}
        nodes = [replace(n, **changed) if n.name == action.node else n for n in self.snapshot.nodes]
        self.snapshot = replace(self.snapshot, nodes=tuple(nodes))

    def _job(self, action: Action) -> None:
        found = self.snapshot.job(action.job)
        if isinstance(action, Suspend | Unsuspend):
            found = replace(found, state="SUSPENDED" if isinstance(action, Suspend) else "RUNNING")
        elif isinstance(action, Yield | Resume):
            state = "yielded" if isinstance(action, Yield) else "held"
            found = replace(found, lease=replace(found.lease, state=state, held_s=0.0))
        elif isinstance(action, Place | Release):
            found = replace(found, slurm_priority=1)
        jobs = [found if j.key == found.key else j for j in self.snapshot.jobs]
        self.snapshot = replace(self.snapshot, jobs=tuple(jobs))

    def wait(self, seconds: float) -> None:
        """Let time pass for those that hold GPUs and for those that wait."""
        jobs = []
        for found in self.snapshot.jobs:
            if found.lease is not None and found.lease.state == "held":
                held = found.lease.held_s + seconds
                vtime = found.lease.vtime_s + seconds
                jobs.append(replace(found, lease=replace(found.lease, held_s=held, vtime_s=vtime)))
            else:
                jobs.append(found)
        self.snapshot = replace(self.snapshot, time_s=self.snapshot.time_s + seconds, jobs=tuple(jobs))


@dataclass
class Records:
    """Store, in memory; notes what was known when the first action left."""

    kept: Memory = field(default_factory=Memory)
    rounds: list = field(default_factory=list)

    def memory(self) -> Memory:
        return self.kept

    def check(self, snapshot, decision, memory) -> None:
        """Take any round."""

    def begin(self, snapshot, decision, guarded, memory) -> int:
        self.kept = memory
        self.rounds.append([snapshot, decision, tuple(guarded), None])
        return len(self.rounds)

    def finish(self, number, outcomes, seconds) -> None:
        self.rounds[number - 1][3] = (tuple(outcomes), seconds)


class Ticks:
    """Clock that moves by one second with each look."""

    def __init__(self) -> None:
        self.seconds = NOW

    def now(self) -> float:
        self.seconds += 1
        return self.seconds


SHARING = SharingSettings(enforce=True, partitions=frozenset({"gpu"}))
GUARD = GuardSettings(enforce=True, partitions=frozenset({"gpu"}))
PAIR = (
    job(1, lease=lease("held", 0, held_s=70.0, vtime_s=70.0)),
    job(2, nodes=("node1-l1",), lease=lease("yielded", 0, vtime_s=10.0)),
)


def one_round(gateway, records, sharing=SHARING, limits=GUARD):
    stages = stages_of("timeslice", sharing, GandivaSettings(), allocates=False)
    pipeline = Pipeline(stages, replace(sharing, floor=True))
    return run_round(gateway, Ticks(), records, pipeline.decide, limits)


def test_a_round_decides_guards_applies_and_records():
    gateway, records = SmallCluster(cluster(*PAIR)), Records()
    report = one_round(gateway, records)
    assert [type(action) for action in gateway.log] == [Yield, Resume]
    assert report.number == 1
    assert [outcome.ok for _, outcome in report.outcomes] == [True, True]
    assert records.rounds[0][3] == (report.outcomes, 1.0)
    assert records.kept.last_yield_s == {key(1): NOW}


def test_two_jobs_take_turns_round_after_round():
    gateway, records = SmallCluster(cluster(*PAIR)), Records()
    held = {1: 0, 2: 0}
    for _ in range(40):
        one_round(gateway, records)
        for found in gateway.snapshot.jobs:
            if found.lease.state == "held":
                held[found.key.id] += 1
                assert found.state == "RUNNING"
        gateway.wait(15.0)
    assert sum(held.values()) == 40
    assert abs(held[1] - held[2]) <= 60 / 15 + 1
    asleep = [found for found in gateway.snapshot.jobs if found.state == "SUSPENDED"]
    assert {found.key for found in asleep} <= records.kept.suspended


def test_a_round_is_on_record_before_its_first_action_leaves():
    records = Records()

    class Checking(SmallCluster):
        def apply(self, action):
            assert records.rounds[-1][2]
            assert key(1) in records.kept.last_yield_s
            return super().apply(action)

    one_round(Checking(cluster(*PAIR)), records)


def test_without_a_snapshot_there_is_no_round():
    class Down(SmallCluster):
        def read(self):
            raise ConnectionError("slurmctld does not answer")

    records = Records()
    with pytest.raises(ConnectionError):
        one_round(Down(cluster()), records)
    assert records.rounds == []


def test_observe_only_lets_nothing_leave_but_shuts_the_lanes():
    gateway, records = SmallCluster(cluster(*PAIR)), Records()
    report = one_round(gateway, records, replace(SHARING, enforce=False), replace(GUARD, enforce=False))
    assert gateway.log == [DrainNode("node1-l1", "cadenza: observe-only, no job may share a GPU")]
    blocked = [item for item in report.guarded if not item.allowed]
    assert [type(item.action) for item in blocked] == [Yield, Resume]
    assert all(item.reason.startswith("observe-only") for item in blocked)
    assert records.kept.last_yield_s == {}


def test_the_way_back_to_observe_only_wakes_everybody_up_and_shuts_the_lanes():
    young = replace(PAIR[0], lease=lease("held", 0, held_s=7.0, vtime_s=7.0))
    gateway, records = SmallCluster(cluster(young, PAIR[1])), Records()
    one_round(gateway, records)
    assert gateway.snapshot.job(key(2)).state == "SUSPENDED"
    observe = partial(
        one_round,
        sharing=replace(SHARING, enforce=False),
        limits=replace(GUARD, enforce=False, max_actions_per_round=0),
    )
    observe(gateway, records)
    assert gateway.snapshot.job(key(2)).state == "RUNNING"
    assert gateway.snapshot.nodes[1].drained
    observe(gateway, records)
    assert records.kept.suspended == frozenset()
    one_round(gateway, records)
    assert not gateway.snapshot.nodes[1].drained


def test_what_failed_is_tried_again_in_the_next_round():
    young = replace(PAIR[0], lease=lease("held", 0, held_s=7.0, vtime_s=7.0))
    gateway, records = SmallCluster(cluster(young, PAIR[1]), refuse=(Suspend,)), Records()
    one_round(gateway, records)
    one_round(gateway, records)
    assert [type(action) for action in gateway.log] == [Suspend, Suspend]


# --- Live ----------------------------------------------------------------------------------------------

CROWD = (
    *(job(n, nodes=("node1-l1",), state="SUSPENDED", options=None, lease=lease("yielded", n - 4)) for n in (5, 6)),
    job(7, state="PENDING", slurm_priority=0, held_at_restart=True),
    *PAIR,
)
"""What this needs: two resumes in Slurm and a release, which undo, a yield and a resume."""
OURS = Memory(suspended=frozenset({key(5), key(6)}))


def one_live_round(gateway, records, changes, deadline_s=inf, decide=None, **live):
    """Run a round whose guard settings are ``changes(n)`` as the n-th action is about to leave."""
    count = iter(range(100))
    decide = decide or Pipeline(stages_of("timeslice", SHARING, GandivaSettings(), allocates=False), SHARING).decide
    return run_round(gateway, Ticks(), records, decide, GUARD, Live(lambda: changes(next(count)), deadline_s, **live))


@pytest.mark.parametrize("last", range(6))
def test_the_kill_switch_stops_the_next_action(last):
    gateway, records = SmallCluster(cluster(*CROWD)), Records(OURS)
    report = one_live_round(gateway, records, lambda n: replace(GUARD, killed=n >= last))
    assert [type(action) for action, _ in report.outcomes] == [Unsuspend, Unsuspend, Yield, Resume, Release]
    assert gateway.log == [action for action, _ in report.outcomes[:last]]
    assert [outcome.left for _, outcome in report.outcomes] == [n < last for n in range(5)]
    assert all(outcome.error.startswith("kill switch") for _, outcome in report.outcomes[last:])
    assert records.rounds[0][3][0] == report.outcomes, "on record with their reason"


def test_a_partition_that_is_taken_away_stops_the_next_action_but_for_those_that_undo():
    gateway, records = SmallCluster(cluster(*CROWD)), Records(OURS)
    one_live_round(gateway, records, lambda n: replace(GUARD, partitions=frozenset() if n else GUARD.partitions))
    assert [type(action) for action in gateway.log] == [Unsuspend, Unsuspend, Release]


def test_actions_leave_within_the_deadline_only():
    gateway, records = SmallCluster(cluster(*CROWD)), Records(OURS)
    report = one_live_round(gateway, records, lambda _: GUARD, deadline_s=3.0)
    assert len(gateway.log) == 3, "each look at the clock takes a second"
    assert report.outcomes[3][1].error == "deadline: the round has taken 4 s, the rest is decided anew"


def test_the_first_actions_of_a_round_that_is_late_leave_all_the_same():
    """Where reading and deciding took longer than the deadline, no action ever left."""
    gateway, records, clock = SmallCluster(cluster(*CROWD)), Records(OURS), Ticks()

    def slow(snapshot, memory):
        for _ in range(100):
            clock.now()
        return Pipeline(stages_of("timeslice", SHARING, GandivaSettings(), allocates=False), SHARING).decide(
            snapshot, memory
        )

    report = run_round(gateway, clock, records, slow, GUARD, Live(lambda: GUARD, deadline_s=8.0))
    assert [outcome.left for _, outcome in report.outcomes] == [True, True, True, False, False]
    assert report.outcomes[3][1].error.startswith("deadline: the round has taken 104 s")


STRANGER = job(9, nodes=("node2",), lease=lease("held", 3, hosts=("node2",)))


class Strict(Records):
    """Takes no job called *bad*, as a store that cannot write it."""

    def check(self, snapshot, decision, memory) -> None:
        for found in snapshot.jobs:
            found.name.encode()


def choking(found, memory, sharing=SHARING):
    """A policy that one job's data makes fail."""
    if any(one.lease is not None and one.lease.vtime_s > 1e300 for one in found.jobs):
        raise OverflowError("too large")
    return Pipeline(stages_of("timeslice", sharing, GandivaSettings(), allocates=False), sharing).decide(found, memory)


BAD = {
    "encoding": replace(STRANGER, name="\ud800"),
    "policy": replace(STRANGER, lease=replace(STRANGER.lease, vtime_s=1e301)),
    "unmanaged": replace(STRANGER, options=None, name="\ud800"),
    "suspended": replace(STRANGER, state="SUSPENDED", lease=lease("yielded", 3, hosts=("node2",), vtime_s=1e301)),
    "pending": job(9, state="PENDING", state_reason="Dependency", name="\ud800"),
    "held": job(9, state="PENDING", slurm_priority=0, state_reason="JobHeldUser", name="\ud800"),
}
HOSTS = (node(), node(lane=1), node("node2"), node("node2", lane=1))


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_one_bad_job_changes_nothing_for_the_others(bad):
    honest, records = SmallCluster(cluster(*CROWD, nodes=HOSTS)), Strict(OURS)
    one_live_round(honest, records, lambda _: GUARD, decide=choking)
    gateway, records = SmallCluster(cluster(*CROWD[:2], bad, *CROWD[2:], nodes=HOSTS)), Strict(OURS)
    report = one_live_round(gateway, records, lambda _: GUARD, decide=choking)
    assert [action for action in gateway.log if getattr(action, "job", None) != bad.key] == honest.log
    assert report.left_alone.keys() == {bad.key}
    reason = report.left_alone[bad.key]
    assert reason.startswith("because of its data it makes a decision fail (")
    assert reason.isprintable()
    if bad.options is not None:
        assert report.decision.reasons[bad.key] == f"left alone: {reason}"
    seen = report.snapshot.job(bad.key)
    assert not seen.opted_in
    assert bad.lease is None or (seen.lease.gpus, seen.lease.state) == (bad.lease.gpus, bad.lease.state)


def test_a_job_that_cannot_be_observed_is_left_alone():
    def step(one):
        if one.key.id == 2:
            raise OverflowError("its\nnumber")
        return replace(one, name="seen")

    seen = each((job(1), job(2), job(3)), step)
    assert [one.name for one in seen] == ["seen", "", "seen"]
    assert seen[1].unmanageable == "because of its data it cannot be observed (OverflowError: its number)"


def test_several_bad_jobs_are_left_alone_and_known_ones_at_once():
    bad = tuple(job(n, nodes=("node2",), name="\ud800", user=f"u{n % 3}") for n in range(20, 26))
    gateway, records = SmallCluster(cluster(*CROWD, *bad, nodes=HOSTS)), Strict(OURS)
    calls = []

    def counting(found, memory):
        calls.append(found)
        return choking(found, memory)

    first = one_live_round(gateway, records, lambda _: GUARD, decide=counting)
    assert first.left_alone.keys() == {one.key for one in bad}
    assert len(calls) < 60
    calls.clear()
    second = one_live_round(gateway, records, lambda _: GUARD, decide=counting, left_alone=first.left_alone)
    assert (second.left_alone, len(calls)) == (first.left_alone, 1)


def test_a_user_with_many_bad_jobs_is_left_alone_whole():
    good = job(19, nodes=("node2",), user="eve", lease=lease("held", 3, hosts=("node2",)))
    bad = tuple(job(n, nodes=("node2",), name="\ud800", user="eve") for n in range(20, 220))
    gateway, calls = SmallCluster(cluster(*CROWD, good, *bad, nodes=HOSTS)), []

    def counting(found, memory):
        calls.append(found)
        return choking(found, memory)

    report = one_live_round(gateway, Strict(OURS), lambda _: GUARD, decide=counting)
    assert report.left_alone.keys() == {one.key for one in (good, *bad)}
    assert report.left_alone[good.key] == "other jobs of eve make decisions fail"
    assert len(gateway.log) == 5
    assert len(calls) < 40


def test_an_error_that_is_no_jobs_fault_ends_the_round():
    def broken(found, memory):
        raise RuntimeError("a bug")

    records = Records()
    with pytest.raises(RuntimeError, match="a bug"):
        one_live_round(SmallCluster(cluster(*CROWD)), records, lambda _: GUARD, decide=broken)
    assert records.rounds == []


@pytest.mark.parametrize(
    ("reason", "has_run", "ours"),
    [
        ("job requeued in held state", False, True),
        ("JobHeldAdmin", True, True),
        ("JobHeldAdmin", False, False),
        ("JobHeldUser", True, False),
    ],
)
def test_a_hold_that_we_released_is_ours_again_once_slurmctld_forgot_the_release(reason, has_run, ours):
    successor = JobKey(1, 1)
    held = replace(job(1, state="PENDING", slurm_priority=0, state_reason=reason), key=successor)
    memory = Memory(placed=frozenset({successor}), resumed={successor: 0.0} if has_run else {})
    assert held_for_us(held, memory) == ours
    later = remember(memory, (), cluster(held))
    assert held_for_us(held, later) == ours, "until it is released"


def test_what_slurm_held_as_slurmctld_restarted_is_ours_until_it_is_released():
    held = replace(job(1, state="PENDING", slurm_priority=0, held_at_restart=True), key=JobKey(1, 1))
    assert held_for_us(held, Memory())
    memory = remember(Memory(), (), cluster(held))
    later = replace(held, held_at_restart=False)
    assert held_for_us(later, memory), "also when that restart is long ago, or slurmctld has restarted since"
    assert not held_for_us(later, remember(memory, (Release(held.key, ""),), cluster(later)))


def test_a_release_of_a_requeue_that_slurmctld_forgot_is_repeated_also_where_it_calls_the_hold_an_admins():
    successor = JobKey(1, 1)
    requeued = replace(job(1, state="PENDING", slurm_priority=0, state_reason=REQUEUE_HOLD), key=successor)
    admins = replace(requeued, state_reason="JobHeldAdmin")
    placed = Memory(placed=frozenset({successor}))
    assert not held_for_us(admins, placed), "slurmctld forgot nothing"
    forgotten = remember(placed, (), cluster(requeued))
    assert held_for_us(admins, forgotten)
    assert held_for_us(admins, remember(forgotten, (), cluster(admins))), "for as long as it waits for GPUs"
    again = remember(forgotten, (Place(successor, ("a",), ""),), cluster(admins))
    assert held_for_us(admins, again), "a release that failed is tried again"
    free = replace(cluster(replace(admins, slurm_priority=1, state_reason="Resources")), time_s=NOW + 10)
    assert not held_for_us(admins, remember(again, (), free)), "a hold after our second release is an admin's"


@pytest.mark.parametrize("then", ["it ended", "we requeued it again"])
def test_a_hold_that_we_released_is_ours_again_where_slurmctld_forgot_the_start_and_its_end_too(then):
    """A killed slurmctld shows the released incarnation in its old hold, after the next one or none was shown."""
    again = replace(job(1, state="PENDING", slurm_priority=0, state_reason=REQUEUE_HOLD), key=JobKey(1, 2))
    after = () if then == "it ended" else (again,)
    memory = remember(Memory(), (Place(JobKey(1, 1), ("a",), ""),), cluster(replace(job(1), key=JobKey(1, 1))))
    memory = remember(memory, (), cluster(*after))
    forgot = replace(again, key=JobKey(1, 1))
    early = remember(memory, (), replace(cluster(forgot), time_s=NOW + 10))
    assert held_for_us(forgot, early)
    owners = replace(forgot, state_reason="JobHeldUser")
    free = replace(cluster(replace(forgot, slurm_priority=1, state_reason="Resources")), time_s=NOW + 20)
    released = remember(remember(early, (Release(forgot.key, ""),), cluster(forgot)), (), free)
    assert not held_for_us(owners, released), "a hold after our second release is the owner's"
    other = replace(forgot, key=JobKey(1, 3))
    assert not held_for_us(other, remember(memory, (), cluster(other))), (
        "a hold of an incarnation that we never released"
    )
    memory = remember(memory, (), replace(cluster(*after), time_s=NOW + 100))
    late = replace(cluster(forgot), time_s=NOW + 101)
    assert not held_for_us(forgot, remember(memory, (), late)), "no slurmctld forgets that much"


@pytest.mark.parametrize("reason", [REQUEUE_HOLD, "JobHeldAdmin"])
def test_a_requeue_of_ours_stays_ours_after_a_release_that_failed(reason):
    """A killed slurmctld answers no release, and ``settled`` takes back that we placed the job."""
    running, successor = job(5), JobKey(5, 1)
    memory = remember(Memory(), (Requeue(key(5), hold=True, reason=""),), cluster(running))
    held = replace(job(5, state="PENDING", slurm_priority=0, state_reason=reason), key=successor)
    tried = remember(memory, (Place(successor, ("a",), ""),), cluster(held))
    assert held_for_us(held, replace(tried, placed=memory.placed))


def test_the_hold_of_our_requeue_is_ours_until_it_is_released():
    """Only our own record says so; the next hold is the owner's."""
    requeue = (Requeue(key(5), hold=True, reason="makes room"),)
    running, successor = job(5), JobKey(5, 1)
    memory = remember(Memory(), requeue, cluster(running))
    held = replace(job(5, state="PENDING", slurm_priority=0, state_reason="JobHeldUser"), key=successor)
    assert held_for_us(held, memory)
    assert not held_for_us(held, Memory())
    for state in (running, replace(running, state="OTHER"), held):
        later = remember(memory, (), replace(cluster(state), time_s=NOW + 60))
        assert held_for_us(held, later)
    freed = replace(cluster(replace(held, slurm_priority=1)), time_s=NOW + 60)
    assert not held_for_us(held, remember(memory, (), freed))
    assert not held_for_us(held, remember(memory, (Release(successor, ""),), cluster(held)))
    never = remember(memory, (), replace(cluster(running), time_s=NOW + 3600))
    assert not held_for_us(held, never), "Slurm did not requeue it"


# --- Memory --------------------------------------------------------------------------------------------

keys = st.integers(0, 5).map(key)
lanes = st.integers(0, 3).map(lambda lane: "node1" if lane == 0 else f"node1-l{lane}")
actions = st.lists(
    st.one_of(
        *(keys.map(lambda k, kind=kind: kind(k, "")) for kind in (Yield, Suspend, Unsuspend, Release)),
        keys.map(lambda k: Place(k, ("node1",), "")),
        lanes.map(lambda name: DrainNode(name, "")),
        lanes.map(lambda name: OpenNode(name, "")),
    ),
    max_size=8,
)
memories = st.builds(
    Memory,
    suspended=st.frozensets(keys),
    placed=st.frozensets(keys),
    drained=st.frozensets(lanes),
    last_yield_s=st.dictionaries(keys, st.floats(0, NOW)),
)
worlds = st.builds(
    lambda states, drains: cluster(
        *(job(n, state=state) for n, state in states.items()),
        nodes=tuple(node(lane=lane, drained=drained) for lane, drained in enumerate(drains)),
    ),
    st.dictionaries(st.integers(0, 5), st.sampled_from(("RUNNING", "SUSPENDED", "PENDING"))),
    st.lists(st.booleans(), min_size=1, max_size=4),
)


@settings(max_examples=80, deadline=None)
@given(memories, actions, worlds)
def test_memory_claims_only_what_we_did_and_what_is_still_so(memory, acted, snapshot):
    after = remember(memory, acted, snapshot)
    alive = {found.key for found in snapshot.jobs}
    asleep = {found.key for found in snapshot.jobs if found.state == "SUSPENDED"}
    did = {kind: {a.job for a in acted if isinstance(a, kind)} for kind in (Suspend, Place, Release, Yield)}
    assert after.suspended == (memory.suspended & asleep) | did[Suspend]
    assert after.placed == (memory.placed & alive) | did[Place] | did[Release]
    assert after.last_yield_s.keys() == (memory.last_yield_s.keys() | did[Yield]) & alive
    assert after.drained <= memory.drained | {a.node for a in acted if isinstance(a, DrainNode)}


@settings(max_examples=80, deadline=None)
@given(memories, worlds)
def test_memory_of_an_idle_round_is_stable(memory, snapshot):
    once = remember(memory, (), snapshot)
    assert remember(once, (), snapshot) == once
