"""A policy: an ordering, an allocation and a sharing put together into the one function that a round calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cadenza.policies.core.actions import Place
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.policies.exclusive import Exclusive, with_usage
from cadenza.policies.ordering.gittins import with_ended
from cadenza.policies.policy_settings import PolicySettings
from cadenza.policies.registry import KEEP_REQUESTS, allocation, entry, ordering
from cadenza.policies.relocation.executor import Relocation
from cadenza.policies.request_sizing import as_sized, requests
from cadenza.policies.round import Decide
from cadenza.policies.sharing.pipeline import Pipeline, stages_of
from cadenza.policies.sharing.preemption.waiting_jobs import MAX_TESTED
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.sharing.turns.repair import requeue_forgotten

__all__ = ["Policy", "PolicySettings", "build"]


@dataclass(frozen=True, slots=True)
class Policy:
    """``decide(snapshot, memory)`` and what a caller may know of it."""

    name: str
    decide: Decide
    runnable: Callable[[ClusterSnapshot, Memory], tuple[JobKey, ...]] | None = None
    """For a steady policy: the ordered runnable jobs. The decision is a function of these and the nodes alone."""
    reach: int | None = None
    """Number of waiting jobs, the first of Slurm's queue, that a decision depends on; None: all."""


def build(order: str, allocate: str, share: str = "none", settings: PolicySettings | None = None) -> Policy:
    """Return the policy of these names, the same for the service and the simulator.

    Raise InputError for an unknown name.
    """
    rules = settings if settings is not None else PolicySettings()
    ordering_entry, allocation_entry = entry("ordering", order), entry("allocation", allocate)
    entry("sharing", share)
    sharing, allocates = rules.effective_sharing, allocate != KEEP_REQUESTS
    turns = "" if share in ("none", "preemption") or sharing.turns == "fair" else f", turns by {sharing.turns}"
    name = f"{order}/{allocate}" + ("" if share == "none" else f"/{share}{turns}")
    sizes = rules.size_pending and allocation_entry.profiled
    if share == "none" and sharing.places and allocates:
        exclusive = Exclusive(ordering(order), allocation(allocate), rules, allocation_entry, ordering_entry)
        policy = _Composed(rules, sharing, exclusive.decide, sizes, ordering_entry.learns)
        plain = not (sizes or rules.phased_moves or sharing.floor)
        steady = plain and ordering_entry.steady and allocation_entry.steady
        return Policy(name, policy.decide, exclusive.runnable if steady else None)
    floored = sharing if allocates else replace(sharing, floor=True)  # jobs have all that they asked for
    leveled = ordering_entry.leveled
    stages = stages_of(share, floored, rules.gandiva, allocates=allocates, leveled=leveled)
    pipeline = Pipeline(stages, floored, rules.gandiva, ordering(order), allocation(allocate))

    def decide(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        return pipeline.decide(snapshot, with_usage(memory, snapshot, rules.usage_half_life_s))

    reach = MAX_TESTED if share == "preemption" and order == "levels" and not allocates else None
    return Policy(name, _Composed(rules, sharing, decide, sizes, ordering_entry.learns).decide, reach=reach)


@dataclass(frozen=True, slots=True)
class _Composed:
    """A policy with what surrounds it: moves over several rounds, and the requests of pending jobs."""

    settings: PolicySettings
    sharing: SharingSettings
    """The settings' ``effective_sharing``."""
    policy: Decide
    sizes: bool
    """True if pending jobs ask for what their profiles say."""
    learns: bool
    """True if the ordering learns from jobs that have ended."""

    def decide(self, snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        """Return one round's decision."""
        memory = with_ended(memory, snapshot) if self.learns else memory
        # 1. Moves take their next step; the policy sees which jobs are on their way.
        relocation = Relocation.of(snapshot, memory) if self.settings.phased_moves else None
        marked = relocation.snapshot if relocation is not None else snapshot
        # 2. Pending jobs ask for what their profiles say, and the policy sees them as if they had.
        sizes = requests(marked, memory, self.sharing) if self.sizes else {}
        # 3. Order, allocation and sharing.
        decision = self.policy(as_sized(marked, sizes), memory)
        # 4. Jobs that are placed get what they need there; others ask for it.
        if sizes:
            placed = {action.job for action in decision.actions if isinstance(action, Place)}
            asking = [size for key, size in sizes.items() if key not in placed]
            texts_of = {size.job: (decision.reasons.get(size.job, ""), size.reason) for size in asking}
            reasons = {**decision.reasons, **{key: "; ".join(filter(None, texts)) for key, texts in texts_of.items()}}
            decision = replace(decision, actions=(*asking, *decision.actions), reasons=reasons)
        # 5. Moves begin; while a job is on its way, nothing else is ordered of it.
        if relocation is not None:
            decision = relocation.join(decision, prefetch=self.settings.prefetch)
        # 6. Requeues that a killed slurmctld forgot are ordered again.
        return requeue_forgotten(decision, snapshot, memory, self.sharing)
