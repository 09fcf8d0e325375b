"""A fault run on the container cluster: owners submit and disturb jobs, daemons are killed, root watches each host."""

from __future__ import annotations

import heapq
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressed_times import compress
from schedule import ITERATION_S, Event, PlannedJob, Schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "container"))

from cluster import ENGINE, PYTHON, Cluster, ClusterError, wait_for

HERE = Path(__file__).resolve().parent
PLACE = "/home/shared/faults"
SCRIPTS = ("digest_job.py", "watch.py")
SETTINGS, FULL_MEMORY = HERE / "faults.toml", HERE / "full_memory.toml"
MB_PER_GPU = 300
"""Memory that a job asks for on each host, for each GPU there."""
FULL_SHARE = 1.5
"""A host's memory with ``--memory full``, for all its GPUs: a lane's jobs fit, and not all jobs of two full lanes."""
RETRY_S = 2.0
SLURM_S = 8
"""Longest time of one of Slurm's commands; it is repeated."""
FORGOTTEN_S = 10.0
"""A submitted job that Slurm does not know for this long, while it answers, was forgotten and is submitted again."""
ATTEMPTS = 40
"""Starts of a job's process in one run of its batch script: processes are killed, too."""
JOB_NAME = "fault"
"""Slurm's name of all jobs: one that has run with checkpoints vouches for those of its name that wait."""
TIMES_FACTOR = 150.0
"""The first level then is 4 GPU seconds, and a job of which no move was seen keeps its GPUs for 4 s."""
WAYS = "select json_array_length(action, '$.jobs') from actions where kind = 'MakeWay' and ok"
LANES_S = 90.0
"""Longest time until all lanes are open, in seconds."""
SETTLE_S = 180.0
QUIET_LOOKS = 12
"""Looks in a row, a second apart, that find everything ended: long enough for a forgotten job to be noticed."""
PROGRAMS = {
    "slurmctld": "^slurmctld",
    "slurmdbd": "^slurmdbd",
    "cadenzad": "bin/cadenzad",
    "cadenza-agent": "bin/cadenza-agent",
}
"""Pattern of each daemon's command line among the children of the container's supervisor."""
_REFUSED = re.compile(r"Killing non-startable batch JobId=(\d+)")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


