"""The configured policy as the function that a round calls: the one that the simulator runs under these names."""

from __future__ import annotations

from cadenza.policies.composition import build
from cadenza.policies.registry import KEEP_REQUESTS, entry
from cadenza.policies.round import Decide
from cadenza.slurm_plugin.service.settings import Settings, policy_settings


def policy(settings: Settings) -> Decide:
    """Return ``decide(snapshot, memory)`` under these settings; a pure function, so a replay calls it too."""
    table = settings.policy
    return build(table.order, table.allocate, table.share, policy_settings(settings)).decide


def sizes_pending(settings: Settings) -> bool:
    """Return True if pending jobs ask for what their profiles say."""
    return settings.policy.size_pending and profiled(settings)


def allocates(settings: Settings) -> bool:
    """Return True if an allocation gives out CPUs and memory."""
    return settings.policy.allocate != KEEP_REQUESTS


def profiled(settings: Settings) -> bool:
    """Return True if CPUs and memory are given out by what profiles say."""
    return entry("allocation", settings.policy.allocate).profiled
