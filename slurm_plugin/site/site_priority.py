"""Settings of Slurm's priority without which a SiteFactor changes nothing, so that no job can make way (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cadenza.slurm_plugin.gateway.site_rules import weights_of

MULTIFACTOR = "priority/multifactor"
UNSET = ("", "(null)")
FLOORS = frozenset({"fairshare", "jobsize", "partition", "tres"})
"""Weights that a job has a part of as soon as it is submitted."""


class Lack(NamedTuple):
    """One setting that is missing; ``lines`` of slurm.conf are the remedy, or the site's own decision."""

    key: str
    observation: str
    lines: tuple[str, ...]
    decided: bool = True
    """False: only the site can say whether these lines suit it."""
    fatal: bool = True


def lacks(config: Mapping[str, str]) -> Iterator[Lack]:
    """Yield the settings of ``scontrol show config`` that keep jobs from making way for others."""
    kind, plugin = config.get("PriorityType", ""), config.get("PrioritySiteFactorPlugin", "")
    if kind != MULTIFACTOR:
        text = f"{kind or 'unset'}: it has no SiteFactor, so no job makes way, and cadenzad only observes"
        yield Lack("PriorityType", text, (f"PriorityType={MULTIFACTOR}",), decided=False)
        return
    if plugin not in UNSET:
        text = f"{plugin}: it sets the SiteFactor of all jobs by itself, and undoes Cadenza's"
        yield Lack("PrioritySiteFactorPlugin", text, ("PrioritySiteFactorPlugin=",), decided=False)
    weights = weights_of(config)
    if not weights:
        text = "all are 0: every job has priority 1, which no SiteFactor lowers, so no job makes way"
        yield Lack("PriorityWeight*", text, ("PriorityWeightAge=1000", "PriorityWeightPartition=10000"))
    elif FLOORS.isdisjoint(weights):
        # A priority never falls below 1 (priority_multifactor): a job that was just submitted is there already.
        text = "a job that was just submitted has priority 1, and no SiteFactor puts another one behind it"
        yield Lack("PriorityWeightPartition", text, ("PriorityWeightPartition=10000",), fatal=False)
