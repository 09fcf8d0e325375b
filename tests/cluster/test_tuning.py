"""CPUs of real jobs follow their profiles: up while they are free, back when a job needs them or Cadenza goes away.

The nodes claim 24 CPUs on a machine with fewer, so the agents give fractions of real ones: a CPU of Slurm's is
``len(cpus of the machine) / 24`` of those.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster import PYTHON, wait_for
from harness import Cluster

SLURM_CPUS = 24
SHARE = 6
"""The proportional share of one of a node's four GPUs."""
REAL = len(os.sched_getaffinity(0)) / SLURM_CPUS
POLICY = """
[policy]
allocate = "cadenza"
[expert]
size_pending = {}
[profiles]
directory = "/etc/cadenza/profiles"
"""
PROFILE = {
    "schema": "cadenza.profile/1", "iteration_s": 0.01, "gpu": "a100", "memory_gb_per_gpu": [0.5],
    "reference": {"gpus": 4, "cpus": SLURM_CPUS, "memory_gb": 31},
}  # fmt: skip
STEEP = {
    **PROFILE, "model": "steep", "cpus_per_gpu": [1, 2, 6, 12, 18], "throughput": [[1 / 6], [1 / 3], [1], [2], [3]],
}  # fmt: skip
FLAT = {**PROFILE, "model": "flat", "cpus_per_gpu": [1, 3, 6], "throughput": [[0.5], [1], [1]]}
SLOW = {**FLAT, "model": "slow", "iteration_s": 0.2}
"""Promises so little that no measurement on a busy machine takes a loan back."""
BAD = {
    "schema": ({**STEEP, "schema": "cadenza.profile/7"}, "cadenza.profile/7"),
    "nan": ({**STEEP, "throughput": [[math.nan], [1 / 3], [1], [2], [3]]}, "NaN is not a number"),
    "dip": ({**STEEP, "throughput": [[1 / 6], [1 / 3], [1], [2], [1.5]]}, "slower with 18 CPUs a GPU than with 12"),
    "type": ({**STEEP, "gpu": "h100"}, "is for h100, and its nodes have a100"),
}

LIMITS = """
import json, os, sys
from pathlib import Path

def words(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\\0")
    except OSError:
        return []

def quotas(pid):
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == "" or "cpu" in names.split(","):
            top = Path("/sys/fs/cgroup", names and "cpu")
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                for name in ("cpu.cfs_quota_us", "cpu.max"):
                    try:
                        value = (folder / name).read_text().split()[0]
                    except OSError:  # not there, or its job has just ended
                        continue
                    if value not in ("-1", "max"):
                        yield folder / name, int(value)

SCRIPTS = b"/train.py", b"/paced_job.py"
job = f"SLURM_JOB_ID={sys.argv[1]}".encode()
for pid in filter(str.isdigit, os.listdir("/proc")):
    if job in words(pid, "environ") and any(word.endswith(SCRIPTS) for word in words(pid, "cmdline")):
        allowed = os.sched_getaffinity(int(pid))
        limits = list(quotas(pid))
        quota = min([value / 100_000 for _, value in limits], default=None)
        file = str(limits[0][0]) if limits else ""
        found = {"pid": int(pid), "quota": quota, "file": file, "allowed": sorted(allowed)}
        print(json.dumps(found))
        break
"""
"""Prints the kernel's limits of the training process of a job, as a process on its node sees them."""


def limits(cluster: Cluster, job: int, node: str = "node1") -> dict[str, Any]:
    text = cluster.exec(node, "python3", "-c", LIMITS, str(job)).stdout
    return dict(json.loads(text)) if text.strip() else {}


def cpus(cluster: Cluster, job: int) -> float | None:
    """Return the real CPUs that a job's process can use at most; None without a process."""
    found = limits(cluster, job)
    if not found:
        return None
    return min(found["quota"] or math.inf, len(found["allowed"]))


def untouched(cluster: Cluster, job: int) -> bool:
    """Return whether a job's process is as Slurm started it: no quota, and every CPU (nothing binds jobs here)."""
    found = limits(cluster, job)
    return found["quota"] is None and len(found["allowed"]) == len(os.sched_getaffinity(0))


