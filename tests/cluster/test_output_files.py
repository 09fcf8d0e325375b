"""What Slurm does with the output of a job that comes back, and what a submission says and to whom."""

from __future__ import annotations

import pytest

from cluster import RESULTS, wait_for
from harness import Cluster

OLD = f"{RESULTS}/old.log"
SCRIPT = (
    'echo "script ${SLURM_RESTART_COUNT:-0}"; '
    f"srun --overlap --gres=none --output={RESULTS}/%j.step sh -c 'echo step ${{SLURM_RESTART_COUNT:-0}}'; sleep 900"
)
BOTH, SECOND = "script 0\nscript 1\n", "script 1\n"
LINE = "may make way for others"


def text(cluster: Cluster, path: str) -> str:
    """Return what a file has of the job: lines of slurmstepd about the requeue are Slurm's own."""
    lines = cluster.ctl("cat", path, check=False).splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(("script", "step", "an older run")))


def test_a_job_that_opted_in_keeps_its_output_and_its_users_word_stands(cluster: Cluster) -> None:
    cluster.exec("ctl", "sh", "-c", f"echo an older run >{OLD}; chown alice {OLD}")
    jobs = {
        cluster.sbatch("--gres=gpu:1", "--mem=500", *options, command=SCRIPT): kept
        for options, kept in (
            (("--cadenza",), BOTH),
            (('--comment={"cadenza":{}}',), BOTH),
            (("--cadenza", f"--output={OLD}"), BOTH),  # its first start begins anew, as without Cadenza
            (("--cadenza", "--open-mode=truncate"), SECOND),
            (("--cadenza=off",), SECOND),
            ((), SECOND),
        )
    }
    output = {job: cluster.job(job)["StdOut"] for job in jobs}
    for job in jobs:
        wait_for("its step", lambda job=job: text(cluster, f"{RESULTS}/{job}.step"))
        assert text(cluster, output[job]) == "script 0\n"
        cluster.requeue(job)
    for job, kept in jobs.items():
        wait_for("its second start", lambda job=job: "script 1" in text(cluster, output[job]))
        assert text(cluster, output[job]) == kept, cluster.job(job)
        steps = kept.replace("script", "step")
        wait_for("its second step", lambda job=job, steps=steps: text(cluster, f"{RESULTS}/{job}.step") == steps)


@pytest.mark.parametrize("quiet", [False, True])
def test_the_line_at_submission_is_no_answer_that_a_script_reads(cluster: Cluster, *, quiet: bool) -> None:
    words = ("--cadenza", "--gres=gpu:1", "--mem=500", "--hold", *(["--quiet"] if quiet else []), "--wrap=true")
    done = cluster.exec("ctl", "sbatch", "--parsable", *words, user="alice")
    assert done.stdout.strip().isdigit() or quiet
    assert (LINE in done.stderr) is not quiet
    done = cluster.exec("ctl", "sbatch", *words, user="alice")
    assert done.stdout.startswith("Submitted batch job ") or quiet
    assert len(done.stdout.splitlines()) == (0 if quiet else 1)
    assert done.stderr.count("\n") == (0 if quiet else 1)


def test_who_sits_at_a_terminal_is_not_moved_and_told_nothing(cluster: Cluster) -> None:
    for command in (("srun", "--cadenza"), ("salloc", "--cadenza")):
        done = cluster.exec("ctl", *command, "--gres=gpu:1", "--mem=500", "echo", "done", user="alice")
        assert done.stdout == "done\n"
        assert LINE not in done.stderr
