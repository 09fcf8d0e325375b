"""Jobs on several hosts: one lane for all of a job's nodes, one stop step for all of its ranks."""

from __future__ import annotations

import json
from collections.abc import Callable

from cluster import RESULTS, TORCHRUN, TRAIN, wait_for
from harness import Cluster

ITERATIONS = 300


def two_hosts(cluster: Cluster, name: str, port: int, *options: str) -> int:
    """Submit a data-parallel job with one rank on each of two hosts."""
    launch = (
        f"srun {TORCHRUN} --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id={name} "
        f"--rdzv-endpoint=$(hostname):{port} {TRAIN} --model cnn --iterations {ITERATIONS} --iteration-s 0.02 "
        f"--seed 5 --out {RESULTS}/{name}.json"
    )
    return cluster.sbatch(
        f"--job-name={name}", "--nodes=2", "--ntasks-per-node=1", "--mem=2000", "--cpus-per-task=1",
        "--gres=gpu:4", *options, command=launch,
    )  # fmt: skip


def test_two_jobs_over_both_hosts_take_turns_in_step(cluster: Cluster, measured: Callable[[str], None]) -> None:
    jobs = [two_hosts(cluster, f"wide-{n}", 29500 + n, "--cadenza") for n in range(2)]
    cluster.wait_state(jobs[0], "RUNNING", "SUSPENDED")
    cluster.wait_state(jobs[1], "RUNNING", "SUSPENDED")
    lanes = [cluster.job(job)["NodeList"] for job in jobs]
    assert sorted(lanes) == ["node1-l1,node2-l1", "node[1-2]"] or sorted(lanes) == ["node[1-2]", "node[1-2]-l1"]
    cluster.wait_done(*jobs, timeout=240)
    for job in jobs:
        yields = cluster.sql(
            f"select host, count(*) from switches where kind = 'yield' and job = {job} group by host order by host"
        )
        assert [host for host, _ in yields] == ["node1", "node2"], cluster.why(job)
        assert yields[0][1] == yields[1][1]
    alone = cluster.train(
        "wide-alone", f"--model cnn --iterations {ITERATIONS} --seed 5", options=("--partition=plain", "--gres=gpu:2"),
        ranks=2,
    )  # fmt: skip
    cluster.wait_done(alone)
    digests = {name: cluster.result(name)["losses_sha256"] for name in ("wide-0", "wide-1", "wide-alone")}
    measured(f"losses of two ranks on two hosts with turns, twice, and of two ranks alone: {digests}")
    assert len(set(digests.values())) == 1


def test_a_step_on_a_further_host_is_of_the_start_that_slurm_says(cluster: Cluster) -> None:
    """Slurmd runs no prolog where a job is requeued as slurmctld starts, so a host may have the start before's file."""
    go, lie, noted = f"{RESULTS}/go-on", f"{RESULTS}/lie", "/run/cadenza/jobs"
    job = cluster.sbatch(
        "--nodes=2", "--mem=300", "--gres=gpu:1", "--cadenza",
        command=f"until [ -e {go} ]; do sleep 0.1; done; srun --ntasks-per-node=1 sleep 300 & "
        f"until [ -e {lie} ]; do sleep 0.1; done; "
        "CADENZA_START=$SLURM_JOB_ID.100 srun --overlap -N1 -w node2 sleep 300",
    )  # fmt: skip
    cluster.wait_state(job, "RUNNING")
    cluster.ctl("scontrol", "requeue", str(job), user="alice")
    wait_for(
        "its second start", lambda: [cluster.job(job)[key] for key in ("Restarts", "JobState")] == ["1", "RUNNING"]
    )
    (name,) = cluster.exec("node2", "ls", noted).stdout.split()
    restart, hosts, share, gpu, *rest = cluster.exec("node2", "cat", f"{noted}/{name}").stdout.split()
    assert restart == "1"
    before = " ".join(["0", hosts, share, str(3 - int(gpu)), *rest])
    cluster.exec("node2", "sh", "-c", f"echo {before} > {noted}/{name}")
    cluster.exec("ctl", "touch", go)

    def leases() -> list[tuple[int, list[int]]]:
        saved = json.loads(cluster.exec("node2", "cat", "/var/lib/cadenza/leases.json").stdout)
        return [(lease["restart"], lease["gpus"]) for lease in saved["leases"]]

    wait_for("its lease on node2", lambda: leases() == [(1, [int(gpu)])], 30)
    cluster.exec("ctl", "touch", lie)
    two = ("sh", "-c", f"[ $(pgrep -c -f 'slurmstepd: .{job}.[01].') = 2 ] && [ $(pgrep -c -x sleep) = 2 ]")
    wait_for("the step that lies on node2", lambda: cluster.exec("node2", *two, check=False).returncode == 0, 30)
    assert leases() == [(1, [int(gpu)])], "what a job says of its restart counts for nothing"
    cluster.ctl("scancel", str(job), user="alice")
