"""A process that becomes a user's, holds as many connections as it can, and sends a thousand packets a second."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import sys
import time

from cadenza.sidecar import wire

CONNECTIONS = 1000
PACKETS = [
    wire.encode("attach", job=1),
    wire.encode("end", job=1),
    wire.encode("yielded", error="x\n" * 900),
    b"[" * 60_000,
    b"nonsense",
]


def connect(path: str) -> socket.socket | None:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        peer.connect(path)
    except OSError:
        peer.close()
        return None
    return peer


def main() -> None:
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * CONNECTIONS, 2 * CONNECTIONS))
    ends: list[socket.socket] = []
    said, numbers = False, itertools.count()
    while True:
        while len(ends) < CONNECTIONS and (end := connect(sys.argv[1])) is not None:
            ends.append(end)
        if len(ends) == CONNECTIONS and not said:
            said = True
            print(f"{CONNECTIONS} connections", flush=True)
        for number in itertools.islice(numbers, 20):
            end = ends[number * 7 % len(ends)]
            try:
                end.send(PACKETS[number % len(PACKETS)])
            except BlockingIOError:
                pass
            except OSError:
                with contextlib.suppress(OSError):
                    end.close()
                ends.remove(end)
        time.sleep(0.02)


main()
