"""``cadenza profile run``: measure one command, or two that share a GPU."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.interference import read_interference
from cadenza.policies.inputs.profiles import check, write_profiles
from cadenza.profiler.measure.environment import data_of, model_of, parse_list, parse_node, this_node
from cadenza.profiler.measure.finished_points import State, write
from cadenza.profiler.measure.gpu_use import kind
from cadenza.profiler.measure.offline_run import Offline, Request
from cadenza.profiler.measure.pairs import COLUMNS, Side, measure
from cadenza.profiler.measure.point import Point, Rule
from cadenza.profiler.plot import png, require
from cadenza.profiler.profile_builder import Finding, Subject, conclude, sbatch, words
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.common import console, emit, json_option, say
from cadenza.slurm_plugin.cli.keys import Key, KeyedCommand
from cadenza.slurm_plugin.cli.profile.show import finding_table, report

KEYS = {
    "Keys of --set: the data": (
        Key("samples", "N", "Samples in the dataset.", click.IntRange(1)),
        Key("steps-per-epoch", "N", "Steps that read the dataset once.", click.IntRange(1)),
        Key("storage-mb-s", "MB/s", "Speed of its storage; else it is measured.", click.FloatRange(0, min_open=True)),
        Key("memory", "LIST", "Cache sizes in GB to measure too, to check the computed ones."),
    ),
    "Keys of --set: the job": (
        Key("task", "CLASS", "Class of the model: image, language, speech …."),
        Key("node", "G:C:GB", "Server whose proportional share has speed 1; else this machine."),
        Key("gpus", "N", "GPUs of the job here; else the number of its ranks.", click.IntRange(1)),
        Key("gpu", "TYPE", "GPU type; else the one that NVML reports."),
    ),
    "Keys of --set: the measurement": (
        Key("within", "PERCENT", "Wanted accuracy: half the 95 % interval.", click.FLOAT, 2.0),
        Key("point-s", "SECONDS", "Longest measurement of a point.", click.FLOAT, 60.0),
        Key("restart", "yes|no", "Start the command again for each point, in place of changing its CPUs.", click.BOOL),
        Key("turns", "N", "Visits to each point.", click.IntRange(1), 1),
        Key("beside", "COMMAND", "Measure both, alone and on one GPU, for packing: a row for --out, else pairs.csv."),
    ),
}


def end_on_sigterm() -> None:
    """End this process on SIGTERM by an exception, so that everything it has started ends too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


# --- run -----------------------------------------------------------------------------------------------------


