"""Requeues that are not ours are named with the job that got the nodes."""

from __future__ import annotations

from dataclasses import replace

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Options
from cadenza.slurm_plugin.service.observe.slurm_requeues import NAMED_WITHIN_S, SlurmRequeues

T = 1000.0


def job(number: int, restart: int = 0, nodes: tuple[str, ...] = (), start_s: float | None = None, **facts) -> Job:
    state = "RUNNING" if nodes else "PENDING"
    plain = {"user": "ann", "account": "lab", "partition": "gpu", "qos": "normal", "options": Options()}
    size = {"gpus": 1, "cpus": 1, "memory_mb": 100, "num_nodes": 1, "submit_s": T - 90}
    return Job(JobKey(number, restart), state=state, nodes=nodes, start_s=start_s, **{**plain, **size, **facts})


def rounds(*jobs: tuple[Job, ...], memory: Memory | None = None, step_s: float = 5.0) -> list[str]:
    requeues, found = SlurmRequeues(), []
    for number, present in enumerate(jobs):
        snapshot = ClusterSnapshot(T + number * step_s, (), present)
        events = requeues.observe(snapshot, memory or Memory())
        found += [f"{event.job}.{event.restart} {event.detail}" for event in events]
    return found


VICTIM, AGAIN = job(1, nodes=("n1",), start_s=T - 50), job(1, 1)
NEIGHBOR = job(2, nodes=("n1",), start_s=T - 2)
PREEMPTOR = job(3, nodes=("n1-l1", "n1"), start_s=T + 7, qos="high", options=None)


def test_the_job_that_starts_on_its_nodes_is_named() -> None:
    waiting = replace(PREEMPTOR, state="PENDING", nodes=(), start_s=None)
    seen = rounds((VICTIM, NEIGHBOR, waiting), (AGAIN, NEIGHBOR, waiting), (AGAIN, NEIGHBOR, PREEMPTOR), (AGAIN,))
    assert seen == ["1.1 not by Cadenza; job 3 (QOS high, partition gpu) then started on its nodes"]


def test_a_requeue_without_a_successor_is_told_after_a_while() -> None:
    assert not rounds((VICTIM,), (AGAIN,), (AGAIN,))
    assert rounds((VICTIM,), (AGAIN,), (AGAIN,), step_s=NAMED_WITHIN_S) == [
        "1.1 not by Cadenza: by Slurm, its owner or an admin"
    ]


def test_our_own_requeues_and_unmanaged_jobs_are_left_out() -> None:
    assert not rounds((VICTIM,), (AGAIN, PREEMPTOR), memory=Memory(requeued={VICTIM.key: T}))
    plain = [replace(one, options=None) for one in (VICTIM, AGAIN)]
    assert not rounds((plain[0],), (plain[1], PREEMPTOR))
