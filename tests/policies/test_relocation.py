"""Moves round by round: what a placement carries, who can be moved at all, and checkpoints before preemption."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, key, lease, moving, node

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import (
    MakeWay,
    Migrate,
    Place,
    Release,
    Requeue,
    Resize,
    Resume,
    Save,
    SetFactor,
    Suspend,
    Unsuspend,
)  # fmt: skip
from cadenza.policies.core.decision import Decision, Memory, SharingMemory
from cadenza.policies.core.model import Host, JobKey, Options, Receipt, Share
from cadenza.policies.core.move import Leaving, Move, Ordered, Over, Placed, Prefetching, Requeued, Wanted
from cadenza.policies.ledger import remember
from cadenza.policies.relocation.executor import Relocation
from cadenza.policies.relocation.phases import MAX_PREFETCH_S, Step, acted, advance, goal
from cadenza.policies.sharing.state.settings import SharingSettings

KEEPS = lease("held", 0, checkpoints=True)
THERE = (Share("node2", 1, 6, 9000),)
NEXT = JobKey(1, 1)


def deciding(*actions):
    """A policy that always wants these actions."""
    return moving(lambda _, memory: Decision(actions, memory))


def round_of(decide, found, memory):
    """One round: its decision, and the memory once its actions have left."""
    decision = decide(found, memory)
    moves = acted(decision.memory.moves, decision.actions, found.time_s)
    return decision, replace(decision.memory, moves=moves)


def held(**facts):
    return replace(job(1, state="PENDING", slurm_priority=0, **facts), key=NEXT)


def test_a_job_that_can_save_does_so_before_it_is_requeued():
    preempts = deciding(MakeWay((key(1),), (-5,), key(1), "makes room"))
    first, memory = round_of(preempts, cluster(job(1, lease=KEEPS)), Memory())
    assert first.actions == (Migrate(key(1), (), "makes room"),)
    waits, memory = round_of(preempts, cluster(job(1, lease=replace(KEEPS, state="stopping"))), memory)
    assert waits.actions == ()
    assert waits.reasons[key(1)] == "makes way: its checkpoint is being saved"
    saved = replace(KEEPS, state="stopping", saved=True)
    then, memory = round_of(preempts, cluster(job(1, lease=saved)), memory)
    assert then.actions == (MakeWay((key(1),), (-5,), key(1), "makes room"),)
    lifts = SetFactor(NEXT, 0, "its turn again")
    last, memory = round_of(deciding(lifts), cluster(replace(held(), slurm_priority=1)), memory)
    assert last.actions == (lifts,), "once it is back in the queue it is the policy's again"
    assert memory.moves[0].outcome == "was requeued with a checkpoint: makes room"
    quiet, _ = round_of(deciding(), cluster(replace(held(), slurm_priority=1)), memory)
    assert quiet.actions == ()


@pytest.mark.parametrize(
    "found",
    [lease("held", 0), replace(KEEPS, ready=False), replace(KEEPS, state="waiting"), None],
    ids=["keeps none", "cannot be stopped", "does not run", "no agent"],
)
def test_any_other_is_requeued_at_once(found):
    requeue = Requeue(key(1), hold=False, reason="makes room")
    assert deciding(requeue)(cluster(job(1, lease=found)), Memory()).actions == (requeue,)


def test_a_job_whose_stops_have_failed_saves_before_it_is_requeued():
    """It does not yield, and stands at boundaries all the same: its owner's work is not lost for our fault."""
    stuck = replace(KEEPS, ready=False, why_not_ready="3 stops failed", unyielding="3 stops failed", refusals=3)
    requeue = Requeue(key(1), hold=False, reason="gives its place back")
    first, memory = round_of(deciding(requeue), cluster(job(1, lease=stuck)), Memory())
    assert first.actions == (Migrate(key(1), (), "gives its place back"),)
    saved = replace(stuck, state="stopping", saved=True)
    then, _ = round_of(deciding(requeue), cluster(job(1, lease=saved)), memory)
    assert [type(one) for one in then.actions] == [MakeWay]


