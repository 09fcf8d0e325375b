"""Gauges of the cluster as the last round saw it, computed when Prometheus asks, once a round."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import inf
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.idle_gpus import HOLDING, awaited_hosts, free_gpus
from cadenza.policies.core.model import ClusterSnapshot, Job, Node
from cadenza.policies.round import RoundReport
from cadenza.policies.sharing.turns.lanes import our_hosts
from cadenza.slurm_plugin.errors import StoreError
from cadenza.slurm_plugin.service.accounting.usage import narrowest_waiting
from cadenza.slurm_plugin.service.settings import Settings, guard_settings
from cadenza.slurm_plugin.service.store.schema import open_readonly

IDLE_PERCENT = 5.0
"""Use of its GPUs below which a job that holds them counts as idle."""
Rows = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Sources:
    """Values that the daemon keeps anyway, read from the server's threads; none waits for a round or for Slurm."""

    build: Mapping[str, str]
    """Versions, for ``cadenza_build_info``."""
    settings: Callable[[], Settings]
    last: Callable[[], tuple[RoundReport, Memory] | None]
    good_at_s: Callable[[], float | None]
    """Returns when the last good round ended, seconds since the epoch."""
    illness: Callable[[], str]
    pause_s: Callable[[], float]
    reports: Callable[[], int]
    refused: Callable[[], Mapping[str, int]]
    store: Path


class ClusterGauges(Collector):
    """Labels are states, causes and partitions, so that a site of any size has some hundred series."""

    def __init__(self, sources: Sources) -> None:
        self._from = sources
        self._seen: tuple[RoundReport | None, tuple[Metric, ...]] = (None, ())

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names need not be known before the first round."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the service's own state, and the cluster's."""
        yield from self._service()
        yield from self._store()
        last = self._from.last()
        if last is not None:
            if self._seen[0] is not last[0]:
                self._seen = last[0], tuple(cluster_metrics(*last, self._from.settings().guard.partitions))
            yield from self._seen[1]

    def _service(self) -> Iterator[Metric]:
        settings, good_at_s = self._from.settings(), self._from.good_at_s()
        policy = settings.policy
        yield _gauge("build_info", "Versions", tuple(self._from.build), {tuple(self._from.build.values()): 1})
        mode = (settings.service.mode, policy.order, policy.allocate, policy.share)
        yield _gauge("mode_info", "Settings", ("mode", "order", "allocate", "share"), {mode: 1})
        yield _gauge("trusted", "1 while agents and jobs rely on the service", (), {(): not self._from.illness()})
        killed = guard_settings(settings).killed
        yield _gauge("kill_switch", "1 while the kill switch lets nothing leave", (), {(): killed})
        yield _gauge("round_pause_seconds", "Time between regular rounds at present", (), {(): self._from.pause_s()})
        if good_at_s is not None:
            yield _gauge("last_round_timestamp_seconds", "End of the last good round", (), {(): good_at_s})
        yield CounterMetricFamily("cadenza_agent_reports", "Reports of agents", value=self._from.reports())
        refused = CounterMetricFamily("cadenza_agent_frames_refused", "Refused frames of agents", labels=["cause"])
        for cause, number in sorted(self._from.refused().items()):
            refused.add_metric([cause], number)
        yield refused

    def _store(self) -> Iterator[Metric]:
        size, oldest_s = 0, inf
        for suffix in ("", "-wal"):
            try:
                size += Path(f"{self._from.store}{suffix}").stat().st_size
            except OSError:
                continue
        try:
            with closing(open_readonly(self._from.store)) as link:
                row = link.execute("SELECT at_s FROM rounds ORDER BY number LIMIT 1").fetchone()
                oldest_s = row[0] if row else inf
        except (StoreError, sqlite3.Error, OSError):
            pass
        yield _gauge("store_bytes", "Size of the record", (), {(): size})
        if oldest_s < inf:
            yield _gauge("store_oldest_round_timestamp_seconds", "Oldest round on record", (), {(): oldest_s})


