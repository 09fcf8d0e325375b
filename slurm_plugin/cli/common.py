"""Shared parts of the commands: options, JSON, the console, the store, and moments in time."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cadenza.sidecar.config import DEFAULT_PATH

if TYPE_CHECKING:
    from rich.console import Console

    from cadenza.slurm_plugin.service.owner_socket import Remote
    from cadenza.slurm_plugin.service.store.reader import StoreReader

    NumberType = click.ParamType[int]
else:
    NumberType = click.ParamType  # older releases of click have no parameter there

config_option = click.option(
    "--config", type=click.Path(path_type=Path), help=f"Configuration file (default: {DEFAULT_PATH})."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

NOBODY = (
    "neither cadenzad ({}) nor an agent ({}) can be asked here: jobs run, and Slurm starts them, as usual; look on the "
    "machine of slurmctld or inside a job, or have the admin add a relay: `cadenza keygen HOST`, [service] relays = "
    '["HOST"], and `systemctl enable --now cadenza-relay` on HOST; by munge or SLURM_JWT: {}'
)
MAX_LINE = 8192
PIPE_WIDTH = 180
"""Columns of output that does not go to a terminal, wide enough that nothing is cut."""
UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
TIME_AGO = re.compile(r"(\d+(?:\.\d+)?)([mhdw])")


class JobId(NumberType):
    """The number of a job, or ``ARRAY_TASK`` as squeue prints a task of an array, which Slurm is asked about."""

    name = "JOBID"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the job's own number."""
        text = str(value)
        if re.fullmatch(r"[1-9]\d{0,9}", text, re.ASCII):
            return int(text)
        task = re.fullmatch(r"\d{1,10}_(\d{1,10})", text, re.ASCII)
        if task is None:
            self.fail(f"{text!r} is neither a job's number nor ARRAY_TASK", param, ctx)
        from cadenza.slurm_plugin.gateway.slurm_gateway import TIMEOUT_S, json_of  # noqa: PLC0415
        from cadenza.slurm_plugin.gateway.slurm_json import NotSlurms, read_jobs  # noqa: PLC0415

        try:
            jobs, _ = read_jobs(json_of(("scontrol", "show", "job", text), TIMEOUT_S).encode())
        except NotSlurms as error:
            self.fail(f"scontrol show job {text}: {error}", param, ctx)
        numbers = [int(job["id"]) for job in jobs if job["array_task_id"] == int(task[1])]
        if not numbers:
            self.fail(f"Slurm shows no job {text}", param, ctx)
        return numbers[0]


SCHEMAS = (
    "cadenza.config/1", "cadenza.doctor/1", "cadenza.leftovers/1", "cadenza.move/1",
    "cadenza.plan/1", "cadenza.profile-pair/1", "cadenza.profile-run/1", "cadenza.profiles/1",
    "cadenza.release/1", "cadenza.report/1", "cadenza.sharing/1", "cadenza.simulate/1", "cadenza.sweep/1",
    "cadenza.sweep-progress/1", "cadenza.top/1", "cadenza.watch/1", "cadenza.whatif/1", "cadenza.why/1",
)  # fmt: skip
"""Names and versions of what ``--json`` prints. A key that goes or changes its meaning raises the number."""


def emit(schema: str, value: Any) -> None:
    """Print one value as one line of JSON, in ASCII where a terminal would obey a character.

    Its first key is ``schema``, one of ``SCHEMAS``; a list is under ``rows``.
    """
    plain = msgspec.to_builtins(value)
    fields = plain if isinstance(plain, dict) else {"rows": plain}
    text = msgspec.json.encode(
        {"schema": schema, **{key: one for key, one in fields.items() if key != "schema"}}
    ).decode()
    click.echo(text if text.isprintable() else json.dumps(json.loads(text), ensure_ascii=True, separators=(",", ":")))


def say(*lines: str, err: bool = False, length: int = MAX_LINE) -> None:
    """Print each text as one line of at most ``length`` characters; what a terminal would obey in it is replaced."""
    from cadenza.policies.core.text import printable  # noqa: PLC0415 (not needed for --help)

    for line in lines:
        click.echo(printable(line, length), err=err)


def console() -> Console:
    """Return a console on standard output; without color unless that is a terminal."""
    from cadenza.slurm_plugin.terminal import Terminal  # noqa: PLC0415 (slow, and not needed for JSON)

    plain = Terminal()
    return plain if plain.is_terminal else Terminal(width=PIPE_WIDTH)


def open_store(config: Path | None) -> StoreReader:
    """Open the configured store; raise StoreError or ConfigError."""
    from cadenza.slurm_plugin.service.settings import load_settings  # noqa: PLC0415
    from cadenza.slurm_plugin.service.store.reader import StoreReader  # noqa: PLC0415

    return StoreReader(Path(load_settings(config).service.store))


def store_or_socket(config: Path | None) -> StoreReader | Path | Remote:
    """Open the store, or return what a user who may not read it can ask; raise StoreError if there is nothing.

    That is the service's socket, that of this host's agent, or the service's port.
    """
    from cadenza.sidecar.agent_settings import load_settings as load_agent  # noqa: PLC0415
    from cadenza.slurm_plugin.errors import StoreError  # noqa: PLC0415
    from cadenza.slurm_plugin.service.settings import load_settings  # noqa: PLC0415

    settings = load_settings(config)
    store, socket = settings.service.store, Path(settings.expert.jobs_socket)
    try:
        return open_store(config)
    except StoreError as error:
        here = load_agent(config or DEFAULT_PATH)
        paths = socket, here.questions
        for path in paths:
            if path.exists():
                return path
        if os.access(store, os.R_OK):
            raise
        remote = _remote(here.expert.question_port, here.agent.service, Path(here.agent.keys))
        if isinstance(remote, str):
            raise StoreError(f"{error}; {NOBODY.format(*paths, remote)}") from None
        return remote


def _remote(port: int, addresses: str, keys: Path) -> Remote | str:
    """Return the service of another machine, or the sentence that says what is missing to ask it."""
    from cadenza.slurm_plugin.service.agents.curve_keys import PUBLIC, SERVICE, public_key  # noqa: PLC0415
    from cadenza.slurm_plugin.service.credentials import missing  # noqa: PLC0415
    from cadenza.slurm_plugin.service.question_port import RemoteService  # noqa: PLC0415

    if not port:
        return "add [expert] question_port = 6852, here and on the controller"
    hosts = [address.rpartition(":")[0] for address in addresses.split(",") if address.startswith("tcp://")]
    if not hosts:
        return 'add [agent] service = "tcp://CONTROLLER:6850"'
    path = keys / f"{SERVICE}{PUBLIC}"
    if not os.access(path, os.R_OK):
        return f"copy the controller's {path} to this host, which all may read"
    return missing() or RemoteService(tuple(f"{host}:{port}" for host in hosts), public_key(path))


def moment(text: str, now_s: float, option: str) -> float:
    """Return a time ago or a date in seconds since the epoch; raise click.BadParameter, exit code 2, for other text.

    >>> moment("2h", 10000.0, "--since"), moment("1970-01-02T00:00+00:00", 0.0, "--until")
    (2800.0, 86400.0)
    """
    ago = TIME_AGO.fullmatch(text)
    if ago is not None:
        return now_s - float(ago[1]) * UNITS_S[ago[2]]
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r}: a time ago (30m, 12h, 7d, 2w) or a date (2026-11-15, 2026-11-15T08:00)", param_hint=option
        ) from None