def test_a_checkpoint_that_fails_does_not_keep_a_job_from_being_preempted():
    requeue = Requeue(key(1), hold=True, reason="makes room")
    _, memory = round_of(deciding(requeue), cluster(job(1, lease=KEEPS)), Memory())
    later = replace(cluster(job(1, lease=KEEPS)), time_s=NOW + 30)
    failed, memory = round_of(deciding(requeue), later, memory)
    assert isinstance(memory.moves[0].phase, Over)
    assert requeue in (*failed.actions, *deciding(requeue)(later, memory).actions)


@pytest.mark.parametrize(
    ("facts", "shares"),
    [
        ({}, THERE),
        ({"by_hand": True}, ()),
        ({"by_hand": True, "resize": True}, THERE),
        ({"shares": (Share("node2", 1, 0, 0),)}, ()),
    ],
    ids=["policy", "by hand", "by hand with a size", "as asked"],
)
def test_a_migrated_job_gets_the_cpus_and_memory_of_its_new_place(facts, shares):
    move = Move(key(1), **{"shares": THERE, "reason": "r", "phase": Requeued(NOW, NOW), **facts})
    place = advance(move, cluster(held()), Memory()).action
    assert isinstance(place, Place)
    assert (place.nodes, place.shares, place.resize) == (("node2",), shares, move.resize)


def test_a_job_goes_to_another_number_of_nodes_only_if_it_said_that_its_size_may_change():
    """Slurm has to be asked for that, and the script has to follow."""
    joins = deciding(Migrate(key(1), (Share("node3", 2, 12, 9000),), "r"))
    wide = job(1, lease=KEEPS, gpus=2, num_nodes=2, nodes=("node1", "node2"))
    decision, memory = round_of(joins, cluster(wide), Memory())
    assert decision.actions == memory.moves == ()
    assert decision.reasons[key(1)] == (
        "cannot be moved: its 2 nodes would become 1, and it names no min_gpus or max_gpus"
    )
    _, memory = round_of(joins, cluster(replace(wide, options=Options(min_gpus=2))), Memory())
    assert [move.resize for move in memory.moves] == [True]
    both = (Share("node3", 1, 6, 9000), Share("node4", 1, 6, 9000))
    _, memory = round_of(deciding(Migrate(key(1), both, "r")), cluster(wide), Memory())
    assert [move.resize for move in memory.moves] == [False]


@pytest.mark.parametrize(
    ("wait_s", "placed"),
    [(None, True), (-0.1, True), (0.0, True), (0.4, False), (2.0, False), (121.0, True)],
    ids=["not said", "past", "now", "this second", "at most", "left to Slurm"],
)
def test_a_requeued_job_is_released_when_slurm_may_start_it(wait_s, placed):
    move = Move(key(1), THERE, "r", Requeued(NOW, 0.0))
    eligible_s = None if wait_s is None else NOW + wait_s
    step = advance(replace(move, phase=Requeued(NOW, NOW, ("node2",))), cluster(held(eligible_s=eligible_s)), Memory())
    assert isinstance(step.action, Place) is placed
    assert not placed or not step.action.elsewhere
    assert step.move is not None
    assert isinstance(step.move.phase, Requeued)


def test_a_job_that_goes_to_another_slurmd_need_not_wait_for_the_next_second():
    runs = job(1, lease=replace(KEEPS, saved=True))
    ordered = Move(key(1), THERE, "r", Ordered(NOW))
    left = advance(ordered, cluster(runs), Memory())
    assert isinstance(left.action, Requeue)
    (requeued,) = acted([left.move], [left.action], NOW)
    step = advance(requeued, cluster(held(eligible_s=NOW + 0.7)), Memory())
    assert isinstance(step.action, Place)
    assert step.action.elsewhere


def test_a_policy_sees_that_a_job_cannot_save_without_its_gpus_unless_it_saves_from_host_memory():
    seen = []

    def decide(snapshot, memory):
        seen.append([one.lease.checkpoints for one in snapshot.jobs])
        return Decision((), memory)

    wide = job(3, lease=KEEPS, num_nodes=2)
    one, waits = job(1, lease=KEEPS), job(2, lease=replace(KEEPS, state="yielded"))
    away = job(4, lease=replace(KEEPS, state="yielded", saves_away=True))
    moving(decide)(cluster(one, waits, wide, away), Memory())
    assert seen == [[True, False, True, True]]


