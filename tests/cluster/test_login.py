"""`why`, `top` and `report` on a login node and inside a job: who sees what (docs/operation.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import CADENZA, PYTHON, SHARED, wait_for
from harness import Cluster

CONF = "/etc/slurm/slurm.conf"
ONE_GPU = ("--gres=gpu:1", "--cadenza")
FORGED = """
import sys, zlib
import zmq, zmq.auth
host, key, uid = sys.argv[1:]
link = zmq.Context().socket(zmq.DEALER)
keys = "/etc/cadenza/keys"
link.curve_publickey, link.curve_secretkey = zmq.auth.load_certificate(f"{keys}/agents/{key}.key_secret")
link.curve_serverkey = zmq.auth.load_certificate(f"{keys}/service.key")[0]
link.connect("tcp://ctl:6850")
import msgspec
from cadenza.sidecar.orders import VERSION, Ask, ToAgent, Told
link.send(msgspec.json.encode(Ask(VERSION, host, 1, int(uid), b'{"job":%d}' % JOB)))
while link.poll(3000):
    order = msgspec.json.decode(link.recv(), type=ToAgent)
    if isinstance(order, Told):
        print(zlib.decompress(order.answer).decode())
        break
else:
    print("{}")
"""
"""Asks as the agent of a host, with the key of a host, for a user."""


@pytest.fixture
def private(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster with PrivateData=jobs, or what the test names."""
    cluster.ctl("cp", CONF, "/tmp/slurm.conf")
    cluster.ctl("sh", "-c", f"echo PrivateData={getattr(request, 'param', 'jobs')} >>{CONF}")
    cluster.ctl("scontrol", "reconfigure")
    cluster.service("ctl", "restart", "cadenzad")  # it asks Slurm anew who may see what
    yield cluster
    cluster.ctl("cp", "/tmp/slurm.conf", CONF)
    cluster.ctl("scontrol", "reconfigure")
    cluster.service("ctl", "restart", "cadenzad")


def ask(cluster: Cluster, user: str, *words: str, where: str = "login") -> dict[str, Any]:
    """Return what a command prints in JSON, or its error."""
    done = cluster.exec(where, CADENZA, *words, "--json", user=user, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr}


def holders(cluster: Cluster, user: str) -> set[int | None]:
    """Return the jobs that a user sees with a GPU on the login node."""
    return {row["holder"] for row in ask(cluster, user, "top", "--once")["gpus"] if row["holder"] or row["others"]}


def running(cluster: Cluster) -> int:
    job = cluster.paced("mine", iterations=3000, options=ONE_GPU)
    wait_for("its lease", lambda: cluster.lease(job).get("state") == "held")
    return job


def test_users_of_a_login_node_see_their_own_jobs(cluster: Cluster) -> None:
    job = running(cluster)
    assert wait_for("alice's job", lambda: holders(cluster, "alice") == {job})
    assert ask(cluster, "alice", "why", str(job))["job"]["user"] == "alice"
    assert "nothing on record of a job of yours" in ask(cluster, "bob", "why", str(job))["error"]
    view = ask(cluster, "bob", "top", "--once")
    assert view["jobs"] == []
    assert holders(cluster, "bob") == {job}, "as in squeue; never whose it is"
    hours = wait_for("its hours", lambda: ask(cluster, "alice", "report", "--since", "1h").get("jobs"))
    assert job in {row["job"] for row in hours}
    assert "does not speak for uid 0" in ask(cluster, "root", "why", str(job))["error"]


