"""Stages of sharing (Gandiva, OSDI'18, §3, §4): a decision is a tuple of stages over one state.

This file says what a round does, in which order, and which stage works with what: ``test_stage_table`` watches that a
stage reads only what stages before it wrote. A part that is switched off is a stage that is not in the tuple. The
fields are those of the parts of ``RoundState``: who, where, how big, Slurm, and the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from cadenza.policies.allocation.problem import Allocate
from cadenza.policies.allocation.proportional import proportional
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.policies.ordering.fifo import fifo
from cadenza.policies.ordering.ranking import Order
from cadenza.policies.sharing.elastic.cpu_loans import review_cpu_loans
from cadenza.policies.sharing.elastic.feedback import review_growth
from cadenza.policies.sharing.elastic.resize import explain_sizes, grow, shrink_for_pending, undo_growth
from cadenza.policies.sharing.migration.bottleneck import relieve_bottlenecks
from cadenza.policies.sharing.migration.defragment import (
    defragment_for_lanes,
    defragment_for_queue,
    empty_hosts,
    open_defragmentation,
)
from cadenza.policies.sharing.migration.leave_host import leave_hosts
from cadenza.policies.sharing.migration.rebalance import even_out, rebalance
from cadenza.policies.sharing.packing.pair_search import end_packs, pack_and_unpack
from cadenza.policies.sharing.placement.affinity import list_pending, place_pending
from cadenza.policies.sharing.placement.host_division import divide_hosts, keep_requests
from cadenza.policies.sharing.placement.reservations import hold_until_startable, reserve_pending_moves
from cadenza.policies.sharing.preemption.make_way import make_way
from cadenza.policies.sharing.preemption.quiet_time import note_quiet_time
from cadenza.policies.sharing.preemption.site_factor import set_factors
from cadenza.policies.sharing.state.round_state import RoundState
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.sharing.turns.lanes import close_lanes, drain_or_open_lanes
from cadenza.policies.sharing.turns.reasons import explain
from cadenza.policies.sharing.turns.repair import repair_suspends
from cadenza.policies.sharing.turns.slurm_sync import release_all, sync_slurm, take_turns

Run: TypeAlias = Callable[[RoundState], None]
EVERY = frozenset({"none", "preemption", "timeslice", "gandiva"})
SHARED, PLACES = EVERY - {"none"}, frozenset({"timeslice", "gandiva"})
UNSHARED, PREEMPTION, GANDIVA = frozenset({"none"}), frozenset({"preemption"}), frozenset({"gandiva"})
MOVES = "hosts moves fixed moves_left"
ROOM = f"{MOVES} room_searches_left room_made"
PACKS = "groups packed pack_actions reasons stopping fixed memory"


class Stage(NamedTuple):
    """A step of a round. Fields of the state's parts in ``reads`` and ``writes`` are those that some stage writes.

    What a stage writes it may read, too.
    """

    run: Run
    reads: str
    writes: str
    shares: frozenset[str] = EVERY
    """Sharings that have it."""
    needs: str = ""
    """Part of ``stages_of`` that has to be switched on."""


STAGES: tuple[Stage, ...] = (
    # Who has GPUs. Packs come before turns, because packed jobs take theirs as one. Turns come before Slurm's queue:
    # Slurm takes no GPU back from a job, so what is free is what holders leave.
    Stage(review_cpu_loans, "", "memory keeps_cpus reasons", EVERY, "loans"),
    Stage(review_growth, "", "memory", GANDIVA, "elastic"),
    Stage(reserve_pending_moves, "memory", "hosts stranded reasons"),
    Stage(pack_and_unpack, "hosts", PACKS, EVERY, "pack"),
    Stage(end_packs, "", PACKS, EVERY, "no pack"),
    Stage(
        take_turns,
        "groups packed stopping hosts",
        "alone holders yields resumes leaving giving_back fixed reasons memory",
    ),
    # Slurm's queue, and room in it. Slurm alone starts jobs: by default these stages only change what it finds free and
    # in which order it looks; a pin (required nodes) is a wish, which it grants when limits and licenses allow the job.
    Stage(make_way, "leaving giving_back", "ways reasons waiting_reasons memory", PREEMPTION),
    Stage(set_factors, "memory", "factors", PREEMPTION),
    Stage(list_pending, "memory stranded", "to_place queued reasons", PLACES | UNSHARED),
    Stage(shrink_for_pending, "packed to_place queued", MOVES, GANDIVA, "elastic"),
    Stage(open_defragmentation, "", "make_room", GANDIVA, "defrag"),
    Stage(place_pending, "groups packed to_place make_room", f"{ROOM} placements reasons", PLACES),
    Stage(hold_until_startable, "room_made", "placements reasons", PLACES),
    Stage(defragment_for_queue, "groups packed holders queued", ROOM, GANDIVA, "defrag"),
    # Moves of running jobs, to what waiting jobs have left: a move is a requeue, and until Slurm starts the job anew
    # what it had is free for the first that comes.
    Stage(undo_growth, "groups packed memory", MOVES, GANDIVA, "elastic"),
    Stage(rebalance, "groups packed holders", MOVES, GANDIVA, "migrate"),
    Stage(even_out, "groups packed holders", MOVES, GANDIVA, "even"),
    Stage(defragment_for_lanes, "groups packed holders", ROOM, GANDIVA, "defrag"),
    Stage(empty_hosts, "groups packed holders to_place queued", MOVES, GANDIVA, "defrag"),
    Stage(grow, "groups packed to_place queued", f"{MOVES} memory", GANDIVA, "elastic"),
    Stage(
        relieve_bottlenecks,
        "groups packed holders to_place queued placements keeps_cpus",
        MOVES,
        GANDIVA | UNSHARED,
        "relieve",
    ),
    # CPUs and memory, once it is settled who is where: Slurm changes a request only while its job is pending, that is
    # between the requeue of a move and its release. Running jobs are tuned by their agents instead.
    Stage(divide_hosts, "hosts packed holders keeps_cpus reasons memory", "tunes moves placements", EVERY, "allocates"),
    Stage(keep_requests, "", "moves", EVERY, "keeps requests"),
    Stage(explain_sizes, "hosts", "reasons", GANDIVA, "elastic"),
    Stage(leave_hosts, "ways", "moves"),
    # Slurm, compared with all of that. A repair comes after the other orders and replaces those of its job: they follow
    # what Slurm says of it, which is not what its processes do.
    Stage(
        sync_slurm,
        "groups holders yields resumes leaving giving_back moves placements stranded ways memory",
        "slurm_actions reasons",
        SHARED,
    ),
    Stage(repair_suspends, "memory", "slurm_actions reasons", SHARED),
    Stage(drain_or_open_lanes, "memory", "lane_actions", SHARED),
    Stage(release_all, "memory", "slurm_actions", UNSHARED),
    Stage(close_lanes, "memory", "lane_actions", UNSHARED),
    Stage(note_quiet_time, "holders giving_back memory", "quiet_until_s", PREEMPTION, "quiet"),
    Stage(explain, "alone leaving giving_back moves ways memory", "reasons waiting_reasons sentences"),
)


def stages_of(
    share: str, settings: SharingSettings, gandiva: GandivaSettings, *, allocates: bool, leveled: bool = True
) -> tuple[Run, ...]:
    """Return the stages of a sharing by name without the parts that are switched off.

    ``allocates``: an allocation gives out CPUs and memory; otherwise jobs keep what they asked for. ``leveled``: only
    levels that jobs leave change the order.
    """
    aware = gandiva.introspective
    packs = share == "gandiva" and aware and gandiva.pack
    on = {
        "": True,
        "loans": aware and allocates and settings.floor,
        "pack": packs,
        "no pack": not packs,
        "elastic": aware and gandiva.elastic,
        "defrag": aware and gandiva.defrag,
        "migrate": gandiva.migrate,
        "even": aware and gandiva.migrate,
        "relieve": aware and gandiva.relieve and allocates,
        "allocates": allocates,
        "keeps requests": not allocates,
        "quiet": leveled and not allocates,
    }
    return tuple(stage.run for stage in STAGES if share in stage.shares and on[stage.needs])


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages with what they depend on besides the cluster and the memory."""

    stages: tuple[Run, ...]
    settings: SharingSettings
    gandiva: GandivaSettings = field(default_factory=GandivaSettings)
    order: Order = fifo
    """Ranks jobs for placement, and for turns where these follow the ordering."""
    allocate: Allocate = proportional
    """Divides each host among the jobs that hold its GPUs."""

    def decide(self, snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        """Return one round's actions, memory, and a reason for every job that opted in.

        In observe-only the decision is what would be done: the guard keeps it from leaving, except for what undoes our
        own suspends, holds and open lanes.
        """
        state = RoundState.of(snapshot, memory, self.settings, self.gandiva, self.order, self.allocate)
        for stage in self.stages:
            stage(state)
        return state.outcome.decision(state.memory)
