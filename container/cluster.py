"""A container cluster driven from Python, for the tests, the demo, the examples and the benchmarks.

Starting ``docker exec`` takes longer than most commands that it runs, so each container gets one process that runs
commands until the cluster goes away. Those of ``cadenza`` are forked from it, imports done, and it asks the container's
supervisor itself.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time  # noqa: TID251 (drives a real cluster in real time)
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONTAINER = ROOT / "container"
ENGINE = os.environ.get("CADENZA_ENGINE", "docker")
RELEASE = os.environ.get("SLURM", "26.05")
"""Of Slurm; each is that of a release of Debian."""
DEBS = ROOT / "dist" / ("debs" if RELEASE == "26.05" else f"debs-{RELEASE}")
BIN = "/opt/cadenza/bin"
PYTHON, TORCHRUN, CADENZA = f"{BIN}/python", f"{BIN}/torchrun", f"{BIN}/cadenza"
EXAMPLES = "/opt/cadenza/examples"
TRAIN = f"{EXAMPLES}/train.py"
SHARED = "/home/shared"
RESULTS = f"{SHARED}/results"
GONE = 137
"""Exit code of a command whose container is not there."""
LACKING = 3
"""Exit code of the container scripts when the machine lacks something; they have named it."""
FAILED = frozenset({"FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED"})
SERVER = """
import http.client, importlib, json, os, pwd, socket, sqlite3, subprocess, sys, tempfile, xmlrpc.client

ALREADY_STARTED, NOT_RUNNING = 60, 70

class Socket(xmlrpc.client.Transport):
    def make_connection(self, host):
        link = http.client.HTTPConnection(host)
        link.sock = socket.socket(socket.AF_UNIX)
        link.sock.connect("/run/supervisor.sock")
        return link

def supervise(action, name, value):
    daemons = xmlrpc.client.ServerProxy("http://localhost", Socket()).supervisor
    try:
        if action in ("stop", "restart"):
            try:
                daemons.stopProcess(name)
            except xmlrpc.client.Fault as fault:
                if fault.faultCode != NOT_RUNNING:
                    raise
        if action in ("start", "restart"):
            daemons.startProcess(name)
        if action == "signal":
            daemons.signalProcess(name, value)
        return 0, json.dumps(daemons.getProcessInfo(name)), ""
    except xmlrpc.client.Fault as fault:
        return int(fault.faultCode != ALREADY_STARTED), "", fault.faultString
    except OSError as error:
        return 1, "", str(error)

def run(words, user):
    person = pwd.getpwnam(user or "root")
    groups = os.getgrouplist(person.pw_name, person.pw_gid)
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, user=person.pw_uid, group=person.pw_gid,
            extra_groups=groups, env={**os.environ, "HOME": person.pw_dir},
        )
    except OSError as error:
        return 127, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

def forked(words):
    main = importlib.import_module("cadenza.slurm_plugin.cli.main").main
    importlib.import_module("cadenza.slurm_plugin.cli." + main.places[words[0]].partition(":")[0])
    files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    child = os.fork()
    if child == 0:
        sys.argv, (sys.stdout, sys.stderr), code = ["cadenza", *words], files, 1
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, *(file.seek(0) or file.read() for file in files)

def query(text):
    store = sqlite3.connect("file:/var/lib/cadenzad/cadenza.db?mode=ro", uri=True, timeout=10)
    try:
        return 0, json.dumps(store.execute(text).fetchall()), ""
    except sqlite3.Error as error:
        return 1, "", str(error)
    finally:
        store.close()

for line in sys.stdin:
    kind, *values = json.loads(line)
    answer = {"run": run, "forked": forked, "query": query, "supervise": supervise}[kind](*values)
    print(json.dumps(answer), flush=True)
