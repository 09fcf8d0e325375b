"""What ``cadenza simulate`` was asked for: its words checked and turned into jobs, nodes, a policy and a setup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from cadenza.policies.allocation.problem import Costs
from cadenza.policies.composition import Policy, PolicySettings, build
from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.cluster import MOST_LANES, PARTITION, read_cluster
from cadenza.policies.inputs.costs import FREE_COSTS, SimCosts, read_costs
from cadenza.policies.inputs.csv_table import decode, integer, number, positive, quoted, suggest
from cadenza.policies.inputs.failures import read_failures
from cadenza.policies.inputs.interference import Pairs, packing_pairs, read_interference
from cadenza.policies.inputs.model_mix import deal, read_split
from cadenza.policies.inputs.profiles import read_profiles
from cadenza.policies.inputs.published import default_costs, gandiva_table1, synergy_profiles
from cadenza.policies.inputs.trace import TraceJob, read_trace
from cadenza.policies.registry import warm
from cadenza.policies.sharing.state.settings import GandivaSettings, Turns
from cadenza.policies.simulator.load_sweep import read_loads
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.workloads.catalogue import KINDS, Workload, parse_workload

LONGEST_S = 1e11
SHORTEST_S = 1.0
"""Of a round."""
MOST_SEEDS = 1000
ROUND_S, SHARED_ROUND_S = "300", "60"
"""Synergy's round (OSDI'22) and Gandiva's time slice (OSDI'18, p. 603)."""
"""Synergy's simulator: nothing costs anything."""
STATIC_FIRST_S = 1.0
"""When Synergy's simulator has its first round if all jobs are there at the start."""


@dataclass(frozen=True)
class Request:
    """Everything that a simulation takes, and what is to be done with its result."""

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

    @property
    def json(self) -> bool:
        """Whether to print JSON."""
        return bool(self.words["json"])

    @property
    def label(self) -> str:
        """Return the simulation's name."""
        return str(self.words["label"] or self.policy.name)

    def jobs(self, seed: int, load: float | None = None) -> tuple[TraceJob, ...]:
        """Return the jobs of one run."""
        if self.workload is None:
            return self.trace or ()
        workload = self.workload
        if load is not None:
            workload = parse_workload(self.words["workload"], self.profiles, {"load": f"{load:.9g}"})
        return workload.generate(Random(seed))  # noqa: S311 (a simulation wants repeatable draws)


