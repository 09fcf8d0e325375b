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


ASKED = """
import sys, zlib
from pathlib import Path
import msgspec, zmq
from cadenza.slurm_plugin.service.agents.curve_keys import public_key
from cadenza.slurm_plugin.service.credentials import Question, sealed
asked, sealed_for, connection, times = (f(word) for f, word in zip((str.encode, str.encode, str, int), sys.argv[1:]))
public, secret = zmq.curve_keypair()
link = zmq.Context().socket(zmq.DEALER)
link.curve_publickey, link.curve_secretkey = public, secret
link.curve_serverkey = public_key(Path("/etc/cadenza/keys/service.key"))
link.connect("tcp://ctl:6852")
credential = msgspec.json.decode(sealed(sealed_for, connection or public.decode()), type=Question).munge
for _ in range(times):
    link.send(msgspec.json.encode(Question(asked, munge=credential)))
    answer = zlib.decompress(link.recv()).decode()
print(answer)
"""
"""Asks by munge, once or more, with a credential for this question and connection or for another one."""


@pytest.fixture
def no_relay(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster without the relay of its login node."""
    cluster.exec("login", "mv", "/run/cadenza/jobs.sock", "/run/cadenza/away.sock")
    cluster.put("/home/shared/asked.py", ASKED)
    yield cluster
    cluster.exec("login", "mv", "/run/cadenza/away.sock", "/run/cadenza/jobs.sock")


@pytest.fixture
def munge(no_relay: Cluster) -> Iterator[Cluster]:
    """The same with munge's daemon on the login node and the controller."""
    for host in ("ctl", "login"):
        no_relay.exec(host, "munged", user="munge")
    yield no_relay
    for host in ("ctl", "login"):
        no_relay.exec(host, "munged", "--stop", user="munge")


@pytest.fixture
def tokens(no_relay: Cluster) -> Iterator[Cluster]:
    """The same with Slurm's tokens."""
    no_relay.ctl("cp", CONF, "/tmp/slurm.conf")
    no_relay.ctl("sh", "-c", "head -c 32 /dev/urandom >/etc/slurm/jwt.key; chmod 600 /etc/slurm/jwt.key")
    lines = "AuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key=/etc/slurm/jwt.key\n"
    no_relay.ctl("sh", "-c", f"printf '{lines}' >>{CONF}")
    no_relay.service("ctl", "restart", "slurmctld")
    wait_for("a token", lambda: no_relay.ctl("scontrol", "token", check=False).startswith("SLURM_JWT="))
    yield no_relay
    no_relay.ctl("cp", "/tmp/slurm.conf", CONF)
    no_relay.service("ctl", "restart", "slurmctld")
    wait_for("slurmctld", lambda: "UP" in no_relay.ctl("scontrol", "ping", check=False))


def asked(cluster: Cluster, question: str, sealed_for: str, connection: str = "", times: int = 1) -> str:
    """Return the error of the last answer to a question of alice's, or nothing."""
    words = (PYTHON, "/home/shared/asked.py", question, sealed_for, connection, str(times))
    return str(json.loads(cluster.exec("login", *words, user="alice").stdout)["error"])


def test_users_ask_by_munge_where_no_relay_is(munge: Cluster) -> None:
    job = running(munge)
    assert wait_for("alice's job", lambda: holders(munge, "alice") == {job})
    assert ask(munge, "alice", "why", str(job))["job"]["user"] == "alice"
    assert "nothing on record of a job of yours" in ask(munge, "bob", "why", str(job))["error"]
    assert ask(munge, "bob", "top", "--once")["jobs"] == []
    assert "uid 0 is asked for on the machine of slurmctld only" in ask(munge, "root", "why", str(job))["error"]
    mine = json.dumps({"job": job})
    assert asked(munge, mine, mine) == ""
    assert "Replayed credential" in asked(munge, mine, mine, times=2)
    for sealed in ((json.dumps({"job": job + 1}),), (mine, "k" * 40)):
        assert "this credential of munge is for another question" in asked(munge, mine, *sealed)


def test_users_ask_by_a_token_that_slurm_takes(tokens: Cluster) -> None:
    def token(user: str, lifespan: int = 300) -> str:
        return tokens.ctl("scontrol", "token", f"lifespan={lifespan}", user=user).strip().partition("=")[2]

    def why(value: str) -> dict[str, Any]:
        words = ("env", f"SLURM_JWT={value}", CADENZA, "why", str(job), "--json")
        done = tokens.exec("login", *words, user="bob", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr}

    job = running(tokens)
    alice, bob, short = token("alice"), token("bob"), token("alice", 1)
    wait_for("alice's job", lambda: why(alice).get("id") == job)
    assert "nothing on record of a job of yours" in why(bob)["error"]
    assert "uid 0 is asked for" in why(token("root"))["error"]
    head, _, rest = alice.partition(".")
    other = ".".join((head, bob.split(".")[1], rest.partition(".")[2]))
    for forged in (other, alice[:-9] + "x" * 9, short):
        wait_for("its refusal", lambda forged=forged: "Protocol authentication error" in why(forged).get("error", ""))
    assert "no question of this version" in why("a.b.c=")["error"]


def test_without_a_relay_the_command_says_what_to_add(cluster: Cluster) -> None:
    cluster.exec("login", "mv", "/run/cadenza/jobs.sock", "/run/cadenza/away.sock")
    try:
        said = ask(cluster, "alice", "why", "1")["error"]
    finally:
        cluster.exec("login", "mv", "/run/cadenza/away.sock", "/run/cadenza/jobs.sock")
    assert "cadenza keygen HOST" in said
    assert 'relays = ["HOST"]' in said
    assert "Did you start munged?" in said
    assert "`export $(scontrol token)`" in said
