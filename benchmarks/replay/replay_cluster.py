"""The replay's cluster in containers: start it, hand over the plan, watch it run, collect what was recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from philly_sample import DAY_S
from replay_figures import SACCT, Record, read_sacct
from replay_sample import CALC_S, ITERATION_S, MEMORY_GB, SHARES, WEIGHTS, Submission

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "container"))

from cadenza.slurm_plugin.history.job_records import FIELDS, NODES

import cluster as driver
from cluster import CONTAINER, PYTHON, ClusterError

HERE = Path(__file__).resolve().parent
PLACE = "/home/shared/replay"
SCRIPTS = ("replay_job.py", "replay_submit.py", "replay_probe.py")
USER = "alice"
NAME = "train"
"""Name of all jobs: users submit the same script again, and it is by name that checkpoints are known."""
BOOKS_S = 60.0
"""Longest time until slurmdbd has the last jobs."""

Plan = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Size:
    """Hardware that each node claims to have; the sum is the same on both sides."""

    nodes: int
    gpus: int
    cpus: int
    memory_mb: int

    @property
    def words(self) -> list[str]:
        """Options of ``container/up``."""
        pairs = (
            ("--nodes", self.nodes), ("--gpus-per-node", self.gpus),
            ("--cpus", self.cpus), ("--memory-mb", self.memory_mb),
        )  # fmt: skip
        return [word for name, value in pairs for word in (name, str(value))]


@dataclass
class Cluster(driver.Cluster):
    """A cluster of plain Slurm, or with Cadenza under ``settings``."""

    size: Size
    lanes: int = 1
    settings: Path | None = None

    def start(self, extra: Mapping[str, str]) -> float:
        """Start it afresh, with extra files in /etc/cadenza; return the seconds that it took."""
        began = time.monotonic()
        side = ["--config", self.settings] if self.settings else ["--no-cadenza"]
        self.up(*self.size.words, "--lanes", self.lanes, *side)
        for name, text in extra.items():
            self.put(f"/etc/cadenza/{name}", text)
        return time.monotonic() - began

    def set_site(self, factor: float) -> None:
        """Give Slurm a site's priority, its accounts, and the defaults of backfill, with times divided by a factor."""
        limits = f"bf_window={max(round(DAY_S / 60 / factor), 1)},bf_resolution={max(round(60 / factor), 1)}"
        week = round(7 * DAY_S / factor / 60)
        lines = {
            "SchedulerParameters": f"bf_interval=1,{limits},sched_interval=1,requeue_delay=0",
            "PriorityMaxAge": _minutes(week), "PriorityDecayHalfLife": _minutes(week),
            "PriorityCalcPeriod": round(CALC_S / 60), "PriorityWeightAge": WEIGHTS["age"],
            "PriorityWeightFairshare": WEIGHTS["fairshare"],
        }  # fmt: skip
        words = " ".join(f"-e '/^{name}=/d'" for name in (*lines, "PriorityWeightPartition"))
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        self.run("ctl", "sh", "-c", f"sed -i {words} /etc/slurm/slurm.conf && printf '{text}' >>/etc/slurm/slurm.conf")
        for account, share in SHARES.items():
            self.run("ctl", "sacctmgr", "-iQ", "add", "account", account, f"Fairshare={share}")
            self.run("ctl", "sacctmgr", "-iQ", "add", "user", USER, f"Account={account}")
        self.run("ctl", "scontrol", "reconfigure")

    @property
    def place(self) -> Path:
        """Path of the replay's files on this machine."""
        return self.home / "replay"

    def hand_over(self, plan: Plan) -> None:
        """Put the scripts and the plan where the containers find them."""
        for folder in (self.place, self.place / "events", self.place / "progress", self.place / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o1777)
        for script in SCRIPTS:
            shutil.copy(HERE / script, self.place)
        (self.place / "plan.json").write_text(json.dumps(plan))

    def replay(self, patience_s: float) -> float:
        """Submit everything and wait for the queue to be empty; return the seconds since the epoch of the beginning.

        Raise ClusterError when jobs are left after ``patience_s``.
        """
        words = [str(CONTAINER / "exec"), "--name", self.name, "--user", USER, "ctl"]
        words += ["python3", f"{PLACE}/replay_submit.py", "--patience-s", str(patience_s)]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if done.returncode:
            left = self.run("ctl", "squeue", "-o", "%i %j %T %N %r", check=False)
            raise ClusterError(f"jobs were left after {patience_s:.0f} s\n{left}")
        return float((self.place / "began").read_text())

    def accounts(self) -> dict[str, Record]:
        """Return the jobs as Slurm's accounting has them, once all that it knows have ended there too."""
        until = time.monotonic() + BOOKS_S
        words = ["env", "SLURM_TIME_FORMAT=%s", "sacct", "-DXPn", "-a", "-S", "now-1day", "-o", SACCT]
        names = {str(one["id"]): one["name"] for one in self.submitted() if "id" in one}
        while True:
            found = read_sacct(self.run("ctl", *words), names)
            if all(record.end_s is not None for record in found.values()) or time.monotonic() > until:
                return found
            time.sleep(2)

    def history(self) -> str:
        """Return the accounting as ``cadenza whatif --sacct`` reads it."""
        words = ["sacct", "--allusers", "--duplicates", "-P", "-S", "now-1day"]
        return self.run("ctl", *words, f"--format={','.join((*FIELDS, NODES))}")

    def submitted(self) -> list[dict[str, Any]]:
        """Return what each sbatch did."""
        return [json.loads(line) for line in (self.place / "submitted.jsonl").read_text().splitlines()]

    def events(self) -> dict[str, list[dict[str, Any]]]:
        """Return what each job wrote of itself, by name."""
        files = sorted((self.place / "events").glob("*.jsonl"))
        return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}

    def look(self) -> list[dict[str, list[float]]]:
        """Return what the daemons have used so far, a container an entry."""
        hosts = ["ctl", *(f"node{number}" for number in range(1, self.size.nodes + 1))]
        return [json.loads(self.run(host, "python3", f"{PLACE}/replay_probe.py")) for host in hosts]


def _minutes(minutes: int) -> str:
    """Return a time as slurm.conf has it, days-hours:minutes:seconds."""
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def commands(jobs: Sequence[Submission], size: Size, *, managed: bool) -> Plan:
    """Return the plan: each job's time and its sbatch, with its share of a node's CPUs and 1 GB a GPU."""
    return [
        {"name": job.name, "submit_s": job.submit_s, "command": _sbatch(job, size, managed=managed)} for job in jobs
    ]


def _sbatch(job: Submission, size: Size, *, managed: bool) -> list[str]:
    start = (
        f"{PYTHON} {PLACE}/replay_job.py --name {job.name} --iterations {job.iterations} --iteration-s {ITERATION_S:g}"
    )
    each = job.gpus // job.nodes
    opted = ["--cadenza=share"] if managed else []
    opted += [f"--account={job.account}"] if job.account else []
    return [
        "sbatch", "--parsable", "--requeue", f"--job-name={NAME}", f"--output={PLACE}/logs/{job.name}.log",
        f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={size.cpus * each // size.gpus}",
        f"--gres=gpu:{each}", f"--mem={MEMORY_GB * each}G", f"--time={job.limit_min}", "--open-mode=append", *opted,
        f"--wrap=exec {'srun ' if job.nodes > 1 else ''}{start}",
    ]  # fmt: skip
