"""The flag, the comment and refusals at submission."""

from __future__ import annotations

import json

import pytest

from harness import Cluster


def comment(cluster: Cluster, job_id: int) -> dict[str, object]:
    text = cluster.ctl("squeue", "-h", "-j", str(job_id), "-o", "%k").strip()
    return dict(json.loads(text)) if text.startswith("{") else {"text": text}


def test_the_flag_becomes_json_in_the_comment(cluster: Cluster) -> None:
    job = cluster.sbatch(
        "--gres=gpu:1", "--mem=500", "--hold", "--cadenza=min_gpus=1,max_gpus=2,model=res18",
        '--comment={"site":{"ticket":7}}', command="true",
    )  # fmt: skip
    options = comment(cluster, job)
    assert options["site"] == {"ticket": 7}
    assert options["cadenza"] == {"v": 1, "share": True, "min_gpus": 1, "max_gpus": 2, "model": "res18"}


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
