"""The wait for the lease of a job that started without it, before the first use of a GPU (stdlib only)."""

from __future__ import annotations

import logging
import socket
import threading

from cadenza.sidecar import wire
from cadenza.sidecar.client.errors import AgentRefusedError
from cadenza.sidecar.client.session.identity import Identity

SILENCE_S = 30.0
"""Longest silence of an agent; it repeats its answer every few seconds."""
RETRY_S = 1.0
"""Pause before a lost agent is tried again."""

_log = logging.getLogger("cadenza.client")


def waiting_text(who: Identity, reason: str) -> str:
    """Return the sentence for the job's output: the GPUs that it waits for, who has them, and how to give up."""
    gpus = ",".join(map(str, who.gpus)) or "?"
    return (
        f"job {who.job} waits for GPU {gpus} of {who.node or 'this host'}: {reason or 'its turn has not come'}. "
        f"It goes on by itself; `scancel {who.job}` gives up"
    )


def wait_for_lease(path: str, who: Identity) -> None:
    """Return once the job has its lease; a lost agent is waited for, because another job may have the GPUs.

    ``path`` is the agent's socket. Raises AgentRefusedError when the agent does not accept this process.
    """
    pause = threading.Event()
    while True:
        try:
            return _ask(path, who)
        except (OSError, wire.WireError) as error:
            _log.debug("the Cadenza agent is not there: %s", error)
            pause.wait(RETRY_S)


def _ask(path: str, who: Identity) -> None:
    """Ask once, say in the job's output that it waits, and return with the lease; raise OSError for a lost agent."""
    waits = False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(SILENCE_S)
        connection.connect(path)
        connection.send(wire.encode("ask", job=who.job, restart=who.restart))
        while packet := connection.recv(wire.MAX_PACKET):
            message = wire.decode(packet)
            if message["type"] == "error":
                raise AgentRefusedError(str(message.get("error", "no reason given")))
            if message.get("state") == "granted":
                if waits:
                    _log.warning("job %d has its GPUs and goes on", who.job)
                return
            if not waits:
                waits = True
                _log.warning("%s", waiting_text(who, str(message.get("reason", ""))))
    raise ConnectionError("the agent closed the connection")
