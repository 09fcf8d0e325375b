"""One outage on a container cluster of its own: a network, a host, a disk, a clock or a daemon that fails.

It begins while jobs run, holds for its length, and is over when everything that a site looks at is well again.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from compressed_times import compress
from digest_job import STALLED
from fault_run import SETTLE_S, TIMES_FACTOR, FaultRun, last_sample
from outages import CLOCK_STEPS, LEAD_S, SLURMD_TIMEOUT_S, Outage, acts
from schedule import Schedule

from cluster import ENGINE, ClusterError

STATE_MB = 64
"""Size of the file systems that become full."""
WELL_S, WELL_LOOKS = 300.0, 3
"""Longest wait until all is well, and the looks in a row that must find it so."""
LOOK_S = 1.0
FRESH_S = 10.0
"""Oldest age of what the controller's watcher or the service's last round shows."""
CLOCK_FILE = "/run/clock-offset"
CLOCK = {
    "LD_PRELOAD": "/usr/$LIB/faketime/libfaketime.so.1", "FAKETIME_TIMESTAMP_FILE": CLOCK_FILE,
    "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1",
}  # fmt: skip
"""Variables of daemons whose clock is off by ``CLOCK_FILE``; the linker puts in the machine's library folder."""
BAD_NODE = re.compile("DRAIN|DOWN|NOT_RESPONDING|FAIL|UNKNOWN")
BALLAST = {
    "disk-store": "/var/lib/cadenzad/ballast", "disk-agents": "/var/lib/cadenza/ballast",
    "disk-slurm": "/var/spool/slurmctld/ballast", "disk-shm": "/dev/shm/ballast",  # noqa: S108 (of the host)
}  # fmt: skip
MOVED = "select count(*) from actions where job = {} and kind = 'Migrate' and ok = 1"


