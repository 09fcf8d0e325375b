"""The service's loop: regular rounds, and early ones after news from agents; an error ends one round only."""

from __future__ import annotations

import gc
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import inf
from pathlib import Path
from random import Random
from typing import TypeAlias

from cadenza.policies.core.actions import Yield
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.policies.core.move import Move, Ordered, Prefetching, Requeued
from cadenza.policies.core.text import printable
from cadenza.policies.gc_pause import uncollected
from cadenza.policies.guard import GuardSettings
from cadenza.policies.registry import warm
from cadenza.policies.round import Live, RoundReport, run_round
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.config import ConfigError
from cadenza.sidecar.sd_notify import notify
from cadenza.slurm_plugin.errors import HubError, StoreError
from cadenza.slurm_plugin.gateway.slurm_gateway import SlurmGateway
from cadenza.slurm_plugin.service import move_requests
from cadenza.slurm_plugin.service.action_log import log_action
from cadenza.slurm_plugin.service.agent_facts import facts_of, suspended_after
from cadenza.slurm_plugin.service.agents.hub import FactSheet, Hub
from cadenza.slurm_plugin.service.failover.release_round import (
    adopted,
    release_round,
    release_unrecorded,
    settled,
    taken_over,
)
from cadenza.slurm_plugin.service.metrics.step_times import StepTimes
from cadenza.slurm_plugin.service.observe.cluster_gateway import ClusterGateway
from cadenza.slurm_plugin.service.observe.slurm_requeues import SlurmRequeues
from cadenza.slurm_plugin.service.profiles.library import ProfileDirectory
from cadenza.slurm_plugin.service.profiles.refiner import Refiner
from cadenza.slurm_plugin.service.settings import (
    MISSED_ROUNDS,
    Settings,
    gpu_memory,
    guard_settings,
    hub_settings,
    policy,
    to_record,
)
from cadenza.slurm_plugin.service.store.job_accounting import News
from cadenza.slurm_plugin.service.store.writer import SqliteStore

log = logging.getLogger(__name__)

Reload: TypeAlias = Callable[[], Settings]

NAP_S = 0.5
"""Longest time until a signal is noticed: its handler may only raise a flag."""
SETTLE_HEARTBEATS = 3
MAX_SPACING_S = 2.0
"""Least time between rounds that news starts early, or half of ``poll_s``: a round's calls take slurmctld's time."""
REPORT_DAYS = 90.0
"""Time for which ``cadenza report --since`` keeps its sums, which are small: a quarter of a year."""
RETRY_LEFT_ALONE_S = 600.0
"""Time after which jobs whose data made a decision fail are tried again."""
TIDY_PERIOD_S, COLLECT_PERIOD_S, DAY_S = 60.0, 600.0, 86400.0
FIXED_KEYS = (
    *(("service", key) for key in ("bind", "store", "keys", "gateway", "metrics")),
    *(("expert", key) for key in ("jobs_socket", "question_port", "watchdog_grace_s")),
)
"""Keys that are read at the start only."""
UNDONE_REASON = "cadenzad cannot do its work; your job goes on without it"
STOP_REASON = "cadenzad stops; your job goes on without it"

LOAD_FACTOR = 20.0
"""Rounds are at least this many times as long apart as Slurm takes for one answer."""
TRANSIT_LOAD_FACTOR = 2.0
"""The same for a round that a job in transit waits for."""
JITTER = 0.1
MAX_BACK_OFF_S = 30.0

