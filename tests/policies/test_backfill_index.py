"""What backfill keeps of the nodes is what a look at all of them gives, on clusters of any size."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from cadenza.policies.core.amounts import Amount
from cadenza.policies.sharing.preemption.slurm_pass import PassJob
from cadenza.policies.slurm import backfill
from cadenza.policies.slurm.backfill import Future, Shares, bits_of

ROOM = (8, 96, 1000)


def random_jobs(draw: Random, nodes: int, count: int) -> list[tuple[float, Shares]]:
    found = []
    for _ in range(count):
        names = sorted(draw.sample(range(nodes), draw.choice((1, 1, 1, 2, 3))))
        amount = (draw.choice((1, 2, 4, 8)), 8, 100)
        found.append((draw.choice((100.0, 200.0, draw.uniform(0, 900))), tuple((at, amount) for at in names)))
    return found


def expected(future: Future, need: Amount, ended: int) -> int:
    """Return the nodes with room for a need once so many jobs have ended, by adding up."""
    free = [list(one) for one in future._free]
    fitting = 0
    for at, own in enumerate(free):
        there = [(one, amount) for one in future._order[:ended] for node, amount in one[1] if node == at]
        while not all(n <= f for n, f in zip(need, own, strict=True)) and there:
            _, amount = there.pop(0)
            own[:] = [f + a for f, a in zip(own, amount, strict=True)]
        fitting |= all(n <= f for n, f in zip(need, own, strict=True)) << at
    return fitting


@pytest.mark.parametrize("kept", [1, 3, 256])
def test_nodes_with_room_and_jobs_on_nodes_are_those_of_a_look_at_all(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "MOST_KEPT", kept)
    for seed in range(12):
        draw = Random(seed)  # noqa: S311
        nodes = draw.randrange(3, 40)
        free = [(draw.choice((0, 0, 2)), 50, 500) for _ in range(nodes)]
        partitions = [bits_of(draw.sample(range(nodes), nodes // 2)) for _ in range(3)]
        future = Future(0.0, free, random_jobs(draw, nodes, 3 * nodes), (bits_of(range(nodes)),))
        for step in range(25):
            # 1. Jobs start and leave.
            if draw.random() < 0.6:
                end_s, shares = random_jobs(draw, nodes, 1)[0]
                future.start(end_s, shares)
            elif future._order:
                end_s, shares, _ = draw.choice(future._order)
                future.leave(end_s, shares)
            if step == 12:
                future = future.copy()
            # 2. Nodes with room.
            need, ended = (draw.choice((1, 2, 4)), 8, 100), draw.randrange(len(future._order) + 1)
            last = future._order[ended - 1] if ended else backfill._NOW
            assert future._fitting(need, last) == expected(future, need, ended)
            # 3. The end with which a job first gets nodes.
            asks = PassJob((need,) * draw.choice((1, 2, 3)), bits_of(range(nodes)), 60.0)
            among = draw.choice(partitions)
            found = (count for count in range(len(future._order) + 1) if future.spot(asks, among, count))
            assert future.least_ended(asks, among) == next(found, inf)
            # 4. Jobs on all nodes of a partition but the reserved ones.
            among = draw.choice(partitions)
            some = among & ~bits_of(draw.sample(range(nodes), draw.randrange(0, 3)))
            positions = [at for at, own in enumerate(future.nodes) if own & some]
            assert future.on(some, among) == (positions, [future.ends_s[at] for at in positions])


def test_ends_stay_true_as_time_passes_until_a_job_comes_to_its_limit() -> None:
    future = Future(0.0, [(0, 50, 500)], [(100.0, ((0, (4, 8, 100)),))], (1,))
    assert future.reaches(99.0)
    future.start(200.0, ((0, (1, 8, 100)),))
    assert future.ends_s == Future(99.0, [(0, 0, 0)], [(100.0, ()), (200.0, ())], (1,)).ends_s
    assert not future.reaches(100.0)


def test_several_nodes_come_from_the_smallest_run_that_has_as_many() -> None:
    assert backfill._of_one_lane(0b0110_1111_0111, 3) == [0, 1, 2]
    assert backfill._of_one_lane(0b0110_1111_0111, 2) == [9, 10]
    assert backfill._of_one_lane(0b0110_1111_0111, 6) == [4, 5, 6, 7, 9, 10]
