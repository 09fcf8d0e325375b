"""A policy's tune becomes one order for each agent of the job, and agents are told what Slurm's books say."""

from __future__ import annotations

from collections.abc import Mapping

from service_rig import books, job, lease, node, report

from cadenza.policies.core.actions import Outcome, Tune
from cadenza.policies.core.model import JobKey, Share
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.service.agent_facts import facts_of
from cadenza.slurm_plugin.service.agents.agent_registry import Agent
from cadenza.slurm_plugin.service.observe.cluster_gateway import ClusterGateway
from cadenza.slurm_plugin.service.settings import Settings

A = JobKey(1, 0)


class Link:
    """The agents' side in memory: as much of it as a tune needs."""

    yield_job = resume_job = checkpoint_job = None

    def __init__(self) -> None:
        self.sent: list[tuple[JobKey, dict[str, Share], dict[str, int | None]]] = []

    def agents(self, _hosts: object = None) -> dict[str, Agent]:
        parts = {host: lease(1, "held", node=f"{host}-l1", hosts=2, world_size=2) for host in ("n1", "n2")}
        return {host: Agent(report(host, part), alive=True, silent_s=0.0) for host, part in parts.items()}

    def tune_job(self, key: JobKey, wanted: Mapping[str, Share], caches_mb: Mapping[str, int | None]) -> Outcome:
        self.sent.append((key, dict(wanted), dict(caches_mb)))
        return Outcome(ok=True)


class Books:
    """Slurm's side in memory."""

    def read(self):
        wide = job(1, nodes=("n1-l1", "n2-l1"), gpus=2, cpus=9, memory_mb=4000, num_nodes=2)
        return books(wide, nodes=(node("n1-l1", 1), node("n2-l1", 1)))


def test_a_tune_goes_to_the_agents_of_its_nodes() -> None:
    link = Link()
    cluster = ClusterGateway(Books(), link, SystemClock(), None)  # type: ignore[arg-type]
    cluster.read()
    one, two = Share("n1-l1", 1, 6, 1000), Share("n2-l1", 1, 4, 2000)
    assert cluster.apply(Tune(A, (one, two), "")).ok
    assert cluster.apply(Tune(A, (one, two), "", (None, 700))).ok
    shares = {"n1": one, "n2": two}
    assert link.sent == [(A, shares, {}), (A, shares, {"n1": None, "n2": 700})]
    assert "n3" in cluster.apply(Tune(A, (one, Share("n3", 1, 4, 2000)), "")).error
    assert "no agent" in cluster.apply(Tune(JobKey(9, 0), (one,), "")).error
    assert len(link.sent) == 2


def test_agents_are_told_the_books() -> None:
    snapshot = books(job(1, nodes=("n1", "n2"), cpus=9, memory_mb=4000, num_nodes=2), nodes=(node("n1"), node("n2")))
    for told in facts_of(snapshot, Settings(), frozenset()).values():
        assert [(one.cpus, one.memory_mb) for one in told.jobs] == [(5, 2000)]
