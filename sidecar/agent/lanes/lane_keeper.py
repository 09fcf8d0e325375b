"""Keeper of the host's lanes on demand: a thread that compares the slurmds that run with those that the service orders.

It looks instead of remembering: a slurmd lives on without the agent, and is found again by the folder in its command.
Under systemd a template unit runs it, so that it and its jobs have nothing of the agent's confinement and limits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cadenza.policies.core.text import printable
from cadenza.sidecar.agent.errors import LaneError
from cadenza.sidecar.agent.inventory import node_of
from cadenza.sidecar.agent.ipc.processes import start_ticks, uid_of
from cadenza.sidecar.agent.ipc.slurm_steps import Step, steps
from cadenza.sidecar.agent.lanes.lane_files import link_site, output, prepare
from cadenza.sidecar.bounds import MAX_TEXT
from cadenza.sidecar.clock import Clock
from cadenza.sidecar.orders import LaneOrder

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks at the lanes' slurmds."""
RETRY_S = 10.0
"""Least time between two starts of a lane's slurmd."""
UNKNOWN_S = 90.0
"""Age at which a slurmd is started anew that slurmctld has never known; several rounds of the service. One that it has
had, and has no more by a removal or with its state, is started anew at once."""
SYSTEMD = Path("/run/systemd/system")
"""Exists where systemd is the init (sd_booted(3))."""


class Slurmd(NamedTuple):
    """The process of one lane."""

    start_ticks: int
    pid: int