def test_a_job_asks_the_agent_of_its_host(cluster: Cluster) -> None:
    words = f"sleep 1; {CADENZA} why --json $SLURM_JOB_ID >{SHARED}/results/why-%s.json 2>&1"
    job = running(cluster)
    for user in ("alice", "bob"):
        other = f"{CADENZA} why --json {job} >{SHARED}/results/other-{user}.json 2>&1"
        command = f"{words % user}; {other}; true"
        cluster.wait_done(int(cluster.sbatch("--mem=100", "--nodelist=node1", *ONE_GPU, user=user, command=command)))
    own = {user: json.loads(cluster.ctl("cat", f"{SHARED}/results/why-{user}.json")) for user in ("alice", "bob")}
    assert {user: record["job"]["user"] for user, record in own.items()} == {"alice": "alice", "bob": "bob"}
    assert json.loads(cluster.ctl("cat", f"{SHARED}/results/other-alice.json"))["id"] == job
    assert "nothing on record of a job of yours" in cluster.ctl("cat", f"{SHARED}/results/other-bob.json")


def test_private_jobs_coordinators_and_operators(private: Cluster) -> None:
    job = running(private)
    wait_for("alice's job", lambda: holders(private, "alice") == {job})
    assert holders(private, "bob") == {None}, "the GPU is another user's: Slurm does not show the job either"
    change = ("sacctmgr", "--immediate")
    account = private.job(job)["Account"]
    for grant, revoke in (
        (("modify", "user", "bob", "set", "adminlevel=Operator"), ("modify", "user", "bob", "set", "adminlevel=None")),
        (("add", "coordinator", f"account={account}", "names=bob"),
         ("delete", "coordinator", f"account={account}", "names=bob")),
    ):  # fmt: skip
        private.ctl(*change, *grant)
        try:
            private.service("ctl", "restart", "cadenzad")
            wait_for("bob's right", lambda: ask(private, "bob", "why", str(job)).get("id") == job)
            assert holders(private, "bob") == {job}
        finally:
            private.ctl(*change, *revoke)
        private.service("ctl", "restart", "cadenzad")
        wait_for(
            "his right's end", lambda: "of a job of yours" in ask(private, "bob", "why", str(job)).get("error", "")
        )


@pytest.mark.parametrize("private", ["nodes"], indirect=True)
def test_private_nodes_are_those_without_jobs_of_ones_own(private: Cluster) -> None:
    def hosts(user: str, where: str = "login") -> set[str]:
        return {row["host"] for row in ask(private, user, "top", "--once", where=where)["gpus"]}

    job = running(private)
    host = private.job(job)["NodeList"].partition("-l")[0]
    assert wait_for("alice's host", lambda: hosts("alice") == {host})
    assert hosts("bob") == set(), "Slurm shows bob no node: `sinfo` is refused, too"
    assert len(hosts("root", "ctl")) > 1


def test_a_forged_user_is_refused(cluster: Cluster) -> None:
    job = running(cluster)
    place = cluster.job(job)["NodeList"].partition("-l")[0]
    other = {"node1": "node2", "node2": "node1"}[place]
    cluster.put("/home/shared/forged.py", FORGED.replace("JOB", str(job)))

    def forged(host: str, key: str, uid: int = 2001) -> dict[str, Any]:
        asked = cluster.ctl(PYTHON, "/home/shared/forged.py", host, key, str(uid))
        return json.loads(asked)  # type: ignore[no-any-return]

    assert forged("login", "login")["record"]["id"] == job, "root has registered this host"
    assert forged(place, place)["record"]["id"] == job, "alice has a job there"
    assert f"has no job on {other} on record" in forged(other, other)["error"]
    assert forged("login", other) == {}, "this key does not speak for login"
    for uid in (0, 2000):
        assert "does not speak for uid" in forged("login", "login", uid)["error"]


def test_without_a_relay_the_command_says_what_to_add(cluster: Cluster) -> None:
    cluster.exec("login", "mv", "/run/cadenza/jobs.sock", "/run/cadenza/away.sock")
    try:
        said = ask(cluster, "alice", "why", "1")["error"]
    finally:
        cluster.exec("login", "mv", "/run/cadenza/away.sock", "/run/cadenza/jobs.sock")
    assert "cadenza keygen HOST" in said
    assert 'relays = ["HOST"]' in said
