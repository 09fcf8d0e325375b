"""Real training jobs run packed on the same GPUs if that pays, and a pair that loses is taken apart again.

The GPUs are stand-ins: kernels hold a lock for each GPU of their job (see examples/profile/pace.py), so jobs that share
GPUs slow each other down when their kernels meet. One job is bound by its CPU, which decodes images; the other
computes little between launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.profiles import write_profiles
from cadenza.policies.sharing.state.settings import GandivaSettings

from cluster import EXAMPLES as ALL_EXAMPLES
from cluster import PYTHON, wait_for
from harness import Cluster

EXAMPLES = f"{ALL_EXAMPLES}/profile"
LOCKS = "/var/tmp/gpu-locks"
PROFILES = "/etc/cadenza/profiles"
WINDOW_S, WINDOWS = 5.0, 3
MARGIN = GandivaSettings().pack_margin
SETTINGS = f"""
[sharing]
slice_s = {WINDOW_S * WINDOWS}
[policy]
share = "gandiva"
gpu_memory_gb = ["=16"]
[gandiva]
moves = false
elastic = false
[expert]
measure_s = {WINDOW_S}
"""
IMAGES = "images.py --data /home/shared/images --batch 4 --device-ms 40 --busy 0.5"
TEXT = "text.py --device-ms 60 --busy 0.3"
BUSY = "text.py --device-ms 400"
"""Its GPU computes nearly all the time, so a second one finds nothing to use."""
PAIRS = "model,other,speed,other_speed\nidle,idle-too,0.95,0.95\n"
"""A wrong measurement of a pair of profiles, which recommends to pack them."""


def profile(model: str) -> Profile:
    """Return a profile of a model that leaves its GPUs idle."""
    return Profile(
        model, 0.05, (1.0,), (1.0,), ((1.0,),), gpu_memory_peak_gb=4.0, gpu_memory_low_gb=1.0, gpu_utilization=0.2
    )  # fmt: skip


@pytest.fixture
def packing(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with Gandiva's packing, profiles of three models and a table of pairs."""
    cluster.exec("node1", "mkdir", "-p", "-m", "1777", LOCKS)
    cluster.exec("ctl", "mkdir", "-p", PROFILES)
    library = write_profiles({name: profile(name) for name in ("idle", "idle-too", "photos")})
    files = {"all.json": library, "pairs.csv": PAIRS}
    for name, text in files.items():
        cluster.exec("ctl", "sh", "-c", 'printf "%s" "$2" > "$1"', "sh", f"{PROFILES}/{name}", text)
    cluster.configure(SETTINGS)
    yield cluster
    cluster.exec("ctl", "rm", "-f", *(f"{PROFILES}/{name}" for name in files))


def start(cluster: Cluster, lane: str, model: str, script: str) -> int:
    """Start a job on all GPUs of one lane of node1."""
    return cluster.sbatch(
        f"--job-name={model}", "--mem=1500", "--gres=gpu:4", "--nodelist", lane, f"--cadenza=model={model}",
        command=f"GPU_LOCKS={LOCKS} {PYTHON} {EXAMPLES}/{script}",
    )  # fmt: skip


def start_two(cluster: Cluster, first: tuple[str, str], second: tuple[str, str]) -> list[int]:
    """Start two jobs on the same GPUs, the second once the first one trains."""
    jobs = [start(cluster, "node1", *first)]
    wait_for("the first to train", lambda: (rows(cluster, jobs).get(jobs[0], {}).get("step") or 0) > 5, 120)
    return [*jobs, start(cluster, "node1-l1", *second)]


def rows(cluster: Cluster, jobs: list[int]) -> dict[int, dict[str, Any]]:
    """Return the rows of `cadenza top` for these jobs; ``at_s`` is the time of the round."""
    top = cluster.top()
    return {row["id"]: {**row, "at_s": top["at_s"]} for row in top["jobs"] if row["id"] in jobs}


def both_hold(cluster: Cluster, jobs: list[int]) -> dict[int, dict[str, Any]]:
    """Return both rows while both hold the GPUs, else nothing."""
    found = rows(cluster, jobs)
    return found if [row["lease"] for row in found.values()] == ["held", "held"] else {}


