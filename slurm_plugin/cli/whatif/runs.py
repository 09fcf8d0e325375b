"""Runs of a what-if: the past as it was, Slurm alone, and Cadenza as it ships."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.inputs.cluster import MAX_LANES, read_cluster
from cadenza.policies.inputs.csv_table import integer, number, quoted
from cadenza.policies.simulator.figures import Summary, summarize
from cadenza.policies.simulator.result_file import Saved, encode, save_run
from cadenza.policies.simulator.shareable import Unshareable
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.common import moment, say
from cadenza.slurm_plugin.cli.simulate.command import VARIABLES
from cadenza.slurm_plugin.cli.simulate.request import Site, read_file
from cadenza.slurm_plugin.cli.whatif.cluster_nodes import read_nodes, with_lanes
from cadenza.slurm_plugin.cli.whatif.history import History, as_it_was, read_history
from cadenza.slurm_plugin.cli.whatif.job_records import JobRecord, read_job_records
from cadenza.slurm_plugin.cli.whatif.run_pool import Task, estimate_s, run_tasks
from cadenza.slurm_plugin.gateway.slurm_gateway import answer_of
from cadenza.slurm_plugin.report.loader import load
from cadenza.slurm_plugin.report.page_model import Loaded
from cadenza.slurm_plugin.report.units import NARROW, about

AS_IT_WAS, SLURM = "as it was", "slurm"
TIMEOUT_S = 600.0
HISTORY_OPTIONS = ("sacct", "since", "nodes", "partition", "sample")
MAX_RUNS = 5
LANE, MEMORY = MORE = ("lane", "memory")
MIN_SAMPLE = 0.001
LARGE_JOBS = 5_000
"""Number of jobs above which a run says how long it will take."""
NOT_IN_ACCOUNTING = ("idle_waiting_gpus", "cpu_utilization", "decision_ms", "decisions", "rounds", "wall_s", "gpu_busy")
"""Figures of a simulation that the accounting of a cluster does not have."""


@dataclass(frozen=True)
class WhatIf:
    """The history, and its results: as it was, Slurm alone, and Cadenza for each part of movable jobs."""

    history: History
    nodes: tuple[Node, ...]
    results: tuple[Loaded, ...]
    summaries: tuple[Summary, ...]
    unshareable: Unshareable | None
    last: str
    """Label of the run with the last part of movable jobs."""
    more: int
    """Number of runs after that one, each on a cluster with more of something."""
    remarks: tuple[str, ...] = ()
    """Sentences ahead of those on the runs."""


@dataclass(frozen=True)
class Plan:
    """The runs of a what-if."""

    movable: tuple[float, ...] = (0.0, 0.5)
    """Fractions of the jobs that can move; a run for each."""
    lanes: int = 1
    more: tuple[str, ...] = ()
    partition: str | None = None
    quiet: bool = True
    command: str = "whatif"
    arguments: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class Variant(NamedTuple):
    """One simulation: its label, the part of the jobs that can move, the nodes, and options of ``cadenza simulate``."""

    label: str
    movable: float
    nodes: tuple[Node, ...]
    options: Mapping[str, str]


def run_whatif(words: Mapping[str, Any]) -> WhatIf:
    """Read the accounting and the nodes, and run the simulations; raise InputError, or an error of the gateway."""
    lanes = integer(words["lanes"], "--lanes", 1, MAX_LANES)
    plan = Plan(
        _parts(words["movable"]), lanes, _one_more(words["more"], lanes), words["partition"], quiet=words["quiet"],
        arguments=tuple(f"--{name}={words[name]}" for name in HISTORY_OPTIONS if words[name]),
    )  # fmt: skip
    accounting, source = _accounting(words)
    nodes = _nodes(words, lanes)
    sample = number(words["sample"], "--sample", MIN_SAMPLE, 1) if words["sample"] is not None else None
    return run_plan(plan, read_job_records(accounting, source), nodes, source, sample)


def run_plan(
    plan: Plan, records: Sequence[JobRecord], nodes: tuple[Node, ...], source: str, sample: float | None = None
) -> WhatIf:
    """Run the simulations; raise InputError where no job is left, or jobs and nodes do not go together.

    ``source``: name of the records in messages; ``sample``: part of the jobs.
    """
    movable, lanes, arguments = plan.movable, plan.lanes, plan.arguments
    # 1. The past as it was.
    history = read_history(records, nodes, plan.partition)
    if sample is not None:
        history = history.sample(sample)
    if not history.jobs:
        counts = "; ".join(f"{count} {reason}" for reason, count in history.left_out.most_common())
        raise InputError(f"{source}: no job is left to simulate" + (f": {counts}" if counts else ""))
    past = as_it_was(history, nodes)
    summaries = [summarize(past)]
    known = {key: value for key, value in asdict(summaries[0]).items() if key not in NOT_IN_ACCOUNTING}
    it_was = Saved(AS_IT_WAS, arguments, past.gpus, past.cpus, (save_run(past, None, known),))
    files = [load(encode(it_was), source)]
    # 2. Slurm alone, and Cadenza with each part of movable jobs.
    variants = [
        Variant(SLURM, 0.0, nodes, {"share": "none"}),
        *(Variant(_label(part), part, nodes, {"lanes": str(lanes)}) for part in movable),
        *(_more(name, movable[-1], nodes, lanes) for name in plan.more),
    ]

    def tasks(jobs: History) -> list[Task]:
        options, load = dict.fromkeys(VARIABLES) | {"quiet": plan.quiet}, jobs.load_trace()
        return [
            Task(
                {**options, **one.options, "label": one.label},
                arguments,
                Site(jobs.trace(one.movable), one.nodes, load),
            )
            for one in variants
        ]

    if len(history.jobs) > LARGE_JOBS:
        low_s, high_s, timed = estimate_s(
            lambda count: tasks(history.consecutive((len(history.jobs) - count) // 2, count)), len(history.jobs)
        )
        line = f"{len(history.jobs):,} jobs: {about(low_s)} to {about(high_s)}, estimated from {timed:,} of them"
        say(line.replace(NARROW, " "), err=True)
    unshareable = None
    for variant, outcome in zip(variants, run_tasks(tasks(history), quiet=plan.quiet), strict=True):
        files.append(replace(load(outcome.saved, source), label=variant.label))
        summaries.append(outcome.summary)
        unshareable = unshareable or outcome.unshareable
    results = tuple(replace(file, command=plan.command) for file in files)
    last = _label(movable[-1])
    return WhatIf(history, nodes, results, tuple(summaries), unshareable, last, len(plan.more), plan.remarks)


def _parts(text: str) -> tuple[float, ...]:
    """Return the fractions of movable jobs, each once."""
    parts = tuple(dict.fromkeys(number(part.strip(), "--movable", 0, 100) / 100 for part in text.split(",")))
    if len(parts) > MAX_RUNS:
        raise InputError(f"--movable: {len(parts)} parts are more than {MAX_RUNS}")
    return parts


def _one_more(text: str | None, lanes: int) -> tuple[str, ...]:
    """Return the names in --more, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()
    for name in names:
        if name not in MORE:
            raise InputError(f"--more: {quoted(name)} is not {' or '.join(MORE)}")
    if LANE in names and lanes == MAX_LANES:
        raise InputError(f"--more: {lanes} lanes are the most there can be")
    return names


