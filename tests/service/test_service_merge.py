"""One lease out of many hosts' reports, the stop of a multi-node job, and what agents are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from service_rig import books, job, lease, node, report, write_config

from cadenza.policies.core.actions import Outcome, Resume, Suspend, Unsuspend, Yield
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Gpu, Host, JobKey, JobUsage, Options
from cadenza.policies.guard import GuardOptions
from cadenza.policies.round import RoundReport
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import (
    VERSION,
    AbsentJob,
    CancelOrder,
    CommitOrder,
    JobTelemetry,
    LeaseLog,
    LeaseReport,
    Report,
    Steps,
    StopAt,
    Switched,
    YieldOrder,
)
from cadenza.slurm_plugin.service.agent_facts import facts_of, suspended_after
from cadenza.slurm_plugin.service.agents.agent_registry import CLOCK_WINDOW_S, Agent, AgentRegistry
from cadenza.slurm_plugin.service.agents.hub import by_our_clock
from cadenza.slurm_plugin.service.agents.stop_barrier import StopBarrier
from cadenza.slurm_plugin.service.loop import pause_s
from cadenza.slurm_plugin.service.observe.cluster_gateway import ARRIVES_S, ClusterGateway
from cadenza.slurm_plugin.service.observe.lease_merge import half_given, merge, parts_by_job, with_leases
from cadenza.slurm_plugin.service.settings import PolicyTable, ServiceTable, Settings, load_settings, policy

A = JobKey(1, 0)
ORDER = YieldOrder(VERSION, 1, 0, 10.0)
APPLY = Settings(
    service=ServiceTable(mode="apply"),
    guard=GuardOptions(partitions=frozenset({"gpu"})),
    policy=PolicyTable(order="fifo", share="timeslice"),
)


def agents(*silent: str, **leases: LeaseReport) -> dict[str, Agent]:
    return {host: Agent(report(host, one), alive=host not in silent, silent_s=0.0) for host, one in leases.items()}


def gang(state: str, **changes: object) -> LeaseReport:
    return lease(1, state, hosts=2, world_size=2, **changes)


def merged(*silent: str, **leases: LeaseReport):
    found = agents(*silent, **leases)
    slurm = books(
        job(1, nodes=("n1", "n2") if leases["n1"].hosts > 1 else ("n1",), gpus=4), nodes=(node("n1"), node("n2"))
    )
    return merge(parts_by_job(slurm, found)[A], found)


def test_all_hosts_hold() -> None:
    one = merged(
        n1=gang("held", gpus=(0, 1), vtime_s=3.0, held_s=9.0, iteration_s=0.5, step=7),
        n2=gang("held", gpus=(2,), vtime_s=5.0, held_s=8.0, iteration_s=0.7, step=8),
    )
    assert (one.state, one.vtime_s, one.held_s, one.iteration_s, one.step) == ("held", 5.0, 8.0, 0.7, 7)
    assert one.gpus == (Gpu("n1", 0), Gpu("n1", 1), Gpu("n2", 2))
    assert one.ready


def test_what_the_hosts_measured_is_put_together() -> None:
    one = merged(
        n1=gang("held", telemetry=JobTelemetry(window_s=5.0, samples_s=10.0, data_wait=0.1, gpu_percent=50.0,
                                               rss_mb=100.0, memory_kind="gpu", memory_low_mb=7.0)),
        n2=gang("held", telemetry=JobTelemetry(window_s=5.0, samples_s=20.0, data_wait=0.3, gpu_percent=70.0,
                                               memory_kind="gpu"), requeue_owner="lightning"),
    )  # fmt: skip
    assert one.use == JobUsage(samples_s=30.0, data_wait=0.3, gpu_percent=60.0, rss_mb=100.0, memory_low_mb=7.0)
    assert one.requeue_owner == "lightning"
    assert merged(n1=gang("held"), n2=gang("held")).use is None


def test_half_given_occupies_and_cannot_stop() -> None:
    parts = {"n1": gang("held"), "n2": gang("waiting")}
    one = merged(**parts)
    assert (one.state, one.ready) == ("held", False)
    assert "n2" in one.why_not_ready
    assert one.waiting_on == ("n2",)
    assert merged(n1=gang("waiting"), n2=gang("waiting")).waiting_on == ()
    assert half_given(parts) == ("n2",)
    assert half_given({"n1": gang("held"), "n2": gang("held")}) == ()
    assert half_given({"n1": gang("yielded"), "n2": gang("stopping")}) == ()


def test_stopping_wins_and_yielded_needs_all() -> None:
    assert merged(n1=gang("stopping"), n2=gang("yielded")).state == "stopping"
    both = merged(n1=gang("yielded", since_s=90.0), n2=gang("yielded", since_s=93.0))
    assert (both.state, both.waited_s) == ("yielded", 7.0)


def test_a_yielded_job_saves_where_all_its_hosts_can_and_is_saved_once_all_have() -> None:
    able, saved = {"checkpoints": True, "saves_away": True}, {"saving": True, "saved": True}
    both = merged(n1=gang("yielded", **able, **saved), n2=gang("yielded", **able, saving=True))
    assert (both.saves_away, both.saving, both.saved) == (True, True, False)
    assert merged(n1=gang("yielded", **able, **saved), n2=gang("yielded", **able, **saved)).saved
    assert not merged(n1=gang("yielded", **able), n2=gang("yielded", checkpoints=True)).saves_away


def test_a_job_that_is_half_suspended_is_shown_as_the_host_that_contradicts_slurm() -> None:
    amiss = "Slurm calls it suspended, and its processes run"
    found = merged(n1=gang("yielded", shown="running", amiss=amiss), n2=gang("yielded", shown="frozen"))
    assert (found.shown, found.amiss) == ("running", f"n1: {amiss}")


def test_not_ready_says_why() -> None:
    assert "1 of its 2 hosts" in merged(n1=gang("held")).why_not_ready
    assert "n2 is silent" in merged("n2", n1=gang("held"), n2=gang("held")).why_not_ready
    assert "1 of its 4 ranks" in merged(n1=lease(1, world_size=4)).why_not_ready
    assert merged(n1=lease(1, ready=False, why_not_ready="no client")).why_not_ready == "no client"


def test_a_job_whose_stops_have_failed_can_still_stop_for_a_checkpoint_if_all_its_hosts_can() -> None:
    failed = {"ready": False, "why_not_ready": "3 stops failed", "unyielding": "3 stops failed", "refusals": 3}
    found = merged(n1=gang("held", **failed), n2=gang("held"))
    assert (found.ready, found.unyielding, found.stoppable, found.stuck) == (False, "3 stops failed", True, True)
    missing = merged(n1=gang("held", **failed), n2=gang("held", ready=False))
    assert (missing.unyielding, missing.stoppable) == ("", False)


def test_unmanaged_is_exclusive() -> None:
    assert merged(n1=lease(1, managed=False)).exclusive


def test_a_job_that_has_not_asked_is_late_until_it_has_its_gpus() -> None:
    late = merged(n1=lease(1, "waiting", late=True))
    assert (late.state, late.late, late.early) == ("waiting", True, "")
    seen = merged(n1=lease(1, "held", late=True, early="pid 7 used GPU 0"))
    assert (seen.late, seen.early) == (False, "n1: pid 7 used GPU 0")


def test_a_job_without_room_on_one_of_its_hosts_has_no_room() -> None:
    assert merged(n1=gang("yielded"), n2=gang("yielded", no_room="GPU 0 is full")).no_room == "n2: GPU 0 is full"


def test_compose_names_hosts_without_agents() -> None:
    snapshot = books(job(1), job(2, "n2"), nodes=(node("n1"), node("n2")))
    found = agents(n1=lease(1))
    whole = with_leases(snapshot, found, parts_by_job(snapshot, found))
    assert [(host.name, host.agent_alive) for host in whole.hosts] == [("n1", True), ("n2", False)]
    assert [one.lease is not None for one in whole.jobs] == [True, False]


# --- Whose word counts ---

FOREIGN_LEASES = st.builds(
    lambda number, state, gpus, **changes: lease(number, state, tuple(gpus), **changes),
    st.sampled_from((1, 2, 3)),
    st.sampled_from(("waiting", "held", "stopping", "yielded")),
    st.lists(st.integers(-1, 9), max_size=4, unique=True),
    managed=st.booleans(),
    vtime_s=st.floats(0, 1e9),
    ready=st.booleans(),
    lost=st.sampled_from(("", "restore: out of memory")),
    saved=st.booleans(),
    hosts=st.integers(0, 9),
    world_size=st.integers(0, 9),
    requeue_owner=st.sampled_from(("", "lightning")),
)


@examples(max_examples=100)
@given(st.lists(FOREIGN_LEASES, max_size=4), st.booleans())
def test_a_host_changes_nothing_for_jobs_that_slurm_has_elsewhere(foreign: list[LeaseReport], over: bool) -> None:
    """Jobs 1 and 2 take turns on n1; n2, where Slurm has job 3 only, reports them too."""
    slurm = books(
        job(1, gpus=4, requeueable=True), job(2, "n1-l1", gpus=4), job(3, "n2", options=None),
        nodes=(node("n1"), node("n1-l1", 1), node("n2"), node("n2-l1", 1)),
    )  # fmt: skip
    slurm = replace(slurm, time_s=1000.0)
    held_s = 900.0 if over else 1.0
    own = (
        lease(1, "held", (0, 1, 2, 3), vtime_s=held_s, held_s=held_s),
        lease(2, "yielded", (0, 1, 2, 3), since_s=1000.0 - held_s),
    )
    decide = policy(APPLY)

    def decided(*told: LeaseReport) -> tuple[object, ...]:
        found = {"n1": Agent(report("n1", *own), True, 0.0), "n2": Agent(report("n2", *told), True, 0.0)}
        whole = with_leases(slurm, found, parts_by_job(slurm, found))
        return decide(whole, Memory()).actions, [one.lease for one in whole.jobs if one.key.id != 3]

    assert decided(*foreign) == decided(*(one for one in foreign if one.job == 3))
    assert any(isinstance(one, Yield) for one in decided()[0]) == over


def test_a_job_is_absent_where_the_agents_of_all_its_hosts_say_so() -> None:
    slurm = books(replace(job(1), nodes=("n1", "n2")), job(2), nodes=(node("n1"), node("n2")))
    gone = msgspec.structs.replace(report("n1"), absent=(AbsentJob(1, 0), AbsentJob(2, 1)))
    also = msgspec.structs.replace(report("n2"), absent=(AbsentJob(1, 0), AbsentJob(2, 0)))

    def absent(first: Report, second: Report, *, alive: bool = True) -> list[bool]:
        found = {"n1": Agent(first, True, 0.0), "n2": Agent(second, alive, 0.0)}
        return [one.absent for one in with_leases(slurm, found, parts_by_job(slurm, found)).jobs]

    assert absent(gone, also) == [True, False], "job 2 is on n1, whose agent speaks of another incarnation"
    assert absent(gone, report("n2")) == [False, False]
    assert absent(gone, also, alive=False) == [False, False]
    jobs = slurm.jobs
    slurm = replace(slurm, jobs=tuple(replace(one, starting=True) for one in jobs))
    assert absent(gone, also) == [False, False], "a host that Slurm wakes for a job knows nothing of it yet"
    slurm = replace(slurm, jobs=tuple(replace(one, start_s=slurm.time_s - 9.0) for one in jobs))
    assert absent(gone, also) == [False, False], "nor just after it woke up, when Slurm sets the start anew"


def test_a_job_that_opts_out_on_a_further_lane_shares_until_it_ends() -> None:
    for changes in ({"options": None}, {"options": Options(share=False)}, {"options": None, "unmanageable": "bad"}):
        slurm = books(job(1, "n1-l1", **changes), job(2, **changes))
        found = {"n1": Agent(report("n1", lease(1, gpus=(0,)), lease(2, gpus=(1,))), True, 0.0)}
        further, first = with_leases(slurm, found, parts_by_job(slurm, found)).jobs
        assert further.opted_in, "root registered it as one that shares"
        assert not first.opted_in
        found = {"n1": Agent(report("n1", lease(1, gpus=(0,), managed=False)), True, 0.0)}
        assert not with_leases(slurm, found, parts_by_job(slurm, found)).jobs[0].opted_in


def test_gpus_beyond_the_grant_are_not_believed() -> None:
    slurm = books(job(1, gpus=2))
    for gpus, known in (((0, 1), True), ((2, 3), True), ((0, 1, 2), False), ((4,), False), ((-1,), False)):
        found = agents(n1=lease(1, gpus=gpus))
        assert (A in parts_by_job(slurm, found)) is known, gpus
    assert parts_by_job(slurm, agents(n1=lease(1, hosts=7)))[A]["n1"].hosts == 1, "the number of hosts is Slurm's"


def test_facts_per_host() -> None:
    snapshot = replace(
        books(
            job(1, nodes=("n1-l1", "n2-l1")),
            job(2, options=None, state="SUSPENDED"),
            job(3, partition="other"),
            nodes=(node("n1"), node("n1-l1", 1), node("n2"), node("n2-l1", 1)),
        ),
        hosts=(Host("n1", agent_alive=True), Host("n2", agent_alive=True), Host("n3", agent_alive=True)),
    )
    settings = msgspec.structs.replace(APPLY, sharing=replace(APPLY.sharing, yield_timeout_s=7.0))
    facts = facts_of(snapshot, settings, frozenset({JobKey(2, 0)}))
    assert facts["n1"].yield_timeout_s == 7.0
    assert [(f.job, f.managed, f.hosts, f.suspended) for f in facts["n1"].jobs] == [
        (1, True, 2, False),
        (2, False, 1, True),
        (3, False, 1, False),
    ]
    assert [(f.job, f.gang) for f in facts["n2"].jobs] == [(1, True)]
    assert facts["n3"].jobs == ()
    assert facts["n1"].enforce
    assert facts["n1"].suspends
    assert [f.job for f in facts["n1"].jobs if f.gang] == [1]
    observing = facts_of(snapshot, Settings(), frozenset())["n1"]
    assert not observing.enforce
    assert not observing.suspends
    assert not any(f.gang for f in observing.jobs)


def test_with_full_memory_the_agent_guards_that_of_lane_0_while_the_service_acts() -> None:
    lanes = (node("n1", memory_mb=64000), node("n1-l1", 1, memory_mb=64000))
    snapshot = replace(books(nodes=lanes), hosts=(Host("n1", agent_alive=True),))
    full, observes = (ServiceTable(mode=mode, lanes_memory="full") for mode in ("apply", "observe"))
    settings = (*(msgspec.structs.replace(APPLY, service=service) for service in (full, observes)), APPLY)
    assert [facts_of(snapshot, one, frozenset())["n1"].memory_mb for one in settings] == [64000, 0, 0]


def test_on_a_host_that_is_to_be_left_no_suspend_is_announced() -> None:
    """The agents there go by the ranks' word, because no suspend follows."""
    snapshot = replace(
        books(job(1), nodes=(node("n1", drained=True), node("n1-l1", 1), node("n2"))),
        hosts=(Host("n1", agent_alive=True), Host("n2", agent_alive=True)),
    )
    facts = facts_of(snapshot, APPLY, frozenset())
    assert (facts["n1"].suspends, facts["n2"].suspends) == (False, True)