@dataclass
class Journal:
    """The run's own events, in order, for the verdict and the timeline."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, target: str, note: str = "") -> None:
        """Put an event down with its time."""
        self.rows.append({"t": time.time(), "kind": kind, "target": target, "note": note})


class FaultRun:
    """One cluster under one schedule; everything that was seen is in ``folder`` at the end."""

    full_memory = False
    """Each lane has its host's whole memory."""

    def __init__(self, name: str, schedule: Schedule, hosts: int, gpus: int, lanes: int, folder: Path) -> None:
        self.schedule = schedule
        self.hosts = [f"node{number + 1}" for number in range(hosts)]
        self.gpus, self.lanes = gpus, lanes
        self.folder = folder
        self.journal = Journal()
        self.ids: dict[str, int] = {}
        """Slurm's number of each submitted job, by name; the last one where it was submitted again."""
        self.cancelled: set[str] = set()
        self._name = name
        self._killer, self._owner = Cluster(name), Cluster(name)
        self._stop = threading.Event()

    @property
    def place(self) -> Path:
        """Path of the run's files in the cluster, on this machine."""
        return self._owner.home / "faults"

    # --- Life --------------------------------------------------------------------------------------------

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """Start a fresh cluster with the scripts in place, watched from the beginning to the end; remove it after.

        Its agents have no driver, in which the jobs, which have locks and no GPU memory, would be on no GPU.
        """
        sizes = ("--nodes", len(self.hosts), "--gpus-per-node", self.gpus, "--lanes", self.lanes, "--gpu-memory-mb", 0)
        self._owner.up(*sizes, *self.up_options(), "--config", SETTINGS)
        try:
            for part in ("", "checkpoints", "results", "logs"):
                (self.place / part).mkdir(exist_ok=True)
                (self.place / part).chmod(0o1777)
            for script in SCRIPTS:
                shutil.copy(HERE / script, self.place)
            with ExitStack() as stack:
                for container in ("ctl", *self.hosts):
                    stack.enter_context(self._watched(container))
                self.prepare()
                yield
                self._stop.set()
        finally:
            self._stop.set()
            self._owner.down()

    def up_options(self) -> tuple[object, ...]:
        """Return further options of ``container/up``."""
        memory_mb = round(FULL_SHARE * MB_PER_GPU * self.gpus)
        return ("--memory-mb", memory_mb, "--full-memory", "--config", FULL_MEMORY) if self.full_memory else ()

    def prepare(self) -> None:
        """Change the cluster before the first job, and wait until its lanes are open.

        The policy's times are made so short that jobs of seconds make way for others.
        """
        compress(self._owner, TIMES_FACTOR)
        wait_for("open lanes", lambda: self._owner.idle_nodes() == len(self.hosts) * self.lanes, LANES_S)

    @contextmanager
    def _watched(self, container: str) -> Iterator[None]:
        """Keep a watcher in a container, also after the container was stopped, and its output in ``folder``."""
        role = "ctl" if container == "ctl" else "node"
        words = [ENGINE, "exec", f"{self._name}-{container}", PYTHON, f"{PLACE}/watch.py", role]
        done = threading.Event()
        with (self.folder / f"{container}.jsonl").open("ab") as output:

            def keep() -> None:
                while not done.is_set():
                    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=sys.stderr)
                    while child.poll() is None and not done.wait(0.5):
                        pass
                    child.kill()
                    child.wait()
                    done.wait(0.5)

            thread = threading.Thread(target=keep)
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()

    def play(self) -> None:
        """Play the schedule: owners in a thread of their own, kills in this one."""
        began_s = time.monotonic()
        owners = threading.Thread(target=self._play_owners, args=(began_s,))
        owners.start()
        for event in self.schedule.events:
            if event.kind == "kill":
                _sleep_until(began_s + event.at_s)
                self.journal.add("kill", event.target, self.kill(event))
        _sleep_until(began_s + self.schedule.kills_until_s)
        self.journal.add("settle", "")
        self.settle(SETTLE_S)
        self._stop.set()
        owners.join()
        self.journal.add("end", "")

    def settle(self, patience_s: float) -> bool:
        """Wait until every job has ended and every node is idle, at most ``patience_s``; return whether that came."""
        deadline = time.monotonic() + patience_s
        quiet = 0
        while time.monotonic() < deadline:
            quiet = quiet + 1 if self._is_quiet() else 0
            if quiet >= QUIET_LOOKS:
                return True
            time.sleep(1)
        return False

    def _is_quiet(self) -> bool:
        seen = last_sample(self.folder / "ctl.jsonl")
        if not seen.get("up") or len(self.ids) < len(self.schedule.jobs):
            return False
        ended = {int(job["JobId"]) for job in seen["jobs"] if job["JobState"] in ENDED}
        over = all(not self._left(name) or number in ended for name, number in list(self.ids.items()))
        idle = [node for node in seen["nodes"] if node["State"] == "IDLE"]
        return over and len(ended) == len(seen["jobs"]) and len(idle) == len(self.hosts) * self.lanes

    # --- Kills -------------------------------------------------------------------------------------------

    def kill(self, event: Event) -> str:
        """``kill -9`` the event's victim; return a note on what was met."""
        host, program = event.target.split(":")
        if program == "client":
            return self._kill_client(host, event.draw)
        return "" if self.signal(host, program, "KILL") else "was not running"

    def signal(self, host: str, program: str, name: str) -> bool:
        """Send a daemon a signal; return whether it runs."""
        lane = program.removeprefix("slurmd-lane")
        node = host if lane == "0" else f"{host}-l{lane}"
        pattern = PROGRAMS.get(program) or rf"slurmd (-D|-f \S+ -Z) -N {node}( |$)"
        return self._killer.exec(host, "pkill", f"-{name}", "-P", "1", "-f", pattern, check=False).returncode == 0

    def _kill_client(self, host: str, draw: float) -> str:
        found = self._killer.exec(host, "pgrep", "-f", f"^{PYTHON} {PLACE}/digest_job.py", check=False).stdout.split()
        if not found:
            return "no process there"
        pid = found[int(draw * len(found))]
        self._killer.exec(host, "kill", "-9", pid, check=False)
        return f"pid {pid}"

    # --- Owners ------------------------------------------------------------------------------------------

    def _play_owners(self, began_s: float) -> None:
        """Do what the jobs' owners do at its time, again after a failure, and look after forgotten jobs."""
        due: list[tuple[float, int, Event]] = [
            (began_s + event.at_s, number, event)
            for number, event in enumerate(self.schedule.events)
            if event.kind != "kill"
        ]
        heapq.heapify(due)
        missing: dict[str, float] = {}
        look_s = began_s
        while not self._stop.is_set():
            if due and due[0][0] <= time.monotonic():
                _, number, event = heapq.heappop(due)
                if not self._do(event):
                    heapq.heappush(due, (time.monotonic() + RETRY_S, number, event))
            elif time.monotonic() >= look_s:
                look_s = time.monotonic() + RETRY_S
                for name in self._forgotten(missing):
                    self.journal.add("forgotten", name, f"job {self.ids[name]}")
                    self._submit(self.schedule.jobs[name])
            else:
                time.sleep(0.1)

    def _do(self, event: Event) -> bool:
        """Do one thing; return False where it is to be tried again."""
        job = self.schedule.jobs[event.target]
        if event.kind == "submit":
            return self._submit(job)
        if job.name not in self.ids:
            return False
        number = str(self.ids[job.name])
        if event.kind == "cancel":
            if not (self.place / "results" / job.name).exists():
                self.cancelled.add(job.name)
            return self._slurm(job.user, "scancel", number) is not None
        if event.kind == "requeue":
            done = self._slurm(job.user, "scontrol", "requeue", number)
            self.journal.add("requeue", f"{job.name} ({number})", "refused" if done is None else "")
            return True
        host = self.hosts[int(event.draw * len(self.hosts))]
        if job.hosts == 1:
            moved = self._owner.exec("ctl", "cadenza", "move", number, "--to", host, check=False)
            self.journal.add("move", f"{job.name} ({number})", moved.stderr.strip()[-200:] or f"to {host}")
        return True

    def _submit(self, job: PlannedJob) -> bool:
        queue = self._slurm(job.user, "squeue", "-h", "-u", job.user, "-O", "JobID:20,STDOUT:200")
        if queue is None:
            return False
        there = next((line for line in queue.splitlines() if line.endswith(f"/{job.name}.log")), None)
        if there is None:
            there = self._slurm(job.user, *self._sbatch(job))
        if there is None:
            return False
        self.ids[job.name] = int(there.split()[0].split(";")[0])
        self.journal.add("submit", f"{job.name} ({self.ids[job.name]})", f"{job.hosts} x {job.gpus} GPUs of {job.user}")
        return True

    def _sbatch(self, job: PlannedJob) -> Sequence[str]:
        start = (
            f"{PYTHON} {PLACE}/digest_job.py --name {job.name} --iterations {job.iterations} "
            f"--iteration-s {ITERATION_S} --folder {PLACE}"
        )
        # A killed slurmctld forgets that a step has ended; without --overlap the next srun waits for that step's GPUs.
        # One that has just started knows no node yet, and an srun that asks then asks again after more than a minute.
        launch = f"srun --overlap --immediate=5 --kill-on-bad-exit=1 {start}" if job.hosts > 1 else start
        once = f"export ATTEMPT=$ATTEMPT-$RANDOM; {launch} && exit 0; sleep 0.5"
        script = f"for ATTEMPT in $(seq {ATTEMPTS}); do {once}; done; exit 1"
        return (
            "sbatch", "--parsable", "--requeue", "--open-mode=append", f"--chdir={PLACE}", f"--job-name={JOB_NAME}",
            f"--output={PLACE}/logs/{job.name}.log", f"--nodes={job.hosts}", "--ntasks-per-node=1",
            f"--mem={MB_PER_GPU * job.gpus}", "--cpus-per-task=1", f"--gres=gpu:{job.gpus}", "--time=60", "--cadenza",
            f"--wrap={script}",
        )  # fmt: skip

    def _slurm(self, user: str, *command: str) -> str | None:
        """Return the output of a command of Slurm's; None when it failed or took too long."""
        try:
            done = self._owner.exec("ctl", "timeout", str(SLURM_S), *command, user=user, check=False)
        except ClusterError:
            return None
        return None if done.returncode else done.stdout

    def _forgotten(self, missing: dict[str, float]) -> list[str]:
        """Return the jobs that a killed slurmctld lost: unknown to it although they have not ended, or not launched.

        It forgets what it had not saved, and fails a job that it launches for the second time without knowing it. Both
        happen without Cadenza too, so the owner submits the job again.
        """
        seen = last_sample(self.folder / "ctl.jsonl")
        if not seen.get("up") or time.time() - seen["t"] > FORGOTTEN_S:
            missing.clear()
            return []
        log = (self.place.parents[1] / "log" / "ctl" / "slurmctld.log").read_text(errors="replace")
        refused = set(_REFUSED.findall(log))
        known = {
            (job["JobName"], job["JobId"])
            for job in seen["jobs"]
            if job["JobState"] != "FAILED" or job["JobId"] not in refused
        }
        for name, number in self.ids.items():
            over = name in self.cancelled or (self.place / "results" / name).exists()
            if over or (name, str(number)) in known:
                missing.pop(name, None)
            else:
                missing.setdefault(name, time.monotonic())
        found = [name for name, since_s in missing.items() if time.monotonic() - since_s > FORGOTTEN_S]
        for name in found:
            missing.pop(name)
        return found

    # --- What is left ------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Copy the journals and the books of service and agents to ``folder``, before the cluster goes."""
        shutil.copytree(self.place.parents[1] / "log", self.folder / "log", dirs_exist_ok=True)
        for part in ("results", "logs"):
            shutil.copytree(self.place / part, self.folder / part, dirs_exist_ok=True)
        (self.folder / "journal.json").write_text(json.dumps(self.journal.rows))
        books: dict[str, Any] = {"ids": self.ids, "cancelled": sorted(self.cancelled)}
        for host in self.hosts:
            books[host] = self._killer.exec(host, "cat", "/var/lib/cadenza/leases.json", check=False).stdout
        books["top"] = self._killer.exec("ctl", "cadenza", "top", "--once", "--json", check=False).stdout
        books["undo"], books["ways"] = self._undo_and_ways()
        books["why"] = {name: self._why(number) for name, number in self.ids.items() if self._left(name)}
        (self.folder / "books.json").write_text(json.dumps(books))

    def _undo_and_ways(self) -> tuple[str, list[int]]:
        """Return the record of what is the service's to undo, as JSON, and how many jobs made way at each time."""
        try:
            undo = self._killer.sql("select cast(record as text) from undo")
            return (undo[0][0] if undo else ""), [row[0] for row in self._killer.sql(WAYS)]
        except ClusterError:
            return "", []

    def _left(self, name: str) -> bool:
        return name not in self.cancelled and not (self.place / "results" / name).exists()

    def _why(self, number: int) -> str:
        done = self._killer.exec("ctl", "cadenza", "why", str(number), check=False)
        return done.stdout + done.stderr


def last_sample(path: Path) -> dict[str, Any]:
    """Return the last whole line of a watcher's output; empty without one."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 400_000, 0))
        lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
    return dict(json.loads(lines[-1])) if lines else {}


def _sleep_until(at_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    sleep(max(at_s - time.monotonic(), 0.0))
