"""Stages of sharing (Gandiva, OSDI'18, §3, §4): a decision is a tuple of stages over one state.

This file says what a round does, in which order. A part that is switched off is a stage that is not in the tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

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
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.sharing.state.sharing_state import SharingState
from cadenza.policies.sharing.turns.lanes import close_lanes, drain_or_open_lanes
from cadenza.policies.sharing.turns.repair import repair_suspends
from cadenza.policies.sharing.turns.slurm_sync import explain, release_all, sync_slurm, take_turns

Stage: TypeAlias = Callable[[SharingState], None]

GANDIVA: tuple[Stage, ...] = (
    review_cpu_loans,  # 1. jobs that lend CPUs, compared with what they were promised
    review_growth,  # 2. jobs that have grown, compared with their speed before
    reserve_pending_moves,  # 3. jobs on their way keep their place
    pack_and_unpack,  # 4. jobs that share GPUs at once
    take_turns,  # 5. jobs that have GPUs once this round is done
    list_pending,  # 6. jobs that wait for GPUs, in order
    shrink_for_pending,  # 7. grown jobs give GPUs back
    open_defragmentation,  # 8. placement may make room
    place_pending,  # 9. hosts of held jobs
    hold_until_startable,  # 10. placements that must wait for a move
    defragment_for_queue,  # 11. room for jobs that Slurm cannot start
    undo_growth,  # 12. growth that did not pay
    rebalance,  # 13. jobs move to idle GPUs, together, and away from higher priorities
    even_out,  # 14. hosts of one class get equally many jobs
    defragment_for_lanes,  # 15. room for jobs without a lease
    empty_hosts,  # 16. free hosts for large jobs
    grow,  # 17. jobs take idle GPUs
    relieve_bottlenecks,  # 18. jobs leave hosts that slow them
    divide_hosts,  # 19. CPUs and memory of each host
    explain_sizes,  # 20. reasons of sizes that stay
    leave_hosts,  # 21. jobs that can save leave the hosts that an admin empties
    sync_slurm,  # 22. yields, resumes, and Slurm's allocation
    repair_suspends,  # 23. processes that contradict Slurm's word
    drain_or_open_lanes,  # 24. further lanes
    explain,  # 25. a sentence for every job
)
TIMESLICE: tuple[Stage, ...] = (
    review_cpu_loans,  # 1. jobs that lend CPUs, compared with what they were promised
    reserve_pending_moves,  # 2. jobs on their way keep their place
    end_packs,  # 3. packs of an earlier setting
    take_turns,  # 4. jobs that have GPUs once this round is done
    list_pending,  # 5. jobs that wait for GPUs, in order
    place_pending,  # 6. hosts of held jobs
    hold_until_startable,  # 7. placements that must wait for a move
    divide_hosts,  # 8. CPUs and memory of each host
    leave_hosts,  # 9. jobs that can save leave the hosts that an admin empties
    sync_slurm,  # 10. yields, resumes, and Slurm's allocation
    repair_suspends,  # 11. processes that contradict Slurm's word
    drain_or_open_lanes,  # 12. further lanes
    explain,  # 13. a sentence for every job
)
PREEMPTION: tuple[Stage, ...] = (
    review_cpu_loans,  # 1. jobs that lend CPUs, compared with what they were promised
    reserve_pending_moves,  # 2. jobs on their way keep their place
    end_packs,  # 3. packs of an earlier setting
    take_turns,  # 4. jobs that have GPUs once this round is done, on further lanes
    make_way,  # 5. running jobs leave for the first ones of Slurm's queue
    set_factors,  # 6. their level in Slurm's priority
    divide_hosts,  # 7. CPUs and memory of each host
    leave_hosts,  # 8. jobs that can save leave the hosts that an admin empties
    sync_slurm,  # 9. yields, resumes, and Slurm's allocation
    repair_suspends,  # 10. processes that contradict Slurm's word
    drain_or_open_lanes,  # 11. further lanes
    explain,  # 12. a sentence for every job
    note_quiet_time,  # 13. rounds that may be left out
)
UNSHARED: tuple[Stage, ...] = (
    review_cpu_loans,  # 1. jobs that lend CPUs, compared with what they were promised
    reserve_pending_moves,  # 2. jobs on their way keep their place
    end_packs,  # 3. packs of an earlier setting
    take_turns,  # 4. jobs that have GPUs; no order follows from it
    list_pending,  # 5. jobs that wait for GPUs
    relieve_bottlenecks,  # 6. jobs leave hosts that slow them
    divide_hosts,  # 7. CPUs and memory of each host
    leave_hosts,  # 8. jobs that can save leave the hosts that an admin empties
    explain,  # 9. a sentence for every job
    release_all,  # 10. our suspends and holds are undone
    close_lanes,  # 11. no further lane is open
)
"""Slurm starts every job on GPUs of its own; running jobs are tuned, and moved where that does not suffice."""
STAGES = {"preemption": PREEMPTION, "gandiva": GANDIVA, "timeslice": TIMESLICE, "none": UNSHARED}


def stages_of(
    share: str, settings: SharingSettings, gandiva: GandivaSettings, *, allocates: bool, leveled: bool = True
) -> tuple[Stage, ...]:
    """Return the stages of a sharing by name without the parts that are switched off.

    ``allocates``: an allocation gives out CPUs and memory; otherwise jobs keep what they asked for. ``leveled``: only
    levels that jobs leave change the order.
    """
    aware = gandiva.introspective
    off: set[Stage] = set() if aware else {even_out}
    if not (aware and allocates and settings.floor):
        off.add(review_cpu_loans)
    if not (aware and gandiva.elastic):
        off |= {review_growth, shrink_for_pending, undo_growth, grow, explain_sizes}
    if not (aware and gandiva.defrag):
        off |= {open_defragmentation, defragment_for_queue, defragment_for_lanes, empty_hosts}
    if not gandiva.migrate:
        off |= {rebalance, even_out}
    if not (aware and gandiva.relieve and allocates):
        off.add(relieve_bottlenecks)
    if allocates or not leveled:
        off.add(note_quiet_time)
    instead: dict[Stage, Stage] = {}
    if not (aware and gandiva.pack):
        instead[pack_and_unpack] = end_packs
    if not allocates:
        instead[divide_hosts] = keep_requests
    return tuple(instead.get(stage, stage) for stage in STAGES[share] if stage not in off)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages with what they depend on besides the cluster and the memory."""

    stages: tuple[Stage, ...]
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
        state = SharingState.of(snapshot, memory, self.settings, self.gandiva, self.order, self.allocate)
        for stage in self.stages:
            stage(state)
        return state.decision()