def test_agents_only_observe_while_the_kill_switch_is_set(tmp_path: Path) -> None:
    settings = load_settings(write_config(tmp_path, mode="apply"))
    snapshot = replace(books(job(1)), hosts=(Host("n1", agent_alive=True),))
    assert facts_of(snapshot, settings, frozenset())["n1"].enforce
    (tmp_path / "STOP").touch()
    assert not facts_of(snapshot, settings, frozenset())["n1"].enforce


def test_a_job_that_one_agent_lost_is_lost() -> None:
    one = merged(n1=gang("held"), n2=gang("held", lost="restore of pid 7: out of memory"))
    assert one.lost == "n2: restore of pid 7: out of memory"


def test_suspended_after_counts_what_worked() -> None:
    a, b, c = (JobKey(n, 0) for n in (1, 2, 3))
    snapshot = books(job(1), job(2, state="SUSPENDED"), job(3))
    outcomes = (
        (Suspend(a, ""), Outcome(ok=True)),
        (Unsuspend(b, ""), Outcome(ok=True)),
        (Suspend(c, ""), Outcome(ok=False)),
    )
    assert suspended_after(RoundReport(1, snapshot, None, (), outcomes)) == {a}  # type: ignore[arg-type]


# --- The gateway's two sides ---


class Link:
    """The agents' side in memory."""

    def __init__(self, found: dict[str, Agent]) -> None:
        self.found = found
        self.calls: list[tuple[object, ...]] = []

    def agents(self, _hosts: object = None) -> dict[str, Agent]:
        return self.found

    def yield_job(self, key: JobKey, hosts: tuple[str, ...]) -> Outcome:
        self.calls.append(("yield", key, hosts))
        return Outcome(ok=True)

    def checkpoint_job(self, key: JobKey, hosts: tuple[str, ...]) -> Outcome:
        self.calls.append(("checkpoint", key, hosts))
        return Outcome(ok=True)

    def resume_job(self, key: JobKey, hosts: tuple[str, ...]) -> Outcome:
        self.calls.append(("resume", key, hosts))
        return Outcome(ok=False, error="n2: its agent is not connected")

    def mark_suspended(self, key: JobKey, *, suspended: bool) -> None:
        self.calls.append(("mark", key, suspended))


class Books:
    """Slurm's side in memory."""

    def __init__(self) -> None:
        self.applied: list[object] = []

    def read(self):
        return books(job(1, nodes=("n1", "n2")), nodes=(node("n1"), node("n2")))

    def apply(self, action: object) -> Outcome:
        self.applied.append(action)
        return Outcome(ok=True)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("answers_s", "expected"),
    [
        ((0.1, 9.5, 9.5, 9.5, 0.1), [0.0, 0.0, 0.1, 9.5, 0.1]),
        ((9.5, 9.5, 0.1), [0.0, 0.0, 0.1]),  # a service and a slurmctld that start together
    ],
)
def test_an_answer_that_slurm_stalls_on_is_no_load(answers_s: tuple[float, ...], expected: list[float]) -> None:
    seconds = iter(answers_s)

    class Slow(Books):
        def read(self):
            clock.seconds += next(seconds)
            return super().read()

    clock = SimpleNamespace(seconds=0.0)
    clock.monotonic = lambda: clock.seconds
    cluster = ClusterGateway(Slow(), Link({}), clock, None)  # type: ignore[arg-type]
    loads = []
    for _ in answers_s:
        cluster.read()
        loads.append(round(cluster.load_s, 6))
    assert loads == expected
    assert max(pause_s(0.2, load_s, 0, Random(1)) for load_s in loads[:3]) < 3.0, "the next round is minutes away"  # noqa: S311