class LaneKeeper:
    """Starts and ends slurmds in ``folder``/NODE; ``order`` and ``faults`` are the event loop's, the rest the thread's.

    Without an order since the agent's start it touches nothing.
    """

    def __init__(self, folder: Path, clock: Clock, steps: Callable[[], Iterable[Step]] = steps) -> None:
        self._folder = folder
        self._clock = clock
        self._steps = steps
        self._orders: Mapping[str, LaneOrder] = {}
        self._wakes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._slurmds: dict[str, Slurmd] | None = None
        """The slurmds of the last look; None before the first one."""
        self._since_s: dict[Slurmd, float] = {}
        self._stale: set[str] = set()
        """Nodes that were not wanted for a while, or that slurmctld has no more: the slurmd that runs is of no use."""
        self._retry_s: dict[str, float] = {}
        self._faults: dict[str, str] = {}
        self._thread: threading.Thread | None = None

    # --- for the event loop ----------------------------------------------------------------------------------

    def order(self, lanes: tuple[LaneOrder, ...]) -> None:
        """Take the lanes that are to run here from now on, and no others."""
        orders = {lane.node: lane for lane in lanes}
        for node, before in self._orders.items():
            after = orders.get(node)
            if after is None or (before.known and not after.known):
                self._stale.add(node)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cadenza-lanes", daemon=True)
            self._orders = orders
            self._thread.start()
        elif orders != self._orders:
            self._orders = orders
            self._wakes.put("look")

    def faults(self) -> tuple[str, ...]:
        """Return a sentence for each lane whose slurmd cannot be started or ended."""
        return tuple(printable(f"{node}: {fault}", MAX_TEXT) for node, fault in sorted(self._faults.copy().items()))

    def close(self) -> None:
        """Let the thread end; the slurmds run on."""
        self._wakes.put("end")

    # --- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        woken = "look"
        while woken != "end":
            try:
                self._compare(self._orders)
            except Exception:
                log.exception("the lanes could not be looked after")
            with contextlib.suppress(queue.Empty):
                woken = self._wakes.get(timeout=LOOK_S)

    def _compare(self, orders: Mapping[str, LaneOrder]) -> None:
        """Bring what runs nearer to what is ordered."""
        now_s = self._clock.monotonic()
        running = self._look(orders)
        self._since_s = {slurmd: self._since_s.get(slurmd, now_s) for slurmd in running.values()}
        faults: dict[str, str] = {}
        for node, slurmd in running.items():
            order = orders.get(node)
            try:
                if order is None or self._is_lost(order, slurmd, now_s):
                    self._end(node, slurmd)
                else:
                    link_site(self._folder / node)
            except LaneError as error:
                faults[node] = str(error)
        for node in orders.keys() - running.keys():
            if now_s >= self._retry_s.get(node, 0.0):
                self._retry_s[node] = now_s + RETRY_S
                try:
                    self._start(orders[node])
                except LaneError as error:
                    log.warning("lane %s cannot be opened: %s", node, error)
                    faults[node] = f"it cannot be opened: {error}"
            elif node in self._faults:
                faults[node] = self._faults[node]
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name not in running and path.name not in orders:
                shutil.rmtree(path, ignore_errors=True)
        self._faults = faults

    def _is_lost(self, order: LaneOrder, slurmd: Slurmd, now_s: float) -> bool:
        """Return True if slurmctld does not have the node of a slurmd that runs, and will not get it from this one."""
        old = now_s - self._since_s[slurmd] > UNKNOWN_S
        return order.node in self._stale or (old and not order.known)

    def _look(self, orders: Mapping[str, LaneOrder]) -> dict[str, Slurmd]:
        """Return the lanes' slurmds by node; all processes are looked at only if one that is expected is missing."""
        before = self._slurmds or {}
        alive = {node: one for node, one in before.items() if start_ticks(one.pid) == one.start_ticks}
        if self._slurmds is None or alive != before or not orders.keys() <= alive.keys():
            alive = slurmds(self._folder)
        self._slurmds = alive
        return alive

    def _start(self, order: LaneOrder) -> None:
        """Start the slurmd of a lane, which registers it; raise LaneError."""
        self._stale.discard(order.node)
        conf = prepare(self._folder / order.node, order)
        log.info("opening lane %s: %s", order.node, order.hardware)
        # A unit of its own: as the agent's child, slurmd and its jobs would have the agent's limits, and end with it.
        if SYSTEMD.is_dir():
            (conf.parent / "environment").write_text(f"LANE='{order.hardware}'\n", encoding="ascii")
            output("systemctl", "restart", f"cadenza-lane@{order.node}.service")
        else:
            # -Z registers a dynamic node (slurmd(8)). slurmctld reads --conf only where it makes the node.
            output("slurmd", "-f", str(conf), "-Z", "-N", order.node, "--conf", order.hardware)

    def _end(self, node: str, slurmd: Slurmd) -> None:
        """End the slurmd of a lane without jobs; raise LaneError while there are some."""
        # slurmctld takes a node without its slurmd for dead after SlurmdTimeout, and kills or requeues the jobs there.
        jobs = sorted({step.job for step in self._steps() if node_of(step) == node})
        if jobs:
            raise LaneError(f"its slurmd is to end, and job {jobs[0]} is still there")
        log.info("closing lane %s", node)
        self._stale.discard(node)
        self._retry_s.pop(node, None)
        if SYSTEMD.is_dir():
            output("systemctl", "stop", f"cadenza-lane@{node}.service")
        elif start_ticks(slurmd.pid) == slurmd.start_ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slurmd.pid, signal.SIGTERM)


def slurmds(folder: Path) -> dict[str, Slurmd]:
    """Return root's slurmds whose slurm.conf is in a folder below ``folder``, by node.

    A slurmd that launches a step has a child that looks like itself for a moment: the older one counts.
    """
    found: dict[str, Slurmd] = {}
    for pid, words in _commands():
        conf = Path(words[words.index("-f") + 1]) if "-f" in words[:-1] else Path()
        ticks = start_ticks(pid)
        if conf.parent.parent == folder and ticks is not None and uid_of(pid) == os.geteuid():
            node = conf.parent.name
            found[node] = min(found.get(node, Slurmd(ticks, pid)), Slurmd(ticks, pid))
    return found


def _commands() -> Iterator[tuple[int, list[str]]]:
    """Yield the processes called slurmd, with the words of their commands."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if (path / "comm").read_bytes().strip() == b"slurmd":
                    words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    yield int(path.name), words
