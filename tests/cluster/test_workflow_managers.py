"""What a workflow manager sees of a job that is requeued, by the means that it uses: the page Workflow managers."""

from __future__ import annotations

import pytest

from cluster import RESULTS, wait_for
from harness import Cluster

pytestmark = pytest.mark.sites
FINAL = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
BEGIN = f"echo begun >{RESULTS}/$SLURM_JOB_ID.begun"
GOES_ON = f"[ -z $SLURM_RESTART_COUNT ] || exit 3; {BEGIN}; sleep 900"
WRAPPER = """
on_exit() {{ printf -- ${{ret:=0}} >{exit}; exit $ret; }}
on_term() {{ set +e; kill $(jobs -p); }}
trap on_exit EXIT
trap on_term TERM INT USR2
{before}
{begin}
(sleep 900) & pid=$!
wait $pid || ret=$?
"""
"""The traps of Nextflow's .command.run (26.08), which writes the exit status that Nextflow waits for."""
ITS_OPTIONS = ("--no-requeue", "--gres=gpu:1", "--mem=500", "--cadenza", "--requeue")
"""Nextflow's own come before those of ``clusterOptions``."""
ADVISED = "trap 'trap - EXIT; exit 143' TERM"


def requeue(cluster: Cluster, job: int) -> set[str]:
    """Requeue a job that has begun; return the states that squeue and sacct name until it runs again or is over."""
    wait_for("its first line", lambda: cluster.ctl("cat", f"{RESULTS}/{job}.begun", check=False))
    seen = set()

    def came_back() -> bool:
        seen.update(cluster.ctl("squeue", "-h", "--states=all", f"--jobs={job}", "-o", "%T").split())
        seen.update(cluster.ctl("sacct", "-X", "-n", "--parsable2", f"--jobs={job}", "-o", "State").split()[:1])
        record = cluster.job(job)
        return record.get("Restarts") == "1" and record["JobState"] not in {"PENDING", "COMPLETING"}

    cluster.requeue(job)
    wait_for("its second start", came_back, interval=0.05)
    return seen


def test_a_requeued_job_is_in_no_state_that_ends_a_job(cluster: Cluster) -> None:
    job = cluster.sbatch("--cadenza", "--gres=gpu:1", "--mem=500", command=f"{BEGIN}; sleep 900")
    seen = requeue(cluster, job)
    assert "PENDING" in seen
    assert not seen & FINAL, seen


def test_sbatch_that_waits_returns_what_the_last_start_returned(cluster: Cluster) -> None:
    answer, number = f"{RESULTS}/waited.txt", f"{RESULTS}/waited.id"
    sbatch = f"sbatch --wait --parsable --cadenza --gres=gpu:1 --mem=500 --output=/dev/null --wrap='{GOES_ON}'"
    cluster.exec(
        "ctl", "sh", "-c", f"({sbatch} >{number} 2>/dev/null; echo $? >{answer}) >/dev/null 2>&1 &", user="alice"
    )
    job = int(wait_for("its number", lambda: cluster.ctl("cat", number, check=False).strip()))
    requeue(cluster, job)
    assert wait_for("its status", lambda: cluster.ctl("cat", answer, check=False).strip(), 90) == "3"


@pytest.mark.parametrize(("before", "written"), [("", "143"), (ADVISED, "")], ids=["as it is", "as advised"])
def test_nextflows_wrapper_ends_a_task_at_a_requeue_unless_its_trap_is_set_anew(
    cluster: Cluster, before: str, written: str
) -> None:
    path = f"{RESULTS}/{'advised' if before else 'plain'}"
    cluster.put(f"{path}.sh", WRAPPER.format(exit=f"{path}.exitcode", before=before, begin=BEGIN))
    requeue(cluster, cluster.sbatch(*ITS_OPTIONS, command=f"exec bash {path}.sh"))
    assert cluster.ctl("cat", f"{path}.exitcode", check=False).strip() == written