def test_actions_go_to_the_side_they_concern() -> None:
    link, slurm = Link(agents(n1=gang("held"), n2=gang("held"))), Books()
    cluster = ClusterGateway(slurm, link, SystemClock(), None)
    cluster.read()
    assert cluster.apply(Yield(A, "")).ok
    assert cluster.apply(Resume(A, "")).error == "job 1: n2: its agent is not connected"
    assert not cluster.apply(Yield(JobKey(9, 0), "")).ok
    assert link.calls == [("yield", A, ("n1", "n2")), ("resume", A, ("n1", "n2"))]
    assert slurm.applied == []
    assert cluster.apply(Unsuspend(A, "")).ok
    assert slurm.applied == [Unsuspend(A, "")]


def test_a_resume_leaves_once_the_suspend_before_it_has_arrived() -> None:
    """At the end of the service they were 31 ms apart, and slurmd stopped a job for good that Slurm called running."""
    link, slurm, clock = Link(agents(n1=gang("yielded"), n2=gang("yielded"))), Books(), SystemClock()
    cluster = ClusterGateway(slurm, link, clock, None)
    cluster.read()
    began_s = clock.monotonic()
    assert cluster.apply(Suspend(A, "")).ok
    assert cluster.apply(Unsuspend(JobKey(2, 0), "")).ok
    assert clock.monotonic() - began_s < ARRIVES_S, "another job's need not wait"
    assert cluster.apply(Unsuspend(A, "")).ok
    assert clock.monotonic() - began_s >= ARRIVES_S
    assert slurm.applied == [Suspend(A, ""), Unsuspend(JobKey(2, 0), ""), Unsuspend(A, "")]


