"""Settings of a policy: everything that changes a decision besides the policy's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cadenza.policies.allocation.problem import Costs
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings for the policies of this package. Times in seconds."""

    partitions: frozenset[str] = frozenset()
    starvation_s: float = 1000 * 3600.0
    """A job that has not run for longer goes first, except under a steady ordering (Synergy's simulator: 1000 h)."""
    costs: Costs = field(default_factory=Costs)
    margin: float = 0.0
    evaluations: int = 200
    backfill: bool = True
    """True if an allocation may run jobs past the runnable ones on free resources."""
    usage_half_life_s: float = 7 * 86400.0
    """Slurm's default PriorityDecayHalfLife."""
    shares: Mapping[str, float] = field(default_factory=dict)
    sharing: SharingSettings = field(
        default_factory=lambda: SharingSettings(enforce=True, place=True, share_between_users=True)
    )
    """For the sharings other than ``none``; its partitions are ``partitions``."""
    gandiva: GandivaSettings = field(default_factory=GandivaSettings)
    size_pending: bool = False
    """True if pending jobs ask Slurm for the CPUs and memory that their profiles say they can use."""
    phased_moves: bool = False
    """True if a Migrate or Resize only begins a move: checkpoint, requeue, place, restore, over several rounds.

    False where the gateway carries out a whole move as one action."""
    prefetch: bool = False
    """True if the hosts of a move read the job's files before the job stops; without effect unless phased_moves."""

    @property
    def effective_sharing(self) -> SharingSettings:
        """Return the settings of sharing with the partitions and fair shares of all policies."""
        return replace(self.sharing, partitions=self.partitions, shares=self.shares)
