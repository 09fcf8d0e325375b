"""``cadenza doctor --to RELEASE``: what an upgrade of Slurm would meet here (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cadenza.slurm_plugin.gateway.commands import FORMATS
from cadenza.slurm_plugin.gateway.source_gateway import release_of
from cadenza.slurm_plugin.site.checks import Finding, rules_for
from cadenza.slurm_plugin.site.facts import Facts

WINDOW = 3
"""Releases over which Slurm upgrades in one step (slurm.schedmd.com/upgrades.html)."""
FIRST, PARSER = (24, 11), 42
"""A release with the newest version of its data parser; each later release has one more, and the three before it."""


def name(release: tuple[int, int]) -> str:
    """Return a release as Slurm writes it."""
    return f"{release[0]}.{release[1]:02d}"


def steps(old: tuple[int, int], new: tuple[int, int]) -> int:
    """Return how many releases lie between: there is one each May and November.

    >>> steps((24, 11), (26, 5))
    3
    """
    return 2 * (new[0] - old[0]) + (new[1] > 6) - (old[1] > 6)  # noqa: PLR2004 - months


def upgrade(facts: Facts, to: tuple[int, int]) -> Iterator[Finding]:
    """Yield the findings on an upgrade of Slurm, and the steps that go with it, in their order."""
    running = release_of((facts.slurm or {}).get("SLURM_VERSION", ""))
    if facts.slurm is None or running is None:
        yield Finding("FAIL", "Slurm", facts.problems.get("slurm", "no release"), "is slurmctld up? `scontrol ping`")
        return
    # 1. Slurm's own limit.
    count, text = steps(running, to), f"{name(running)} to {name(to)}"
    if 0 <= count <= WINDOW:
        yield Finding("OK", "Slurm", f"{text}: one step")
    else:
        advice = f"by way of another release, {WINDOW} at most at a time" if count > 0 else "Slurm has no way back"
        yield Finding("FAIL", "Slurm", f"{text}: Slurm cannot", advice)
    # 2. What Cadenza reads and is built for.
    newest = PARSER + steps(FIRST, to)
    ours = f"v0.0.{newest - WINDOW} to v0.0.{newest} are offered, {FORMATS[-1]} to {FORMATS[0]} are read"
    common = {f"v0.0.{number}" for number in range(newest - WINDOW, newest + 1)} & set(FORMATS)
    yield Finding("OK" if common else "FAIL", "Slurm's JSON", ours, "" if common else "upgrade Cadenza before")
    if "pyslurm" in facts.source and release_of(str(facts.source["pyslurm"])) != to:
        yield Finding("WARN", "pyslurm", "is for another release: JSON is read until there is one for this", "")
    if facts.plugin != to:
        text = f"Slurm {name(to)} refuses the present plugin, and jobs then run without --cadenza"
        yield Finding("WARN", "plugin", text, f"with Slurm's packages install cadenza-slurm{name(to)} on each machine")
    # 3. slurm.conf, as that release needs it.
    config = {**facts.slurm, "SLURM_VERSION": name(to)}
    now = set(rules_for(facts.slurm))
    for rule in rules_for(config):
        level, key, good, effect, advice = rule
        if rule not in now and not re.search(good, config.get(key, "")):
            yield Finding(level, key, f"{config.get(key) or 'unset'}: {effect}", advice)
    # 4. The way there.
    if facts.settings.applies:
        yield Finding("WARN", "mode", "apply", 'mode = "observe" and SIGHUP before; apply again once doctor is content')
