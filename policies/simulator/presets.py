"""Conventions of other simulators, so that figures compare."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from cadenza.policies.simulator.model import Setup, SimCosts

SYNERGY_COSTS = SimCosts(
    start_s=0.0, restart_s=0.0, yield_s=0.0, resume_s=0.0, copy_gb_s=inf, migrate_s=0.0, tune_s=0.0, resize_s=0.0
)
"""Nothing costs anything."""


def synergy(setup: Setup) -> Setup:
    """Return the setup with the conventions of Synergy's simulator: see ``Setup.synergy``."""
    return replace(setup, synergy=True, costs=SYNERGY_COSTS, rounds_on_events=False)
