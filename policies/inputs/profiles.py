"""Profile files: schema ``cadenza.profile/1`` and the layout of Synergy's published table, both ways checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Demand, Match, Profile, Reference, linked
from cadenza.policies.inputs.csv_table import quoted
from cadenza.policies.inputs.strict_mapping import convert, read_json
from cadenza.policies.inputs.synergy_table import check_best, is_synergy_table, read_synergy_table

SCHEMA = "cadenza.profile/1"
LARGEST = 1e15
"""Limit on every number of a profile: a product of several is still one that a float holds."""
RELATIVE = (0.5, 1.5)
"""A throughput at the proportional share outside of this was not made relative to it."""


class ReferenceKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server whose proportional share is 1."""

    gpus: int = 8
    cpus: float = 24
    memory_gb: float = 500


class MemoryKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPU memory in GB: the most, and what a yield moves."""

    peak: float | None = None
    low: float | None = None


class BestKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A declared best-case demand, for each GPU."""

    cpus: float
    memory_gb: float


class MatchKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shell patterns of the jobs that a profile fits without being named; all patterns must match."""

    name: str = ""
    command: str = ""


class ProfileKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One profile as written; see ``cadenza.policies.core.profile`` for meanings and units."""

    model: str
    iteration_s: float
    cpus_per_gpu: tuple[float, ...]
    memory_gb_per_gpu: tuple[float, ...]
    throughput: tuple[tuple[float, ...], ...]
    schema: Literal["cadenza.profile/1"] | None = None
    gpu: str = ""
    task: str = ""
    reference: ReferenceKeys = ReferenceKeys()
    storage_mb_s: tuple[tuple[float, ...], ...] = ()
    gpu_memory_gb: MemoryKeys = MemoryKeys()
    gpu_utilization: float | None = None
    declared_best: BestKeys | None = None
    match: MatchKeys = MatchKeys()
    source: str = ""
    license: str = ""
    note: str = ""


class FileKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of several profiles."""

    schema: Literal["cadenza.profile/1"]
    profiles: list[ProfileKeys]
    source: str = ""
    license: str = ""
    note: str = ""


def read_profiles(text: str, source: str) -> dict[str, Profile]:
    """Return the profiles of a file by model, in the file's order.

    The file is one profile, ``{"schema": "cadenza.profile/1", "profiles": […]}``, or has the layout of Synergy's
    published table. Profiles of one model on several GPU types become siblings; the first stands under the model's
    name. Raise InputError naming file and key.
    """
    value = read_json(text, source)
    if not isinstance(value, dict):
        raise InputError(f"{source}: must be an object with the keys of {SCHEMA}")
    best: list[float | None] = []
    if is_synergy_table(value):
        table = read_synergy_table(value, source)
        found, best = [profile for profile, _ in table], [speedup for _, speedup in table]
    elif "profiles" in value:
        found = [
            _profile(keys, source, f"profiles[{index}]")
            for index, keys in enumerate(convert(value, FileKeys, source).profiles)
        ]
    else:
        keys = convert(value, ProfileKeys, source)
        if keys.schema is None:
            raise InputError(f"{source}: key 'schema' is missing; it must be {SCHEMA!r}")
        found = [_profile(keys, source, "")]
    for profile in found:
        check(profile, source)
    for profile, speedup in zip(found, best, strict=False):
        check_best(profile, speedup, source)
    return _by_model(found, source)


ALIKE = (
    "model", "gpu", "task", "iteration_s", "cpus_per_gpu", "memory_gb_per_gpu", "throughput", "storage_mb_s",
    "gpu_utilization",
)  # fmt: skip
"""Keys of the file that a profile has as they are."""


def _profile(keys: ProfileKeys, source: str, path: str) -> Profile:
    """Return the values of the keys, not yet checked."""
    if not keys.model.strip():
        raise InputError(f"{source}: {path + '.' if path else ''}model: must not be empty")
    return Profile(
        **{name: getattr(keys, name) for name in ALIKE},
        reference=Reference(keys.reference.gpus, keys.reference.cpus, keys.reference.memory_gb),
        gpu_memory_peak_gb=keys.gpu_memory_gb.peak,
        gpu_memory_low_gb=keys.gpu_memory_gb.low,
        declared_best=Demand(*msgspec.structs.astuple(keys.declared_best)) if keys.declared_best else None,
        match=Match(keys.match.name, keys.match.command),
    )


def check(profile: Profile, source: str) -> None:
    """Raise InputError for the first value of a profile that cannot be."""
    where = f"{source}: model {quoted(profile.model)}"
    _grid(profile.cpus_per_gpu, f"{where}: cpus_per_gpu")
    _grid(profile.memory_gb_per_gpu, f"{where}: memory_gb_per_gpu")
    shape = (len(profile.cpus_per_gpu), len(profile.memory_gb_per_gpu))
    _matrix(profile.throughput, shape, f"{where}: throughput")
    if profile.storage_mb_s:
        _matrix(profile.storage_mb_s, shape, f"{where}: storage_mb_s", zero=True)
    for value, name in (
        (profile.iteration_s, "iteration_s"),
        *zip(profile.reference, ("reference.gpus", "reference.cpus", "reference.memory_gb"), strict=True),
        *zip(profile.declared_best or (1, 1), ("declared_best.cpus", "declared_best.memory_gb"), strict=True),
    ):
        if not 0 < value <= LARGEST:
            raise InputError(f"{where}: {name}: must be a number above 0, at most {LARGEST:g}")
    _gpu_keys(profile, where)
    share = (profile.reference.cpus / profile.reference.gpus, profile.reference.memory_gb / profile.reference.gpus)
    speed = profile.speed(*share)
    if not RELATIVE[0] <= speed <= RELATIVE[1]:
        raise InputError(
            f"{where}: throughput must be relative to the proportional share ({share[0]:g} CPUs and {share[1]:g} GB a "
            f"GPU), where it is {speed:g} and not 1"
        )


def _grid(values: Sequence[float], where: str) -> None:
    if not values:
        raise InputError(f"{where}: must not be empty")
    if not all(0 < value <= LARGEST for value in values):
        raise InputError(f"{where}: every value must be a number above 0, at most {LARGEST:g}")
    if any(after <= before for before, after in pairwise(values)):
        raise InputError(f"{where}: must ascend, each value above the one before")


def _matrix(rows: Sequence[Sequence[float]], shape: tuple[int, int], where: str, *, zero: bool = False) -> None:
    if (len(rows), *{len(row) for row in rows}) != shape:
        raise InputError(f"{where}: must have {shape[0]} rows (CPUs) of {shape[1]} values (memory)")
    for row in rows:
        if not all(0 < value <= LARGEST or (zero and value == 0) for value in row):
            raise InputError(
                f"{where}: every value must be a number {'from' if zero else 'above'} 0, at most {LARGEST:g}"
            )


def _gpu_keys(profile: Profile, where: str) -> None:
    peak, low, busy = profile.gpu_memory_peak_gb, profile.gpu_memory_low_gb, profile.gpu_utilization
    for name, value in (("peak", peak), ("low", low)):
        if value is not None and not 0 <= value <= LARGEST:
            raise InputError(f"{where}: gpu_memory_gb.{name}: must be a number from 0, at most {LARGEST:g}")
    if peak is not None and low is not None and low > peak:
        raise InputError(f"{where}: gpu_memory_gb.low: {low:g} is above the peak, {peak:g}")
    if busy is not None and not 0 <= busy <= 1:
        raise InputError(f"{where}: gpu_utilization: must be from 0 to 1, a share of time")


def _by_model(found: Iterable[Profile], source: str) -> dict[str, Profile]:
    """Return the first profile of each model; all of one model share their table of siblings."""
    tables: dict[str, dict[str, Profile]] = {}
    for profile in found:
        table = tables.setdefault(profile.model, {})
        if profile.gpu in table:
            on = f" on GPU type {quoted(profile.gpu)}" if profile.gpu else ""
            raise InputError(f"{source}: model {quoted(profile.model)}{on} is there twice")
        table[profile.gpu] = profile
    return {model: next(iter(linked(table).values())) for model, table in tables.items()}


def write_profiles(profiles: Mapping[str, Profile], **about: str) -> str:
    """Return profiles and their siblings as a file that ``read_profiles`` reads back to the same values.

    ``about``: the file's ``source``, ``license`` and ``note``.
    """
    every = [sibling for profile in profiles.values() for sibling in (profile.siblings or {"": profile}).values()]
    head = {"schema": SCHEMA, **about}
    lines = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
    return "{\n" + ",\n".join([*lines, ' "profiles": [\n' + ",\n".join(map(_written, every)) + "\n ]"]) + "\n}\n"


def _written(profile: Profile) -> str:
    """Return one profile as JSON, a key a line."""
    best = profile.declared_best
    keys = ProfileKeys(
        **{name: getattr(profile, name) for name in ALIKE},
        reference=ReferenceKeys(*profile.reference),
        gpu_memory_gb=MemoryKeys(profile.gpu_memory_peak_gb, profile.gpu_memory_low_gb),
        declared_best=BestKeys(best.cpus, best.memory_gb) if best else None,
        match=MatchKeys(*profile.match),
    )
    pairs = msgspec.to_builtins(keys).items()
    return "  {\n" + ",\n".join(f'   "{key}": {json.dumps(value)}' for key, value in pairs) + "\n  }"
