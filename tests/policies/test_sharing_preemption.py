"""Preemption in Slurm's order: small cases worked out by hand, each rule of the site one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshots import NOW, cluster, job, key, lease, node

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import MakeWay, Migrate, SetFactor
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Options, Progress, SiteRules
from cadenza.policies.core.move import Move, Over
from cadenza.policies.ledger import remember
from cadenza.policies.sharing.preemption.make_way import GOES_TO_OTHERS
from cadenza.policies.sharing.state.settings import SharingSettings

HOUR = 3600.0
SITE = SiteRules(weights={"age": 5_000, "fairshare": 10_000, "jobsize": 1_000, "qos": 20_000})
PARTITIONS = frozenset({"gpu"})
RULES = PolicySettings(PARTITIONS, sharing=SharingSettings(enforce=True, floor=True, min_run_s=0.0))
KNOWN = Memory(keep_checkpoints={"ann/train": NOW, "bob/train": NOW})


def runs(number: int, gpus: int, host: str = "node1", *, had_h: float = 10.0, run_s: float = 2 * HOUR, **facts) -> Job:
    """A job of ann's that keeps checkpoints and has had its GPUs for so many hours in all."""
    found = {"ready": True, "checkpoints": True, **facts.pop("lease", {})}
    plain = {
        "gpus": gpus, "nodes": (host,), "run_s": run_s, "start_s": NOW - run_s, "submit_s": NOW - 20 * HOUR,
        "name": "train", "time_limit_s": 48 * HOUR, "slurm_priority": 9_000, "memory_mb": 1000, "cpus": gpus,
        "lease": lease("held", *range(gpus), hosts=(host,), **found),
        "progress": Progress(NOW, attained_s=had_h * HOUR, running=True),
    }  # fmt: skip
    return job(number, **{**plain, **facts})


def waits(number: int, gpus: int, **facts) -> Job:
    """A job of bob's that keeps checkpoints, has never run and waits for resources."""
    plain = {
        "gpus": gpus, "state": "PENDING", "state_reason": "Resources", "user": "bob", "name": "train", "submit_s": NOW,
        "time_limit_s": HOUR, "slurm_priority": 10_000, "memory_mb": 1000, "cpus": gpus,
    }  # fmt: skip
    return job(number, **{**plain, **facts})


def site_of(*jobs: Job, hosts: tuple[str, ...] = ("node1",), site: SiteRules = SITE, **facts) -> ClusterSnapshot:
    used = {name: [0, 0, 0] for name in hosts}
    for one in jobs:
        for name in one.nodes:
            for at, total in enumerate((one.gpus, one.cpus, one.memory_mb)):
                used[name][at] += total // len(one.nodes)
    nodes = tuple(
        node(name, gpus_used=used[name][0], cpus_used=used[name][1], memory_used_mb=used[name][2], **facts)
        for name in hosts
    )
    return replace(cluster(*jobs, nodes=nodes), site=site)


def decide(snapshot: ClusterSnapshot, memory: Memory = KNOWN, order: str = "levels") -> Decision:
    return build(order, "none", "preemption", RULES).decide(snapshot, memory)


def ways(snapshot: ClusterSnapshot, memory: Memory = KNOWN, order: str = "levels") -> list[tuple[int, set[int]]]:
    """The waiting jobs for which others make way, with these others."""
    found = decide(snapshot, memory, order).actions
    return [(one.for_job.id, {gone.id for gone in one.jobs}) for one in found if isinstance(one, MakeWay)]


# --- who makes way -----------------------------------------------------------------------------------------


def test_a_job_with_much_gpu_time_makes_way_for_a_newcomer():
    assert ways(site_of(runs(1, 4), waits(2, 4))) == [(2, {1})]


def test_nothing_is_held_placed_or_pinned():
    actions = decide(site_of(runs(1, 4), waits(2, 4))).actions
    assert {type(one) for one in actions} == {MakeWay}


@pytest.mark.parametrize(
    "reason",
    ["AssocGrpGRES", "QOSMaxGRESPerUser", "Licenses", "Dependency", "BeginTime", "JobHeldUser", "JobArrayTaskLimit",
     "ReqNodeNotAvail, UnavailableNodes:node1", "PartitionDown", "Reservation"],
)  # fmt: skip
def test_nobody_makes_way_for_a_job_that_waits_for_anything_but_resources(reason):
    assert ways(site_of(runs(1, 4), waits(2, 4, state_reason=reason))) == []


