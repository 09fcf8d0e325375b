"""Costs files: the seconds that each switch takes from a job, in TOML."""

from __future__ import annotations

import tomllib
from dataclasses import fields

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.csv_table import quoted
from cadenza.policies.inputs.strict_mapping import unknown_key
from cadenza.policies.simulator.model import SimCosts

LONGEST_S = 1e6
"""No switch takes longer; about 12 days."""


def read_costs(text: str, source: str) -> SimCosts:
    """Return the costs of a file; keys that it leaves out keep their defaults.

    Raise InputError, naming file and key, for unknown keys and for values that are not numbers from 0 (above 0
    for ``copy_gb_s``, which divides).
    """
    try:
        values = tomllib.loads(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{source}: not TOML: {error}") from None
    known = [item.name for item in fields(SimCosts)]
    for key, value in values.items():
        if key not in known:
            unknown_key(key, known, source)
        _check(key, value, source)
    return SimCosts(**{key: float(value) for key, value in values.items()})


def _check(key: str, value: object, source: str) -> None:
    """Raise InputError for a value that cannot be a cost."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_S:
        raise InputError(f"{source}: {key}: {quoted(value)} is not a number from 0 to {LONGEST_S:g}")
    if key == "copy_gb_s" and not value:
        raise InputError(f"{source}: {key}: must be above 0; a high value such as 1e6 makes copies free")
