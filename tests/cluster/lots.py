"""A cluster in lots, so that a scenario runs with and without Cadenza's flag side by side, and what Slurm shows of it.

A lot is a part of the cluster that one scenario has for itself: hosts, two partitions on them, accounts, a QOS and a
license. Lots share slurmctld and the service, and nothing that Slurm decides by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster import wait_for
from harness import Cluster

GPUS = 4
HOSTS = (("node1",), ("node2",), ("node3",), ("node4",), ("node5", "node6"), ("node7", "node8"))
"""Hosts of each lot."""
STABLE_S = 2.5
"""Time after which a queue that does not change is settled: two passes of Slurm's schedulers, several of our rounds."""
RESUMED = "/home/shared/resumed"
PARTITIONS = tuple(f"lot{at}{tier}" for at in range(len(HOSTS)) for tier in ("", "-high"))
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL"})
SLURM_CONF = """
PriorityWeightFairshare=10000
PriorityWeightQOS=100000
PriorityCalcPeriod=1
SuspendProgram=/bin/true
ResumeProgram=/etc/slurm/resume
SuspendTime=86400
SuspendTimeout=1
ResumeTimeout=300
"""
RESUME = f"#!/bin/sh\nscontrol show hostnames $1 >> {RESUMED}\n"


class Row(NamedTuple):
    """What Slurm shows of a job, without ids and clock times."""

    state: str
    reason: str
    hosts: tuple[int, ...]
    """Hosts of the lot on which it runs or ran, from 0."""
    restarts: int


@dataclass
class Lot:
    """The part of the cluster of one scenario, which submits its jobs with Cadenza's flag, or without."""

    cluster: Cluster
    at: int
    disturb: Callable[[], object]
    """Lets the disturbance happen once all scenarios that ask for it have come as far."""
    flag: tuple[str, ...] = ()
    jobs: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the lot's name, which its partition and its license have too."""
        return f"lot{self.at}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the lot's hosts."""
        return HOSTS[self.at]

    def submit(
        self, label: str, *options: str, user: str = "alice", gpus: int = GPUS, seconds: float = 1.0,
        account: str = "one", command: str = "",
    ) -> int:  # fmt: skip
        """Submit a job that sleeps, as a site's users do; later options win over the lot's own."""
        self.jobs[label] = self.cluster.sbatch(
            f"--job-name={label}", f"--partition={self.name}", f"--account={self.name}-{account}", "--mem=100",
            "--time=5", f"--gres=gpu:{gpus}", *self.flag, *options, user=user, command=command or f"sleep {seconds}",
        )  # fmt: skip
        return self.jobs[label]

    @contextmanager
    def full(self) -> Iterator[None]:
        """Have all GPUs in use by a job that ends once the body has submitted others."""
        count = len(self.hosts)
        filler = self.submit("filler", f"--nodes={count}", seconds=600, account="filler")
        self.cluster.wait_state(filler, "RUNNING")
        yield
        self.cluster.ctl("scancel", str(filler))
        del self.jobs["filler"]

    def control(self, *words: str, user: str | None = None) -> None:
        """Run scontrol, as root or a user."""
        self.cluster.ctl("scontrol", *words, user=user)

    def rows(self) -> dict[str, Row]:
        """Return the jobs by label; each task of an array by its own."""
        labels = {job: label for label, job in self.jobs.items()}
        partitions = f"{self.name},{self.name}-high"
        found = {}
        columns = ",".join(f"{name}:80" for name in ("JobArrayID", "State", "Reason", "NodeList", "RestartCnt"))
        for line in self.cluster.ctl("squeue", "-hr", "-t", "all", "-p", partitions, "-O", columns).splitlines():
            number, state, reason, nodes, restarts = (line[at : at + 80].strip() for at in range(0, 400, 80))
            job, _, task = number.partition("_")
            if int(job) in labels:
                label = " ".join(filter(None, (labels[int(job)], task)))
                on = tuple(at for at, host in enumerate(self.hosts) if host in nodes or "[" in nodes)
                found[label] = Row(state, reason if state == "PENDING" else "", on, int(restarts))
        return dict(sorted(found.items()))

    def settled(self, ended: Iterable[str] = ()) -> dict[str, Row]:
        """Return the jobs once some have ended and nothing has changed for a while."""
        seen: dict[str, Row] = {}
        since_s = time.monotonic()

        def stable() -> bool:
            nonlocal seen, since_s
            now_s, rows = time.monotonic(), self.rows()
            # Slurm has not looked at a new job yet, and one that ends has its GPUs still.
            moving = any(row.reason == "None" or row.state in {"COMPLETING", "CONFIGURING"} for row in rows.values())
            if rows != seen or moving or any(rows[label].state not in ENDED for label in ended):
                seen, since_s = rows, now_s
            return bool(rows) and now_s - since_s >= STABLE_S

        wait_for(f"a settled queue of {self.name}", stable, 90)
        return seen

    def starts(self, *labels: str) -> list[str]:
        """Return the labels of jobs in the order of their starts, once all have completed."""
        self.cluster.wait_done(*(self.jobs[label] for label in labels))
        return sorted(labels, key=lambda label: self.cluster.job(self.jobs[label])["StartTime"])

    def wait(self, label: str, state: str = "RUNNING") -> dict[str, str]:
        """Return what scontrol says of a job once it is in a state."""
        self.cluster.wait_state(self.jobs[label], state, timeout=90)
        return self.cluster.job(self.jobs[label])

    def clear(self) -> None:
        """Cancel what is left of the scenario."""
        self.cluster.ctl("scancel", f"--partition={self.name}")
        self.cluster.ctl("scancel", f"--partition={self.name}-high")
        left = ("squeue", "-h", "-p", f"{self.name},{self.name}-high")
        wait_for(f"an empty queue of {self.name}", lambda: not self.cluster.ctl(*left).strip(), 90)
        self.jobs.clear()


