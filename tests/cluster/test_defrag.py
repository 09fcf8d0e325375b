"""Jobs move on real Slurm: the fewest of them for one that waits for a whole host, and out of turns to free GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cluster import PYTHON, ROOT, wait_for
from harness import KEPT, Cluster

JOB = ROOT / "benchmarks" / "moves" / "defragmentation_job.py"
LANES = {"node1": "node1,node1-l1", "node2": "node2,node2-l1"}


def settings(*, place: bool, moves: bool) -> str:
    """Return the settings: whether jobs move; ``place``: we choose its first node."""
    words = (json.dumps(place), json.dumps(moves))
    return '[policy]\nshare = "gandiva"\nplace = {}\n[gandiva]\npack = false\nmoves = {}\n'.format(*words)


@pytest.fixture
def nodes(cluster: Cluster, kept: str) -> Iterator[Cluster]:
    """The cluster with the jobs' script; all nodes take jobs afterwards."""
    cluster.exec("ctl", "sh", "-c", 'printf %s "$1" > "$2/job.py"', "sh", JOB.read_text(), kept)
    yield cluster
    open_all(cluster)


def open_all(cluster: Cluster) -> None:
    """Let all nodes take jobs that this test has drained."""
    for name in cluster.ctl("sinfo", "-hN", "-t", "drain", "-o", "%N").split():
        cluster.ctl("scontrol", "update", f"NodeName={name}", "State=RESUME")


def submit(cluster: Cluster, gpus: int) -> int:
    """Submit a job that keeps checkpoints."""
    command = f"exec {PYTHON} {KEPT}/job.py {KEPT}"
    return int(cluster.sbatch("--cadenza", f"--gres=gpu:{gpus}", "--mem=500", command=command))


def fill(cluster: Cluster, node: str, *sizes: int) -> list[int]:
    """Start jobs of these sizes on one node, while the other takes none, so that no job is pinned to it."""
    open_all(cluster)
    others = next(lanes for name, lanes in LANES.items() if name != node)
    cluster.ctl("scontrol", "update", f"NodeName={others}", "State=DRAIN", "Reason=set-up")
    wait_for(  # while a job of an earlier test ends there, Slurm starts the next one on the other lane
        f"{node} to be idle", lambda: set(cluster.ctl("sinfo", "-hN", "-n", node, "-o", "%T").split()) == {"idle"}, 60
    )
    jobs = [submit(cluster, size) for size in sizes]
    for job in jobs:
        cluster.wait_state(job, "RUNNING")
        assert cluster.job(job)["NodeList"] == node
    return jobs


def fragmented(cluster: Cluster, first: tuple[int, ...], second: tuple[int, ...], *, place: bool) -> list[int]:
    """Start jobs on both nodes, without moves, and wait until all can be moved."""
    cluster.configure(settings(place=place, moves=False))
    jobs = [*fill(cluster, "node1", *first), *fill(cluster, "node2", *second)]
    open_all(cluster)
    for job in jobs:
        wait_for(f"job {job} keeps checkpoints", lambda job=job: cluster.lease(job).get("checkpoints"), 60)
    return jobs


def moved(cluster: Cluster, jobs: list[int]) -> dict[int, str]:
    """Return the nodes of the jobs that Slurm has requeued."""
    found = {job: cluster.job(job) for job in jobs}
    return {job: facts["NodeList"] for job, facts in found.items() if facts["Restarts"] != "0"}


def test_the_fewest_jobs_move_for_one_that_waits(nodes: Cluster) -> None:
    small, other, large = fragmented(nodes, (1, 1), (2,), place=True)
    nodes.ctl("scontrol", "update", "NodeName=node1-l1,node2-l1", "State=DRAIN", "Reason=set-up")
    waits = submit(nodes, 4)
    wait_for("it in Slurm's queue", lambda: nodes.job(waits).get("Reason") == "Resources", 30)
    nodes.configure(settings(place=True, moves=True))
    nodes.wait_state(waits, "RUNNING", timeout=90)
    assert nodes.job(waits)["NodeList"] == "node2"
    nodes.wait_state(large, "RUNNING", timeout=60)
    assert moved(nodes, [small, other, large]) == {large: "node1"}, "one job moves, not the two of node1"
    assert "so that job" in next(
        action["reason"] for action in nodes.why(large)["actions"] if action["kind"] == "Migrate"
    )


def test_no_job_is_left_waiting_where_slurm_chose_the_gpus(nodes: Cluster) -> None:
    """Slurm starts the job at once on a further lane, on GPUs that others have; all fit once one of them has moved."""
    jobs = fragmented(nodes, (1, 1), (2,), place=False)
    nodes.configure(settings(place=False, moves=True))
    jobs.append(submit(nodes, 4))
    nodes.wait_state(jobs[-1], "RUNNING", "SUSPENDED", timeout=60)
    wait_for("all have GPUs", lambda: all(nodes.lease(job).get("state") == "held" for job in jobs), 90)
    assert moved(nodes, jobs)


def test_one_of_two_jobs_in_turns_goes_to_gpus_that_become_free(nodes: Cluster) -> None:
    nodes.configure(settings(place=False, moves=True))
    jobs = [*fill(nodes, "node1", 4), submit(nodes, 4)]
    nodes.wait_state(jobs[1], "RUNNING", "SUSPENDED")
    assert nodes.job(jobs[1])["NodeList"] == "node1-l1"
    for job in jobs:
        wait_for(f"job {job} keeps checkpoints", lambda job=job: nodes.lease(job).get("checkpoints"), 60)
    open_all(nodes)
    wait_for("a move", lambda: moved(nodes, jobs), 60)
    wait_for("both have GPUs", lambda: all(nodes.lease(job).get("state") == "held" for job in jobs), 60)
    ((mover, where),) = moved(nodes, jobs).items()
    assert where == "node2"
    left = "node1" if mover == jobs[0] else "node1-l1"
    (reason,) = [action["reason"] for action in nodes.why(mover)["actions"] if action["kind"] == "Migrate"]
    assert reason == f"moves from {left} to node2, whose GPUs are idle, out of turns with 1 others"
