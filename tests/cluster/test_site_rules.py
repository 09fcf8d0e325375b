"""A site's rules hold for jobs that opt in: each scenario shows the same with Cadenza's flag as without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime

import pytest

from cluster import wait_for
from harness import Cluster
from lots import HOSTS, PARTITIONS, RESUMED, Lot, Row, Scenario, divide, play

SETTINGS = f"""\
[service]
mode = "apply"
poll_s = 0.5
min_round_spacing_s = 0.2
[guard]
partitions = [{", ".join(f'"{name}"' for name in PARTITIONS)}]
min_run_s = 0.3
"""
FLAGS = ((), ("--cadenza",))
moment = datetime.fromisoformat


def account_limit(lot: Lot) -> dict[str, Row]:
    for number in range(3):
        lot.submit(f"limited {number}", gpus=1, seconds=600, account="limited")
    lot.submit("other", gpus=2, seconds=600, user="bob")
    return lot.settled()


def qos_limit_by_user(lot: Lot) -> dict[str, Row]:
    for number in range(3):
        lot.submit(f"limited {number}", f"--qos={lot.name}", gpus=1, seconds=600)
    lot.submit("other", f"--qos={lot.name}", gpus=2, seconds=600, user="bob")
    return lot.settled()


def qos_priority(lot: Lot) -> list[str]:
    with lot.full():
        lot.submit("first")
        lot.submit("urgent", "--qos=high", user="bob")
    return lot.starts("first", "urgent")


def nice(lot: Lot) -> list[str]:
    with lot.full():
        lot.submit("nice", "--nice=1000000")
        lot.submit("later")
    return lot.starts("nice", "later")


def array(lot: Lot) -> dict[str, Row]:
    lot.submit("array", "--array=0-2%1", gpus=1, seconds=600)
    lot.submit("other", gpus=3, seconds=600, user="bob")
    return lot.settled()


def license_of_one(lot: Lot) -> dict[str, Row]:
    for number in range(2):
        lot.submit(f"licensed {number}", f"--licenses={lot.name}:1", gpus=1, seconds=600)
    lot.submit("other", gpus=3, seconds=600, user="bob")
    return lot.settled()


def begin(lot: Lot) -> object:
    lot.submit("later", "--begin=now+6")
    lot.submit("now")
    reason = lot.rows()["later"].reason
    starts = lot.starts("later", "now")
    job = lot.wait("later", "COMPLETED")
    return reason, starts, moment(job["StartTime"]) >= moment(job["EligibleTime"])


def dependency(lot: Lot) -> dict[str, Row]:
    first = lot.submit("first", gpus=1)
    fails = lot.submit("fails", gpus=1, command="false")
    lot.submit("after", f"--dependency=afterok:{first}", gpus=1)
    lot.submit("never", f"--dependency=afterok:{fails}", gpus=1)
    return lot.settled(ended=("after",))


def deadline(lot: Lot) -> str:
    """It cannot end in time once it has waited for some seconds."""
    with lot.full():
        lot.submit("late", "--deadline=now+64", "--time=1")
        return lot.wait("late", "DEADLINE")["JobState"]


def partition_tier(lot: Lot) -> list[str]:
    with lot.full():
        lot.submit("low")
        lot.submit("high", f"--partition={lot.name}-high", user="bob")
    return lot.starts("low", "high")


def powered_down(lot: Lot) -> object:
    (host,) = lot.hosts
    lot.control("update", f"NodeName={host}", "State=POWER_DOWN")
    state = wait_for(
        f"{host} powered down", lambda: (found := lot.cluster.ctl("sinfo", "-hn", host, "-o", "%t").split())
        and found[0] == "idle~" and found[0], 60,
    )  # fmt: skip
    lot.submit("wakes")
    asked = wait_for(
        "the ResumeProgram", lambda: host in lot.cluster.exec("ctl", "cat", RESUMED, check=False).stdout.split(), 60
    )
    # A container does not boot: this slurmd only says that its host did.
    lot.cluster.service(host, "stop", "slurmd-lane0")
    lot.cluster.exec(host, "slurmd", "-N", host, "-b")
    lot.wait("wakes", "COMPLETED")
    lot.cluster.exec(host, "pkill", "-f", f"slurmd -N {host} -b")
    lot.cluster.service(host, "start", "slurmd-lane0")
    lot.cluster.ctl("sed", "-i", f"/^{host}$/d", RESUMED)
    return state, asked, lot.rows()


def drain_and_requeue(lot: Lot) -> object:
    job = lot.submit("requeued", seconds=600)
    before = lot.wait("requeued")
    lot.control("update", f"NodeName={before['NodeList']}", "State=DRAIN", "Reason=rules")
    lot.control("requeue", str(job))
    after = wait_for("its second run", lambda: (found := lot.wait("requeued"))["Restarts"] == "1" and found, 60)
    lot.control("update", f"NodeName={before['NodeList']}", "State=RESUME")
    return lot.hosts.index(before["NodeList"]), lot.hosts.index(after["NodeList"]), after["ReqNodeList"]


def node_down_and_back(lot: Lot) -> object:
    """A host that comes back by itself, once its slurmd is there again, takes jobs again."""
    lot.submit("requeued", seconds=600)
    before = lot.wait("requeued")
    sets_down = ("update", f"NodeName={before['NodeList']}", "State=DOWN", "Reason=rules")
    lot.cluster.service(before["NodeList"], "stop", "slurmd-lane0")
    lot.control(*sets_down)
    after = wait_for("its second run", lambda: (found := lot.wait("requeued"))["Restarts"] == "1" and found, 60)
    lot.control(*sets_down)  # an answer of its slurmd that was under way returns it to service
    lot.submit("waits", seconds=600)
    down = lot.settled()
    lot.cluster.service(before["NodeList"], "start", "slurmd-lane0")
    back = lot.wait("waits")
    return [lot.hosts.index(job["NodeList"]) for job in (before, after, back)], after["ReqNodeList"], down


def holds(lot: Lot) -> object:
    """Holds of an owner and an admin stand, over a restart of slurmctld, until they release them."""
    with lot.full():
        for label in ("owner's", "admin's", "free"):
            lot.submit(label)
        lot.submit("at once", "--hold")
        lot.control("hold", str(lot.jobs["owner's"]), user="alice")
        lot.control("hold", str(lot.jobs["admin's"]))
    lot.wait("free", "COMPLETED")
    before = lot.settled()
    lot.restart()
    after = lot.settled()
    lot.control("release", str(lot.jobs["owner's"]), str(lot.jobs["at once"]), user="alice")
    lot.control("release", str(lot.jobs["admin's"]))
    lot.cluster.wait_done(*lot.jobs.values())
    return before, after


def reservation(lot: Lot) -> object:
    name = f"reservationname={lot.name}"
    lot.control("create", "reservation", name, f"nodes={lot.hosts[0]}", "users=bob", "starttime=now", "duration=10")
    try:
        lot.submit("outside", gpus=1, seconds=600)
        lot.submit("inside", f"--reservation={lot.name}", gpus=1, user="bob")
        during = lot.settled(ended=("inside",))
    finally:
        lot.control("delete", name)
    return during, lot.wait("outside")["JobState"]


def estimated_start(lot: Lot) -> object:
    """The next in the queue is told the end of the time limit of the one before."""
    lot.submit("runs", "--time=7", seconds=600)
    ends = moment(lot.wait("runs")["EndTime"])
    lot.submit("next", user="bob")

    def told() -> str:
        return lot.cluster.ctl("squeue", "-h", "--start", "-j", str(lot.jobs["next"]), "-o", "%S").strip()

    start = wait_for("an estimate", lambda: (found := told()) and found != "N/A" and found, 60)
    return abs((moment(start) - ends).total_seconds()) <= 1


def planned_time(lot: Lot) -> object:
    """The accounting has the wait of a job that opts in as Planned, to the second."""
    with lot.full():
        lot.submit("waits", gpus=1)
        wait_for("its reason", lambda: lot.rows()["waits"].reason == "Resources")
        lot.settled()
    lot.wait("waits", "COMPLETED")
    fields = ("sacct", "-XnP", "-j", str(lot.jobs["waits"]), "-o", "Planned,Eligible,Start,State")
    planned, eligible, start, _ = wait_for(
        "its record", lambda: (row := lot.cluster.ctl(*fields).strip().split("|"))[-1] == "COMPLETED" and row
    )
    waited = (moment(start) - moment(eligible)).total_seconds()
    hours, minutes, seconds = map(int, planned.split(":"))
    return waited >= 1, 3600 * hours + 60 * minutes + seconds == waited


def fair_share(lot: Lot) -> list[str]:
    """The account that has used the cluster goes last: slurmctld counts usage when it starts, and each minute."""
    lot.submit("used", seconds=3)
    lot.wait("used", "COMPLETED")
    lot.restart()
    with lot.full():
        lot.submit("used more")
        lot.submit("used none", account="two", user="bob")
    return lot.starts("used more", "used none")


SCENARIOS = {
    "powered down": Scenario(powered_down, "COMPLETED"),
    "account limit": Scenario(account_limit, "AssocGrpGRES"),
    "QOS limit by user": Scenario(qos_limit_by_user, "QOSMaxGRESPerUser"),
    "QOS priority": Scenario(qos_priority, "['urgent', 'first']"),
    "nice": Scenario(nice, "['later', 'nice']"),
    "array %1": Scenario(array, "JobArrayTaskLimit"),
    "license": Scenario(license_of_one, "Licenses"),
    "begin": Scenario(begin, "BeginTime"),
    "dependency": Scenario(dependency, "DependencyNeverSatisfied"),
    "deadline": Scenario(deadline, "DEADLINE"),
    "PriorityTier": Scenario(partition_tier, "['high', 'low']"),
    "drain and requeue": Scenario(drain_and_requeue, "(0, 1, '(null)')", hosts=2),
    "node down and back": Scenario(node_down_and_back, "[0, 1, 0]", hosts=2),
    "reservation": Scenario(reservation, "ReqNodeNotAvail"),
    "squeue --start": Scenario(estimated_start, "True"),
    "sacct Planned": Scenario(planned_time, "(True, True)"),
    "holds": Scenario(holds, "JobHeldAdmin", restarts=True),
    "fair share": Scenario(fair_share, "['used none', 'used more']", restarts=True),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[object]]]:
    """What each scenario showed without the flag, and with it, on one cluster with the shipped policy."""
    reuse = os.environ.get("CADENZA_TEST_LOTS")
    cluster = Cluster(reuse or f"cadenzarules{os.getpid()}")
    settings = tmp_path_factory.mktemp("rules") / "shipped.toml"
    settings.write_text(SETTINGS)
    try:
        if not reuse:
            nodes = sum(map(len, HOSTS))
            cluster.up("--nodes", nodes, "--gpus-per-node", 4, "--gpu-memory-mb", 0, "--lanes", 1, "--config", settings)
            divide(cluster)
        yield play(cluster.name, SCENARIOS, FLAGS)
    finally:
        if not reuse:
            cluster.down()


@pytest.mark.parametrize("rule", SCENARIOS)
def test_a_rule_shows_the_same_with_the_flag(outcomes: dict[str, list[object]], rule: str) -> None:
    plain, flagged = outcomes[rule]
    for outcome in (plain, flagged):
        if isinstance(outcome, Exception):
            raise outcome
    assert SCENARIOS[rule].shows in str(plain), "the rule shows in plain Slurm"
    assert flagged == plain