def _label(part: float) -> str:
    return f"cadenza, {100 * part:.0f} % can move"


def _more(name: str, part: float, nodes: tuple[Node, ...], lanes: int) -> Variant:
    """Return the run on a cluster with one more lane, or with twice the memory."""
    if name == LANE:
        lanes += 1
        return Variant(f"{_label(part)}, {lanes} lanes", part, with_lanes(nodes, lanes), {"lanes": str(lanes)})
    larger = tuple(replace(node, memory_mb=2 * node.memory_mb) for node in nodes)
    return Variant(f"{_label(part)}, twice the memory", part, larger, {"lanes": str(lanes)})


def _accounting(words: Mapping[str, Any]) -> tuple[str, str]:
    """Return the accounting and its name in messages."""
    sacct, since = words["sacct"], words["since"]
    if bool(sacct) == bool(since):
        raise InputError("whatif: give either --sacct FILE, or --since WHEN on a cluster")
    if sacct:
        return read_file(sacct, "--sacct"), str(sacct)
    begin = datetime.fromtimestamp(moment(since, SystemClock().now(), "--since"), UTC).astimezone()
    start = begin.strftime("%FT%T")
    return answer_of(("sacct", "--allusers", "--duplicates", "--json", "--starttime", start), TIMEOUT_S), "sacct"


def _nodes(words: Mapping[str, Any], lanes: int) -> tuple[Node, ...]:
    """Return the nodes; a text is their shape, or the name of a file where such a file is there."""
    text = words["nodes"]
    if text is None and words["since"]:
        return read_nodes(
            answer_of(("scontrol", "show", "node", "--json"), TIMEOUT_S), "scontrol", lanes, words["partition"]
        )
    if text is None:
        raise InputError("--nodes: is missing; a file of scontrol show node --json, or a shape such as 4x8:24:500")
    if Path(text).is_file():
        return read_nodes(read_file(text, "--nodes"), text, lanes, words["partition"])
    try:
        return read_cluster(text, lanes)
    except InputError as error:
        raise InputError(f"--nodes: {quoted(text)} is no file, and {error}") from None
