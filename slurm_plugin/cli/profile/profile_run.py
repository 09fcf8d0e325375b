"""``cadenza profile run -- CMD…``: measures a command, writes its profile, and says what to ask Slurm for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from cadenza.slurm_plugin.cli.common import console, emit, json_option
from cadenza.slurm_plugin.cli.profile.command import end_on_sigterm

if TYPE_CHECKING:
    from cadenza.policies.core.profile import Reference
    from cadenza.profiler.measure.finished_points import State
    from cadenza.profiler.measure.offline_run import Offline, Request
    from cadenza.profiler.measure.point import Point
    from cadenza.profiler.profile_builder import Finding


class Wish(NamedTuple):
    """The options, as they were given."""

    words: tuple[str, ...]
    cpus: str
    memory: str | None
    dataset: Path | None
    samples: int | None
    steps_per_epoch: int | None
    storage_mb_s: float | None
    model: str | None
    task: str
    node: str | None
    gpus: int | None
    gpu: str | None
    restart: bool
    within: float
    point_s: float
    turns: int
    out: Path
    png: Path | None
    resume: bool
    as_json: bool


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", metavar="-- COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--cpus", default="auto", show_default=True, metavar="LIST", help="CPUs to choose from, as 1,2,4.")
@click.option("--memory", metavar="LIST", help="Caches in GB to measure with as well, to check the computed axis.")
@click.option("--dataset", type=click.Path(path_type=Path, exists=True), help="Files that the job reads.")
@click.option("--samples", type=click.IntRange(1), help="Samples in the dataset.")
@click.option("--steps-per-epoch", type=click.IntRange(1), help="Steps in which the dataset is read once.")
@click.option("--storage-mb-s", type=click.FloatRange(0, min_open=True), help="Its storage's MB/s (default: measured).")
@click.option("--model", metavar="NAME", help="Name of the profile (default: the script's).")
@click.option("--task", default="", metavar="CLASS", help="Class of the model: image, language, speech ….")
@click.option("--node", metavar="G:C:GB", help="Server whose proportional share counts as 1 (default: this machine).")
@click.option("--gpus", type=click.IntRange(1), help="GPUs of the job here (default: as many as ranks attach).")
@click.option("--gpu", metavar="TYPE", help="GPU type (default: what NVML says).")
@click.option("--restart", is_flag=True, help="Start the command anew for each point instead of changing it in place.")
@click.option("--within", default=2.0, show_default=True, help="Half of the 95 % interval, per cent of the mean.")
@click.option("--point-s", default=60.0, show_default=True, help="Most seconds for a point.")
@click.option("--turns", default=1, show_default=True, type=click.IntRange(1), help="Visits of each point.")
@click.option("-o", "--out", default="profile.json", show_default=True, type=click.Path(path_type=Path))
@click.option("--png", type=click.Path(path_type=Path), help="Draw the sensitivity as well.")
@click.option("--resume", is_flag=True, help="Keep the points that an interrupted profile has finished.")
@json_option
def command(**options: Any) -> None:
    """Measure a training command: `cadenza profile run -- python train.py`.

    The command is started, measured and ended; let it train for long. Points that are finished are kept beside the
    profile, and what the command prints in a .log there.
    """
    from cadenza.profiler.plot import require  # noqa: PLC0415 (slow, like all below)

    wish = Wish(**options)
    if wish.png is not None:
        require()
    end_on_sigterm()
    offline = _offline(wish)
    try:
        state = offline.run()
        finding = _conclude(wish, offline, state)
    finally:
        offline.close()
    _write(wish, finding, state)
    _tell(wish, finding, state)


def _offline(wish: Wish) -> Offline:
    """Return what measures."""
    from cadenza.profiler.measure.offline_run import Offline  # noqa: PLC0415
    from cadenza.sidecar.clock import SystemClock  # noqa: PLC0415

    def tell(point: Point) -> None:
        click.echo(
            f"{point.cpus:g} CPUs: {point.iteration_s * 1000:.1f} ms a step ±{point.half_s / point.iteration_s:.1%}"
            f" ({point.steps} steps, {point.spent_s:.0f} s)",
            err=True,
        )

    return Offline(_request(wish), SystemClock(), tell)


def _request(wish: Wish) -> Request:
    """Return the options as a request; raise InputError for one that is wrong."""
    from cadenza.profiler.measure.environment import parse_list, parse_node  # noqa: PLC0415
    from cadenza.profiler.measure.offline_run import Request  # noqa: PLC0415
    from cadenza.profiler.measure.point import Rule  # noqa: PLC0415

    node = parse_node(wish.node) if wish.node else None
    return Request(
        words=wish.words[1:] if wish.words[0] == "--" else wish.words,
        out=wish.out,
        cpus=() if wish.cpus == "auto" else parse_list(wish.cpus, "--cpus"),
        share=node.cpus / node.gpus if node else None,
        gpus=wish.gpus,
        restart=wish.restart,
        resume=wish.resume,
        cache_gb=parse_list(wish.memory, "--memory") if wish.memory else (),
        turns=wish.turns,
        rule=Rule(within=wish.within / 100, most_s=wish.point_s),
    )


def _conclude(wish: Wish, offline: Offline, state: State) -> Finding:
    """Return what was found."""
    from cadenza.profiler.measure.environment import data_of, model_of, parse_node, this_node  # noqa: PLC0415
    from cadenza.profiler.measure.gpu_use import kind  # noqa: PLC0415
    from cadenza.profiler.profile_builder import Subject, conclude  # noqa: PLC0415
    from cadenza.sidecar.clock import SystemClock  # noqa: PLC0415

    node: Reference = parse_node(wish.node) if wish.node else this_node(offline.gpus)
    dataset = wish.dataset
    if wish.storage_mb_s is not None:
        state.bandwidth["storage_mb_s"] = wish.storage_mb_s
    data = data_of(state, dataset, wish.samples, wish.steps_per_epoch, SystemClock()) if dataset else None
    gpu = kind() if wish.gpu is None else wish.gpu
    subject = Subject(wish.model or model_of(wish.words), offline.gpus, node, gpu, wish.task, data)
    return conclude(state, offline.grid, subject)


def _write(wish: Wish, finding: Finding, state: State) -> None:
    """Write the profile, and the drawing if there is to be one."""
    from cadenza.policies.inputs.profiles import check, write_profiles  # noqa: PLC0415
    from cadenza.profiler.measure.finished_points import write  # noqa: PLC0415
    from cadenza.profiler.plot import png  # noqa: PLC0415

    check(finding.profile, str(wish.out))
    points = ", ".join(f"{cpus:g}" for cpus in sorted(finding.times))
    note = f"measured on {state.host} at {points} CPUs for each GPU; {finding.law_text}"
    write(wish.out, write_profiles({finding.profile.model: finding.profile}, note=note).encode())
    if wish.png is not None:
        write(wish.png, png(finding))


def _tell(wish: Wish, finding: Finding, state: State) -> None:
    """Print the table, the lines for the batch script and the gain."""
    from cadenza.profiler.profile_builder import sbatch, words  # noqa: PLC0415
    from cadenza.slurm_plugin.cli.profile.profile_show import finding_table, report  # noqa: PLC0415

    if wish.as_json:
        emit(report(finding, state, str(wish.out)))
        return
    shown = console()
    shown.print(finding_table(finding, state))
    shown.print(finding.law_text)
    for gb, seconds in state.memory.items():
        computed = finding.cached_s(float(gb))
        said = f", computed {computed * 1000:.1f} ms ({computed / seconds - 1:+.1%})" if computed else ""
        shown.print(f"{gb} GB of cache: measured {seconds * 1000:.1f} ms a step{said}")
    for note in finding.notes:
        shown.print(f"note: {note}")
    shown.print("\n" + "\n".join(sbatch(finding)) + "\n", markup=False)
    shown.print(words(finding))
    click.echo(f"written: {wish.out}" + (f", {wish.png}" if wish.png else ""))
