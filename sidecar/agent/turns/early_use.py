"""Jobs that use a GPU before they have asked for their lease, as the driver shows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cadenza.sidecar.agent.ipc.processes import start_ticks
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.book import Taken
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.leases.membership import pids_of
from cadenza.sidecar.agent.telemetry.gpu_watch import GpuWatch, OnGpu

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks at the GPUs while a job has not asked for its lease."""
MAX_KEPT = 10_000
"""Jobs that are remembered; the first is forgotten for one more."""


@dataclass
class EarlyUse:
    """Ends the late lease of jobs that do not keep to it: they take turns, and wait where they start from then on.

    The process that was seen keeps its GPU from other jobs until it ends, or until its job gets the lease.
    """

    host: Host
    gpus: GpuWatch
    _judged_s: float = float("-inf")
    """Beginning of the last look that was compared."""

    def tick(self) -> None:
        """Compare each new look at the GPUs with the jobs that have not asked, and ask for the next one."""
        late = [lease for lease in self.host.leases if lease.unasked]
        if not late or not self.gpus.sees:
            return
        look = self.gpus.last
        if look.began_s > self._judged_s:
            self._judged_s = look.began_s
            for lease in late:
                with self.host.supervise(lease.key, "its use of GPUs"):
                    self._judge(lease, look.on_gpu)
        if self.host.clock.monotonic() - self.gpus.asked_s >= LOOK_S:
            self.gpus.ask()

    def _judge(self, lease: Lease, on_gpu: OnGpu) -> None:
        """Have a job wait for its lease if a process of it is on one of its GPUs."""
        present = {gpu: there.keys() for gpu in lease.gpus if (there := on_gpu.get(gpu))}
        mine = pids_of(lease) if present else frozenset()
        found = sorted((pid, gpu) for gpu, pids in present.items() for pid in pids & mine)
        if not found:
            return
        pid, gpu = found[0]
        lease.early = f"pid {pid} used GPU {gpu} before the job had asked for its lease"
        while len(self.host.early) >= MAX_KEPT:
            del self.host.early[next(iter(self.host.early))]
        self.host.early[lease.job] = lease.early
        self.host.leases.ask(lease, self.host.clock.now())
        log.warning("early use JOBID=%s: %s", lease.key, lease.early)
        now = self.host.clock.monotonic()
        for one in {pid for pid, _ in found}:
            if (ticks := start_ticks(one)) is not None:
                gpus = frozenset(gpu for other, gpu in found if other == one)
                self.host.taken.append(Taken(one, ticks, gpus, lease.job, now, early=True))
