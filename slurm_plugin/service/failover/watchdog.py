"""The watchdog: a child of cadenzad that releases the jobs which a killed cadenzad left suspended or held.

``python -m cadenza.slurm_plugin.service.failover.watchdog --store FILE --gateway MODULE:CALLABLE --grace SECONDS``
with its standard input on a pipe from the service. A service that ends in order sends ``bye`` first. A
supervisor that stops all processes of a service when the service dies stops the watchdog too
(systemd: use ``KillMode=process``).
"""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click

from cadenza.policies.core.actions import Action, Outcome
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.daemon_log import set_up_logging
from cadenza.slurm_plugin.errors import StoreError
from cadenza.slurm_plugin.gateway.slurm_gateway import SlurmGateway, open_gateway
from cadenza.slurm_plugin.service.action_log import log_action
from cadenza.slurm_plugin.service.failover.lock import StoreLock
from cadenza.slurm_plugin.service.failover.release_round import release_round, release_unrecorded
from cadenza.slurm_plugin.service.store.schema import read_undo
from cadenza.slurm_plugin.service.store.writer import SqliteStore

log = logging.getLogger(__name__)

BYE = b"bye\n"
REASON = "cadenzad was killed and has not come back; your job goes on without it"
POLL_S = 0.5
GOODBYE_TIMEOUT_S = 10.0
RETRY_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)


class Watchdog:
    """The service's hold on its watchdog."""

    def __init__(self, store: Path, gateway: str, grace_s: float) -> None:
        self._command = [sys.executable, "-m", __name__, "--store", str(store), "--gateway", gateway]
        self._command += ["--grace", str(grace_s)]
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child unless it is alive, outside our process group, so that no ^C reaches it."""
        if self._child is None or self._child.poll() is not None:
            if self._child is not None:
                log.warning("the watchdog ended with %s, starting it again", self._child.returncode)
            try:
                self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                log.warning("no watchdog: %s", error.strerror)

    def goodbye(self) -> None:
        """End the child, because the service ends in order."""
        if self._child is None or self._child.stdin is None:
            return
        try:
            self._child.stdin.write(BYE)
            self._child.stdin.close()
            self._child.wait(timeout=GOODBYE_TIMEOUT_S)
        except BrokenPipeError:
            log.warning("the watchdog had ended before the service")
        except subprocess.TimeoutExpired:
            log.warning("the watchdog (pid %d) does not end", self._child.pid)
        self._child = None


def parent_died(pipe: int) -> bool:
    """Wait for the parent's end; return whether it came without a goodbye."""
    received = b""
    while piece := os.read(pipe, 64):
        received = (received + piece)[-len(BYE) :]
    return received != BYE


def stand_in(
    store: Path, open_slurm: Callable[[], SlurmGateway], grace_s: float, pause: Callable[[float], object]
) -> bool:
    """Release the jobs of a dead service, unless a new one comes; return whether this process released them."""
    lock = StoreLock(store)
    waited_s = 0.0
    while waited_s < grace_s and lock.owner() is None:
        pause(POLL_S)
        waited_s += POLL_S
    attempt = 0
    while lock.owner() is None:
        if _attempt(store, lock, open_slurm):
            return True
        pause(RETRY_S[min(attempt, len(RETRY_S) - 1)])
        attempt += 1
    log.info("a new cadenzad (pid %s) has taken over", lock.owner())
    return False


def _attempt(store: Path, lock: StoreLock, open_slurm: Callable[[], SlurmGateway]) -> bool:
    """Try to release the jobs; return whether all are released."""
    clock = SystemClock()
    try:
        with closing(open_slurm()) as slurm:
            # The lock only once Slurm answers: a new service must not wait for it while slurmctld is away.
            slurm.read()
            lock.take()
            try:
                outcomes = _release(slurm, store, clock)
            finally:
                lock.release()
    except Exception as error:  # noqa: BLE001 (whatever the error, the jobs still have to be released)
        log.warning("release failed (%s: %s), trying again", type(error).__name__, error)
        return False
    for action, outcome in outcomes:
        log_action(action, outcome)
    return all(outcome.ok for _, outcome in outcomes)


def _release(slurm: SlurmGateway, store: Path, clock: SystemClock) -> tuple[tuple[Action, Outcome], ...]:
    """Release the jobs in a round on record, or without one where the store cannot be opened or written."""
    try:
        with closing(SqliteStore(store, clock)) as record:
            return release_round(slurm, clock, record, REASON).outcomes
    except (StoreError, sqlite3.Error) as error:
        log.warning("no round can be written down (%s), the jobs are released all the same", error)
        return release_unrecorded(slurm, read_undo(store), REASON)


@click.command()
@click.option("--store", type=click.Path(path_type=Path), required=True)
@click.option("--gateway", required=True)
@click.option("--grace", type=float, required=True)
def main(*, store: Path, gateway: str, grace: float) -> None:
    """Wait for the end of cadenzad on standard input."""
    set_up_logging("cadenzad", debug=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent_died(sys.stdin.fileno()):
        log.warning("cadenzad is gone without a goodbye; its jobs are released in %.0f s unless it returns", grace)
        stand_in(store, lambda: open_gateway(gateway), grace, threading.Event().wait)


if __name__ == "__main__":
    main()
