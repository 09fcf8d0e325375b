"""The simulated slurmctld's priority: each factor against hand-computed values, and the fair tree's bounds."""

from __future__ import annotations

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.queue_rules import Account, Qos, QueueRules, Tier, Weights
from cadenza.policies.simulator.priority import LEAST, MOST_LEVEL, Multifactor, Person, _levels

NODES = read_cluster("4x8:24:500")
DAY_S = 86_400.0
ADA, BEN, CID = Person("lab", "ada"), Person("lab", "ben"), Person("class", "cid")


def factors(rules: QueueRules, *people: Person) -> Multifactor:
    return Multifactor(rules, people or (ADA, BEN, CID), NODES)


def value(of: Multifactor, person: Person = ADA, waited_s: float = 0.0, site: int = 0, **more: object) -> int:
    given = {"qos": "", "partition": "sim", "nice": 0, "nodes": 1, "cpus": 0, **more}
    return of.value(of.facts(person, **given), 0.0, waited_s, site)  # type: ignore[arg-type]


def test_age_grows_up_to_the_largest_age() -> None:
    of = factors(QueueRules(weights=Weights(age=7000), max_age_s=7 * DAY_S))
    assert [value(of, waited_s=days * DAY_S) for days in (0, 1, 3.5, 7, 30)] == [LEAST, 1000, 3500, 7000, 7000]


def test_size_is_the_mean_of_the_parts_of_nodes_and_cpus() -> None:
    of = factors(QueueRules(weights=Weights(jobsize=1000)))
    assert value(of, nodes=2, cpus=24) == 1000 * (2 / 4 + 24 / 96) / 2


def test_qos_and_partition_count_relative_to_the_highest() -> None:
    qos = {"high": Qos(priority=50), "top": Qos(priority=100), "low": Qos()}
    partitions = {"a": Tier(job_factor=4), "b": Tier(tier=3)}
    of = factors(QueueRules(weights=Weights(qos=1000, partition=100), qos=qos, partitions=partitions))
    assert [value(of, qos=name, partition="a") for name in ("low", "high", "top", "")] == [100, 600, 1100, 100]
    assert value(of, partition="b") == 25
    assert [of.facts(ADA, "", name, 0, 1, 0).tier for name in ("a", "b", "other")] == [1, 3, 1]


def test_nice_and_site_factor_are_points_and_nothing_falls_below_one() -> None:
    of = factors(QueueRules(weights=Weights(age=1000)))
    assert value(of, waited_s=7 * DAY_S, nice=100) == 900
    assert value(of, waited_s=7 * DAY_S, site=-300, nice=-50) == 750
    assert value(of, waited_s=7 * DAY_S, site=-(2**30)) == LEAST
    without = factors(QueueRules())
    assert value(without, site=-5, waited_s=DAY_S) == value(without) == LEAST, "weights of 0: nothing to take off"


def test_the_fair_tree_ranks_accounts_first_and_then_their_users() -> None:
    rules = QueueRules(weights=Weights(fairshare=3000), accounts={"lab": Account(share=3), "class": Account(share=1)})
    of = factors(rules)
    assert {value(of, person) for person in (ADA, BEN, CID)} == {3000}, "nobody has used anything: all are first"
    of.use(ADA, 8, 0.0)
    of.use(CID, 8, 0.0)
    of.count(3600.0)
    of.calculate()
    # lab has 3/4 of the shares and half of the usage, class 1/4 and half: lab's users first, ben before ada.
    assert [value(of, person) for person in (BEN, ADA, CID)] == [3000, 2000, 1000]
    site = of.site()
    assert (site.fair_share["lab"], site.fair_share["class"]) == (pytest.approx(1.5), pytest.approx(0.5))
    assert (site.fair_share["lab/ada"], site.fair_share["lab/ben"]) == (pytest.approx(0.5), MOST_LEVEL)
    assert site.weights == {"fairshare": 3000}


def test_accounts_of_equal_level_are_one_for_their_users() -> None:
    of = factors(QueueRules(weights=Weights(fairshare=300)))
    of.use(ADA, 4, 0.0)
    of.use(CID, 4, 0.0)
    of.count(100.0)
    of.calculate()
    # Both accounts have LevelFS 1: ben (nothing used), then cid (all of its account's) and ada (half of her share).
    assert [value(of, person) for person in (BEN, CID, ADA)] == [300, 200, 100]


def test_usage_decays_by_its_half_life() -> None:
    of = factors(QueueRules(weights=Weights(fairshare=300), half_life_s=DAY_S))
    of.use(CID, 8, 0.0)
    of.use(CID, -8, 1000.0)
    of.use(ADA, 1, 1000.0)
    of.use(ADA, -1, 1000.0 + 3000.0)
    of.count(4000.0)
    of.calculate()
    used = of.site().fair_share["lab"], of.site().fair_share["class"]
    cid_s = 8000 * 0.5 ** (3000 / DAY_S)
    assert used[0] == pytest.approx(0.5 / (3000 / (3000 + cid_s)))
    assert used[1] == pytest.approx(0.5 / (cid_s / (3000 + cid_s)))
    of.count(4000.0 + 300 * DAY_S)
    of.calculate()
    assert isclose(of.site().fair_share["lab"], used[0]), "what decays alike keeps its ratios"


USES = st.lists(
    st.tuples(st.sampled_from([ADA, BEN, CID, Person("lab", "dot"), Person("x", "ada")]), st.integers(0, 16)),
    max_size=9,
)


@given(USES, st.lists(st.floats(0.1, 50), min_size=3, max_size=3))
def test_a_fair_share_factor_is_a_rank(uses: list[tuple[Person, int]], shares: list[float]) -> None:
    people = [ADA, BEN, CID, Person("lab", "dot"), Person("x", "ada")]
    accounts = {name: Account(share=share) for name, share in zip(("lab", "class", "x"), shares, strict=True)}
    of = Multifactor(QueueRules(weights=Weights(fairshare=1000), accounts=accounts), people, NODES)
    for at, (person, gpus) in enumerate(uses):
        of.use(person, gpus, float(at))
    of.count(1000.0)
    of.calculate()
    found = {person: value(of, person) for person in people}
    assert set(found.values()) <= {1000 * rank // 5 for rank in range(1, 6)}
    assert max(found.values()) == 1000
    level = of.site().fair_share
    for one in people:
        for other in people:
            if level[one.account] > level[other.account]:
                assert found[one] > found[other], "an account of a higher LevelFS goes first with all its users"


@given(used=st.lists(st.integers(0, 10**6), min_size=3, max_size=3), period_s=st.integers(1, 10**5))
def test_the_levels_of_users_are_those_of_siblings_with_equal_shares(used: list[int], period_s: int) -> None:
    of = factors(QueueRules(weights=Weights(fairshare=1000)))
    for person, gpus in zip((ADA, BEN, CID), used, strict=True):
        of.use(person, gpus, 0.0)
    of.count(float(period_s))
    of.calculate()
    for users in of._users.values():
        levels = _levels(dict.fromkeys(users, 1.0), {one: usage.gpu_s for one, usage in users.items()})
        wanted = {f"{one.account}/{one.user}": min(level, MOST_LEVEL) for one, level in levels.items()}
        assert wanted.items() <= of.site().fair_share.items()