def test_a_yielded_job_that_slurm_has_suspended_runs_to_save_and_is_then_requeued():
    away = replace(KEEPS, state="yielded", saves_away=True)
    memory = Memory(suspended=frozenset({key(1)}), moves=(Move(key(1), THERE, "r", Ordered(NOW)),))
    (move,) = memory.moves
    asleep = cluster(job(1, state="SUSPENDED", lease=replace(away, saving=True)))
    moves = PolicySettings(partitions=frozenset({"gpu"}), sharing=SharingSettings(enforce=True), phased_moves=True)
    for share in ("timeslice", "none"):
        still = build("fifo", "none", share, moves).decide(asleep, memory)
        assert [type(one) for one in still.actions if getattr(one, "job", None) == key(1)] == [Unsuspend]
    later = replace(cluster(job(1, lease=replace(away, saving=True))), time_s=NOW + 60)
    assert advance(move, later, memory) == (move, None, "goes to node2: its checkpoint is being saved")
    saved = advance(move, cluster(job(1, lease=replace(away, saving=True, saved=True))), memory)
    assert isinstance(saved.action, Requeue)
    failed = advance(move, replace(cluster(job(1, lease=away)), time_s=NOW + 60), memory)
    assert "its checkpoint failed" in failed.move.outcome
    others = advance(move, cluster(job(1, state="SUSPENDED", lease=away)), Memory())
    assert others.action is None, "its owner has suspended it"


def making_way(*numbers: int, waiting: int = 9) -> MakeWay:
    return MakeWay(tuple(key(number) for number in numbers), (-3,) * len(numbers), key(waiting), "makes way")


WAITS = job(9, state="PENDING", state_reason="Resources")


def test_jobs_that_make_way_wait_for_each_other_and_leave_by_one_action():
    decide = deciding(making_way(1, 2))
    first, memory = round_of(decide, cluster(job(1, lease=KEEPS), job(2, lease=KEEPS), WAITS), Memory())
    assert [type(one) for one in first.actions] == [Migrate, Migrate]
    done, slow = replace(KEEPS, state="stopping", saved=True), replace(KEEPS, state="stopping")
    half, memory = round_of(deciding(), cluster(job(1, lease=done), job(2, lease=slow), WAITS), memory)
    assert half.actions == ()
    both, memory = round_of(deciding(), cluster(job(1, lease=done), job(2, lease=done), WAITS), memory)
    assert both.actions == (making_way(1, 2),)
    assert {type(move.phase) for move in memory.moves} == {Requeued}


@pytest.mark.parametrize("waiting", [None, replace(WAITS, state="RUNNING", nodes=("node2",))], ids=["gone", "runs"])
def test_jobs_go_on_when_the_one_that_waited_needs_their_gpus_no_more(waiting):
    others = () if waiting is None else (waiting,)
    _, memory = round_of(deciding(making_way(1, 2)), cluster(job(1, lease=KEEPS), job(2, lease=KEEPS), WAITS), Memory())
    done, slow = replace(KEEPS, state="stopping", saved=True), replace(KEEPS, state="stopping")
    found, memory = round_of(deciding(), cluster(job(1, lease=done), job(2, lease=slow), *others), memory)
    assert [(type(one), one.job) for one in found.actions] == [(Resume, key(1))]
    later, memory = round_of(deciding(), cluster(job(1, lease=KEEPS), job(2, lease=done), *others), memory)
    assert [(type(one), one.job) for one in later.actions] == [(Resume, key(2))]
    assert memory.moves == (), "they may make way again"


def test_jobs_go_on_when_one_of_them_cannot_save():
    _, memory = round_of(deciding(making_way(1, 2)), cluster(job(1, lease=KEEPS), job(2, lease=KEEPS), WAITS), Memory())
    done = replace(KEEPS, state="stopping", saved=True)
    late = replace(cluster(job(1, lease=done), job(2, lease=KEEPS), WAITS), time_s=NOW + 30)
    found, memory = round_of(deciding(), late, memory)
    assert [(type(one), one.job) for one in found.actions] == [(Resume, key(1))]
    assert [move.job for move in memory.moves if move.over] == [key(2)]