def accounting() -> str:
    """Return sacctmgr's commands for the accounts and the QOS of all lots."""
    lines = ["modify qos normal set Priority=10"]
    for at in range(len(HOSTS)):
        name = f"lot{at}"
        lines += [f"add qos {name} MaxTRESPerUser=gres/gpu=2", f"add account {name}"]
        for account in ("one", "two", "filler", "limited"):
            limit = " GrpTRES=gres/gpu=2" if account == "limited" else ""
            lines.append(f"add account {name}-{account} parent={name}{limit}")
        accounts = ",".join(f"{name}-{account}" for account in ("one", "two", "filler", "limited"))
        lines.append(f"add user alice,bob Account={accounts}")
        lines.append(f"modify account {name} set QOS=normal,high,{name}")
    return "\n".join(lines)


def slurm_conf() -> str:
    """Return the lines that slurm.conf gets."""
    lines = [SLURM_CONF]
    for at, hosts in enumerate(HOSTS):
        where = f"Nodes={','.join(hosts)} State=UP DefMemPerCPU=100"
        lines += [f"PartitionName=lot{at} {where}", f"PartitionName=lot{at}-high PriorityTier=9 {where}"]
    return "\n".join(lines) + "\n"


def divide(cluster: Cluster) -> None:
    """Divide a cluster of eight hosts into lots."""
    cluster.put("/tmp/accounting", accounting())
    cluster.ctl("sh", "-c", "sacctmgr -iQ < /tmp/accounting")
    cluster.put("/etc/slurm/resume", RESUME)
    cluster.ctl("chmod", "755", "/etc/slurm/resume")
    licenses = ",".join(f"lot{at}:1" for at in range(len(HOSTS)))
    cluster.ctl("sed", "-i", f"s/^Licenses=.*/Licenses=solver:1,{licenses}/", "/etc/slurm/slurm.conf")
    cluster.put("/tmp/lots.conf", slurm_conf())
    cluster.ctl("sh", "-c", "cat /tmp/lots.conf >> /etc/slurm/slurm.conf")
    cluster.ctl("sed", "-i", f"s/^partitions=.*/partitions={','.join(PARTITIONS)}/", "/etc/cadenza/lua.conf")
    restart(cluster)


def restart(cluster: Cluster) -> None:
    """Restart slurmctld and wait until its hosts are back."""
    cluster.service("ctl", "restart", "slurmctld")
    wait_for("slurmctld", lambda: "UP" in cluster.ctl("scontrol", "ping", check=False), 60)


@dataclass(frozen=True)
class Scenario:
    """What is submitted in one lot, and what Slurm shows of it."""

    run: Callable[[Lot], object]
    shows: str
    """What plain Slurm's outcome contains, or the rule had no effect."""
    hosts: int = 1
    disturbed: bool = False
    """True if it asks for the disturbance."""


def play(
    name: str, scenarios: Mapping[str, Scenario], flags: Sequence[tuple[str, ...]], disturbance: Callable[[], object]
) -> dict[str, list[object]]:
    """Play scenarios with each of these flags, as many at once as there are lots; return an outcome for each flag.

    An outcome is the value that the scenario returned, or the exception that it raised. Disturbed ones come last, all
    at once.
    """
    outcomes: dict[str, list[object]] = {scenario: [None] * len(flags) for scenario in scenarios}
    for disturbed in (False, True):
        chosen = {scenario: one for scenario, one in scenarios.items() if one.disturbed == disturbed}
        tasks = [(scenario, at) for scenario in chosen for at in range(len(flags))]
        barrier = threading.Barrier(max(len(tasks), 1), action=disturbance)

        def work(lot: Lot, tasks: list[tuple[str, int]] = tasks, barrier: threading.Barrier = barrier) -> None:
            while mine := [task for task in tasks if scenarios[task[0]].hosts == len(lot.hosts)]:
                scenario, at = mine[0]
                tasks.remove(mine[0])
                lot.flag = flags[at]
                try:
                    outcomes[scenario][at] = scenarios[scenario].run(lot)
                except Exception as error:  # noqa: BLE001 - its test raises it
                    outcomes[scenario][at] = error
                    barrier.abort()  # the others would wait for it
                finally:
                    lot.clear()

        lots = [Lot(Cluster(name), at, barrier.wait) for at in range(len(HOSTS))]
        with ThreadPoolExecutor(len(lots)) as pool:
            for done in [pool.submit(work, lot) for lot in lots]:
                done.result()
        for lot in lots:
            lot.cluster.hang_up()
    return outcomes
