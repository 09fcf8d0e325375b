"""The published tables that come with Cadenza; sources and licenses are in ``data/NOTICE``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.costs import SimCosts, read_costs
from cadenza.policies.inputs.interference import PackedRow, read_packed_rows
from cadenza.policies.inputs.profiles import read_profiles


def text_of(name: str) -> str:
    """Return a file of the package's data."""
    return files("cadenza.policies").joinpath("data", name).read_text(encoding="utf-8")


@cache
def synergy_profiles() -> Mapping[str, Profile]:
    """Return Synergy's ten models (OSDI'22, published simulator); read once, since profiles compare by identity."""
    return read_profiles(text_of("synergy.json"), "synergy.json")


@cache
def gandiva_table1() -> tuple[PackedRow, ...]:
    """Return Gandiva's Table 1 (OSDI'18): copies of one model on a P40, taking turns against packed."""
    return read_packed_rows(text_of("gandiva-table1.csv"), "gandiva-table1.csv")


@cache
def default_costs() -> SimCosts:
    """Return the costs of ``costs.toml``, which says where each comes from."""
    return read_costs(text_of("costs.toml"), "costs.toml")
