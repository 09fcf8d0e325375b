"""The demo's cluster: start it, submit as a user, watch, collect its records."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metrics import Result, Stretch, Switch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "container"))

from cadenza.slurm_plugin.service.store.reader import StoreReader

from cluster import CADENZA, PYTHON, RESULTS, TORCHRUN, TRAIN, Cluster, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from workload import Job

MEMORY_MB = 1500
TIME_LIMIT_MIN = 10
"""Without a limit Slurm's backfill lets small jobs pass large ones for ever."""
NODES = ("node1", "node2")
LANES_S = 60.0
"""Longest time until all lanes are open, in seconds."""
QUEUE_FORMAT = "%i|%u|%j|%T|%N|%r"
COPY_STORE = (
    "import sqlite3; source = sqlite3.connect('/var/lib/cadenzad/cadenza.db'); "
    "source.backup(sqlite3.connect('/home/shared/store.db'))"
)


@dataclass(frozen=True)
class Queued:
    """One line of squeue."""

    id: int
    user: str
    name: str
    state: str
    node: str
    reason: str

    @classmethod
    def of(cls, line: str) -> Queued:
        """Return one line in QUEUE_FORMAT as a value."""
        number, *texts = line.strip().split("|")
        return cls(int(number), *texts)


@dataclass
class DemoCluster(Cluster):
    """A cluster of the demo; with ``shared`` set its jobs are submitted with --cadenza."""

    shared: bool

    def start(self, lanes: int, settings: Path | None) -> None:
        """Start it afresh: two nodes of four GPUs; the service opens the lanes above 0."""
        extra = ["--config", settings] if settings else ["--no-cadenza"]
        self.up("--nodes", len(NODES), "--gpus-per-node", 4, "--lanes", lanes, *extra)
        for node in NODES:
            # Read PyTorch once, so that no run pays for a cold disk.
            self.run(node, PYTHON, "-c", "import torch, torch._dynamo")
        wait_for("all lanes open", lambda: self.idle_nodes() == lanes * len(NODES), LANES_S)

    def submit(self, job: Job) -> int:
        """Submit a job as its user and return its id."""
        options = [f"--job-name={job.job}", f"--gres=gpu:{job.gpus}", "--nodes=1", f"--mem={MEMORY_MB}"]
        options += [f"--cpus-per-task={job.ranks}", f"--output={RESULTS}/{job.job}.log", "--parsable"]
        options.append(f"--time={TIME_LIMIT_MIN}")
        options += ["--cadenza"] if self.shared else []
        return int(self.run("ctl", "sbatch", *options, f"--wrap={command_of(job)}", user=job.user).split(";")[0])

    def report(self, job: Job) -> dict[str, Any] | None:
        """Return a job's report; None before its end."""
        path = self.home / "results" / f"{job.job}.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def end_of_log(self, job: Job) -> str:
        """Return the end of a job's output."""
        path = self.home / "results" / f"{job.job}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else "(no output)"

    def watch(self, interval_s: float) -> subprocess.Popen[str]:
        """Start ``cadenza top --json`` on the controller: a line of its output every interval."""
        return self.stream("ctl", CADENZA, "top", "--json", "--interval", str(interval_s))

    def watch_queue(self, interval_s: float) -> subprocess.Popen[str]:
        """Start squeue on the controller every interval: a line a job, and an empty one after the last."""
        script = f"while squeue --noheader --format='{QUEUE_FORMAT}'; do echo; sleep {interval_s}; done"
        return self.stream("ctl", "sh", "-c", script)

    def stop_watching(self) -> None:
        """End the watchers: they outlive the processes here that read them."""
        self.run("ctl", "sh", "-c", "pkill -f '[c]adenza top|[s]queue' || true")

    def recorded(self, names: dict[int, str]) -> tuple[tuple[Stretch, ...], tuple[Switch, ...]]:
        """Return the stretches and switches of these jobs (name by id) from the service's store."""
        self.run("ctl", "python3", "-c", COPY_STORE)
        with StoreReader(self.home / "store.db") as reader:
            leases, switches = reader.leases(), reader.switches(limit=100_000)
        return (
            tuple(
                Stretch(names[row.job], row.host, row.gpus, row.from_s, row.to_s) for row in leases if row.job in names
            ),
            tuple(Switch(row.kind, row.boundary_s, row.total_s) for row in switches if row.job in names),
        )


def command_of(job: Job) -> str:
    """Return the job's batch script: one process, or a rank for each of ``ranks`` under torchrun."""
    start = PYTHON
    if job.ranks > 1:
        start = f"{TORCHRUN} --standalone --nproc-per-node={job.ranks}"
    arguments = f"--model {job.model} --iterations {job.iterations} --iteration-s {job.iteration_s} --seed {job.seed}"
    files = f"--checkpoint-dir {RESULTS}/{job.job} --out {RESULTS}/{job.job}.json"
    return f"export OMP_NUM_THREADS=1; exec {start} {TRAIN} {arguments} {files}"


def result_of(job: Job, report: dict[str, Any], submit_s: float) -> Result:
    """Return a finished job's times and digest."""
    return Result(
        job.job, job.user, job.gpus, submit_s, report["started_s"], report["iteration_100_s"],
        report["ended_s"], job.iterations, report["losses_sha256"],
    )  # fmt: skip


def allocations(jobs: Sequence[Job], reports: dict[str, dict[str, Any]]) -> tuple[Stretch, ...]:
    """Return the stretches of plain Slurm: a job holds its GPUs from its allocation to its end."""
    found = [(job.job, reports[job.job]) for job in jobs]
    return tuple(
        Stretch(name, report["host"], tuple(report["gpus"]), report["allocated_s"], report["ended_s"])
        for name, report in found
    )