def test_a_job_that_got_its_gpus_since_is_not_suspended() -> None:
    link, slurm = Link(agents(n1=gang("yielded"), n2=gang("yielded"))), Books()
    cluster = ClusterGateway(slurm, link, SystemClock(), None)
    cluster.read()
    assert cluster.apply(Suspend(A, "")).ok
    link.found = agents(n1=gang("held"), n2=gang("held"))
    outcome = cluster.apply(Suspend(A, ""))
    assert not outcome.ok
    assert "got its GPUs" in outcome.error
    assert link.calls == [("mark", A, True), ("mark", A, True), ("mark", A, False)]
    assert slurm.applied == [Suspend(A, "")]


def test_half_given_gangs_are_completed() -> None:
    link = Link(agents(n1=gang("held"), n2=gang("yielded")))
    cluster = ClusterGateway(Books(), link, SystemClock(), None)
    cluster.read()
    cluster.complete_gangs()
    assert link.calls == [("resume", A, ("n2",))]


# --- StopBarrier of several hosts ---


def steps(host: str, highest: int, *, arrived: bool = False, refused: str = "") -> Steps:
    return Steps(VERSION, host, 1, 0, highest, arrived, refused)


def test_one_stop_step_for_all_hosts() -> None:
    stops = StopBarrier()
    assert stops.begin(A, ("n2", "n1"), 0.0, ORDER) == [
        ("n1", YieldOrder(VERSION, 1, 0, 10.0)),
        ("n2", YieldOrder(VERSION, 1, 0, 10.0)),
    ]
    assert stops.begin(A, ("n1", "n2"), 0.0, ORDER) == []
    assert stops.on_steps(steps("n1", 5), 0.1) == []
    assert stops.on_steps(steps("n2", 6), 0.1) == [(host, StopAt(VERSION, 1, 0, 7)) for host in ("n1", "n2")]
    assert stops.on_steps(steps("n1", 7, arrived=True), 0.2) == []
    commit = stops.on_steps(steps("n2", 7, arrived=True), 0.3)
    assert commit == [(host, CommitOrder(VERSION, 1, 0)) for host in ("n1", "n2")]
    assert not stops.active


