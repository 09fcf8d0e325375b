"""What can go wrong in a simulation besides its input."""

from __future__ import annotations

from cadenza.policies.core.errors import PolicyError


class SimulationError(PolicyError):
    """A policy asked for what cannot be, such as more GPUs than a node has: a bug of the policy."""