def test_no_job_makes_way_together_with_one_that_cannot_save():
    found, _ = round_of(deciding(making_way(1, 2)), cluster(job(1, lease=KEEPS), job(2), WAITS), Memory())
    assert found.actions == ()


def test_a_save_that_takes_four_times_as_long_as_the_last_move_is_given_up():
    move = Move(key(1), (), "r", Ordered(NOW), for_job=key(9), cost_s=30.0)
    hangs = cluster(job(1, lease=replace(KEEPS, state="stopping")), WAITS)
    assert advance(move, replace(hangs, time_s=NOW + 120), Memory()).move == move
    assert advance(move, replace(hangs, time_s=NOW + 121), Memory()).move.over


def test_the_cost_of_a_move_is_measured_from_the_order_to_save_until_the_ranks_are_back():
    moves = (Move(key(1), (), "r", Ordered(NOW), for_job=key(9)),)
    moves = acted(moves, [making_way(1)], NOW + 7)
    back = replace(job(1, state="PENDING"), key=NEXT)
    moves = (advance(moves[0], replace(cluster(back), time_s=NOW + 8), Memory()).move,)
    starts = replace(job(1, lease=replace(KEEPS, ready=False), start_s=NOW + 100), key=NEXT)
    assert advance(moves[0], replace(cluster(starts), time_s=NOW + 110), Memory()).move.cost_s == 0
    stands = replace(starts, lease=KEEPS)
    moves = (advance(moves[0], replace(cluster(stands), time_s=NOW + 120), Memory()).move,)
    assert moves[0].cost_s == 7 + 20
    assert advance(moves[0], replace(cluster(stands), time_s=NOW + 500), Memory()).move.cost_s == 27


@pytest.mark.parametrize(("says_s", "counts_s"), [(0.0, 0.0), (40.0, 40.0), (1e9, 80.0)])
def test_what_a_job_repeats_after_its_move_is_kept_with_the_cost_and_goes_with_its_next_move(says_s, counts_s):
    """It ran for 800 s: a tenth of that counts at most, whatever its ranks say."""
    decide, saved = deciding(making_way(1)), replace(KEEPS, state="stopping", saved=True, lost_s=says_s)
    _, memory = round_of(decide, cluster(job(1, lease=KEEPS), WAITS), Memory())
    _, memory = round_of(decide, cluster(job(1, lease=saved), WAITS), memory)
    _, memory = round_of(deciding(), cluster(replace(job(1, state="PENDING"), key=NEXT), WAITS), memory)
    stands = replace(job(1, lease=KEEPS, start_s=NOW), key=NEXT)
    _, memory = round_of(deciding(), replace(cluster(stands, WAITS), time_s=NOW + 9), memory)
    assert [move.lost_s for move in memory.moves] == [counts_s]
    again = deciding(MakeWay((NEXT,), (-3,), key(9), "makes way"))
    _, memory = round_of(again, replace(cluster(stands, WAITS), time_s=NOW + 9), memory)
    assert [(move.job, move.lost_s) for move in memory.moves] == [(NEXT, counts_s)], "until it is known anew"


def test_a_requeued_job_that_its_owner_changed_is_let_go():
    move = Move(key(1), THERE, "makes room", Requeued(NOW, 0.0))
    step = advance(move, cluster(held(required_nodes=("node3",))), Memory())
    assert isinstance(step.action, Release)


