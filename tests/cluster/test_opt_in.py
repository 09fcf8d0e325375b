"""The flag, the comment and refusals at submission."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import PYTHON, RESULTS, wait_for
from harness import PACED_JOB, Cluster


def comment(cluster: Cluster, job_id: int) -> dict[str, object]:
    text = cluster.ctl("squeue", "-h", "-j", str(job_id), "-o", "%k").strip()
    return dict(json.loads(text)) if text.startswith("{") else {"text": text}


def test_the_flag_becomes_json_in_the_comment(cluster: Cluster) -> None:
    job = cluster.sbatch(
        "--gres=gpu:1", "--mem=500", "--hold", "--cadenza=min_gpus=1,max_gpus=2,model=res18,checkpoints=no",
        '--comment={"site":{"ticket":7}}', command="true",
    )  # fmt: skip
    options = comment(cluster, job)
    assert options["site"] == {"ticket": 7}
    assert options["cadenza"] == {
        "v": 1, "share": True, "checkpoints": False, "min_gpus": 1, "max_gpus": 2, "model": "res18",
    }  # fmt: skip
    seen = wait_for("the job in a round", lambda: (cluster.why(job).get("job") or {}).get("options"))
    assert seen["checkpoints"] is False, "the policy counts it as one that stays"


def test_a_job_without_the_flag_keeps_its_comment(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=gpu:1", "--mem=500", "--hold", "--comment=mine, all mine", command="true")
    assert comment(cluster, job) == {"text": "mine, all mine"}


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--cadenza=min_gpu=1", "min_gpu"),
        ("--cadenza=min_gpus=many", "many"),
        ("--cadenza=min_gpus=4,max_gpus=2", "max_gpus"),
        ("--cadenza=share=perhaps", "perhaps"),
        ('--comment={"cadenza":{"v":1,"min_gpus":"x"}}', "min_gpus"),
    ],
)
def test_bad_values_are_refused_at_submission(cluster: Cluster, flag: str, word: str) -> None:
    done = cluster.sbatch("--gres=gpu:1", "--mem=500", flag, command="true", check=False)
    assert done.returncode != 0
    assert word in done.stderr
    assert "cadenza" in done.stderr


def test_the_help_names_the_owner_of_the_flag(cluster: Cluster) -> None:
    for command in ("sbatch", "srun", "salloc"):
        assert "[cadenza]" in cluster.ctl(command, "--help")


@pytest.mark.parametrize(
    "constraint", ["--constraint=lane1", "--constraint=(lane1)", "--constraint=[lane0|lane1]", "--prefer=lane1"]
)
def test_a_job_that_does_not_share_cannot_ask_for_another_lane(cluster: Cluster, constraint: str) -> None:
    done = cluster.sbatch("--gres=gpu:1", "--mem=500", constraint, command="true", check=False)
    assert done.returncode != 0
    assert "cannot be combined with lane0" in done.stderr
    shares = cluster.sbatch("--gres=gpu:1", "--mem=500", "--hold", "--cadenza", "--constraint=lane1", command="true")
    assert cluster.job(shares)["Features"] == "lane1"


def update(cluster: Cluster, job: int, change: str, user: str = "alice") -> str:
    """Change a job as its owner; return what Slurm says if it refuses."""
    done = cluster.exec("ctl", "scontrol", "update", f"JobId={job}", change, user=user, check=False)
    return done.stderr if done.returncode else ""


def test_an_owner_cannot_leave_lane_0_by_an_update_either(cluster: Cluster) -> None:
    """The real slurmctld shows the script the job's own comment, constraint, state and owner."""
    plain = cluster.sbatch("--gres=gpu:1", "--mem=500", "--hold", command="true")
    assert cluster.job(plain)["Features"] == "lane0"
    assert "cannot be combined with lane0" in update(cluster, plain, "Features=lane1")
    assert not update(cluster, plain, "Features=")
    assert cluster.job(plain)["Features"] == "lane0"
    shares = cluster.sbatch("--gres=gpu:1", "--mem=500", "--hold", "--cadenza", command="true")
    assert cluster.job(shares)["Features"] == "(null)"
    assert not update(cluster, shares, 'Comment={"x":1,"cadenza":{"held":true,"why":"x","priority":1}}')
    assert comment(cluster, shares) == {"cadenza": {"v": 1, "share": True, "priority": 1}, "x": 1}
    assert "unknown key" in update(cluster, shares, 'Comment={"cadenza":{"nice":1}}')
    assert not update(cluster, shares, "Comment=no more")
    assert cluster.job(shares)["Features"] == "lane0", "it no longer shares"
    assert comment(cluster, shares) == {"cadenza": {"v": 1, "share": False}, "comment": "no more"}
    assert not update(cluster, plain, "Features=lane1", user="root"), "an admin may"
    assert cluster.job(plain)["Features"] == "lane1"