class OutageRun(FaultRun):
    """One outage on a cluster of its own."""

    def __init__(self, name: str, outage: Outage, schedule: Schedule, size: tuple[int, int, int], folder: Path) -> None:
        """``size``: hosts, GPUs of each, lanes of each."""
        super().__init__(name, schedule, *size, folder)
        self.outage = outage
        self.well_s: float | None = None
        """Time from the outage's end until all was well, seconds; None: it did not become well."""
        self.settled_s: float | None = None
        """The same until every job had ended."""
        self.told = ""
        """What ``cadenza top``, ``why`` and ``doctor`` printed while the fault held."""

    def up_options(self) -> tuple[object, ...]:
        """Return further options of ``container/up``."""
        return ("--state-mb", STATE_MB) if self.outage.kind.startswith("disk") else ()

    def prepare(self) -> None:
        """Give Slurm its patience, and the daemons of the host whose clock is to differ their library."""
        compress(self._owner, TIMES_FACTOR)
        config = self.place.parents[1] / "slurm" / "slurm.conf"
        with config.open("a") as file:
            file.write(f"SlurmdTimeout={SLURMD_TIMEOUT_S}\n")
        self._owner.ctl("scontrol", "reconfigure")
        if self.outage.kind == "clock":
            self._fake_clock(self.outage.target)
        self._wait(lambda: self._ill() == [], 120)

    def _fake_clock(self, host: str) -> None:
        """Have the supervisor of a host start all its daemons under libfaketime, without an offset yet."""
        self._owner.exec(host, "sh", "-c", f"echo +0 > {CLOCK_FILE}; chmod 644 {CLOCK_FILE}")
        line = "environment=" + ",".join(f'{name}="{value}"' for name, value in CLOCK.items())
        self._owner.exec(host, "sed", "-i", f"/^\\[supervisord\\]/a {line}", "/etc/supervisor/supervisord.conf")
        self._owner.exec(host, "supervisorctl", "reload")

    # --- The outage ----------------------------------------------------------------------------------------

    def play(self) -> None:
        """Submit, break, look at what a site is told, mend, wait until all is well and then until all is done."""
        began_s = time.monotonic()
        owners = threading.Thread(target=self._play_owners, args=(began_s,))
        owners.start()
        try:
            _sleep_until(began_s + LEAD_S)
            self._break()
            for after_s, step in acts(self.outage):
                _sleep_until(began_s + LEAD_S + after_s)
                if step:
                    self._set_clock(step)
                else:
                    self.told = self._tell()
            _sleep_until(began_s + self.schedule.kills_until_s)
            self._mend()
            ends_s = time.monotonic()
            if self._wait(lambda: self._ill() == [], WELL_S, WELL_LOOKS):
                self.well_s = time.monotonic() - ends_s - (WELL_LOOKS - 1) * LOOK_S
            self.journal.add("well" if self.well_s is not None else "not well", "", "; ".join(self._ill()))
            if self.settle(SETTLE_S):
                self.settled_s = time.monotonic() - ends_s
        finally:
            self._stop.set()
            owners.join()
        self.journal.add("end", "")

    def _break(self) -> None:
        self.journal.add("outage", self.outage.name)
        if self.outage.away:
            self.journal.add("down", self.outage.away)
        host = self.outage.target
        match self.outage.kind:
            case "network":
                self._engine("network", "disconnect", f"cadenza-{self._name}", f"{self._name}-{host}")
            case "host":
                self._killer.power(host, "kill")
            case "reboot":
                self._begin_move()
                self._killer.power(host, "kill")
            case "saves":
                (self.place / STALLED).touch()
            case "clock":
                self._set_clock(CLOCK_STEPS[host][0])
            case "slurmctld":
                self._killer.service(host, "stop", "slurmctld")
            case kind if kind in BALLAST:
                self._fill(host, BALLAST[kind])
            case kind:
                self.signal(host, kind.removeprefix("stop-"), "STOP")

    def _mend(self) -> None:
        host = self.outage.target
        match self.outage.kind:
            case "network":
                self._engine("network", "connect", "--alias", host, f"cadenza-{self._name}", f"{self._name}-{host}")
            case "host" | "reboot":
                self._killer.power(host, "start")
            case "saves":
                (self.place / STALLED).unlink()
            case "slurmctld":
                self._killer.service(host, "start", "slurmctld")
            case kind if kind in BALLAST:
                self._killer.exec(host, "rm", BALLAST[kind])
            case kind if kind.startswith("stop-"):
                self.signal(host, kind.removeprefix("stop-"), "CONT")
        if self.outage.away:
            self.journal.add("up", self.outage.away)
        self.journal.add("mended", self.outage.name)

    def _engine(self, *words: str) -> None:
        subprocess.run([ENGINE, *words], check=True, stdout=subprocess.DEVNULL)

    def _begin_move(self) -> None:
        """Move jobs off the host, one after the other, until a move has begun."""
        places = ("squeue", "-h", "-t", "R", "-w", self.outage.target, "-o", "%i %D")
        goal = next(host for host in self.hosts if host != self.outage.target)

        def begun() -> bool:
            rows = [row.split() for row in self._killer.ctl(*places).splitlines()]
            for number in [number for number, hosts in rows if hosts == "1"]:
                self._killer.exec("ctl", "cadenza", "move", number, "--to", goal, check=False)
                if self._killer.sql(MOVED.format(number))[0][0]:
                    self.journal.add("moves", number)
                    return True
            return False

        if not self._wait(begun, 30.0):
            raise ClusterError("no job of the host that is to be rebooted begins to move")

    def _fill(self, host: str, path: str) -> None:
        """Write until the file system has no byte left."""
        full = self._killer.exec(host, "sh", "-c", f"cat /dev/zero > {path}", check=False)
        if "No space left" not in full.stderr:
            raise ClusterError(f"{path} of {host}: its file system did not become full: {full.stderr}")

    def _set_clock(self, offset: str) -> None:
        # Renamed into place: a daemon that reads an empty file would have the host's clock for a moment.
        command = f"echo {offset} > {CLOCK_FILE}.new && mv {CLOCK_FILE}.new {CLOCK_FILE}"
        self._killer.exec(self.outage.target, "sh", "-c", command)
        self.journal.add("clock", self.outage.target, f"{offset} s")

    # --- What a site sees ------------------------------------------------------------------------------------

    def _tell(self) -> str:
        """Return what a site is told now: of the cluster, of its health and of each job that waits."""
        commands = [("top", "--once"), ("doctor",)]
        commands += [("why", str(number)) for name, number in sorted(self.ids.items()) if self._left(name)]
        settings = ["COLUMNS=200"]
        if (self.outage.kind, self.outage.target) == ("clock", "ctl"):
            settings += (f"{name}={value}" for name, value in CLOCK.items())
        shown = []
        for words in commands:
            try:
                done = self._killer.exec("ctl", "env", *settings, "timeout", "90", "cadenza", *words, check=False)
                shown.append(f"$ cadenza {' '.join(words)}\n{done.stdout}{done.stderr}")
            except ClusterError as error:
                shown.append(f"$ cadenza {' '.join(words)}\n{error}")
        return "\n".join(shown)

    def _ill(self) -> list[str]:
        """Return what is not well: of Slurm, of its nodes, of the service's rounds, of the agents."""
        seen = last_sample(self.folder / "ctl.jsonl")
        if not seen.get("up") or time.time() - seen["t"] > FRESH_S:
            return ["slurmctld does not answer"]
        ill = [f"{node['NodeName']} {node['State']}" for node in seen["nodes"] if BAD_NODE.search(node["State"])]
        try:
            done = self._killer.exec("ctl", "timeout", "20", "cadenza", "top", "--once", "--json", check=False)
        except ClusterError as error:
            return [*ill, str(error)]
        if done.returncode:
            return [*ill, done.stderr.strip()[-200:]]
        top = json.loads(done.stdout)
        if top["age_s"] > FRESH_S:
            ill.append(f"last round {top['age_s']:.0f} s ago")
        alive = {agent["host"] for agent in top["agents"] if agent["alive"]}
        return [*ill, *(f"the agent of {host} is silent" for host in self.hosts if host not in alive)]

    def _wait(self, probe: Callable[[], bool], patience_s: float, looks: int = 1) -> bool:
        deadline, good = time.monotonic() + patience_s, 0
        while time.monotonic() < deadline:
            good = good + 1 if probe() else 0
            if good >= looks:
                return True
            time.sleep(LOOK_S)
        return False

    def collect(self) -> None:
        """Copy everything, and what the site was told."""
        super().collect()
        (self.folder / "told.txt").write_text(self.told)
        seen = {"well_s": self.well_s, "settled_s": self.settled_s, "ill": self._ill(), "jobs": len(self.schedule.jobs)}
        (self.folder / "outage.json").write_text(json.dumps(seen))


def _sleep_until(at_s: float) -> None:
    time.sleep(max(at_s - time.monotonic(), 0.0))