def test_a_resized_job_whose_place_others_took_gets_its_former_size_and_then_goes_anywhere():
    grows = Move(key(1), (Share("node1", 4, 24, 36000),), "grows", Placed(NOW, NOW), resize=True, former_gpus=1)
    waits = replace(held(state_reason="Resources"), slurm_priority=1)
    early, late = (replace(cluster(waits), time_s=NOW + seconds) for seconds in (5, 11))
    assert advance(grows, early, Memory()).action is None
    step = advance(grows, late, Memory())
    assert isinstance(step.action, Place)
    assert (step.action.shares, step.action.resize) == ((Share("node1", 1, 6, 9000),), True)
    (again,) = acted([step.move], [step.action], late.time_s)
    assert again.shares == step.action.shares
    assert advance(again, late, Memory()).action is None
    then = advance(again, replace(late, time_s=NOW + 25), Memory())
    assert then.action == Release(NEXT, "others have taken its place on node1", unpin=True)
    begin_time = replace(waits, state_reason="BeginTime")
    assert advance(grows, replace(cluster(begin_time), time_s=NOW + 60), Memory()).action is None


def between_hosts(*jobs, prefetched=(), alive=True):
    """A cluster whose second host has an agent that may have read a job's files."""
    hosts = (Host("node1", agent_alive=True), Host("node2", agent_alive=alive, prefetched=prefetched))
    return replace(cluster(*jobs, nodes=(node(), node(lane=1), node("node2"))), hosts=hosts)


def warming_move(**facts):
    return Move(key(1), THERE, "r", Prefetching(NOW), **facts)


def test_another_host_reads_the_files_before_the_job_is_stopped():
    wants = moving(lambda _, memory: Decision((Migrate(key(1), THERE, "r"),), memory), prefetch=True)
    first, memory = round_of(wants, between_hosts(job(1, lease=KEEPS)), Memory())
    assert first.actions == (Migrate(key(1), THERE, "r", prefetch=("node2",)),)
    assert isinstance(memory.moves[0].phase, Prefetching)
    waits, memory = round_of(wants, between_hosts(job(1, lease=KEEPS)), memory)
    assert waits.actions == ()
    then, memory = round_of(wants, between_hosts(job(1, lease=KEEPS), prefetched=(key(1),)), memory)
    assert then.actions == (Save(key(1), "goes to node2: r"),)
    assert isinstance(memory.moves[0].phase, Ordered)


@pytest.mark.parametrize(
    ("shares", "facts"),
    [((Share("node1-l1", 1, 6, 9000),), {}), (THERE, {"alive": False}), ((), {})],
    ids=["same host", "no agent there", "to no nodes"],
)
def test_where_nothing_can_be_read_the_checkpoint_is_ordered_at_once(shares, facts):
    wants = moving(lambda _, memory: Decision((Migrate(key(1), shares, "r"),), memory), prefetch=True)
    decision, memory = round_of(wants, between_hosts(job(1, lease=KEEPS), **facts), Memory())
    assert decision.actions == (Migrate(key(1), shares, "r"),)
    assert isinstance(memory.moves[0].phase, Ordered)


def test_another_host_reads_the_files_first_also_when_the_move_is_requested_by_hand():
    wants = moving(lambda _, memory: Decision((), memory), prefetch=True)
    asked = Memory(moves=(replace(warming_move(by_hand=True), phase=Wanted(NOW)),))
    first, _ = round_of(wants, between_hosts(job(1, lease=KEEPS)), asked)
    assert [action.prefetch for action in first.actions] == [("node2",)]


def test_files_that_are_not_read_in_time_do_not_keep_a_job():
    late = replace(between_hosts(job(1, lease=KEEPS)), time_s=NOW + MAX_PREFETCH_S + 1)
    assert isinstance(advance(warming_move(), late, Memory()).action, Save)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_job_that_loses_its_gpus_meanwhile_is_not_stopped(by_hand):
    found = between_hosts(job(1, lease=replace(KEEPS, state="yielded")), prefetched=(key(1),))
    step = advance(warming_move(by_hand=by_hand), found, Memory())
    assert step.action is None
    assert (type(step.move.phase) if step.move else None) == (Wanted if by_hand else None)


PHASES = (
    Wanted(NOW), Prefetching(NOW), Ordered(NOW), Requeued(NOW, NOW), Placed(NOW, NOW), Placed(NOW, NOW, attempts=2),
    Leaving(NOW),
)  # fmt: skip


