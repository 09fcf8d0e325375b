"""A site's rules hold for jobs that opt in: each scenario shows the same with Cadenza's flag as without it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime

import pytest

from cluster import wait_for
from harness import Cluster
from lots import HOSTS, PARTITIONS, RESUMED, Lot, Row, Scenario, divide, play, restart

SETTINGS = f"""\
[service]
mode = "apply"
poll_s = 0.5
[guard]
partitions = [{", ".join(f'"{name}"' for name in PARTITIONS)}]
[expert]
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
    return after["NodeList"] != before["NodeList"], after["ReqNodeList"]


def node_down_and_back(lot: Lot) -> object:
    """A host that comes back by itself, once its slurmd is there again, takes jobs again."""
    lot.submit("requeued", seconds=600)
    before = lot.wait("requeued")
    lot.settled()  # slurmctld takes the answer to the launch for a sign of life, up to a second later
    lot.cluster.service(before["NodeList"], "stop", "slurmd-lane0")
    lot.control("update", f"NodeName={before['NodeList']}", "State=DOWN", "Reason=rules")
    after = wait_for("its second run", lambda: (found := lot.wait("requeued"))["Restarts"] == "1" and found, 60)
    lot.submit("waits", seconds=600)
    down = {label: row.reason for label, row in lot.settled().items()}
    lot.cluster.service(before["NodeList"], "start", "slurmd-lane0")
    back = lot.wait("waits")
    elsewhere, there = after["NodeList"] != before["NodeList"], back["NodeList"] == before["NodeList"]
    return elsewhere, after["ReqNodeList"], down, there


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
    lot.disturb()
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
    lot.disturb()
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
    "drain and requeue": Scenario(drain_and_requeue, "(True, '(null)')", hosts=2),
    "node down and back": Scenario(
        node_down_and_back, "(True, '(null)', {'requeued': '', 'waits': 'Resources'}, True)", hosts=2
    ),
    "reservation": Scenario(reservation, "ReqNodeNotAvail"),
    "squeue --start": Scenario(estimated_start, "True"),
    "sacct Planned": Scenario(planned_time, "(True, True)"),
    "holds": Scenario(holds, "JobHeldAdmin", disturbed=True),
    "fair share": Scenario(fair_share, "['used none', 'used more']", disturbed=True),
}


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster in lots with the shipped policy."""
    reuse = os.environ.get("CADENZA_TEST_LOTS")
    cluster = Cluster(reuse or f"cadenzarules{os.getpid()}")
    settings = tmp_path_factory.mktemp("rules") / "shipped.toml"
    settings.write_text(SETTINGS)
    options = ("--gpus-per-node", 4, "--gpu-memory-mb", 0, "--lanes", 1, "--state-mb", 64, "--config", settings)
    try:
        if not reuse:
            cluster.up("--nodes", sum(map(len, HOSTS)), *options)
            divide(cluster)
        yield cluster
    finally:
        if not reuse:
            cluster.down()


def check_same(scenario: Scenario, outcomes: list[object]) -> None:
    """Check that a scenario showed the same with the flag as without, and its rule in plain Slurm."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    plain, flagged = outcomes
    assert scenario.shows in str(plain)
    assert flagged == plain


@pytest.fixture(scope="module")
def outcomes(divided: Cluster) -> dict[str, list[object]]:
    """What each scenario showed without the flag, and with it."""
    return play(divided.name, SCENARIOS, FLAGS, lambda: restart(divided))


@pytest.mark.parametrize("rule", SCENARIOS)
def test_a_rule_shows_the_same_with_the_flag(outcomes: dict[str, list[object]], rule: str) -> None:
    check_same(SCENARIOS[rule], outcomes[rule])


# --- Without a working service ---------------------------------------------------------------------------------


INTERVAL_S = 3
"""Time in which Slurm starts the next job once GPUs are free: sched_interval, and two roundings to whole seconds."""
STORE = "/var/lib/cadenzad"


def queue(lot: Lot) -> object:
    """Jobs that waited before the disturbance and one that comes after it run one after the other, at once.

    They are one user's: between users, Slurm's next calculation of fair share, once a minute, may turn their order.
    """
    labels = ("first", "second", "third")
    with lot.full():
        lot.submit("first")
        lot.submit("second")
        lot.disturb()
        if "--cadenza" not in lot.cluster.ctl("sbatch", "--help"):
            lot.flag = ()
        lot.submit("third")
    order = lot.starts(*labels)
    jobs = [lot.cluster.job(lot.jobs[label]) for label in order]
    gaps = [
        (moment(after["StartTime"]) - moment(before["EndTime"])).total_seconds()
        for before, after in itertools.pairwise(jobs)
    ]
    return order, all(gap <= INTERVAL_S for gap in gaps), [job["Restarts"] for job in jobs]


@contextmanager
def killed(cluster: Cluster) -> Iterator[None]:
    cluster.signal("ctl", "KILL", "cadenzad")
    cluster.service("ctl", "stop", "cadenzad")
    yield
    cluster.service("ctl", "start", "cadenzad")


