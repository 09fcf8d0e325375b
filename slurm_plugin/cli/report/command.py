"""``cadenza report``: saved simulation results compared, or what sharing brought, on one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cadenza.slurm_plugin.cli.common import config_option, console, emit, json_option, moment, open_store, store_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cadenza.slurm_plugin.report.page_model import Comparison, Loaded
    from cadenza.slurm_plugin.service.accounting.sharing_report import SharingReport


@click.command("report")
@click.argument("files", metavar="[RESULT.json…]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path),
    help="Page to write (default: report.html for results; none with --since).",
)  # fmt: skip
@click.option("--title", help="Its heading.")
@click.option("--baseline", metavar="LABEL", help="Result to compare with (default: the first one given).")
@click.option("--since", metavar="WHEN", help="What sharing brought since then: 30m, 12h, 7d, 2w ago, or a date.")
@click.option("--until", metavar="WHEN", help="Until then (default: now).")
@click.option("--user", metavar="NAME", help="To this user only.")
@json_option
@store_option
@config_option
def command(*, files: tuple[Path, ...], since: str | None, **words: Any) -> None:
    """Compare results of `cadenza simulate --save`, or tell what sharing brought.

    With RESULT.json files: one HTML page that compares them, which needs no network and no script. Results of one
    label with several seeds become one, with its 95 % interval. Exit code 2 names the file and the key of a bad
    result, 3 a missing matplotlib.

    With --since: GPU hours and waiting by user, and what decisions measured, from the service's store.
    """
    unused, place = (("baseline",), "RESULT.json files") if since is not None else (LIVE, "--since")
    if given := [name for name in unused if words.pop(name) is not None]:
        raise click.UsageError(f"--{given[0]} goes with {place} only")
    if bool(files) == (since is not None):
        raise click.UsageError("name either RESULT.json files or --since")
    if since is None:
        _results(files, **words)
    else:
        _sharing(since, **words)


LIVE = ("until", "user", "store", "config")
"""Options of ``--since``."""


def _results(
    files: tuple[Path, ...], *, output: Path | None, title: str | None, baseline: str | None, as_json: bool
) -> None:
    from cadenza.slurm_plugin.report.compare import compare  # noqa: PLC0415 (slow, like all below)
    from cadenza.slurm_plugin.report.draw import require  # noqa: PLC0415
    from cadenza.slurm_plugin.report.page import render  # noqa: PLC0415

    require()
    comparison = compare(list(_loaded(files)), baseline)
    page = output or Path("report.html")
    _write(page, render(comparison, title or "Simulation results"))
    _tell(comparison, page, as_json=as_json)


def _sharing(since: str, *, output: Path | None, title: str | None, as_json: bool, **words: Any) -> None:
    from cadenza.slurm_plugin.cli.report.sharing import sheet, show, summary  # noqa: PLC0415
    from cadenza.slurm_plugin.report.sheet import render  # noqa: PLC0415

    user = words["user"]
    found = _report(since, **words)
    content = sheet(found, title or "What sharing brought" + (f" to {user}" if user else ""))
    if output is not None:
        _write(output, render(content))
    if as_json:
        emit(found)
        return
    show(content, summary(found), console())
    if output is not None:
        click.echo(f"written: {output}")


def _report(
    since: str, *, until: str | None, user: str | None, store: Path | None, config: Path | None
) -> SharingReport:
    from cadenza.sidecar.clock import SystemClock  # noqa: PLC0415
    from cadenza.slurm_plugin.cli.report.sharing import gather  # noqa: PLC0415

    now_s = SystemClock().now()
    since_s = moment(since, now_s, "--since")
    until_s = now_s if until is None else moment(until, now_s, "--until")
    if until_s <= since_s:
        raise click.UsageError("--until is not after --since")
    with open_store(store, config) as reader:
        return gather(reader, since_s, until_s, user)


def _loaded(files: Sequence[Path]) -> Iterator[Loaded]:
    from cadenza.policies.core.errors import InputError  # noqa: PLC0415
    from cadenza.slurm_plugin.report.loader import load  # noqa: PLC0415

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
    from cadenza.slurm_plugin.report.json_summary import plain  # noqa: PLC0415
    from cadenza.slurm_plugin.report.sentences import summary  # noqa: PLC0415

    if as_json:
        emit(plain(comparison, str(output)))
        return
    for note in comparison.notes:
        click.echo(f"note: {note}", err=True)
    for result in comparison.results:
        click.echo(f"{result.label}: {summary(result, comparison)}")
    click.echo(f"written: {output}")
