"""Costs files: the seconds that each switch takes from a job, in TOML."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.csv_table import quoted
from cadenza.policies.inputs.strict_mapping import read_toml, unknown_key

LONGEST_S = 1e6
"""Longest switch: about 12 days."""


@dataclass(frozen=True, slots=True)
class SimCosts:
    """Seconds in which a job has its GPUs and makes no progress. ``costs.toml`` has the source of each default."""

    dispatch_s: float = 0.0
    """From the decision to start or move a job until Slurm has launched it; until then others may have its GPUs."""
    start_s: float = 0.0
    """First start, to the first iteration."""
    restart_s: float = 30.0
    """Every later start after a preemption: checkpoint read, framework start-up."""
    yield_s: float = 0.05
    """To move GPU state to the host, without the copy itself."""
    resume_s: float = 0.02
    copy_gb_s: float = 10.0
    """Link speed, GB/s, for the copy of ``gpu_memory_low_gb`` at each yield and resume."""
    migrate_s: float = 30.0
    """To another node, GPU to GPU."""
    tune_s: float = 0.0
    resize_s: float = 30.0


FREE_COSTS = SimCosts(restart_s=0.0, yield_s=0.0, resume_s=0.0, copy_gb_s=inf, migrate_s=0.0, resize_s=0.0)
"""Nothing costs anything, as in Synergy's simulator."""


def read_costs(text: str, source: str) -> SimCosts:
    """Return the costs of a file; keys that it leaves out keep their defaults.

    Raise InputError, naming file and key, for unknown keys and for values that are not numbers from 0 (above 0
    for ``copy_gb_s``, which divides).
    """
    values = read_toml(text.removeprefix("\ufeff").replace("\r\n", "\n"), source)
    known = [item.name for item in fields(SimCosts)]
    for key, value in values.items():
        if key not in known:
            unknown_key(key, known, source)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_S:
            raise InputError(f"{source}: {key}: {quoted(value)} is not a number from 0 to {LONGEST_S:g}")
        if key == "copy_gb_s" and not value:
            raise InputError(f"{source}: {key}: must be above 0; a high value such as 1e6 makes copies free")
    return SimCosts(**{key: float(value) for key, value in values.items()})
