"""Short ways to write snapshots for tests of the policies."""

from __future__ import annotations

from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, JobKey, Lease, Node, Options
from cadenza.policies.relocation.executor import Relocation

NOW = 10_000.0


def key(number: int) -> JobKey:
    return JobKey(number, 0)


def lease(state: str, *indices: int, hosts: tuple[str, ...] = ("node1",), **facts) -> Lease:
    gpus = tuple(Gpu(host, index) for host in hosts for index in indices)
    return Lease(state=state, gpus=gpus, **{"ready": True, **facts})


def job(number: int, **facts) -> Job:
    """A managed one-GPU job that runs on lane 0 of node1; a pending one has no node."""
    state = facts.get("state", "RUNNING")
    plain = {
        "user": "ann",
        "account": "lab",
        "partition": "gpu",
        "qos": "normal",
        "state": state,
        "gpus": 1,
        "cpus": 4,
        "memory_mb": 8000,
        "num_nodes": 1,
        "submit_s": NOW - 900,
        "start_s": None if state == "PENDING" else NOW - 800,
        "slurm_priority": 1,
        "nodes": () if state == "PENDING" else ("node1",),
        "options": Options(),
    }
    return Job(key=key(number), **{**plain, **facts})


def node(name: str = "node1", lane: int = 0, **facts) -> Node:
    plain = {"cpus": 24, "memory_mb": 100_000, "gpus": 4, "partitions": ("gpu",)}
    lane_name = name if lane == 0 else f"{name}-l{lane}"
    return Node(name=lane_name, host=name, lane=lane, **{**plain, **facts})


def cluster(*jobs: Job, nodes: tuple[Node, ...] | None = None, dead: tuple[str, ...] = ()) -> ClusterSnapshot:
    lanes = nodes if nodes is not None else (node(), node(lane=1))
    names = sorted({lane.host for lane in lanes})
    return ClusterSnapshot(NOW, lanes, jobs, tuple(Host(name, agent_alive=name not in dead) for name in names))


def moving(decide, *, prefetch: bool = False):
    """A policy whose moves are carried out round by round."""

    def decided(found: ClusterSnapshot, memory):
        relocation = Relocation.of(found, memory)
        return relocation.join(decide(relocation.snapshot, memory), prefetch=prefetch)

    return decided