def test_a_refusal_cancels_everywhere() -> None:
    stops = StopBarrier()
    stops.begin(A, ("n1", "n2"), 0.0, ORDER)
    orders = stops.on_steps(steps("n1", 5, refused="a shared storage"), 0.1)
    assert orders == [(host, CancelOrder(VERSION, 1, 0, "refused: a shared storage")) for host in ("n1", "n2")]


def test_a_silent_host_cancels_in_time() -> None:
    stops = StopBarrier()
    stops.begin(A, ("n1", "n2"), 0.0, ORDER)
    stops.on_steps(steps("n1", 5), 0.1)
    assert stops.tick(9.0) == []
    cancel = stops.tick(10.0)[0][1]
    assert isinstance(cancel, CancelOrder)
    assert "n2" in cancel.reason


def switched(host: str, kind: str, note: str = "") -> Switched:
    return Switched(VERSION, host, 1, 0, kind, 0.0, 0.0, 0.0, 0.0, 0, note=note)


def test_a_stop_begun_for_a_job_that_has_yielded_is_over() -> None:
    stops = StopBarrier()
    stops.begin(A, ("n1", "n2"), 0.0, ORDER)
    assert stops.on_switched(switched("n1", "resume")) == []
    assert stops.active
    assert stops.on_switched(switched("n1", "yield")) == []
    assert not stops.active
    assert stops.begin(A, ("n1", "n2"), 0.1, ORDER) != []


def test_a_stop_that_fails_on_one_host_is_given_up_on_all() -> None:
    stops = StopBarrier()
    stops.begin(A, ("n1", "n2"), 0.0, ORDER)
    orders = stops.on_switched(switched("n2", "timeout", "rank 1 is late"))
    assert orders == [(host, CancelOrder(VERSION, 1, 0, "timeout on n2: rank 1 is late")) for host in ("n1", "n2")]
    assert not stops.active


