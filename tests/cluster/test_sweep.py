"""A sweep on the real Slurm: turns for all, losers canceled, the best preferred, a killed controller replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster import CADENZA, PYTHON, wait_for
from harness import Cluster

SCRIPT = "/opt/cadenza/examples/sweep/train.py"
LIST = "lr,decay\n" + "".join(f"{lr},{decay}\n" for lr in ("1.0", "0.001") for decay in ("0", "0.05", "0.1"))
"""Six configurations for one GPU of each host in two lanes; the first learns best by far."""
GOOD = {"lr": "1.0", "decay": "0"}


def start(cluster: Cluster, folder: str) -> None:
    """Start the controller in the background, as a user would in tmux."""
    cluster.ctl("sh", "-c", f'mkdir -p {folder} && printf "%s" "$1" > {folder}/six.csv', "sh", LIST, user="alice")
    words = (
        f"setsid {CADENZA} sweep run {folder}/six.csv --dir {folder}/sweep --target 0.8 --set first=20 --set least=3 "
        "--set reduction=3 --set top=1 --set poll-s=0.2 --set slurm-s=1 --json -- "
        "--gres=gpu:4 --mem=300 --cpus-per-task=1 "
        f"--chdir=/home/shared '--wrap={PYTHON} {SCRIPT} --lr {{lr}} --decay {{decay}} --step-s 0.04 --steps 600' "
        f">{folder}/out 2>&1 </dev/null & echo $! >{folder}/pid"
    )
    cluster.ctl("sh", "-c", words, user="alice")


def status(cluster: Cluster, folder: str) -> dict[str, Any]:
    done = cluster.exec("ctl", CADENZA, "sweep", "status", f"{folder}/sweep", "--json", user="alice", check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def seen(cluster: Cluster, folder: str) -> int:
    return sum(trial["step"] is not None for trial in status(cluster, folder).get("trials", []))


def test_six_configurations_are_searched_across_a_killed_controller(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = f"/home/shared/{tmp_path_factory.getbasetemp().name}-sweep"
    start(cluster, folder)
    wait_for("a first result", lambda: seen(cluster, folder) >= 1, 90)
    cluster.ctl("sh", "-c", f"kill -9 $(cat {folder}/pid)", user="alice")
    before = {trial["number"]: trial["job"] for trial in status(cluster, folder)["trials"]}
    done = cluster.exec(
        "ctl", CADENZA, "sweep", "run", f"{folder}/sweep", "--json", user="alice", check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    after = status(cluster, folder)
    assert {trial["number"]: trial["job"] for trial in after["trials"]} | before == {
        trial["number"]: trial["job"] for trial in after["trials"]
    }, "no configuration was submitted twice"
    assert after["reached"]["trial"] == 0
    assert after["best"]["config"] == GOOD
    assert after["trials"][0]["state"] == "done", "the trial that reached the target runs to its end"
    assert {trial["state"] for trial in after["trials"][1:]} == {"stopped"}
    assert all(trial["why"] for trial in after["trials"][1:])
    assert {cluster.state(trial["job"]) for trial in after["trials"][1:] if trial["job"]} <= {"CANCELLED", "GONE"}
    assert seen(cluster, folder) >= 3


def test_a_failed_configuration_is_shown_with_its_own_last_lines(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = f"/home/shared/{tmp_path_factory.getbasetemp().name}-failing"
    words = (
        f"mkdir -p {folder} && echo lr >{folder}/one.csv && echo 0.1 >>{folder}/one.csv && "
        f"{CADENZA} sweep run {folder}/one.csv --dir {folder}/sweep --set poll-s=0.2 --set slurm-s=0.5 "
        f"--set share=no -- --mem=100 --chdir={folder} '--wrap=echo lr {{lr}}; echo no data >&2; exit 7'"
    )
    done = cluster.exec("ctl", "sh", "-c", words, user="alice", check=False)
    (trial,) = status(cluster, folder)["trials"]
    said = f"(exit code 7; slurm-{trial['job']}.out: lr 0.1 | no data)"
    assert f"configuration 0: failed, no value reported {said}" in done.stdout, done.stdout + done.stderr
