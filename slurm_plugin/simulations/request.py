"""Options of ``cadenza simulate``, checked and turned into jobs, nodes, a policy and a setup."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from cadenza.policies.allocation.problem import Costs
from cadenza.policies.composition import Policy, PolicySettings, build
from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.cluster import MAX_LANES, PARTITION, read_cluster
from cadenza.policies.inputs.costs import FREE_COSTS, read_costs
from cadenza.policies.inputs.csv_table import decode, integer, number, quoted
from cadenza.policies.inputs.failures import read_failures
from cadenza.policies.inputs.interference import packing_pairs, read_interference
from cadenza.policies.inputs.model_mix import model_mix, read_split
from cadenza.policies.inputs.profiles import read_profiles
from cadenza.policies.inputs.published import default_costs, gandiva_table1, synergy_profiles
from cadenza.policies.inputs.queue_rules import (
    AGE_ALONE,
    USUAL_WEIGHTS,
    QueueRules,
    Weights,
    read_queue_rules,
    read_weights,
    with_shares,
    with_tiers,
)
from cadenza.policies.inputs.strict_mapping import unknown_key
from cadenza.policies.inputs.trace import PLAIN_QUEUE, TraceJob, read_trace
from cadenza.policies.registry import warm
from cadenza.policies.sharing.state.settings import GandivaSettings
from cadenza.policies.simulator.load_sweep import read_loads
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.workloads.catalogue import KINDS, Workload, parse_workload
from cadenza.policies.slurm.backfill import SLURM, Backfill
from cadenza.slurm_plugin.service.settings import Settings, guard_settings, policy_settings

OPTIONS = (
    "allocate", "assign", "baseline", "checkpoint", "costs", "failures", "interference", "json", "label", "lanes",
    "load_sweep", "nodes", "opted_in", "order", "per_job", "place", "preset", "profiles", "quiet", "round", "save",
    "seed", "share", "share_between_users", "site", "through_slurm", "trace", "turns", "weights", "window", "workload",
)  # fmt: skip
"""The options of a simulation by name; ``quiet``: without a progress bar."""
LONGEST_S = 1e11
SHORTEST_ROUND_S = 1.0
MAX_SEEDS = 1000
ROUND_S, SHARED_ROUND_S = "300", "60"
"""Synergy's round (OSDI'22) and Gandiva's time slice (OSDI'18, p. 603), in seconds."""
CHECKPOINT_S = "1800"
"""Seconds of work between two checkpoints of a job; with ``--set preset=synergy`` nothing is lost, as it assumes."""
STATIC_FIRST_S = 1.0
"""First round of Synergy's simulator if all jobs are there at the start, in seconds."""
YES_NO = ("yes", "no")
TAKE_TURNS = ("timeslice", "gandiva")
"""Sharings that need a further lane to share anything."""
SHIPPED = Settings()
BY_AGE = QueueRules(weights=Weights(**AGE_ALONE))


