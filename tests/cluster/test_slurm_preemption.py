"""Slurm preempts managed jobs, by QOS and by partition: requeued once or canceled, and nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import wait_for
from harness import Cluster

pytestmark = pytest.mark.sites
CONF = "/etc/slurm/slurm.conf"
SETTINGS = '[guard]\npartitions = ["shared", "urgent"]\n[sharing]\nslice_s = 4.0\n'
URGENT = {"qos": "--qos=high", "partition_prio": "--partition=urgent"}


def reconfigure(cluster: Cluster, *changes: str) -> None:
    for change in changes:
        cluster.ctl("sed", "-i", change, CONF)
    cluster.ctl("scontrol", "reconfigure")


@pytest.fixture(params=[("qos", "REQUEUE"), ("partition_prio", "REQUEUE")], ids=str)
def preempting(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, str]]:
    """The cluster with one kind of preemption, and the option of a job that preempts others."""
    kind, mode = request.param
    cluster.ctl("sacctmgr", "-iQ", "modify", "qos", "high", "set", "Preempt=normal")
    cluster.ctl("cp", CONF, "/tmp/slurm.conf")
    cluster.ctl("cp", "/etc/cadenza/lua.conf", "/tmp/lua.conf")
    urgent = "PartitionName=urgent Nodes=node1,node2 PriorityTier=9 DefMemPerCPU=100 PreemptMode=OFF State=UP"
    reconfigure(
        cluster, f"s/^PreemptMode=.*/PreemptMode={mode}\\nPreemptType=preempt\\/{kind}/", f"$a{urgent}"
    )  # fmt: skip
    cluster.ctl("sed", "-i", "s/^partitions=.*/partitions=shared,urgent/", "/etc/cadenza/lua.conf")
    cluster.configure(SETTINGS)
    yield cluster, URGENT[kind]
    cluster.reset()
    cluster.ctl("cp", "/tmp/slurm.conf", CONF)
    cluster.ctl("cp", "/tmp/lua.conf", "/etc/cadenza/lua.conf")
    cluster.ctl("scontrol", "reconfigure")


def victims(cluster: Cluster, kept: str) -> tuple[int, int]:
    """Start a job with checkpoints on lane 0 of node1 and one behind it; return them once the first has yielded."""
    options = ("--gres=gpu:4", "--cadenza")
    checkpoint = f"--checkpoint {kept}/step"
    first = cluster.paced("first", checkpoint, iterations=600, options=(*options, "--nodelist=node1"))
    wait_for("the first job's lease", lambda: cluster.lease(first).get("checkpoints"))
    second = cluster.paced("second", iterations=400, options=(*options, "--nodelist=node1-l1"))
    wait_for("the first job's yield", lambda: cluster.lease(first).get("state") == "yielded")
    return first, second


def preempt(cluster: Cluster, option: str) -> int:
    return cluster.sbatch("--gres=gpu:4", "--mem=100", "--nodelist=node1", option, user="bob", command="sleep 1")


def check_requeued(cluster: Cluster, job: int, by: int) -> None:
    """Check that a job was requeued once, that its old lease is gone, that ``why`` has the cause, and that it ends."""
    cluster.wait_done(by)
    row = wait_for(
        f"a record of the requeue of job {job}",
        lambda: cluster.sql(f"select detail from events where kind = 'requeued' and job = {job}"),
    )
    kind = cluster.job(by)
    cause = f"job {by} (QOS {kind['QOS']}, partition {kind['Partition']}) then started on its nodes"
    assert row == [[f"not by Cadenza; {cause}"]]
    assert cause in cluster.cadenza("why", str(job)).stdout
    assert cluster.sql(f"select count(*) from events where kind = 'finished' and job = {job} and restart = 0") == [[1]]
    cluster.wait_done(job)
    assert cluster.job(job)["Restarts"] == "1"


def test_a_yielded_job_is_requeued_once(preempting: tuple[Cluster, str], kept: str) -> None:
    cluster, option = preempting
    first, second = victims(cluster, kept)
    cluster.wait_state(first, "SUSPENDED")
    high = preempt(cluster, option)
    check_requeued(cluster, first, high)
    cluster.wait_done(second)
    assert cluster.job(second)["Restarts"] == "0", "the further lane has room for both in Slurm's books"


def test_a_running_job_is_requeued_once(preempting: tuple[Cluster, str], kept: str) -> None:
    cluster, option = preempting
    options = ("--gres=gpu:4", "--cadenza", "--nodelist=node1")
    job = cluster.paced("runs", f"--checkpoint {kept}/step", iterations=150, options=options)
    wait_for("its lease", lambda: cluster.lease(job).get("state") == "held")
    check_requeued(cluster, job, preempt(cluster, option))


def test_a_job_in_a_move_is_requeued_once(preempting: tuple[Cluster, str], kept: str) -> None:
    cluster, option = preempting
    job = cluster.paced("moves", f"--checkpoint {kept}/step", iterations=200, options=("--gres=gpu:4", "--cadenza"))
    wait_for("a job that saves checkpoints", lambda: cluster.lease(job).get("checkpoints"))
    assert cluster.job(job)["NodeList"] == "node1"
    cluster.cadenza("move", str(job), "--to", "node2")
    high = preempt(cluster, option)
    cluster.wait_done(high, job)
    assert cluster.job(job)["Restarts"] == "1"
    assert cluster.job(job)["NodeList"] == "node2"


@pytest.mark.parametrize("preempting", [("qos", "REQUEUE")], ids=str, indirect=True)
def test_a_job_with_a_keeper_goes_on_from_where_it_yielded(preempting: tuple[Cluster, str], kept: str) -> None:
    """Slurm kills it without a signal while it is suspended: the checkpoint comes from its host copy, before that."""
    cluster, option = preempting
    cluster.configure(SETTINGS + "[agent]\nsave_before_suspend_s = 300.0\n")
    cluster.service("node1", "restart", "cadenza-agent")
    wait_for("four idle lane nodes", cluster.ready, 60)
    options = ("--gres=gpu:4", "--cadenza", "--nodelist=node1")
    arguments = f"--model mlp --iterations 400 --iteration-s 0.02 --checkpoint-dir {kept}/keeper"
    job = cluster.train("keeper", arguments, options=options)
    wait_for("a job that saves checkpoints", lambda: cluster.lease(job).get("checkpoints"))
    second = cluster.paced("second", iterations=400, options=("--gres=gpu:4", "--cadenza", "--nodelist=node1-l1"))
    cluster.wait_state(job, "SUSPENDED")
    step = cluster.lease(job)["step"]
    high = preempt(cluster, option)
    cluster.wait_done(high, second, job)
    found = cluster.result("keeper")
    assert (found["restart"], found["restored_step"]) == (1, step)
    cluster.configure(SETTINGS)
    cluster.service("node1", "restart", "cadenza-agent")


@pytest.mark.parametrize("preempting", [("qos", "CANCEL"), ("partition_prio", "CANCEL")], ids=str, indirect=True)
def test_a_canceled_job_leaves_nothing(preempting: tuple[Cluster, str], kept: str) -> None:
    cluster, option = preempting
    first, second = victims(cluster, kept)
    high = preempt(cluster, option)
    cluster.wait_done(high)
    assert cluster.state(first) == "PREEMPTED"
    wait_for("no lease of it", lambda: not cluster.lease(first))
    cluster.wait_done(second)
