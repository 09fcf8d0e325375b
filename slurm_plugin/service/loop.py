"""The service's loop: rounds at their time, early ones for the agents' news; an error ends one round only."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias

from cadenza.policies.core.decision import Memory
from cadenza.policies.registry import warm
from cadenza.policies.round import RoundReport, run_round
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.config import ConfigError
from cadenza.slurm_plugin.gateway.slurm_gateway import SlurmGateway
from cadenza.slurm_plugin.service import move_requests
from cadenza.slurm_plugin.service.agents.hub import FactSheet, Hub
from cadenza.slurm_plugin.service.errors import HubError
from cadenza.slurm_plugin.service.failover.release_round import adopted, release_round, settled
from cadenza.slurm_plugin.service.live_policy import allocates, policy, profiled
from cadenza.slurm_plugin.service.log import action_line, action_lines
from cadenza.slurm_plugin.service.observe.cluster_gateway import ClusterGateway, facts_of, suspended_after
from cadenza.slurm_plugin.service.observe.enrichment import EnrichedGateway
from cadenza.slurm_plugin.service.profiles.library import Shelf
from cadenza.slurm_plugin.service.profiles.refiner import Refiner
from cadenza.slurm_plugin.service.schedule import early_s, pause_s
from cadenza.slurm_plugin.service.settings import Settings, gpu_memory, guard_settings, hub_settings, to_record
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.service.systemd import notify
from cadenza.slurm_plugin.service.transit import LOOK_S, awaited, changed, hurried

log = logging.getLogger(__name__)

Reload: TypeAlias = Callable[[], Settings]

NAP_S = 0.5
"""How long a signal waits at most: a handler may only raise a flag."""
SETTLE_HEARTBEATS = 3
FORGET_EVERY_S, DAY_S = 3600.0, 86400.0
FIXED = ("bind", "store", "keys", "gateway", "heartbeat")
"""Keys of [service] that are read at the start only."""
STOP_REASON = "cadenzad stops; your job goes on without it"


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works on; whoever built these closes them."""

    slurm: SlurmGateway
    hub: Hub
    store: SqliteStore


