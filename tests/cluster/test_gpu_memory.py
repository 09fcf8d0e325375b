"""Training on GPUs that have memory: state leaves a GPU and comes back, and NVML tells the agent who is on it."""

from __future__ import annotations

import re

import pytest

from cluster import PYTHON, RESULTS, TRAIN, wait_for
from harness import Cluster

STATE_MB = 27
"""Parameters, gradients and momenta of the example's model; what its allocator takes for them does not fit twice."""
CONTEXT_MB = 4
"""Most that a job may keep on its GPU while it is out."""
WIDE = "--model wide"
ITERATIONS = 100
ONE_GPU = ("--gres=gpu:1", "--cadenza")
KEPT_MB = 40
KEEPER = (
    f"import runpy, sys, torch; kept = torch.empty({KEPT_MB} << 20, dtype=torch.uint8, device='simulated'); "
    "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""A training script that also has memory which it gives to nothing, and so keeps at each yield."""
SHORT_WAIT = """
[expert]
lease_wait_s = 8.0
"""
REQUEUES = "select reason from actions where job = {} and kind = 'Requeue' and ok = 1"
STRANGER = "import time, torch; kept = torch.ones(8, device='simulated'); print(kept, flush=True); time.sleep(600)"
GPU_WORDS = (
    "import pathlib, torch, simulated_gpu; gpu = simulated_gpu.open_file(pathlib.Path('/dev/shm/gpus/0')); "
    "{}; print(gpu.drop_copy)"
)


@pytest.fixture
def cluster(gpus: Cluster) -> Cluster:
    """The cluster with an empty queue."""
    gpus.reset()
    return gpus


def train(cluster: Cluster, name: str, seed: int, *options: str, iteration_s: float = 0.03) -> int:
    arguments = f"{WIDE} --seed {seed} --iterations {ITERATIONS} --iteration-s {iteration_s}"
    return cluster.train(name, arguments, options=options)


def digests(cluster: Cluster, name: str) -> tuple[str, str]:
    found = cluster.result(name)
    return found["losses_sha256"], found["parameters_sha256"]


@pytest.fixture(scope="module")
def alone(gpus: Cluster) -> dict[int, tuple[str, str]]:
    """The digests of the trainings without interruption, by seed."""
    jobs = {seed: train(gpus, f"memory-alone{seed}", seed, "--partition=plain", "--gres=gpu:1") for seed in (1, 2)}
    gpus.wait_done(*jobs.values())
    return {seed: digests(gpus, f"memory-alone{seed}") for seed in jobs}


def test_two_trainings_of_which_one_fits_on_their_gpu_change_no_bit(
    cluster: Cluster, alone: dict[int, tuple[str, str]]
) -> None:
    jobs = [train(cluster, f"memory{seed}", seed, *ONE_GPU) for seed in (1, 2)]
    cluster.wait_done(*jobs)
    # 1. Their whole state left the GPU and came back, and NVML showed it gone.
    for job in jobs:
        moved = cluster.sql(f"select bytes from switches where kind = 'yield' and job = {job}")
        kept = cluster.sql(f"select detail from events where kind = 'note' and job = {job}")
        assert moved
        assert min(nbytes for (nbytes,) in moved) >> 20 >= STATE_MB
        assert kept
        for (text,) in kept:
            assert (found := re.fullmatch(r"it keeps (\d+) MB on its GPUs while it is out", text)), text
            assert 1 <= int(found[1]) <= CONTEXT_MB
    # 2. They computed what they compute alone.
    assert {seed: digests(cluster, f"memory{seed}") for seed in (1, 2)} == alone


def test_one_copy_that_is_dropped_in_silence_changes_the_digests_of_its_job(
    cluster: Cluster, alone: dict[int, tuple[str, str]]
) -> None:
    """The comparison of the test before sees a yield that loses one storage."""
    loses = train(cluster, "memory-loses", 1, *ONE_GPU, iteration_s=0.08)
    wait_for("its first steps", lambda: int(cluster.lease(loses).get("step") or 0) > 0)
    assert cluster.exec("node1", PYTHON, "-c", GPU_WORDS.format("gpu.drop_copy = 1")).stdout == "1\n"
    keeps = train(cluster, "memory-keeps", 2, *ONE_GPU)
    cluster.wait_done(loses, keeps)
    assert cluster.exec("node1", PYTHON, "-c", GPU_WORDS.format("gpu")).stdout == "0\n"
    same = [one == other for one, other in zip(digests(cluster, "memory-loses"), alone[1], strict=True)]
    assert same == [False, False]
    assert digests(cluster, "memory-keeps") == alone[2]


def test_a_job_that_would_keep_memory_on_the_gpu_is_named_by_why_and_gives_its_further_lane_back(
    cluster: Cluster,
) -> None:
    cluster.configure(SHORT_WAIT)
    waits = cluster.train("waits", f"{WIDE} --iterations 100000", options=ONE_GPU)
    wait_for("its lease", lambda: cluster.lease(waits).get("state") == "held")
    small = f"--iteration-s 0.02 --iterations 100000 --out {RESULTS}/keeper.json"
    keeper = cluster.sbatch(*ONE_GPU, "--mem=1500", command=f'{PYTHON} -c "{KEEPER}" {TRAIN} {small}')
    full = (
        rf"takes turns with job {keeper}.*node1: GPU 0 has \d+ MB free of the \d+ MB that the job needs, "
        r"beside (\d+) MB that stay of the job that makes way"
    )
    found = wait_for("the reason", lambda: re.search(full, str(cluster.why(waits).get("summary"))))
    assert int(found[1]) >= KEPT_MB
    steps = cluster.lease(keeper)["step"]
    wait_for("the keeper to go on", lambda: cluster.lease(keeper)["step"] > steps + 10)
    # What it would keep is its own word: it must not have the GPU for longer than a job that cannot be stopped.
    behind = f"gives its place back: it cannot be stopped, and job {waits} waited"
    wait_for("the keeper's place", lambda: any(behind in text for (text,) in cluster.sql(REQUEUES.format(keeper))), 60)
    since_s = cluster.sql("select max(at_s) from rounds")[0][0]
    turns = f"select count(*) from leases where job = {waits} and from_s > {since_s}"
    wait_for("two turns of the job that waited", lambda: cluster.sql(turns)[0][0] >= 2, 90)


def test_an_agent_that_starts_with_a_stranger_on_its_gpu_names_it_and_gives_no_lease_there(cluster: Cluster) -> None:
    words = (PYTHON, "-c", STRANGER)
    pid = cluster.exec("node1", "sh", "-c", '"$@" >/tmp/stranger 2>&1 & echo $!', "sh", *words).stdout.strip()
    try:
        wait_for("its memory", lambda: cluster.exec("node1", "cat", "/tmp/stranger").stdout)
        cluster.service("node1", "restart", "cadenza-agent")
        waits = train(cluster, "memory-stranger", 1, *ONE_GPU)
        named = f"pid {pid} of no job that is known uses GPU 0 without a lease"
        wait_for("its name", lambda: named in str(cluster.why(waits).get("summary")))
        assert not cluster.lease(waits).get("step")
    finally:
        cluster.exec("node1", "kill", "-9", pid)
    wait_for("a first step", lambda: int(cluster.lease(waits).get("step") or 0) > 0)