@dataclass(frozen=True)
class Request:
    """Everything that a simulation takes, and the options for its output."""

    words: Mapping[str, Any]
    arguments: tuple[str, ...]
    nodes: tuple[Node, ...]
    policy: Policy
    setup: Setup
    profiles: Mapping[str, Profile]
    trace: tuple[TraceJob, ...] | None
    workload: Workload | None
    seeds: tuple[int, ...]
    loads: tuple[float, ...]
    window: tuple[int, int] | None
    baseline: Literal["slurm", "strict"] | None
    """The figures compare with it; None for a run that is the baseline, for sweeps, and with failures."""
    shared: Literal["between users", "within users"] | None
    """Jobs of which users share GPUs; None without sharing, and without further lanes."""
    opted_in: float | None = None
    """Part of the jobs that opt in, drawn; None: as the trace says."""

    @property
    def json(self) -> bool:
        """Return True to print JSON."""
        return bool(self.words["json"])

    @property
    def label(self) -> str:
        """Return the simulation's name."""
        return str(self.words["label"] or ("slurm" if self.alone else self.policy.name))

    @property
    def alone(self) -> bool:
        """Return True if Slurm alone places the jobs: nothing is shared, and no order or allocation is named."""
        words = self.words
        named = words["order"] or words["allocate"] or words["preset"] or words["through_slurm"] or words["failures"]
        return words["share"] == "none" and not named

    def jobs(self, seed: int, load: float | None = None) -> tuple[TraceJob, ...]:
        """Return the jobs of one run."""
        if self.workload is None:
            jobs = self.trace or ()
        else:
            workload = self.workload
            if load is not None:
                workload = parse_workload(self.words["workload"], self.profiles, {"load": f"{load:.9g}"})
            jobs = workload.generate(Random(seed))  # noqa: S311 (a simulation wants repeatable draws)
        if self.opted_in is None:
            return jobs
        draws = Random(f"opted in {seed}")  # noqa: S311 (the same)
        return tuple([replace(job, managed=draws.random() < self.opted_in) for job in jobs])


@dataclass(frozen=True)
class Site:
    """Jobs and nodes of a real cluster, in place of --trace and --nodes."""

    jobs: tuple[TraceJob, ...]
    nodes: tuple[Node, ...]
    load: tuple[TraceJob, ...] = ()
    """Jobs without GPUs."""
    queue: QueueRules = BY_AGE
    """Rules by which its Slurm orders its queue; unless more is known, in the order of submission."""
    backfill: Backfill = SLURM


def read_request(words: Mapping[str, Any], arguments: tuple[str, ...], site: Site | None = None) -> Request:
    """Return the request that a command's options make, by name; those not named were not given.

    Raise InputError naming the option that is wrong.
    """
    for name in words.keys() - {*OPTIONS}:
        unknown_key(name, OPTIONS, "simulate")
    unset: dict[str, Any] = dict.fromkeys(OPTIONS)
    words = unset | dict(words)
    # 1. The policy's names, and whether its actions go through Slurm as on a cluster.
    if site is None:
        _check_together(words)
    synergy = _one_of(words["preset"], "--set preset", ("synergy",), "") == "synergy"
    names = _names(words, synergy=synergy)
    shared = names.share != "none"
    # 2. The cluster and the jobs.
    file = words["profiles"]
    given = None if file is None else read_profiles(read_file(file, "--profiles"), file)
    workload = _named("--workload", parse_workload, words["workload"], given) if words["workload"] else None
    profiles = workload.profiles if workload else given or synergy_profiles()
    lanes = integer(words["lanes"] or ("2" if names.share in TAKE_TURNS else "1"), "--lanes", 1, MAX_LANES)
    if names.through_slurm and not shared and lanes > 1:
        raise InputError("--lanes: goes with a --share other than none; without sharing the service closes them")
    queue = read_queue_rules(read_file(words["site"], "--site"), words["site"]) if words["site"] else PLAIN_QUEUE
    trace: tuple[TraceJob, ...] | None
    if site is not None:
        nodes, trace, queue = site.nodes, site.jobs, site.queue
    else:
        shape = words["nodes"] or KINDS[words["workload"].partition(":")[0]].cluster
        nodes = _named("--nodes", read_cluster, shape, lanes)
        trace = None if workload else _trace(words, profiles, queue)
        queue, nodes = _ordered(words, queue, trace or (), nodes)
        trace = trace and tuple(_of_any_type(trace, nodes))
    # 3. Time, costs and faults.
    static = trace is not None and not any(job.submit_s for job in trace)
    setup = replace(
        _setup(words, names, profiles, nodes, synergy=synergy),
        first_round_s=STATIC_FIRST_S if synergy and static else 0.0,
        lanes=lanes,
        lease_times=lanes > 1 or names.share != "preemption",
        queue=queue,
    )
    if site is not None:
        setup = replace(setup, load=site.load, backfill=site.backfill)
    # 4. The policy, with the costs of the simulation as those that it expects.
    settings = service_settings(names, setup, {name for node in nodes for name in node.partitions})
    if names.through_slurm:
        setup = replace(setup, guard=replace(guard_settings(settings), killed=False))
    rules = _policy_settings(names, setup, settings)
    policy = build(names.order, names.allocate, names.share, rules)
    _check_writable(words)
    request = Request(
        words=words,
        arguments=arguments,
        nodes=nodes,
        policy=policy,
        setup=setup,
        profiles=profiles,
        trace=trace,
        workload=workload,
        seeds=_seeds(words["seed"], workload),
        loads=read_loads(words["load_sweep"], "--set load-sweep") if words["load_sweep"] else (),
        window=setup.until_done,
        baseline=None,
        shared=("between users" if names.share_between_users else "within users") if shared and lanes > 1 else None,
        opted_in=_opted_in(words["opted_in"], trace or ()),
    )
    if not request.alone:
        warm(names.allocate)
    kind = _one_of(words["baseline"], "--set baseline", ("slurm", "strict"), "strict" if synergy else "slurm")
    if request.loads or setup.failures or (request.alone and kind == "slurm"):
        return request
    return replace(request, baseline="strict" if kind == "strict" else "slurm")


