"""The agent's figures for Prometheus: switches as they end, and the host's state when it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cadenza.sidecar import orders
from cadenza.sidecar.agent.ipc.memory_use import host_memory
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.lease_table import State

SWITCH_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
STATES: tuple[State, ...] = ("waiting", "held", "stopping", "yielded")


class AgentMetrics(Collector):
    """Labels are words of this program, never jobs or users."""

    def __init__(self, registry: CollectorRegistry, host: Host, version: str) -> None:
        self._host, self._version = host, version
        text = "Duration of yields, resumes and saves"
        name = "cadenza_agent_switch_seconds"
        self._switch = Histogram(name, text, ("kind", "phase"), registry=registry, buckets=SWITCH_S)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names need not be known before."""
        return ()

    def messages(self, messages: Iterable[object]) -> None:
        """Count the switches among the messages for the service."""
        for one in messages:
            if isinstance(one, orders.Switched):
                for phase, took_s in (("boundary", one.boundary_s), ("copy", one.copy_s), ("total", one.total_s)):
                    self._switch.labels(one.kind, phase).observe(took_s)

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of the host, read in the server's thread: each value is one look at what the loop keeps."""
        host, rotating = self._host, self._host.rotating()
        leases = tuple(host.leases)
        gpus: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        jobs: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        moved = 0
        for lease in leases:
            jobs[lease.state] += 1
            gpus[lease.state] += len(lease.gpus)
            moved += sum(lease.gpu_bytes) if lease.state == "yielded" else 0
        memory = host_memory()
        faults = {"taken": len(host.taken), "faults": len(host.faults)}
        yield _gauge("agent_build_info", "Version", "version", {self._version: 1})
        yield _gauge("agent_rotating", "1 while the agent takes turns by itself", "", {"": rotating})
        heard = bool(host.settings.agent.service) and not rotating
        yield _gauge("agent_service_connected", "1 while the service is heard", "", {"": heard})
        yield _gauge("lease_gpus", "GPUs of jobs, by the state of their leases", "state", gpus)
        yield _gauge("lease_jobs", "Jobs, by the state of their leases", "state", jobs)
        sizes = {"total": memory.total, "free": memory.available, "moved": moved}
        yield _gauge("host_memory_bytes", "Memory, and GPU state of jobs that wait in it", "state", sizes)
        yield _gauge("agent_faults", "Faults of this host", "kind", faults)


def _gauge(name: str, text: str, label: str, rows: dict[str, int] | Counter[str]) -> Metric:
    family = GaugeMetricFamily(f"cadenza_{name}", text, labels=[label] if label else [])
    for value, number in rows.items():
        family.add_metric([value] if label else [], float(number))
    return family
