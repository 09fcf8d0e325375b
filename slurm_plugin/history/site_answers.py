"""A site's rules from Slurm's own answers: its configuration, its partitions, and its accounting's accounts (pure).

Sources: slurm.conf; sacctmgr(1), sshare(1); the data parser of Slurm 26.05. A record that cannot be read costs itself
only. Whatever is not known, or known and not simulated, is said in a sentence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.text import printable
from cadenza.policies.inputs.csv_table import number, quoted
from cadenza.policies.inputs.queue_rules import AGE_ALONE, NAMES, Account, Qos, QueueRules, Tier, Weights
from cadenza.policies.slurm.backfill import SLURM, STRICT, Backfill
from cadenza.slurm_plugin.gateway.site_rules import weights_of
from cadenza.slurm_plugin.gateway.slurm_gateway import parse
from cadenza.slurm_plugin.gateway.slurm_json import NotSlurms, left_out, plain_number, raw_records, records
from cadenza.slurm_plugin.gateway.slurm_values import Number, span_s
from cadenza.slurm_plugin.history.job_records import licenses_in

T = TypeVar("T")
MAX_RECORDS = 1_000_000
MAX_COUNT = 10**9
PARENT = 2**31 - 1
"""Share that stands for FairShare=parent."""
ROOT = "root"
LEAST_SHARE = 1e-9
NO_DECAY_S = 1e11
MINUTE_S = 60.0
BACKFILL = {
    "bf_interval": ("interval_s", 1.0), "bf_window": ("window_s", MINUTE_S), "bf_max_job_test": ("max_jobs", 1.0),
    "bf_window_linear": ("precision_s", 1.0), "batch_sched_delay": ("batch_delay_s", 1.0),
    "sched_interval": ("full_interval_s", 1.0),
}  # fmt: skip
"""SchedulerParameters that are simulated, and the seconds or jobs in one."""
AFFECTING = ("bf_max_job_", "bf_min_", "bf_one_resv_per_job", "bf_hetjob", "default_queue_depth", "max_rpc_cnt")
"""Beginnings of SchedulerParameters that change who starts when."""
GPUS = "gres/gpu"
LIMITS = {
    "jobs.active": "MaxJobs", "jobs.per.count": "GrpJobs", "jobs.accruing": "GrpJobsAccrue",
    "jobs.per.accruing": "MaxJobsAccrue", "tres.total": "GrpTRES", "tres.group.minutes": "GrpTRESMins",
    "tres.group.active": "GrpTRESRunMins", "tres.minutes.total": "MaxTRESRunMins", "tres.per.node": "MaxTRESPerNode",
    "tres.minutes.per.job": "MaxTRESMinsPerJob",
}  # fmt: skip
"""Slurm's names of an association's limits."""
NO_MATTER = frozenset(
    {"jobs.total", "jobs.per.submitted", "jobs.per.wall_clock", "per.account.wall_clock", "tres.per.job"}
)
"""Limits that refuse jobs, and so let none wait that was accepted and ran."""
MOST_NAMED = 5
BY_AGE = QueueRules(weights=Weights(**AGE_ALONE))
"""Rules of a site that are not known: the order of submission."""


Figure: TypeAlias = "Number[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | float]"


class _Share(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    type: tuple[Annotated[str, msgspec.Meta(max_length=64)], ...]
    parent: Annotated[str, msgspec.Meta(max_length=256)] = ""
    shares: Figure = Number()


class _Association(msgspec.Struct, frozen=True):
    account: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    user: Annotated[str, msgspec.Meta(max_length=256)] = ""
    parent_account: Annotated[str, msgspec.Meta(max_length=256)] = ""
    partition: Annotated[str, msgspec.Meta(max_length=256)] = ""
    cluster: Annotated[str, msgspec.Meta(max_length=256)] = ""
    shares_raw: Annotated[int, msgspec.Meta(ge=0, le=PARENT)] = 1
    max: dict[str, Any] = {}


class _Qos(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    priority: Figure = Number()
    limits: dict[str, Any] = {}


class _Priority(msgspec.Struct, frozen=True):
    job_factor: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 1
    tier: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 1


class _Partition(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    priority: _Priority = _Priority()


ANSWERS: Mapping[str, type[_Association | _Qos | _Partition | _Share]] = {
    "associations": _Association, "qos": _Qos, "partitions": _Partition, "shares.shares": _Share,
}  # fmt: skip
"""The records of each answer in JSON by their key."""


@dataclass(frozen=True)
class SiteFacts:
    """Rules of a site as far as they are known, and sentences on the others."""

    queue: QueueRules = BY_AGE
    backfill: Backfill = SLURM
    notes: tuple[str, ...] = ()


@dataclass
class _Found:
    """Answers as they were read, before they are put together."""

    config: dict[str, str] | None = None
    associations: list[_Association] | None = None
    shares: list[_Association] | None = None
    qos: list[_Qos] | None = None
    partitions: list[_Partition] | None = None
    missing: list[str] = field(default_factory=list)
    """Rules that no answer told, each with the one that holds instead."""
    notes: list[str] = field(default_factory=list)


def read_site(answers: Iterable[tuple[str, str]]) -> SiteFacts:
    """Return the rules that Slurm's answers tell, each answer with its name; raise InputError for another file.

    Answers may come in any order, and any may be missing: then Slurm's own default holds, and a note says so.
    """
    found = _Found()
    for text, source in answers:
        _read_answer(text, source, found)
    queue, backfill = BY_AGE, SLURM
    if found.config is None:
        found.missing.append("weights (jobs go in the order of submission)")
    else:
        queue, backfill = _configured(found.config, found.notes)
    rules = msgspec.structs.replace(queue, accounts=_accounts(found), qos=_all_qos(found), partitions=_tiers(found))
    if found.missing:
        found.notes.append(
            f"Rules of the site that are not known (--site FILE tells them): {', '.join(found.missing)}."
        )
    if rules.weights.fairshare and rules.accounts:
        found.notes.append("Nobody has used anything when the simulations begin.")
    return SiteFacts(rules, backfill, tuple(found.notes))


def _read_answer(text: str, source: str, found: _Found) -> None:
    if not text.lstrip().startswith("{"):
        config = parse(text)
        if "PriorityType" not in config:
            raise InputError(f"{source}: neither scontrol show config nor JSON of sacctmgr, sshare or scontrol")
        found.config = config
        return
    for key, kind in ANSWERS.items():
        try:
            raws, _ = raw_records(text, key)
        except NotSlurms as error:
            reason = error
            continue
        rows, refused = records(
            raws, kind, "record", lambda row, _: _association(row) if isinstance(row, _Share) else row
        )
        if refused:
            found.notes.append(f"{source}: {left_out(refused, 'records')}")
        setattr(found, key.partition(".")[0], rows)
        return
    raise InputError(f"{source}: no associations, qos, shares or partitions of sacctmgr, sshare or scontrol: {reason}")


def _association(row: _Share) -> _Association:
    """Return an association without limits, as sshare shows it."""
    shares = min(int(row.shares.value or 0), PARENT)
    if "USER" in row.type:
        return _Association(row.parent or row.name, row.name, shares_raw=shares)
    return _Association(row.name, parent_account=row.parent, shares_raw=shares)


# --- Configuration ---------------------------------------------------------------------------------------


def _configured(config: Mapping[str, str], notes: list[str]) -> tuple[QueueRules, Backfill]:
    multifactor = config["PriorityType"] == "priority/multifactor"
    weights = weights_of(config) if multifactor else {}
    notes += [f"The weight of the priority for {name} is not simulated." for name in sorted({*weights} - {*NAMES})]
    if not weights:
        # Without a weight Slurm's priorities are all 1, and a SiteFactor counts for nothing.
        weights = {name: int(value) for name, value in AGE_ALONE.items()}
        notes.append(
            "Slurm's priority has no weights, so that Cadenza would move no job: it is simulated with a weight for "
            "age, which leaves the order of submission and which `cadenza plan` proposes."
        )
    for key, usual in (("PriorityFavorSmall", "no"), ("PriorityFlags", "")):
        flags = [flag for flag in config.get(key, usual).split(",") if flag not in (usual, "", "CALCULATE_RUNNING")]
        if multifactor and flags:
            notes.append(f"{key}={printable(','.join(flags), 100)} is not simulated.")
    if GPUS not in config.get("AccountingStorageTRES", GPUS):
        notes.append("AccountingStorageTRES has no gres/gpu: the accounting does not know the jobs' GPUs.")
    half_life_s = _seconds(config, "PriorityDecayHalfLife", QueueRules().half_life_s)
    queue = QueueRules(
        weights=Weights(**{name: float(weights.get(name, 0)) for name in NAMES}),
        max_age_s=max(_seconds(config, "PriorityMaxAge", QueueRules().max_age_s), 1.0),
        half_life_s=half_life_s if half_life_s >= 1.0 else NO_DECAY_S,
        calc_s=max(_seconds(config, "PriorityCalcPeriod", QueueRules().calc_s), 1.0),
        licenses={name: count for name, count in licenses_in(config.get("Licenses", "")) if name},
    )
    if config.get("SchedulerType", "sched/backfill") != "sched/backfill":
        return queue, STRICT
    return queue, _backfill(config.get("SchedulerParameters", ""), notes)


def _backfill(text: str, notes: list[str]) -> Backfill:
    """Return the parameters of backfill; those that are no number stay as they come."""
    values: dict[str, Any] = {}
    apart = []
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        if name in BACKFILL:
            key, unit = BACKFILL[name]
            try:
                values[key] = number(value, name, 0.0, 1e9) * unit
            except InputError as error:
                notes.append(f"SchedulerParameters: {error}.")
        elif name.startswith(AFFECTING):
            apart.append(printable(word, 100))
    if apart:
        notes.append(f"SchedulerParameters that are not simulated: {', '.join(apart[:MOST_NAMED])}.")
    if "max_jobs" in values:
        values["max_jobs"] = int(values["max_jobs"])
    for key in ("interval_s", "full_interval_s"):
        if key in values:  # -1 and 0 stand for never and always
            values[key] = max(values[key], 1.0)
    return replace(SLURM, **values)


def _seconds(config: Mapping[str, str], key: str, usual_s: float) -> float:
    try:
        return span_s(config[key])
    except (KeyError, ValueError):
        return usual_s


# --- Partitions, QOS, accounts ---------------------------------------------------------------------------


def _tiers(found: _Found) -> dict[str, Tier]:
    if found.partitions is None:
        found.missing.append("partitions (all have PriorityTier 1)")
    return {row.name: Tier(row.priority.tier, row.priority.job_factor) for row in found.partitions or ()}


def _all_qos(found: _Found) -> dict[str, Qos]:
    if found.qos is None:
        found.missing.append("QOS (all equal, without limits)")
    rules, apart = {}, Counter[str]()
    for row in found.qos or ():
        gpus = None
        for limit in limits_in(row.limits.get("max")):
            if (limit.name, limit.resource) == ("tres.per.user", GPUS):
                gpus = int(limit.value)
            elif limit.name not in NO_MATTER and not limit.name.startswith(("jobs.per.", "wall_clock.")):
                apart[limit.said] += 1
        rules[row.name] = Qos(min(int(row.priority.value or 0), MAX_COUNT), gpus)
    _note_limits(found, apart, "QOS")
    return rules


def _accounts(found: _Found) -> dict[str, Account]:
    rows = found.associations if found.associations is not None else found.shares
    if found.associations is None:
        found.missing.append("limits of accounts (none)")
    if rows is None:
        found.missing.append("shares (all accounts equal)")
        return {}
    rows = _of_one_cluster(rows, found)
    below = {row.parent_account for row in rows if not row.user and row.parent_account != ROOT}
    limits, apart = defaultdict[str, dict[str, int]](dict), Counter[str]()
    for row in rows:
        for limit in limits_in(row.max):
            key = {("jobs.active", ""): "max_jobs", ("tres.total", GPUS): "gpus"}.get((limit.name, limit.resource))
            if limit.name in NO_MATTER:
                continue
            if row.user and key == "max_jobs" and limits[row.account].get(key) == int(limit.value):
                continue  # its account's
            if key is None or row.user or row.account == ROOT or (key == "gpus" and row.account in below):
                apart[limit.said] += 1
            else:
                limits[row.account][key] = int(limit.value)
    _note_limits(found, apart, "accounts and users")
    if any(len(set(shares)) > 1 for shares in _user_shares(rows).values()):
        found.notes.append("Users of an account count with equal shares; here some have more.")
    if below - {""}:
        found.notes.append("Accounts below others count as their siblings, with their part of the whole.")
    return {name: Account(max(share, LEAST_SHARE), **limits[name]) for name, share in flat_shares(rows).items()}


def _of_one_cluster(rows: Sequence[_Association], found: _Found) -> list[_Association]:
    """Return the associations of the cluster that the configuration names, else of the first one; one a user."""
    names = sorted({row.cluster for row in rows})
    ours = (found.config or {}).get("ClusterName", "")
    cluster = ours if ours in names else names[0] if names else ""
    if len(names) > 1:
        found.notes.append(f"Of {len(names)} clusters in the accounting {quoted(cluster)} counts.")
    # Associations of a partition of their own have the same account and user.
    return [row for row in rows if row.cluster == cluster and not row.partition]


def _note_limits(found: _Found, apart: Counter[str], whose: str) -> None:
    if apart:
        named = [f"{name} ({count})" for name, count in apart.most_common(MOST_NAMED)]
        more = f" and {len(apart) - MOST_NAMED} others" if len(apart) > MOST_NAMED else ""
        found.notes.append(f"Limits of {whose} that are not simulated: {', '.join(named)}{more}.")


class Limit(NamedTuple):
    """One limit that is set: its place in the record, the resource that it counts, and its value."""

    name: str
    resource: str
    value: float

    @property
    def said(self) -> str:
        """Return Slurm's name for it."""
        return printable(LIMITS.get(self.name, self.name) + (f"={self.resource}" if self.resource else ""), 100)