def _setup(
    words: Mapping[str, Any],
    names: Names,
    profiles: Mapping[str, Profile],
    nodes: tuple[Node, ...],
    *,
    synergy: bool,
) -> Setup:
    """Return time, costs and faults of the simulation."""
    failures, costs, interference = words["failures"], words["costs"], words["interference"]
    shared = names.share != "none"
    pairs = packing_pairs(profiles, gandiva_table1()) if shared else {}
    if interference is not None:
        pairs = read_interference(read_file(interference, "--set interference"), interference)
    priced = read_costs(read_file(costs, "--set costs"), costs) if costs else default_costs()
    checkpoint_s = words["checkpoint"] or ("0" if synergy else CHECKPOINT_S)
    return Setup(
        round_s=number(words["round"] or (SHARED_ROUND_S if shared else ROUND_S), "--set round", SHORTEST_ROUND_S, 1e9),
        costs=FREE_COSTS if synergy else priced,
        synergy=synergy,
        rounds_on_events=shared,
        until_done=_window(words["window"]),
        failures=read_failures(read_file(failures, "--set failures"), failures, nodes) if failures else (),
        interference=pairs,
        checkpoint_s=number(checkpoint_s, "--set checkpoint", most=LONGEST_S),
        place=not names.through_slurm,
        backfill=SLURM,
        phased_moves=names.through_slurm,
    )


# --- Policy ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """Names of a policy, and the conditions under which it runs."""

    order: str
    allocate: str
    share: str
    turns: str
    place: bool
    share_between_users: bool
    through_slurm: bool
    """True if moves, resizes and requests go through Slurm, as on a cluster; else they take effect at once, and the
    CPUs and memory of every node are the policy's to divide anew, as in the published simulators."""


def _names(words: Mapping[str, Any], *, synergy: bool) -> Names:
    """Return the names of the options; those that are missing are the service's defaults.

    Without sharing, and under ``--set preset=synergy``, they are the conventions of the published simulators.
    """
    share = words["share"] or ("none" if synergy else SHIPPED.policy.share)
    published = synergy or share == "none"
    through = _one_of(words["through_slurm"], "--set through-slurm", YES_NO, "no" if published else "yes") == "yes"
    if synergy and through:
        raise InputError("--set through-slurm: does not go with --set preset=synergy, where moves take no time")
    if words["place"] and not through:
        raise InputError("--set place: goes with --set through-slurm=yes; else the policy places all jobs")
    if words["turns"] and share == "none":
        raise InputError("--set turns: goes with --share timeslice or gandiva; without sharing there are no turns")
    place = SHIPPED.policy.place
    between = "yes" if SHIPPED.sharing.share_between_users or not through else "no"
    return Names(
        order=words["order"] or ("fifo" if published else SHIPPED.policy.order),
        allocate=words["allocate"] or (SHIPPED.policy.allocate if through else "cadenza"),
        share=share,
        turns=_one_of(words["turns"], "--set turns", ("fair", "order"), SHIPPED.sharing.turns),
        place=_one_of(words["place"], "--set place", YES_NO, "yes" if place or not through else "no") == "yes",
        share_between_users=_one_of(words["share_between_users"], "--set share-between-users", YES_NO, between)
        == "yes",
        through_slurm=through,
    )


