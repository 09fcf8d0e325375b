"""The ordering decides which of two jobs that share GPUs goes first, and the other one is not left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster import wait_for
from harness import Cluster

SETTINGS = """
[policy]
order = "srtf"
[sharing]
turns = "order"
"""
PACE_S = 0.02
FEWEST, MOST = 0.03, 0.25
"""Parts of the GPU time that the longer job may have while both run: a ninth is meant, fair would be a half."""


def start(cluster: Cluster, name: str, node: str, seconds: int) -> int:
    """Submit a job on all four GPUs of one lane that iterates for ``seconds`` and states twice that as its duration.

    Its start and its handovers count as its GPU time too: past its word it would be ordered by its time limit.
    """
    return cluster.paced(
        name, iterations=round(seconds / PACE_S), iteration_s=PACE_S,
        options=("--gres=gpu:4", f"--nodelist={node}", f"--cadenza=duration_s={2 * seconds}"),
    )  # fmt: skip


def stretches(cluster: Cluster, job: int) -> list[tuple[float, float]]:
    """Return when the job had its GPUs, as its agent logged it."""
    rows = cluster.sql(f"select from_s, to_s from leases where job = {job} order by from_s")
    return [(float(since), float(until)) for since, until in rows]


def part_of_the_longer(cluster: Cluster, short_s: int) -> tuple[float, float, int, int]:
    """Run a job and one three times as long on the same GPUs; return its seconds, the other's part, and both jobs."""
    cluster.configure(SETTINGS)
    longer = start(cluster, "order-long", "node1", 3 * short_s)
    wait_for("the longer job's first turn", lambda: cluster.lease(longer).get("ready"))
    shorter = start(cluster, "order-short", "node1-l1", short_s)
    wait_for(
        "a reason that says so",
        lambda: f"job {shorter} comes first in the order" in cluster.why(longer)["reason"], 60, interval=0.1,
    )  # fmt: skip
    cluster.wait_done(shorter)
    mine = wait_for("the shorter job's turns", lambda: stretches(cluster, shorter))
    began, ended = mine[0][0], mine[-1][1]
    both = [min(until, ended) - max(since, began) for since, until in stretches(cluster, longer)]
    part = sum(seconds for seconds in both if seconds > 0) / (ended - began)
    return ended - began, part, shorter, longer


def test_the_shorter_job_goes_first_and_the_longer_one_has_a_turn_now_and_then(cluster: Cluster) -> None:
    _, part, _, longer = part_of_the_longer(cluster, 12)
    assert 0 < part < MOST
    step = cluster.lease(longer)["step"]
    wait_for("the longer job's own time", lambda: cluster.lease(longer)["step"] > step)


@pytest.mark.measurement
def test_the_longer_job_has_a_ninth_of_the_gpus(cluster: Cluster, measured: Callable[[str], None]) -> None:
    seconds, part, *_ = part_of_the_longer(cluster, 20)
    measured(
        f"a job of 20 s with a longer one: {seconds:.1f} s with turns by the ordering; the longer one "
        f"had its GPUs for {part:.0%} of that time"
    )
    assert FEWEST < part < MOST
