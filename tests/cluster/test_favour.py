"""Among jobs that share GPUs the ordering says who goes first, and nobody is left out."""

from __future__ import annotations

from collections.abc import Callable

from test_moves import lease

from harness import Cluster, wait_for

SETTINGS = """
[service]
mode = "apply"
poll_s = 0.5
min_round_spacing_s = 0.2
[guard]
partitions = ["shared"]
min_run_s = 0.5
[policy]
order = "srtf"
[sharing]
slice_s = 1.0
turns = "order"
share_between_users = true
"""
PACE_S = 0.02
SHORT_S = 20
FEWEST, MOST = 0.03, 0.25
"""Parts of the GPUs that the longer job may have beside the shorter one: a ninth is meant, fair would be a half."""


def start(cluster: Cluster, name: str, node: str, seconds: int) -> int:
    """Submit a job on all four GPUs of one lane that says how long it takes, and takes as long."""
    iterations = f"--iterations {round(seconds / PACE_S)} --iteration-s {PACE_S}"
    return cluster.train(
        name, iterations, options=("--gres=gpu:4", f"--nodelist={node}", f"--cadenza=duration_s={seconds}")
    )  # fmt: skip


def stretches(cluster: Cluster, job: int) -> list[tuple[float, float]]:
    """Return when the job had its GPUs, as its agent logged it."""
    rows = cluster.sql(f"select from_s, to_s from leases where job = {job} order by from_s")
    return [(float(since), float(until)) for since, until in rows]


def test_the_shorter_job_goes_first_and_the_longer_one_has_a_turn_now_and_then(
    cluster: Cluster, measured: Callable[[str], None]
) -> None:
    cluster.configure(SETTINGS)
    longer = start(cluster, "favour-long", "node1", 3 * SHORT_S)
    wait_for("the longer job's first turn", lambda: lease(cluster, longer).get("ready"))
    shorter = start(cluster, "favour-short", "node1-l1", SHORT_S)
    wait_for(
        "a reason that says so",
        lambda: f"job {shorter} comes first in the order" in cluster.why(longer)["reason"], 60, interval=0.1,
    )  # fmt: skip
    cluster.wait_done(shorter, longer)
    mine = wait_for("the shorter job's turns", lambda: stretches(cluster, shorter))
    began, ended = mine[0][0], mine[-1][1]
    beside = [min(until, ended) - max(since, began) for since, until in stretches(cluster, longer)]
    part = sum(seconds for seconds in beside if seconds > 0) / (ended - began)
    measured(
        f"a job of {SHORT_S} s beside a longer one: {ended - began:.1f} s with turns by the ordering; the longer one "
        f"had its GPUs for {part:.0%} of that time"
    )
    assert FEWEST < part < MOST