def service_settings(names: Names, setup: Setup, partitions: Collection[str] = (PARTITION,)) -> Settings:
    """Return the service's settings with these names: it acts on the simulated partitions, and the rest is shipped."""
    return msgspec.convert(
        {
            "service": {"mode": "apply", "poll_s": setup.round_s},
            "guard": {"partitions": sorted(partitions)},
            "sharing": {"turns": names.turns, "share_between_users": names.share_between_users},
            "policy": {
                "order": names.order,
                "allocate": names.allocate,
                "share": names.share,
                "place": names.place,
            },
            "expert": {"move_s": setup.costs.migrate_s},
        },
        Settings,
    )


def _policy_settings(names: Names, setup: Setup, settings: Settings) -> PolicySettings:
    """Return the settings that the policy runs under; the costs that it expects are those of the simulation."""
    costs = Costs(move_s=setup.costs.migrate_s, tune_s=setup.costs.tune_s, round_s=setup.round_s)
    backfill = not (setup.synergy and names.order == "las")  # there LAS offers nothing to the rest of its queue
    live = policy_settings(settings)
    if names.through_slurm:
        return replace(live, backfill=backfill, costs=replace(live.costs, tune_s=costs.tune_s))
    sharing = PolicySettings().sharing
    return PolicySettings(
        partitions=live.partitions,
        sharing=replace(
            sharing,
            turns=live.sharing.turns,
            place=live.sharing.place,
            share_between_users=names.share_between_users,
        ),
        costs=costs,
        backfill=backfill,
        gandiva=GandivaSettings(move_s=setup.costs.migrate_s),
    )


# --- Words -----------------------------------------------------------------------------------------------


def _check_together(words: Mapping[str, Any]) -> None:
    """Raise InputError for options that miss or exclude each other."""
    empty = next((name for name, value in words.items() if value == ""), None)
    if empty is not None:
        raise InputError(f"--{empty.replace('_', '-')}: has no value")
    trace, workload = words["trace"], words["workload"]
    if bool(trace) == bool(workload):
        raise InputError("simulate: give either --trace or --workload" + (", not both" if trace else ""))
    if trace and not words["nodes"]:
        raise InputError("--nodes: is missing; say how large the cluster is, for example --nodes 4x8:24:500")
    for option, variable in (("--seed", "seed"), ("--set load-sweep", "load_sweep")):
        if trace and words[variable]:
            raise InputError(f"{option}: goes with --workload; nothing is drawn for a trace")
    if workload and words["assign"]:
        raise InputError("--set assign: goes with --trace; a workload has its own split")
    if words["load_sweep"] and workload.partition(":")[0] != "synergy":
        raise InputError("--set load-sweep: goes with --workload synergy, the one that has a load")
    if words["load_sweep"] and words["per_job"]:
        raise InputError("--per-job: does not go with --set load-sweep")
    if words["preset"] and words["costs"]:
        raise InputError("--set costs: does not go with --set preset=synergy, where nothing costs anything")


def _named(option: str, read: Any, *arguments: Any) -> Any:
    """Call a reader; its InputError begins with the option's name."""
    try:
        return read(*arguments)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def _one_of(text: str | None, option: str, names: tuple[str, ...], default: str) -> str:
    if text is not None and text not in names:
        raise InputError(f"{option}: {quoted(text)} is none of {', '.join(names)}")
    return text or default


