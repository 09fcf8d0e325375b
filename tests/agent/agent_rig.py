"""Real agents, real sockets and real child processes for the agent's tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from registered_job import DEFAULTS, registered

from cadenza.sidecar import wire
from cadenza.sidecar.agent.driver import trial_record
from cadenza.sidecar.agent_settings import ExpertTable

STUB_DRIVER = "580.65.06"
RANK = Path(__file__).with_name("scripted_rank.py")
PATIENCE_S = 8.0

Message = dict[str, Any]


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Poll until a condition holds and return its value."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
        time.sleep(0.005)
    return value


class Talker:
    """A raw peer in the test's own process."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(path))

    def send(self, kind: str, **fields: Any) -> None:
        self.sock.send(wire.encode(kind, **fields))

    def receive(self) -> Message:
        packet = self.sock.recv(wire.MAX_PACKET)
        return wire.decode(packet) if packet else {"type": "eof"}

    def ask(self, kind: str, **fields: Any) -> Message:
        self.send(kind, **fields)
        return self.receive()

    def start(self, job: int, gpus: list[int], **fields: Any) -> Message:
        """Register a job as the SPANK plugin does, with this process as its first, and return the first answer."""
        return self.ask("start", job=job, gpus=gpus, **{**DEFAULTS, "uid": os.getuid(), **fields})

    def until_granted(self, seen: Message | None = None) -> None:
        while seen is None or seen["state"] != "granted":
            assert seen is None or seen["state"] == "wait", seen
            seen = self.receive()

    def close(self) -> None:
        self.sock.close()


class Child:
    """A scripted rank in a process of its own, with what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[Message] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def said(self, event: str) -> list[Message]:
        return [one for one in self.events if one["event"] == event]

    def wait_for(self, event: str, count: int = 1) -> Message:
        until(lambda: len(self.said(event)) >= count, f"{count} {event} of {self.events}")
        return self.said(event)[count - 1]

    @property
    def running(self) -> bool:
        return len(self.said("run")) > len(self.said("out"))

    def stretches(self) -> list[tuple[float, float]]:
        """Return when it used its GPU."""
        starts, ends = self.said("run"), [*self.said("out"), {"at": float("inf")}]
        return [(start["at"], end["at"]) for start, end in zip(starts, ends, strict=False)]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class Agent:
    """A real ``cadenza-agent`` process on a directory of its own."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.socket = directory / "agent.sock"
        self.state = directory / "state"
        self.config = directory / "cadenza.toml"
        known = {"socket": str(self.socket), "state_dir": str(self.state), "keys": str(directory / "keys")}
        values = {**known, "host": "n1", "heartbeat_s": 0.2, **settings}
        expert = ExpertTable.__struct_fields__
        lines = [
            f"{'expert' if key in expert else 'agent'}.{key} = {json.dumps(value)}" for key, value in values.items()
        ]
        self.config.write_text("\n".join([*lines, "", "[service]", "poll_s = 1", ""]))
        self.program = ["-m", "cadenza.sidecar.agent"]
        self.process: subprocess.Popen[bytes] | None = None
        self._children: list[Child] = []
        self._talkers: list[Talker] = []

    def accept_driver(self, **changes: Any) -> None:
        """Leave the record of a good trial with the stub's driver."""
        self.state.mkdir(exist_ok=True)
        trial_record.keep(self.state, trial_record.Record(**{"driver": STUB_DRIVER, **changes}))

    def up(self, files: int | None = None) -> Agent:
        """Start the daemon, with at most so many open files, and wait until it answers."""
        log = (self.directory / "agent.log").open("ab")
        command = [sys.executable, *self.program, "--config", str(self.config)]
        if files is not None:
            command = ["prlimit", f"--nofile={files}", *command]
        self.process = subprocess.Popen(command, stderr=log)
        log.close()
        until(self._answers, f"an answer of the agent: {self.log()}")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def log(self) -> str:
        path = self.directory / "agent.log"
        return path.read_text() if path.exists() else ""

    def down(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def talk(self) -> Talker:
        self._talkers.append(Talker(self.socket))
        return self._talkers[-1]

    def rank(self, job: int, *flags: str) -> Child:
        """Start a scripted rank of a job; it registers itself first, as root's plugin does in the same process."""
        return self.child(str(RANK), "--socket", str(self.socket), "--job", str(job), *flags)

    def plugin(self, job: int, gpus: list[int], **fields: Any) -> Child:
        """Start a task that waits for its job's lease in the plugin."""
        return self.child(*registered(self.socket, job, gpus, **fields)[1:])

    def child(self, *arguments: str) -> Child:
        """Start a script in a process of its own."""
        command = [sys.executable, *arguments]
        self._children.append(Child(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        return self._children[-1]

    def leases(self) -> dict[int, Message]:
        """Return what is on disk, by job."""
        saved = json.loads((self.state / "leases.json").read_text())
        return {lease["job"]: lease for lease in saved["leases"]}

    def close(self) -> None:
        for talker in self._talkers:
            talker.close()
        for child in self._children:
            child.kill()
        if self.process is not None and self.process.poll() is None:
            self.down(signal.SIGTERM)
