"""The virtual machine of ``container/vm`` as tests see it: a whole cluster on one host, by systemd."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cluster as driver
from cluster import CONTAINER, PYTHON, RESULTS, ROOT, SERVER, SHARED, Shell, wait_for

PACED_JOB = f"{SHARED}/paced_job.py"
SOURCE = ROOT / "tests" / "cluster" / "paced_job.py"
BOOT_S = 1500
"""The first run makes the image and the disk, in minutes; without KVM a boot takes a minute or two."""
PATIENCE_S = 600
"""An emulated processor takes many times as long for everything, on a busy machine longer still."""
PAGE = """
import http.client, socket, sys
link = http.client.HTTPConnection("localhost")
link.sock = socket.socket(socket.AF_UNIX)
link.sock.connect("/run/cadenza-web/web.sock")
link.request("GET", sys.argv[1])
print(link.getresponse().read().decode())
"""
"""Prints a page of the unit cadenza-web."""
GROUP = """
import json, pathlib, sys
group = pathlib.Path("/sys/fs/cgroup") / pathlib.Path(f"/proc/{sys.argv[1]}/cgroup").read_text().strip()[4:]
job = next(one for one in group.parents if one.parent.name.endswith("slurmstepd.scope"))
files = [file for folder in (job, *sorted(job.rglob("*"))) if folder.is_dir() for file in sorted(folder.iterdir())]
names = ("cgroup.freeze", "cgroup.events", "cpuset.cpus", "cpu.max", "memory.max", "memory.high")
found = {str(file.relative_to(job)): file.read_text().split() for file in files if file.name in names}
print(json.dumps({"job": str(job), "own": str(group.relative_to(job)), "files": found}))
"""
"""Prints the files of all control groups of the job of a process."""
OUTAGE = """
import json, os, pathlib, signal, sys, time
root = pathlib.Path("/sys/fs/cgroup")
agent, *processes = sys.argv[1:]
jobs = [root / pathlib.Path(f"/proc/{process}/cgroup").read_text().strip()[4:] for process in processes]

def value(job, file, key):
    return int(dict(line.split() for line in (job / file).read_text().splitlines())[key])

def frozen():
    return [value(job, "cgroup.events", "frozen") for job in jobs]

def agents():
    try:
        group = (root / "system.slice/cadenza-agent.service/cgroup.procs").read_text().split()
        return {one for one in group if pathlib.Path(f"/proc/{one}/comm").read_text() == "cadenza-agent\\n"}
    except OSError:
        return set()

def sample():
    samples.append([time.monotonic(), frozen(), [value(job, "cpu.stat", "usage_usec") for job in jobs]])

def wait(goal):
    deadline = time.monotonic() + 600
    while not goal():
        assert time.monotonic() < deadline, frozen()
        time.sleep(0.1)

wait(lambda: sum(frozen()) == 1)
first = frozen()
wait(lambda: sum(frozen()) == 1 and frozen() != first)
time.sleep(3)
known, samples = agents(), []
assert agent in known
sample()
os.kill(int(agent), signal.SIGKILL)
while agents() <= known:
    sample()
    time.sleep(0.1)
print(json.dumps(samples))
"""
"""Waits for a change of turns, samples the processes' groups three seconds later, kills the agent, and goes on until
there is another one. A sample: monotonic time, which of the groups are frozen, and the CPU time of each in µs."""


@dataclass
class Machine(driver.Cluster):
    """All names of containers are this one machine."""

    console: Path = Path("/dev/null")
    """File for what the machine says while it boots."""
    options: tuple[str, ...] = ()
    """Further options of ``container/vm``."""

    def shell(self, container: str) -> Shell:
        words = (str(CONTAINER / "vm"), *self.options, "--commands", str(self.console))
        return self._shells.setdefault("", Shell(words, f"exec python3 -u -c {shlex.quote(SERVER)}\n"))

    def boot(self) -> None:
        """Start the machine and wait until systemd has started all units, and Slurm has both nodes."""
        self.exec("", "systemctl", "is-system-running", "--wait", check=False, timeout=BOOT_S)
        wait_for("two idle nodes", lambda: self.ctl("sinfo", "-hN", "-o", "%T").split() == ["idle"] * 2, PATIENCE_S)
        self.put(PACED_JOB, SOURCE.read_text())

    def down(self) -> None:
        for shell in self._shells.values():
            shell.close()

    def service(self, container: str, action: str, program: str) -> None:
        """``systemctl start|stop|restart`` of a unit."""
        self.exec(container, "systemctl", action, program, timeout=PATIENCE_S)

    def shows(self, unit: str, key: str) -> str:
        """Return a property of a unit."""
        return self.ctl("systemctl", "show", "--value", f"--property={key}", unit).strip()

    def paced(self, user: str, iterations: int, *options: str, claims: str = "", model: str = "") -> int:
        """Submit a job that only sleeps, 0.1 s an iteration; their number tells its process from others."""
        command = f"exec {PYTHON} {PACED_JOB} {claims} --iteration-s 0.1 --iterations {iterations}"
        flag = f"--cadenza=model={model}" if model else "--cadenza"
        return int(self.sbatch("--mem=200", flag, *options, user=user, command=command))

    def groups(self, iterations: int) -> dict[str, Any]:
        """Return the control groups of a paced job: the job's own, that of its process, and the files of all."""
        process = self.process(iterations)
        return dict(json.loads(self.ctl("python3", "-c", GROUP, process))) if process else {}

    def process(self, iterations: int) -> str:
        """Return the number of the process of a paced job, empty where there is none."""
        found = self.exec("", "pgrep", "-f", f"python.*--iterations {iterations} *$", check=False).stdout.split()
        return found[0] if found else ""

    @contextmanager
    def setting(self, unit: str, line: str) -> Iterator[None]:
        """Have a line in the section [Service] of a unit."""
        file = f"/run/systemd/system/{unit}.service.d/test.conf"
        self.put(file, f"[Service]\n{line}\n")
        self.ctl("systemctl", "daemon-reload")
        yield
        self.ctl("rm", file)
        self.ctl("systemctl", "daemon-reload")

    def logs(self) -> str:
        """Return the end of the journal, and of the jobs' output."""
        tail = f"journalctl --no-pager -n 150 -u 'cadenza*' -u 'slurm*'; tail -n 20 {RESULTS}/*.log"
        return self.exec("", "sh", "-c", tail, check=False).stdout


def phase(groups: dict[str, Any]) -> str:
    """Return whether a job's process is "frozen", by a ``cgroup.freeze`` of Slurm's above it, "running", or neither."""
    if not groups:
        return "gone"
    files, own = groups["files"], Path(groups["own"])
    ordered = any(files.get(str(folder / "cgroup.freeze")) == ["1"] for folder in (own, *own.parents))
    shown = files[str(own / "cgroup.events")]
    done = shown[shown.index("frozen") + 1] == "1"
    return {(True, True): "frozen", (False, False): "running"}.get((ordered, done), "changing")
