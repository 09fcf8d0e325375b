"""Conventions of other simulators, so that figures compare."""

from __future__ import annotations

from math import inf

from cadenza.policies.simulator.model import SimCosts

FREE_COSTS = SimCosts(
    dispatch_s=0.0, start_s=0.0, restart_s=0.0, yield_s=0.0, resume_s=0.0, copy_gb_s=inf, migrate_s=0.0, tune_s=0.0,
    resize_s=0.0,
)  # fmt: skip
"""Nothing costs anything, as in Synergy's simulator."""
