"""A training job grows into idle GPUs and gives them back when another job arrives; every sample is trained once."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from cluster import EXAMPLES, PYTHON, RESULTS, TORCHRUN, ClusterError, wait_for
from harness import Cluster

ELASTIC = f"{EXAMPLES}/elastic.py"
SAMPLES = 512
EPOCHS = 14
ITERATION_S = 0.4
"""Duration with one rank; with several, each rank has fewer samples and takes that much less."""
WIDE_ITERATION_S = 0.45
"""Duration for the job of several hosts, with one rank: long enough for it to grow again before it ends."""
GANDIVA = """
[policy]
share = "gandiva"
[gandiva]
pack = false
moves = false
[expert]
idle_s = 2.0
move_every_s = 1.0
"""


def sleeper(cluster: Cluster, name: str, gpus: int, *options: str) -> int:
    """Start a job that only takes its GPUs, and wait until it has them."""
    job: int = cluster.sbatch(
        f"--job-name={name}", f"--gres=gpu:{gpus}", "--mem=500", "--cadenza", *options, command="exec sleep 900"
    )
    cluster.wait_state(job, "RUNNING")
    return job


def elastic(cluster: Cluster, name: str, kept: str, *options: str) -> int:
    """Start the elastic training, with one GPU."""
    ranks = "--nproc-per-node=$SLURM_GPUS_ON_NODE"
    job: int = cluster.sbatch(
        f"--job-name={name}", "--gpus=1", "--mem=1500", "--cpus-per-task=1", *options,
        command=f"{TORCHRUN} --standalone {ranks} {script(name, kept)} --iteration-s {ITERATION_S}",
    )  # fmt: skip
    return job


def script(name: str, kept: str) -> str:
    return (
        f"{ELASTIC} --epochs {EPOCHS} --checkpoint-dir {kept}/{name} --samples-dir {kept}/{name}-samples "
        f"--out {RESULTS}/{name}.json"
    )


def arrival(cluster: Cluster, name: str, gpus: int, *options: str) -> tuple[int, float]:
    """Submit a job that needs most of a host; return it and the seconds until its first command. ``leave`` ends it."""
    cluster.exec("ctl", "rm", "-f", f"{RESULTS}/{name}.began", f"{RESULTS}/{name}.end")
    submitted = time.time()
    job = cluster.sbatch(
        f"--job-name={name}", f"--gres=gpu:{gpus}", "--mem=1500", "--cadenza", *options,
        command=f"date +%s.%N > {RESULTS}/{name}.began; until test -e {RESULTS}/{name}.end; do sleep 0.2; done",
    )  # fmt: skip

    def began() -> str:
        return cluster.exec("ctl", "cat", f"{RESULTS}/{name}.began", check=False).stdout.strip()

    return job, float(wait_for(f"{name} to begin", began, 120)) - submitted


def leave(cluster: Cluster, name: str) -> None:
    """Let a job of ``arrival`` end, now that the one that made way for it was seen to train."""
    cluster.exec("ctl", "touch", f"{RESULTS}/{name}.end")


def wait_size(cluster: Cluster, job: int, gpus: int, timeout: float = 200) -> None:
    """Wait until a job trains with this many GPUs and can be stopped again."""

    def runs() -> bool:
        found = cluster.job(job)
        assert found.get("JobState") in {"RUNNING", "SUSPENDED", "PENDING", "COMPLETING"}, (
            f"{found}\n{cluster.log(job)[:2000]}"
        )
        return f"gres/gpu={gpus}," in found.get("AllocTRES", "") + "," and bool(cluster.lease(job).get("checkpoints"))

    try:
        wait_for(f"job {job} with {gpus} GPUs", runs, timeout)
    except ClusterError as error:
        raise ClusterError(f"{error}; {cluster.why(job).get('summary')}\n{cluster.log(job)[:2000]}") from None


def configured(cluster: Cluster, *names: str) -> str:
    """Return settings of Slurm that a requeue depends on."""
    text = cluster.ctl("scontrol", "show", "config")
    found = {name: re.search(rf"{name}\s*=\s*([^,\s]+)", text) for name in names}
    return ", ".join(f"{name}={match[1] if match else 'default'}" for name, match in found.items())


def trained(cluster: Cluster, name: str, kept: str) -> Counter[tuple[int, int]]:
    """Return how often each sample of each epoch was trained, over all ranks and starts."""
    text = cluster.exec("ctl", "sh", "-c", f"cat {kept}/{name}-samples/*").stdout
    rows = ([int(word) for word in line.split()] for line in text.splitlines())
    return Counter((epoch, sample) for epoch, *samples in rows for sample in samples)


def check_training(cluster: Cluster, name: str, kept: str) -> dict[str, Any]:
    """Check that a job trained each sample of each epoch once, and as well as a run that was not resized."""
    found = cluster.result(name)
    counts = trained(cluster, name, kept)
    assert set(counts) == {(epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)}, "samples lost"
    assert set(counts.values()) == {1}, "samples repeated"
    alone = cluster.sbatch(
        "--job-name=elastic-alone", "--partition=plain", "--gres=gpu:1", "--mem=1500",
        command=f"{PYTHON} {script('elastic-alone', kept)}",
    )  # fmt: skip
    cluster.wait_done(alone)
    assert found["losses"] == pytest.approx(cluster.result("elastic-alone")["losses"], rel=0.02, abs=0.01)
    return found


def test_a_job_grows_when_gpus_are_idle_and_shrinks_when_a_job_arrives(
    cluster: Cluster, kept: str, measured: Callable[[str], None]
) -> None:
    cluster.configure(GANDIVA)
    name = "elastic"
    full = cluster.job(sleeper(cluster, "elastic-full", 4))["NodeList"]
    # The service knows that this host is full; Slurm would start the guest on its further lane all the same.
    away = f"--exclude={full},{full}-l1"
    filler = sleeper(cluster, "elastic-filler", 2)
    job = elastic(cluster, name, kept, "--cadenza=min_gpus=1,max_gpus=4,batch=global")
    wait_size(cluster, job, 2)
    cluster.ctl("scancel", str(filler))
    wait_size(cluster, job, 4)
    guest, waited = arrival(cluster, f"{name}-guest", 3, away)
    wait_size(cluster, job, 1)
    leave(cluster, f"{name}-guest")
    cluster.wait_done(guest, job)
    found = check_training(cluster, name, kept)
    assert [ranks for _, ranks in found["sizes"]][:4] == [1, 2, 4, 1]
    assert found["batch"] == "global"
    measured(
        f"a job that arrived while another one had all GPUs of the host began "
        f"{waited:.2f} s after its submission (iteration {ITERATION_S} s, "
        f"{configured(cluster, 'KillWait', 'requeue_delay')}); steps and ranks of the other: {found['sizes']}"
    )
    assert waited < 60


def test_a_job_of_two_hosts_gives_one_back_and_gets_it_again(
    cluster: Cluster, kept: str, measured: Callable[[str], None]
) -> None:
    cluster.configure(GANDIVA)
    name = "elastic-wide"
    nodes = "$SLURM_JOB_NUM_NODES"
    job = cluster.sbatch(
        f"--job-name={name}", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:4", "--mem=2000", "--cpus-per-task=1",
        "--cadenza=min_gpus=4,max_gpus=8",
        command=(
            f"srun --nodes={nodes} --ntasks={nodes} {TORCHRUN} --nnodes={nodes} --nproc-per-node=1 "
            f"--rdzv-backend=c10d --rdzv-id={name} --rdzv-endpoint=$(hostname):29510 "
            f"{script(name, kept)} --iteration-s {WIDE_ITERATION_S}"
        ),
    )  # fmt: skip
    wait_size(cluster, job, 8)
    guest, waited = arrival(cluster, f"{name}-guest", 4)
    wait_size(cluster, job, 4)
    leave(cluster, f"{name}-guest")
    cluster.wait_done(guest)
    wait_size(cluster, job, 8)
    cluster.wait_done(job)
    found = check_training(cluster, name, kept)
    assert [ranks for _, ranks in found["sizes"]] == [2, 1, 2]
    measured(
        f"a job that arrived while another one had both hosts began {waited:.2f} s after its submission "
        f"(iteration {WIDE_ITERATION_S} s on one host); steps and ranks of the other: {found['sizes']}"
    )
    assert waited < 60


def test_the_script_learns_the_choice_for_the_batch(cluster: Cluster) -> None:
    def log(*options: str) -> str:
        job = cluster.sbatch("--gres=gpu:1", "--mem=500", *options, command="echo batch=$CADENZA_BATCH.")
        cluster.wait_done(job)
        return cluster.log(job)

    assert "batch=global." in log("--cadenza")
    assert "batch=per-gpu." in log("--cadenza=max_gpus=2,batch=per-gpu")
    assert "batch=per-gpu." in log('--comment={"cadenza":{"batch":"per-gpu"}}')
    assert "batch=." in log()