TRANSIT_POLL_S = 0.05
"""Least time between two looks at jobs in transit; each look is at one of them."""
TRANSIT_PART = 0.2
"""The same as a part of the time for which the latest has been in transit: a site's jobs may have KillWait to stop."""
MAX_TRANSIT_POLL_S = 60.0
"""Jobs that take longer than this are not worth the RPCs; they wait for the next regular round."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The loop's connections to Slurm, the agents and the store; their builder closes them."""

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
        self._killed = False
        """True if the kill switch was set at the last look."""
        self.last: RoundReport | None = None
        self.good_at_s: float | None = None
        """When that was, seconds since the epoch."""
        self.pause_s = 0.0
        """Time between regular rounds at present, seconds."""
        self._round_s = 0.0
        """Time that the last round took, seconds."""
        self._collect_s = clock.monotonic()
        self.on_round: Callable[[RoundReport, Mapping[str, float], Memory, News], object] = lambda *_: None
        """Called after each good round with the seconds of its steps, the memory after it, and the store's findings."""
        self.on_failure: Callable[[], object] = lambda: None
        self.on_messages: Callable[[Sequence[object]], object] = lambda _: None
        self._error = ""
        """The error that ended the last round, "" for none."""
        self.standby_reason: Callable[[], str] = lambda: ""
        """Returns why the service of another host acts in place of this one, "" if it does not."""
        self.acting = True
        self._takes_over = self._stale = False
        """*takes over*: until its first good round: another service may have acted since its last one, as that of the
        other controller, or of the machine that its store was restored from; *stale*: and changed SiteFactors."""
        self.beat: Callable[[], object] = lambda: None
        """Called whenever the loop gets on: between rounds, before each decision and before each action."""
        self._left_alone: Mapping[JobKey, str] = {}
        self._left_alone_s = clock.monotonic()
        self._hub = parts.hub
        self._slurm = parts.slurm
        self._store = parts.store
        self._clock = clock
        self._rng = rng
        last = parts.store.last_snapshot()
        if last is not None:
            parts.hub.recall(last)
        self._gateway = ClusterGateway(parts.slurm, parts.hub, clock, last)
        self._requeues = SlurmRequeues(last)
        self._good_s = clock.monotonic()
        """When the last good round was, or the service started."""
        self._tidy_s = clock.monotonic()
        move_requests.folder(parts.store.path).mkdir(mode=0o700, exist_ok=True)  # only we and root may write there
        self._use(settings)
        self._takes_over = last is not None and clock.now() - last.time_s > settings.trust_s

    @property
    def trust_s(self) -> float:
        """Time after a good round for which it counts, seconds: several rounds, which a large site has less often."""
        return max(self.settings.trust_s, MISSED_ROUNDS * max(self.pause_s, self._round_s))

    # --- life ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give the agents time to connect, so that the first round does not take them for dead.

        It lasts until all are there that the last round knew, or no further one has come for some heartbeats.
        """
        last = self._store.last_snapshot()
        expected = frozenset(host.name for host in last.hosts if host.agent_alive) if last else frozenset()
        began_s = now_s = self._clock.monotonic()
        came, until_s = 0, now_s
        while not self.stop:
            alive = {host for host, agent in self._hub.agents().items() if agent.alive}
            if expected and expected <= alive:
                return
            if len(alive) > came or now_s == began_s:
                came = len(alive)
                patience_s = SETTLE_HEARTBEATS * self.settings.expert.heartbeat_s
                until_s = min(now_s + patience_s, began_s + max(patience_s, self.settings.trust_s))
            if (left_s := until_s - now_s) <= 0:
                return
            self.beat()
            self._hub.wait(min(left_s, NAP_S))
            now_s = self._clock.monotonic()

    def run(self, reload: Reload, each_nap: Callable[[], object]) -> None:
        """Run rounds until ``stop``; ``each_nap`` is called at least every second between them."""
        self.beat = self._gateway.beat = each_nap
        while not self.stop:
            if self.reload:
                self.reload = False
                self._reload(reload)
            began_s = self._clock.monotonic()
            self.follow_slurmctld()
            if self.acting:
                with uncollected():
                    self.round()
                self._collect()
            elif self._clock.monotonic() - self._good_s > self.settings.trust_s:
                self._good_s = self._clock.monotonic()
                if any(agent.alive and agent.report.rotating for agent in self._hub.agents().values()):
                    self._undo()  # agents hear no service: where slurmctld is in control there is none
            self._round_s = self._clock.monotonic() - began_s
            self._wait(began_s, each_nap)

    def _collect(self) -> None:
        """Collect cycles now and then: what a round makes is in none, and looking for some took a third of its time."""
        now_s = self._clock.monotonic()
        if now_s >= self._collect_s:
            self._collect_s = now_s + COLLECT_PERIOD_S
            gc.unfreeze()
            gc.collect()
        gc.freeze()  # collections leave out what is there now

    def follow_slurmctld(self) -> None:
        """Act only where slurmctld is in control: stand by without a word to the agents, or take over."""
        reason = self.standby_reason()
        if not reason and not self.acting:
            log.warning("slurmctld is in control here: this service takes over")
            self.acting = self._takes_over = True
            self._stale = self.good_at_s is None or self._clock.now() - self.good_at_s > self.trust_s
            self._good_s = self._clock.monotonic()
            self.settle()
        elif reason and self.acting:
            log.warning("this service %s", reason)
            self.acting, self.failures, self._good_s = False, 0, self._clock.monotonic()
            # The hub repeats the last facts at each heartbeat as long as they are good; these are good for no time.
            self._hub.send_facts(FactSheet({}, self._clock.now(), 0.0))
        if reason:
            self._error = reason

    def round(self) -> bool:
        """Run one round; return whether it succeeded. An error is logged in one line and counted.

        Whatever the errors are, once none has succeeded for as long as the service is trusted, our suspends and holds
        are undone: a job must not wait for a service that cannot get on.
        """
        try:
            self._round()
        except Exception as error:
            self.failures += 1
            self._error = printable(f"{type(error).__name__}: {error}")
            self.on_failure()
            log.error("round failed (%d in a row): %s: %s", self.failures, type(error).__name__, error)  # noqa: TRY400
            log.debug("the traceback", exc_info=True)
            if self._clock.monotonic() - self._good_s > self.trust_s:
                self._undo()
            return False
        self.failures, self._error = 0, ""
        return True

    def illness(self) -> str:
        """Return why agents and jobs cannot rely on the service, in one line; "" if they can. For any thread."""
        if self.last is None:
            return self._error or "no round has ended yet"
        age_s = self._clock.monotonic() - self._good_s
        late = age_s > self.trust_s
        return f"no good round for {age_s:.0f} s: {self._error or 'it takes long'}" if late else ""

    def _round(self) -> None:
        began_s, times = self._clock.monotonic(), StepTimes(self._clock)
        # 1. Put the agents' reports since the last round on record.
        self._record()
        # 2. Complete the memory: our holds and suspends if the store is new, and moves that were requested by hand.
        managed = self.settings.guard.partitions
        if self._store.fresh:
            self._store.adopt(adopted(self._gateway.read(), managed))
        elif self._takes_over:
            self._store.adopt(taken_over(self._store.memory(), self._gateway.read(), managed, stale=self._stale))
        before = move_requests.take(self._store.path, self._store.memory(), self._clock.now())
        self._store.adopt(before)
        # 3. Observe, decide, guard, write down, apply.
        rules = self._rules()
        live = Live(self._rules, self.trust_s, self._still_left_alone())
        report = run_round(
            times.timed(self._gateway, {"read": "read", "apply": "apply"}),
            self._clock,
            times.timed(self._store, {"check": "record", "begin": "record", "finish": "record"}),
            times.step("decide")(self._decided),
            rules,
            live,
        )
        for key in report.left_alone.keys() - self._left_alone.keys():
            log.warning("JOBID=%s left alone: %s (%d in all)", key, report.left_alone[key], len(report.left_alone))
        self._left_alone = report.left_alone
        # 4. Correct the memory by the outcomes.
        memory = settled(self._store.memory(), before, report.outcomes)
        if memory != self._store.memory():
            self._store.amend(report.number, memory)
        # 5. Put the requeues on record that were not ours.
        self._store.record(self._requeues.observe(report.snapshot, before))
        # 6. Send the agents the facts that they need to take turns by themselves.
        self.last, self._good_s, self.good_at_s = report, self._clock.monotonic(), self._clock.now()
        self._takes_over = self._stale = False
        with times.step("facts"):
            facts = facts_of(report.snapshot, self.settings, suspended_after(report), memory)
            self._hub.send_facts(FactSheet(facts, report.snapshot.time_s, self.trust_s))
        for action, outcome in report.outcomes:
            log_action(action, outcome)
        # 7. Store the beliefs about profiles that this round changed.
        if self._gateway.refiner is not None and (beliefs := self._gateway.refiner.changed()):
            self._store.learn(beliefs)
        # 8. Complete multi-node jobs that hold their GPUs on some hosts only.
        rules = self._rules()
        if rules.enforce and not rules.killed:
            self._gateway.complete_gangs()
        # 9. Count it.
        read_s, answer_s = times.seconds["read"], min(self._gateway.read_s, times.seconds["read"])
        took_s = {**times.seconds, "read": answer_s, "merge": read_s - answer_s}
        self.on_round(report, {**took_s, "whole": self._clock.monotonic() - began_s}, memory, self._store.news)

    def _undo(self) -> None:
        """Undo our holds and suspends when rounds fail: nothing else is done until they succeed.

        Only Slurm is asked; without an answer the last good round tells the jobs, and Slurm refuses what has changed.
        """
        if self._rules().killed:
            return
        try:
            outcomes = release_unrecorded(self._gateway, self._store.memory(), UNDONE_REASON, self._seen())
        except Exception as error:  # noqa: BLE001 - as in a round: the next one tries again
            log.warning("our jobs could not be released: %s", error)
            return
        for action, outcome in outcomes:
            log_action(action, outcome)

    def _seen(self) -> ClusterSnapshot | None:
        """Return Slurm's jobs now, else as the last round had them."""
        try:
            return self._slurm.read()
        except Exception as error:  # noqa: BLE001 - as in a round
            log.warning("the last round on record tells which jobs are ours: %s", error)
            return self._store.last_snapshot()

    def let_go(self) -> None:
        """Undo our holds and suspends at an orderly end; leases stay as they are, and agents take turns alone.

        SiteFactors stay: they only order Slurm's queue, and the next service knows them.
        """
        self._record()
        try:
            outcomes = release_round(self._gateway, self._clock, self._store, STOP_REASON).outcomes
        except (StoreError, sqlite3.Error) as error:
            log.warning("no round can be written down (%s), the jobs are released all the same", error)
            outcomes = release_unrecorded(self._gateway, self._store.memory(), STOP_REASON)
        for action, outcome in outcomes:
            log_action(action, outcome)

    # --- inside ----------------------------------------------------------------------------------------

    def _rules(self) -> GuardSettings:
        """Return the guard's settings as they are now; asked before each action leaves, so the loop gets on."""
        self.beat()
        rules = guard_settings(self.settings)
        if rules.killed != self._killed:
            self._killed = rules.killed
            text = "is set: no action leaves" if rules.killed else "is gone: actions leave again"
            log.warning("the kill switch %s %s", self.settings.expert.kill_switch, text)
        return rules

    def _decided(self, snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        self.beat()
        return self._decide(snapshot, memory)

    def _still_left_alone(self) -> Mapping[JobKey, str]:
        """Return the jobs that earlier rounds left alone; now and then they get another try."""
        now_s = self._clock.monotonic()
        if now_s - self._left_alone_s < RETRY_LEFT_ALONE_S:
            return self._left_alone
        self._left_alone_s = now_s
        return {}

    def _use(self, settings: Settings) -> None:
        self.settings = settings
        self._decide = policy(settings)
        if settings.allocates:
            warm(settings.policy.allocate)
        folder = settings.profiles.directory
        self._gateway.profiles = ProfileDirectory(Path(folder) if folder else None)
        self._gateway.gpu_memory_gb = gpu_memory(settings)
        if not settings.profiles.refine:
            self._gateway.refiner = None
        elif self._gateway.refiner is None:
            self._gateway.refiner = Refiner(self._store.learned())
        if self._gateway.refiner is not None:
            self._gateway.refiner.learns = settings.profiled
        self._store.use_settings(to_record(settings))
        self._store.max_bytes = settings.service.retention_gb * 1e9

    def _wait(self, began_s: float, each_nap: Callable[[], object]) -> None:
        """Wait until the next round is due: at its regular time, or early after news or a step of a job in transit."""
        load_s, moves = self._gateway.load_s, self._store.memory().moves
        failures = 0 if self._takes_over else self.failures  # until Slurm's own takeover is over, all of them fail
        self.pause_s = pause_s(self.settings.service.poll_s, load_s, failures, self._rng)
        due_s = began_s + self.pause_s
        spacing_s = min(MAX_SPACING_S, self.settings.service.poll_s / 2)
        prompt = needs_prompt_round(moves) or (self.last is not None and waits_for_suspend(self.last))
        earliest_s = began_s + max(early_s(spacing_s, load_s, self.failures, prompt=prompt), 2 * self._round_s)
        leaving = jobs_in_transit(moves, self._clock.now())
        turns = cycle(leaving)
        while not (self.stop or self.reload) and (left_s := due_s - self._clock.monotonic()) > 0:
            each_nap()
            news = self._hub.wait(min(left_s, transit_nap_s(leaving.values(), self._clock.now())))
            # One job is a small request, the list of all jobs a large one.
            if not news and leaving and self.last is not None:
                news = has_moved_on(self._slurm, next(turns), self.last.snapshot)
            if news:
                due_s = min(due_s, max(earliest_s, self._clock.monotonic()))
            self._record()
            self._tidy()

    def _tidy(self) -> None:
        """Do a step of the store's upkeep, between rounds; when there is nothing more to do, again after a minute."""
        now_s = self._clock.monotonic()
        if now_s < self._tidy_s:
            return
        epoch_s, service = self._clock.now(), self.settings.service
        report_days = max(REPORT_DAYS, service.retention_days)
        try:
            more = self._store.tidy(epoch_s - DAY_S * service.retention_days, epoch_s - DAY_S * report_days)
        except sqlite3.Error as error:
            log.warning("%s: old rounds could not be deleted: %s", self._store.path, error)
            more = False
        self._tidy_s = now_s + (0.0 if more else TIDY_PERIOD_S)

    def _record(self) -> None:
        """Write down the agents' messages."""
        messages = self._hub.drain()
        self.on_messages(messages)
        try:
            if refused := self._store.record(messages):
                log.warning(
                    "%s: %d of %d reports not written, because of what they say",
                    self._store.path,
                    refused,
                    len(messages),
                )
        except sqlite3.Error as error:
            # Telemetry may be lost; a round that cannot be written down fails by itself and does not act.
            log.warning("%s: %d reports lost: %s", self._store.path, len(messages), error)

    def _reload(self, reload: Reload) -> None:
        notify(f"RELOADING=1\nMONOTONIC_USEC={int(self._clock.monotonic() * 1e6)}")
        try:
            self._hub.reload_keys()
            new = reload()
            both = [(getattr(self.settings, table), getattr(new, table), table, key) for table, key in FIXED_KEYS]
            changed = [f"[{table}] {key}" for old, its, table, key in both if getattr(old, key) != getattr(its, key)]
            if changed:
                log.warning("%s changed: takes effect at the next start", ", ".join(changed))
            self._use(new)
            self._hub.settings = hub_settings(new)
            log.info("settings reloaded")
        except (ConfigError, HubError, sqlite3.Error) as error:
            log.error("reload refused, the old settings stay in force: %s", error)  # noqa: TRY400
        notify("READY=1")


# --- timing -----------------------------------------------------------------------------------------


def pause_s(poll_s: float, load_s: float, failures: int, rng: Random) -> float:
    """Return the time between the starts of two rounds, seconds.

    ``load_s`` is the time that Slurm takes for an answer. Each failure in a row doubles the pause, up to
    ``MAX_BACK_OFF_S`` or the regular pause if that is longer.
    """
    # slurmctld packs the list of jobs under its lock on them: while it does, it neither takes nor starts one.
    base = max(poll_s, LOAD_FACTOR * load_s)
    backed_off = min(base * float(2 ** min(failures, 16)), max(base, MAX_BACK_OFF_S))
    return backed_off * (1 + rng.uniform(-JITTER, JITTER))


def early_s(spacing_s: float, load_s: float, failures: int, *, prompt: bool = False) -> float:
    """Return the time after a round's start from which news may start the next one, seconds.

    ``prompt``: a job stands still until the next round. Such rounds are few, so they may be closer together.
    """
    if failures:
        return float("inf")
    return TRANSIT_LOAD_FACTOR * load_s if prompt else max(spacing_s, LOAD_FACTOR * load_s)


def needs_prompt_round(moves: Iterable[Move]) -> bool:
    """Return whether a job stands still, or soon will, until the next round (pure)."""
    return any(isinstance(move.phase, Prefetching | Ordered | Requeued) for move in moves)


def waits_for_suspend(report: RoundReport) -> bool:
    """Return whether GPUs stand idle between a yield that was ordered and the suspend of the next round (pure)."""
    return any(isinstance(action, Yield) and outcome.ok for action, outcome in report.outcomes)


def jobs_in_transit(moves: Iterable[Move], now_s: float) -> Mapping[int, float]:
    """Return the jobs that are leaving their nodes, whose next step only Slurm can tell, with since when (pure)."""
    return {
        move.job.id: move.phase.since_s
        for move in moves
        if isinstance(move.phase, Requeued) and now_s - move.phase.since_s < MAX_TRANSIT_POLL_S
    }


def transit_nap_s(since_s: Iterable[float], now_s: float) -> float:
    """Return the time until the next look at jobs that are in transit since these times (pure)."""
    return min(NAP_S, max(TRANSIT_POLL_S, TRANSIT_PART * (now_s - max(since_s, default=-inf))))


def has_moved_on(slurm: SlurmGateway, job: int, snapshot: ClusterSnapshot) -> bool:
    """Return whether Slurm shows a job in another state than the snapshot; False without an answer."""
    try:
        now = slurm.look([job])
    except Exception as error:  # noqa: BLE001 - as in a round: the next one will report the same error
        log.debug("job %d in transit could not be polled: %s", job, error)
        return False
    return now != {one.key: one.slurm_state(snapshot.time_s) for one in snapshot.jobs if one.key.id == job}
