"""A job that takes turns and attacks its neighbors; one mode for each attack.

Its rank speaks the wire format by itself, because the client refuses to do these things. As root, ``register`` measures
the agent's answer to a registration.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cadenza.sidecar import wire

CONNECTIONS = 1000
PACE_S = 0.02
HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]root[/red]<script>alert(1)</script>\nJOBID=1 forged line"
VALUES = ("\ud800", "\x00" * 300, HOSTILE, 10**400, -1, 1e308, [], {"a": "\udfff"}, None, True, "x" * 30_000)
NO_NUMBERS = tuple(value for value in VALUES if not isinstance(value, bool | int) or abs(value) > 2**62)
ANSWERS = ("arrived", "yielded", "resumed", "checkpointed")
COMMENTS = (
    '{"cadenza":{"share":true,"duration_s":1' + "0" * 400 + "}}",
    '{"cadenza":{"share":true,"why":"\\ud800","held":true}}',
    '{"cadenza":{"share":true,"model":"\\ud800"}}',
    '{"cadenza":{"share":true,"priority":99999999999999999999}}',
    '{"cadenza":{"share":true,"min_gpus":-1,"max_gpus":1e999}}',
    '{"cadenza":{"share":true,"model":"<b>[red]"}}',
    '{"cadenza":[[[[[[[[]]]]]]]],"\\ud800":1}',
    '{"cadenza":{"share":true,"priority":1000}}',
)


def environment(name: str) -> int:
    return int(os.environ.get(name, "0"))


def connect() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(wire.DEFAULT_SOCKET)
    return sock


def asked(kind: str, **fields: object) -> str:
    """Return the type of the agent's answer to one packet on a connection of its own."""
    with connect() as sock:
        sock.settimeout(20)
        sock.send(packet(kind, **fields))
        return str(wire.decode(sock.recv(wire.MAX_PACKET))["type"])


def packet(kind: str, **fields: object) -> bytes:
    """Return a packet of any values; the client's own encoder refuses some of them."""
    return json.dumps({"v": wire.VERSION, "type": kind, **fields}).encode()[: wire.MAX_PACKET]


class Rank:
    """The one rank of this job; ``mode`` says how it answers a stop."""

    def __init__(self, mode: str) -> None:
        self.mode, self.step = mode, 0
        self.nonsense = itertools.cycle(itertools.product(ANSWERS, NO_NUMBERS))
        self.sock = connect()
        claims = {"gpus": list(range(4)), "node": "node2", "hosts": 64, "world_size": 1} if mode == "flood" else {}
        self.send(
            "attach", job=environment("SLURM_JOB_ID"), restart=environment("SLURM_RESTART_COUNT"), rank=0, **claims
        )
        answer, files, _, _ = socket.recv_fds(self.sock, wire.MAX_PACKET, 1)
        if wire.decode(answer)["type"] != "attached":
            sys.exit(f"not attached: {answer!r}")
        self.words = memoryview(mmap.mmap(files[0], wire.PAGE_BYTES)).cast("Q")
        self.away = wire.decode(answer)["state"] == "yielded"
        if self.away:
            self.send("yielded", order=0)
        self.sock.setblocking(False)

    def send(self, kind: str, **fields: object) -> None:
        self.sock.send(packet(kind, **fields))

    def run(self, until: Iterator[None]) -> None:
        """Iterate and answer; the page has random words in place of most counters where the mode says so."""
        for _ in until:
            if not self.away:
                self.step += 1
            if self.mode == "flood":
                for word in (*range(wire.PAGE_LAST_NS, wire.PAGE_STATE), *range(wire.PAGE_SAMPLES, wire.PAGE_SAVES),
                             *range(wire.PAGE_ORDER_COUNT, wire.PAGE_STOP), *range(wire.PAGE_FINE, 512)):  # fmt: skip
                    self.words[word] = random.getrandbits(64)
                kind, value = next(self.nonsense)
                self.send(kind, order=value)
            self.words[wire.PAGE_STEP] = self.step
            with contextlib.suppress(BlockingIOError):
                while message := self.sock.recv(wire.MAX_PACKET):
                    self.answer(wire.decode(message))

    def answer(self, message: dict[str, int | str]) -> None:
        order = message.get("order", 0)
        match message["type"]:
            case "stop":
                self.step = max(self.step, int(message["step"]))
                self.words[wire.PAGE_STEP] = self.step
                refusal = {"refused": HOSTILE} if self.mode == "refuse" else {}
                self.send("arrived", order=order, step=self.step, bytes=0, **refusal)
            case "commit":
                self.away = True
                self.send("yielded", order=order, copy_s=0.0, bytes=0)
            case "resume":
                self.away = False
                self.send("resumed", order=order, copy_s=0.0)


