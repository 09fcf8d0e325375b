"""``cadenza profile pair``: two commands alone and together, as a row for packing."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from cadenza.slurm_plugin.cli.common import emit, json_option
from cadenza.slurm_plugin.cli.profile.command import end_on_sigterm


@click.command("pair")
@click.argument("first")
@click.argument("second")
@click.option("--models", metavar="A,B", help="Names of the two (default: their scripts').")
@click.option("--within", default=2.0, show_default=True, help="Half of the 95 % interval, per cent of the mean.")
@click.option("--point-s", default=60.0, show_default=True, help="Most seconds for each of the four measurements.")
@click.option("-o", "--out", default="pairs.csv", show_default=True, type=click.Path(path_type=Path))
@json_option
def command(*, first: str, second: str, models: str | None, out: Path, as_json: bool, **limits: Any) -> None:
    """Measure two commands on the same GPU and CPUs, each given as one word: alone, then together.

    The row is added to a file that `cadenza simulate --interference` reads, in place of an older one of the two.
    """
    from cadenza.profiler.measure.finished_points import write  # noqa: PLC0415
    from cadenza.profiler.measure.pairs import Side, measure  # noqa: PLC0415
    from cadenza.profiler.measure.point import Rule  # noqa: PLC0415
    from cadenza.sidecar.clock import SystemClock  # noqa: PLC0415 (slow, like all below)

    both = [tuple(shlex.split(text)) for text in (first, second)]
    sides = [Side(name, words) for name, words in zip(_names(models, both), both, strict=True)]
    rule = Rule(within=limits["within"] / 100, most_s=limits["point_s"])
    others = _others(out, sides[0].model, sides[1].model)
    end_on_sigterm()
    pair = measure(sides, out.with_suffix(".log"), SystemClock(), rule)
    write(out, "\n".join([*others, pair.row(), ""]).encode())
    if as_json:
        emit({**pair._asdict(), "speeds": pair.speeds, "gain": pair.gain, "written": str(out)})
        return
    for name, speed, alone, both_s in zip(pair[:2], pair.speeds, pair.alone_s, pair.together_s, strict=True):
        times = f"{alone * 1000:.1f} ms a step alone, {both_s * 1000:.1f} ms together"
        click.echo(f"{name}: {times} ({speed:.0%} of its speed)")
    verdict = "packing pays" if pair.gain > 1 else "taking turns is better"
    click.echo(f"together {pair.gain:.2f}x the throughput of taking turns: {verdict}\nwritten: {out}")


def _names(models: str | None, both: list[tuple[str, ...]]) -> list[str]:
    """Return the two names; raise InputError unless there are two words and two names."""
    from cadenza.policies.core.errors import InputError  # noqa: PLC0415
    from cadenza.profiler.measure.environment import model_of  # noqa: PLC0415

    if not all(both):
        raise InputError("each of the two commands must have a word at least")
    names = models.split(",") if models else [model_of(words) for words in both]
    if len(names) != 2 or not all(names):  # noqa: PLR2004
        raise InputError(f"--models {models!r}: must be two names with a comma between them")
    return names


def _others(out: Path, first: str, second: str) -> list[str]:
    """Return the table's lines without those of this pair; raise InputError, before anything runs, if it is none."""
    from cadenza.policies.core.errors import InputError  # noqa: PLC0415
    from cadenza.policies.inputs.interference import read_interference  # noqa: PLC0415
    from cadenza.profiler.measure.pairs import COLUMNS  # noqa: PLC0415

    try:
        text = out.read_text(encoding="utf-8") if out.exists() else COLUMNS
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{out}: cannot be read: {error}") from None
    read_interference(text, str(out))
    lines = text.splitlines()
    if lines[0] != COLUMNS:
        raise InputError(f"{out}: its first line must be {COLUMNS}, in this order, for rows to be added")
    return [line for line in lines if line.split(",")[:2] not in ([first, second], [second, first])]
