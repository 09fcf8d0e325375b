#!/usr/bin/env python3
"""Print Synergy's published runs and ours: its two deployment traces, through the shared round.

The reference values were measured with the published simulator, code unchanged. With ``--set preset=synergy``'s
conventions every figure must agree within 2 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import FREE_COSTS
from cadenza.policies.inputs.profiles import read_profiles
from cadenza.policies.inputs.trace import read_trace
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

from published_data import needed

CLUSTER = "4x8:24:500"
LIMIT = 0.02
HOUR_S = 3600.0
STATIC, DYNAMIC = ("synergy-static-100.csv", "fifo"), ("synergy-dynamic-100.csv", "srtf")
REFERENCE: dict[tuple[str, str], dict[str, tuple[float, float, float]]] = {
    STATIC: {"proportional": (5.63, 15.25, 15.25), "greedy": (5.49, 12.33, 12.33), "tune-coded": (5.08, 11.00, 11.00)},
    DYNAMIC: {"proportional": (3.91, 17.39, 19.50), "greedy": (3.23, 12.40, 13.92), "tune-coded": (3.19, 11.56, 13.25)},
}
"""Mean JCT, p99 JCT and last finish, hours."""


@dataclass(frozen=True)
class Row:
    """One run's figures in hours and the published ones."""

    trace: str
    order: str
    allocate: str
    ours: tuple[float, float, float]
    theirs: tuple[float, float, float]

    @property
    def worst(self) -> float:
        """Return the largest relative difference; the reference has two decimals, so half of the last is free."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return max(max(abs(a - b) - 0.005, 0.0) / b for a, b in pairs)


def replay(trace: str, order: str, allocate: str) -> tuple[float, float, float]:
    """Return mean JCT, p99 JCT (element ⌊0.99 n⌋) and last finish of one replay, hours."""
    table, rows = needed("synergy-models.json"), needed(trace)
    profiles = read_profiles(table.read_text(), str(table))
    jobs = read_trace(rows.read_text(), str(rows), profiles)
    policy = build(order, allocate, "none", PolicySettings(partitions=frozenset({PARTITION})))
    result = simulate(jobs, read_cluster(CLUSTER), policy, Setup(synergy=True, costs=FREE_COSTS))
    times = sorted(job.jct_s for job in result.jobs if job.jct_s is not None)
    last = max(job.finish_s for job in result.jobs if job.finish_s is not None)
    p99 = times[min(int(0.99 * len(times)), len(times) - 1)]
    return sum(times) / len(times) / HOUR_S, p99 / HOUR_S, last / HOUR_S


def rows() -> list[Row]:
    """Run everything."""
    return [
        Row(trace, order, allocate, replay(trace, order, allocate), theirs)
        for (trace, order), table in REFERENCE.items()
        for allocate, theirs in table.items()
    ]


def main() -> int:
    """Print the table; 1 when a figure is further off than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    found = rows()
    if as_json:
        print(json.dumps([{**vars(row), "worst": row.worst} for row in found]))
    else:
        print(f"hours on {CLUSTER}: mean JCT / p99 / last finish; published in brackets; limit {LIMIT:.0%}")
        for row in found:
            ours, theirs = (" / ".join(f"{value:5.2f}" for value in values) for values in (row.ours, row.theirs))
            print(f"{row.trace:26s} {row.order:5s} {row.allocate:13s} {ours}  [{theirs}]  off by {row.worst:.2%}")
    return int(any(row.worst > LIMIT for row in found))


if __name__ == "__main__":
    sys.exit(main())