def steps() -> Iterator[None]:
    while True:
        time.sleep(PACE_S)
        yield


def flood() -> None:
    """Hold as many connections as are given, and send a thousand packets a second, at the lowest CPU priority."""
    os.nice(19)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * CONNECTIONS, most), most))
    names = (
        "job",
        "restart",
        "rank",
        "world_size",
        "state",
        "step",
        "gpus",
        "node",
        "hosts",
        "order",
        "bytes",
        "error",
    )
    kinds = ("attach", "ask", "arrived", "yielded", "resumed", "checkpointed", "detach", "requeued_by", "start", "end")
    packets = [packet(kind, **{"job": 1, name: value}) for kind, name, value in itertools.product(kinds, names, VALUES)]
    packets += [b"", b"[" * 60_000, b"\xff\xfe nonsense", packet("start", job=1, uid=0, user="root", managed=True)]
    ends: list[socket.socket] = []
    for number in itertools.count():
        for _ in range(CONNECTIONS - len(ends)):
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            try:
                end.connect(wire.DEFAULT_SOCKET)
            except OSError:
                end.close()
                break
            ends.append(end)
        for end in random.sample(ends, min(20, len(ends))):
            try:
                end.send(packets[number % len(packets)])
            except BlockingIOError:
                pass
            except OSError:
                end.close()
                ends.remove(end)
        time.sleep(PACE_S)


def beat(path: Path) -> None:
    """Write the time every few milliseconds: each line is a moment at which this process computed."""
    with path.open("a") as file:
        while True:
            time.sleep(0.004)
            file.write(f"{time.time()}\n")
            file.flush()


def outliving(path: Path) -> None:
    """Leave the job's session and process group, and compute on when the job's processes have ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            beat(path)
        os._exit(0)
    os.wait()


def change_comments() -> None:
    """Change the job's comment at every round, and print each change that Slurm took."""
    for text in itertools.cycle(COMMENTS):
        if update(f"Comment={text}"):
            print(text, flush=True)
        time.sleep(0.1)


def update(change: str) -> bool:
    """Change this job as its owner; return True if Slurm took the change."""
    command = ["scontrol", "update", f"JobId={environment('SLURM_JOB_ID')}", change]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def forge(victim: int) -> None:
    """Speak as another user's job that runs on another host, and as root."""
    fields = {
        "job": victim,
        "uid": os.getuid(),
        "user": "alice",
        "node": "node2",
        "managed": True,
        "gpus": [0, 1, 2, 3],
    }
    answers = [asked(kind, **fields) for kind in ("attach", "ask", "start", "end")]
    os.environ["SLURM_JOB_ID"] = str(victim)
    answers += [asked("attach", job=victim), asked("ask", job=victim)]
    print(json.dumps(answers), flush=True)


def register() -> None:
    """Print the seconds that the agent takes to answer root's registration of a job without GPUs."""
    job, node = 2**30, os.uname().nodename
    began = time.monotonic()
    answer = asked("start", job=job, uid=0, user="root", node=node, managed=False, hosts=1, step=0)
    print(json.dumps({"seconds": time.monotonic() - began, "answer": answer}))
    with connect() as sock:
        sock.send(packet("end", job=job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("flood", "lie", "refuse", "forge", "comment", "leave", "register"))
    parser.add_argument("--beats", type=Path, help="file for the moments at which the job computed")
    parser.add_argument("--end", type=Path, help="file that ends the job that lies, in its own turn")
    parser.add_argument("--victim", type=int, default=0, help="job of another host to speak for")
    options = parser.parse_args()
    if options.mode == "register":
        register()
        return
    rank = Rank(options.mode)
    if options.mode == "flood" and os.fork() == 0:
        flood()
    if options.mode == "comment" and os.fork() == 0:
        change_comments()
    if options.mode == "lie":
        outliving(options.beats)
    if options.mode == "forge":
        forge(options.victim)
    turns = steps()
    if options.mode == "lie":
        rank.run(itertools.takewhile(lambda _: rank.away or not options.end.exists(), turns))
        return
    if options.mode == "leave":
        rank.run(itertools.islice(turns, 50))
        update("Comment=no more")
    rank.run(turns)


if __name__ == "__main__":
    main()
