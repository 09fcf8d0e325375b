"""``cadenza report``: saved simulation results compared, or the effect of sharing, on one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cadenza.policies.core.errors import InputError
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.common import (
    config_option,
    console,
    emit,
    json_option,
    moment,
    say,
    store_or_socket,
)
from cadenza.slurm_plugin.report.compare import compare, plain
from cadenza.slurm_plugin.report.draw import require
from cadenza.slurm_plugin.report.loader import load
from cadenza.slurm_plugin.report.page import render as results_page
from cadenza.slurm_plugin.report.sentences import summary as result_summary
from cadenza.slurm_plugin.report.sheet import Sheet, render
from cadenza.slurm_plugin.service.owner_socket import ask_report
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.views.sharing_sheet import gather, sheet, summary

if TYPE_CHECKING:
    from rich.console import Console


RESULT_OPTIONS = ("baseline",)
SINCE_OPTIONS = ("until", "user", "config")


@click.command("report")
@click.argument("files", metavar="[RESULT.json…]", nargs=-1, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path),
              help="Page to write (default: report.html for results; none with --since).")  # fmt: skip
@click.option("--title", help="Heading of the page.")
@click.option("--baseline", metavar="LABEL", help="Result to compare with (default: the first one given).")
@click.option("--since", metavar="WHEN", help="Show the effect of sharing since then: 30m, 12h, 7d, 2w ago, or a date.")
@click.option("--until", metavar="WHEN", help="End of that time (default: now).")
@click.option("--user", metavar="NAME", help="Show this user only.")
@json_option
@config_option
def command(*, files: tuple[Path, ...], since: str | None, **words: Any) -> None:
    """Compare results of `cadenza simulate --save`, or show the effect of sharing.

    With RESULT.json files: write one HTML page that compares them and needs no network and no script. Results with
    the same label and several seeds become one result with its 95 % interval. Exit code 2 names the file and the key
    of a bad result; exit code 3 means that matplotlib is missing.

    With --since: show GPU hours and waiting by user, and the measured effects of decisions, from the service's store.
    Users who may not read the store get the report on their own jobs from the running service.
    """
    foreign, place = (RESULT_OPTIONS, "RESULT.json files") if since is not None else (SINCE_OPTIONS, "--since")
    if given := [name for name in foreign if words.pop(name) is not None]:
        raise click.UsageError(f"--{given[0]} goes with {place} only")
    if bool(files) == (since is not None):
        raise click.UsageError("name either RESULT.json files or --since")
    if since is None:
        _compare(files, **words)
    else:
        _show_sharing(since, **words)


def _compare(
    files: tuple[Path, ...], *, output: Path | None, title: str | None, baseline: str | None, as_json: bool
) -> None:

    # 1. Read.
    require()
    saved = []
    for file in files:
        try:
            saved.append(load(file.read_bytes(), str(file)))
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror or error}") from None
    # 2. Compare and write the page.
    comparison = compare(saved, baseline)
    page = output or Path("report.html")
    _write(page, results_page(comparison, title or "Simulation results"))
    # 3. Print the same in short.
    if as_json:
        emit("cadenza.report/1", plain(comparison, str(page)))
        return
    for note in comparison.notes:
        say(f"note: {note}", err=True)
    for result in comparison.results:
        say(f"{result.label}: {result_summary(result, comparison)}")
    say(f"written: {page}")


def _show_sharing(since: str, *, until: str | None, output: Path | None, as_json: bool, **options: Any) -> None:

    now_s = SystemClock().now()
    since_s = moment(since, now_s, "--since")
    until_s = now_s if until is None else moment(until, now_s, "--until")
    if until_s <= since_s:
        raise click.UsageError("--until is not after --since")
    user = options["user"]
    source = store_or_socket(options["config"])
    if isinstance(source, StoreReader):
        with source as reader:
            report = gather(reader, since_s, until_s, user)
    else:
        report = ask_report(source, since_s, until_s, user)
    content = sheet(report, options["title"] or "Effect of sharing" + (f" for {user}" if user else ""))
    if output is not None:
        _write(output, render(content))
    if as_json:
        emit("cadenza.sharing/1", report)
        return
    show(content, summary(report), console())
    if output is not None:
        say(f"written: {output}")


def _write(output: Path, page: str) -> None:
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{output}: cannot be written: {error.strerror or error}") from None


def show(content: Sheet, text: str, out: Console) -> None:
    """Print the page's content on a console, without its table of jobs and the columns that are all zero."""
    from rich.table import Table  # noqa: PLC0415 (slow)

    out.print(f"{content.title}: {', '.join(content.facts)}")
    out.print(text)
    for table in content.tables:
        if not table.rows or table.key == "jobs":
            continue
        printed = Table(
            title=table.title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold"
        )
        columns = enumerate(table.columns)
        shown = [at for at, column in columns if column.text or any(row[at].value for row in table.rows)]
        for column in (table.columns[at] for at in shown):
            heading = f"{column.name}\n{column.note}".rstrip().replace(" ", "\n")
            printed.add_column(
                heading, justify="left" if column.text else "right", no_wrap=not column.text, overflow="fold"
            )
        for row in table.rows:
            printed.add_row(*(row[at].text for at in shown))
        out.print(printed)
    for note in content.notes:
        out.print(note, style="dim")