# --- Reports ---


def test_only_changes_are_events() -> None:
    registry = AgentRegistry(alive_s=6.0)
    first = registry.update(report("n1", lease(1)), 100.0, 0.0)
    assert [event.kind for event in first] == ["agent-up", "registered"]
    counted = msgspec.structs.replace(lease(1), vtime_s=5.0, step=9)
    assert registry.update(report("n1", counted), 102.0, 2.0) == ()
    changed = registry.update(report("n1", lease(1, "yielded"), lease(2)), 104.0, 4.0)
    assert [event.kind for event in changed] == ["state", "registered"]
    assert [event.kind for event in registry.update(report("n1", lease(2)), 105.0, 5.0)] == ["finished"]
    assert registry.newly_silent(110.0, 10.0) == ()
    assert [event.kind for event in registry.newly_silent(120.0, 12.0)] == ["agent-down"]
    assert registry.newly_silent(121.0, 13.0) == ()
    assert not registry.agents(13.0)["n1"].alive
    assert [event.kind for event in registry.update(report("n1", lease(2)), 122.0, 14.0)] == ["agent-up"]


def test_reports_that_waited_for_the_service_tell_nothing_of_the_clock() -> None:
    registry = AgentRegistry(alive_s=6.0)
    for at_s in (90.0, 92.0, 94.0, 95.0, 96.0):  # all of them come when the service is back
        registry.update(report("n1", at_s=at_s), 100.0, 50.0)
        assert registry.ahead_s("n1") == 0.0
    registry.update(report("n1", at_s=102.0), 102.0, 52.0)
    assert registry.ahead_s("n1") == 0.0


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_clock_that_is_an_hour_off_is_named_and_changes_no_time(ahead_s: float) -> None:
    registry, reported = AgentRegistry(alive_s=6.0), lease(1, "yielded", since_s=90.0 + ahead_s)
    registry.update(report("n1", reported, at_s=100.0 + ahead_s), 100.0, 0.0)
    registry.update(report("n1", reported, at_s=100.0 + ahead_s), 104.0, 4.0)  # under way for four seconds
    found = registry.agents(7.0)
    snapshot = books(job(1, nodes=("n1",), gpus=1), nodes=(node("n1"),))
    seen = with_leases(snapshot, found, parts_by_job(snapshot, found))
    assert seen.jobs[0].lease is not None
    assert seen.jobs[0].lease.waited_s == 13.0, "10 s by its own clock, and 3 s of silence"
    assert seen.hosts[0].faults == (f"its clock is 3600 s {'ahead of' if ahead_s > 0 else 'behind'} the service's",)
    log = by_our_clock(LeaseLog(VERSION, "n1", 1, 0, (0,), 50.0 + ahead_s, 60.0 + ahead_s), registry.ahead_s("n1"))
    assert (log.from_s, log.to_s) == (50.0, 60.0)
    for number in range(3):
        later_s = 6.0 + number * CLOCK_WINDOW_S / 2
        registry.update(report("n1", reported, at_s=100.0 + later_s), 100.0 + later_s, later_s)
    assert registry.ahead_s("n1") == 0.0


def test_a_report_that_came_late_is_no_wrong_clock() -> None:
    registry = AgentRegistry(alive_s=6.0)
    registry.update(report("n1", at_s=100.0), 100.0, 0.0)
    registry.update(report("n1", at_s=101.0), 119.0, 19.0)
    assert registry.ahead_s("n1") == 0.0


def test_new_jobs_are_added_to_older_facts() -> None:
    registry = AgentRegistry(alive_s=6.0)
    registry.update(report("n1", lease(1)), 100.0, 0.0)
    registry.update(report("n1", lease(1), lease(2)), 200.0, 100.0)
    assert [fact.job for fact in registry.new_jobs("n1", frozenset(), 202.0)] == [2]
    assert registry.new_jobs("n1", frozenset({(2, 0)}), 202.0) == ()
    assert registry.new_jobs("n9", frozenset(), 202.0) == ()
