#!/usr/bin/python3
"""The part of systemctl that the guide's pages use, for containers without systemd: it starts what a unit file says.

    systemctl [enable|disable] [--now] | start | stop | restart | reload | is-active | is-enabled UNIT… | daemon-reload

It applies ExecStart, ExecReload, User, Group, EnvironmentFile, the run and state directories with their owners and
modes, UMask, limits, Type=notify with READY, MAINPID and the watchdog, Restart and Conflicts. What it leaves out is in
LEFT_OUT; any other key of a unit is an error, so that nothing goes by unseen. Output: /var/log/units/UNIT.log.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

FOLDERS = (Path("/etc/systemd/system"), Path("/usr/lib/systemd/system"))
WANTS = FOLDERS[0] / "multi-user.target.wants"
STATE, LOGS = Path("/run/units"), Path("/var/log/units")
PATIENCE_S = 60.0
LEFT_OUT = re.compile(
    r"Protect\w+|Private\w+|Restrict\w+|SystemCall\w+|CapabilityBoundingSet|LockPersonality|NoNewPrivileges|Memory\w+"
    r"|OOMScoreAdjust|ReadWritePaths|Delegate|TasksMax|KillMode"
)
"""Confinement and control groups; and KillMode: only the main process is stopped, which ends its own children."""
KNOWN = {
    "Type", "ExecStart", "ExecReload", "User", "Group", "EnvironmentFile", "Environment", "RuntimeDirectory",
    "RuntimeDirectoryMode", "RuntimeDirectoryPreserve", "StateDirectory", "StateDirectoryMode", "UMask", "Restart",
    "RestartSec", "WatchdogSec", "LimitNOFILE", "LimitMEMLOCK", "LimitSTACK",
}  # fmt: skip


class Unit:
    """A unit file; ``service`` has the values of each key of its section [Service]."""

    def __init__(self, name: str) -> None:
        self.name = name.removesuffix(".service")
        template, at, self.instance = self.name.partition("@")
        file = f"{template}@.service" if at else f"{template}.service"
        path = next((folder / file for folder in FOLDERS if (folder / file).exists()), None)
        if path is None:
            sys.exit(f"Unit {file} could not be found.")
        self.path, self.conflicts, self.condition = path, "", ""
        self.service: defaultdict[str, list[str]] = defaultdict(list)
        section = ""
        for line in path.read_text().splitlines():
            if line.startswith("["):
                section = line
            elif "=" in line and not line.startswith(("#", ";")):
                key, value = (word.strip() for word in line.replace("%i", self.instance).split("=", 1))
                if section == "[Service]":
                    self.service[key].append(value)
                elif key == "Conflicts":
                    self.conflicts = value
                elif key == "ConditionPathExists":
                    self.condition = value
        unknown = [key for key in self.service if key not in KNOWN and LEFT_OUT.fullmatch(key) is None]
        if unknown:
            sys.exit(f"{path}: this systemctl does not know {', '.join(unknown)}")
        self.state = STATE / f"{self.name}.json"

    def one(self, key: str, default: str = "") -> str:
        return (self.service[key] or [default])[-1]

    def facts(self) -> dict[str, object]:
        try:
            return dict(json.loads(self.state.read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def environment(self) -> dict[str, str]:
        person = pwd.getpwnam(self.one("User", "root"))
        found = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        if self.service["User"]:
            found |= {"USER": person.pw_name, "LOGNAME": person.pw_name, "HOME": person.pw_dir}
        for name in self.service["EnvironmentFile"]:
            path = Path(name.removeprefix("-"))
            if path.exists() or not name.startswith("-"):
                rows = [row for row in path.read_text().splitlines() if "=" in row and not row.startswith("#")]
                found |= {key: value.strip("'\"") for key, value in (row.split("=", 1) for row in rows)}
        for row in self.service["Environment"]:
            found |= dict(word.split("=", 1) for word in shlex.split(row))
        for key, root in (("Runtime", "/run"), ("State", "/var/lib")):
            if self.service[f"{key}Directory"]:
                found[f"{key.upper()}_DIRECTORY"] = f"{root}/{self.one(f'{key}Directory')}"
        return found

    def words(self, line: str, environment: dict[str, str]) -> list[str]:
        """Return the words of a command; ``$NAME`` alone becomes as many words as it has."""
        words: list[str] = []
        for word in shlex.split(line):
            words += environment.get(word[1:], "").split() if word.startswith("$") else [word]
        return words


# --- the process that keeps one service ------------------------------------------------------------------------


def keep(unit: Unit) -> None:
    """Start the service, start it again as Restart says, and stop it on SIGTERM."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    address = f"/run/units/{unit.name}.notify"
    notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    Path(address).unlink(missing_ok=True)
    notes.bind(address)
    os.chmod(address, 0o777)  # noqa: S103 - the service is of another user
    notes.settimeout(0.1)
    while True:
        make_directories(unit)
        child = spawn(unit, address)
        code = watch(unit, child, notes, stopping)
        again = {"always": True, "on-failure": code != 0}.get(unit.one("Restart"), False)
        if stopping or not again:
            break
        time.sleep(float(unit.one("RestartSec", "0.1")))
    kept = {"yes": True, "restart": (STATE / f"{unit.name}.restart").exists()}
    if unit.service["RuntimeDirectory"] and not kept.get(unit.one("RuntimeDirectoryPreserve"), False):
        shutil.rmtree(Path("/run") / unit.one("RuntimeDirectory"), ignore_errors=True)
    Path(address).unlink(missing_ok=True)
    note(unit, "inactive" if stopping or code == 0 else "failed", 0)


