"""Two accounts share one GPU for a minute: what sacct, sreport, sshare and limits count (docs/accounting.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from cluster import wait_for
from harness import Cluster

pytestmark = pytest.mark.sites
LANES = 2
PERCENT = 100
"""A GPU's weight in billing is PERCENT / LANES, because Slurm cuts the billing of a job to an integer."""
HOUR_S = 3600
ITERATIONS = 1400  # of 0.02 s: two jobs on one GPU take a minute
DATABASE = "slurm_acct_db"
FAKETIME = "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1 FAKETIME=+1h"


@dataclass
class Bill:
    """Figures of one account, in seconds; those of billing are in hundredths of a GPU."""

    suspend: str
    account: str
    job: int
    elapsed: int = 0
    suspended: int = 0
    report: dict[str, int] = field(default_factory=dict)
    raw_usage: int = 0


@pytest.fixture
def weighted(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the recommended weights, a QOS of one GPU, and accounts of one GPU."""
    cluster.ctl("scontrol", "update", "PartitionName=shared", f"TRESBillingWeights=GRES/gpu={PERCENT // LANES}")
    cluster.ctl("sacctmgr", "-iQ", "add", "qos", "one", "GrpTRES=gres/gpu=1")
    yield cluster
    cluster.reset()
    cluster.ctl("scontrol", "reconfigure")


def share_for_a_minute(cluster: Cluster, suspend: str) -> list[Bill]:
    """Let a job of each account take turns on one GPU, and check limits while one of them has yielded."""
    cluster.configure(f"[sharing]\nslice_s = 6.0\nsuspend = {'true' if suspend == 'on' else 'false'}\n")
    bills = []
    for user, node, qos in (("alice", "node1", "one"), ("bob", "node1-l1", "normal")):
        account = f"{user}-{suspend}"
        cluster.ctl("sacctmgr", "-iQ", "add", "account", account, "GrpTRES=gres/gpu=1")
        cluster.ctl("sacctmgr", "-iQ", "add", "user", *{"alice", user}, f"account={account}")
        cluster.ctl("sacctmgr", "-iQ", "modify", "account", account, "set", "QOS=normal,one")
        options = ("--gres=gpu:1", "--cadenza", f"--nodelist={node}", f"--account={account}", f"--qos={qos}")
        job = cluster.paced("pays", iterations=ITERATIONS, options=options, user=user)
        wait_for("its lease", lambda job=job: cluster.lease(job))
        bills.append(Bill(suspend, account, job))
    wait_for("the first yield", lambda: cluster.lease(bills[0].job).get("state") == "yielded", interval=0.1)
    for account, qos, reason in ((bills[0].account, "normal", "AssocGrpGRES"), (bills[1].account, "one", "QOSGrpGRES")):
        more = cluster.paced("more", iterations=1, options=("--gres=gpu:1", f"--account={account}", f"--qos={qos}"))
        wait_for(f"{reason} of job {more}", lambda more=more, why=reason: cluster.job(more).get("Reason") == why)
        cluster.ctl("scancel", str(more))
    cluster.wait_done(*(bill.job for bill in bills))
    return bills


def close_hour(cluster: Cluster, first_hour: int) -> int:
    """Let slurmdbd sum up all hours from the first one to the present one, as if that were over; return its end."""
    last = int(cluster.ctl("date", "+%s")) // HOUR_S * HOUR_S + HOUR_S
    table = f"`{cluster.name}_last_ran_table`"
    cluster.service("ctl", "stop", "slurmdbd")
    cluster.ctl("mariadb", DATABASE, "-e", f"update {table} set hourly_rollup = {first_hour}")
    command = f"{FAKETIME} slurmdbd -D >/dev/null 2>&1 & echo $!"
    process = cluster.ctl("sh", "-c", command).strip()
    query = f"select hourly_rollup from {table}"
    wait_for("the sums", lambda: cluster.ctl("mariadb", DATABASE, "-N", "-e", query).strip() == str(last))
    cluster.ctl("kill", process)
    wait_for("its end", lambda: cluster.exec("ctl", "kill", "-0", process, check=False).returncode)
    cluster.service("ctl", "start", "slurmdbd")
    wait_for("slurmdbd", lambda: cluster.exec("ctl", "sacctmgr", "-n", "list", "cluster", check=False).returncode == 0)
    return last


def rows(cluster: Cluster, *command: str) -> list[list[str]]:
    """Return the parsable output of a command of Slurm's accounting."""
    return [line.split("|") for line in cluster.ctl(*command, "--noheader", "--parsable2").splitlines()]


def seconds(text: str) -> int:
    """Return the seconds of HH:MM:SS."""
    hours, minutes, rest = map(int, text.split(":"))
    return HOUR_S * hours + 60 * minutes + rest


def read(cluster: Cluster, bill: Bill, period: tuple[str, str]) -> None:
    """Fill in a bill from sacct, sreport and sshare."""
    ((elapsed, suspended),) = rows(
        cluster, "sacct", "--allocations", f"--jobs={bill.job}", "--format=ElapsedRaw,Suspended"
    )
    bill.elapsed, bill.suspended = int(elapsed), seconds(suspended)
    report = ("sreport", "-t", "Seconds", "-T", "cpu,gres/gpu,billing", "cluster", "AccountUtilizationByUser")
    found = rows(cluster, *report, *period, f"accounts={bill.account}", "format=Login,TresName,Used")
    bill.report = {name: int(used) for login, name, used in found if login}
    share = ("sshare", "--all", f"--accounts={bill.account}", "--format=User,RawUsage")
    used = dict(rows(cluster, *share))
    bill.raw_usage = int(used[bill.account.partition("-")[0]])


def test_two_accounts_pay_for_one_gpu(weighted: Cluster, measured: Callable[[str], None]) -> None:
    hour = int(weighted.ctl("date", "+%s")) // HOUR_S * HOUR_S
    runs = [share_for_a_minute(weighted, suspend) for suspend in ("on", "off")]
    last = close_hour(weighted, hour)
    period = tuple(
        f"{name}={weighted.ctl('date', '-d', f'@{time_s}', '+%FT%T').strip()}"
        for name, time_s in (("start", hour), ("end", last))
    )
    measured("suspend account   elapsed suspended | cpu gres/gpu billing | RawUsage")
    for bills in runs:
        for bill in bills:
            read(weighted, bill, period)
            measured(
                f"{bill.suspend:7} {bill.account:9} {bill.elapsed:7} {bill.suspended:9} |"
                f" {bill.report['cpu']:3} {bill.report['gres/gpu']:8} {bill.report['billing']:7} |"
                f" {bill.raw_usage:8}"
            )
        jobs = [weighted.job(bill.job) for bill in bills]
        times = [int(weighted.ctl("date", "-d", job[key], "+%s")) for job in jobs for key in ("StartTime", "EndTime")]
        there_was = max(times) - min(times)
        allocated = sum(bill.report["gres/gpu"] for bill in bills)
        billed = sum(bill.report["billing"] for bill in bills) / PERCENT
        share = sum(bill.raw_usage for bill in bills) / PERCENT
        measured(f"GPU seconds: {there_was}; gres/gpu {allocated}; billed {billed:.1f}; in fair share {share:.1f}")
        assert allocated > 1.5 * there_was, "Slurm counts the GPU once a lane"
        assert 0.8 * there_was < billed <= there_was
        assert 0.8 * there_was < share <= there_was
    report = ("sreport", "-t", "Seconds", "-T", "gres/gpu", "cluster", "Utilization", *period)
    ((count, used, down, idle, reported),) = rows(weighted, *report, "format=TresCount,Allocated,Down,Idle,Reported")
    measured(f"cluster utilization: {count} GPUs, allocated {used}, down {down}, idle {idle}, reported {reported}")
    assert int(count) == 2 * 4 * LANES + 4, "two hosts of four GPUs in two lanes, and one in one"
