"""A job's rank as the wire format describes it, for the agent's tests: paced steps, no GPU, stdlib only.

Run as a child process. It prints one JSON object a line: ``attached``, ``run`` and ``out`` (the moments between
which it would use its GPU, CLOCK_MONOTONIC), ``stopped`` (the step of a yield), ``error`` and ``eof``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import socket
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
from registered_job import register

from cadenza.sidecar import wire


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **fields}), flush=True)


class Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.step = options.first_step
        self.state = "running"
        self.running = self.attached = False
        self.sock: socket.socket | None = None
        self.inbox: list[dict[str, object]] = []
        self.words = memoryview(bytearray(wire.PAGE_BYTES)).cast("Q")
        self.entered: mmap.mmap | None = None
        if options.shared:
            with Path(options.shared).open("r+b") as shared:
                self.entered = mmap.mmap(shared.fileno(), 4096)

    # --- link ---

    def attach(self) -> None:
        """Connect, for as long as it takes, and follow the answer."""
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.register()
                sock.connect(self.options.socket)
                break
            except (OSError, wire.WireError):  # an agent that ends, or is not there yet
                sock.close()
                time.sleep(0.02)
        o = self.options
        hello = wire.encode(
            "attach", job=o.job, restart=0, rank=o.rank, world_size=o.world, local_world_size=o.local or o.world,
            state=self.state, step=self.step, again=self.attached,
        )  # fmt: skip
        try:
            sock.send(hello)
            packet, fds, _, _ = socket.recv_fds(sock, wire.MAX_PACKET, 1)
        except OSError:
            packet = b""
        if not packet:
            sock.close()
            self.attach()
            return
        message = wire.decode(packet)
        if message["type"] == "error":
            say("error", error=message["error"])
            sys.exit(4)
        self.words = memoryview(mmap.mmap(fds[0], wire.PAGE_BYTES)).cast("Q")
        self.words[wire.PAGE_STEP] = self.step
        self.words[wire.PAGE_SAVES] = wire.SAVES_AWAY if self.options.saves_away else int(self.options.saves)
        self.sock = sock
        self.attached = True
        say("attached", state=message["state"])
        if message["state"] == "yielded" and self.state != "yielded":
            self.leave(0)
        if self.state == "yielded":
            self.wait_for_resume()
        else:
            self.set_running(running=True)

    def register(self) -> None:
        """Register this process as the plugin does; ``--stranger``: root knows nothing of it."""
        o = self.options
        if not o.stranger:
            register(o.socket, job=o.job, gpus=o.gpus, hosts=o.hosts)[0].close()

    def set_running(self, *, running: bool) -> None:
        if running != self.running:
            self.running = running
            say("run" if running else "out", step=self.step)

    def receive(self) -> dict[str, object] | None:
        """Return the next message; None at the end of the connection."""
        assert self.sock is not None
        try:
            packet = self.sock.recv(wire.MAX_PACKET)
        except OSError:
            packet = b""
        if packet:
            return wire.decode(packet)
        say("eof")
        return None

    def send(self, kind: str, **fields: object) -> None:
        assert self.sock is not None
        try:
            self.sock.send(wire.encode(kind, **fields))
        except OSError:
            say("unsent", kind=kind)

    # --- the step ---

    def train(self, steps: int) -> None:
        self.attach()
        while self.step < steps:
            started = time.monotonic_ns()
            time.sleep(self.options.iteration_s * (1 + self.options.rank * self.options.skew))
            self.all_reduce()
            self.step += 1
            taken = time.monotonic_ns() - started
            words = self.words
            words[wire.PAGE_SUM_NS] += taken
            words[wire.PAGE_HISTOGRAM + wire.bucket(taken)] += 1
            words[wire.PAGE_STEP] = self.step
            if words[wire.PAGE_STOP] and self.step >= words[wire.PAGE_STOP]:
                self.boundary()
            elif self.lost():
                self.attach()
        self.set_running(running=False)

    def lost(self) -> bool:
        """Return True if the agent is gone."""
        assert self.sock is not None
        try:
            gone = not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            gone = True
        if gone:
            say("eof")
        return gone

    def all_reduce(self) -> None:
        """Wait until every rank has come to this step."""
        if self.entered is None:
            return
        counts = memoryview(self.entered).cast("Q")
        counts[self.options.rank] = self.step + 1
        while min(counts[: self.options.world]) < self.step + 1:
            time.sleep(0.0005)

    def boundary(self) -> None:
        words = self.words
        order = words[wire.PAGE_ORDER]
        words[wire.PAGE_STATE] = wire.STATE_ARRIVED
        if self.options.deaf:
            time.sleep(3600)
        if self.options.anew:
            self.begin_anew()
            return
        refused = self.options.refuse
        # Read before arriving: the stop may be over, and the page blank, by the time its commit is read.
        saves = words[wire.PAGE_PURPOSE] == wire.PURPOSE_CHECKPOINT
        size = 0 if saves else self.options.bytes
        self.send("arrived", order=order, step=self.step, bytes=size, refused=refused)
        while (message := self.receive()) is not None:
            kind = message["type"]
            if kind == "stop" and message["order"] == order and int(str(message["step"])) > self.step:
                break
            if kind == "cancel" and message["order"] == order:
                say("cancelled", reason=message["reason"])
                break
            if kind == "commit" and message["order"] == order and saves:
                self.save(order)
                break
            if kind == "commit" and message["order"] == order:
                say("stopped", step=self.step)
                self.leave(order)
                self.wait_for_resume()
                return
        else:
            words[wire.PAGE_STATE] = wire.STATE_RUNNING
            self.attach()
            return
        words[wire.PAGE_STATE] = wire.STATE_RUNNING

    def begin_anew(self) -> None:
        """Attach as the next training of the same process does, with its own count of steps."""
        assert self.sock is not None
        self.sock.close()
        self.options.anew, self.attached, self.step = False, False, 0
        self.attach()

    def save(self, order: int) -> None:
        say("saving", step=self.step)
        time.sleep(self.options.copy_s)
        error = "No space left on device" if self.options.fail_copy else ""
        paths = [] if error else [f"/shared/{self.step}"]
        self.send("checkpointed", order=order, step=self.step, bytes=9, seconds=0.5, paths=paths, error=error)
        while not error and (message := self.receive()) is not None:
            if message["type"] == "cancel" and message["order"] == order:
                say("sent on", reason=message["reason"], step=self.step)
                return

    def leave(self, order: int) -> None:
        time.sleep(self.options.copy_s)
        self.set_running(running=False)
        self.state = "yielded"
        self.words[wire.PAGE_STATE] = wire.STATE_YIELDED
        if self.options.fail_copy and order:
            self.options.fail_copy = False
            self.state = "running"
            self.words[wire.PAGE_STATE] = wire.STATE_RUNNING
            self.send("yielded", order=order, copy_s=self.options.copy_s, bytes=0, resident=[], error="no room")
            self.set_running(running=True)
        else:
            self.send("yielded", order=order, copy_s=self.options.copy_s, bytes=self.options.bytes, resident=[])

    def wait_for_resume(self) -> None:
        if self.state != "yielded":
            return
        while (message := self.receive()) is not None:
            if message["type"] == "save":
                say("saving away", step=self.step)
                time.sleep(self.options.copy_s)
                error = "No space left on device" if self.options.fail_copy else ""
                fields = {"step": self.step, "bytes": 9, "seconds": 0.5, "paths": [f"/shared/{self.step}"]}
                self.send("checkpointed", order=message["order"], error=error, **fields)
            if message["type"] == "cancel":
                say("sent on", reason=message["reason"], step=self.step)
            if message["type"] == "resume":
                self.state = "running"
                self.words[wire.PAGE_STATE] = wire.STATE_RUNNING
                self.set_running(running=True)
                time.sleep(self.options.copy_s)
                self.send("resumed", order=message["order"], copy_s=self.options.copy_s)
                return
        self.attach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--local", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gpus", type=json.loads, default=[])
    parser.add_argument("--iteration-s", type=float, default=0.01)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--copy-s", type=float, default=0.0)
    parser.add_argument("--bytes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--first-step", type=int, default=0)
    parser.add_argument("--shared", default="")
    parser.add_argument("--refuse", default="")
    parser.add_argument("--fail-copy", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--stranger", action="store_true")
    parser.add_argument("--saves", action="store_true")
    parser.add_argument("--saves-away", action="store_true")
    options = parser.parse_args()
    Rank(options).train(options.steps)
    say("done")


if __name__ == "__main__":
    main()