def actions(cluster: Cluster, kind: str, jobs: list[int]) -> list[tuple[float, str]]:
    """Return when such actions left for any of these jobs, and why."""
    names = ",".join(map(str, jobs))
    found = cluster.sql(f"select at_s, reason from actions where kind = '{kind}' and ok = 1 and job in ({names})")
    return [(at_s, reason) for at_s, reason in found]


def packed(cluster: Cluster, jobs: list[int]) -> float:
    """Wait for the pack of two jobs, and return when it was ordered."""
    wait_for(
        f"a pack; {[cluster.why(job).get('summary') for job in jobs]}", lambda: actions(cluster, "Pack", jobs), 240
    )  # fmt: skip
    return actions(cluster, "Pack", jobs)[0][0]


def alone_s(cluster: Cluster, job: int) -> float:
    """Return the job's iteration time when it had its GPUs alone, as the service remembers it."""
    return float(cluster.sql(f"select before_s from effects where kind = 'pack' and job = {job}")[0][0])


def together(cluster: Cluster, jobs: list[int], seconds: float) -> float:
    """Return the speed of two packed jobs over that of turns, by the steps that they complete within a time."""
    first = wait_for("both at once", lambda: both_hold(cluster, jobs), 60)
    last = wait_for(
        f"{seconds} s together",
        lambda: (now := both_hold(cluster, jobs)) and now[jobs[0]]["at_s"] - first[jobs[0]]["at_s"] >= seconds and now,
        90,
    )
    passed_s = last[jobs[0]]["at_s"] - first[jobs[0]]["at_s"]
    return sum((last[job]["step"] - first[job]["step"]) / passed_s * alone_s(cluster, job) for job in jobs)


def test_two_jobs_that_leave_their_gpus_idle_run_at_once(packing: Cluster, measured: Callable[[str], None]) -> None:
    jobs = start_two(packing, ("photos", IMAGES), ("idle", TEXT))
    packed(packing, jobs)
    speed = together(packing, jobs, 8.0)
    sentence = wait_for(
        "a measurement", lambda: "turns do" in (text := packing.why(jobs[1]).get("summary", "")) and text, 60
    )  # fmt: skip
    measured(f"packed over turns: {speed:.2f} by the steps completed (wanted: 1.3); cadenza why: {sentence}")
    assert speed > 1 + MARGIN
    assert actions(packing, "Unpack", jobs) == []
    packing.service("ctl", "restart", "cadenzad")
    before = packing.top()["round"]
    wait_for("rounds of the new service", lambda: packing.top()["round"] > before + 3, 60)
    assert both_hold(packing, jobs), "a pack outlives the service"
    assert len(actions(packing, "Pack", jobs)) == 1
    packing.configure(SETTINGS.replace('share = "gandiva"', 'share = "timeslice"'))
    wait_for("turns again", lambda: not both_hold(packing, jobs), 60)


def test_a_losing_pair_that_a_wrong_table_recommended_is_undone(
    packing: Cluster, measured: Callable[[str], None]
) -> None:
    jobs = start_two(packing, ("idle", BUSY), ("idle-too", BUSY))
    began = packed(packing, jobs)
    ((ended, reason),) = wait_for("the undo", lambda: actions(packing, "Unpack", jobs), 180)
    measured(f"undone after {ended - began:.1f} s; {WINDOWS} windows are {WINDOWS * WINDOW_S:.0f} s: {reason}")
    assert ended - began <= WINDOWS * WINDOW_S + 10, "a resume and a round or two go with it"
    assert "of what turns do" in reason
    wait_for("one at a time", lambda: not both_hold(packing, jobs), 30)
    ((verdict, gain),) = {tuple(row) for row in packing.sql(
        f"select verdict, round(gain, 1) from effects where kind = 'pack' and job in ({jobs[0]}, {jobs[1]})"
    )}  # fmt: skip
    assert verdict == "undone"
    assert gain <= 1 + MARGIN
    assert len(actions(packing, "Pack", jobs)) == 1, "the pair is remembered"
