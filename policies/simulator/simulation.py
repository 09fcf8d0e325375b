"""Simulation of a policy over a workload: the round of the live service, on a simulated cluster and its clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf

from cadenza.policies.composition import Policy
from cadenza.policies.core.actions import MakeWay, Migrate, Pack, Requeue, Resize, Tune, Unpack, Yield
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey, Node
from cadenza.policies.gc_pause import uncollected
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.round import Decide, run_round
from cadenza.policies.simulator.run_values import Counts, Result, Setup
from cadenza.policies.simulator.sim_gateway import RunStore, SimClock, SimGateway
from cadenza.policies.simulator.world import World

MAX_PROMPT_ROUNDS = 4
"""Rounds in a row, without time between them, that jobs in transit may ask for."""
MAX_IDLE_ROUNDS = 1000
"""Rounds in a row without any event ahead, after which the jobs that are left can never run."""


def simulate(
    jobs: Sequence[TraceJob],
    nodes: tuple[Node, ...],
    policy: Policy,
    setup: Setup,
    *,
    stopwatch: Callable[[], float] | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> Result:
    """Return the result of running ``jobs`` on ``nodes`` under ``policy``.

    ``stopwatch`` returns wall seconds and times every decision; without it ``decision_s`` stays empty.
    ``progress`` is called after each round with the simulated time in seconds and the jobs that have ended.
    Raise InputError for a job that can never run, and SimulationError when the policy breaks the cluster's books.
    """
    with uncollected():
        return _Run(jobs, nodes, policy, setup, stopwatch).run(progress)


class _Run:
    def __init__(
        self,
        jobs: Sequence[TraceJob],
        nodes: tuple[Node, ...],
        policy: Policy,
        setup: Setup,
        stopwatch: Callable[[], float] | None,
    ) -> None:
        self.setup = setup
        self.policy = policy
        self.world = World(jobs, nodes, setup, policy.reach if setup.skip else None)
        self.gateway = SimGateway(self.world)
        self.clock = SimClock(self.world)
        self.store = RunStore()
        self.stopwatch = stopwatch
        self.decision_s: list[float] = []
        self.rounds = 0
        self._due_s = 0.0
        """The next round, where nothing happens before."""
        self._quiet_until_s = 0.0
        """The last decision's: a round before that decides nothing else, unless something happens."""
        self._last: tuple[JobKey, ...] | None = None
        self._watched = _watched(jobs, setup)
        self._seen = 0

    def run(self, progress: Callable[[float, int], None] | None) -> Result:
        """Run until nothing is left, or as the setup says."""
        started = self.stopwatch() if self.stopwatch is not None else 0.0
        decide = self._timed(self.policy.decide)
        time_s = self._round_at(max(self.setup.first_round_s, self.world.next_event_s))
        idle_rounds = 0
        while time_s < inf and not self._done() and idle_rounds < MAX_IDLE_ROUNDS:
            happened = self.world.advance(time_s)
            if happened or time_s >= self._due_s:
                self._due_s = time_s + self.setup.round_s
                self._rounds_now(decide, happened=happened)
            if progress is not None:
                progress(self.world.now_s, len(self.world.ended))
            event_s = self.world.next_event_s
            idle_rounds = idle_rounds + 1 if event_s == inf else 0
            time_s = self._next_round(event_s)
        return self._result(self.stopwatch() - started if self.stopwatch is not None else 0.0)

    def _rounds_now(self, decide: Decide, *, happened: bool) -> None:
        """Run a round, and those that jobs in transit ask for."""
        self.rounds += 1
        if not self._must_decide(happened=happened):
            return
        self._round(decide)
        prompt_rounds = 0
        while self.world.needs_prompt_round and prompt_rounds < MAX_PROMPT_ROUNDS:
            prompt_rounds += 1
            self.rounds += 1
            self._round(decide)

    def _round(self, decide: Decide) -> None:
        self.world.needs_prompt_round = self.world.matters = False
        report = run_round(self.gateway, self.clock, self.store, decide, self.setup.guard)
        self._quiet_until_s = 0.0 if report.outcomes else report.decision.quiet_until_s
        self.gateway.end_round()
        self.world.note_change()

    # --- When ---------------------------------------------------------------------------------------

    def _round_at(self, time_s: float) -> float:
        """Return the first round that is not before a time."""
        first, every = self.setup.first_round_s, self.setup.round_s
        if time_s == inf:
            return inf
        return time_s if self.setup.rounds_on_events else first + max(ceil((time_s - first) / every), 0) * every

    def _next_round(self, event_s: float) -> float:
        """Return the time to look next: a round's, or an event's; without a job there is nothing to decide."""
        if not self.world.live:
            after = self._due_s = self._round_at(event_s)
        else:
            # Rounds before the next event that decide nothing are only counted.
            skips = self.setup.skip and event_s < inf
            last_s = min(event_s, self._quiet_until_s, self.setup.horizon_s or inf) if skips else 0.0
            while self._due_s < last_s:
                self.rounds += 1
                self._due_s += self.setup.round_s
            after = min(self._due_s, self.world.next_save_s)  # a job stands still from there on
            if self.setup.rounds_on_events:
                after = min(after, event_s)
        horizon = self.setup.horizon_s
        if horizon is not None and after >= horizon:
            self.world.advance(horizon)
            return inf
        return after

    def _done(self) -> bool:
        """Return True if the setup's jobs of interest have ended, or all have."""
        if self.world.over:
            return True
        if self._watched is None:
            return False
        ended = self.world.ended
        while self._seen < len(ended):
            self._watched.discard(ended[self._seen].id)
            self._seen += 1
        return not self._watched

    def _must_decide(self, *, happened: bool) -> bool:
        """Return True if this round can differ from the last one.

        A steady policy's decision is a function of the ordered runnable jobs and the nodes; both only change
        with an event. Other decisions say how long they stand if nothing happens.
        """
        if self.setup.skip and not (happened and self.world.matters) and self.world.now_s < self._quiet_until_s:
            return False
        if self.policy.runnable is None or not self.setup.skip:
            return True
        if not happened and self._last is not None:
            return False
        running = self.policy.runnable(self.gateway.read(), self.store.memory())
        if running == self._last and not self.setup.failures:
            return False
        self._last = running
        return True

    # --- What ---------------------------------------------------------------------------------------

    def _timed(self, decide: Decide) -> Decide:
        stopwatch, spent = self.stopwatch, self.decision_s
        if stopwatch is None:
            return decide

        def timed(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
            before = stopwatch()
            decision = decide(snapshot, memory)
            spent.append(stopwatch() - before)
            return decision

        return timed

    def _result(self, wall_s: float) -> Result:
        counts = self.gateway.counts
        world = self.world
        return Result(
            jobs=world.results(),
            samples=tuple(world.samples),
            counts=Counts(
                rounds=self.rounds,
                decided=self.store.rounds,
                yields=counts.get(Yield, 0),
                migrations=counts.get(Migrate, 0),
                tunes=counts.get(Tune, 0),
                restarts=counts.get(Requeue, 0) + counts.get(MakeWay, 0),
                packs=counts.get(Pack, 0),
                unpacks=counts.get(Unpack, 0),
                resizes=counts.get(Resize, 0),
            ),
            gpus=sum(node.gpus for node in world.nodes.values() if node.lane == 0),
            cpus=sum(node.cpus for node in world.nodes.values() if node.lane == 0),
            end_s=world.now_s,
            decision_s=tuple(self.decision_s),
            wall_s=wall_s,
            unfinished=tuple(sorted(world.live)),
        )


def _watched(jobs: Sequence[TraceJob], setup: Setup) -> set[int] | None:
    """Return the ids of the jobs whose end ends the run, or None for all."""
    if setup.until_done is None:
        return None
    first, last = setup.until_done
    ordered = sorted(jobs, key=lambda job: (job.submit_s, job.id))
    return {job.id for job in ordered[first:last]}