def test_a_job_behind_a_limit_of_its_account_gets_no_room_although_slurm_has_not_looked_at_it():
    capped = waits(2, 4, state_reason="AssocGrpGRES", account="poor")
    behind = waits(3, 4, state_reason="Priority", account="poor", slurm_priority=9_000)
    other = waits(4, 4, state_reason="Priority", account="rich", slurm_priority=8_000)
    assert ways(site_of(runs(1, 4), capped, behind)) == []
    assert ways(site_of(runs(1, 4), capped, behind, other)) == [(4, {1})]


NAS, NAS2 = {"file_system": "nas"}, {"file_system": "nas2"}


def stalls(number: int, **facts) -> Job:
    return runs(number, 4, lease={**NAS, "stalls": True}, **facts)


def test_nobody_is_asked_to_save_where_checkpoints_of_two_users_have_just_stalled():
    """The other one, although it has had less GPU time, saves on another file system."""
    here, there = runs(1, 4, had_h=100.0, lease=NAS), runs(2, 4, "node2", lease=NAS2)
    found = site_of(here, there, waits(9, 4), hosts=("node1", "node2"))
    memory = remember(remember(KNOWN, (), site_of(stalls(3))), (), site_of(stalls(4, user="bob")))
    assert ways(found, memory) == [(9, {2})]
    alone = decide(site_of(here, waits(9, 4)), memory)
    assert "saves on nas, where checkpoints of several users are or were overdue" in alone.reasons[key(9)]
    later = replace(found, time_s=NOW + 601)
    assert ways(later, remember(memory, (), later)) == [(9, {1})]


def test_a_job_that_stalls_on_purpose_keeps_no_other_from_being_asked():
    """For an hour, again and again; another job of the same user does it, too."""
    memory, hosts = KNOWN, ("node1", "node2")
    hostile = [stalls(number, had_h=900.0, user="mallory") for number in (3, 4)]
    for minutes in range(60):
        bad = hostile[minutes % 2]
        found = site_of(bad, runs(1, 4, "node2", lease=NAS), waits(9, 4), hosts=hosts)
        found = replace(found, time_s=NOW + 60 * minutes)
        memory = remember(memory, (), found)
        assert ways(found, memory) == [(9, {1})], "itself it is not asked while its save is overdue"
    assert memory.stalled == {"nas": {"mallory": NOW + 59 * 60}}


def test_a_job_that_went_on_without_its_checkpoint_does_not_make_way_and_counts_as_one_that_stays():
    found = site_of(runs(1, 4), waits(2, 4))
    memory = replace(KNOWN, unrestored={1: "rank 0: it trains without"})
    assert ways(found, memory) == []
    assert "went on without its checkpoint after its last move" in decide(found, memory).reasons[key(2)]
    # While it waits it asks for room as a job that never leaves.
    assert ways(site_of(runs(3, 4, had_h=4.1), waits(2, 4))) != []
    assert ways(site_of(runs(3, 4, had_h=4.1), waits(2, 4)), replace(KNOWN, unrestored={2: "x"})) == []


def test_the_fewest_gpus_leave_and_of_equals_the_job_with_the_most_gpu_time():
    jobs = (runs(1, 2, had_h=100.0), runs(2, 2, had_h=20.0), runs(3, 4, "node2", had_h=500.0))
    assert ways(site_of(*jobs, waits(9, 2), hosts=("node1", "node2"))) == [(9, {1})]


def test_a_job_of_no_worse_level_keeps_its_gpus():
    assert ways(site_of(runs(1, 4, had_h=0.01), waits(2, 4))) == []


def test_a_waiting_job_that_cannot_leave_counts_by_its_limit_and_one_level_more():
    """Four GPUs for one hour are 14,400 GPU seconds: level 3, and one more for a job that nothing stops."""
    unknown = Memory()
    assert ways(site_of(runs(1, 4, had_h=4.1), waits(2, 4)), unknown) == []  # level 4: 59,040 GPU seconds
    assert ways(site_of(runs(1, 4, had_h=17.0), waits(2, 4)), unknown) == [(2, {1})]  # level 5


