"""A running container cluster as tests see it: commands in containers, submissions, deadline polls."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "container"
TRAIN = "/opt/cadenza/examples/train.py"
PYTHON = "/opt/cadenza/bin/python"
TORCHRUN = "/opt/cadenza/bin/torchrun"
CADENZA = "/opt/cadenza/bin/cadenza"
RESULTS = "/home/shared/results"
KEPT = "/home/shared/checkpoints"


def wait_for(what: str, probe: Callable[[], Any], timeout: float = 60, interval: float = 0.25) -> Any:
    """Poll until ``probe`` returns something true and return it; fail with ``what`` at the deadline."""
    deadline = time.monotonic() + timeout
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(interval)


@dataclass(frozen=True)
class Cluster:
    """One cluster started by ``container/up``."""

    name: str

    def exec(
        self, container: str, *command: str, user: str | None = None, check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        as_user = ["--user", user] if user else []
        done = subprocess.run(
            [CONTAINER / "exec", "--name", self.name, *as_user, container, *command],
            capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{container}: {' '.join(command)} → {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def ctl(self, *command: str, **options: Any) -> str:
        return self.exec("ctl", *command, **options).stdout

    # --- Jobs ---------------------------------------------------------------------------------------

    def sbatch(self, *options: str, user: str = "alice", command: str, check: bool = True) -> Any:
        """Submit ``command`` and return the job id (or the failed process when ``check`` is off)."""
        done = self.exec(
            "ctl", "sbatch", "--parsable", "--chdir=/home/shared", f"--output={RESULTS}/%j.log",
            *options, f"--wrap={command}", user=user, check=check,
        )  # fmt: skip
        return int(done.stdout.strip().split(";")[0]) if check else done

    def train(
        self, name: str, *arguments: str, options: tuple[str, ...] = (), user: str = "alice", ranks: int = 1
    ) -> int:
        """Submit one real training job whose result file is named ``name``."""
        start = PYTHON if ranks == 1 else f"{TORCHRUN} --standalone --nproc-per-node={ranks}"
        command = f"{start} {TRAIN} --out {RESULTS}/{name}.json {' '.join(arguments)}"
        return self.sbatch(
            f"--job-name={name}", "--mem=1500", f"--cpus-per-task={ranks}", *options, user=user, command=command
        )

    def job(self, job_id: int) -> dict[str, str]:
        """Return ``scontrol show job`` as a dict, empty when Slurm no longer knows the job."""
        done = self.exec("ctl", "scontrol", "-o", "show", "job", str(job_id), check=False)
        if done.returncode:
            return {}
        return dict(field.split("=", 1) for field in done.stdout.split() if "=" in field)

    def state(self, job_id: int) -> str:
        return self.job(job_id).get("JobState", "GONE")

    def wait_state(self, job_id: int, *states: str, timeout: float = 60) -> str:
        def probe() -> str:
            state = self.state(job_id)
            if state in {"FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED"} and state not in states:
                raise AssertionError(f"job {job_id} is {state}\n{self.log(job_id)}")
            return state if state in states else ""

        return str(wait_for(f"job {job_id} in {states}, is {self.state(job_id)}", probe, timeout))

    def wait_done(self, *job_ids: int, timeout: float = 180) -> None:
        for job_id in job_ids:
            self.wait_state(job_id, "COMPLETED", timeout=timeout)

    def log(self, job_id: int) -> str:
        return self.exec("ctl", "cat", f"{RESULTS}/{job_id}.log", check=False).stdout

    def result(self, name: str) -> dict[str, Any]:
        """Return what the training job wrote."""
        return dict(json.loads(self.ctl("cat", f"{RESULTS}/{name}.json")))

    # --- Cadenza ------------------------------------------------------------------------------------

    def cadenza(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.exec("ctl", CADENZA, *arguments, check=check)

    def why(self, job_id: int) -> dict[str, Any]:
        return dict(json.loads(self.cadenza("why", str(job_id), "--json").stdout))

    def top(self) -> dict[str, Any]:
        return dict(json.loads(self.cadenza("top", "--once", "--json").stdout))

    def sql(self, query: str) -> list[list[Any]]:
        """Read the service's store."""
        script = (
            "import json,sqlite3,sys; "
            "db=sqlite3.connect('file:/var/lib/cadenza/cadenza.db?mode=ro',uri=True,timeout=10); "
            "print(json.dumps(db.execute(sys.argv[1]).fetchall()))"
        )
        return list(json.loads(self.ctl("python3", "-c", script, query)))

    def power(self, container: str, action: str) -> None:
        """``kill`` or ``start`` a whole container, as a host that loses its power."""
        if action == "kill":
            self.exec(container, "/opt/cluster/thaw")
        engine = os.environ.get("CADENZA_ENGINE", "docker")
        subprocess.run([engine, action, f"{self.name}-{container}"], check=True, stdout=subprocess.DEVNULL)

    def running(self, container: str, program: str) -> bool:
        """Whether the supervisor says that a daemon runs."""
        return "RUNNING" in self.exec(container, "supervisorctl", "status", program, check=False).stdout

    def service(self, container: str, action: str, program: str) -> None:
        """``supervisorctl start|stop|restart`` of one daemon in one container."""
        self.exec(container, "supervisorctl", action, program)

    def configure(self, toml: str) -> None:
        """Lay a configuration over the cluster's own and have the service read it."""
        self.exec("ctl", "sh", "-c", 'printf "%s" "$1" > /etc/cadenza/conf.d/zz-test.toml', "sh", toml)
        self.exec("ctl", "supervisorctl", "signal", "HUP", "cadenzad")

    def restart(self, toml: str) -> None:
        """Restart the service under a configuration, and wait until job_submit.lua goes by its admission."""
        self.configure(toml)
        self.service("ctl", "restart", "cadenzad")
        held = 'admission = "held"' in toml

        def told() -> bool:
            done = self.exec("ctl", "cat", "/run/cadenza/admission", check=False)
            return done.returncode == 0 and done.stdout.startswith("held") == held

        wait_for("job_submit.lua told how jobs are admitted", told, 90)

    def queue(self) -> str:
        """Return all that Slurm says of nodes and jobs, or that it does not answer."""
        try:
            answers = [self.exec("ctl", "scontrol", "-o", "show", what, check=False) for what in ("nodes", "jobs")]
        except subprocess.TimeoutExpired as error:
            return str(error)
        return "".join(answer.stdout + answer.stderr for answer in answers)

    def logs(self) -> str:
        """Return the ends of all daemons' logs, also of containers that died."""
        command = [CONTAINER / "logs", "--name", self.name, "--lines", "120"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def reset(self) -> None:
        """Cancel every job and wait until the queue is empty and the nodes are idle."""
        self.ctl("scancel", "--user=alice", check=False)
        self.ctl("scancel", "--user=bob", check=False)
        wait_for("an empty queue", lambda: not self.ctl("squeue", "-h").strip(), 60)


def up(name: str, *options: str) -> Cluster:
    """Start a cluster (the image is built when needed) and return it."""
    subprocess.run([CONTAINER / "build"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([CONTAINER / "up", "--name", name, *options], check=True, stdout=subprocess.DEVNULL)
    return Cluster(name)


def down(name: str) -> None:
    subprocess.run([CONTAINER / "down", "--name", name], check=False, stdout=subprocess.DEVNULL)
