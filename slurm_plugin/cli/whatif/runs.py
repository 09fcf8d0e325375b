"""Runs of a what-if: the past as it was, Slurm alone, and Cadenza as it ships."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.core.text import printable
from cadenza.policies.inputs.cluster import MAX_LANES, read_cluster
from cadenza.policies.inputs.csv_table import integer, number, quoted
from cadenza.policies.simulator.figures import Summary, summarize
from cadenza.policies.simulator.result_file import Saved, encode, save_run
from cadenza.policies.simulator.shareable import Unshareable
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.common import moment, say
from cadenza.slurm_plugin.cli.simulate.command import VARIABLES
from cadenza.slurm_plugin.cli.simulate.request import Site, read_file
from cadenza.slurm_plugin.cli.whatif.cluster_nodes import Hosts, read_hosts, with_lanes
from cadenza.slurm_plugin.cli.whatif.history import NO_FEATURES, History, as_it_was, read_history
from cadenza.slurm_plugin.cli.whatif.job_records import JobRecords, read_job_records
from cadenza.slurm_plugin.cli.whatif.run_pool import Task, estimate_s, run_tasks
from cadenza.slurm_plugin.cli.whatif.site_answers import SiteFacts, read_site
from cadenza.slurm_plugin.gateway.errors import GatewayError
from cadenza.slurm_plugin.gateway.slurm_gateway import answer_of, json_of
from cadenza.slurm_plugin.report.loader import load
from cadenza.slurm_plugin.report.page_model import Loaded
from cadenza.slurm_plugin.report.units import NARROW, about

AS_IT_WAS, SLURM = "as it was", "slurm"
TIMEOUT_S = 600.0
HISTORY_OPTIONS = ("sacct", "since", "nodes", "partition", "sample", "opted_in")
ASKED = (
    (answer_of, ("scontrol", "show", "config")), (json_of, ("scontrol", "show", "partition")),
    (json_of, ("sacctmgr", "show", "assoc")), (json_of, ("sacctmgr", "show", "qos")),
)  # fmt: skip
"""Commands that tell a cluster's rules."""
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
    easy: Summary
    """The same jobs in the order of submission, with one reservation."""
    remarks: tuple[str, ...] = ()
    """Sentences ahead of those on the runs."""
    site_notes: tuple[str, ...] = ()
    """Sentences on rules of the site that are not known, or not simulated."""

    def starts(self, label: str) -> dict[int, float | None]:
        """Return the first start of each job in one of the results, seconds."""
        jobs = next(file for file in self.results if file.label == label).runs[0].jobs
        return {job.id: job.start_s for job in jobs}


@dataclass(frozen=True)
class Plan:
    """The runs of a what-if."""

    movable: tuple[float, ...] = (0.0, 0.5)
    """Fractions of the jobs that opted in which can move; a run for each."""
    opted_in: float = 1.0
    """Fraction of the jobs that opt in."""
    site: SiteFacts = field(default_factory=SiteFacts)
    lanes: int = 1
    more: tuple[str, ...] = ()
    partition: str | None = None
    quiet: bool = True
    command: str = "whatif"
    arguments: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def label(self, part: float) -> str:
        """Return the name of the run in which a part of those that opted in can move."""
        if self.opted_in < 1.0:
            return f"cadenza, {100 * self.opted_in:.0f} % opted in, {100 * part:.0f} % of them can move"
        return f"cadenza, {100 * part:.0f} % can move"


class Variant(NamedTuple):
    """One simulation: its label, the part of the jobs that can move, the nodes, and options of ``cadenza simulate``."""

    label: str
    movable: float
    nodes: tuple[Node, ...]
    options: Mapping[str, str]