def test_a_job_that_did_not_opt_in_gets_room_by_the_same_rule():
    stranger = waits(2, 4, options=None)
    assert ways(site_of(runs(1, 4, had_h=17.0), stranger)) == [(2, {1})]
    assert ways(site_of(runs(1, 4, had_h=4.1), stranger)) == []


@pytest.mark.parametrize(
    "facts",
    [{"options": None}, {"requeueable": False}, {"lease": {"checkpoints": False}}, {"lease": {"ready": False}},
     {"partition": "other"}],
)  # fmt: skip
def test_a_job_that_cannot_leave_keeps_its_gpus(facts):
    stays = runs(1, 4, **facts)
    assert ways(site_of(stays, waits(2, 4), partitions=("gpu", "other"))) == []


def test_a_users_word_against_checkpoints_does_not_keep_gpus():
    assert ways(site_of(runs(1, 4, options=Options(checkpoints=False)), waits(2, 4))) == [(2, {1})]


def test_a_node_that_a_user_asked_for_does_not_keep_gpus():
    assert ways(site_of(runs(1, 4, required_nodes=("node1",)), waits(2, 4))) == [(2, {1})]


def test_a_job_keeps_its_gpus_for_ten_times_what_its_last_move_cost():
    young = runs(1, 4, run_s=599.0)
    assert ways(site_of(young, waits(2, 4))) == []  # 60 s are assumed
    assert ways(site_of(replace(young, run_s=600.0), waits(2, 4))) == [(2, {1})]
    dear = Move(JobKey(1, 0), (), "", Over(NOW - HOUR, "was requeued"), cost_s=300.0)
    again = replace(runs(1, 4, run_s=2999.0), key=JobKey(1, 1))
    assert ways(site_of(again, waits(2, 4)), replace(KNOWN, moves=(dear,))) == []
    assert ways(site_of(replace(again, run_s=3000.0), waits(2, 4)), replace(KNOWN, moves=(dear,))) == [(2, {1})]


def test_what_it_repeated_counts_with_the_cost_of_its_last_move():
    """A move of 300 s that had it repeat 100 s of training keeps its GPUs for 4,000 s."""
    repeated = Move(JobKey(1, 0), (), "", Over(NOW - HOUR, "was requeued"), cost_s=300.0, lost_s=100.0)
    memory = replace(KNOWN, moves=(repeated,))
    again = replace(runs(1, 4, run_s=3999.0), key=JobKey(1, 1))
    assert ways(site_of(again, waits(2, 4)), memory) == []
    assert ways(site_of(replace(again, run_s=4000.0), waits(2, 4)), memory) == [(2, {1})]


def test_of_jobs_alike_the_one_that_repeats_less_training_makes_way():
    hosts = ("node1", "node2")
    old, new = ({"lease": {"lost_s": lost_s}} for lost_s in (15.0, 2.0))
    assert ways(site_of(runs(1, 4, **old), runs(2, 4, "node2", **new), waits(9, 4), hosts=hosts)) == [(9, {2})]
    assert ways(site_of(runs(1, 2, **new), runs(2, 2, **old, run_s=HOUR), waits(9, 2))) == [(9, {1})]
    worse = runs(1, 2, had_h=100.0, **old)
    assert ways(site_of(worse, runs(2, 2, **new), waits(9, 2))) == [(9, {1})], "the level goes first"
    claims = runs(1, 4, lease={"lost_s": 1e9})
    assert ways(site_of(claims, waits(9, 4))) == [(9, {1})], "no claim keeps GPUs"


# --- the site's classes and shares -----------------------------------------------------------------------------


def test_no_job_makes_way_for_one_of_a_lower_partition_or_qos():
    tiers = replace(SITE, tiers={"gpu": 10, "low": 1}, qos_priority={"high": 100, "normal": 0})
    both = ("gpu", "low")
    assert ways(site_of(runs(1, 4), waits(2, 4, partition="low"), site=tiers, partitions=both)) == []
    assert ways(site_of(runs(1, 4, qos="high"), waits(2, 4), site=tiers)) == []
    assert ways(site_of(runs(1, 4), waits(2, 4, qos="high"), site=tiers)) == [(2, {1})]


