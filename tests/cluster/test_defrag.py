"""A job that waits for a whole host gets one: others move together, by as few migrations as possible, on real Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from test_held import HELD
from test_moves import lease

from harness import PYTHON, ROOT, Cluster, wait_for

KEPT = "/home/shared/defrag"
JOB = ROOT / "benchmarks" / "defragmentation_job.py"
NATIVE = HELD.replace('"held"', '"native"')
LANES = {"node1": "node1,node1-l1", "node2": "node2,node2-l1"}


def settings(admission: str, *, defrag: bool) -> str:
    return admission + f'[policy]\nshare = "gandiva"\n[gandiva]\npack = false\ndefrag = {json.dumps(defrag)}\n'


@pytest.fixture
def kept(cluster: Cluster) -> Iterator[str]:
    """A directory with the jobs' script, and where they keep their checkpoints; all nodes take jobs afterwards."""
    script = 'rm -rf "$2"; mkdir -m 1777 "$2" && printf %s "$1" > "$2/job.py"'
    cluster.ctl("sh", "-c", script, "sh", JOB.read_text(), KEPT)
    yield KEPT
    open_all(cluster)


def close(cluster: Cluster, nodes: str) -> None:
    cluster.ctl("scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=set-up")


def open_all(cluster: Cluster) -> None:
    for node in cluster.ctl("sinfo", "-hN", "-t", "drain", "-o", "%N").split():
        cluster.ctl("scontrol", "update", f"NodeName={node}", "State=RESUME")


def use(cluster: Cluster, text: str) -> None:
    """Restart the service under these settings and wait until job_submit.lua goes by them."""
    cluster.configure(text)
    cluster.service("ctl", "restart", "cadenzad")
    word = "held" if 'admission = "held"' in text else "native"

    def told() -> bool:
        done = cluster.exec("ctl", "cat", "/run/cadenza/admission", check=False)
        return done.stdout.startswith("held") == (word == "held")

    wait_for(f"job_submit.lua told of {word} admission", told, 60)


def submit(cluster: Cluster, gpus: int) -> int:
    return int(
        cluster.sbatch("--cadenza", f"--gres=gpu:{gpus}", "--mem=500", command=f"exec {PYTHON} {KEPT}/job.py {KEPT}")
    )


def fill(cluster: Cluster, node: str, *sizes: int) -> list[int]:
    """Start jobs of these sizes on one node, while the others take none, so that no job is pinned to it."""
    open_all(cluster)
    close(cluster, next(lanes for name, lanes in LANES.items() if name != node))
    jobs = [submit(cluster, size) for size in sizes]
    for job in jobs:
        cluster.wait_state(job, "RUNNING")
        assert cluster.job(job)["NodeList"] == node
    return jobs


def fragmented(cluster: Cluster, admission: str, first: tuple[int, ...], second: tuple[int, ...]) -> list[int]:
    """Start jobs on both nodes, without defragmentation, and wait until all can be moved."""
    use(cluster, settings(admission, defrag=False))
    jobs = [*fill(cluster, "node1", *first), *fill(cluster, "node2", *second)]
    open_all(cluster)
    for job in jobs:
        wait_for(f"job {job} keeps checkpoints", lambda job=job: lease(cluster, job).get("checkpoints"), 60)
    return jobs


def moved(cluster: Cluster, jobs: list[int]) -> dict[int, str]:
    """Return the nodes of the jobs that Slurm has requeued."""
    found = {job: cluster.job(job) for job in jobs}
    return {job: facts["NodeList"] for job, facts in found.items() if facts["Restarts"] != "0"}


def test_the_fewest_jobs_move_for_one_that_waits(cluster: Cluster, kept: str) -> None:
    small, other, large = fragmented(cluster, HELD, (1, 1), (2,))
    waits = submit(cluster, 4)
    wait_for("queued", lambda: "stays queued" in cluster.cadenza("why", str(waits), check=False).stdout, 30)
    cluster.configure(settings(HELD, defrag=True))
    cluster.wait_state(waits, "RUNNING", timeout=90)
    assert cluster.job(waits)["NodeList"] == "node2"
    cluster.wait_state(large, "RUNNING", timeout=60)
    assert moved(cluster, [small, other, large]) == {large: "node1"}, "one job moves, not the two of node1"
    assert "so that job" in next(
        action["reason"] for action in cluster.why(large)["actions"] if action["kind"] == "Migrate"
    )


def test_in_native_admission_nobody_is_left_waiting_where_slurm_chose_the_gpus(cluster: Cluster, kept: str) -> None:
    """Slurm starts the job at once on a further lane, on GPUs that others have; all fit once somebody has moved."""
    jobs = fragmented(cluster, NATIVE, (1, 1), (2,))
    cluster.configure(settings(NATIVE, defrag=True))
    jobs.append(submit(cluster, 4))
    cluster.wait_state(jobs[-1], "RUNNING", "SUSPENDED", timeout=60)
    wait_for("all have GPUs", lambda: all(lease(cluster, job).get("state") == "held" for job in jobs), 90)
    assert moved(cluster, jobs)
