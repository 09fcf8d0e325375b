"""Work that rounds leave out: sentences that nobody reads, and rounds while nobody waits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from snapshots import cluster, job, node

from cadenza.policies.core.decision import Decision, Memory, Sentences
from cadenza.policies.core.model import JobKey
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.turns import reasons
from cadenza.policies.simulator.run_values import Result
from cadenza.policies.simulator.simulation import simulate
from cadenza.slurm_plugin.simulations.request import read_request


def run(jobs: list[TraceJob], *, skip: bool = True, whole: bool = False) -> Result:
    """Play jobs under the default on one node of four GPUs; ``whole``: a decision sees all of the queue."""
    words = {"share": "preemption", "nodes": "1x4:24:500", "workload": "synergy:load=8,jobs=10"}
    request = read_request(words, ())
    policy = replace(request.policy, reach=None) if whole else request.policy
    return simulate(jobs, request.nodes, policy, replace(request.setup, skip=skip))


def test_sentences_are_worked_out_once_and_when_they_are_read() -> None:
    """A decision compares, and is written down, as with a dictionary."""
    worked_out = []

    def work_out() -> dict[JobKey, str]:
        worked_out.append(1)
        return {JobKey(1, 0): "runs"}

    decision = Decision((), Memory(), Sentences(work_out))
    assert not worked_out
    assert decision == Decision((), Memory(), {JobKey(1, 0): "runs"})
    assert dict(decision.reasons) == dict(decision.reasons.items()) == {JobKey(1, 0): "runs"}
    assert len(worked_out) == 1


def test_a_simulation_works_out_no_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads them there: jobs that wait, and one that makes way, have none."""

    def never(_: object) -> dict[JobKey, str]:
        raise AssertionError("sentences that nobody reads")

    monkeypatch.setattr(reasons, "_sentences", never)
    long = TraceJob(1, 0.0, 4, 40_000.0, checkpoints=True)
    short = [TraceJob(number, 8_000.0 * number, 4, 600.0, checkpoints=True) for number in (2, 3)]
    result = run([long, *short])
    assert all(job.finish_s is not None for job in result.jobs)
    assert result.counts.restarts > 0


def test_rounds_are_left_out_while_nobody_waits() -> None:
    """A job alone for ten hours: one look an hour once it can be stopped; the result is the same."""
    jobs = [TraceJob(1, 0.0, 2, 36_000.0, checkpoints=True), TraceJob(2, 20_000.0, 4, 600.0, checkpoints=True)]
    few, all_rounds = run(jobs), run(jobs, skip=False)
    assert few.jobs == all_rounds.jobs
    alone = run(jobs[:1])
    assert alone.counts.decided < 30 < alone.counts.rounds


def test_newcomers_behind_all_that_a_decision_looks_at_change_nothing() -> None:
    """Of 150 jobs that come within eight minutes some wait behind 100 others: no round for these, the same result."""
    chance = Random(5)  # noqa: S311 (a test wants repeatable draws)
    jobs = [
        TraceJob(
            number, 3.0 * number, chance.choice((1, 1, 2, 4)), chance.choice((60.0, 120.0, 300.0)),
            user=f"u{number % 5}", account=f"a{number % 2}", checkpoints=number % 2 == 0,
        )
        for number in range(1, 151)
    ]  # fmt: skip
    few, all_seen = run(jobs), run(jobs, whole=True)
    assert few.jobs == all_seen.jobs
    assert few.samples == all_seen.samples
    assert few.counts.decided < all_seen.counts.decided - 20


def test_a_snapshot_at_another_time_knows_its_jobs_and_nodes_as_a_new_one_does() -> None:
    found = cluster(job(2), replace(job(1), key=JobKey(1, 1)), job(1), nodes=(node("node1"), node("node2")))
    later, anew = found.at(found.time_s + 60.0), replace(found, time_s=found.time_s + 60.0)
    assert later == anew
    assert (later.by_key, later.by_id, later.host_of) == (anew.by_key, anew.by_id, anew.host_of)
