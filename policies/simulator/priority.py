"""Slurm's multifactor priority in a simulation: age, fair share by fair tree, size, partition, QOS, nice, SiteFactor.

Sources: Slurm 25.11, priority_multifactor.c and fair_tree.c (priority/multifactor); slurm.conf, ``PriorityWeight…``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple, TypeVar

from cadenza.policies.core.model import Node, SiteRules
from cadenza.policies.inputs.queue_rules import Account, Qos, QueueRules, Tier

T = TypeVar("T")
LEAST = 1
"""Priority below which no job falls that is not held: a SiteFactor below it has no effect."""
MOST_LEVEL = 1e9
"""LevelFS of who has used nothing: sshare(1) says "inf", which no JSON has."""


class Person(NamedTuple):
    """An association: a user in an account."""

    account: str
    user: str


class Facts(NamedTuple):
    """Facts of a job that its priority depends on and that do not change while it waits."""

    person: Person
    qos: str
    partition: str
    nice: int
    of_size: float
    """Points for its part of the cluster: the mean of its part of the nodes and of the CPUs (PriorityFavorSmall=no)."""
    of_qos: float
    of_partition: float
    tier: int
    """PriorityTier of its partition."""


class _Usage:
    """GPU time of one user, decayed, and the GPUs that it has now."""

    __slots__ = ("_at_s", "_half_life_s", "gpu_s", "gpus")

    def __init__(self, half_life_s: float) -> None:
        self.gpu_s, self.gpus, self._at_s, self._half_life_s = 0.0, 0, 0.0, half_life_s

    def count(self, now_s: float) -> None:
        """Add what has been used since the last time."""
        past_s = now_s - self._at_s
        if past_s > 0:
            self.gpu_s = self.gpu_s * 0.5 ** (past_s / self._half_life_s) + self.gpus * past_s
            self._at_s = now_s


class Multifactor:
    """The factors of all jobs. Usage is GPU time (TRESBillingWeights of GPUs alone), decayed by its half-life.

    Usage and factors are as of the last calculation; slurmctld makes one in each PriorityCalcPeriod.
    """

    def __init__(self, rules: QueueRules, people: Iterable[Person], nodes: Sequence[Node]) -> None:
        self.rules = rules
        self._users: dict[str, dict[Person, _Usage]] = {}
        """Usage of each user by account."""
        for person in sorted(set(people)):
            self._users.setdefault(person.account, {})[person] = _Usage(rules.half_life_s)
        self._shares = {name: rules.accounts.get(name, Account()).share for name in self._users}
        self._names = {person: f"{person.account}/{person.user}" for person in set(people)}
        self._factors: dict[Person, float] = {}
        self._levels: dict[str, float] = {}
        self._cpus, self._nodes = sum(node.cpus for node in nodes) or 1, len(nodes) or 1
        self._top_qos = max((one.priority for one in rules.qos.values()), default=0) or 1
        self._top_partition = max((one.job_factor for one in rules.partitions.values()), default=1) or 1
        if rules.weights.fairshare:
            self._settle_shares()

    def facts(self, person: Person, qos: str, partition: str, nice: int, nodes: int, cpus: int) -> Facts:
        """Return the facts that a job's priority depends on."""
        rules, weights = self.rules, self.rules.weights
        tier = rules.partitions.get(partition, Tier())
        of_size = weights.jobsize * ((nodes / self._nodes + cpus / self._cpus) / 2)
        of_qos = weights.qos * rules.qos.get(qos, Qos()).priority / self._top_qos
        of_partition = weights.partition * tier.job_factor / self._top_partition
        return Facts(person, qos, partition, nice, of_size, of_qos, of_partition, tier.tier)

    def value(self, job: Facts, eligible_s: float, now_s: float, site_factor: int) -> int:
        """Return a job's priority: the sum of its weighted factors, less nice."""
        weights, waited_s, longest_s = self.rules.weights, now_s - eligible_s, self.rules.max_age_s
        age = 0.0 if waited_s <= 0.0 else waited_s / longest_s if waited_s < longest_s else 1.0
        fair = self._factors.get(job.person, 1.0)
        found = weights.age * age + weights.fairshare * fair + job.of_size + job.of_qos + job.of_partition
        priority = int(found) + site_factor - job.nice
        return priority if priority > LEAST else LEAST  # noqa: FURB136 - max() takes longer, and this is done for all

    # --- Usage and fair share --------------------------------------------------------------------------

    def use(self, person: Person, gpus: int, now_s: float) -> None:
        """Count GPUs that someone has from now on; a negative number has been given back."""
        usage = self._users[person.account][person]
        usage.count(now_s)
        usage.gpus += gpus

    def count(self, now_s: float) -> None:
        """Bring all usage up to date."""
        for users in self._users.values():
            for usage in users.values():
                usage.count(now_s)

    def calculate(self) -> None:
        """Bring fair shares up to date."""
        if self.rules.weights.fairshare:
            self._settle_shares()

    def _settle_shares(self) -> None:
        """Rank all users by the fair tree: accounts by LevelFS, below each its users, equal ones alike.

        LevelFS is a share over usage, both among siblings.
        """
        used = {name: sum([one.gpu_s for one in users.values()]) for name, users in self._users.items()}
        levels = _levels(self._shares, used)
        self._levels = {name: min(level, MOST_LEVEL) for name, level in levels.items()}
        count = left = sum(map(len, self._users.values()))
        self._factors = {}
        for tied in _by_level(levels):
            # Accounts of equal LevelFS are one account for their users.
            people: dict[Person, float] = {}
            for account in tied:
                part, all_used = 1.0 / len(self._users[account]), used[account]
                for one, usage in self._users[account].items():
                    people[one] = level = part / (usage.gpu_s / all_used) if usage.gpu_s > 0 else inf
                    self._levels[self._names[one]] = min(MOST_LEVEL, level)
            # The first of N users has the factor 1, the last 1 / N (fair_tree.c).
            for alike in _by_level(people):
                self._factors.update(dict.fromkeys(alike, left / count))
                left -= len(alike)

    def site(self) -> SiteRules:
        """Return the rules as a gateway reads them."""
        rules, weights = self.rules, self.rules.weights
        return SiteRules(
            multifactor=True,
            weights={name: int(value) for name in weights.__struct_fields__ if (value := getattr(weights, name)) >= 1},
            max_age_s=rules.max_age_s,
            tiers={name: one.tier for name, one in rules.partitions.items()},
            qos_priority={name: one.priority for name, one in rules.qos.items()},
            fair_share=dict(self._levels),
        )


def _levels(shares: dict[T, float], used: dict[T, float]) -> dict[T, float]:
    """Return the LevelFS of siblings; without usage it is infinite."""
    whole, all_used = sum(shares.values()), sum(used.values())
    return {
        name: (share / whole) / (used[name] / all_used) if used[name] > 0 else inf for name, share in shares.items()
    }


def _by_level(levels: dict[T, float]) -> list[list[T]]:
    """Return those of equal level together, the highest level first."""
    found: dict[float, list[T]] = {}
    for one, level in levels.items():
        found.setdefault(level, []).append(one)
    return [found[level] for level in sorted(found, reverse=True)] if len(found) > 1 else list(found.values())
