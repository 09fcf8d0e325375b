"""Synergy's published model table (msr-fiddle/synergy, ``simulator/models``) as one JSON object: into profiles."""

from __future__ import annotations

from typing import Any

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Demand, Profile, Reference
from cadenza.policies.inputs.csv_table import quoted
from cadenza.policies.inputs.strict_mapping import convert

RELATIVE_TOLERANCE = 0.01
"""Tolerance of a declared best speed, relative to the table's at the declared demand."""


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server whose proportional share has throughput 1."""

    gpus: int
    cpus: float
    memory_gb: float


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model: ``iteration_s`` at the proportional share, best-case demand and speed-up, throughput over the grid."""

    iteration_s: float
    throughput: tuple[tuple[float, ...], ...]
    task: str = ""
    batch: int | None = None
    best_cpus: float | None = None
    best_memory_gb: float | None = None
    best_speedup: float | None = None


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All models on one grid."""

    server: Server
    cpus_per_gpu: tuple[float, ...]
    memory_gb_per_gpu: tuple[float, ...]
    models: dict[str, Model]
    source: str = ""
    license: str = ""


def is_synergy_table(value: dict[str, Any]) -> bool:
    """Return True if an object is meant as such a table."""
    return "models" in value and "schema" not in value


def read_synergy_table(value: dict[str, Any], source: str) -> list[tuple[Profile, float | None]]:
    """Return each model's profile, not yet checked, and its declared best speed; raise InputError by key."""
    models = value["models"]
    for name, model in models.items() if isinstance(models, dict) else ():
        convert(model, Model, source, f"models.{name}")
    table = convert(value, Table, source)
    return [(_profile(name, model, table, source), model.best_speedup) for name, model in table.models.items()]


def _profile(name: str, model: Model, table: Table, source: str) -> Profile:
    """Return one model's profile; a declared memory below the grid is raised to the grid's first point."""
    best = None
    if (model.best_cpus is None) != (model.best_memory_gb is None):
        raise InputError(f"{source}: models.{name}: best_cpus and best_memory_gb go together")
    if model.best_cpus is not None and model.best_memory_gb is not None:
        if not (model.best_cpus > 0 and model.best_memory_gb > 0):
            raise InputError(f"{source}: models.{name}: best_cpus and best_memory_gb must be above 0")
        best = Demand(model.best_cpus, max((model.best_memory_gb, *table.memory_gb_per_gpu[:1])))
    return Profile(
        model=name,
        iteration_s=model.iteration_s,
        cpus_per_gpu=table.cpus_per_gpu,
        memory_gb_per_gpu=table.memory_gb_per_gpu,
        throughput=model.throughput,
        reference=Reference(table.server.gpus, table.server.cpus, table.server.memory_gb),
        task=model.task,
        declared_best=best,
    )


def check_best(profile: Profile, speedup: float | None, source: str) -> None:
    """Raise InputError where a declared best speed is not that of the table at the declared demand."""
    if speedup is not None and not abs(profile.best_speed - speedup) <= RELATIVE_TOLERANCE * profile.best_speed:
        raise InputError(
            f"{source}: models.{profile.model}: best_speedup is {quoted(speedup)} where throughput says "
            f"{profile.best_speed:g} at {profile.best.cpus:g} CPUs and {profile.best.memory_gb:g} GB"
        )