@st.composite
def incarnations(draw):
    """The two incarnations of a job, either of them or none, in any state and with any lease."""
    state = draw(st.sampled_from(("PENDING", "RUNNING", "SUSPENDED", "OTHER")))
    lease_state = draw(st.sampled_from(("held", "stopping", "waiting", None)))
    grant = None if lease_state is None else replace(KEEPS, state=lease_state, saved=draw(st.booleans()))
    facts = {"state": state, "lease": grant, "slurm_priority": draw(st.integers(0, 1))}
    keys = draw(st.lists(st.sampled_from((key(1), NEXT)), unique=True, max_size=2))
    return [replace(job(1, **facts), key=one) for one in keys]


@given(st.sampled_from(PHASES), st.booleans(), incarnations())
def test_every_phase_of_a_move_ends_whatever_its_job_does(phase, by_hand, jobs):
    """A job that stays as it is for an hour: by then the move is over or forgotten."""
    move, memory = Move(key(1), THERE, "r", phase, by_hand=by_hand), Memory()
    for seconds in range(0, 3600, 30):
        found = replace(cluster(*jobs), time_s=NOW + seconds)
        step = advance(move, found, memory)
        if step.move is None or step.move.over:
            return
        actions = [] if step.action is None else [step.action]
        (move,) = acted([step.move], actions, found.time_s)
        released = {action.job for action in actions if isinstance(action, Place | Release)}
        memory = replace(memory, placed=memory.placed | released)
    raise AssertionError(f"still {move.phase}")


def test_a_job_that_is_to_go_once_it_can_be_stopped_takes_turns_until_then():
    """It is suspended and has the next turn: without it no stop, and the jobs behind it would wait for ever."""
    turns = (Unsuspend(key(1), "its turn has come"), Resume(key(1), "its turn has come"))
    asked = Memory(moves=(replace(warming_move(by_hand=True), phase=Wanted(NOW)),))
    waits = between_hosts(replace(job(1, state="SUSPENDED"), lease=replace(KEEPS, state="yielded")))
    first, memory = round_of(deciding(*turns, Requeue(key(1), hold=False, reason="no")), waits, asked)
    assert first.actions == turns
    assert isinstance(memory.moves[0].phase, Wanted)


@pytest.mark.parametrize("repair", [True, False])
def test_only_a_repair_is_sent_to_a_job_whose_checkpoint_is_ordered(repair):
    asked = Memory(moves=(replace(warming_move(by_hand=True), phase=Ordered(NOW)),))
    suspend = Suspend(key(1), "frozen", repair=repair)
    found, _ = round_of(deciding(suspend), between_hosts(job(1, lease=replace(KEEPS, state="stopping"))), asked)
    assert (suspend in found.actions) == repair


# --- What a moved job comes back with ----------------------------------------------------------------------

SAVED = Receipt(1, 2818, ("/kept/step-00002818",))
STANDS = replace(KEEPS, state="stopping", saved=True, receipt=SAVED)


def after(found, memory=None):
    return remember(memory or Memory(), (), found)


def test_a_receipt_is_kept_from_the_checkpoint_on_through_all_starts_of_the_job():
    memory = after(cluster(job(1, lease=STANDS)))
    assert memory.receipts == {1: SAVED._replace(left_s=NOW)}
    again = after(replace(cluster(job(1, lease=STANDS)), time_s=NOW + 9), memory)
    assert again.receipts == memory.receipts, "the time is that of the checkpoint"
    for start in (held(), job(1, lease=KEEPS), replace(job(1, lease=KEEPS), key=JobKey(1, 2))):
        assert after(cluster(start), memory).receipts == (
            memory.receipts if start.key.restart else {1: SAVED}  # it went on instead, so it will not have been away
        )
    assert after(cluster(job(2)), memory).receipts == {}, "the job has ended"


WIDER = (Share("node2", 4, 4, 4),)
REFUSES = "rank 0: it trains without having restored the checkpoint of step 30 in /kept"


