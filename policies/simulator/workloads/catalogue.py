"""The workloads by name, with their keys; ``parse_workload`` turns one line of text into a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.csv_table import integer, quoted, suggest
from cadenza.policies.inputs.model_mix import model_mix, read_split
from cadenza.policies.inputs.published import gandiva_table1, synergy_profiles
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.workloads import automl, gandiva
from cadenza.policies.simulator.workloads.spec import (
    Draws,
    Key,
    above_zero,
    count,
    one_of,
    read_values,
    seconds,
    share,
    span,
)
from cadenza.policies.simulator.workloads.synergy import Synergy

SEED = Key("seed", integer, "42", "seed without --seed")


Generator: TypeAlias = Synergy | gandiva.Gandiva | automl.Search
"""The parameters of a workload, which draw its jobs."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One generated workload, as asked for."""

    name: str
    values: Mapping[str, Any]
    """Every key with its value, defaults included."""
    profiles: Mapping[str, Profile]
    generator: Generator

    @property
    def seed(self) -> int:
        """Return the seed that the text names, or the default."""
        return int(self.values["seed"])

    def generate(self, rng: Draws) -> tuple[TraceJob, ...]:
        """Return the jobs in order of submission; one state of ``rng`` always gives the same."""
        return self.generator.generate(rng, self.profiles)


@dataclass(frozen=True, slots=True)
class Kind:
    """One generator: its keys, its line and source, the cluster that it was made for, and how it is built."""

    line: str
    source: str
    cluster: str
    keys: tuple[Key, ...]
    build: Callable[[Mapping[str, Any], Mapping[str, Profile] | None], tuple[Generator, Mapping[str, Profile]]]


def parse_workload(
    text: str, profiles: Mapping[str, Profile] | None = None, override: Mapping[str, str] | None = None
) -> Workload:
    """Return the workload that ``NAME`` or ``NAME:key=value,…`` asks for.

    ``profiles`` replaces the published ones where the generator takes any; ``override`` sets keys whatever the text
    says (a load sweep). Raise InputError naming the workload or the key.
    """
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in KINDS:
        raise InputError(f"no workload is called {quoted(name)}; {suggest(name, KINDS)}")
    kind, where = KINDS[name], f"workload {name}"
    values = read_values(rest, kind.keys, where)
    known = {key.name: key for key in kind.keys}
    for key, value in (override or {}).items():
        if key not in known:
            raise InputError(f"{where}: has no key {key!r}")
        values[key] = known[key].read(value, f"{where}: {key}")
    generator, used = kind.build(values, profiles)
    return Workload(name, values, used, generator)


def _synergy(
    values: Mapping[str, Any], profiles: Mapping[str, Profile] | None
) -> tuple[Generator, Mapping[str, Profile]]:
    used = profiles or synergy_profiles()
    mix = model_mix(used, values["split"], "workload synergy")
    return Synergy(values["load"], values["jobs"], mix, values["gpus"] == "synthetic"), used


def _gandiva(
    values: Mapping[str, Any], profiles: Mapping[str, Profile] | None
) -> tuple[Generator, Mapping[str, Profile]]:
    used = profiles or gandiva.table1_profiles(gandiva_table1(), values["p100"])
    if len(values["mix"]) != len(gandiva.GROUPS):
        raise InputError("workload gandiva: mix: needs three shares, as 30/25/45")
    needed = [row.model for row in gandiva_table1()]
    missing = [name for name in needed if name not in used]
    if missing:
        raise InputError(f"workload gandiva: the profiles lack {', '.join(missing)}")
    generator = gandiva.Gandiva(
        jobs=values["jobs"],
        span_s=values["span"],
        mix=values["mix"],
        minutes=values["minutes"],
        wide=values["wide"],
        startup_s=values["startup"],
        scale=values["scale"],
    )
    return generator, {name: used[name] for name in needed}


KINDS: Mapping[str, Kind] = {
    "synergy": Kind(
        "Poisson arrivals, run times from half an hour to a week, models by class",
        "Synergy, OSDI'22 §5, and its published simulator",
        "16x8:24:500",
        (
            Key("load", above_zero, "8", "jobs an hour"),
            Key("split", read_split, "20/70/10", "percent of image, language and speech models"),
            Key("jobs", count, "9000", "number of jobs"),
            Key(
                "gpus",
                one_of("single", "synthetic"),
                "single",
                "single: one GPU a job; synthetic: 1, 2, 4, 8 at 70, 10, 15, 5 %",
            ),
            SEED,
        ),
        _synergy,
    ),
    "gandiva": Kind(
        "two hours of arrivals on 180 GPUs of two types, models of Table 1",
        "Gandiva, OSDI'18 p. 606; assumptions in the module",
        gandiva.CLUSTER,
        (
            Key("jobs", count, "1000", "number of jobs"),
            Key("span", seconds, "7200", "seconds over which they are submitted"),
            Key("mix", read_split, "30/25/45", "percent of models of low, medium and high utilization"),
            Key("minutes", span, "30-45", "run time on a P40"),
            Key("wide", share, "0.5", "share of 4-GPU jobs among those of 2 or 4"),
            Key("p100", above_zero, "1.5", "speed of a P100, a P40 being 1"),
            Key("startup", seconds, "5", "seconds from start to first iteration, for each GPU"),
            Key("scale", span, "1-30", "iteration times over Table 1's, logarithmic"),
            SEED,
        ),
        _gandiva,
    ),
    "automl": Kind(
        "a search over configurations, all submitted at once",
        "Gandiva, OSDI'18 Table 3; assumptions in the module",
        "4x4:12:448",
        (
            Key("configs", count, "374", "number of configurations"),
            Key("epochs", count, "50", "epochs of a full run"),
            Key("epoch", above_zero, "36", "seconds of an epoch"),
            Key("target", share, "0.84", "accuracy that one configuration reaches"),
            Key("at", share, "0.5", "its place in the list"),
            SEED,
        ),
        lambda values, profiles: (
            automl.Search(values["configs"], values["epochs"], values["epoch"], values["target"], values["at"]),
            profiles or {"lenet": automl.lenet_profile()},
        ),
    ),
}
