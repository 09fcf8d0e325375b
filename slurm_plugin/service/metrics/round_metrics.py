"""Counters and histograms of the service, advanced once a round by what the round has worked out anyway."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.core.move import Move, Ordered, Placed, Requeued
from cadenza.policies.round import RoundReport
from cadenza.sidecar.orders import Switched
from cadenza.slurm_plugin.service.accounting.usage import Spent
from cadenza.slurm_plugin.service.store.job_accounting import News

ROUND_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 120.0)
REQUEST_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SWITCH_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
MOVE_S = (3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
WAIT_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 3 * 86400.0, 7 * 86400.0)
SLOWDOWN = (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
SWITCHES = ("yield", "resume", "checkpoint")
"""Kinds of messages about a switch that was finished."""
FAILED_SWITCHES = ("refused", "timeout", "lost")
OUTCOMES = ("ok", "failed", "kept_in")
RULES = (
    "allow_list", "deadline", "kill_switch", "minimum_run_time", "observe_only", "opt_in", "rate_limit",
    "scope",
)  # fmt: skip
"""Rules of the guard that keep an action in, by the first words of their reasons."""
REASONS = ("by_hand", "room", "resize", "migrate")


class RoundMetrics:
    """Labels are words of this program and partitions, never jobs, users or hosts: their number does not grow."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cadenza_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"cadenza_{name}", text, labels, registry=registry, buckets=buckets)

        self._round = histogram("round_seconds", "Duration of a round", ROUND_S)
        self._step = histogram("round_step_seconds", "Duration of a step of a round", ROUND_S, "step")
        self._rounds = counter("rounds", "Rounds by result", "result")
        self._actions = counter("actions", "Actions by kind and outcome", "kind", "outcome")
        self._kept_in = counter("actions_kept_in", "Actions that a rule kept in, each round anew", "rule")
        self._effects = counter("action_effects", "Actions by what later rounds showed of them", "kind", "verdict")
        self._switch = histogram("switch_seconds", "Duration of yields, resumes, saves", SWITCH_S, "kind", "phase")
        self._switched = counter("switches", "Ends of orders to jobs, by host", "kind")
        self._bytes = counter("switch_bytes", "State moved between GPUs and host memory", "kind")
        self._moves = counter("moves", "Moves that have ended", "reason")
        self._move = histogram("move_seconds", "From the order to save until the move ended", MOVE_S, "reason")
        self._wait = histogram("job_wait_seconds", "Time in the queue before the first start", WAIT_S, *JOB)
        self._turn_wait = histogram("turn_wait_seconds", "Time without the GPUs before a turn", WAIT_S, *JOB)
        self._slowdown = histogram("job_slowdown", "Bounded slowdown of jobs that ended", SLOWDOWN, *JOB)
        self._gpu_s = counter("gpu_seconds", "GPU time that jobs had", "partition", "lane", "managed")
        self._requests = counter("slurm_requests", "Requests to Slurm", "request", "result")
        self._request = histogram("slurm_request_seconds", "Duration of requests to Slurm", REQUEST_S, "request")
        for family, words in (  # a counter must be there at 0 before Prometheus can see that it grew
            (self._rounds, ("ok", "failed", "deadline")),
            (self._switched, (*SWITCHES, *FAILED_SWITCHES)),
            (self._moves, REASONS),
            (self._kept_in, RULES),
        ):
            for word in words:
                family.labels(word)
        self._waiting: Mapping[JobKey, float] = {}
        """Since when each job that waits for its turn has waited, seconds since the epoch."""
        self._leaving: Mapping[JobKey, tuple[str, float]] = {}
        """Why each job that moves does so, and since when, seconds since the epoch."""

    def ended(self, report: RoundReport, seconds: Mapping[str, float], memory: Memory, news: News) -> None:
        """Count one good round; ``seconds``: by step, with "whole"."""
        # 1. The round itself.
        late = any(not outcome.left and outcome.error.startswith("deadline") for _, outcome in report.outcomes)
        self._rounds.labels("deadline" if late else "ok").inc()
        for step, took_s in seconds.items():
            (self._round if step == "whole" else self._step.labels(step)).observe(took_s)
        # 2. Its actions, and what became of earlier ones.
        acted = Tally(
            (type(action).__name__, "ok" if outcome.ok else "failed" if outcome.left else "kept_in")
            for action, outcome in report.outcomes
        )
        kept_in = [outcome.error for _, outcome in report.outcomes if not outcome.left]
        for item in report.guarded:
            if not item.allowed:
                acted[type(item.action).__name__, "kept_in"] += 1
                kept_in.append(item.reason)
        for kind in {kind for kind, _ in acted}:
            for word in OUTCOMES:  # all of them are there from the first action of a kind on
                self._actions.labels(kind, word).inc(acted[kind, word])
        for rule, number in Tally(map(_rule, kept_in)).items():
            self._kept_in.labels(rule).inc(number)
        for verdict in news.verdicts:
            self._effects.labels(*verdict).inc()
        # 3. Moves and jobs.
        self._end_moves(memory)
        self._end_waits(report.snapshot)
        for job, wait_s in news.started:
            self._wait.labels(*_job(job)).observe(wait_s)
        for job, slowdown in news.ended:
            self._slowdown.labels(*_job(job)).observe(slowdown)
        self._spend(report.snapshot, news.spent)

    def failed(self) -> None:
        """Count a round that an error ended."""
        self._rounds.labels("failed").inc()

    def messages(self, messages: Iterable[object]) -> None:
        """Count the switches among the agents' messages."""
        for one in messages:
            if isinstance(one, Switched):
                known = one.kind in (*SWITCHES, *FAILED_SWITCHES)  # agents choose the word, and a label is for good
                self._switched.labels(one.kind if known else "other").inc()
                if one.kind in SWITCHES:
                    for phase, took_s in (("boundary", one.boundary_s), ("copy", one.copy_s), ("total", one.total_s)):
                        self._switch.labels(one.kind, phase).observe(took_s)
                    self._bytes.labels(one.kind).inc(one.bytes)

    def asked(self, request: str, result: str, took_s: float) -> None:
        """Count one request to Slurm."""
        self._requests.labels(request, result).inc()
        self._request.labels(request).observe(took_s)

    def _end_moves(self, memory: Memory) -> None:
        leaving = {}
        for move in memory.moves:
            if isinstance(move.phase, Ordered | Requeued | Placed):
                began_s = move.phase.since_s if isinstance(move.phase, Ordered) else move.phase.began_s
                leaving[move.job] = _reason(move), began_s
            elif move.over and (left := self._leaving.get(move.job)) is not None:
                self._moves.labels(left[0]).inc()
                self._move.labels(left[0]).observe(max(move.phase.since_s - left[1], 0.0))
        self._leaving = leaving

    def _end_waits(self, snapshot: ClusterSnapshot) -> None:
        """Observe the waits of the jobs that have got their GPUs since the round before."""
        waiting = {}
        for job in snapshot.jobs:
            if job.lease is None or job.lease.late:
                continue
            if job.lease.state in ("waiting", "yielded"):
                waiting[job.key] = snapshot.time_s - job.lease.waited_s
            elif (since_s := self._waiting.get(job.key)) is not None:
                self._turn_wait.labels(*_job(job)).observe(max(snapshot.time_s - job.lease.held_s - since_s, 0.0))
        self._waiting = waiting

    def _spend(self, snapshot: ClusterSnapshot, spent: Iterable[Spent]) -> None:
        sums: dict[tuple[str, str, str], float] = {}
        for row in spent:
            job = snapshot.by_key.get(row.key)
            if job is None or not row.gpu_s:
                continue
            for lane, part_s in (("0", row.gpu_s - row.further_gpu_s), ("further", row.further_gpu_s)):
                key = (job.partition, lane, _yes(row.managed))
                sums[key] = sums.get(key, 0.0) + part_s
        for key, gpu_s in sums.items():
            self._gpu_s.labels(*key).inc(max(gpu_s, 0.0))


JOB = ("partition", "managed")


def _job(job: Job) -> tuple[str, str]:
    return job.partition, _yes(job.opted_in)


def _yes(value: bool) -> str:  # noqa: FBT001
    return "yes" if value else "no"


def _rule(reason: str) -> str:
    """Return the rule that a reason names: its words before the colon, such as *rate limit*."""
    return reason.partition(":")[0].replace(" ", "_").replace("-", "_")


def _reason(move: Move) -> str:
    if move.by_hand:
        return "by_hand"
    return "room" if move.for_job is not None else "resize" if move.resize else "migrate"