@click.command(
    "run",
    cls=KeyedCommand,
    keys=KEYS,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", metavar="-- COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--cpus", default="auto", show_default=True, metavar="LIST", help="CPUs to measure, such as 1,2,4.")
@click.option("--dataset", type=click.Path(path_type=Path, exists=True), help="Files that the job reads.")
@click.option("--model", metavar="NAME", help="Name of the profile (default: the script's).")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Profile to write (default: profile.json).")
@click.option("--png", type=click.Path(path_type=Path), help="Draw the sensitivity too, as a PNG file.")
@click.option("--resume", is_flag=True, help="Keep the finished points of an interrupted profile.")
@json_option
def run(**words: Any) -> None:
    """Measure a training command: `cadenza profile run -- python train.py`.

    Cadenza starts the command, measures it and ends it, so let it train long enough. The finished points and the
    command's output (.log) are kept next to the profile.
    """
    options = SimpleNamespace(**words)
    if options.words[0].startswith("-") and options.words[0] != "--":
        raise InputError(f"no option {options.words[0]}: see cadenza profile run --help; the command comes after --")
    if options.png is not None:
        require()
    end_on_sigterm()
    command = options.words[1:] if options.words[0] == "--" else options.words
    if options.beside is not None:
        _pair(options, command)
        return
    options.out = options.out or Path("profile.json")
    session = _session(options, command)
    try:
        state = session.run()
        finding = _conclude(options, session, state)
    finally:
        session.close()
    _write(options, finding, state)
    _print(options, finding, state)


def _session(options: SimpleNamespace, command: tuple[str, ...]) -> Offline:
    """Return the measurement that the options ask for; raise InputError for a wrong option."""

    def report_point(point: Point) -> None:
        say(
            f"{point.cpus:g} CPUs: {point.iteration_s * 1000:.1f} ms a step ±{point.half_s / point.iteration_s:.1%}"
            f" ({point.steps} steps, {point.spent_s:.0f} s)",
            err=True,
        )

    node = parse_node(options.node) if options.node else None
    request = Request(
        words=command,
        out=options.out,
        cpus=() if options.cpus == "auto" else parse_list(options.cpus, "--cpus"),
        share=node.cpus / node.gpus if node else None,
        gpus=options.gpus,
        restart=bool(options.restart),
        resume=options.resume,
        cache_gb=parse_list(options.memory, "--set memory") if options.memory else (),
        turns=options.turns,
        rule=_rule(options),
    )
    return Offline(request, SystemClock(), report_point)


def _rule(options: SimpleNamespace) -> Rule:

    return Rule(within=options.within / 100, most_s=options.point_s)


def _conclude(options: SimpleNamespace, session: Offline, state: State) -> Finding:
    """Return the profile that follows from the measured points."""
    node = parse_node(options.node) if options.node else this_node(session.gpus)
    dataset = options.dataset
    if options.storage_mb_s is not None:
        state.bandwidth["storage_mb_s"] = options.storage_mb_s
    data = data_of(state, dataset, options.samples, options.steps_per_epoch, SystemClock()) if dataset else None
    gpu = kind() if options.gpu is None else options.gpu
    subject = Subject(options.model or model_of(options.words), session.gpus, node, gpu, options.task or "", data)
    return conclude(state, session.grid, subject)


def _write(options: SimpleNamespace, finding: Finding, state: State) -> None:
    """Write the profile and, with --png, its drawing."""
    check(finding.profile, str(options.out))
    points = ", ".join(f"{cpus:g}" for cpus in sorted(finding.times))
    note = f"measured on {state.host} at {points} CPUs for each GPU; {finding.law_text}"
    write(options.out, write_profiles({finding.profile.model: finding.profile}, note=note).encode())
    if options.png is not None:
        write(options.png, png(finding))


def _print(options: SimpleNamespace, finding: Finding, state: State) -> None:
    """Print the table, the lines for the batch script and the gain, or all of it as JSON."""
    if options.as_json:
        emit("cadenza.profile-run/1", report(finding, state, str(options.out)))
        return
    out = console()
    out.print(finding_table(finding, state))
    out.print(finding.law_text)
    for gb, seconds in state.memory.items():
        computed = finding.cached_s(float(gb))
        expected = f", computed {computed * 1000:.1f} ms ({computed / seconds - 1:+.1%})" if computed else ""
        out.print(f"{gb} GB of cache: measured {seconds * 1000:.1f} ms a step{expected}")
    for note in finding.notes:
        out.print(f"note: {note}")
    out.print("\n" + "\n".join(sbatch(finding)) + "\n")
    out.print(words(finding))
    say(f"written: {options.out}" + (f", {options.png}" if options.png else ""))


# --- pair ----------------------------------------------------------------------------------------------------


def _pair(options: SimpleNamespace, words: tuple[str, ...]) -> None:
    """Measure the command and another one on the same GPU and CPUs: each alone, then both together."""
    out = options.out or Path("pairs.csv")
    both = [words, tuple(shlex.split(options.beside))]
    sides = [Side(name, one) for name, one in zip(_names(options.model, both), both, strict=True)]
    rows = _other_rows(out, sides[0].model, sides[1].model)
    result = measure(sides, out.with_suffix(".log"), SystemClock(), _rule(options))
    write(out, "\n".join([*rows, result.row(), ""]).encode())
    if options.as_json:
        found = {**result._asdict(), "speeds": result.speeds, "gain": result.gain, "written": str(out)}
        emit("cadenza.profile-pair/1", found)
        return
    for name, speed, alone, both_s in zip(result[:2], result.speeds, result.alone_s, result.together_s, strict=True):
        times = f"{alone * 1000:.1f} ms a step alone, {both_s * 1000:.1f} ms together"
        say(f"{name}: {times} ({speed:.0%} of its speed)")
    verdict = "packing pays" if result.gain > 1 else "taking turns is better"
    say(f"together {result.gain:.2f}x the throughput of taking turns: {verdict}", f"written: {out}")


def _names(models: str | None, both: list[tuple[str, ...]]) -> list[str]:
    """Return the two models' names; raise InputError unless there are two commands and two names."""
    if not all(both):
        raise InputError("--set beside: has no command")
    names = models.split(",") if models else [model_of(words) for words in both]
    if len(names) != 2 or not all(names):  # noqa: PLR2004
        raise InputError(f"--model {models!r}: with --set beside it must be two names with a comma between them")
    return names


def _other_rows(out: Path, first: str, second: str) -> list[str]:
    """Return the file's lines without those of this pair; raise InputError, before anything runs, for another file."""
    try:
        text = out.read_text(encoding="utf-8") if out.exists() else COLUMNS
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{out}: cannot be read: {error}") from None
    read_interference(text, str(out))
    lines = text.splitlines()
    if lines[0] != COLUMNS:
        raise InputError(f"{out}: its first line must be {COLUMNS}, in this order, to add rows")
    return [line for line in lines if line.split(",")[:2] not in ([first, second], [second, first])]