"""


class ClusterError(Exception):
    """The cluster did not do what was asked of it; the message has what it printed."""


def wait_for(goal: str, probe: Callable[[], Any], timeout: float = 60, interval: float = 0.25) -> Any:
    """Poll until ``probe`` returns something true and return it; raise ClusterError with ``goal`` at the deadline."""
    deadline = time.monotonic() + timeout
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise ClusterError(f"not within {timeout} s: {goal}")
        time.sleep(interval)


def script(name: str, *arguments: object) -> None:
    """Run one of the scripts in this folder; progress goes to standard error."""
    done = subprocess.run([CONTAINER / name, *map(str, arguments)], stdout=subprocess.DEVNULL, check=False)
    if done.returncode == LACKING:
        raise SystemExit(LACKING)
    if done.returncode:
        raise ClusterError(f"container/{name} ended with exit code {done.returncode}")


def prepare() -> None:
    """Install the container engine and build the image; both do nothing when there is nothing to do."""
    script("ensure-docker")
    script("build")


class Shell:
    """One process that runs a command after the other, at the other end of a command's input and output."""

    def __init__(self, words: Sequence[str], first: str = "") -> None:
        """Keep the command; ``first`` is what it reads before the first order."""
        self._words, self._first = words, first
        self._process: subprocess.Popen[str] | None = None

    def ask(self, order: Sequence[object], timeout: float) -> tuple[int, str, str]:
        """Return exit code, output and error output of an order; raise ClusterError when it takes too long."""
        text = json.dumps(order) + "\n"
        if self._process is None or self._process.poll() is not None:
            text = self._first + text
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        assert self._process.stdin is not None  # noqa: S101 (for the type checker)
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return GONE, "", "the container is gone"
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.close()
            raise ClusterError(f"not answered within {timeout} s: {order}")
        line = self._process.stdout.readline()
        if not line:
            self.close()
            return GONE, "", "the container is gone"
        code, output, errors = json.loads(line)
        return code, output, errors

    def close(self) -> None:
        """End the process; the next order starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@dataclass
class Cluster:
    """One cluster of ``container/up``."""

    name: str
    controller: str = field(default="ctl", kw_only=True)
    """Container in which Slurm's and Cadenza's commands run: the other controller once the host of this one is lost."""
    _shells: dict[str, Shell] = field(default_factory=dict, init=False, repr=False)

    def up(self, *options: object) -> None:
        """Remove an earlier cluster of this name and start a fresh one with options of ``container/up``."""
        self.down()
        script("up", "--name", self.name, *options)

    def down(self) -> None:
        """Remove the cluster, if there is one."""
        self.hang_up()
        script("down", "--name", self.name)

    def hang_up(self) -> None:
        """End the processes that run commands in the cluster's containers; the next command starts another one."""
        for shell in self._shells.values():
            shell.close()
        self._shells.clear()

    @property
    def home(self) -> Path:
        """Path on this machine of the cluster's /home/shared."""
        return Path(os.environ.get("CADENZA_STATE", ROOT / ".cluster")) / self.name / "home"

    # --- Commands -----------------------------------------------------------------------------------

    def exec(
        self, container: str, *command: str, user: str | None = None, check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container as a user (default: root); with ``check`` raise ClusterError if it fails."""
        return self._ask(container, ("run", command, user), command, check=check, timeout=timeout)

    def run(self, container: str, *command: str, user: str | None = None, check: bool = True) -> str:
        """Run a command in a container, however long it takes, and return its output."""
        return self.exec(container, *command, user=user, check=check, timeout=24 * 3600).stdout

    def ctl(self, *command: str, **options: Any) -> str:
        """Run a command on the controller and return its output."""
        return self.exec(self.controller, *command, **options).stdout

    def stream(self, container: str, *command: str) -> subprocess.Popen[str]:
        """Start a command in a container whose output is read as it comes."""
        words = [CONTAINER / "exec", "--name", self.name, container, *command]
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def _ask(
        self, container: str, order: Sequence[object], command: Sequence[str], *, check: bool, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        code, output, errors = self.shell(container).ask(order, timeout)
        if check and code:
            raise ClusterError(f"{container}: {' '.join(command)} → {code}\n{output}{errors}")
        return subprocess.CompletedProcess(command, code, output, errors)

    def shell(self, container: str) -> Shell:
        """Return the process that runs commands in a container."""
        words = (ENGINE, "exec", "--interactive", f"{self.name}-{container}", PYTHON, "-u", "-c", SERVER)
        return self._shells.setdefault(container, Shell(words))

    # --- Jobs ---------------------------------------------------------------------------------------

    def sbatch(self, *options: str, user: str = "alice", command: str, check: bool = True) -> Any:
        """Submit ``command`` and return the job id (or the failed process when ``check`` is off)."""
        done = self.exec(
            self.controller, "sbatch", "--parsable", f"--chdir={SHARED}", f"--output={RESULTS}/%j.log",
            *options, f"--wrap={command}", user=user, check=check,
        )  # fmt: skip
        return int(done.stdout.strip().split(";")[0]) if check else done

    def train(
        self, name: str, *arguments: str, options: tuple[str, ...] = (), user: str = "alice", ranks: int = 1
    ) -> int:
        """Submit one real training job whose result file is named ``name``."""
        start = PYTHON if ranks == 1 else f"{TORCHRUN} --standalone --nproc-per-node={ranks}"
        command = f"{start} {TRAIN} --out {RESULTS}/{name}.json {' '.join(arguments)}"
        return int(
            self.sbatch(
                f"--job-name={name}", "--mem=1500", f"--cpus-per-task={ranks}", *options, user=user, command=command
            )
        )

    def job(self, job_id: int) -> dict[str, str]:
        """Return ``scontrol show job`` as a dict, empty when Slurm no longer knows the job."""
        done = self.exec(self.controller, "scontrol", "-o", "show", "job", str(job_id), check=False)
        if done.returncode:
            return {}
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def state(self, job_id: int) -> str:
        """Return a job's state in Slurm."""
        return self.job(job_id).get("JobState", "GONE")

    def wait_state(self, job_id: int, *states: str, timeout: float = 60) -> str:
        """Wait until a job is in one of these states; raise ClusterError with its log when it fails instead."""

        def probe() -> str:
            state = self.state(job_id)
            if state in FAILED and state not in states:
                raise ClusterError(f"job {job_id} is {state}\n{self.log(job_id)}")
            return state if state in states else ""

        return str(wait_for(f"job {job_id} in {states}, is {self.state(job_id)}", probe, timeout))

    def wait_done(self, *job_ids: int, timeout: float = 180) -> None:
        """Wait until all of these jobs have completed."""
        for job_id in job_ids:
            self.wait_state(job_id, "COMPLETED", timeout=timeout)

    def log(self, job_id: int) -> str:
        """Return a job's output."""
        return self.exec(self.controller, "cat", f"{RESULTS}/{job_id}.log", check=False).stdout

    def result(self, name: str) -> dict[str, Any]:
        """Return the report that a job wrote at its end."""
        return dict(json.loads(self.ctl("cat", f"{RESULTS}/{name}.json")))

    # --- Cadenza ------------------------------------------------------------------------------------

    def cadenza(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command line on the controller."""
        return self._ask(self.controller, ("forked", arguments), ("cadenza", *arguments), check=check)

    def why(self, job_id: int) -> dict[str, Any]:
        """Return ``cadenza why`` of a job; empty while no round has seen it."""
        command = ("why", str(job_id), "--json")
        done = self._ask(self.controller, ("forked", command), command, check=False)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def lease(self, job_id: int) -> dict[str, Any]:
        """Return a job's lease as the last round saw it."""
        return dict((self.why(job_id).get("job") or {}).get("lease") or {})

    def top(self) -> dict[str, Any]:
        """Return one view of ``cadenza top``."""
        command = ("top", "--once", "--json")
        return dict(json.loads(self._ask(self.controller, ("forked", command), command, check=True).stdout))

    def sql(self, query: str) -> list[list[Any]]:
        """Read the service's store."""
        return list(json.loads(self._ask(self.controller, ("query", query), (query,), check=True).stdout))

    def put(self, path: str, text: str) -> None:
        """Write a file on the controller."""
        self.exec(self.controller, "sh", "-c", 'mkdir -p "$(dirname "$2")" && printf %s "$1" > "$2"', "sh", text, path)

    def idle_nodes(self) -> int:
        """Return the number of managed nodes, which is that of open lanes, that take jobs and have none."""
        lines = self.ctl("sinfo", "-h", "-N", "-p", "shared", "-o", "%T").splitlines()
        return lines.count("idle")

    # --- Daemons ------------------------------------------------------------------------------------

    def power(self, container: str, action: str) -> None:
        """``kill`` or ``start`` a whole container, as a host that loses its power."""
        if action == "kill":
            self.exec(container, "/opt/cluster/thaw")
        subprocess.run([ENGINE, action, f"{self.name}-{container}"], check=True, stdout=subprocess.DEVNULL)

    def running(self, container: str, program: str) -> bool:
        """Return whether the supervisor reports a daemon as running."""
        return bool(self.supervise(container, "look", program, check=False).get("statename") == "RUNNING")

    def pid(self, container: str, program: str) -> int:
        """Return the pid of a daemon; 0 while it does not run."""
        return int(self.supervise(container, "look", program)["pid"])

    def service(self, container: str, action: str, program: str) -> None:
        """``start``, ``stop`` or ``restart`` one daemon in one container."""
        self.supervise(container, action, program)

    def signal(self, container: str, name: str, program: str) -> None:
        """Send a signal, such as ``HUP``, to one daemon in one container."""
        self.supervise(container, "signal", program, name)

    def supervise(
        self, container: str, action: str, program: str, value: str = "", *, check: bool = True
    ) -> dict[str, Any]:
        """Ask a container's supervisor, without supervisorctl, which takes half a second on a busy machine."""
        words = ("supervise", action, program, value)
        return dict(json.loads(self._ask(container, words, words, check=check).stdout or "{}"))

    def configure(self, toml: str) -> None:
        """Lay settings over the cluster's own, and wait until the service goes by them."""

        def reloads() -> str:
            log = "/var/log/cluster/cadenzad.log"
            return self.exec(self.controller, "grep", "-c", "settings reloaded", log, check=False).stdout

        self.put("/etc/cadenza/conf.d/zz-extra.toml", toml)
        before = reloads()
        self.signal(self.controller, "HUP", "cadenzad")
        wait_for("the new settings", lambda: reloads() != before, 90)

    def queue(self) -> str:
        """Return Slurm's description of all nodes and jobs, or that it does not answer."""
        try:
            kinds = ("nodes", "jobs")
            answers = [self.exec(self.controller, "scontrol", "-o", "show", kind, check=False) for kind in kinds]
        except ClusterError as error:
            return str(error)
        return "".join(answer.stdout + answer.stderr for answer in answers)

    def logs(self) -> str:
        """Return the ends of all daemons' logs, also of containers that died."""
        command = [CONTAINER / "logs", "--name", self.name, "--lines", "120"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr
