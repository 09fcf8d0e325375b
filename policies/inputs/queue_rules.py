"""Rules by which a site's Slurm orders and bounds its queue: weights of the priority, QOS, shares, limits, licenses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.csv_table import number, quoted, suggest
from cadenza.policies.inputs.strict_mapping import convert, read_toml

DAY_S = 86_400.0
MAX_WEIGHT = 1e9
NONE = "none"
USUAL_WEIGHTS: Mapping[str, float] = {"age": 5_000.0, "fairshare": 10_000.0, "jobsize": 1_000.0, "qos": 20_000.0}
"""Weights of a site that has accounts and names none: fair share before age, and a QOS before both."""
AGE_ALONE: Mapping[str, float] = {"age": 5_000.0}
"""Weights of a site without accounts: the order of submission, as without weights, but a SiteFactor counts."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**9)]
Weight: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_WEIGHT)]
ShareOf: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Seconds: TypeAlias = Annotated[float, Meta(ge=1, le=1e11)]


class Weights(msgspec.Struct, frozen=True):
    """PriorityWeights of priority/multifactor."""

    age: Weight = 0.0
    fairshare: Weight = 0.0
    jobsize: Weight = 0.0
    partition: Weight = 0.0
    qos: Weight = 0.0


NAMES = Weights.__struct_fields__


class Qos(msgspec.Struct, frozen=True):
    """One QOS (sacctmgr(1))."""

    priority: Count = 0
    gpus_per_user: Count | None = None
    """MaxTRESPerUser=gres/gpu; None: no limit."""


class Account(msgspec.Struct, frozen=True):
    """One account (sacctmgr(1))."""

    share: ShareOf = 1.0
    """Its FairShare among the accounts; its users have equal shares of it."""
    gpus: Count | None = None
    """GrpTRES=gres/gpu: GPUs of all its running jobs; None: no limit."""
    max_jobs: Count | None = None
    """MaxJobs: running jobs of each of its users; None: no limit."""


class Tier(msgspec.Struct, frozen=True):
    """One partition (scontrol(1))."""

    tier: Count = 1
    """PriorityTier: jobs of a higher one go first, whatever their priority."""
    job_factor: Count = 1
    """PriorityJobFactor, which the weight for the partition counts."""


class QueueRules(msgspec.Struct, frozen=True):
    """Rules of one site. Without weights the order is that of submission, as in Slurm as it comes. Times in seconds."""

    weights: Weights = Weights()
    max_age_s: Seconds = 7 * DAY_S
    """PriorityMaxAge."""
    half_life_s: Seconds = 7 * DAY_S
    """PriorityDecayHalfLife."""
    calc_s: Seconds = 300.0
    """PriorityCalcPeriod: time between two calculations of usage and priorities."""
    partitions: dict[str, Tier] = {}
    qos: dict[str, Qos] = {}
    accounts: dict[str, Account] = {}
    licenses: dict[str, Count] = {}


NAMED: Mapping[str, Any] = {"partitions": Tier, "qos": Qos, "accounts": Account, "licenses": Count}
"""Tables of rows by name."""


def read_weights(text: str, where: str) -> Weights:
    """Return the weights of a text such as ``age=5000,fairshare=10000``, or of ``none``; raise InputError."""
    found: dict[str, float] = {}
    for part in text.split(",") if text.strip() != NONE else ():
        name, equals, value = part.strip().partition("=")
        if not equals or name not in NAMES:
            raise InputError(f"{where}: {quoted(part)} is not NAME=NUMBER; {suggest(name, NAMES)}")
        if name in found:
            raise InputError(f"{where}: {name} is there twice")
        found[name] = number(value, f"{where}: {name}", 0.0, MAX_WEIGHT)
    return Weights(**found)


def read_queue_rules(text: str, source: str) -> QueueRules:
    """Return the rules of a TOML file; what it leaves out is as Slurm comes. Raise InputError with file and key."""
    values = read_toml(text.removeprefix("\ufeff").replace("\r\n", "\n"), source)
    for table, kind in NAMED.items():  # row by row, so that a message says which
        rows = values.get(table)
        for name, row in rows.items() if isinstance(rows, dict) else ():
            convert(row, kind, source, f"{table}.{name}")
    return convert(values, QueueRules, source)


def with_shares(rules: QueueRules, shares: Mapping[str, float]) -> QueueRules:
    """Return the rules with these shares of accounts."""
    accounts = dict(rules.accounts)
    for name, share in shares.items():
        accounts[name] = msgspec.structs.replace(accounts.get(name, Account()), share=share)
    return msgspec.structs.replace(rules, accounts=accounts)


def with_tiers(rules: QueueRules, tiers: Mapping[str, int]) -> QueueRules:
    """Return the rules with these PriorityTiers of partitions."""
    partitions = dict(rules.partitions)
    for name, tier in tiers.items():
        partitions[name] = msgspec.structs.replace(partitions.get(name, Tier()), tier=tier)
    return msgspec.structs.replace(rules, partitions=partitions)
