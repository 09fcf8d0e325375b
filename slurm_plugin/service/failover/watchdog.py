"""The watchdog: a child of cadenzad that releases what a killed cadenzad left suspended or held.

``python -m cadenza.slurm_plugin.service.failover.watchdog --store FILE --gateway MODULE:CALLABLE --grace SECONDS``
with its standard input on a pipe from the service. A service that ends in order says ``bye`` first. A
supervisor that stops the rest of a service's processes when the service dies takes the watchdog too
(systemd: use ``KillMode=process``).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click

from cadenza.policies.round import RoundReport
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.gateway.slurm_gateway import SlurmGateway, open_gateway
from cadenza.slurm_plugin.service.failover.lock import StoreLock
from cadenza.slurm_plugin.service.failover.release_round import release_round
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.service.systemd import action_lines, set_up_logging

log = logging.getLogger(__name__)

BYE = b"bye\n"
REASON = "cadenzad was killed and has not come back; your job goes on without it"
LOOK_S = 0.5
GOODBYE_S = 10.0
RETRY_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)


class Watchdog:
    """The service's hold on its watchdog."""

    def __init__(self, store: Path, gateway: str, grace_s: float) -> None:
        self._command = [sys.executable, "-m", __name__, "--store", str(store), "--gateway", gateway]
        self._command += ["--grace", str(grace_s)]
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child unless it is alive; out of our process group, so that no ^C reaches it."""
        if self._child is None or self._child.poll() is not None:
            if self._child is not None:
                log.warning("the watchdog ended with %s, starting it again", self._child.returncode)
            try:
                self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                log.warning("no watchdog: %s", error.strerror)

    def goodbye(self) -> None:
        """Send the child home: we end in order."""
        if self._child is None or self._child.stdin is None:
            return
        try:
            self._child.stdin.write(BYE)
            self._child.stdin.close()
            self._child.wait(timeout=GOODBYE_S)
        except BrokenPipeError:
            log.warning("the watchdog was gone before we were")
        except subprocess.TimeoutExpired:
            log.warning("the watchdog (pid %d) does not end", self._child.pid)
        self._child = None


def parent_died(pipe: int) -> bool:
    """Wait for the parent's end; return whether it came without a goodbye."""
    heard = b""
    while piece := os.read(pipe, 64):
        heard = (heard + piece)[-len(BYE) :]
    return heard != BYE


def stand_in(
    store: Path, open_slurm: Callable[[], SlurmGateway], grace_s: float, pause: Callable[[float], object]
) -> bool:
    """Release what a dead service left, unless a new one comes; return whether it was us who released.

    The store's lock is taken only once Slurm answers, so that a new service is never kept waiting for it.
    """
    lock = StoreLock(store)
    waited_s = 0.0
    while waited_s < grace_s and lock.owner() is None:
        pause(LOOK_S)
        waited_s += LOOK_S
    attempt = 0
    while lock.owner() is None:
        if _attempt(store, lock, open_slurm):
            return True
        pause(RETRY_S[min(attempt, len(RETRY_S) - 1)])
        attempt += 1
    log.info("a new cadenzad (pid %s) has taken over", lock.owner())
    return False


def _attempt(store: Path, lock: StoreLock, open_slurm: Callable[[], SlurmGateway]) -> bool:
    """Return whether nothing is left to release."""
    try:
        with closing(open_slurm()) as slurm:
            slurm.read()
            lock.take()
            try:
                report = _release(store, slurm)
            finally:
                lock.release()
    except Exception as error:  # noqa: BLE001 (whatever it is, the jobs still need us)
        log.warning("release failed (%s: %s), trying again", type(error).__name__, error)
        return False
    for line in action_lines(report):
        log.info("%s", line)
    return all(outcome.ok for _, outcome in report.outcomes)


def _release(store: Path, slurm: SlurmGateway) -> RoundReport:
    clock = SystemClock()
    with closing(SqliteStore(store, clock)) as book:
        return release_round(slurm, clock, book, REASON)


@click.command()
@click.option("--store", type=click.Path(path_type=Path), required=True)
@click.option("--gateway", required=True)
@click.option("--grace", type=float, required=True)
def main(*, store: Path, gateway: str, grace: float) -> None:
    """Wait for the end of cadenzad on standard input."""
    set_up_logging(debug=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent_died(sys.stdin.fileno()):
        log.warning("cadenzad is gone without a goodbye; its jobs are released in %.0f s unless it returns", grace)
        stand_in(store, lambda: open_gateway(gateway), grace, threading.Event().wait)


if __name__ == "__main__":
    main()
