"""The configured policy as the function that a round calls."""

from __future__ import annotations

from dataclasses import replace

from cadenza.policies.model import ClusterSnapshot, Decision, Memory
from cadenza.policies.round import Decide
from cadenza.policies.sharing.lanes import lane_actions
from cadenza.policies.sharing.timeslice import decide as timeslice
from cadenza.slurm_plugin.service.release import release_plan
from cadenza.slurm_plugin.service.settings import Settings, sharing_settings


def policy(settings: Settings) -> Decide:
    """Return ``decide(snapshot, memory)`` under these settings; a pure function, so a replay calls it too."""
    rules = sharing_settings(settings)
    if settings.sharing.policy == "none":
        closed = replace(rules, enforce=False)
        return lambda snapshot, memory: Decision(
            (*release_plan(snapshot, memory, "sharing is off"), *lane_actions(snapshot, memory, closed)),
            memory,
        )

    def decide(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        return timeslice(snapshot, memory, rules)

    return decide