def _opted_in(text: str | None, trace: Sequence[TraceJob]) -> float | None:
    if text is not None and not all(job.managed for job in trace):
        raise InputError("--opted-in: does not go with the trace's column 'managed'")
    return None if text is None else number(text, "--opted-in", 0.0, 1.0)


def _seeds(text: str | None, workload: Workload | None) -> tuple[int, ...]:
    if text is None:
        return (workload.seed if workload else 0,)
    seeds = tuple(integer(part.strip(), "--seed") for part in text.split(","))
    if len(set(seeds)) < len(seeds):
        raise InputError(f"--seed: {quoted(text)} names a seed twice")
    if len(seeds) > MAX_SEEDS:
        raise InputError(f"--seed: {len(seeds)} seeds are more than {MAX_SEEDS}")
    return seeds


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon:
        raise InputError(f"--set window: {quoted(text)} is not FROM:TO, for example 4000:5000")
    found = integer(first.strip(), "--set window"), integer(last.strip(), "--set window")
    if found[0] >= found[1]:
        raise InputError(f"--set window: {quoted(text)} holds no position")
    return found


def _check_writable(words: Mapping[str, Any]) -> None:
    """Raise InputError before the work where a result could not be written after it."""
    for option, variable in (("--per-job", "per_job"), ("--save", "save")):
        if words[variable]:
            path = Path(words[variable])
            if path.is_dir() or not path.parent.is_dir():
                raise InputError(f"{option}: {words[variable]!r} is not a file in a folder that exists")


# --- Files -----------------------------------------------------------------------------------------------


def read_file(path: str, option: str) -> str:
    """Return a file's text; raise InputError naming the option for one that cannot be read."""
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{option}: {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return decode(data, path)


def _ordered(
    words: Mapping[str, Any], queue: QueueRules, trace: Sequence[TraceJob], nodes: tuple[Node, ...]
) -> tuple[QueueRules, tuple[Node, ...]]:
    """Return the queue's rules with what the trace and --set weights say, and the nodes with the trace's partitions."""
    queue = with_shares(queue, {job.account: job.share for job in trace if job.share is not None})
    tiers = {job.partition: job.tier for job in trace if job.partition != PARTITION}
    queue = with_tiers(queue, tiers)
    if words["weights"] is not None:
        queue = msgspec.structs.replace(queue, weights=read_weights(words["weights"], "--set weights"))
    elif queue.weights == Weights():
        several = any(job.account or job.qos or job.nice for job in trace) or len({job.user for job in trace}) > 1
        queue = msgspec.structs.replace(queue, weights=Weights(**(USUAL_WEIGHTS if several else AGE_ALONE)))
    return queue, tuple(replace(node, partitions=(*node.partitions, *tiers)) for node in nodes) if tiers else nodes


def _of_any_type(trace: Sequence[TraceJob], nodes: Sequence[Node]) -> Iterator[TraceJob]:
    """Yield the jobs; one that takes any of several types, as a constraint a100|h100 says, may not have other nodes."""
    kinds = {node.gpu_type.casefold() for node in nodes}
    for job in trace:
        types = {name.casefold() for name in job.gpu_type.split("|")}
        if len(types) == 1:
            yield job
        elif types & kinds:
            barred = frozenset(node.name for node in nodes if node.gpu_type.casefold() not in types)
            yield replace(job, gpu_type="", barred=barred)
        else:
            raise InputError(f"job {job.id}: no node has GPUs of type {quoted(job.gpu_type)}")


def _trace(words: Mapping[str, Any], profiles: Mapping[str, Profile], queue: QueueRules) -> tuple[TraceJob, ...]:
    assign = None
    if words["assign"]:
        assign = model_mix(profiles, read_split(words["assign"], "--set assign"), "--set assign")
    jobs = read_trace(read_file(words["trace"], "--trace"), words["trace"], profiles, assign, queue)
    if not jobs:
        raise InputError(f"{words['trace']}: has no jobs")
    return jobs