def read_request(words: Mapping[str, Any], arguments: tuple[str, ...]) -> Request:
    """Return what the command's words ask for; raise InputError naming the option that is wrong."""
    _check_together(words)
    shared = (words["share"] or "none") != "none"
    given = _profiles(words["profiles"])
    workload = _named("--workload", parse_workload, words["workload"], given) if words["workload"] else None
    profiles = workload.profiles if workload else given or synergy_profiles()
    lanes = integer(words["lanes"] or ("2" if shared else "1"), "--lanes", 1, MOST_LANES)
    nodes = _named("--nodes", read_cluster, words["nodes"] or KINDS[words["workload"].partition(":")[0]].cluster, lanes)
    trace = None if workload else _trace(words, profiles)
    window = _window(words["window"])
    setup = _setup(words, nodes, profiles, lanes, shared=shared, static=_is_static(trace))
    policy = _policy(words, setup)
    _check_writable(words)
    return Request(
        words=words,
        arguments=arguments,
        nodes=nodes,
        policy=policy,
        setup=setup,
        profiles=profiles,
        trace=trace,
        workload=workload,
        seeds=_seeds(words["seed"], workload),
        loads=read_loads(words["load_sweep"], "--load-sweep") if words["load_sweep"] else (),
        window=window,
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
    for option, variable in (("--seed", "seed"), ("--load-sweep", "load_sweep")):
        if trace and words[variable]:
            raise InputError(f"{option}: goes with --workload; nothing is drawn for a trace")
    if workload and words["assign"]:
        raise InputError("--assign: goes with --trace; a workload has its own split")
    if words["load_sweep"] and workload.partition(":")[0] != "synergy":
        raise InputError("--load-sweep: goes with --workload synergy, the one that has a load")
    if words["load_sweep"] and words["per_job"]:
        raise InputError("--per-job: does not go with --load-sweep")
    if words["preset"] and words["costs"]:
        raise InputError("--costs: does not go with --preset synergy, where nothing costs anything")


def _named(option: str, read: Any, *arguments: Any) -> Any:
    """Call a reader; its InputError begins with the option's name."""
    try:
        return read(*arguments)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def _one_of(text: str | None, option: str, names: tuple[str, ...], default: str) -> str:
    if text is not None and text not in names:
        raise InputError(f"{option}: {quoted(text)} is none of {', '.join(names)}; {suggest(text, names)}")
    return text or default


def _seeds(text: str | None, workload: Workload | None) -> tuple[int, ...]:
    if text is None:
        return (workload.seed if workload else 0,)
    seeds = tuple(integer(part.strip(), "--seed") for part in text.split(","))
    if len(set(seeds)) < len(seeds):
        raise InputError(f"--seed: {quoted(text)} names a seed twice")
    if len(seeds) > MOST_SEEDS:
        raise InputError(f"--seed: {len(seeds)} seeds are more than {MOST_SEEDS}")
    return seeds


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon:
        raise InputError(f"--window: {quoted(text)} is not FROM:TO, for example 4000:5000")
    found = integer(first.strip(), "--window"), integer(last.strip(), "--window")
    if found[0] >= found[1]:
        raise InputError(f"--window: {quoted(text)} holds no position")
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


def _profiles(path: str | None) -> dict[str, Profile] | None:
    return None if path is None else read_profiles(read_file(path, "--profiles"), path)


def _trace(words: Mapping[str, Any], profiles: Mapping[str, Profile]) -> tuple[TraceJob, ...]:
    assign = None
    if words["assign"]:
        assign = deal(profiles, read_split(words["assign"], "--assign"), "--assign")
    jobs = read_trace(read_file(words["trace"], "--trace"), words["trace"], profiles, assign)
    if not jobs:
        raise InputError(f"{words['trace']}: has no jobs")
    return jobs


def _is_static(trace: tuple[TraceJob, ...] | None) -> bool:
    return trace is not None and not any(job.submit_s for job in trace)


# --- Setup and policy ------------------------------------------------------------------------------------


def _setup(
    words: Mapping[str, Any],
    nodes: tuple[Node, ...],
    profiles: Mapping[str, Profile],
    lanes: int,
    *,
    shared: bool,
    static: bool,
) -> Setup:
    """Return how to run."""
    synergy = _one_of(words["preset"], "--preset", ("synergy",), "") == "synergy"
    events = _one_of(words["events"], "--events", ("yes", "no"), "yes" if shared else "no") == "yes"
    failures = words["failures"]
    return Setup(
        round_s=number(words["round"] or (SHARED_ROUND_S if shared else ROUND_S), "--round", SHORTEST_S, 1e9),
        first_round_s=STATIC_FIRST_S if synergy and static else 0.0,
        costs=_costs(words["costs"], synergy=synergy),
        synergy=synergy,
        lanes=lanes,
        rounds_on_events=events,
        horizon_s=positive(words["horizon"], "--horizon", LONGEST_S) if words["horizon"] else None,
        until_done=_window(words["window"]),
        failures=read_failures(read_file(failures, "--failures"), failures, nodes) if failures else (),
        interference=_interference(words["interference"], profiles, shared=shared),
        checkpoint_s=number(words["checkpoint"] or "0", "--checkpoint", most=LONGEST_S),
    )


def _costs(path: str | None, *, synergy: bool) -> SimCosts:
    if synergy:
        return FREE_COSTS
    return default_costs() if path is None else read_costs(read_file(path, "--costs"), path)


def _interference(path: str | None, profiles: Mapping[str, Profile], *, shared: bool) -> Pairs:
    if path is not None:
        return read_interference(read_file(path, "--interference"), path)
    return packing_pairs(profiles, gandiva_table1()) if shared else {}


def _policy(words: Mapping[str, Any], setup: Setup) -> Policy:
    """Return the policy; what it thinks moves cost is what they cost here."""
    order = words["order"] or "fifo"
    usual = "no" if setup.synergy and order == "las" else "yes"  # there LAS offers nothing to the rest of its queue
    backfill = _one_of(words["backfill"], "--backfill", ("yes", "no"), usual) == "yes"
    settings = PolicySettings(
        partitions=frozenset({PARTITION}),
        sharing=replace(PolicySettings().sharing, turns=_turns(words)),
        costs=Costs(move_s=setup.costs.migrate_s, tune_s=setup.costs.tune_s, round_s=setup.round_s),
        backfill=backfill,
        gandiva=GandivaSettings(move_s=setup.costs.migrate_s),
    )
    allocate = words["allocate"] or "cadenza"
    policy = build(order, allocate, words["share"] or "none", settings)
    warm(allocate)
    return policy


def _turns(words: Mapping[str, Any]) -> Turns:
    if words["turns"] and (words["share"] or "none") == "none":
        raise InputError("--turns: goes with --share timeslice or gandiva; without sharing nobody takes turns")
    return "order" if _one_of(words["turns"], "--turns", ("fair", "order"), "fair") == "order" else "fair"
