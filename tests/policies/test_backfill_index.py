"""What backfill keeps of the nodes is what a look at all of them gives, on clusters of any size."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import NOW, job

from cadenza.policies.core.amounts import Amount
from cadenza.policies.sharing.board.node_room import NodeRequest
from cadenza.policies.sharing.preemption.slurm_pass import PassJob, SlurmPass
from cadenza.policies.slurm import backfill
from cadenza.policies.slurm.backfill import SLURM, Future, Pass, Shares, bits_of

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


def windows(ends_s: Sequence[float], precision_s: float) -> Iterator[int]:
    """Yield how many of the running jobs, in order of their ends, are gone after each window (cons_tres)."""
    window_s = backfill.FIRST_WINDOW_S
    bound_s = (ends_s[0] // window_s + 1) * window_s if ends_s else 0.0
    gone = 0
    while gone < len(ends_s):
        gone = max(gone + 1, bisect_right(ends_s, bound_s + window_s))
        yield gone
        while gone < len(ends_s) and window_s < backfill.LAST_WINDOW_S:
            window_s = window_s + precision_s if precision_s else 2 * window_s
            if ends_s[gone] <= bound_s + window_s:
                break


def window_by_window(
    asks: PassJob, future: Future, among: int, from_s: float, to_s: float | None, precision_s: float
) -> tuple[float, list[int]]:
    """Return a job's start once running jobs are gone, tried after each window."""
    first = bisect_right(future.ends_s, from_s)
    for gone in (0, first) if from_s <= 0 else (first,):
        if spot := future.spot(asks, among, gone):
            return max(from_s, 0.0), spot
    coming, ends_s = future.on(among, asks.among)
    begin = bisect_left(coming, first)
    end = len(coming) if to_s is None else bisect_right(ends_s, to_s)
    for gone in windows(ends_s[begin:end], precision_s):
        until = begin + gone
        if spot := future.spot(asks, among, coming[until - 1] + 1):
            last = next(one for one in reversed(coming[:until]) if future.nodes[one] & bits_of(spot))
            return max(future.ends_s[last], from_s), spot
    return inf, []


@given(seed=st.integers(0, 2**32), precision_s=st.sampled_from((0.0, 100.0, 20_000.0)))
def test_the_window_of_a_start_is_the_first_of_all_windows_in_which_it_can_be(seed: int, precision_s: float) -> None:
    draw = Random(seed)  # noqa: S311
    nodes = draw.randrange(1, 12)
    jobs = [(end_s * draw.choice((1, 1, 50, 200_000)), shares) for end_s, shares in random_jobs_of(draw, nodes)]
    future = Future(0.0, [(draw.choice((0, 0, 2)), 50, 500) for _ in range(nodes)], jobs, (bits_of(range(nodes)),))
    plan = Pass(0.0, bits_of(range(nodes)), replace(SLURM, precision_s=precision_s))
    for _ in range(5):
        among = bits_of(draw.sample(range(nodes), draw.randrange(1, nodes + 1)))
        asks = PassJob(((draw.choice((1, 2, 8)), 8, 100),) * draw.choice((1, 1, 2)), bits_of(range(nodes)), 60.0)
        from_s = draw.choice((0.0, draw.uniform(0, 500)))
        to_s = draw.choice((None, from_s + draw.uniform(0, 9000)))
        wanted = window_by_window(asks, future, among, from_s, to_s, precision_s)
        assert plan._future_start(asks, future, among, from_s, to_s) == wanted


def test_jobs_that_end_after_a_year_are_gone_one_by_one() -> None:
    ends_s = (10.0, 7e7, 8e7, 9e7)
    future = Future(0.0, [(0, 50, 500)], [(end_s, ((0, (2, 8, 100)),)) for end_s in ends_s], (1,))
    for gpus, start_s in ((2, 10.0), (4, 7e7), (6, 8e7), (8, 9e7)):
        asks = PassJob(((gpus, 8, 100),), 1, 60.0)
        assert window_by_window(asks, future, 1, 0.0, None, 0.0) == (start_s, [0])
        assert Pass(0.0, 1, SLURM)._future_start(asks, future, 1, 0.0, None) == (start_s, [0])


def random_jobs_of(draw: Random, nodes: int) -> list[tuple[float, Shares]]:
    return random_jobs(draw, max(nodes, 3), 3 * nodes) if nodes >= 3 else [(draw.uniform(0, 900), ((0, ROOM),))]


@given(seed=st.integers(0, 2**32))
def test_reservations_that_are_worked_out_late_are_those_of_each_turn(seed: int) -> None:
    """A pass that reserves for each job at its turn starts the same jobs, and leaves the same nodes to the others."""
    draw = Random(seed)  # noqa: S311
    count = draw.randrange(3, 10)
    every = bits_of(range(count))
    jobs = random_jobs(draw, count, 2 * count)
    future = Future(NOW, [(draw.choice((0, 0, 2)), 50, 500)] * count, [(NOW + at, own) for at, own in jobs], (every,))
    names = tuple(f"n{at}" for at in range(count))
    nodes = SimpleNamespace(
        now_s=NOW, names=names, at={name: at for at, name in enumerate(names)}, among=lambda _: every,
        room=SimpleNamespace(admitting=lambda _: names),
        running={number: (NOW + end_s, shares) for number, (end_s, shares) in enumerate(jobs)},
    )  # fmt: skip
    late, plain, plan = SlurmPass(nodes, future.copy()), future.copy(), Pass(NOW, every, SLURM)  # type: ignore[arg-type]
    for number in range(12):
        asks = job(100 + number, state="PENDING", time_limit_s=draw.choice((60.0, 400.0, 9000.0)))
        request = NodeRequest(draw.choice((1, 1, 2)), (draw.choice((1, 2, 8)), 8, 100), "gpu", "", frozenset(), ())
        if draw.random() < 0.2:
            free = plan.unreserved(asks.time_limit_s or 0.0)
            assert late.unreserved(asks, request) == [name for at, name in enumerate(names) if free >> at & 1]
        if draw.random() < 0.2:
            key = draw.choice(list(nodes.running))
            late.leave(key)
            plain.leave(*nodes.running.pop(key))
        # Each turn by itself.
        one = PassJob((request.each,) * request.nodes, every, asks.time_limit_s or 0.0)
        start_s, spot = plan.earliest(one, plain)
        if spot and start_s > NOW:
            plan.reserve(start_s, start_s + one.limit_s, bits_of(spot))
        elif spot:
            plain.start(NOW + one.limit_s, tuple((at, request.each) for at in spot))
        assert late.take_turn(asks, request) == (bool(spot) and start_s <= NOW)
        assert late.future._free == plain._free


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