def row(cluster: Cluster, job: int) -> dict[str, Any]:
    return next((dict(one) for one in cluster.top()["jobs"] if one["id"] == job), {})


def has(cluster: Cluster, job: int) -> int:
    """Return a running job's CPUs in ``cadenza top``; 0 before they are known."""
    return sum(int(share[2]) for share in row(cluster, job).get("placement", ()))


def pace(cluster: Cluster, job: int, steps: int) -> float:
    """Return the seconds that each of a job's next steps takes, as seen from outside.

    It is measured from one report of the job's steps to another: a step read in between is older than its time.
    """

    def reported(least: int) -> tuple[int, float] | None:
        step = int(row(cluster, job)["step"])
        return (step, time.monotonic()) if step >= least else None

    earlier, _ = wait_for("a first step", lambda: reported(1), 60)
    first, began = wait_for("the next report", lambda: reported(earlier + 1), 60, interval=0.1)
    last, ended = wait_for(f"{steps} steps of job {job}", lambda: reported(first + steps), 60, interval=0.1)
    return (ended - began) / (last - first)


def gpu_job(cluster: Cluster, name: str, arguments: str, cpus: int, *options: str) -> int:
    """Start a training job with one GPU of node1."""
    wanted = (f"--cpus-per-task={cpus}", "--gres=gpu:1", "--nodelist=node1", *options)
    return cluster.train(name, arguments, options=wanted)


@pytest.fixture
def profiles(cluster: Cluster) -> Cluster:
    """The cluster with profiles; running jobs are tuned by them, pending ones left as they are."""
    put_profiles(cluster, steep=STEEP, slow=SLOW)
    cluster.configure(POLICY.format("false"))
    return cluster


def put_profiles(cluster: Cluster, **found: dict[str, Any]) -> None:
    cluster.exec("ctl", "sh", "-c", "rm -rf /etc/cadenza/profiles; mkdir /etc/cadenza/profiles")
    for name, profile in found.items():
        script = f"cat > /etc/cadenza/profiles/{name}.json <<'END'\n{json.dumps(profile)}\nEND"
        cluster.exec("ctl", "sh", "-c", script)


def test_a_job_has_more_while_it_is_alone_and_gives_it_back_before_the_next_one_starts(
    profiles: Cluster, measured: Callable[[str], None]
) -> None:
    cluster, work = profiles, "--model transformer --iterations 5000"
    plain = cluster.train("tuning-plain", work, options=("--partition=plain", "--gres=gpu:1"))
    job = gpu_job(cluster, "tuning-up", work, 1, "--cadenza=model=steep")
    wait_for("more CPUs", lambda: has(cluster, job) > SHARE, 60)
    wait_for("in force", lambda: (cpus(cluster, job) or 0) > SHARE * REAL, 20)
    assert "instead of 1 and 1500" in cluster.why(job)["actions"][-1]["reason"]
    assert cluster.job(job)["NumCPUs"] == "1", "Slurm's books stay as they are"
    fast = pace(cluster, job, 200)

    file = limits(cluster, job)["file"]
    look = f"cat {file}; {PYTHON} -c 'import os; print(len(os.sched_getaffinity(0)))'; sleep 600"
    second = cluster.sbatch(
        "--mem=1500", f"--cpus-per-task={SLURM_CPUS - 1}", "--gres=gpu:1", "--nodelist=node1", command=look
    )  # fmt: skip
    wait_for("its first lines", lambda: len(cluster.log(second).split()) == 2, 60)
    quota, seen = map(int, cluster.log(second).split())
    assert quota == pytest.approx(REAL * 100_000, abs=100), "what the first job lent was back by then"
    assert seen == len(os.sched_getaffinity(0))
    assert pace(cluster, job, 50) > 1.4 * fast
    wait_for("as much as the books say", lambda: has(cluster, job) == 1, 20)

    cluster.ctl("scancel", str(second))
    wait_for("more again", lambda: (cpus(cluster, job) or 0) > SHARE * REAL, 30)
    cluster.wait_done(plain, job)
    tuned, alone = (cluster.result(name)["losses_sha256"] for name in ("tuning-up", "tuning-plain"))
    measured(f"losses {tuned[:16]} tuned, {alone[:16]} alone")
    assert tuned == alone


