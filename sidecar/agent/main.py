"""``cadenza-agent``: the command that starts the daemon."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import msgspec

from cadenza.policies.core.errors import CadenzaError
from cadenza.sidecar.agent.daemon import Daemon
from cadenza.sidecar.agent.inventory import HEADER, jobs_here
from cadenza.sidecar.agent.log_filter import ForeignText
from cadenza.sidecar.agent.relay import serve_relay
from cadenza.sidecar.agent_settings import load_settings
from cadenza.sidecar.config import DEFAULT_PATH
from cadenza.sidecar.daemon_log import set_up_logging


def _version() -> str:
    """Return the version of the agent's wheel or of the whole tree, or "unknown" in a bare checkout."""
    for distribution in ("cadenza-agent", "cadenza"):
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return "unknown"


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_PATH,
    show_default=True,
    help="Settings in TOML; files in conf.d next to it are merged.",
)
@click.option("--jobs", is_flag=True, help="Print the jobs on this host, of all lanes, and their processes, then exit.")
@click.option("--relay", is_flag=True, help="Only pass on what users of this host ask the service, as on a login node.")
@click.option("--json", "as_json", is_flag=True, help="With --jobs: print JSON.")
@click.option("--debug", is_flag=True, help="Log more, and show where an error came from.")
@click.version_option(_version(), prog_name="cadenza-agent")
def main(config: Path, *, jobs: bool, relay: bool, as_json: bool, debug: bool) -> None:
    """Run the Cadenza agent of this host: it registers jobs, keeps GPU leases and passes orders to jobs.

    Exit codes: 0 stopped by a signal, 1 failed, 2 bad settings or keys, 3 the machine lacks something.
    """
    set_up_logging("cadenza-agent", debug=debug).addFilter(ForeignText())
    try:
        if jobs:
            found = jobs_here(load_settings(config))
            rows = {"schema": "cadenza.jobs-here/1", "rows": found}
            click.echo(msgspec.json.encode(rows).decode() if as_json else "\n".join((HEADER, *map(str, found))))
            return
        if relay:
            serve_relay(load_settings(config))
        # its own uid may register jobs besides root, so that it can be tried without root
        Daemon(load_settings(config), _version(), frozenset({0, os.geteuid()})).run()
    except CadenzaError as error:
        if debug:
            logging.getLogger(__name__).exception("stopped")
        click.echo(f"cadenza-agent: {error}", err=True)
        sys.exit(error.exit_code)