class Loop:
    """One running service over its parts; ``stop`` and ``reload`` may be set by a signal handler."""

    def __init__(self, settings: Settings, parts: Parts, clock: SystemClock, rng: Random) -> None:
        self.stop = False
        self.reload = False
        self.failures = 0
        """Rounds in a row that failed."""
        self.last: RoundReport | None = None
        self._hub = parts.hub
        self._slurm = parts.slurm
        self._store = parts.store
        self._clock = clock
        self._rng = rng
        self._cluster = ClusterGateway(parts.slurm, parts.hub, clock)
        self._gateway = EnrichedGateway(self._cluster, parts.hub.agents, Shelf(None), parts.store.last_snapshot())
        self._good_s = float("-inf")
        self._forget_s = clock.monotonic()
        move_requests.open_folder(parts.store.path)
        self._use(settings)

    @property
    def trusted(self) -> bool:
        """Whether the last good round is recent enough for others to rely on the service."""
        return self._clock.monotonic() - self._good_s <= self.settings.trust_s

    @property
    def may_hold(self) -> bool:
        """Whether job_submit.lua may hold jobs for us: we act, we are well, and nobody set the kill switch."""
        return self.settings.held_admission and self.trusted and not guard_settings(self.settings).killed

    # --- life ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give the agents time to connect, so that the first round does not take them for dead."""
        known = self._known_hosts()
        until_s = self._clock.monotonic() + SETTLE_HEARTBEATS * self.settings.agent.heartbeat_s
        while not self.stop and (left_s := until_s - self._clock.monotonic()) > 0:
            alive = {host for host, agent in self._hub.agents().items() if agent.alive}
            if known and known <= alive:
                return
            self._hub.wait(min(left_s, NAP_S))

    def run(self, reload: Reload, each_nap: Callable[[], object]) -> None:
        """Run rounds until ``stop``; ``each_nap`` is called at least every second between them."""
        while not self.stop:
            if self.reload:
                self.reload = False
                self._reload(reload)
            began_s = self._clock.monotonic()
            self.round()
            self._wait(began_s, each_nap)

    def round(self) -> bool:
        """Run one round; return whether it succeeded. What goes wrong is logged in one line and counted."""
        try:
            self._record()
            self._recover()
            self._store.adopt(move_requests.take(self._store.path, self._store.memory(), self._clock.now()))
            before, rules = self._store.memory(), guard_settings(self.settings)
            report = run_round(self._gateway, self._clock, self._store, self._decide, rules)
            self._settle_memory(report, before)
            self._after(report)
            self._learn()
            if rules.enforce and not rules.killed:
                self._cluster.complete_gangs()
        except Exception as error:
            self.failures += 1
            log.error("round failed (%d in a row): %s: %s", self.failures, type(error).__name__, error)  # noqa: TRY400
            log.debug("the traceback", exc_info=True)
            return False
        self.failures = 0
        return True

    def let_go(self) -> None:
        """Undo our holds and suspends at an orderly end; leases stay as they are, agents take turns alone."""
        self._record()
        report = release_round(self._cluster, self._clock, self._store, STOP_REASON)
        for line in action_lines(report):
            log.info("%s", line)

    # --- inside ----------------------------------------------------------------------------------------

    def _use(self, settings: Settings) -> None:
        self.settings = settings
        self._decide = policy(settings)
        if allocates(settings):
            warm(settings.policy.allocate)
        folder = settings.profiles.directory
        self._gateway.shelf = Shelf(Path(folder) if folder else None)
        self._gateway.gpu_memory_gb = gpu_memory(settings)
        if not settings.profiles.refine:
            self._gateway.refiner = None
        elif self._gateway.refiner is None:
            self._gateway.refiner = Refiner(self._store.learned())
        if self._gateway.refiner is not None:
            self._gateway.refiner.learns = profiled(settings)
        self._store.use_settings(to_record(settings))

    def _known_hosts(self) -> frozenset[str]:
        last = self._store.last_snapshot()
        return frozenset(host.name for host in last.hosts if host.agent_alive) if last else frozenset()

    def _recover(self) -> None:
        if self._store.fresh:
            self._store.adopt(adopted(self._cluster.read()))

    def _learn(self) -> None:
        news = self._gateway.refiner.changed() if self._gateway.refiner is not None else {}
        if news:
            self._store.learn(news)

    def _settle_memory(self, report: RoundReport, before: Memory) -> None:
        memory = self._store.memory()
        known = settled(memory, before, report.outcomes)
        if known != memory:
            self._store.amend(report.number, known)

    def _after(self, report: RoundReport) -> None:
        self.last = report
        self._good_s = self._clock.monotonic()
        packs = self._store.memory().sharing.packs
        facts = facts_of(report.snapshot, self.settings, suspended_after(report), packs)
        self._hub.tell(FactSheet(facts, report.snapshot.time_s, self.settings.trust_s))
        for action, outcome in report.outcomes:
            log.log(logging.INFO if outcome.ok else logging.WARNING, "%s", action_line(action, outcome))

    def _wait(self, began_s: float, each_nap: Callable[[], object]) -> None:
        load_s = self._cluster.load_s
        due_s = began_s + pause_s(self.settings.service.poll_s, load_s, self.failures, self._rng)
        on_their_way = self._store.memory().moves
        spacing_s = self.settings.service.min_round_spacing_s
        early = began_s + early_s(spacing_s, load_s, self.failures, moving=hurried(on_their_way))
        leaving = awaited(on_their_way, self._clock.now())
        nap_s = LOOK_S if leaving else NAP_S
        while not (self.stop or self.reload) and (left_s := due_s - self._clock.monotonic()) > 0:
            each_nap()
            if self._hub.wait(min(left_s, nap_s)) or (leaving and self._left(leaving)):
                due_s = min(due_s, max(early, self._clock.monotonic()))
            self._record()

    def _left(self, jobs: Collection[int]) -> bool:
        """Whether Slurm is further with jobs on their way than the last round saw."""
        return self.last is not None and changed(self._slurm, jobs, self.last.snapshot)

    def _record(self) -> None:
        messages, now_s = self._hub.drain(), self._clock.monotonic()
        try:
            if messages:
                self._store.record(messages)
            if now_s >= self._forget_s:
                self._forget_s = now_s + FORGET_EVERY_S
                self._forget()
        except sqlite3.Error as error:
            # Telemetry may be lost; a round that cannot be written down will say so itself and not act.
            log.warning("%s: %d reports lost: %s", self._store.path, len(messages), error)

    def _forget(self) -> None:
        now_s, service = self._clock.now(), self.settings.service
        days = max(service.report_days, service.retention_days)
        self._store.forget(now_s - DAY_S * service.retention_days, now_s - DAY_S * days)

    def _reload(self, reload: Reload) -> None:
        notify(f"RELOADING=1\nMONOTONIC_USEC={int(self._clock.monotonic() * 1e6)}")
        try:
            self._hub.reload_keys()
            new = reload()
            fixed = [name for name in FIXED if _differs(self.settings, new, name)]
            if fixed:
                log.warning("[service] %s changed: takes effect at the next start", ", ".join(fixed))
            self._use(new)
            self._hub.settings = hub_settings(new)
            log.info("settings reloaded")
        except (ConfigError, HubError, sqlite3.Error) as error:
            log.error("reload refused, the old settings stay in force: %s", error)  # noqa: TRY400
        notify("READY=1")


def _differs(old: Settings, new: Settings, name: str) -> bool:
    return bool(getattr(old.service, name) != getattr(new.service, name))
