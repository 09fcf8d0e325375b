"""Short ways to write what Gandiva's functions decide on: profiles, hosts of several lanes, and one decision."""

from __future__ import annotations

from dataclasses import replace

import stage_watch
from snapshots import NOW, cluster, job, key, lease, node

from cadenza.policies.allocation.proportional import proportional
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import Job, Options, Progress, Share, StepRate
from cadenza.policies.core.profile import Profile
from cadenza.policies.ledger import remember
from cadenza.policies.ordering.fifo import fifo
from cadenza.policies.relocation.executor import Relocation
from cadenza.policies.sharing.pipeline import Pipeline, stages_of
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings

SHARING = SharingSettings(
    enforce=True,
    place=True,
    partitions=frozenset({"gpu"}),
    max_priority=10,
    suspend=False,
    share_between_users=True,
)
ALL = GandivaSettings()
NOTHING = GandivaSettings(pack=False, migrate=False, defrag=False, elastic=False)


def profile(utilization: float = 0.3, peak_gb: float = 4.0, model: str = "net", **facts) -> Profile:
    plain = {"iteration_s": 0.1, "cpus_per_gpu": (1.0,), "memory_gb_per_gpu": (4.0,), "throughput": ((1.0,),)}
    return Profile(
        model=model,
        gpu_utilization=utilization,
        gpu_memory_peak_gb=peak_gb,
        gpu_memory_low_gb=1.0,
        **{**plain, **facts},
    )


def host(name: str = "a", lanes: int = 2, jobs: tuple[Job, ...] = (), **facts):
    """A host of 4 GPUs, 24 CPUs, 100 GB, its lanes' books as these jobs fill them."""
    found = []
    for lane in range(lanes):
        empty = node(name, lane, gpu_memory_gb=16.0, **facts)
        shares = [share for one in jobs for share in one.placement if share.node == empty.name]
        used = {
            "gpus_used": sum(share.gpus for share in shares),
            "cpus_used": sum(share.cpus for share in shares),
            "memory_used_mb": sum(share.memory_mb for share in shares),
        }
        found.append(replace(empty, **used))
    return tuple(found)


def pace(iteration_s: float, window_s: float = 100.0, error: float = 0.0, co_runners: tuple[int, ...] = ()) -> StepRate:
    """Return the step rate of a job with these others on its GPUs."""
    others = tuple(key(number) for number in co_runners)
    return StepRate(iteration_s, int(window_s / iteration_s), window_s, error, 0.0, others)


def on(number: int, where: str, *gpus: int, state: str = "held", lane: int = 0, **facts) -> Job:
    """A job on some GPUs of a host, with its proportional share; ``lease`` facts are held_s, vtime_s and so on."""
    known = ("held_s", "vtime_s", "waited_s", "iteration_s", "ready", "checkpoints", "step", "use", "pace")
    told = {name: facts.pop(name) for name in known if name in facts}
    co_runners = facts.pop("co_runners", ())
    told.setdefault("pace", pace(told.get("iteration_s", 0.1), told.get("held_s", 100.0), co_runners=co_runners))
    told = {"held_s": 10.0 if state == "held" else 0.0, "iteration_s": 0.1, "checkpoints": True, "step": 100, **told}
    name = where if lane == 0 else f"{where}-l{lane}"
    memory_mb = 8000 * len(gpus)
    return job(
        number,
        **{
            "gpus": len(gpus),
            "cpus": 6 * len(gpus),
            "memory_mb": memory_mb,
            "nodes": (name,),
            "lease": lease(state, *gpus, hosts=(where,), **told),
            "profile": profile(),
            "placement": (Share(name, len(gpus), 6 * len(gpus), memory_mb),),
            "progress": Progress(NOW, 7200.0, 600.0, running=state == "held"),
            **facts,
        },
    )


def held(number: int, gpus: int = 1, priority: int = 0, **facts) -> Job:
    """A job that waits for us to place it."""
    plain = {"cpus": 6 * gpus, "memory_mb": 8000 * gpus, "profile": profile(), "progress": Progress(NOW, 7200.0)}
    waits = {"state": "PENDING", "state_reason": "Resources"}
    return job(number, gpus=gpus, options=Options(priority=priority), **{**waits, **plain, **facts})


def world(*jobs: Job, hosts: tuple[str, ...] = ("a",), lanes: int = 2, **facts):
    """A snapshot of these jobs on hosts of 4 GPUs."""
    nodes = tuple(lane for name in hosts for lane in host(name, lanes, jobs, **facts))
    return cluster(*jobs, nodes=nodes)


def decided(snapshot, memory=None, gandiva=ALL, sharing=SHARING, order=fifo, allocate=proportional) -> Decision:
    stages = stages_of("gandiva", sharing, gandiva, allocates=True)
    known = memory or Memory()
    seen = Relocation.of(snapshot, known).snapshot if known.moves else snapshot
    return stage_watch.decide(Pipeline(stages, sharing, gandiva, order, allocate), seen, known)


def of(kind: type, decision: Decision) -> list:
    return [action for action in decision.actions if isinstance(action, kind)]


def after(snapshot, decision: Decision) -> Memory:
    """The memory when all of a decision has left."""
    return remember(decision.memory, decision.actions, snapshot)


__all__ = [
    "ALL", "NOTHING", "NOW", "SHARING", "after", "decided", "held", "key", "of", "on", "pace", "profile", "world",
]  # fmt: skip