def limits_in(value: object, name: str = "") -> Iterator[Limit]:
    """Yield the limits that are set somewhere in a record of sacctmgr."""
    if isinstance(value, list):
        for item in value:
            count = item.get("count") if isinstance(item, dict) else None
            if isinstance(count, int) and 0 <= count <= MAX_COUNT:
                kind = f"{item.get('type')}/{item.get('name')}" if item.get("name") else f"{item.get('type')}"
                yield Limit(name, kind, count)
    elif isinstance(value, dict) and not {"set", "number"} <= value.keys():
        for key, part in value.items():
            yield from limits_in(part, f"{name}.{key}" if name else key)
    else:
        count = plain_number(value)
        if isinstance(count, int | float) and not isinstance(count, bool) and 0 <= count <= MAX_COUNT:
            yield Limit(name, "", count)


def flat_shares(rows: Iterable[_Association]) -> dict[str, float]:
    """Return the part of the whole that belongs to the users of each account.

    An account's part is its share among its siblings, which are accounts and users, of its parent's part. Users with
    FairShare=parent count one each.
    """
    rows = list(rows)
    users = _user_shares(rows)
    accounts: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        if not row.user and row.account != ROOT:
            accounts[row.parent_account or ROOT][row.account] = 1 if row.shares_raw == PARENT else row.shares_raw
    parts: dict[str, float] = {}
    todo, seen = [(ROOT, 1.0)], {ROOT}
    while todo:
        name, part = todo.pop()
        own = sum(users.get(name, ()))
        whole = own + sum(accounts[name].values()) or 1
        if users.get(name):
            parts[name] = part * own / whole
        for child, share in accounts[name].items():
            if child not in seen:  # a circle is no tree
                seen.add(child)
                todo.append((child, part * share / whole))
    return parts


def _user_shares(rows: Iterable[_Association]) -> dict[str, list[int]]:
    shares = defaultdict[str, list[int]](list)
    for row in rows:
        if row.user:
            shares[row.account].append(1 if row.shares_raw == PARENT else row.shares_raw)
    return shares