def test_a_job_that_waits_in_two_partitions_counts_by_the_higher_one():
    tiers = replace(SITE, tiers={"gpu": 10, "low": 1})
    both = ("gpu", "low")
    found = site_of(runs(1, 4, had_h=100.0), waits(2, 4, partition="low,gpu"), site=tiers, partitions=both)
    assert ways(found) == [(2, {1})]


def test_no_account_under_its_share_makes_way_for_one_above_it():
    shares = {"lab": 1.5, "big": 0.5, "lab/ann": 0.9, "lab/bob": 1.2}
    fair = replace(SITE, fair_share=shares)
    assert ways(site_of(runs(1, 4), waits(2, 4, account="big"), site=fair)) == []
    assert ways(site_of(runs(1, 4, account="big"), waits(2, 4), site=fair)) == [(2, {1})]
    within = replace(SITE, fair_share={"lab": 1.0, "lab/ann": 1.2, "lab/bob": 0.8})
    assert ways(site_of(runs(1, 4), waits(2, 4), site=within)) == []


def test_the_share_does_not_keep_out_a_job_that_made_way_a_day_ago_and_the_class_does():
    def back(hours: float) -> Job:
        attained = Progress(NOW, attained_s=100 * HOUR)
        return replace(waits(2, 4, account="big", submit_s=NOW - hours * HOUR, progress=attained), key=JobKey(2, 1))

    memory = replace(KNOWN, moves=(Move(JobKey(2, 0), (), "", Over(NOW - 24 * HOUR, "was requeued")),))
    fair = replace(SITE, fair_share={"lab": 1.5, "big": 0.5}, qos_priority={"high": 100, "normal": 0})
    stays = runs(1, 4, had_h=1000.0)
    assert ways(site_of(stays, back(23), site=fair), memory) == []
    assert ways(site_of(stays, back(24), site=fair), memory) == [(2, {1})]
    assert ways(site_of(replace(stays, qos="high"), back(24), site=fair), memory) == []


# --- room reaches the job that it is for ---------------------------------------------------------------------------


def test_no_room_is_made_for_a_job_that_slurm_would_start_by_itself():
    assert ways(site_of(runs(1, 2), waits(2, 2))) == []


def test_no_room_is_made_behind_a_job_that_would_take_it():
    """The first of the queue may not evict (level 8 by its limit); Slurm would give the room of the second to it."""
    first = waits(2, 2, options=None, time_limit_s=400 * HOUR, slurm_priority=20_000)
    second = waits(3, 4, state_reason="Priority")
    assert ways(site_of(runs(1, 4, had_h=100.0), first, second)) == []


def test_why_says_that_room_would_go_to_another_job():
    """With node1 free, backfill would keep it for the wide job from the end of node2's job on."""
    wide = waits(2, 8, options=None, time_limit_s=400 * HOUR, num_nodes=2, slurm_priority=20_000)
    stays = runs(9, 4, "node2", options=None, time_limit_s=2.5 * HOUR)
    small = waits(3, 4, state_reason="Priority", time_limit_s=HOUR)
    decision = decide(site_of(runs(1, 4, had_h=100.0), stays, wide, small, hosts=("node1", "node2")))
    assert [one for one in decision.actions if isinstance(one, MakeWay)] == []
    assert decision.reasons[key(3)] == GOES_TO_OTHERS


def test_room_is_made_behind_a_wider_job_that_does_not_fit_there():
    wide = waits(2, 8, options=None, time_limit_s=400 * HOUR, num_nodes=2, slurm_priority=20_000)
    small = waits(3, 1, state_reason="Priority")
    stays = runs(9, 4, "node2", options=None)
    jobs = (runs(1, 4, had_h=100.0), stays, wide, small)
    assert ways(site_of(*jobs, hosts=("node1", "node2"))) == [(3, {1})]


