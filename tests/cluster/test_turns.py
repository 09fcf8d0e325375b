"""Real training jobs take turns on the same GPUs, and their losses are those of jobs alone, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

from cluster import wait_for
from harness import FOUR_GPUS, Cluster

WANTED_YIELDS = 50
# Two jobs for the GPUs of each host, in two lanes; one of them has two ranks.
JOBS = {
    "turn-mlp": ("--model mlp --seed 1", 1),
    "turn-cnn": ("--model cnn --seed 2", 1),
    "turn-transformer": ("--model transformer --seed 3", 1),
    "turn-ddp": ("--model cnn --seed 4", 2),
}
ITERATION_S = 0.02
ITERATIONS = 600
FAST_TURNS = """
[sharing]
slice_s = 0.25
"""


SHORT_WAIT = """
[expert]
lease_wait_s = 3.0
"""


def submit(cluster: Cluster, name: str, prefix: str, *, managed: bool) -> int:
    arguments, ranks = JOBS[name]
    return cluster.train(
        f"{prefix}{name}", arguments, f"--iterations {ITERATIONS} --iteration-s {ITERATION_S if managed else 0}",
        options=FOUR_GPUS if managed else ("--partition=plain", "--gres=gpu:1"), ranks=ranks,
    )  # fmt: skip


def started(cluster: Cluster, job_ids: list[int]) -> bool:
    return all(cluster.state(job_id) in {"RUNNING", "SUSPENDED", "COMPLETED"} for job_id in job_ids)


def test_many_yields_change_no_bit(cluster: Cluster, measured: Callable[[str], None]) -> None:
    cluster.configure(FAST_TURNS)
    jobs = [submit(cluster, name, "", managed=True) for name in JOBS]
    wait_for("every job to have started", lambda: started(cluster, jobs), 90)
    cluster.wait_done(*jobs, timeout=300)
    alone = [submit(cluster, name, "alone-", managed=False) for name in JOBS]
    ids = ",".join(map(str, jobs))
    ((yields,),) = cluster.sql(f"select count(*) from switches where kind = 'yield' and job in ({ids})")
    ((latest,),) = cluster.sql(f"select max(total_s) from switches where kind = 'resume' and job in ({ids})")
    measured(f"{yields} yields; the slowest resume took {latest:.2f} s (benchmarks/speed/turns.py measures both)")
    cluster.wait_done(*alone, timeout=300)
    for name in JOBS:
        shared, uninterrupted = cluster.result(name), cluster.result(f"alone-{name}")
        measured(
            f"{name}: losses {shared['losses_sha256'][:16]} with turns, {uninterrupted['losses_sha256'][:16]} alone"
        )
        assert shared["losses_sha256"] == uninterrupted["losses_sha256"]
        assert shared["parameters_sha256"] == uninterrupted["parameters_sha256"]
    assert yields >= WANTED_YIELDS


def test_a_frozen_job_gives_its_place_back_without_a_moment_on_the_gpu_of_another(cluster: Cluster) -> None:
    """Slurm kills it as it is suspended, and brings it back held; the hold is ours to release."""
    cluster.configure(SHORT_WAIT)
    one = ("--gres=gpu:1", "--mem=500", "--cadenza")
    never_stops = cluster.sbatch(*one, "--nodelist=node1", command="exec sleep 600")
    wait_for("its lease", lambda: cluster.lease(never_stops).get("state") == "held")
    frozen = cluster.sbatch(*one, "--nodelist=node1-l1", user="bob", command="exec sleep 1")
    query = f"select kind from actions where job = {frozen} and ok = 1 order by id"
    kinds = wait_for(
        "its release", lambda: (found := [kind for (kind,) in cluster.sql(query)])[-1:] == ["Release"] and found
    )
    assert kinds == ["Suspend", "Requeue", "Release"]
    wait_for("its next start", lambda: int(cluster.job(frozen)["Restarts"]) == 1 and cluster.state(frozen) != "PENDING")
    assert cluster.sql(f"select count(*) from leases where job = {frozen}") == [[0]], "it never had its GPU"
    cluster.ctl("scancel", str(never_stops))
    cluster.wait_done(frozen, timeout=60)
