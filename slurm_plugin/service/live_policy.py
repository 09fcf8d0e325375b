"""The configured policy as the function that a round calls: the one that the simulator runs under these names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from cadenza.policies.composition import build
from cadenza.policies.core.actions import Action, Migrate, Place, Resize, Tune, Unpack, Unsuspend
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, Placement, Share
from cadenza.policies.registry import entry
from cadenza.policies.relocation.executor import moving
from cadenza.policies.request_sizing import as_sized, requests
from cadenza.policies.round import Decide
from cadenza.policies.sharing.state.settings import SharingSettings, held_for_us
from cadenza.policies.sharing.turns.lanes import lane_actions
from cadenza.policies.sharing.turns.slurm_sync import decide as timeslice
from cadenza.slurm_plugin.service.failover.release_round import release_plan
from cadenza.slurm_plugin.service.settings import NO_ALLOCATION, Settings, policy_settings, sharing_settings


def policy(settings: Settings) -> Decide:
    """Return ``decide(snapshot, memory)`` under these settings; a pure function, so a replay calls it too."""
    decide = chosen(settings) if settings.policy.share == "gandiva" else _parted(chosen(settings))
    return moving(_sized(decide, settings) if sizes_pending(settings) else decide, warm=settings.policy.warm)


def sizes_pending(settings: Settings) -> bool:
    """Whether pending jobs ask for what their profiles say."""
    return settings.policy.size_pending and profiled(settings)


def allocates(settings: Settings) -> bool:
    """Whether CPUs and memory are given out by an allocation."""
    return settings.policy.allocate != NO_ALLOCATION


def profiled(settings: Settings) -> bool:
    """Whether CPUs and memory are given out by what profiles say."""
    return allocates(settings) and entry("allocation", settings.policy.allocate).profiled


def chosen(settings: Settings) -> Decide:
    """Return the policy of the three names, before pending jobs are sized and moves carried out."""
    table, rules = settings.policy, sharing_settings(settings)
    if table.share == "none":
        return _exclusive(settings) if rules.places and allocates(settings) else _unshared(settings)
    if (table.order, table.allocate, table.share) == ("fifo", NO_ALLOCATION, "timeslice"):
        return lambda snapshot, memory: timeslice(snapshot, memory, rules)
    decide = _built(settings, table.share)
    return decide if allocates(settings) else _as_asked(decide)


def _built(settings: Settings, share: str) -> Decide:
    """Return what the simulator calls for these names."""
    allocate = settings.policy.allocate if allocates(settings) else "proportional"
    return build(settings.policy.order, allocate, share, policy_settings(settings)).decide


def _as_asked(decide: Decide) -> Decide:
    """Return a policy that leaves jobs with the CPUs and memory that they asked for."""

    def decided(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        found = decide(snapshot, memory)
        kept = (action for action in found.actions if not isinstance(action, Tune))
        return replace(found, actions=tuple(_plain(action, snapshot) for action in kept))

    return decided


def _plain(action: Action, snapshot: ClusterSnapshot) -> Action:
    """Return an action that changes where a job runs, without a change of its CPUs and memory, or of each GPU's."""
    if isinstance(action, Place):
        return replace(action, shares=())
    if isinstance(action, Migrate):
        return replace(action, shares=tuple(share._replace(cpus=0, memory_mb=0) for share in action.shares))
    job = snapshot.job(action.job) if isinstance(action, Resize) else None
    if isinstance(action, Resize) and job is not None and job.gpus:
        return replace(action, shares=tuple(_as_much(job, share) for share in action.shares))
    return action


def _as_much(job: Job, share: Share) -> Share:
    """Return a share with as many CPUs and as much memory for each GPU as a job has now."""
    cpus, memory_mb = job.cpus * share.gpus // job.gpus, job.memory_mb * share.gpus // job.gpus
    return share._replace(cpus=max(cpus, 1), memory_mb=max(memory_mb, 1))