def test_no_room_is_made_where_slurm_has_reserved_the_node_before_the_job_would_end():
    """With node1 free, backfill keeps it for the wide job from the end of node2's job on, half an hour from now."""
    wide = waits(2, 8, options=None, time_limit_s=400 * HOUR, num_nodes=2, slurm_priority=20_000)
    stays = runs(9, 4, "node2", options=None, time_limit_s=2.5 * HOUR)
    for limit_h, expected in ((1.0, []), (0.4, [(3, {1})])):
        small = waits(3, 1, state_reason="Priority", time_limit_s=limit_h * HOUR)
        jobs = (runs(1, 4, had_h=100.0), stays, wide, small)
        assert ways(site_of(*jobs, hosts=("node1", "node2"))) == expected


def test_jobs_that_leave_already_are_not_asked_for_twice():
    leaves = replace(runs(1, 4), state="OTHER")
    assert ways(site_of(leaves, runs(3, 4, "node2"), waits(2, 4), hosts=("node1", "node2"))) == []


def test_the_same_job_gets_no_second_room_within_ten_minutes():
    tried = replace(KNOWN, made_way={2: NOW - 599.0})
    assert ways(site_of(runs(1, 4), waits(2, 4)), tried) == []
    assert ways(site_of(runs(1, 4), waits(2, 4)), replace(KNOWN, made_way={2: NOW - 600.0})) == [(2, {1})]


def test_a_job_of_two_nodes_gets_both():
    jobs = (runs(1, 4), runs(2, 2, "node2"), runs(3, 2, "node2", lease={"checkpoints": False}), runs(4, 4, "node3"))
    found = ways(site_of(*jobs, waits(9, 8, num_nodes=2), hosts=("node1", "node2", "node3")))
    assert found == [(9, {1, 4})]


def test_constraints_types_and_reservations_are_kept():
    jobs = (runs(1, 4), waits(2, 4, barred=frozenset({"node1"})))
    assert ways(site_of(*jobs)) == []
    assert ways(site_of(runs(1, 4), waits(2, 4, gpu_type="a100"), gpu_type="v100")) == []


# --- idle GPUs are joined --------------------------------------------------------------------------------------------


def test_jobs_leave_for_idle_gpus_so_that_a_wider_job_fits():
    jobs = (runs(1, 1, had_h=0.01, run_s=HOUR), runs(2, 3, "node2", had_h=0.01, run_s=HOUR))
    found = ways(site_of(*jobs, waits(9, 4, time_limit_s=99 * HOUR), hosts=("node1", "node2")))
    assert found == [(9, {1})]
    young = tuple(replace(one, run_s=HOUR - 1) for one in jobs)
    assert ways(site_of(*young, waits(9, 4), hosts=("node1", "node2"))) == []


# --- SiteFactor ----------------------------------------------------------------------------------------------------


def test_a_job_comes_back_behind_the_one_that_it_makes_way_for():
    snapshot = site_of(runs(1, 4, slurm_priority=30_000), waits(2, 4, slurm_priority=10_000))
    (action,) = decide(snapshot).actions
    assert isinstance(action, MakeWay)
    assert 30_000 + action.factors[0] < 10_000


def displaced(number: int, for_job: int, at_s: float = NOW - 30, *, gpus: int = 4, **facts) -> tuple[Job, Move]:
    """A job that has made way, back in the queue."""
    move = Move(JobKey(number, 0), (), "", Over(at_s, "was requeued", 5.0), for_job=key(for_job))
    back = waits(number, gpus, user="ann", submit_s=at_s, **facts)
    progress = Progress(NOW, attained_s=10 * HOUR, submitted_s=NOW - 84 * HOUR)
    return replace(back, key=JobKey(number, 1), progress=progress), move


def factors(snapshot: ClusterSnapshot, memory: Memory) -> dict[int, int]:
    return {one.job.id: one.factor for one in decide(snapshot, memory).actions if isinstance(one, SetFactor)}


def after(move: Move, movable: float) -> Memory:
    """The memory of a site where jobs that can leave have had such a part of all GPU time."""
    move = replace(move, factor=-8_000, base=9_000)
    return replace(KNOWN, moves=(move,), factors={1: -8_000}, usage={"lab": 100.0}, movable_usage=100.0 * movable)