def test_a_job_that_trained_without_is_never_moved_again_and_says_why():
    memory = after(cluster(job(1, lease=replace(KEEPS, checkpoints=False, unrestored=REFUSES))))
    anew = cluster(replace(job(1, lease=KEEPS), key=NEXT))  # its agent has not heard of it yet
    for wanted in (Migrate(NEXT, THERE, "r"), Resize(NEXT, THERE, "r"), MakeWay((NEXT,), (0,), key(9), "r")):
        memory = after(anew, memory)
        decision = deciding(wanted)(anew, memory)
        assert decision.actions == ()
        assert "checkpoint" in decision.reasons[NEXT]
    by_hand = replace(decision.memory, moves=(Move(NEXT, THERE, "r", Wanted(NOW), by_hand=True),))
    (told,) = deciding()(anew, by_hand).memory.moves
    assert told.outcome == f"cannot be moved: {REFUSES}, so it is not moved again"


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"shares": (), "for_job": key(14)}, "gives its GPUs up for job 14"),
        ({"shares": ()}, "gives its GPUs up (r)"),
        ({"by_hand": True}, "moves to node2 as asked for by hand"),
        ({}, "moves to node2 (r)"),
        ({"resize": True, "former_gpus": 2}, "shrinks from 2 to 1 GPUs on node2 (r)"),
        ({"resize": True, "shares": WIDER, "former_gpus": 2}, "grows from 2 to 4 GPUs on node2 (r)"),
        ({"resize": True, "by_hand": True}, "goes on with 1 GPUs on node2 as asked for by hand"),
    ],
)
def test_the_order_carries_what_the_job_says_on_its_output(facts, says):
    assert goal(Move(key(1), **{"shares": THERE, "reason": "r", "phase": Wanted(NOW), **facts})) == says


def test_an_order_has_the_purpose_and_the_time_limit_of_its_move():
    before = Move(key(1), THERE, "r", Over(NOW, ""), cost_s=30.0)
    (order,) = deciding(MakeWay((NEXT,), (0,), key(9), "r"))(
        cluster(replace(job(1, lease=KEEPS), key=NEXT), job(9, state="PENDING")), Memory(moves=(before,))
    ).actions
    assert (order.goal, order.save_s) == ("gives its GPUs up for job 9", 120.0)


def test_a_move_without_a_step_is_one_of_which_nothing_comes():
    """The memory and the sentences are those of a round that takes a step of each move."""
    phases = (Over(1.0, "went"), Over(1.0, "went", 5.0), Wanted(NOW), Ordered(NOW), Placed(NOW, NOW))
    states, starts_s = ("PENDING", "RUNNING", "SUSPENDED", ""), (None, NOW - 60.0)
    for phase, shares, state, restart, start_s in product(phases, ((), THERE), states, range(3), starts_s):
        one = replace(job(1, lease=KEEPS), state=state, start_s=start_s, required_nodes=("node2",))
        jobs = [replace(one, key=JobKey(1, restart))] if state else []
        found = cluster(*jobs, job(2, state="PENDING"))
        memory = Memory(moves=(Move(key(1), shares, "why", phase),))
        relocation = Relocation.of(found, memory)
        assert all(advance(move, found, memory) == Step(move) for move in relocation.resting)
        every = replace(relocation, steps=(*map(Step, relocation.resting), *relocation.steps), resting=())
        for orders in ((), (SetFactor(key(2), 3, "level"),)):
            decision = Decision(orders, memory, {key(2): "waits"}, 7.0)
            assert relocation.join(decision, prefetch=False) == every.join(decision, prefetch=False)


def test_a_round_without_actions_forgets_what_is_known_of_jobs_that_are_gone():
    sharing = SharingMemory(moved_s=((1, 5.0), (2, 6.0)), asked_gpus=((2, 3),))
    memory = Memory(factors={1: -5, 2: -6}, sharing=sharing)
    both, second, none = (remember(memory, (), cluster(*jobs)) for jobs in ((job(1), job(2)), (job(2),), (job(3),)))
    assert (both.factors, both.sharing) == (memory.factors, sharing)
    assert (second.factors, second.sharing) == ({2: -6}, SharingMemory(moved_s=((2, 6.0),), asked_gpus=((2, 3),)))
    assert (none.factors, none.sharing) == ({}, SharingMemory())
