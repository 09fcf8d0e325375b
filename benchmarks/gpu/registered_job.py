"""Register this process as a job's, as root's SPANK plugin does before the program starts, and become the program.

``registered_job.py SOCKET FIELDS [COMMAND …]``: FIELDS is the JSON of a ``start`` message; those that a job needs have
defaults. With ``granted`` among them the command starts once the job has its lease. Without a command it prints the
agent's answers as the plugin reads them, one a line, until it ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cadenza.sidecar import wire

DEFAULTS = {"restart": 0, "user": "u", "node": "n1", "lane": 0, "hosts": 1, "step": 0, "managed": True, "options": ""}


def registered(path: Path, job: int, gpus: Sequence[int], *command: str, **fields: Any) -> list[str]:
    """Return a command that runs another one as the first process of a job."""
    return [sys.executable, __file__, str(path), json.dumps({"job": job, "gpus": list(gpus), **fields}), *command]


def register(path: str, **fields: Any) -> tuple[socket.socket, dict[str, Any]]:
    """Return the connection of a registration and its first answer."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    sock.send(wire.encode("start", **{**DEFAULTS, "uid": os.getuid(), **fields}))
    return sock, wire.decode(sock.recv(wire.MAX_PACKET))


def main() -> None:
    """Register, and become the command or print the agent's answers."""
    path, text, *command = sys.argv[1:]
    fields = json.loads(text)
    granted = fields.pop("granted", False)
    sock, answer = register(path, **fields)
    while granted and answer["state"] == "wait":
        answer = wire.decode(sock.recv(wire.MAX_PACKET))
    if command:
        sock.close()
        os.execvp(command[0], command)  # noqa: S606 - the caller's own command
    print(json.dumps({"event": "start", **answer}), flush=True)
    while packet := sock.recv(wire.MAX_PACKET):
        print(json.dumps({"event": "start", **wire.decode(packet)}), flush=True)


if __name__ == "__main__":
    main()
