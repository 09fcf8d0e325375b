"""Validation of a profile beyond its format: more CPUs or memory never make a job slower (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.csv_table import quoted

NOISE = 0.05
"""A throughput this much below one with less is not noise."""


def require_usable(profile: Profile, source: str, gpu: str = "") -> None:
    """Raise InputError, naming file and key, for a profile that must not be used.

    More CPUs or memory must not make the job slower by more than 5 %, and with ``gpu`` the profile, or a sibling of
    it, must have been measured on that type or be good for any.
    """
    where = f"{source}: model {quoted(profile.model)}"
    for column, memory in enumerate(profile.memory_gb_per_gpu):
        values = [row[column] for row in profile.throughput]
        _rising(values, profile.cpus_per_gpu, f"{where}: throughput at {memory:g} GB", "CPUs")
    for row, cpus in zip(profile.throughput, profile.cpus_per_gpu, strict=True):
        _rising(row, profile.memory_gb_per_gpu, f"{where}: throughput at {cpus:g} CPUs", "GB")
    measured = [profile.gpu, *profile.siblings]
    if gpu and "" not in measured and gpu not in measured:
        raise InputError(f"{where}: gpu: was measured on {quoted(profile.gpu)}, not on {quoted(gpu)}: profile it there")


def _rising(values: Sequence[float], grid: Sequence[float], where: str, unit: str) -> None:
    """Raise InputError for the first value that is too far below an earlier one."""
    for most, value, at in zip(accumulate(values, max), values[1:], grid[1:], strict=False):
        if value < most * (1 - NOISE):
            raise InputError(f"{where}: falls to {value:g} with {at:g} {unit}, {most:g} with less: measure it again")
