"""The cluster as tests see it: paced jobs and an empty queue before each test."""

from __future__ import annotations

from pathlib import Path

import cluster as driver
from cluster import PYTHON, SHARED, wait_for

KEPT = f"{SHARED}/checkpoints"
PACED_JOB = f"{SHARED}/paced_job.py"
FOUR_GPUS = ("--gres=gpu:4", "--cadenza")
FOREVER = 10**6
"""Iterations of a job that ends when its test says so."""
DEFAULT_POLICY = '[sharing]\nshare_between_users = false\n[policy]\norder = "levels"\nshare = "preemption"\n'
"""The policy that is shipped, in place of that of fast.toml."""
DAEMONS = (("ctl", "cadenzad"), ("node1", "cadenza-agent"), ("node2", "cadenza-agent"))
SOURCE = Path(__file__).with_name("paced_job.py")


class Cluster(driver.Cluster):
    """One cluster under test; its settings are those of fast.toml, and what a test lays over them."""

    settings: str | None = None
    """The settings laid over those of fast.toml; None before the first test."""

    def configure(self, toml: str) -> None:
        """Lay settings over those of fast.toml."""
        super().configure(toml)
        self.settings = toml

    def paced(
        self, name: str, *arguments: str, iterations: int, iteration_s: float = 0.02, user: str = "alice",
        options: tuple[str, ...] = FOUR_GPUS,
    ) -> int:  # fmt: skip
        """Submit a job that only sleeps, an iteration after the other."""
        command = f"exec {PYTHON} {PACED_JOB} --iterations {iterations} --iteration-s {iteration_s}"
        return int(
            self.sbatch(f"--job-name={name}", "--mem=500", *options, user=user, command=" ".join((command, *arguments)))
        )

    def reset(self) -> None:
        """Cancel every job and wait until the queue is empty."""
        for user in ("alice", "bob"):
            self.ctl("scancel", f"--user={user}", check=False)
        wait_for("an empty queue", lambda: not self.ctl("squeue", "-h").strip(), 60)

    def renew(self) -> None:
        """Empty the queue, start what a test has stopped, and go back to the settings of fast.toml."""
        self.reset()
        for container, program in DAEMONS:
            if not self.running(container, program):
                self.service(container, "start", program)
        if self.settings != "":
            self.configure("")
        wait_for("four idle lane nodes", self.ready, 60)

    def requeue(self, job: int) -> None:
        """Requeue a job as its user, and let it start soon also where Slurm has no requeue_delay (before 25.11)."""
        self.ctl("scontrol", "requeue", str(job), user="alice")
        ending = ("squeue", "-h", "--states=completing", f"--jobs={job}")
        wait_for("its end", lambda: not self.ctl(*ending, check=False))
        start = ("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds")  # refused where it runs again already
        self.exec(self.controller, *start, check=False)

    def ready(self) -> bool:
        """Return whether the service has opened every further lane, which needs both agents alive."""
        return self.idle_nodes() == 4
