"""Rules for actions to leave: kill switch, scope, opt-in, rate, run time, observe-only, in this order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

from msgspec import Meta

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    MakeWay,
    NodeAction,
    OpenNode,
    Pack,
    Release,
    SetFactor,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, Node
from cadenza.policies.sharing.state.settings import held_for_us
from cadenza.policies.sharing.turns.lanes import drained_by_us, reopens

Names: TypeAlias = frozenset[Annotated[str, Meta(min_length=1)]]


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """The admin's limits. Without partitions nothing is managed; the other empty lists mean all."""

    partitions: Annotated[Names, Meta(description="Managed partitions; nothing is ever done outside them")] = (
        frozenset()
    )
    accounts: Annotated[Names, Meta(description="Only jobs of these accounts; empty: all")] = frozenset()
    qos: Annotated[Names, Meta(description="Only jobs of these QOS; empty: all")] = frozenset()
    users: Annotated[Names, Meta(description="Only jobs of these users; empty: all")] = frozenset()


@dataclass(frozen=True, slots=True)
class GuardSettings(GuardOptions):
    """The admin's limits, and the state of the service in which actions may leave. Times in seconds."""

    max_actions_per_round: int = 200
    """Each is a call to slurmctld, which serves the site's users between them."""
    min_run_s: float = 5.0
    """A job that got its GPUs keeps them at least this long."""
    enforce: bool = False
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Guarded:
    """One action and the guard's word on it; ``reason`` says which rule blocked it."""

    action: Action
    allowed: bool
    reason: str = ""


def guard(
    actions: Sequence[Action], snapshot: ClusterSnapshot, memory: Memory, settings: GuardSettings
) -> tuple[Guarded, ...]:
    """Judge every action, in order.

    What undoes our own doing is stopped by the kill switch only: resuming in Slurm what we suspended, releasing what
    is held for us, setting a SiteFactor of ours back to 0, and draining a further lane, which is what observe-only
    means.
    ``cadenza release --all`` does not come through here at all.
    """
    if not actions:
        return ()
    gate = Guard(snapshot, memory)
    judged = []
    left = settings.max_actions_per_round
    for action in actions:
        reason = gate.refusal_reason(action, settings, left)
        if not gate.undoes(action) and reason in (None, OBSERVE):
            left -= 1
        judged.append(Guarded(action, reason is None, reason or ""))
    return tuple(judged)


NO_SETTINGS = GuardSettings()
KILLED = "kill switch: nothing is done while it is set; see `cadenza release --all`"
OBSERVE = 'observe-only: nothing is done until the mode is "apply"'


class Guard:
    """Facts that the rules look up; every rule returns the sentence that blocks, None if it allows."""

    def __init__(self, snapshot: ClusterSnapshot, memory: Memory) -> None:
        self.snapshot, self.jobs = snapshot, snapshot.by_key
        self.memory = memory
        self.settings = NO_SETTINGS

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes by name; few actions are about one."""
        return {node.name: node for node in self.snapshot.nodes}

    def refusal_reason(self, action: Action, settings: GuardSettings, left: int = 1) -> str | None:
        """Return the first rule that blocks an action under these settings, with ``left`` actions of the round left."""
        self.settings = settings
        if settings.killed:
            return KILLED
        return None if self.undoes(action) else self._block_reason(action, left)

    def undoes(self, action: Action) -> bool:
        """Return True if the action only undoes an action of Cadenza, or keeps a lane shut."""
        if isinstance(action, DrainNode):
            node = self.nodes.get(action.node)
            return node is not None and node.lane > 0
        if isinstance(action, Unsuspend):
            return action.job in self.memory.suspended
        if isinstance(action, SetFactor):
            return action.factor == 0 and action.job.id in self.memory.factors
        job = self.jobs.get(action.job) if isinstance(action, Release) else None
        return job is not None and held_for_us(job, self.memory)

    def _block_reason(self, action: Action, left: int) -> str | None:
        """Return the first rule after the kill switch that blocks, in the guard's order."""
        if isinstance(action, NodeAction):
            rules: tuple[str | None, ...] = (self._node(self.nodes.get(action.node), action), self._rate(left))
        else:
            keys = action.jobs if isinstance(action, Pack | MakeWay) else (action.job,)
            gone = next((key for key in keys if key not in self.jobs), None)
            if gone is not None:
                return f"scope: job {gone} is gone"
            jobs = [self.jobs[key] for key in keys]
            rules = (
                *map(self._scope, jobs), *map(self._opt_in, jobs), self._rate(left), self._run_time(jobs[0], action)
            )  # fmt: skip
        return next((rule for rule in rules if rule is not None), None if self.settings.enforce else OBSERVE)

    def _node(self, node: Node | None, action: NodeAction) -> str | None:
        if node is None:
            return f"scope: node {action.node} is gone"
        if isinstance(action, OpenNode) and reopens(node, self.settings.partitions):
            return None
        if node.lane == 0:
            return f"scope: {node.name} is lane 0, which is the admin's alone"
        ours = drained_by_us(node, self.memory)
        return None if ours else f"scope: the drain of {node.name} is not ours to undo"

    def _scope(self, job: Job) -> str | None:
        settings = self.settings
        if job.partition not in settings.partitions:
            return f"allow-list: partition {job.partition} is not managed"
        for name, allowed, value in (
            ("account", settings.accounts, job.account),
            ("QOS", settings.qos, job.qos),
            ("user", settings.users, job.user),
        ):
            if allowed and value not in allowed:
                return f"allow-list: {name} {value or '(none)'} is not on it"
        return None

    def _opt_in(self, job: Job) -> str | None:
        if job.opted_in:
            return None
        return f"opt-in: job {job.key} {job.unmanageable or 'did not ask for sharing'}"

    def _rate(self, left: int) -> str | None:
        if left > 0:
            return None
        return f"rate limit: {self.settings.max_actions_per_round} actions a round, the rest has to wait"

    def _run_time(self, job: Job, action: Action) -> str | None:
        held_s = job.lease.held_s if job.lease is not None else 0.0
        if not isinstance(action, Yield) or held_s >= self.settings.min_run_s or self._makes_way(job):
            return None
        return f"minimum run time: it ran {held_s:.1f} s of {self.settings.min_run_s:.1f} s"

    def _makes_way(self, job: Job) -> bool:
        """Return True if an exclusive job or one of higher priority wants the job's GPUs."""
        gpus = set(job.leased_gpus)
        return any(
            other.lease is not None
            and other.lease.state in ("waiting", "yielded")
            and not other.lease.late
            and (other.lease.exclusive or _priority(other) > _priority(job))
            and not gpus.isdisjoint(other.lease.gpus)
            for other in self.jobs.values()
        )


def _priority(job: Job) -> int:
    return job.options.priority if job.options is not None else 0