def test_its_factor_is_that_of_its_level_once_the_other_has_started_and_its_age_is_made_up_for():
    back, move = displaced(1, 2, slurm_priority=500)
    memory = after(move, 1.0)
    still = waits(2, 4)
    assert factors(site_of(back, still), memory) == {}
    started = runs(2, 4, had_h=0.01)
    rest, age, levels = 8_500, 5_000 * 84 / (7 * 24), int(0.44 * SITE.points * 4 / 7)
    assert factors(site_of(back, started), memory) == {1: int(9_000 + age - levels - rest)}
    floor = replace(back, slurm_priority=1)
    assert factors(site_of(floor, started), memory) == {1: int(age - levels)}, "Slurm shows 1, however low the sum is"
    settled = replace(memory, factors={1: -700})
    assert factors(site_of(back, started), settled) == {}, "once is enough"


@pytest.mark.parametrize(("movable", "levels"), [(0.2, 0.0), (0.3, 0.0), (0.625, 0.5), (0.95, 1.0)])
def test_the_level_of_a_job_of_whole_hosts_counts_as_many_others_can_leave(movable: float, levels: float):
    back, move = displaced(1, 2, slurm_priority=500)
    factor = factors(site_of(back, runs(2, 4, had_h=0.01)), after(move, movable))[1]
    assert factor == pytest.approx(9_000 - 8_500 + 2_500 - levels * 0.44 * SITE.points * 4 / 7, abs=1)


@pytest.mark.parametrize(("movable", "gained"), [(0.0, 0.5), (0.3, 0.5), (0.4, 0.5 - 1.5 * 0.1 / 0.65)])
def test_a_narrower_job_gains_half_of_the_last_levels_points_where_few_can_leave(movable: float, gained: float):
    back, move = displaced(1, 2, gpus=2, slurm_priority=500)
    started = runs(2, 4, had_h=0.01)
    factor = factors(site_of(back, started), after(move, movable))[1]
    level = 4 / 7 * max(movable - 0.3, 0.0) / 0.65
    assert factor == pytest.approx(9_000 - 8_500 + 2_500 + 0.44 * (gained - level) * SITE.points, abs=1)
    first = site_of(runs(1, 2, slurm_priority=30_000), waits(2, 4, slurm_priority=10_000))
    few = replace(KNOWN, usage={"lab": 100.0}, movable_usage=100.0 * movable)
    (action,) = decide(first, few).actions
    assert isinstance(action, MakeWay)
    assert 30_000 + action.factors[0] < 10_000, "never ahead of the one that it makes way for"


def test_after_a_day_a_job_keeps_the_better_of_its_factor_and_its_age():
    back, move = displaced(1, 2, at_s=NOW - 90_000, gpus=2)
    had = replace(after(move, 0.1), factors={1: 9_000})
    assert factors(site_of(back, runs(2, 4)), had) == {}
    assert factors(site_of(back, runs(2, 4)), replace(had, factors={1: -9_000}))[1] > 0


def test_a_job_that_others_requeued_waits_as_it_was_submitted():
    back, move = displaced(1, 2)
    later = replace(back, key=JobKey(1, 2))
    assert factors(site_of(later), replace(KNOWN, moves=(move,), factors={1: -900})) == {1: 0}


UNKNOWN = replace(SITE, unread=("QOS",))


@pytest.mark.parametrize("site", [SiteRules(multifactor=False), SiteRules(weights={}), UNKNOWN])
def test_without_weights_nothing_is_done_and_the_reason_says_so(site):
    decision = decide(site_of(runs(1, 4), waits(2, 4), site=site))
    assert decision.actions == ()
    assert "nobody makes way" in decision.reasons[key(2)]


# --- relocation: they save first, and leave together -----------------------------------------------------------------


def test_jobs_that_make_way_save_first_and_are_requeued_by_one_action():
    policy = build("levels", "none", "preemption", replace(RULES, phased_moves=True))
    jobs = (runs(1, 2), runs(2, 2), waits(9, 4))
    first = policy.decide(site_of(*jobs), KNOWN)
    assert [one for one in first.actions if isinstance(one, Migrate)] == list(first.actions)
    assert {one.job for one in first.actions} == {key(1), key(2)}
    moves = first.memory.moves
    assert {move.for_job for move in moves} == {key(9)}