def run_whatif(words: Mapping[str, Any]) -> WhatIf:
    """Read the accounting and the nodes, and run the simulations; raise InputError, or an error of the gateway."""
    lanes = integer(words["lanes"], "--lanes", 1, MAX_LANES)
    opted_in = number(words["opted_in"], "--opted-in", 0, 1) if words["opted_in"] is not None else 1.0
    sample = number(words["sample"], "--sample", MIN_SAMPLE, 1) if words["sample"] is not None else None
    movable, more = _parts(words["movable"]), _one_more(words["more"], lanes)
    accounting, source = _accounting(words)
    records = read_job_records(accounting, source)
    hosts, site = _nodes(words, frozenset().union(*{run.nodes for run in records.runs if run.gpus})), _site(words)
    plan = Plan(
        movable, opted_in, replace(site, notes=(*hosts.notes, *site.notes)), lanes, more, words["partition"],
        quiet=words["quiet"],
        arguments=(
            *(f"--{name.replace('_', '-')}={words[name]}" for name in HISTORY_OPTIONS if words[name]),
            *(f"--site={file}" for file in words["site"]),
        ),
    )  # fmt: skip
    return run_plan(plan, records, with_lanes(hosts.nodes, lanes), source, sample, hosts.features)


def run_plan(
    plan: Plan, records: JobRecords, nodes: tuple[Node, ...], source: str, sample: float | None = None,
    features: Mapping[str, frozenset[str]] = NO_FEATURES,
) -> WhatIf:  # fmt: skip
    """Run the simulations; raise InputError where no job is left, or jobs and nodes do not go together.

    ``source``: name of the records in messages; ``sample``: part of the jobs; ``features``: of the nodes.
    """
    movable, lanes, arguments, site = plan.movable, plan.lanes, plan.arguments, plan.site
    # 1. The past as it was.
    if not nodes:
        raise InputError(f"no host is left to simulate: {' '.join(site.notes)}")
    history = read_history(records, nodes, plan.partition, site.queue, features)
    if sample is not None:
        history = history.sample(sample)
    if not history.jobs:
        counts = "; ".join(f"{count} {reason}" for reason, count in history.left_out.most_common())
        first = f"; the first: {records.example}" if records.example else ""
        without = records.runs and not any(run.gpus for run in records.runs)
        hint = "; the accounting has no gres/gpu: is it in Slurm's AccountingStorageTRES?" if without else ""
        raise InputError(f"{source}: no job is left to simulate" + (f": {counts}{first}{hint}" if counts else ""))
    past = as_it_was(history, nodes)
    summaries = [summarize(past)]
    known = {key: value for key, value in asdict(summaries[0]).items() if key not in NOT_IN_ACCOUNTING}
    it_was = Saved(AS_IT_WAS, arguments, past.gpus, past.cpus, (save_run(past, None, known),))
    files = [load(encode(it_was), source)]
    # 2. Slurm alone, and Cadenza with each part of movable jobs.
    variants = [
        Variant(SLURM, 0.0, nodes, {"share": "none"}),
        *(Variant(plan.label(part), part, nodes, {"lanes": str(lanes)}) for part in movable),
        *(_more(name, plan, nodes) for name in plan.more),
    ]

    def tasks(jobs: History) -> list[Task]:
        options, load = dict.fromkeys(VARIABLES) | {"quiet": plan.quiet}, jobs.load_trace()
        if plan.opted_in < 1.0:
            options["opted_in"] = str(plan.opted_in)
        return [
            Task(
                {**options, **one.options, "label": one.label},
                arguments,
                Site(jobs.trace(one.movable), one.nodes, load, site.queue, site.backfill),
            )
            for one in variants
        ]

    if len(history.jobs) > LARGE_JOBS:
        low_s, high_s, timed = estimate_s(
            lambda count: tasks(history.consecutive((len(history.jobs) - count) // 2, count)), len(history.jobs)
        )
        line = f"{len(history.jobs):,} jobs: {about(low_s)} to {about(high_s)}, estimated from {timed:,} of them"
        say(line.replace(NARROW, " "), err=True)
    unshareable, easy = None, summaries[0]
    for variant, outcome in zip(variants, run_tasks(tasks(history), quiet=plan.quiet), strict=True):
        files.append(replace(load(outcome.saved, source), label=variant.label))
        summaries.append(outcome.summary)
        unshareable, easy = unshareable or outcome.unshareable, outcome.easy or easy
    results = tuple(replace(file, command=plan.command) for file in files)
    return WhatIf(
        history, nodes, results, tuple(summaries), unshareable, plan.label(movable[-1]), len(plan.more), easy,
        plan.remarks, (*site.notes, *history.notes, *_unknown(records)),
    )  # fmt: skip


def _unknown(records: JobRecords) -> Iterator[str]:
    """Yield sentences on what the accounting does not tell of any job."""
    runs = [run for run in records.runs if run.gpus]
    for name, told in (("account", any(run.account for run in runs)), ("QOS", any(run.qos for run in runs))):
        if not told:
            yield f"The accounting does not name the jobs' {name}: all have the same."


def _parts(text: str) -> tuple[float, ...]:
    """Return the fractions of movable jobs, each once."""
    parts = tuple(dict.fromkeys(number(part.strip(), "--movable", 0, 1) for part in text.split(",")))
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


def _more(name: str, plan: Plan, nodes: tuple[Node, ...]) -> Variant:
    """Return the run on a cluster with one more lane, or with twice the memory."""
    part, lanes = plan.movable[-1], plan.lanes
    if name == LANE:
        lanes += 1
        return Variant(f"{plan.label(part)}, {lanes} lanes", part, with_lanes(nodes, lanes), {"lanes": str(lanes)})
    larger = tuple(replace(node, memory_mb=2 * node.memory_mb) for node in nodes)
    return Variant(f"{plan.label(part)}, twice the memory", part, larger, {"lanes": str(lanes)})


def _accounting(words: Mapping[str, Any]) -> tuple[str, str]:
    """Return the accounting and its name in messages."""
    sacct, since = words["sacct"], words["since"]
    if bool(sacct) == bool(since):
        raise InputError("whatif: give either --sacct FILE, or --since WHEN on a cluster")
    if sacct:
        return read_file(sacct, "--sacct"), str(sacct)
    begin = datetime.fromtimestamp(moment(since, SystemClock().now(), "--since"), UTC).astimezone()
    start = begin.strftime("%FT%T")
    return json_of(("sacct", "--allusers", "--duplicates", "--starttime", start), TIMEOUT_S), "sacct"


def _site(words: Mapping[str, Any]) -> SiteFacts:
    """Return the rules of the site: from files, or on its cluster from Slurm itself."""
    if words["site"] or not words["since"]:
        return read_site((read_file(file, "--site"), file) for file in words["site"])
    return ask_site()


def ask_site() -> SiteFacts:
    """Return the rules of this cluster's Slurm, as far as it answers."""
    answers, notes = [], []
    for ask, command in ASKED:
        try:
            answer = ask(command, TIMEOUT_S), " ".join(command)
            read_site([answer])
            answers.append(answer)
        except (GatewayError, InputError) as error:
            notes.append(f"{printable(str(error), 200)}.")
    site = read_site(answers)
    return replace(site, notes=(*notes, *site.notes))


def _nodes(words: Mapping[str, Any], used: frozenset[str]) -> Hosts:
    """Return the hosts, of which jobs of the past ``used`` some; a text is their shape, or the name of a file."""
    text = words["nodes"]
    if text is None and words["since"]:
        return read_hosts(json_of(("scontrol", "show", "node"), TIMEOUT_S), "scontrol", words["partition"], used)
    if text is None:
        raise InputError("--nodes: is missing; a file of scontrol show node --json, or a shape such as 4x8:24:500")
    if Path(text).is_file():
        return read_hosts(read_file(text, "--nodes"), text, words["partition"], used)
    try:
        return Hosts(read_cluster(text))
    except InputError as error:
        raise InputError(f"--nodes: {quoted(text)} is no file, and {error}") from None