@contextmanager
def stopped(cluster: Cluster) -> Iterator[None]:
    cluster.signal("ctl", "STOP", "cadenzad")
    yield
    cluster.signal("ctl", "CONT", "cadenzad")


@contextmanager
def restarted_with_a_queue(cluster: Cluster) -> Iterator[None]:
    """Restart it while 200 jobs that opted in wait in another lot: each goes on waiting for GPUs only."""
    lot = Lot(cluster, len(HOSTS) - 1, lambda: None, ("--cadenza",))
    with lot.full():
        line = f"sbatch -p {lot.name} -A {lot.name}-one --mem=100 --gres=gpu:4 --cadenza --chdir=/tmp --wrap=true"
        cluster.ctl("sh", "-c", f"for n in $(seq 200); do {line}; done", user="alice")
        cluster.service("ctl", "restart", "cadenzad")
        wait_for("a round", lambda: "round" in cluster.cadenza("top", "--once", check=False).stdout)
        waiting = cluster.ctl("squeue", "-h", "-t", "PD", "-p", lot.name, "-o", "%r").split("\n")[:-1]
        assert len(waiting) == 200
        assert set(waiting) <= {"Resources", "Priority", "None"}
        yield
        lot.clear()
        lot.submit("filler", seconds=0)


def wait_for_failures(cluster: Cluster) -> None:
    """Wait until the service's rounds fail."""

    def failed() -> int:
        return int(cluster.ctl("grep", "-c", "round failed", "/var/log/cluster/cadenzad.log", check=False) or 0)

    before = failed()
    wait_for("a failed round", lambda: failed() > before)


@contextmanager
def store_full(cluster: Cluster) -> Iterator[None]:
    cluster.ctl("sh", "-c", f"cat /dev/zero > {STORE}/full", check=False)
    wait_for_failures(cluster)
    yield
    cluster.ctl("rm", f"{STORE}/full")
    cluster.service("ctl", "restart", "cadenzad")


@contextmanager
def gateway_unreadable(cluster: Cluster) -> Iterator[None]:
    """The service can read nothing of Slurm: its library is gone, and the process that had loaded it."""
    folder = cluster.ctl("sh", "-c", "echo /opt/cadenza/lib/python3.*/site-packages").strip()
    cluster.ctl("mv", f"{folder}/pyslurm", "/tmp/pyslurm")
    cluster.ctl("pkill", "-KILL", "-f", "gateway.worker")
    wait_for_failures(cluster)
    yield
    cluster.ctl("mv", "/tmp/pyslurm", f"{folder}/pyslurm")
    cluster.service("ctl", "restart", "cadenzad")


@contextmanager
def removed(cluster: Cluster) -> Iterator[None]:
    """Cadenza is taken off the site while its jobs wait: script, plugin, service and agents."""
    files = ("/etc/slurm/slurm.conf", "/etc/slurm/plugstack.conf", "/etc/slurm/job_submit.lua")
    hosts = [host for lot in HOSTS for host in lot]
    for file in files:
        cluster.ctl("cp", file, "/tmp/")
    cluster.service("ctl", "stop", "cadenzad")
    for host in hosts:
        cluster.service(host, "stop", "cadenza-agent")
    cluster.ctl("sed", "-i", "/^JobSubmitPlugins/d", "/etc/slurm/slurm.conf")
    cluster.ctl("rm", *files[1:])
    restart(cluster)
    yield
    for file in files:
        cluster.ctl("cp", f"/tmp/{file.rsplit('/', 1)[1]}", file)
    restart(cluster)
    for host in hosts:
        cluster.service(host, "start", "cadenza-agent")
    cluster.service("ctl", "start", "cadenzad")


FAULTS = {
    fault.__name__: fault
    for fault in (killed, stopped, restarted_with_a_queue, store_full, gateway_unreadable, removed)
}


@pytest.mark.sites
@pytest.mark.parametrize("fault", FAULTS)
def test_slurms_queue_goes_on(divided: Cluster, fault: str) -> None:
    scenario = Scenario(queue, "True", disturbed=True)
    with ExitStack() as stack:
        outcomes = play(
            divided.name, {fault: scenario}, FLAGS, lambda: stack.enter_context(FAULTS[fault](divided))
        )  # fmt: skip
    check_same(scenario, outcomes[fault])


@pytest.mark.sites
@pytest.mark.timeout(2 * 3600)
def test_holds_stand_for_an_hour_of_slurmctlds_restarts(divided: Cluster) -> None:
    """It restarts each minute; CADENZA_HOLDS_S sets the time in seconds."""
    until_s = time.monotonic() + float(os.environ.get("CADENZA_HOLDS_S", "3600"))

    def restarts() -> None:
        while time.monotonic() < until_s:
            restart(divided)
            time.sleep(60)

    outcomes = play(divided.name, {"holds": SCENARIOS["holds"]}, FLAGS, restarts)
    check_same(SCENARIOS["holds"], outcomes["holds"])