def test_a_donor_has_its_own_again_on_release_and_when_the_service_is_killed(profiles: Cluster) -> None:
    cluster, most = profiles, SLURM_CPUS - SHARE
    donor, taker = (
        cluster.paced(
            f"tuning-{model}", iterations=100_000, iteration_s=0.05,
            options=(f"--cpus-per-task={cpus}", "--gres=gpu:1", "--nodelist=node1", f"--cadenza=model={model}"),
        )
        for model, cpus in (("slow", most), ("steep", SHARE))
    )  # fmt: skip

    def lent() -> bool:
        return (cpus(cluster, donor) or most) < most * REAL < (cpus(cluster, taker) or 0) + SHARE * REAL

    wait_for("the donor lends", lent, 60)
    assert (cpus(cluster, donor) or 0) + (cpus(cluster, taker) or 0) <= SLURM_CPUS * REAL + 0.001

    try:
        assert "cadenzad is paused: /etc/cadenza/STOP" in cluster.cadenza("release", "--all").stderr
        wait_for("Slurm's values", lambda: untouched(cluster, donor) and untouched(cluster, taker), 30)
        wait_for("Slurm's values in top", lambda: (has(cluster, donor), has(cluster, taker)) == (most, SHARE), 20)
    finally:
        cluster.exec("ctl", "rm", "-f", "/etc/cadenza/STOP")
    wait_for("the donor lends again", lent, 60)

    cluster.signal("ctl", "KILL", "cadenzad")
    cluster.service("ctl", "stop", "cadenzad")
    wait_for("Slurm's values", lambda: untouched(cluster, donor) and untouched(cluster, taker), 30)
    assert {cluster.state(donor), cluster.state(taker)} == {"RUNNING"}
    cluster.service("ctl", "start", "cadenzad")
    wait_for("the donor lends to the end", lent, 60)


def later(cluster: Cluster, model: str, cpus: int) -> int:
    """Submit a job that stays pending."""
    return gpu_job(cluster, f"tuning-{model}", "", cpus, "--begin=now+1hour", f"--cadenza=model={model}")


def asks(cluster: Cluster, job: int, cpus: int) -> None:
    """Wait until a pending job asks Slurm for so many CPUs."""
    wait_for(f"job {job} asks for {cpus} CPUs", lambda: cluster.job(job)["NumCPUs"] == str(cpus), 30)
    assert cluster.state(job) == "PENDING"


def note(cluster: Cluster, job: int) -> str:
    """Return the note on a job's profile: its source, or the reason for having none; "" before the first round."""
    return str((cluster.why(job).get("job") or {}).get("profile_note", ""))


def test_pending_jobs_ask_for_what_their_profile_says_and_bad_profiles_are_named(cluster: Cluster) -> None:
    bad = {f"bad-{name}": {**profile, "model": f"bad-{name}"} for name, (profile, _) in BAD.items()}
    put_profiles(cluster, steep=STEEP, flat=FLAT, **bad)
    cluster.configure(POLICY.format("true"))
    runs = gpu_job(cluster, "tuning-runs", "--iterations 100000 --iteration-s 0.05", 2, "--cadenza=model=bad-nan")
    steep, flat = later(cluster, "steep", 2), later(cluster, "flat", 12)
    refused = {later(cluster, f"bad-{name}", 2): says for name, (_, says) in BAD.items()}
    asks(cluster, steep, SHARE)
    asks(cluster, flat, 3)
    for job, says in refused.items():
        reason = wait_for(f"a note on job {job}", lambda job=job: note(cluster, job), 20)
        assert reason.startswith("has its proportional share")
        assert says in reason
        assert cluster.job(job)["NumCPUs"] == "2"
    wait_for("its proportional share", lambda: has(cluster, runs) == SHARE, 60)
    wait_for("in force", lambda: cpus(cluster, runs) == pytest.approx(SHARE * REAL), 20)
    assert "NaN is not a number" in note(cluster, runs)