def cluster_metrics(report: RoundReport, memory: Memory, partitions: Collection[str]) -> Iterator[Metric]:
    """Yield the gauges of one round; ``partitions``: the managed ones."""
    snapshot = report.snapshot
    yield _gauge("jobs", "Jobs that Cadenza manages", ("partition", "state"), _jobs(report, memory))
    yield _gauge("left_alone_jobs", "Jobs that a fault keeps out of decisions", (), {(): len(report.left_alone)})
    yield _gauge("gpus", "GPUs by use", ("partition", "gpu_type", "state"), _gpus(snapshot, memory))
    yield _gauge("lanes", "Nodes of each lane", ("lane", "state"), Counter(map(_lane, snapshot.nodes)))
    lanes = {node.host for node in snapshot.nodes if node.lane} & our_hosts(snapshot, partitions)
    agents: Counter[tuple[str, ...]] = Counter()
    faults: Counter[tuple[str, ...]] = Counter({("lacks",): 0, ("taken",): 0, ("faults",): 0})
    for host in snapshot.hosts:
        known = "silent" if host.agent_version else "missing"
        state = "up" if host.agent_alive else "refused" if host.refused else known
        if state != "missing" or host.name in lanes:  # a host without further lanes needs no agent
            agents[(state,)] += 1
        for kind, texts in (("lacks", host.lacks), ("taken", host.taken), ("faults", host.faults)):
            faults[(kind,)] += len(texts)
    yield _gauge("agents", "Agents of hosts", ("state",), {(one,): agents[(one,)] for one in AGENT_STATES})
    yield _gauge("host_faults", "Faults of hosts that agents report", ("kind",), faults)


AGENT_STATES = ("up", "silent", "refused", "missing")


def _jobs(report: RoundReport, memory: Memory) -> Rows:
    moving = {move.job.id for move in memory.moves if not move.over}
    found: Counter[tuple[str, ...]] = Counter()
    for job in report.snapshot.jobs:
        if job.opted_in and (state := _job_state(job, job.key.id in moving)):
            # A job that waits may name several, in any order: each list would be a series of its own.
            partition = job.partition.partition(",")[0]
            found[partition, "left_alone" if job.key in report.left_alone else state] += 1
    return found


def _job_state(job: Job, moving: bool) -> str:  # noqa: FBT001
    """Return a job's state; "" once it is over. Slurm's own metrics have the states that Slurm knows."""
    if job.state == "OTHER":
        return ""
    if moving:
        return "moving"
    if job.state == "PENDING":
        return "held_back" if job.held else "queued"
    return "running" if job.lease is None or job.lease.state in HOLDING else "waiting_turn"


def _gpus(snapshot: ClusterSnapshot, memory: Memory) -> Rows:
    """Return the numbers of GPUs: busy, held_idle, free_awaited (free while a job waits that fits), free, closed."""
    hosts = free_gpus(snapshot)
    awaited = awaited_hosts(hosts, narrowest_waiting(snapshot, memory))
    idle_held: Counter[str] = Counter()
    for job in snapshot.jobs:
        lease = job.lease
        if lease is not None and lease.state in HOLDING and lease.use is not None:
            percent = lease.use.gpu_percent
            if percent is not None and percent < IDLE_PERCENT:
                idle_held.update(gpu.host for gpu in lease.gpus)
    nodes = {node.name: node for node in snapshot.nodes}
    found: Counter[tuple[str, ...]] = Counter()
    for at, host in enumerate(hosts):
        node, key = nodes[host.name], (",".join(sorted(host.partitions)), host.gpu_type)
        held = host.gpus - host.idle
        if not host.idle and not node.takes_jobs:
            held = min(node.gpus_used, held)
            found[(*key, "closed")] += host.gpus - held
        idle = min(idle_held[node.host], held)
        found[(*key, "held_idle")] += idle
        found[(*key, "busy")] += held - idle
        found[(*key, "free_awaited" if at in awaited else "free")] += host.idle
        for state in ("free_awaited", "free", "closed"):
            found[(*key, state)] += 0
    return found


def _lane(node: Node) -> tuple[str, ...]:
    return str(node.lane), "down" if not node.up else "drained" if node.drained else "open"


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = GaugeMetricFamily(f"cadenza_{name}", text, labels=labels)
    for values, number in sorted(rows.items()):
        family.add_metric(values, number)
    return family
