"""``cadenza report``: saved simulation results, compared on one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cadenza.slurm_plugin.cli.common import emit, json_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cadenza.slurm_plugin.report.model import Comparison, Loaded


@click.command("report")
@click.argument("files", metavar="RESULT.json…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", default="report.html", show_default=True, type=click.Path(path_type=Path), help="Page to write."
)
@click.option("--title", default="Simulation results", show_default=True, help="Its heading.")
@click.option("--baseline", metavar="LABEL", help="Result to compare with (default: the first one given).")
@json_option
def command(*, files: tuple[Path, ...], output: Path, title: str, baseline: str | None, as_json: bool) -> None:
    """Compare results of `cadenza simulate --save` on one HTML page.

    The page needs no network and no script. Results of one label with several seeds become one, with its
    95 % interval. Exit code 2 names the file and the key of a bad result, 3 a missing matplotlib.
    """
    from cadenza.slurm_plugin.report.compare import compare  # noqa: PLC0415 (slow, like all below)
    from cadenza.slurm_plugin.report.draw import require  # noqa: PLC0415
    from cadenza.slurm_plugin.report.page import render  # noqa: PLC0415

    require()
    comparison = compare(list(_loaded(files)), baseline)
    _write(output, render(comparison, title))
    _tell(comparison, output, as_json=as_json)


def _loaded(files: Sequence[Path]) -> Iterator[Loaded]:
    from cadenza.policies.errors import InputError  # noqa: PLC0415
    from cadenza.slurm_plugin.report.gather import load  # noqa: PLC0415

    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror or error}") from None
        yield load(data, str(file))


def _write(output: Path, page: str) -> None:
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{output}: cannot be written: {error.strerror or error}") from None


def _tell(comparison: Comparison, output: Path, *, as_json: bool) -> None:
    from cadenza.slurm_plugin.report.sentences import summary  # noqa: PLC0415
    from cadenza.slurm_plugin.report.summary import plain  # noqa: PLC0415

    if as_json:
        emit(plain(comparison, str(output)))
        return
    for note in comparison.notes:
        click.echo(f"note: {note}", err=True)
    for result in comparison.results:
        click.echo(f"{result.label}: {summary(result, comparison)}")
    click.echo(f"written: {output}")
