"""A job that did not opt in and comes and goes on the trainer's GPU: each visit makes the trainer yield and resume."""

from __future__ import annotations

import os
import threading
from typing import Any, Self

from test_client_agent import Agent

from cadenza.sidecar import wire

JOB = 9


class Intruder(threading.Thread):
    """Repeated visits from the time a job is attached until the end of the block."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(daemon=True)
        self._agent = agent
        self.visits = agent.folder / "visits"
        """Holds a character for each yield of the trainer: the agent's log has so many lines a minute only."""
        self.visits.touch()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.02):
            if " attached JOBID=" in self._agent.log():
                self._visit()

    def _visit(self) -> None:
        """Ask for the GPU, get it, and leave."""
        facts: dict[str, Any] = {"job": JOB, "restart": 0, "uid": os.getuid(), "user": "u", "node": "n1", "lane": 0}
        with self._agent.say("start", **facts, gpus=[0], hosts=1, managed=False, step=0) as connection:
            connection.settimeout(0.05)
            while not self._over.is_set():
                if granted(connection):
                    with self.visits.open("a") as visits:
                        visits.write(".")
                    break
        self._agent.say("end", job=JOB, restart=0).close()


def granted(connection: Any) -> bool:
    """Return whether the next message, if one comes, grants the GPU to the intruder."""
    try:
        return bool(wire.decode(connection.recv(wire.MAX_PACKET))["state"] == "granted")
    except TimeoutError:
        return False