def _sized(decide: Decide, settings: Settings) -> Decide:
    """Return a policy that has pending jobs ask for what their profiles say; those that it places get it there."""
    rules = sharing_settings(settings)

    def decided(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        sizes = requests(snapshot, memory, rules)
        found = decide(as_sized(snapshot, sizes), memory)
        placed = {action.job for action in found.actions if isinstance(action, Place)}
        wanted = [size for key, size in sizes.items() if key not in placed]
        reasons = {**found.reasons}
        for size in wanted:
            reasons[size.job] = "; ".join(filter(None, (reasons.get(size.job, ""), size.reason)))
        return replace(found, actions=(*wanted, *found.actions), reasons=reasons)

    return decided


def _parted(decide: Decide) -> Decide:
    """Return a policy that does not pack, with packs of an earlier setting ended."""

    def decided(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        found = decide(snapshot, memory)
        done = {action.job for action in found.actions if isinstance(action, Unpack)}
        left = (key for pack in memory.sharing.packs for key in pack[:-1] if key not in done)
        parted = tuple(Unpack(key, "runs in turns again: packing is off") for key in left)
        return replace(found, actions=(*parted, *found.actions)) if parted else found

    return decided


# --- One job a GPU -------------------------------------------------------------------------------------


def _unshared(settings: Settings) -> Decide:
    """Return a policy under which Slurm starts every job, and what runs is tuned, or moved where that is no help."""
    closed = replace(sharing_settings(settings), enforce=False)
    functions = structs.replace(settings.gandiva, pack=False, migrate=False, defrag=False, elastic=False)
    relief = structs.replace(settings, gandiva=functions)
    tune = _built(relief, "gandiva") if allocates(settings) else None

    def decided(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        undone = release_plan(snapshot, memory, "sharing is off")
        found = tune(snapshot, memory) if tune is not None else Decision((), memory)
        changes = (action for action in found.actions if isinstance(action, Tune | Migrate))
        return replace(found, actions=(*undone, *lane_actions(snapshot, memory, closed), *changes))

    return decided


def _exclusive(settings: Settings) -> Decide:
    """Return a policy that places every job on lane 0, by order and allocation, and requeues those it preempts."""
    rules = sharing_settings(settings)
    closed, built = replace(rules, enforce=False), _built(settings, "none")

    def decided(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        found = built(_steerable(snapshot, memory, rules), memory)
        resumed = (a for a in release_plan(snapshot, memory, "sharing is off") if isinstance(a, Unsuspend))
        actions = (_enough(action, snapshot) for action in found.actions if not _is_so(action, snapshot))
        return replace(found, actions=(*resumed, *lane_actions(snapshot, memory, closed), *actions))

    return decided


def _steerable(snapshot: ClusterSnapshot, memory: Memory, rules: SharingSettings) -> ClusterSnapshot:
    """Return the snapshot in which only jobs that we may start and requeue count as managed."""
    first = {node.host: node.name for node in snapshot.nodes if node.lane == 0}
    lanes = {node.name: first.get(node.host, node.name) for node in snapshot.nodes if node.lane}
    jobs = (_steered(job, memory, lanes) if rules.manages(job) else job for job in snapshot.jobs)
    return replace(snapshot, jobs=tuple(jobs))


def _steered(job: Job, memory: Memory, lanes: Mapping[str, str]) -> Job:
    if job.held and not held_for_us(job, memory):
        return replace(job, unmanageable="its owner holds it")
    if any(name in lanes for name in job.nodes):  # it goes on there until it ends, and its GPUs are those of lane 0
        return replace(job, nodes=tuple(lanes.get(name, name) for name in job.nodes), unmanageable="on a further lane")
    if job.nodes and not job.requeueable:
        return replace(job, unmanageable="Slurm may not requeue it")
    return job


def _is_so(action: Action, snapshot: ClusterSnapshot) -> bool:
    """Whether a job has been placed there already and Slurm only has to start it."""
    job = snapshot.job(action.job) if isinstance(action, Place) else None
    return job is not None and isinstance(action, Place) and not job.held and job.required_nodes == action.nodes


def _enough(action: Action, snapshot: ClusterSnapshot) -> Action:
    """Return a placement with no less memory than its job asked for, nor CPUs where nobody knows what they bring."""
    job = snapshot.job(action.job) if isinstance(action, Place | Migrate) else None
    if job is None or not isinstance(action, Place | Migrate) or not action.shares:
        return action
    parts = len(action.shares)
    cpus = 0 if job.profile is not None else -(-job.cpus // parts)
    shares: Placement = tuple(
        share._replace(cpus=max(share.cpus, cpus), memory_mb=max(share.memory_mb, -(-job.memory_mb // parts)))
        for share in action.shares
    )
    return replace(action, shares=shares)
