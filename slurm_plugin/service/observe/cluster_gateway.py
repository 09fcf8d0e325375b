"""The cluster as one gateway: a snapshot observed in five steps, and each action sent to Slurm or to the agents."""

from __future__ import annotations

import logging
import pwd
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Event
from typing import NamedTuple

from cadenza.policies.core.actions import (
    Action,
    Migrate,
    Outcome,
    Pack,
    Resize,
    Resume,
    Save,
    Suspend,
    Tune,
    Unpack,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.core.text import printable
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.errors import HubError
from cadenza.slurm_plugin.gateway.slurm_gateway import SlurmGateway
from cadenza.slurm_plugin.service.agents.hub import Hub
from cadenza.slurm_plugin.service.observe.enrichment import tunes_in_force, with_profiles, with_progress
from cadenza.slurm_plugin.service.observe.lease_merge import Parts, half_given, merge, parts_by_job, with_leases
from cadenza.slurm_plugin.service.profiles.library import Library, ProfileDirectory
from cadenza.slurm_plugin.service.profiles.refiner import Refiner

log = logging.getLogger(__name__)

STALL_ANSWERS = 2
"""Slow answers in a row that are no load: slurmctld stands still for seconds when it cannot resolve a lost host."""
ARRIVES_S = 0.5
"""Least time from a suspend of a job to its resume."""


class Waiting(NamedTuple):
    """The jobs of a round as Slurm had them and as they were completed, to tell the waiting ones that stay the same."""

    slurms: Sequence[Job]
    completed: Sequence[Job]
    library: Library

    def kept(self, jobs: Sequence[Job], library: Library) -> Mapping[JobKey, Job]:
        """Return those of the next round's jobs that nothing is to be added to but the time.

        They wait as before, so no agent knows them, and no profile is for them. Most jobs of a large site are such.
        """
        if library is not self.library:
            return {}
        before = {
            one.key: (one, completed)
            for one, completed in zip(self.slurms, self.completed, strict=True)
            if one.state == "PENDING" and completed.profile is None and not completed.profile_note
        }
        found = ((job, before.get(job.key)) for job in jobs)
        return {job.key: pair[1] for job, pair in found if pair is not None and pair[0] is job}


class ClusterGateway:
    """``policies.round.Gateway`` over Slurm and the agents; one thread at a time."""

    def __init__(self, slurm: SlurmGateway, hub: Hub, clock: SystemClock, before: ClusterSnapshot | None) -> None:
        """``before``: the snapshot of the last round on record."""
        self.read_s = 0.0
        """Time until Slurm's last answer was there and translated, seconds."""
        self._answers_s: deque[float] = deque(maxlen=STALL_ANSWERS + 1)
        """Times that Slurm took for its last answers, seconds."""
        self.profiles = ProfileDirectory(None)
        self.beat: Callable[[], object] = lambda: None
        """Called between the steps of a reading, which takes long on a large site."""
        self.gpu_memory_gb: Mapping[str, float] = {}
        """By GPU type, "" for the types that are not named."""
        self.refiner: Refiner | None = None
        """None: profiles stay as the files say."""
        self._slurm = slurm
        self._hub = hub
        self._clock = clock
        self._parts: Mapping[JobKey, Parts] = {}
        self._waiting = Waiting((), (), self.profiles.library)
        self._before = before
        self._tunes = {job.key: job.placement for job in before.jobs} if before is not None else {}
        self._suspended_s: dict[JobKey, float] = {}
        """When the jobs of a moment ago were suspended, on the monotonic clock."""

    @property
    def load_s(self) -> float:
        """Time that Slurm takes for an answer at present, seconds; an answer or two that it stalled on do not count.

        0 until there are more: the first answer may be one that a slurmctld which has just started gave late.
        """
        return min(self._answers_s) if len(self._answers_s) > STALL_ANSWERS else 0.0

    def read(self) -> ClusterSnapshot:
        """Observe the cluster in five steps; errors of the Slurm gateway pass through."""
        # 1. Jobs and nodes as Slurm has them.
        began_s = self._clock.monotonic()
        slurms = self._slurm.read()
        self.read_s = self._clock.monotonic() - began_s
        answer_s = getattr(self._slurm, "answer_s", None)
        self._answers_s.append(self.read_s if answer_s is None else answer_s)
        # 2. The profiles, and the jobs that wait as they did: nothing is to be added to them.
        if self.profiles.refresh():
            for problem in self.profiles.library.problems:
                log.warning("profile not used: %s", problem)
        kept = self._waiting.kept(slurms.jobs, self.profiles.library)
        snapshot = replace(slurms, jobs=tuple([job for job in slurms.jobs if job.key not in kept])) if kept else slurms
        # 3. One lease for each job out of the reports of its hosts' agents, and the lanes that are wanted.
        self.beat()
        agents = self._hub.agents()
        self._parts = parts_by_job(snapshot, agents)
        snapshot = with_leases(snapshot, agents, self._parts)
        self.beat()
        # 4. Each job's resources, as tuned, and its profile, corrected by observations of running jobs.
        self._tunes = tunes_in_force(self._tunes, self._parts)
        snapshot = with_profiles(snapshot, self.profiles.library, self._tunes, self.gpu_memory_gb, self.refiner)
        # 5. Each job's progress; its iteration times add to the beliefs about profiles.
        snapshot = with_progress(snapshot, self._before)
        if kept:
            others = iter(snapshot.jobs)
            snapshot = replace(snapshot, jobs=tuple([kept.get(job.key) or next(others) for job in slurms.jobs]))
        self._waiting = Waiting(slurms.jobs, snapshot.jobs, self.profiles.library)
        if self.refiner is not None:
            self.refiner.watch(snapshot)
        self._before = snapshot
        return snapshot

    def apply(self, action: Action) -> Outcome:
        """Send an action to the job's agents if they carry it out, else to Slurm; whatever fails is an Outcome."""
        try:
            return self._applied(action)
        except HubError as error:
            return Outcome(ok=False, error=str(error))
        except Exception as error:
            log.exception("%s failed", type(action).__name__)
            return Outcome(ok=False, error=printable(f"{type(error).__name__}: {error}"))

    def _applied(self, action: Action) -> Outcome:
        match action:
            case Yield() | Resume() | Migrate() | Resize() | Save():
                return self._order(action)
            case Tune():
                return self._tune(action)
            case Suspend():
                return self._suspend(action)
            case Pack() | Unpack():
                return Outcome(ok=True)  # the facts that follow the round carry the packs
            case Unsuspend():
                return self._unsuspend(action)
        return self._slurm.apply(action)

    def _order(self, action: Yield | Resume | Migrate | Resize | Save) -> Outcome:
        """Send an order to a job's agents; for a move this is its first step, and later rounds take the others."""
        hosts = tuple(sorted(self._parts.get(action.job, {})))
        if not hosts:
            return Outcome(ok=False, error=f"job {action.job}: no agent has reported it")
        match action:
            case Yield():
                outcome = self._hub.yield_job(action.job, hosts)
            case Resume():
                outcome = self._hub.resume_job(action.job, hosts)
            case Migrate(prefetch=(_, *_)) | Resize(prefetch=(_, *_)):
                outcome = self._prefetch(action, hosts)
            case _:
                away = all(part.state == "yielded" for part in self._parts[action.job].values())
                outcome = self._hub.checkpoint_job(action.job, hosts, away=away, goal=action.goal, save_s=action.save_s)
        return outcome if outcome.ok else Outcome(ok=False, error=f"job {action.job}: {outcome.error}")

    def _prefetch(self, action: Migrate | Resize, hosts: tuple[str, ...]) -> Outcome:
        """Have a job's files read as its user by Slurm's word; nothing is read as root or as an unknown user."""
        job = self._before.job(action.job) if self._before is not None else None
        try:
            uid = pwd.getpwnam(job.user).pw_uid if job is not None else 0
        except KeyError:
            uid = 0
        if not uid:
            return Outcome(ok=True)  # the move waits a while for the files, and goes on without them
        return self._hub.prefetch_job(action.job, hosts, action.prefetch, uid)

    def _tune(self, action: Tune) -> Outcome:
        """Send each agent of the job its share; the agents know the job's node, which is a lane of their host."""
        host_of = {part.node: host for host, part in self._parts.get(action.job, {}).items()}
        shares = {host_of[share.node]: share for share in action.shares if share.node in host_of}
        if len(shares) < len(action.shares) or not shares:
            missing = ", ".join(share.node for share in action.shares if share.node not in host_of)
            return Outcome(ok=False, error=f"job {action.job}: no agent has reported it on {missing or 'any node'}")
        caches = zip(action.shares, action.caches_mb, strict=False)
        outcome = self._hub.tune_job(action.job, shares, {host_of[share.node]: mb for share, mb in caches})
        if not outcome.ok:
            return Outcome(ok=False, error=f"job {action.job}: {outcome.error}")
        self._tunes = {**self._tunes, action.job: action.shares}
        return outcome

    def _suspend(self, action: Suspend) -> Outcome:
        """Suspend a job after its agents were informed, unless they report it as running since the snapshot."""
        # Slurm stops the job's processes: they could not restore their state, so no agent may give them GPUs then.
        self._hub.mark_suspended(action.job, suspended=True)
        agents = self._hub.agents(self._parts.get(action.job, ()))
        seen = self._before or ClusterSnapshot(self._clock.now(), (), ())
        parts = parts_by_job(seen, agents).get(action.job)
        if parts and not action.repair and merge(parts, agents).state in ("held", "stopping"):
            outcome = Outcome(ok=False, error=f"job {action.job}: it has got its GPUs since; left running")
        else:
            outcome = self._slurm.apply(action)
            now_s = self._clock.monotonic()
            recent = {job: at_s for job, at_s in self._suspended_s.items() if now_s - at_s < ARRIVES_S}
            self._suspended_s = recent | {action.job: now_s}
        if not outcome.ok:
            self._hub.mark_suspended(action.job, suspended=False)
        return outcome

    def _unsuspend(self, action: Unsuspend) -> Outcome:
        """Resume a job once its suspend has surely arrived, and tell its agents."""
        # slurmctld tells slurmd of each in a thread of its own (agent.c). Of two in a row the resume may arrive first,
        # and the job stays stopped while Slurm calls it running.
        if (suspended_s := self._suspended_s.pop(action.job, None)) is not None:
            Event().wait(max(suspended_s + ARRIVES_S - self._clock.monotonic(), 0.0))
        outcome = self._slurm.apply(action)
        if outcome.ok:
            self._hub.mark_suspended(action.job, suspended=False)
        return outcome

    def complete_gangs(self) -> None:
        """Ask for the missing hosts of multi-node jobs that hold their GPUs on some hosts only.

        Such a job can neither run nor stop until it has all its GPUs.
        """
        for key, parts in self._parts.items():
            waiting = half_given(parts)
            if waiting and len(parts) > 1:
                outcome = self._hub.resume_job(key, waiting)
                log.info("JOBID=%s half given, waits on %s %s", key, ",".join(waiting), outcome.error)