def note(unit: Unit, active: str, main: int) -> None:
    temporary = unit.state.with_suffix(".new")
    temporary.write_text(json.dumps({"active": active, "main": main, "keeper": os.getpid()}))
    temporary.rename(unit.state)


def make_directories(unit: Unit) -> None:
    person = pwd.getpwnam(unit.one("User", "root"))
    for key, root in (("Runtime", "/run"), ("State", "/var/lib")):
        if name := unit.one(f"{key}Directory"):
            folder = Path(root) / name
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, person.pw_uid, person.pw_gid)
            folder.chmod(int(unit.one(f"{key}DirectoryMode", "0755"), 8))


def spawn(unit: Unit, address: str) -> subprocess.Popen[bytes]:
    person = pwd.getpwnam(unit.one("User", "root"))
    group = grp.getgrnam(unit.one("Group")).gr_gid if unit.service["Group"] else person.pw_gid
    environment = unit.environment()
    if unit.one("Type") == "notify":
        environment["NOTIFY_SOCKET"] = address
    if unit.service["WatchdogSec"]:
        environment["WATCHDOG_USEC"] = str(int(float(unit.one("WatchdogSec")) * 1e6))

    def limits() -> None:
        for key, number in (
            ("LimitNOFILE", resource.RLIMIT_NOFILE), ("LimitMEMLOCK", resource.RLIMIT_MEMLOCK),
            ("LimitSTACK", resource.RLIMIT_STACK),
        ):  # fmt: skip
            if value := unit.one(key):
                hard = resource.getrlimit(number)[1]
                wanted = resource.RLIM_INFINITY if value == "infinity" else int(value)
                if hard != resource.RLIM_INFINITY:
                    wanted = hard if wanted == resource.RLIM_INFINITY else min(hard, wanted)
                resource.setrlimit(number, (wanted, hard))

    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"{unit.name}.log").open("ab") as log:
        return subprocess.Popen(
            unit.words(unit.one("ExecStart"), environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=environment, cwd="/", user=person.pw_uid, group=group,
            extra_groups=os.getgrouplist(person.pw_name, group),
            umask=int(unit.one("UMask", "0022"), 8), start_new_session=True,
            preexec_fn=limits,  # noqa: PLW1509 - there are no threads here
        )  # fmt: skip


def watch(unit: Unit, child: subprocess.Popen[bytes], notes: socket.socket, stopping: list[int]) -> int:
    """Follow the service's notes until its main process has ended; return the exit code, 1 for an adopted one."""
    main, ready, stopped = child.pid, unit.one("Type") != "notify", False
    limit_s = float(unit.one("WatchdogSec", "0"))
    alive_s = time.monotonic()
    note(unit, "active" if ready else "activating", main)
    while True:
        try:
            words = dict(row.split("=", 1) for row in notes.recv(4096).decode().splitlines() if "=" in row)
        except TimeoutError:
            words = {}
        if words.get("WATCHDOG") or words.get("READY"):
            alive_s = time.monotonic()
        if "MAINPID" in words and int(words["MAINPID"]) != main:
            main = int(words["MAINPID"])
            note(unit, "active" if ready else "activating", main)
        if words.get("READY") == "1" and not ready:
            ready = True
            note(unit, "active", main)
        if limit_s and time.monotonic() - alive_s > limit_s:
            os.kill(main, signal.SIGABRT)
            alive_s = time.monotonic()
        if stopping and not stopped:
            stopped = True
            os.kill(main, signal.SIGTERM)
        code = child.poll()
        if main == child.pid and code is not None:
            return code
        if main != child.pid and not Path(f"/proc/{main}").exists():
            return 0 if stopped else 1


# --- commands ----------------------------------------------------------------------------------------------------


def until(unit: Unit, goal: str, states: tuple[str, ...]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (active := str(unit.facts().get("active", "inactive"))) not in states:
        if time.monotonic() > deadline:
            sys.exit(f"{unit.name} is {active}, not {goal}, after {PATIENCE_S:.0f} s; see {LOGS}/{unit.name}.log")
        time.sleep(0.05)
    return active


def running(unit: Unit) -> bool:
    facts = unit.facts()
    return facts.get("active") in ("active", "activating") and Path(f"/proc/{facts.get('keeper')}").exists()


def start(unit: Unit) -> None:
    if running(unit):
        return
    if unit.condition and not Path(unit.condition).exists():
        print(f"{unit.name}: {unit.condition} does not exist, so it is not started", file=sys.stderr)
        return
    for other in unit.conflicts.split():
        if (STATE / f"{other.removesuffix('.service')}.json").exists():
            stop(Unit(other))
    STATE.mkdir(parents=True, exist_ok=True)
    unit.state.unlink(missing_ok=True)
    log = subprocess.DEVNULL
    command = [sys.executable, __file__, "keep", unit.name]
    subprocess.Popen(command, stdin=log, stdout=log, stderr=log, start_new_session=True)
    if until(unit, "active", ("active", "failed")) == "failed":
        log_file = LOGS / f"{unit.name}.log"
        sys.exit(f"{unit.name} failed\n{log_file.read_text(errors='replace')[-2000:]}")


def stop(unit: Unit) -> None:
    if running(unit):
        os.kill(int(str(unit.facts()["keeper"])), signal.SIGTERM)
        until(unit, "inactive", ("inactive", "failed"))


def restart(unit: Unit) -> None:
    mark = STATE / f"{unit.name}.restart"
    STATE.mkdir(parents=True, exist_ok=True)
    mark.touch()
    stop(unit)
    mark.unlink()
    start(unit)


def reload(unit: Unit) -> None:
    if not running(unit) or not unit.service["ExecReload"]:
        sys.exit(f"{unit.name} cannot be reloaded")
    environment = unit.environment() | {"MAINPID": str(unit.facts()["main"])}
    subprocess.run(unit.words(unit.one("ExecReload"), environment), check=True)


def enable(unit: Unit) -> None:
    WANTS.mkdir(parents=True, exist_ok=True)
    link = WANTS / f"{unit.name}.service"
    link.unlink(missing_ok=True)
    link.symlink_to(unit.path)


def disable(unit: Unit) -> None:
    (WANTS / f"{unit.name}.service").unlink(missing_ok=True)


def is_active(unit: Unit) -> None:
    active = "active" if running(unit) else str(unit.facts().get("active", "inactive"))
    print(active)
    if active != "active":
        sys.exit(3)


def is_enabled(unit: Unit) -> None:
    enabled = (WANTS / f"{unit.name}.service").is_symlink()
    print("enabled" if enabled else "disabled")
    if not enabled:
        sys.exit(1)


COMMANDS = {
    "keep": keep, "start": start, "stop": stop, "restart": restart, "reload": reload, "enable": enable,
    "disable": disable, "is-active": is_active, "is-enabled": is_enabled,
}  # fmt: skip


def main() -> None:
    """Run one command on each named unit, in their order."""
    verb, *names = [word for word in sys.argv[1:] if word != "--now"]
    if verb == "daemon-reload":
        return
    if verb not in COMMANDS:
        sys.exit(f"this systemctl does not know {verb}")
    for unit in map(Unit, names):
        COMMANDS[verb](unit)
        if "--now" in sys.argv:
            {"enable": start, "disable": stop}[verb](unit)


if __name__ == "__main__":
    main()