def test_a_hostile_name_is_text_in_every_view(cluster: Cluster) -> None:
    name = "[/]\x1b]0;x\x07\x1b[2J"
    job = cluster.sbatch("--gres=gpu:1", "--mem=500", "--hold", "--cadenza", f"--job-name={name}", command="true")
    wait_for("the job in a round", lambda: any(row["id"] == job for row in cluster.top()["jobs"]))
    for words in (("top", "--once"), ("why", str(job)), ("doctor",)):
        done = cluster.cadenza(*words, check=False)
        assert "Traceback" not in done.stderr
        assert not {"\x1b", "\x07"} & set(done.stdout), words
    assert "[/]" in cluster.cadenza("top", "--once").stdout, "markup is text"


def test_the_library_of_addresses_that_stay_is_in_the_processes_that_ask_for_it(cluster: Cluster) -> None:
    """Those of the script's steps, too, once; and not in those of a job that the job submits."""
    library = "libcadenza-addresses.so"
    look = f"printenv CADENZA_ADDRESSES NCCL_GRAPH_REGISTER LD_PRELOAD; grep -c 'r-xp.*{library}' /proc/self/maps"
    inner = f"sbatch --wait --quiet --mem=100 --output={RESULTS}/inner.log --wrap='{look}; echo end'"
    job = cluster.sbatch(
        "--gres=gpu:1", "--mem=500", "--cadenza=graphs",
        command=f'{look}; srun --mem=100 sh -c "{look}"; {inner}; true',
    )  # fmt: skip
    cluster.wait_done(job)
    script, step = cluster.log(job).split("stay\n")[1:]
    assert script == step
    nccl, preload, mapped = script.splitlines()
    assert (nccl, Path(preload).name, mapped) == ("0", library, "1"), "resolved, and no list"
    assert cluster.ctl("cat", f"{RESULTS}/inner.log") == "0\n0\nend\n", "NCCL's variable, and no library"


def test_a_job_that_asks_for_it_says_at_its_end_what_sharing_took(cluster: Cluster) -> None:
    jobs = {
        word: cluster.paced(f"sums-{number}", iterations=20, options=("--gres=gpu:1", f"--cadenza={word}"))
        for number, word in enumerate(("summary", "share"))
    }
    for job in jobs.values():
        cluster.wait_done(job)
    found = {
        word: [line for line in cluster.log(job).splitlines() if " ends after " in line] for word, job in jobs.items()
    }
    assert [line.partition(" ends ")[0] for line in found["summary"]] == [f"cadenza: job {jobs['summary']}"]
    assert found["share"] == []


def test_a_late_job_leaves_its_gpus_to_others_until_it_attaches(cluster: Cluster, kept: str) -> None:
    # 1. A job has the GPUs, and one on a further lane starts all the same.
    holder = cluster.paced("late-holder", iterations=3000, options=("--gres=gpu:4", "--cadenza", "--nodelist=node1"))
    wait_for("the holder's lease", lambda: cluster.lease(holder).get("state") == "held")
    begin = f"{kept}/begin"
    late = cluster.sbatch(
        "--gres=gpu:4", "--mem=500", "--cadenza=late", "--nodelist=node1-l1",
        command=f"echo imports; while [ ! -e {begin} ]; do sleep 0.05; done; exec {PYTHON} {PACED_JOB} --iterations 20",
    )  # fmt: skip
    wait_for("the late job's own output", lambda: "imports" in cluster.log(late))
    # 2. It takes no turns, so that the holder goes on beyond its slice.
    wait_for("a job that has not asked", lambda: cluster.lease(late).get("late"))
    assert "has not asked for it yet" in cluster.why(late)["summary"]
    since_s = cluster.lease(holder)["held_s"]
    wait_for("two slices", lambda: cluster.lease(holder).get("held_s", 0.0) > since_s + 2.0)
    # 3. Once it attaches it says on its output who has the GPUs, and gets its turn.
    cluster.ctl("touch", begin)
    wait_for("what it waits for", lambda: f"job {late} waits for GPU 0,1,2,3 of node1" in cluster.log(late))
    assert f"job {holder}" in cluster.log(late)
    cluster.wait_done(late)
