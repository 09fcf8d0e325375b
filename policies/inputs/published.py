"""The published tables that come with Cadenza; sources and licences are in ``data/NOTICE``."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from cadenza.policies.inputs.costs import read_costs
from cadenza.policies.inputs.csv_table import number, positive, read_table
from cadenza.policies.inputs.interference import PackedRow, read_packed_rows
from cadenza.policies.inputs.profiles import read_profiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cadenza.policies.core.profile import Profile
    from cadenza.policies.inputs.costs import SimCosts


class MigrationRow(NamedTuple):
    """One model of Gandiva's Figure 13: size of its checkpoint and migration times, read off the figure."""

    model: str
    size_mb: float
    within_server_s: float
    between_servers_s: float


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
def gandiva_migration() -> tuple[MigrationRow, ...]:
    """Return Gandiva's Figure 13 (OSDI'18): migration within and between servers."""
    table = read_table(text_of("gandiva-migration.csv"), "gandiva-migration.csv", MigrationRow._fields)
    return tuple(
        MigrationRow(
            cells[0],
            positive(cells[1], table.at(line, "size_mb")),
            number(cells[2], table.at(line, "within_server_s")),
            number(cells[3], table.at(line, "between_servers_s")),
        )
        for line, cells in table.rows
    )


@cache
def default_costs() -> SimCosts:
    """Return the costs of ``costs.toml``, which says where each comes from."""
    return read_costs(text_of("costs.toml"), "costs.toml")
